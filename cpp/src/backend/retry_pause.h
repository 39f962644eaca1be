// How long a store waits before it makes a client again.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "backend/seeded_random.h"
#include "kvprism/run/instant.h"

namespace kvprism::detail {

// Doubles with every failure up to the longest, and varies by a quarter, otherwise in every store,
// so that many workers do not come back at once (R51).
class RetryPause {
 public:
  RetryPause(Duration first, Duration longest, std::uint64_t seed) noexcept
      : first_(first.ns), longest_(longest.ns), random_(seed) {}

  // `failures` in a row; none counts as one.
  std::chrono::nanoseconds after(std::uint32_t failures) noexcept {
    const unsigned doublings = std::min(failures == 0 ? 0u : failures - 1, 20u);
    const std::int64_t base = first_ > (longest_ >> doublings) ? longest_ : first_ << doublings;
    return std::chrono::nanoseconds(base - base / 8 +
                                    static_cast<std::int64_t>(random_.below(1024)) * (base / 4096));
  }

 private:
  std::int64_t first_;
  std::int64_t longest_;
  SeededRandom random_;
};

// Another number in every process, and for every owner in it. Mixed in turn: alone, the bits of
// time and address may cancel each other out.
inline std::uint64_t seed_for(const void* owner) noexcept {
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  SeededRandom time(static_cast<std::uint64_t>(now));
  SeededRandom process(time.next() ^ static_cast<std::uint64_t>(::getpid()));
  return process.next() ^ reinterpret_cast<std::uintptr_t>(owner);
}

}  // namespace kvprism::detail
