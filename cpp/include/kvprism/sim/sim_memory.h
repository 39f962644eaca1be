// The memory of one simulated rank: one allocation in which every block and layer has guards around
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvprism/base/ids.h"
#include "kvprism/group/projection.h"
#include "kvprism/layout/segment_map.h"

namespace kvprism::sim {

struct SimMemoryOptions {
  std::uint32_t guard_bytes =
      64;  // between blocks, between layers and around the tensor; a multiple of 8, may be 0
  bool shadow = false;  // keep a second copy of what the memory should hold
};

// Laid out as LBHNC or BLHNC, as the projection says: layers outermost, or blocks.
// Layer slot l of block b is shared by layer l of every group, so a block id belongs to one group
// at a time. Ownership: owns the memory. Threads: one, beside a store that moves bytes in open
// blocks.
class SimMemory {
 public:
  SimMemory(const Projection& projection, const SimMemoryOptions& options);
  ~SimMemory();
  SimMemory(const SimMemory&) = delete;
  SimMemory& operator=(const SimMemory&) = delete;

  // One tensor per group, all over the same bytes.
  const std::vector<CacheTensor>& tensors() const noexcept { return tensors_; }
  std::size_t num_layers(GroupId group) const noexcept { return pages_[group].layers; }
  std::uint64_t page_bytes(GroupId group) const noexcept { return pages_[group].bytes; }
  std::span<std::byte> whole() noexcept { return {base_, bytes_}; }

  const std::byte* page(GroupId group, std::uint32_t layer, BlockId block) const noexcept;
  std::byte* page(GroupId group, std::uint32_t layer, BlockId block) noexcept;
  // Where the second copy of a page lies; null without one.
  std::byte* shadow_page(GroupId group, std::uint32_t layer, BlockId block) noexcept;

  // Overwrites all layers of a block, in both copies.
  void poison(BlockId block) noexcept;
  bool is_poisoned(BlockId block) const noexcept;

  // While a block is open to a group, others may write the group's pages of it. May be opened more
  // than once.
  void open(GroupId group, BlockId block);
  // The shadow takes over what the memory holds now.
  void close(GroupId group, BlockId block);
  bool is_open(BlockId block) const noexcept {
    return open_[static_cast<std::size_t>(raw(block))].count != 0;
  }

  // Where memory and shadow first differ outside open pages, in words; "" when they agree.
  std::string first_difference() const;

 private:
  struct Page {
    std::size_t layers = 0;
    std::uint64_t bytes = 0;
  };
  struct Open {
    std::uint32_t count = 0;
    GroupId group{};
  };
  std::uint64_t at(std::uint32_t layer, BlockId block) const noexcept {
    return front_ + layer * layer_stride_ + static_cast<std::uint64_t>(raw(block)) * block_stride_;
  }
  std::string describe(std::uint64_t offset) const;

  IndexedVector<GroupId, Page> pages_;
  std::uint32_t num_blocks_ = 0;
  std::uint32_t num_slots_ = 0;
  bool blocks_outermost_ = false;
  std::uint64_t front_ = 0;
  std::uint64_t block_stride_ = 0;
  std::uint64_t layer_stride_ = 0;
  std::uint64_t slot_bytes_ = 0;
  std::uint64_t bytes_ = 0;
  std::byte* base_ = nullptr;
  std::vector<std::byte> shadow_;
  std::vector<Open> open_;  // by block
  std::uint32_t num_open_ = 0;
  std::vector<CacheTensor> tensors_;
};

}  // namespace kvprism::sim
