// The engine's own prefix cache: which block holds which chunk, found by trying every length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <vector>

#include "kvprism/base/ids.h"
#include "kvprism/sim/content_oracle.h"
#include "kvprism/sim/group_model.h"
#include "kvprism/sim/token_trail.h"

namespace kvprism::sim {

// Ownership: value; holds no references to blocks. Threads: one.
class PrefixCache {
 public:
  struct Entry {
    GroupId group{};
    BlockHash hash{};
    std::vector<Prefix> prefixes;  // of the block's positions, or the one that a state sums up
  };

  // False when the chunk is cached in another block already.
  bool insert(GroupId group, const BlockHash& hash, BlockId block, std::vector<Prefix> prefixes);
  void erase(BlockId block);
  bool holds(BlockId block) const noexcept { return entries_.contains(raw(block)); }
  std::optional<BlockId> find(GroupId group, const BlockHash& hash) const;

  // The longest multiple of `step` up to `most` whose blocks are all there; the ring counts as
  // never cached.
  std::uint32_t longest(const std::vector<GroupModel>& groups, const TokenTrail& trail,
                        std::uint32_t step, std::uint32_t most) const;

  std::size_t size() const noexcept { return entries_.size(); }
  template <class Visit>
  void for_each(Visit visit) const {
    for (const auto& [block, entry] : entries_) visit(BlockId{block}, entry);
  }

 private:
  struct Key {
    GroupId group{};
    BlockHash hash{};
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const noexcept {
      std::uint64_t word;
      std::memcpy(&word, key.hash.data(), sizeof(word));
      return static_cast<std::size_t>(word + raw(key.group));
    }
  };

  std::unordered_map<Key, BlockId, KeyHash> blocks_;
  std::unordered_map<std::int32_t, Entry> entries_;  // by block
};

}  // namespace kvprism::sim
