// Where a prompt ends for those who come after it, when hits may end inside a block
// (store_connector 3.5; vLLM: the prefill checkpoint of a state, and the blocks that are published
// with it).
#pragma once

#include <cstdint>

#include "kvprism/base/export.h"
#include "kvprism/hit/hit_group.h"

namespace kvprism {

// In tokens, multiples of the hit alignment. Both 0: nothing but whole steps is worth an object.
struct PromptEnd {
  std::uint32_t boundary = 0;  // where a request that replays the prompt starts
  std::uint32_t proof = 0;     // how far drafts must be stored for that: the boundary without them

  bool operator==(const PromptEnd&) const = default;
};

// The end of a prompt of `prompt_tokens`, of which a replay computes the last `replay` tokens, at
// least 1, anew. Saves of whole steps of S do not cover it.
KVPRISM_API PromptEnd prompt_end(std::uint32_t prompt_tokens, const HitGrid& grid, bool drafts,
                                 std::uint32_t replay) noexcept;

// Chunks of a group that are stored for `end`, beside the whole steps before it. The last one may
// be stored in part. Empty for states, which the engine hands off.
KVPRISM_API ChunkRange end_chunks(const HitGroup& group, const HitGrid& grid,
                                  const PromptEnd& end) noexcept;

// Tokens of the prefix that names such a chunk: its own end, or what is computed of it.
KVPRISM_API std::uint32_t end_mark(const HitGroup& group, const PromptEnd& end,
                                   std::uint32_t chunk) noexcept;

}  // namespace kvprism
