// Makes heaps, agrees on them with the other ranks, and keeps them until the process ends.
#include "cuda/peer_memory.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "cuda/layout.h"

namespace jax_mok::cuda {
namespace {

constexpr size_t kGranule = size_t{2} << 20;  // what the driver hands out memory in
constexpr int kVotes = 8;                     // numbers that the ranks agree on at a time

std::string text(const char* what, cudaError_t error) {
  return std::string(what) + " failed: " + cudaGetErrorString(error);
}

// Spreads numbers over all 64 bits, one to one.
uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

std::string mebibytes(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::string current_device(int* device) {
  const cudaError_t e = cudaGetDevice(device);
  return e == cudaSuccess ? "" : text("cudaGetDevice", e);
}

// What one device needs while it makes a heap: a stream of its own (XLA's may be capturing, and the
// legacy stream would wait for them) and a few numbers that NCCL can reduce.
struct Workshop {
  cudaStream_t stream = nullptr;
  int64_t* votes = nullptr;         // host memory
  int64_t* device_votes = nullptr;  // `votes` itself where the device has no memory left at all

  std::string open() {
    if (cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))
      return text("cudaStreamCreate", e);
    if (cudaError_t e = cudaHostAlloc(reinterpret_cast<void**>(&votes), kVotes * sizeof(int64_t),
                                      cudaHostAllocMapped | cudaHostAllocPortable))
      return text("cudaHostAlloc", e);
    if (cudaMalloc(reinterpret_cast<void**>(&device_votes), kVotes * sizeof(int64_t)) !=
        cudaSuccess) {
      cudaGetLastError();
      device_votes = votes;
    }
    return "";
  }
  ~Workshop() {
    if (device_votes != votes) cudaFree(device_votes);
    if (votes != nullptr) cudaFreeHost(votes);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }

  std::string wait() const {
    const cudaError_t e = cudaStreamSynchronize(stream);
    return e == cudaSuccess ? "" : text("cudaStreamSynchronize", e);
  }

  // The smallest of every number over all ranks, in `values`.
  std::string smallest(NcclComm* comm, std::vector<int64_t>* values) const {
    const NcclLibrary& nccl = nccl_library();
    const size_t count = values->size(), bytes = count * sizeof(int64_t);
    std::copy(values->begin(), values->end(), votes);
    cudaMemcpyAsync(device_votes, votes, bytes, cudaMemcpyDefault, stream);
    const int result = nccl.AllReduce(device_votes, device_votes, count, NcclLibrary::kInt64,
                                      NcclLibrary::kMin, comm, stream);
    std::string problem = nccl.finish(result, comm, "ncclAllReduce");
    cudaMemcpyAsync(votes, device_votes, bytes, cudaMemcpyDefault, stream);
    if (problem.empty()) problem = wait();
    std::copy(votes, votes + count, values->begin());
    return problem;
  }
};

// All heaps of one device in one group. What it holds is guarded by the registry's mutex, which is
// never held while waiting; `making` is held while a heap is made, which waits for the other ranks.
struct Domain {
  std::mutex making;
  std::vector<std::unique_ptr<PeerHeap>> heaps;  // each larger than the one before
  std::map<size_t, PeerHeap*> heap_of_need;

