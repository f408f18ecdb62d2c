// Python face of csrc/plan: see plan_bindings.cc.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_mok {

void bind_plan(nanobind::module_& m);

}  // namespace jax_mok
