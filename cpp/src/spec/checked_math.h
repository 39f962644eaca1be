// Products of sizes that come from a config: they saturate instead of wrapping.
#pragma once

#include <cstdint>
#include <limits>

namespace kvprism::detail {

// Everything that counts tokens fits a signed 32-bit number, as block ids do.
inline constexpr std::uint64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
inline constexpr std::uint64_t kSaturated = std::numeric_limits<std::uint64_t>::max();

constexpr std::uint64_t saturating_mul(std::uint64_t a, std::uint64_t b) noexcept {
  if (a != 0 && b > kSaturated / a) return kSaturated;
  return a * b;
}

constexpr std::uint64_t saturating_add(std::uint64_t a, std::uint64_t b) noexcept {
  return b > kSaturated - a ? kSaturated : a + b;
}

}  // namespace kvprism::detail
