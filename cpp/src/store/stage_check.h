// Whether a rank holds what its config says of its pipeline stage.
#pragma once

#include "kvprism/base/error.h"
#include "kvprism/base/ids.h"
#include "kvprism/group/projection.h"

namespace kvprism::detail {

// Adds every stored group whose layers and `pipeline_stages` disagree about the stage of `rank`,
// which must be below the world: a lookup would ask for objects that nobody stores, or miss those
// that a load needs.
void check_stage(const Projection& projection, Rank rank, ProblemList& problems);

}  // namespace kvprism::detail
