#include "kvprism/sim/prefix_cache.h"

#include <utility>

namespace kvprism::sim {

bool PrefixCache::insert(GroupId group, const BlockHash& hash, BlockId block,
                         std::vector<Prefix> prefixes) {
  if (!blocks_.try_emplace(Key{group, hash}, block).second) return false;
  entries_[raw(block)] = {group, hash, std::move(prefixes)};
  return true;
}

void PrefixCache::erase(BlockId block) {
  const auto found = entries_.find(raw(block));
  if (found == entries_.end()) return;
  blocks_.erase(Key{found->second.group, found->second.hash});
  entries_.erase(found);
}

std::optional<BlockId> PrefixCache::find(GroupId group, const BlockHash& hash) const {
  const auto found = blocks_.find(Key{group, hash});
  return found == blocks_.end() ? std::nullopt : std::optional(found->second);
}

std::uint32_t PrefixCache::longest(const std::vector<GroupModel>& groups, const TokenTrail& trail,
                                   std::uint32_t step, std::uint32_t most) const {
  for (std::uint32_t length = most - most % step; length > 0; length -= step) {
    bool all = true;
    for (const GroupModel& group : groups) {
      if (group.kind == GroupModel::Kind::kRing) continue;
      for (std::uint32_t chunk = group.first_needed(length); all && chunk < length / group.tokens;
           ++chunk) {
        all = find(group.id, trail.hash_of((chunk + 1) * group.tokens)).has_value();
      }
      if (!all) break;
    }
    if (all) return length;
  }
  return 0;
}

}  // namespace kvprism::sim
