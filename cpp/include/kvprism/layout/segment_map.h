// Where the bytes of a block lie: from strides, never from storage sizes, and proven once (decision 4).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/group/projection.h"
#include "kvprism/layout/segment.h"

namespace kvprism {

// One backing allocation, or a view of it that some layers use (vLLM: KVCacheTensor).
// Byte 0 of layer l (its position in `layers`) and block b: base + offset + l * layer_stride + b * block_stride.
// Ownership: the caller keeps the memory mapped for as long as a worker uses it.
struct CacheTensor {
  std::byte* base = nullptr;
  std::uint64_t bytes = 0;              // of the allocation, from `base`
  std::vector<std::string> layers;      // in L order; layers of different groups may be listed in tensors over the same bytes
  std::uint64_t layer_stride = 0;       // bytes
  std::uint64_t block_stride = 0;       // bytes, at least a page (pitch may exceed length: R29)
  std::uint64_t offset = 0;             // bytes
  int device = -1;                      // -1: host

  bool operator==(const CacheTensor&) const = default;
};

// Ownership: holds the projection; does not own the memory. Threads: immutable.
class KVPRISM_API SegmentMap {
 public:
  // Throws Error with all problems: a group's layer in no tensor or in two, a block outside its allocation, a stride
  // shorter than its page, blocks of different ids that overlap (over all groups of the pool), a layout other than the
  // strides show.
  static std::shared_ptr<const SegmentMap> make(std::shared_ptr<const Projection> projection,
                                                std::vector<CacheTensor> tensors);

  ~SegmentMap();
  SegmentMap(const SegmentMap&) = delete;
  SegmentMap& operator=(const SegmentMap&) = delete;

  const Projection& projection() const noexcept;

  // Bytes of one block of a group on this rank: the size of its object.
  std::uint64_t object_bytes(GroupId group) const noexcept;
  std::uint64_t object_bytes(StoreIndex group) const noexcept;
  // Segments that one block of the group adds, after merging adjacent ones.
  std::uint32_t segments_per_block(StoreIndex group) const noexcept;

  // Appends the segments of one block in layer order. The id must be in (0, num_blocks): the caller has checked it.
  void append_segments(StoreIndex group, BlockId block, std::vector<Segment>& out) const;
  void append_segments(GroupId group, BlockId block, std::vector<Segment>& out) const;

  // Each distinct allocation once, for registration.
  const std::vector<Region>& regions() const noexcept;

  // Hash of the geometry, exchanged once at start; not part of the projection's digest.
  Digest layout_fingerprint() const noexcept;

 private:
  struct Impl;
  explicit SegmentMap(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

}  // namespace kvprism
