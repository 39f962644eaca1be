#include "kvprism/hit/hit_search.h"

#include <algorithm>

namespace kvprism {
namespace {

// Chunks wholly below `local` are in the engine's own cache.
bool usable(const HitGroup& group, const Presence& presence, StoreIndex index, std::uint32_t chunk,
            std::uint32_t local) noexcept {
  return (chunk + 1) * group.chunk_tokens <= local || presence.has(index, chunk);
}

// The longest prefix of at most `bound` tokens, a multiple of `alignment`, that this group alone
// supports.
std::uint32_t longest(const HitGroup& group, StoreIndex index, const Presence& presence,
                      std::uint32_t local, std::uint32_t bound, std::uint32_t alignment) noexcept {
  bound -= bound % alignment;
  switch (group.rule) {
    case HitRule::kPrefix: {
      std::uint32_t chunk = local / group.chunk_tokens;
      while ((chunk + 1) * group.chunk_tokens <= bound &&
             usable(group, presence, index, chunk, local))
        ++chunk;
      const std::uint32_t reached = std::min(chunk * group.chunk_tokens, bound);
      return std::max(local, reached - reached % alignment);
    }
    case HitRule::kWindow:
    case HitRule::kChunk:
    case HitRule::kLastState:
      for (std::uint32_t tokens = bound; tokens > local; tokens -= alignment) {
        const ChunkRange needed = needed_chunks(group, tokens);
        std::uint32_t chunk = needed.end;
        while (chunk > needed.first && usable(group, presence, index, chunk - 1, local)) --chunk;
        if (chunk == needed.first) return tokens;
        // A hole at `chunk - 1` rules out every prefix that still needs it: skip to those that end
        // before it.
        const std::uint32_t hole_start = (chunk - 1) * group.chunk_tokens;
        const std::uint32_t next = hole_start - hole_start % alignment;
        if (next + alignment < tokens) tokens = next + alignment;
      }
      return local;
    case HitRule::kNever:
      return local;
  }
  return local;
}

}  // namespace

std::vector<HitGroup> hit_groups(const Projection& projection) {
  std::vector<HitGroup> groups;
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    const ResolvedGroup& group = projection.group(index);
    groups.push_back(
        {group.traits.hit, group.tokens_per_block, group.traits.window, group.is_eagle_group});
  }
  return groups;
}

ChunkRange needed_chunks(const HitGroup& group, std::uint32_t tokens) noexcept {
  const std::uint32_t end = tokens / group.chunk_tokens;
  if (end == 0) return {0, 0};
  switch (group.rule) {
    case HitRule::kPrefix:
      return {0, end};
    case HitRule::kWindow: {
      // The next token attends to itself and to the window-1 tokens before it.
      const std::uint32_t reach = group.window - 1;
      const std::uint32_t start = tokens > reach ? tokens - reach : 0;
      return {std::min(start / group.chunk_tokens, end), end};
    }
    case HitRule::kChunk:
      return {std::min((tokens - tokens % group.window) / group.chunk_tokens, end), end};
    case HitRule::kLastState:
      return {end - 1, end};
    case HitRule::kNever:
      break;
  }
  return {0, 0};
}

ChunkRange load_chunks(const HitGroup& group, std::uint32_t hit, std::uint32_t local) noexcept {
  if (hit <= local) return {0, 0};
  ChunkRange range = needed_chunks(group, hit);
  range.first = std::max(range.first, local / group.chunk_tokens);
  return range;
}

std::uint32_t find_hit(const std::vector<HitGroup>& groups, const Presence& presence,
                       std::uint32_t local, std::uint32_t max_tokens,
                       std::uint32_t alignment) noexcept {
  if (groups.empty() || max_tokens <= local) return local;
  std::uint32_t hit = max_tokens - max_tokens % alignment;
  for (bool settled = false; !settled && hit > local;) {
    settled = true;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const std::uint32_t found = longest(groups[g], StoreIndex{static_cast<std::uint32_t>(g)},
                                          presence, local, hit, alignment);
      if (found < hit) {
        hit = found;
        settled = false;
      }
    }
  }
  return std::max(hit, local);
}

}  // namespace kvprism
