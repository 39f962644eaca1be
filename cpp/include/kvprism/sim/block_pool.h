// The engine's pool of physical blocks: ids, references, and who is free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvprism/base/ids.h"

namespace kvprism::sim {

// Ids 1..n-1; 0 is the null block. A free block is handed out again as soon as possible, so that a
// late access meets a new owner. A block whose last reference goes while it is cached keeps its
// content and can be revived or evicted. Ownership: value. Threads: one.
class BlockPool {
 public:
  enum class State : std::uint8_t { kFree, kUsed, kCached };

  explicit BlockPool(std::uint32_t num_blocks);

  std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(blocks_.size()); }
  // Free and cached ones: those that take() and evict can give.
  std::uint32_t available() const noexcept {
    return static_cast<std::uint32_t>(free_.size()) + cached_;
  }
  std::uint32_t free() const noexcept { return static_cast<std::uint32_t>(free_.size()); }
  State state(BlockId block) const noexcept { return at(block).state; }
  std::uint32_t references(BlockId block) const noexcept { return at(block).references; }

  // A free block with one reference; the null block when there is none.
  BlockId take() noexcept;
  // One reference more; revives a cached block.
  void reference(BlockId block) noexcept;
  // One reference less. True when it was the last: then the block is cached or free as `keep` says.
  bool release(BlockId block, bool keep) noexcept;
  // The cached block that was released first; the null block when there is none.
  BlockId oldest_cached() const noexcept;
  // A cached block becomes free.
  void drop_cached(BlockId block) noexcept;

 private:
  struct Block {
    State state = State::kFree;
    std::uint32_t references = 0;
    std::uint64_t released_at = 0;
  };
  Block& at(BlockId block) noexcept { return blocks_[static_cast<std::size_t>(raw(block))]; }
  const Block& at(BlockId block) const noexcept {
    return blocks_[static_cast<std::size_t>(raw(block))];
  }

  std::vector<Block> blocks_;
  std::vector<BlockId> free_;
  std::uint32_t cached_ = 0;
  std::uint64_t releases_ = 0;
};

}  // namespace kvprism::sim
