// The kinds that every registry starts with.
#pragma once

#include <vector>

#include "kvprism/spec/spec_registry.h"

namespace kvprism::detail {

std::vector<SpecKind> builtin_kinds();

}  // namespace kvprism::detail