  // The heap for calls that need `bytes`, once it is settled; null before.
  PeerHeap* settle(size_t bytes) {
    PeerHeap*& found = heap_of_need[bytes];
    if (found == nullptr && !heaps.empty() && heaps.back()->bytes >= bytes)
      found = heaps.back().get();
    if (found != nullptr) found->used = std::max(found->used, bytes);
    return found;
  }
};

// Two communicators of a process that are alike in all this are one and the same, or the older one
// is gone.
using DomainKey = std::tuple<int, NcclComm*, int, int>;  // device, communicator, ranks, virtual

// Never destroyed: XLA's threads may outlive static destructors.
struct Registry {
  std::mutex mutex;
  std::map<DomainKey, std::unique_ptr<Domain>> domains;
  std::map<int64_t, std::shared_ptr<LocalMeeting>> meetings;  // by the name of the heap's group
};
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

Domain& domain(int device, const HeapNeed& need) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::unique_ptr<Domain>& found =
      registry().domains[{device, need.comm, need.num_ranks, need.num_virtual_ranks}];
  if (found == nullptr) found = std::make_unique<Domain>();
  return *found;
}

std::string no_room(const PeerHeap& heap) {
  size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  return "the peer heap of " + mebibytes(heap.bytes * heap.num_virtual_ranks) +
         " does not fit beside XLA's memory pool on GPU " + std::to_string(heap.device) + " (" +
         mebibytes(free_bytes) + " of " + mebibytes(total_bytes) +
         " are free). Lower the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION (0.75 if not "
         "set), or the number of tokens of a call";
}

// Memory of this rank with its control words cleared, and its status words.
std::string allocate(PeerHeap* heap, NcclComm* comm, const Workshop& shop) {
  const size_t all = heap->bytes * heap->num_virtual_ranks;
  void* base = nullptr;
  if (comm != nullptr) {
    if (nccl_library().MemAlloc(&base, all) != NcclLibrary::kSuccess) base = nullptr;
  } else if (cudaMalloc(&base, all) != cudaSuccess) {
    base = nullptr;
  }
  if (base == nullptr) {
    cudaGetLastError();  // an allocation that failed is no fault of the next call
    return no_room(*heap);
  }
  heap->addresses.clear();
  for (int r = 0; r < heap->num_virtual_ranks; ++r) {
    heap->addresses.push_back(static_cast<char*>(base) + r * heap->bytes);
    if (cudaError_t e = init_heap(heap->addresses.back(), shop.stream))
      return text("clearing the peer heap", e);
  }
  // On the host, so that it can be read whatever the device is doing.
  const size_t status_bytes = sizeof(Status) * heap->num_virtual_ranks;
  if (cudaError_t e = cudaHostAlloc(reinterpret_cast<void**>(&heap->status), status_bytes,
                                    cudaHostAllocMapped | cudaHostAllocPortable))
    return text("cudaHostAlloc", e);
  std::memset(static_cast<void*>(heap->status), 0, status_bytes);
  if (comm != nullptr) {
    if (cudaError_t e = cudaStreamCreateWithFlags(&heap->copy_stream, cudaStreamNonBlocking))
      return text("cudaStreamCreate", e);
    for (cudaEvent_t* event : {&heap->published, &heap->copied})
      if (cudaError_t e = cudaEventCreateWithFlags(event, cudaEventDisableTiming))
        return text("cudaEventCreate", e);
  }
  return shop.wait();
}

void release(PeerHeap* heap, NcclComm* comm) {
  if (!heap->addresses.empty()) {
    if (comm != nullptr)
      nccl_library().MemFree(heap->addresses[0]);
    else
      cudaFree(heap->addresses[0]);
  }
  if (heap->status != nullptr) cudaFreeHost(heap->status);
  for (cudaEvent_t* event : {&heap->published, &heap->copied}) {
    if (*event != nullptr) cudaEventDestroy(*event);
    *event = nullptr;
  }
  if (heap->copy_stream != nullptr) cudaStreamDestroy(heap->copy_stream);
  heap->copy_stream = nullptr;
  heap->addresses.clear();
  heap->status = nullptr;
}

// The addresses of all ranks' windows, or why there are none.
std::string open_window(NcclWindow* window, PeerHeap* heap, const Workshop& shop) {
  const NcclLibrary& nccl = nccl_library();
  NcclWindow head;
  if (cudaError_t e =
          cudaMemcpyAsync(&head, window, sizeof(head), cudaMemcpyDeviceToHost, shop.stream))
    return text("reading NCCL's window", e);
  if (std::string problem = shop.wait(); !problem.empty()) return problem;
  if (head.world_rank != heap->rank)
    return "NCCL " + nccl_version_name(nccl.version) + " has windows of another form than 2.28's";
  if (head.lsa_rank != heap->rank)
    return "rank " + std::to_string(heap->rank) +
           " is not in one NVLink domain with rank 0 (NCCL counts it as number " +
           std::to_string(head.lsa_rank) + " of another)";
  heap->addresses.assign(heap->num_ranks, nullptr);
  for (int r = 0; r < heap->num_ranks; ++r) {
    if (nccl.GetLsaDevicePointer != nullptr) {
      if (int result = nccl.GetLsaDevicePointer(window, 0, r, &heap->addresses[r]))
        return std::string("ncclGetLsaDevicePointer failed: ") + nccl.GetErrorString(result);
    } else {
      heap->addresses[r] = head.flat_base + (static_cast<uint64_t>(head.stride_4g) << 32) * r;
    }
  }
  return "";
}

const char kNoPeerAccess[] =
    "the ranks of the expert axis must all reach each other's memory over NVLink (or another "
    "peer-to-peer link), and NCCL found that they do not. See `python -m jax_mok doctor`; "
    "implementation=\"xla\" runs without. Found: ";

// A number that no other rank, of this process or another, is likely to come up with.
int64_t unlikely_number(const PeerHeap* heap) {
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  uint64_t x = static_cast<uint64_t>(now) ^ reinterpret_cast<uintptr_t>(heap) ^
               static_cast<uint64_t>(getpid()) << 32 ^ static_cast<uint64_t>(heap->rank) << 20;
  return static_cast<int64_t>(mix(x) >> 1);
}

void join_meeting(int64_t name, PeerHeap* heap) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::shared_ptr<LocalMeeting>& meeting = registry().meetings[name];
  if (meeting == nullptr) meeting = std::make_shared<LocalMeeting>();
  heap->member = meeting->join();
  heap->meeting = meeting;
}

