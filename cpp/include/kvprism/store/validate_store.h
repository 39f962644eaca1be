// Rules that only the store needs (V1-V4, V6-V8 and V11 of vLLM's connector), checked over the
// store projection alone (R01).
#pragma once

#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/base/export.h"
#include "kvprism/group/projection.h"

namespace kvprism {

// Every reason why the projection cannot be used with a store: no storable group; transferable
// encoder states; a storable group with a pool of its own in host memory; a state group whose mode
// is not "align", also inside a wrapper (R02); several storable groups with prefill context ranks;
// S or a group's tokens per block that h or S do not divide; a hit alignment that some group cannot
// end on. Empty: usable.
KVPRISM_API std::vector<Problem> validate_store(const Projection& projection);

}  // namespace kvprism
