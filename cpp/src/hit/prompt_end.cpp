#include "kvprism/hit/prompt_end.h"

#include <algorithm>

namespace kvprism {
namespace {

std::uint32_t stored_tokens(const HitGroup& group, const PromptEnd& end) noexcept {
  return group.draft ? end.proof : end.boundary;
}

}  // namespace

PromptEnd prompt_end(std::uint32_t prompt_tokens, const HitGrid& grid, bool drafts) noexcept {
  if (grid.alignment >= grid.step || prompt_tokens == 0) return {};
  // A replay computes the last token anew; with drafts the last unit is computed anew anyway.
  const std::uint32_t usable = drafts ? prompt_tokens : prompt_tokens - 1;
  const std::uint32_t proof = usable - usable % grid.alignment;
  const std::uint32_t kept_back = drafts ? grid.alignment : 0;
  if (proof <= kept_back) return {};
  const std::uint32_t boundary = proof - kept_back;
  if (proof <= boundary - boundary % grid.step) return {};
  return {boundary, proof};
}

ChunkRange end_chunks(const HitGroup& group, const HitGrid& grid, const PromptEnd& end) noexcept {
  if (group.rule == HitRule::kLastState || group.rule == HitRule::kNever) return {};
  const std::uint32_t whole = end.boundary - end.boundary % grid.step;
  const std::uint32_t tokens = stored_tokens(group, end);
  return {whole / group.chunk_tokens,
          tokens / group.chunk_tokens + (tokens % group.chunk_tokens != 0 ? 1 : 0)};
}

std::uint32_t end_mark(const HitGroup& group, const PromptEnd& end, std::uint32_t chunk) noexcept {
  return std::min((chunk + 1) * group.chunk_tokens, stored_tokens(group, end));
}

}  // namespace kvprism