// Collective over the ranks of `comm`: every rank gets the same verdict, so none is left waiting.
std::string build(PeerHeap* heap, NcclComm* comm, int generation, int64_t run) {
  Workshop shop;
  std::string problem = shop.open();
  if (!problem.empty()) return problem;

  problem = allocate(heap, comm, shop);
  if (comm == nullptr) {
    if (!problem.empty()) release(heap, comm);
    return problem;
  }
  const int64_t bytes = static_cast<int64_t>(heap->bytes);
  // Positive, so that its negative is a number too.
  const int64_t run_name = static_cast<int64_t>(mix(static_cast<uint64_t>(run)) >> 2);
  std::vector<int64_t> votes = {problem.empty(),       bytes,    -bytes,   generation, -generation,
                                unlikely_number(heap), run_name, -run_name};
  if (std::string failed = shop.smallest(comm, &votes); !failed.empty()) return failed;
  if (votes[1] != -votes[2] || votes[3] != -votes[4]) {
    release(heap, comm);
    return "the ranks of a group ask for different peer heaps (" + std::to_string(votes[1]) +
           " to " + std::to_string(-votes[2]) + " bytes, number " + std::to_string(votes[3]) +
           " to " + std::to_string(-votes[4]) +
           "): all of them must run the same programs in the same order";
  }
  if (votes[0] == 0) {
    release(heap, comm);
    return problem.empty() ? "another rank of the group could not allocate its peer heap of " +
                                 mebibytes(heap->bytes) + "; see its message"
                           : problem;
  }

  join_meeting(votes[5],
               heap);  // the smallest proposal is the same for all; the next vote is later
  const bool same_run = run != HeapNeed::kNoRun && votes[6] == -votes[7];

  // Registering is a meeting of all ranks: once it returns, everybody's control words are cleared.
  NcclWindow* window = nullptr;
  const NcclLibrary& nccl = nccl_library();
  const int result = nccl.CommWindowRegister(comm, heap->addresses[0], heap->bytes, &window,
                                             NcclLibrary::kSymmetricWindow);
  problem = nccl.finish(result, comm, "ncclCommWindowRegister");
  if (problem.empty() && window == nullptr) problem = "NCCL gave no symmetric window";
  if (problem.empty()) problem = open_window(window, heap, shop);
  votes = {problem.empty()};
  if (std::string failed = shop.smallest(comm, &votes); !failed.empty()) return failed;
  if (votes[0] != 0) {
    // Else by their numbers. XLA gives the devices of a process the same id, and JAX those of
    // several processes, as long as they have run their programs equally often.
    if (same_run || heap->meeting->num_members() == heap->num_ranks)
      heap->ids = std::make_shared<CallIds>();
    return "";
  }
  return kNoPeerAccess +
         (problem.empty() ? std::string("see the message of another rank") : problem);
}

