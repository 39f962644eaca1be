// Lines that could flood a log: one passes in an interval, and tells how many did not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "kvprism/run/instant.h"

namespace kvprism {

// Ownership: value. Threads: one at a time. Errors: none.
class RateLimit {
 public:
  explicit constexpr RateLimit(Duration interval) noexcept : interval_(interval) {}

  // How many were held back since the last that passed; absent: this one is held back too.
  std::optional<std::uint64_t> pass(Instant now) noexcept {
    if (last_ && now - *last_ < interval_) {
      ++held_back_;
      return std::nullopt;
    }
    last_ = now;
    return std::exchange(held_back_, 0);
  }

 private:
  Duration interval_;
  std::optional<Instant> last_;
  std::uint64_t held_back_ = 0;
};

// The line that passes.
inline std::string with_held_back(std::string line, std::uint64_t held_back) {
  if (held_back != 0) line += " (and " + std::to_string(held_back) + " more since the last line)";
  return line;
}

}  // namespace kvprism
