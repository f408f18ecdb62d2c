// The Python module jax_mok._core: the XLA FFI handlers as capsules, the CPU engine's settings and
// counters, and the routing plan. Importing it starts no backend and loads no other library.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "bindings/plan_bindings.h"
#include "cpu/blas.h"
#include "cpu/thread_pool.h"
#include "ffi/cpu_handlers.h"

namespace nb = nanobind;

namespace {

template <typename T>
nb::capsule capsule(T* pointer) {
  return nb::capsule(reinterpret_cast<const void*>(pointer));
}

// What jax.ffi.register_ffi_target takes for a handler with a stage besides execute.
nb::dict stages(XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute) {
  nb::dict result;
  result["instantiate"] = capsule(instantiate);
  result["execute"] = capsule(execute);
  return result;
}

nb::dict cpu_handlers() {
  nb::dict result;
  result["jax_mok_forward"] = stages(JaxMokMeetingInstantiate, JaxMokForwardCpu);
  result["jax_mok_backward"] = stages(JaxMokMeetingInstantiate, JaxMokBackwardCpu);
  result["jax_mok_check"] = capsule(JaxMokCheckCpu);
  return result;
}

nb::dict meeting_type() {
  nb::dict result;
  result["type_id"] = capsule(jax_mok::ffi::meeting_type_id());
  result["type_info"] = capsule(jax_mok::ffi::meeting_type_info());
  return result;
}

void load_blas(const std::string& path) {
  const std::string problem = jax_mok::cpu::load_blas(path);
  if (!problem.empty()) throw std::runtime_error(problem);
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native part of jax_mok: XLA FFI handlers and the routing plan.";
  m.attr("built_with_jaxlib") = JAX_MOK_JAXLIB_VERSION;
#ifdef JAX_MOK_NO_CUDA
  m.attr("why_no_cuda") = JAX_MOK_NO_CUDA;  // there is no jax_mok._cuda_core
#else
  m.attr("why_no_cuda") = "";
#endif
  m.def("cpu_handlers", &cpu_handlers, "XLA FFI handlers for the host platform, by target name");
  m.def("meeting_type", &meeting_type, "Type of the state that the CPU handlers keep");
  m.def("load_blas", &load_blas, nb::arg("path"), "Loads OpenBLAS; RuntimeError if it cannot");
  m.def("set_num_threads", &jax_mok::cpu::set_num_threads, nb::arg("num_threads"));
  m.def("forward_calls", &jax_mok::ffi::forward_calls);
  m.def("backward_calls", &jax_mok::ffi::backward_calls);
  jax_mok::bind_plan(m);
}
