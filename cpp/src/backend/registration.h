// How memory is registered with devices that take only so much at once (R67). Pure functions over
// recorded facts.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/layout/segment.h"

namespace kvprism::detail {

// What the process and its devices allow.
struct RegistrationFacts {
  std::uint64_t lock_limit = std::numeric_limits<std::uint64_t>::max();  // bytes, RLIMIT_MEMLOCK
  bool privileged = false;                                               // exempt from it
  std::uint32_t devices = 1;  // each locks a registered page of its own account
};

// What is wrong with registering regions of these lengths, all together.
std::vector<Problem> check_registration(std::span<const std::uint64_t> lengths,
                                        const RegistrationFacts& facts);

// How much is registered at once with a protocol when `wanted` (0: nothing) was asked for; 0: all.
std::uint64_t effective_region_bytes(std::string_view protocol, std::uint64_t wanted) noexcept;

// The registrations of a region, in order; none is longer than `max_region_bytes` (0: one).
std::vector<Region> cut_region(const Region& region, std::uint64_t max_region_bytes);

// Appends `segment`, which lies in `region`, so that no part crosses from one registration into the
// next.
void append_cut(const Region& region, std::uint64_t max_region_bytes, const Segment& segment,
                std::vector<Segment>& out);

}  // namespace kvprism::detail
