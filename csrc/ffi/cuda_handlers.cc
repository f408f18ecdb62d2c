// The CUDA handlers of both passes, and of the benchmark's exchange of rows: decode, check, launch;
// no arithmetic here.
//
// Prepare asks XLA for the communicator of the ranks and loads every kernel, Initialize makes the
// peer heap, Execute launches. Execute never allocates, synchronises or loads anything: a peer's
// kernel may be waiting for ours by then, and the driver for the peer's.
//
// What others do in the same process counts too: a cudaFree, or the first use of a kernel, by any
// host thread can wait for a kernel of one device with the driver's lock held, so that nobody can
// launch on another device what that kernel waits for. So the threads of a group's devices meet
// between the stages of a call: no kernel waits for one that is not enqueued yet.
#include "ffi/cuda_handlers.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "cuda/peer_memory.h"
#include "ffi/cuda_arguments.h"
#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mok::ffi {

namespace xffi = xla::ffi;

namespace {

struct Communicators : xffi::internal::CommunicatorContextBase<xffi::internal::ErrorPolicy> {
  using CommunicatorContextBase::CommunicatorContextBase;
};

// Context: XLA's communicators, where the runtime offers them.
struct MaybeCommunicators {};

}  // namespace
}  // namespace jax_mok::ffi

namespace xla::ffi {

// XLA's own decoding of an extension wants the very minor version it was compiled with, and fails
// where there is none, also for calls that have no peers.
template <>
struct CtxDecoding<jax_mok::ffi::MaybeCommunicators> {
  using Type = std::optional<jax_mok::ffi::Communicators>;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_InvokeContext* context,
                                    DiagnosticEngine&) {
    XLA_FFI_InvokeContext_FindExtension_Args args = {};
    args.struct_size = XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE;
    args.ctx = context;
    args.extension_type = XLA_FFI_Extension_Collectives;
    if (XLA_FFI_Error* error = api->XLA_FFI_InvokeContext_FindExtension(&args)) {
      internal::DestroyError(api, error);
      return Type();
    }
    if (args.extension == nullptr ||
        args.extension->id.major_version != XLA_FFI_Extension_Collectives_MajorVersion ||
        args.extension->id.minor_version < XLA_FFI_Extension_Collectives_MinorVersion)
      return Type();
    return Type(jax_mok::ffi::Communicators(
        api, reinterpret_cast<const XLA_FFI_Collectives_Extension*>(args.extension)));
  }
};

}  // namespace xla::ffi

