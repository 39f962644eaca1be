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
#include "kvprism/sim/content_oracle.h"
#include "kvprism/sim/group_model.h"

namespace kvprism::sim {

struct SimMemoryOptions {
  std::uint32_t guard_bytes =
      64;  // between blocks, between layers and around the tensor; a multiple of 8, may be 0
  bool shadow = false;         // keep a second copy of what the memory should hold
  bool split_tensors = false;  // a group's last layer is in a tensor of its own
  bool kernel_blocks = false;  // blocks are two of the kernel's, where a page may be cut so
  // Of a pipeline stage: how many of each group's layers lie in stages before it. Empty: none.
  std::vector<std::uint32_t> first_layers{};
};

// Laid out by the letters of the projection's layout alone, outermost first.
// Layer slot l of block b is shared by layer l of every group, so a block id belongs to one group
// at a time. Ownership: owns the memory. Threads: one, beside a store that moves bytes in open
// blocks.
class SimMemory {
 public:
  SimMemory(const Projection& projection, const SimMemoryOptions& options);
  ~SimMemory();
  SimMemory(const SimMemory&) = delete;
  SimMemory& operator=(const SimMemory&) = delete;

  // One or two tensors per group, all over the same bytes.
  const std::vector<CacheTensor>& tensors() const noexcept { return tensors_; }
  std::size_t num_layers(GroupId group) const noexcept { return pages_[group].size(); }
  const PageShape& page_shape(GroupId group, std::uint32_t layer) const noexcept {
    return pages_[group][layer].shape;
  }
  // With padding.
  std::uint64_t page_bytes(GroupId group, std::uint32_t layer = 0) const noexcept {
    return pages_[group][layer].bytes;
  }
  std::span<std::byte> whole() noexcept { return {base_, bytes_}; }

  PageView page(GroupId group, std::uint32_t layer, BlockId block) const noexcept {
    return view(base_, group, layer, block);
  }
  // Where the second copy of a page lies; its base is null without one.
  PageView shadow_page(GroupId group, std::uint32_t layer, BlockId block) noexcept {
    return view(shadow_.empty() ? nullptr : shadow_.data(), group, layer, block);
  }

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
    PageShape shape;
    std::uint64_t bytes = 0;
    std::uint32_t kernel_slots = 1;
  };
  struct Open {
    std::uint32_t count = 0;
    GroupId group{};
  };
  // Bytes that belong together: a page, or one head of it where heads are apart.
  struct Part {
    std::uint64_t offset = 0;  // of block 0
    std::uint64_t length = 0;
  };
  PageView view(std::byte* memory, GroupId group, std::uint32_t layer,
                BlockId block) const noexcept;
  void place(const Projection& projection, const SimMemoryOptions& options);
  void make_tensors(const Projection& projection, const SimMemoryOptions& options);
  std::uint64_t at(const Part& part, BlockId block) const noexcept {
    return part.offset + static_cast<std::uint64_t>(raw(block)) * block_stride_;
  }
  std::vector<Part> parts_of(const Page& page, std::uint32_t layer) const;
  std::string describe(std::uint64_t offset) const;

  IndexedVector<GroupId, std::vector<Page>> pages_;
  IndexedVector<GroupId, std::vector<Part>> group_parts_;
  std::vector<Part> parts_;  // of any block
  std::uint32_t num_blocks_ = 0;
  bool splits_heads_ = false;
  bool heads_first_ = false;  // within a page
  std::uint64_t front_ = 0;
  std::uint64_t block_stride_ = 0;
  std::uint64_t layer_stride_ = 0;
  std::uint64_t head_stride_ = 0;  // where heads are apart
  std::uint64_t bytes_ = 0;
  std::byte* base_ = nullptr;
  std::vector<std::byte> shadow_;
  std::vector<Open> open_;  // by block
  std::uint32_t num_open_ = 0;
  mutable std::vector<Part> open_parts_;
  std::vector<CacheTensor> tensors_;
};

}  // namespace kvprism::sim
