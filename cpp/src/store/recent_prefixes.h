// Prefixes about which something was learnt lately: those that are stored, so that requests that
// share one do not store it again, those that could not be loaded (R41), and those that were
// announced.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kvprism/base/ids.h"
#include "kvprism/run/instant.h"

namespace kvprism::detail {

// A direct-mapped table: bounded, without allocation, and forgetful. What it forgets, or what has
// aged, is tried again, which costs a call and never a byte.
// Ownership: value. Threads: one.
class RecentPrefixes {
 public:
  // `slots`: a power of 2.
  RecentPrefixes(Duration fresh_for, std::size_t slots) : fresh_for_(fresh_for), slots_(slots) {}

  // What stands for a prefix here. Engines' hashes are uniform, so folding them keeps 64 good bits;
  // words are told apart by their places, as an engine may repeat a hash to fill the width.
  static std::uint64_t tag_of(std::span<const std::uint8_t> hash) noexcept {
    std::uint64_t tag = 0;
    for (std::size_t i = 0; i + 8 <= hash.size(); i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, hash.data() + i, 8);
      tag = (tag ^ word) * 0x9E3779B97F4A7C15u;
      tag ^= tag >> 32;
    }
    return tag == 0 ? 1 : tag;
  }
  // What stands for one group's chunk that ends a prefix.
  static std::uint64_t tag_of(std::span<const std::uint8_t> hash, StoreIndex group) noexcept {
    return tag_of(hash) + raw(group) * 0x9E3779B97F4A7C15u;
  }

  void add(std::uint64_t tag, Instant now) noexcept {
    slots_[tag & (slots_.size() - 1)] = {tag, now};
    last_ = now;
  }

  void forget(std::uint64_t tag) noexcept {
    Slot& slot = slots_[tag & (slots_.size() - 1)];
    if (slot.tag == tag) slot = {};
  }
  void clear() noexcept { std::fill(slots_.begin(), slots_.end(), Slot{}); }

  bool contains(std::uint64_t tag, Instant now) const noexcept {
    const Slot& slot = slots_[tag & (slots_.size() - 1)];
    return slot.tag == tag && now - slot.at < fresh_for_;
  }

  // Whether it was added before `than`, and not again since.
  bool older(std::uint64_t tag, Instant than) const noexcept {
    const Slot& slot = slots_[tag & (slots_.size() - 1)];
    return slot.tag == tag && slot.at < than;
  }

  // True when nothing in it can be fresh: the common case of tables of failures.
  bool stale(Instant now) const noexcept { return now - last_ >= fresh_for_; }

 private:
  struct Slot {
    std::uint64_t tag = 0;  // hardly that of a hash
    Instant at{INT64_MIN / 2};
  };

  Duration fresh_for_;
  Instant last_{INT64_MIN / 2};
  std::vector<Slot> slots_;
};

// Chunks that count as absent for a while although they may be there.
// Ownership: none. Threads: one.
struct Avoided {
  const RecentPrefixes& unloadable;  // as others would find too
  const RecentPrefixes& unreached;   // the worker had no way to the store

  bool stale(Instant now) const noexcept { return unloadable.stale(now) && unreached.stale(now); }
  bool contains(std::uint64_t tag, Instant now) const noexcept {
    return unloadable.contains(tag, now) || unreached.contains(tag, now);
  }
};

}  // namespace kvprism::detail