namespace jax_mok::ffi {
namespace {

constexpr int64_t kCommunicationId = 0;

// How long a host thread waits for those of the other devices. They all run at once; if one has
// failed, XLA ends the process 10 s later unless all others have returned.
constexpr double kMeetingSeconds = 5.0;

xffi::Error failed(const std::string& text) {
  return xffi::Error(xffi::ErrorCode::kFailedPrecondition, "jax_mok: " + text);
}

xffi::Error no_communicators() {
  return failed(
      "this XLA offers no communicator to custom calls: several GPUs need jax 0.11.2 or newer, "
      "with the plugin that jax[cuda13] installs");
}

// Once for every device: later calls must not touch the driver, see above.
xffi::Error load_kernels() {
  static std::mutex mutex;
  static std::set<int> loaded;
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (e == cudaSuccess && loaded.count(device) != 0) return xffi::Error::Success();
  }
  if (e == cudaSuccess) e = cuda::prepare_module();
  if (e == cudaSuccess) e = cuda::prepare_exchange();
  if (e == cudaSuccess) {
    std::lock_guard<std::mutex> lock(mutex);
    loaded.insert(device);
    return xffi::Error::Success();
  }
  cudaGetLastError();
  return failed(std::string("the kernels cannot run on this GPU, they are for Hopper (compute "
                            "capability 9.0): ") +
                cudaGetErrorString(e));
}

template <typename Pass>
std::atomic<int64_t> num_launches{0};

// The heap's need, its communicator included.
template <typename Pass>
xffi::ErrorOr<cuda::HeapNeed> heap_need(const CudaCall<Pass>& call,
                                        std::optional<Communicators>& communicators, int64_t run) {
  cuda::HeapNeed need;
  need.num_ranks = call.facts.num_ranks;
  need.num_virtual_ranks = call.facts.num_virtual_ranks;
  need.bytes = Pass::heap_bytes(call.facts);
  need.run = run;
  if (!call.has_peers()) return need;
  if (!communicators) return xffi::Unexpected(no_communicators());
  const auto comm =
      communicators->GetCommunicator(xffi::GroupMode::kFlattenedId, call.groups, kCommunicationId);
  if (comm.has_error()) return xffi::Unexpected(comm.error());
  need.comm = reinterpret_cast<cuda::NcclComm*>(comm.value());
  return need;
}

template <typename Pass>
xffi::Error prepare(std::optional<Communicators> communicators, xffi::Dictionary attributes) {
  const auto call = decode_call<Pass>(attributes);
  if (call.has_error()) return call.error();
  if (xffi::Error error = load_kernels(); error.failure()) return error;
  if (!call->has_peers()) return xffi::Error::Success();
  if (!communicators) return no_communicators();
  return communicators->RequestCommunicator(xffi::GroupMode::kFlattenedId, call->groups,
                                            kCommunicationId);
}

template <typename Pass>
xffi::Error initialize(std::optional<Communicators> communicators, xffi::RunId run,
                       xffi::Dictionary attributes) {
  const auto call = decode_call<Pass>(attributes);
  if (call.has_error()) return call.error();
  // Once more, in case XLA prepares a program on one device for all of them.
  if (xffi::Error error = load_kernels(); error.failure()) return error;
  const auto need = heap_need(*call, communicators, run.run_id);
  if (need.has_error()) return need.error();
  const cuda::PeerHeap* heap = nullptr;
  const std::string problem = cuda::make_heap(*need, &heap);
  return problem.empty() ? xffi::Error::Success() : failed(problem);
}

// Enqueues the stages of a call, in step with the other devices of the group in this process.
// `launch` takes a stage and its stream.
template <typename Launch>
cudaError_t in_stages(const cuda::PeerHeap& heap, uint64_t call_id, double seconds,
                      cudaStream_t stream, Launch launch) {
  using cuda::CallStage;
  cudaError_t problem = cudaSuccess;
  const auto then = [&](auto step) {
    if (problem == cudaSuccess) problem = step();
  };
  const auto enqueue = [&](CallStage stage, cudaStream_t on) {
    then([&] { return launch(stage, on); });
  };
  // After a failure too: the others must not wait for us.
  const auto meet = [&](int point) {
    if (heap.meeting != nullptr) heap.meeting->pass(heap.member, call_id, point, seconds);
  };
  const bool has_peers = heap.copy_stream != nullptr;
  const cudaStream_t beside = has_peers ? heap.copy_stream : stream;
  enqueue(CallStage::kPublish, stream);
  if (has_peers) {
    then([&] { return cudaEventRecord(heap.published, stream); });
    then([&] { return cudaStreamWaitEvent(beside, heap.published, 0); });
  }
  enqueue(CallStage::kCopy, beside);
  // Whatever fails: XLA reuses what is copied once `stream` has gone on.
  const auto always = [&](cudaError_t result) {
    if (problem == cudaSuccess) problem = result;
  };
  if (has_peers) always(cudaEventRecord(heap.copied, beside));
  meet(0);
  enqueue(CallStage::kPlan, stream);
  if (has_peers) always(cudaStreamWaitEvent(stream, heap.copied, 0));
  enqueue(CallStage::kWork, stream);
  meet(1);
  enqueue(CallStage::kSum, stream);
  return problem;
}

template <typename Pass>
xffi::Error execute(cudaStream_t stream, std::optional<Communicators> communicators,
                    xffi::RunId run, xffi::RemainingArgs operands, xffi::RemainingRets results,
                    xffi::Dictionary attributes) {
  const auto call = decode_call<Pass>(attributes);
  if (call.has_error()) return call.error();
  const auto need = heap_need(*call, communicators, run.run_id);
  if (need.has_error()) return need.error();
  const cuda::PeerHeap* heap = nullptr;
  if (std::string problem = cuda::find_heap(*need, &heap); !problem.empty()) return failed(problem);

  if (call->has_peers() && heap->rank == call->failing_rank)
    return failed("a test asked for this failure");

  typename Pass::Buffers buffers;
  if (xffi::Error error = decode_buffers(*call, operands, results, &buffers); error.failure())
    return error;
  for (int r = 0; r < call->facts.num_ranks; ++r) buffers.heaps[r] = heap->addresses[r];
  buffers.status = heap->status;
  buffers.call_id = cuda::next_call_id(*heap, run.run_id);
  const auto launch = [&](cuda::CallStage stage, cudaStream_t on) {
    return Pass::launch(stage, call->facts, heap->rank, buffers, on, call->hooks);
  };
  const double seconds = std::min(call->facts.start_timeout_seconds, kMeetingSeconds);
  const cudaError_t e = in_stages(*heap, buffers.call_id, seconds, stream, launch);
  if (e == cudaSuccess) {
    num_launches<Pass>.fetch_add(1, std::memory_order_relaxed);
    return xffi::Error::Success();
  }
  cudaGetLastError();
  return failed(std::string("the launch failed: ") + cudaGetErrorString(e));
}

// No exception may reach XLA, which is built without them.
template <typename F>
xffi::Error guarded(F&& body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return xffi::Error::Internal(std::string("jax_mok: ") + e.what());
  }
}

