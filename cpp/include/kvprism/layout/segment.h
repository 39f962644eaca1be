// A run of bytes in memory: the unit that a backend moves.
#pragma once

#include <cstddef>

namespace kvprism {

struct Segment {
  std::byte* base = nullptr;
  std::size_t length = 0;  // bytes, never 0 in a batch

  bool operator==(const Segment&) const = default;
};

// Memory that a backend must know before it may move bytes in it.
struct Region {
  std::byte* base = nullptr;
  std::size_t length = 0;  // bytes
  int device = -1;         // -1: host memory, otherwise the ordinal of the accelerator

  bool operator==(const Region&) const = default;
};

}  // namespace kvprism
