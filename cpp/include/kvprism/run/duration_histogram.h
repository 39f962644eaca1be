// How long things took, in fixed buckets: adding allocates nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvprism/run/instant.h"

namespace kvprism {

// Ownership: value. Threads: one at a time.
struct DurationHistogram {
  // Upper bounds in microseconds; the last bucket has none.
  static constexpr std::array<std::int64_t, 15> kBoundsUs{
      500,     1'000,   2'000,     5'000,     10'000,    20'000,     50'000,    100'000,
      200'000, 500'000, 1'000'000, 2'000'000, 5'000'000, 20'000'000, 60'000'000};

  std::array<std::uint64_t, kBoundsUs.size() + 1> counts{};
  std::uint64_t count = 0;
  std::uint64_t sum_us = 0;

  void add(Duration took) noexcept {
    const std::int64_t us = took.ns < 0 ? 0 : took.ns / 1000;
    std::size_t bucket = 0;
    while (bucket < kBoundsUs.size() && us > kBoundsUs[bucket]) ++bucket;
    ++counts[bucket];
    ++count;
    sum_us += static_cast<std::uint64_t>(us);
  }
};

}  // namespace kvprism