template <typename Pass>
xffi::Error prepare_guarded(std::optional<Communicators> c, xffi::Dictionary a) {
  return guarded([&] { return prepare<Pass>(c, a); });
}
template <typename Pass>
xffi::Error initialize_guarded(std::optional<Communicators> c, xffi::RunId r, xffi::Dictionary a) {
  return guarded([&] { return initialize<Pass>(c, r, a); });
}
template <typename Pass>
xffi::Error execute_guarded(cudaStream_t s, std::optional<Communicators> c, xffi::RunId r,
                            xffi::RemainingArgs in, xffi::RemainingRets out, xffi::Dictionary a) {
  return guarded([&] { return execute<Pass>(s, c, r, in, out, a); });
}

auto bind_prepare() { return xffi::Ffi::BindPrepare().Ctx<MaybeCommunicators>().Attrs(); }
auto bind_initialize() {
  return xffi::Ffi::BindInitialize().Ctx<MaybeCommunicators>().Ctx<xffi::RunId>().Attrs();
}
auto bind_execute() {
  return xffi::Ffi::Bind()
      .Ctx<xffi::PlatformStream<cudaStream_t>>()
      .Ctx<MaybeCommunicators>()
      .Ctx<xffi::RunId>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace

int64_t cuda_forward_calls() { return num_launches<ForwardPass>.load(); }
int64_t cuda_backward_calls() { return num_launches<BackwardPass>.load(); }

}  // namespace jax_mok::ffi

// Without the trait that lets XLA capture them in command buffers: the host threads could not meet,
// since each decides by itself when to capture again, and captured commands are ordered by the
// buffers they touch, of which XLA does not know the heap that two calls share.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokForwardCudaPrepare,
                              jax_mok::ffi::prepare_guarded<jax_mok::ffi::ForwardPass>,
                              jax_mok::ffi::bind_prepare());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokForwardCudaInitialize,
                              jax_mok::ffi::initialize_guarded<jax_mok::ffi::ForwardPass>,
                              jax_mok::ffi::bind_initialize());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokForwardCuda,
                              jax_mok::ffi::execute_guarded<jax_mok::ffi::ForwardPass>,
                              jax_mok::ffi::bind_execute());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokBackwardCudaPrepare,
                              jax_mok::ffi::prepare_guarded<jax_mok::ffi::BackwardPass>,
                              jax_mok::ffi::bind_prepare());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokBackwardCudaInitialize,
                              jax_mok::ffi::initialize_guarded<jax_mok::ffi::BackwardPass>,
                              jax_mok::ffi::bind_initialize());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokBackwardCuda,
                              jax_mok::ffi::execute_guarded<jax_mok::ffi::BackwardPass>,
                              jax_mok::ffi::bind_execute());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokExchangeCudaPrepare,
                              jax_mok::ffi::prepare_guarded<jax_mok::ffi::ExchangePass>,
                              jax_mok::ffi::bind_prepare());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokExchangeCudaInitialize,
                              jax_mok::ffi::initialize_guarded<jax_mok::ffi::ExchangePass>,
                              jax_mok::ffi::bind_initialize());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokExchangeCuda,
                              jax_mok::ffi::execute_guarded<jax_mok::ffi::ExchangePass>,
                              jax_mok::ffi::bind_execute());
