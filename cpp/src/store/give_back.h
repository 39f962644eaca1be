// The way back of a registration that was not finished.
#pragma once

#include <span>

#include "kvprism/io/object_store.h"

namespace kvprism::detail {

// In the handler of an exception: removes the regions, and throws it on; as an Error, with what
// came of the removals. Its code is kTimedOut where memory may still be registered.
[[noreturn]] void give_regions_back(ObjectStore& store, std::span<const Region> regions);

}  // namespace kvprism::detail
