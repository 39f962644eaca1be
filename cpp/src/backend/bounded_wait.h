// Waits of any length: a condition variable adds them to the clock, which would overflow.
#pragma once

#include <algorithm>
#include <chrono>

#include "kvprism/run/instant.h"

namespace kvprism::detail {

constexpr Duration kLongestWait = seconds(365 * 24 * 3600);

inline std::chrono::nanoseconds bounded(Duration wait) noexcept {
  return std::chrono::nanoseconds(std::min(wait, kLongestWait).ns);
}

}  // namespace kvprism::detail
