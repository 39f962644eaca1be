#include "kvprism/sim/block_pool.h"

namespace kvprism::sim {

BlockPool::BlockPool(std::uint32_t num_blocks) : blocks_(num_blocks) {
  blocks_[0].state = State::kUsed;
  for (std::uint32_t b = num_blocks; b-- > 1;)
    free_.push_back(BlockId{static_cast<std::int32_t>(b)});
}

BlockId BlockPool::take() noexcept {
  if (free_.empty()) return kNullBlock;
  const BlockId block = free_.back();
  free_.pop_back();
  at(block).state = State::kUsed;
  at(block).references = 1;
  return block;
}

void BlockPool::reference(BlockId block) noexcept {
  Block& entry = at(block);
  if (entry.state == State::kCached) {
    --cached_;
    entry.state = State::kUsed;
  }
  ++entry.references;
}

bool BlockPool::release(BlockId block, bool keep) noexcept {
  Block& entry = at(block);
  if (--entry.references != 0) return false;
  entry.released_at = ++releases_;
  if (keep) {
    entry.state = State::kCached;
    ++cached_;
  } else {
    entry.state = State::kFree;
    free_.push_back(block);
  }
  return true;
}

BlockId BlockPool::oldest_cached() const noexcept {
  if (cached_ == 0) return kNullBlock;
  std::size_t oldest = 0;
  for (std::size_t b = 1; b < blocks_.size(); ++b) {
    if (blocks_[b].state != State::kCached) continue;
    if (oldest == 0 || blocks_[b].released_at < blocks_[oldest].released_at) oldest = b;
  }
  return BlockId{static_cast<std::int32_t>(oldest)};
}

void BlockPool::drop_cached(BlockId block) noexcept {
  at(block).state = State::kFree;
  --cached_;
  free_.push_back(block);
}

}  // namespace kvprism::sim