std::string check_need(const HeapNeed& need, int* rank) {
  *rank = 0;
  if (need.num_ranks == need.num_virtual_ranks) return "";
  const NcclLibrary& nccl = nccl_library();
  if (!nccl.problem.empty()) return nccl.problem;
  if (need.comm == nullptr) return "XLA gave no communicator";
  int count = 0;
  if (nccl.CommUserRank(need.comm, rank) != 0 || nccl.CommCount(need.comm, &count) != 0)
    return "XLA's communicator is not one of NCCL";
  if (count != need.num_ranks)
    return "XLA's communicator has " + std::to_string(count) + " ranks, expected " +
           std::to_string(need.num_ranks);
  return "";
}

}  // namespace

std::string make_heap(const HeapNeed& need, const PeerHeap** heap) {
  int device, rank;
  std::string problem = current_device(&device);
  if (problem.empty()) problem = check_need(need, &rank);
  if (!problem.empty()) return problem;
  Domain& place = domain(device, need);
  std::lock_guard<std::mutex> making(place.making);
  int generation;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if ((*heap = place.settle(need.bytes)) != nullptr) return "";
    generation = static_cast<int>(place.heaps.size());
  }
  auto fresh = std::make_unique<PeerHeap>();
  fresh->device = device;
  fresh->rank = rank;
  fresh->num_ranks = need.num_ranks;
  fresh->num_virtual_ranks = need.num_virtual_ranks;
  fresh->bytes = (need.bytes + kGranule - 1) / kGranule * kGranule;
  problem = build(fresh.get(), need.comm, generation, need.run);
  if (!problem.empty()) return problem;
  std::lock_guard<std::mutex> lock(registry().mutex);
  place.heaps.push_back(std::move(fresh));
  *heap = place.settle(need.bytes);
  return "";
}

std::string find_heap(const HeapNeed& need, const PeerHeap** heap) {
  int device;
  if (std::string problem = current_device(&device); !problem.empty()) return problem;
  Domain& place = domain(device, need);
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = place.heap_of_need.find(need.bytes);
  if (found == place.heap_of_need.end() || found->second == nullptr)
    return "no peer heap was made for this call before it ran";
  *heap = found->second;
  return "";
}

std::vector<PeerHeap> all_heaps() {
  std::vector<PeerHeap> result;
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& [key, place] : registry().domains)
    for (const auto& heap : place->heaps) result.push_back(*heap);
  return result;
}

uint32_t num_calls(const PeerHeap& heap) {
  uint32_t calls = 0;
  const auto* control = static_cast<const HeapControl*>(heap.addresses[heap.rank]);
  int device = 0;
  cudaStream_t stream = nullptr;  // not the legacy one: it would wait for what runs
  if (cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(heap.device) != cudaSuccess) return 0;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess) {
    cudaMemcpyAsync(&calls, &control->call, sizeof(calls), cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  cudaSetDevice(device);
  return calls;
}

uint64_t CallIds::next(int64_t run) {
  constexpr size_t kRuns = 64;  // more than XLA has under way at a time
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = std::find_if(runs_.begin(), runs_.end(), [&](const Run& r) { return r.run == run; });
  if (found == runs_.end()) {
    runs_.push_back({run, 0});
    if (runs_.size() > kRuns) runs_.pop_front();
    found = runs_.end() - 1;
  }
  const uint64_t id = mix(mix(static_cast<uint64_t>(run)) + ++found->calls);
  return id != 0 ? id : 1;
}

uint64_t next_call_id(const PeerHeap& heap, int64_t run) {
  return heap.ids == nullptr ? 0 : heap.ids->next(run);
}

std::vector<Status> take_faults() {
  std::vector<Status> faults;
  for (const PeerHeap& heap : all_heaps())
    for (int r = 0; r < heap.num_virtual_ranks; ++r) {
      Status* const status = heap.status + r;
      if (*static_cast<volatile int32_t*>(&status->code) == 0) continue;
      faults.push_back(*status);
      // The code last: the device writes the rest once it has made the code its own.
      Status cleared = {};
      cleared.code = status->code;
      *status = cleared;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      *static_cast<volatile int32_t*>(&status->code) = 0;
    }
  return faults;
}

}  // namespace jax_mok::cuda
