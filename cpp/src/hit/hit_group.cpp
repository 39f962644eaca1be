#include "kvprism/hit/hit_group.h"

#include <algorithm>

namespace kvprism {
namespace {

std::uint32_t chunks_over(std::uint32_t tokens, std::uint32_t chunk_tokens) noexcept {
  return tokens / chunk_tokens + (tokens % chunk_tokens != 0 ? 1 : 0);
}

}  // namespace

std::vector<HitGroup> hit_groups(const Projection& projection) {
  std::vector<HitGroup> groups;
  const HitGrid grid = hit_grid(projection);
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    const ResolvedGroup& group = projection.group(index);
    const bool fine = group.traits.fine_grained_lookup && grid.alignment < group.tokens_per_block;
    std::uint32_t family = 0;
    while (projection.group(StoreIndex{family}).spec != group.spec) ++family;
    groups.push_back({.rule = group.traits.hit,
                      .chunk_tokens = group.tokens_per_block,
                      .window = group.traits.window,
                      .draft = group.is_eagle_group,
                      .unit_tokens = fine ? grid.unit : group.tokens_per_block,
                      .family = family});
  }
  return groups;
}

HitGrid hit_grid(const Projection& projection) {
  return {.step = projection.scheduler_block_size(),
          .unit = projection.hash_block_size(),
          .alignment = projection.hit_alignment()};
}

std::uint32_t window_chunks(const HitGroup& group) noexcept {
  // The next token attends to itself too.
  return std::max(1u, chunks_over(group.window - 1, group.chunk_tokens));
}

ChunkRange needed_chunks(const HitGroup& group, std::uint32_t tokens) noexcept {
  const std::uint32_t end = chunks_over(tokens, group.chunk_tokens);
  if (end == 0) return {0, 0};
  switch (group.rule) {
    case HitRule::kPrefix:
      return {0, end};
    case HitRule::kWindow:
      return {end - std::min(end, window_chunks(group)), end};
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

}  // namespace kvprism
