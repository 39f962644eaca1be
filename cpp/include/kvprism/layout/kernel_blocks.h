// When one block of the scheduler is several blocks of the attention kernel (R28).
#pragma once

#include <cstdint>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"

namespace kvprism {

// What the engine declares of its kernel's blocks; nothing is guessed from a tensor's shape.
struct KernelBlocks {
  std::uint32_t states_per_block = 0;  // stored positions in one kernel block
  std::uint32_t tokens_per_state = 1;  // tokens that one of them stands for
  std::uint64_t count = 0;             // kernel blocks in the pool
};

// Kernel blocks [first, first + count).
struct KernelRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;

  bool operator==(const KernelRange&) const = default;
};

// How a pool's blocks and its kernel's blocks correspond.
// Ownership: value. Threads: value.
class KVPRISM_API BlockRatio {
 public:
  // Throws Error (kInvalidConfig) when a block is not a whole number of kernel blocks, or the pool
  // not a whole number of blocks; the message holds both numbers.
  static BlockRatio make(std::uint32_t tokens_per_block, const KernelBlocks& kernel);

  std::uint32_t kernel_blocks_per_block() const noexcept { return ratio_; }
  std::uint64_t num_blocks() const noexcept { return num_blocks_; }

  // `block` must be in [0, num_blocks()).
  KernelRange kernel_blocks(BlockId block) const noexcept;

 private:
  BlockRatio(std::uint32_t ratio, std::uint64_t num_blocks) noexcept
      : ratio_(ratio), num_blocks_(num_blocks) {}

  std::uint32_t ratio_;
  std::uint64_t num_blocks_;
};

}  // namespace kvprism
