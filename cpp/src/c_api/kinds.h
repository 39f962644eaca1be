// Kinds of cache that a caller of the C interface adds.
#pragma once

#include <cstddef>

#include "c_api/guard.h"
#include "kvprism/spec/spec_registry.h"

namespace kvprism::c_api {

// The built-in kinds and those of the caller. Throws Error (kInvalidArgument) with all problems.
SpecRegistry registry_with(Arguments& arguments, const kvprism_kind* kinds, std::size_t count);

}  // namespace kvprism::c_api
