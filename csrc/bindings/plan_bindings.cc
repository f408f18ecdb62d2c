// Python face of csrc/plan: the host plan of one rank as NumPy arrays. jax_mok/ops.py wraps it.
#include "bindings/plan_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plan/host_plan.h"

namespace nb = nanobind;

namespace jax_mok {
namespace {

using IdArray = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Column = nb::ndarray<nb::numpy, const int32_t>;

// Hands a vector's memory to NumPy without a copy; the array is read-only. A struct of int32
// becomes a last axis of its fields.
template <typename T>
Column array(std::vector<T>&& values) {
  static_assert(sizeof(T) % sizeof(int32_t) == 0);
  constexpr size_t kFields = sizeof(T) / sizeof(int32_t);
  auto* owned = new std::vector<T>(std::move(values));
  owned->reserve(1);  // a null pointer would become None
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  const size_t shape[] = {owned->size(), kFields};
  return Column(reinterpret_cast<const int32_t*>(owned->data()), kFields == 1 ? 1 : 2, shape,
                owner);
}

// Faults of all ranks' ids [num_ranks, num_tokens, top_k], "" if there are none.
std::string check_ids(const IdArray& ids, int32_t num_experts) {
  plan::Shape shape{};
  shape.num_tokens = static_cast<int32_t>(ids.shape(1));
  shape.top_k = static_cast<int32_t>(ids.shape(2));
  const size_t per_rank = ids.shape(1) * ids.shape(2);
  for (size_t rank = 0; rank < ids.shape(0); ++rank) {
    plan::IdError error;
    if (!plan::check_ids(shape, num_experts, ids.data() + rank * per_rank,
                         static_cast<int32_t>(rank), &error))
      return plan::describe(error, num_experts);
  }
  return "";
}

nb::dict build(const IdArray& ids, int32_t num_experts, int32_t rank, int32_t block_rows,
               int32_t group_blocks, int32_t macrobatch_blocks, int32_t gate_up_tiles,
               int32_t down_tiles, int32_t grad_weight_tiles, bool interleaved) {
  plan::Shape shape{};
  shape.num_ranks = static_cast<int32_t>(ids.shape(0));
  shape.num_tokens = static_cast<int32_t>(ids.shape(1));
  shape.top_k = static_cast<int32_t>(ids.shape(2));
  if (shape.num_ranks < 1 || num_experts < 1 || num_experts % shape.num_ranks != 0)
    throw std::invalid_argument("num_experts must be a positive multiple of the " +
                                std::to_string(shape.num_ranks) + " ranks, got " +
                                std::to_string(num_experts));
  shape.num_local_experts = num_experts / shape.num_ranks;
  shape.block_rows = block_rows;
  shape.gate_up_tiles = gate_up_tiles;
  shape.down_tiles = down_tiles;
  shape.grad_weight_tiles = grad_weight_tiles;
  shape.group_blocks = group_blocks;
  shape.macrobatch_blocks = macrobatch_blocks;
  shape.ring_blocks = macrobatch_blocks;
  shape.source_order =
      interleaved ? plan::SourceOrder::kInterleaved : plan::SourceOrder::kSequential;
  if (const char* wrong = plan::check(shape))
    throw std::invalid_argument(std::string(wrong) + " (given: " + plan::describe(shape) + ")");

  plan::HostPlan p;
  std::vector<plan::Tile> backward;
  {
    const nb::gil_scoped_release release;
    const std::string wrong = check_ids(ids, num_experts);
    if (!wrong.empty()) throw std::invalid_argument(wrong);
    std::vector<const int32_t*> ids_of_rank;
    for (size_t r = 0; r < ids.shape(0); ++r)
      ids_of_rank.push_back(ids.data() + r * ids.shape(1) * ids.shape(2));
    p = plan::build(shape, ids_of_rank.data(), rank);
    backward = plan::backward_tiles(shape, p);
  }
  nb::dict result;
  result["counts"] = array(std::move(p.counts));
  result["expert_rows"] = array(std::move(p.expert_rows));
  result["expert_first_block"] = array(std::move(p.expert_first_block));
  result["block_expert"] = array(std::move(p.block_expert));
  result["rows"] = array(std::move(p.rows));
  result["first_use"] = array(std::move(p.first_use));
  result["groups"] = array(std::move(p.groups));
  result["segments"] = array(std::move(p.segments));
  result["tiles"] = array(std::move(p.tiles));
  result["backward_tiles"] = array(std::move(backward));
  return result;
}

}  // namespace

void bind_plan(nb::module_& m) {
  m.def("plan_check_ids", &check_ids, nb::arg("ids"), nb::arg("num_experts"),
        "First fault in expert ids [num_ranks, num_tokens, top_k], or an empty string");
  m.def("plan_build", &build, nb::arg("ids"), nb::arg("num_experts"), nb::arg("rank"),
        nb::arg("block_rows"), nb::arg("group_blocks"), nb::arg("macrobatch_blocks"),
        nb::arg("gate_up_tiles"), nb::arg("down_tiles"), nb::arg("grad_weight_tiles"),
        nb::arg("interleaved"),
        "Plan of one rank from the ids [num_ranks, num_tokens, top_k] of all: a dict of arrays");
}

}  // namespace jax_mok
