// The library's one clock; everything below backend/ is told the time.
#pragma once

#include "kvprism/base/export.h"
#include "kvprism/run/instant.h"

namespace kvprism {

// Steady: never goes back, and does not follow changes of the wall clock. Threads: any.
KVPRISM_API Instant monotonic_now() noexcept;

}  // namespace kvprism
