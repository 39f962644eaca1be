// Random numbers that depend on nothing but a seed (splitmix64).
#pragma once

#include <cstdint>

namespace kvprism::detail {

class SeededRandom {
 public:
  explicit SeededRandom(std::uint64_t seed) noexcept : state_(seed) {}

  std::uint64_t next() noexcept {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  // In [0, end); 0 when end is 0.
  std::uint64_t below(std::uint64_t end) noexcept { return end == 0 ? 0 : next() % end; }
  // In [low, high].
  std::uint64_t between(std::uint64_t low, std::uint64_t high) noexcept {
    return low + below(high - low + 1);
  }
  bool chance(std::uint64_t of, std::uint64_t in) noexcept { return below(in) < of; }

 private:
  std::uint64_t state_;
};

}  // namespace kvprism::detail
