// Rules that only a transfer from prefill to decode needs, checked over the transfer projection.
#pragma once

#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/base/export.h"
#include "kvprism/group/projection.h"

namespace kvprism {

// Every reason why the projection cannot be used with a peer: no transferable group; a transferable
// group whose kind says that nothing of it travels. Empty: usable.
KVPRISM_API std::vector<Problem> validate_peer(const Projection& projection);

}  // namespace kvprism
