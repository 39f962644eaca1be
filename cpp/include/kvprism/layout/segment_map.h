// Where the bytes of a block lie: from strides, never from storage sizes, and proven once
// (decision 4).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/group/projection.h"
#include "kvprism/layout/segment.h"

namespace kvprism {

// One backing allocation, or a view of it that some layers use (vLLM: KVCacheTensor).
// Byte 0 of layer l (its position in `layers`), block b and head h:
// base + offset + l * layer_stride + b * block_stride + h * head_stride.
// Ownership: the caller keeps the memory mapped for as long as a worker uses it.
struct CacheTensor {
  std::byte* base = nullptr;
  std::uint64_t bytes = 0;              // of the allocation, from `base`
  std::vector<std::string> layers{};    // in L order; groups may overlay each other's bytes
  std::uint64_t layer_stride = 0;       // bytes
  std::uint64_t block_stride = 0;       // bytes, at least a page (pitch may exceed length: R29); in
                                        // LHBNC at least what a page holds of one head
  std::uint64_t offset = 0;             // bytes
  int device = -1;                      // -1: host
  std::uint64_t head_stride = 0;        // bytes; 0: what the layout and the other strides imply
  std::uint32_t kernel_block_size = 0;  // stored positions in a block of the attention kernel, when
                                        // smaller than the block; 0: the block (R28)

  bool operator==(const CacheTensor&) const = default;
};

// Ownership: holds the projection; does not own the memory. Threads: immutable.
class KVPRISM_API SegmentMap : public std::enable_shared_from_this<SegmentMap> {
 public:
  // Throws Error (kInvalidConfig) with all problems: a transferable group's layer in no tensor, any
  // layer in two, a block outside its allocation, a stride shorter than its page (R29), a layout
  // other than the strides show, kernel blocks that do not divide a block, allocations that overlap
  // in part; then, when each of them is sound, blocks that overlap: only blocks of one id and
  // different groups may share bytes.
  static std::shared_ptr<const SegmentMap> make(std::shared_ptr<const Projection> projection,
                                                std::vector<CacheTensor> tensors);

  ~SegmentMap();
  SegmentMap(const SegmentMap&) = delete;
  SegmentMap& operator=(const SegmentMap&) = delete;

  const Projection& projection() const noexcept;

  // True for ids that may be a source or a destination: neither the null block nor outside the pool
  // (R05, R61).
  bool is_block(BlockId block) const noexcept;

  // Bytes of one block of a group on this rank: the size of its object. Pages count with
  // page_size_padded; the gap that block_stride leaves after a page does not. 0 for a group that is
  // not placed.
  std::uint64_t object_bytes(GroupId group) const noexcept;
  std::uint64_t object_bytes(StoreIndex group) const noexcept;
  // Segments that one block of the group adds, after merging adjacent ones.
  std::uint32_t segments_per_block(StoreIndex group) const noexcept;
  // Whether a layer of the group is cut into blocks of the attention kernel that are smaller than
  // its own.
  bool has_kernel_blocks(StoreIndex group) const noexcept;

  // Appends the segments of one block. Their bytes are the block's content in the order of the
  // layout's name without B: layer, head, position for LBHNC, LHBNC and BLHNC; layer, position,
  // head for LBNHC and BLNHC; head, layer, position for BHLNC. Layers are in the group's order.
  // is_block(block) must hold: the caller has checked it.
  void append_segments(StoreIndex group, BlockId block, std::vector<Segment>& out) const;
  void append_segments(GroupId group, BlockId block, std::vector<Segment>& out) const;
  // Appends the segments of several blocks, place by place of a block; consecutive ids become one
  // segment where the pitch is the length (R29). is_block() must hold for each.
  void append_blocks(GroupId group, std::span<const BlockId> blocks,
                     std::vector<Segment>& out) const;

  // Each distinct allocation once, for registration.
  const std::vector<Region>& regions() const noexcept;

  // Hash of the geometry, exchanged once at start; not part of the projection's digest: layout name
  // and, per transferable group and layer, its name, page bytes, those that are moved, and axes.
  // Addresses, strides, kernel blocks and pool sizes may differ between peers.
  Digest layout_fingerprint() const noexcept;

 private:
  struct Impl;
  explicit SegmentMap(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

}  // namespace kvprism
