#include "kvprism/layout/kernel_blocks.h"

#include <cassert>
#include <string>

#include "kvprism/base/error.h"

namespace kvprism {

BlockRatio BlockRatio::make(std::uint32_t tokens_per_block, const KernelBlocks& kernel) {
  ProblemList problems;
  if (tokens_per_block == 0) problems.add("tokens_per_block", "0", "a positive integer");
  if (kernel.states_per_block == 0) problems.add("states_per_block", "0", "a positive integer");
  if (kernel.tokens_per_state == 0) problems.add("tokens_per_state", "0", "a positive integer");
  if (kernel.count == 0) problems.add("count", "0", "a positive integer");
  problems.throw_if_any(ErrorCode::kInvalidConfig, "kernel blocks");

  const std::uint64_t tokens = std::uint64_t{kernel.states_per_block} * kernel.tokens_per_state;
  if (tokens_per_block % tokens != 0) {
    fail(ErrorCode::kInvalidConfig, "kernel blocks",
         {"tokens_per_block",
          std::to_string(tokens_per_block),
          "a multiple of the kernel block's " + std::to_string(tokens) + " tokens",
          {}});
  }
  const std::uint64_t ratio = tokens_per_block / tokens;
  if (kernel.count % ratio != 0) {
    fail(ErrorCode::kInvalidConfig, "kernel blocks",
         {"count", std::to_string(kernel.count),
          "a multiple of " + std::to_string(ratio) + " kernel blocks per block, " +
              std::to_string(tokens_per_block) + " / " + std::to_string(tokens) + " tokens",
          "check states_per_block and tokens_per_state"});
  }
  return BlockRatio(static_cast<std::uint32_t>(ratio), kernel.count / ratio);
}

KernelRange BlockRatio::kernel_blocks(BlockId block) const noexcept {
  assert(raw(block) >= 0 && static_cast<std::uint64_t>(raw(block)) < num_blocks_);
  return {static_cast<std::uint64_t>(raw(block)) * ratio_, ratio_};
}

}  // namespace kvprism
