// Which prefixes this scheduler has stored lately, so that requests that share one do not store it
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kvprism/run/instant.h"

namespace kvprism::detail {

// A direct-mapped table: bounded, without allocation, and forgetful. What it forgets, or what has
// aged (the store may have evicted it), is stored again, which costs a call and never a byte.
// Ownership: value. Threads: one.
class SavedPrefixes {
 public:
  explicit SavedPrefixes(Duration fresh_for) : fresh_for_(fresh_for), slots_(kSlots) {}

  // What stands for a prefix here. Engines' hashes are uniform, so folding them keeps 64 good bits.
  static std::uint64_t tag_of(std::span<const std::uint8_t> hash) noexcept {
    std::uint64_t tag = 0;
    for (std::size_t i = 0; i + 8 <= hash.size(); i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, hash.data() + i, 8);
      tag ^= word;
    }
    return tag == 0 ? 1 : tag;
  }

  void add(std::uint64_t tag, Instant now) noexcept { slots_[tag % kSlots] = {tag, now}; }

  bool contains(std::uint64_t tag, Instant now) const noexcept {
    const Slot& slot = slots_[tag % kSlots];
    return slot.tag == tag && now - slot.at < fresh_for_;
  }

 private:
  static constexpr std::size_t kSlots = 1 << 16;  // 1 MiB
  struct Slot {
    std::uint64_t tag = 0;  // never that of a hash
    Instant at;
  };

  Duration fresh_for_;
  std::vector<Slot> slots_;
};

}  // namespace kvprism::detail
