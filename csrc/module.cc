// The Python module jax_mok._core: the addresses of the XLA FFI handlers as capsules, facts of this build, and the
// routing plan. It starts no backend and loads nothing else.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "Native part of jax_mok: XLA FFI handlers and the routing plan.";
  m.attr("built_with_jaxlib") = JAX_MOK_JAXLIB_VERSION;
}
