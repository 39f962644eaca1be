// Time as an argument: nothing below backend/ reads a clock.
#pragma once

#include <compare>
#include <cstdint>

namespace kvprism {

// A length of time in nanoseconds.
struct Duration {
  std::int64_t ns = 0;
  constexpr auto operator<=>(const Duration&) const = default;
};
constexpr Duration operator+(Duration a, Duration b) noexcept { return {a.ns + b.ns}; }
constexpr Duration operator-(Duration a, Duration b) noexcept { return {a.ns - b.ns}; }
constexpr Duration operator*(Duration a, std::int64_t n) noexcept { return {a.ns * n}; }
constexpr Duration milliseconds(std::int64_t n) noexcept { return {n * 1'000'000}; }
constexpr Duration seconds(std::int64_t n) noexcept { return {n * 1'000'000'000}; }

// A point on the caller's monotonic clock, in nanoseconds from an origin of the caller's choice.
// Instants of different processes are not comparable, so none crosses the wire.
struct Instant {
  std::int64_t ns = 0;
  constexpr auto operator<=>(const Instant&) const = default;
};
constexpr Instant operator+(Instant at, Duration d) noexcept { return {at.ns + d.ns}; }
constexpr Duration operator-(Instant a, Instant b) noexcept { return {a.ns - b.ns}; }

}  // namespace kvprism
