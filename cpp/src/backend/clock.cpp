#include "kvprism/backend/clock.h"

#include <chrono>

namespace kvprism {

Instant monotonic_now() noexcept {
  const auto since_origin = std::chrono::steady_clock::now().time_since_epoch();
  return {std::chrono::duration_cast<std::chrono::nanoseconds>(since_origin).count()};
}

}  // namespace kvprism
