#include "kvprism/layout/segment_map.h"

#include <cassert>
#include <string>
#include <utility>

#include "group/hash128.h"
#include "kvprism/base/error.h"
#include "layout/placement.h"

namespace kvprism {

struct SegmentMap::Impl {
  std::shared_ptr<const Projection> projection;
  IndexedVector<GroupId, detail::Placement> placements;
  std::vector<Region> regions;
  Digest fingerprint;
};

namespace {

Digest fingerprint_of(const Projection& projection) {
  std::vector<DigestFact> facts{{"layout_version", "3"}, {"kv_layout", projection.kv_layout()}};
  for (const TransferIndex index : indices<TransferIndex>(projection.num_transfer_groups())) {
    const ResolvedGroup& group = projection.group(index);
    const std::string path = "groups[" + std::to_string(raw(group.id)) + "].";
    for (std::size_t l = 0; l < group.layers.size(); ++l) {
      const CacheSpec& spec = group.layer_spec(l);
      const PageAxes axes = page_axes(spec);
      facts.push_back({path + "layer", group.layers[l]});
      facts.push_back({path + "kind", spec.kind});
      facts.push_back({path + "page_size_bytes", std::to_string(page_size_bytes(spec))});
      facts.push_back({path + "moved_bytes", std::to_string(group.moved_bytes(l))});
      facts.push_back({path + "axes", std::to_string(axes.heads) + " x " +
                                          std::to_string(axes.positions) + " x " +
                                          std::to_string(axes.content_bytes)});
    }
  }
  return detail::hash128(detail::canonical_text(facts));
}

}  // namespace

std::shared_ptr<const SegmentMap> SegmentMap::make(std::shared_ptr<const Projection> projection,
                                                   std::vector<CacheTensor> tensors) {
  if (!projection) {
    fail(ErrorCode::kInvalidArgument, "segment map", {"projection", "null", "a projection", {}});
  }
  detail::Placements placements = detail::place(*projection, tensors);
  auto impl = std::make_unique<Impl>();
  impl->fingerprint = fingerprint_of(*projection);
  impl->placements = std::move(placements.groups);
  impl->regions = std::move(placements.regions);
  impl->projection = std::move(projection);
  return std::shared_ptr<const SegmentMap>(new SegmentMap(std::move(impl)));
}

SegmentMap::SegmentMap(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
SegmentMap::~SegmentMap() = default;

const Projection& SegmentMap::projection() const noexcept { return *impl_->projection; }

bool SegmentMap::is_block(BlockId block) const noexcept {
  return raw(block) > 0 && static_cast<std::uint32_t>(raw(block)) < impl_->projection->num_blocks();
}

std::uint64_t SegmentMap::object_bytes(GroupId group) const noexcept {
  return impl_->placements[group].bytes;
}

std::uint64_t SegmentMap::object_bytes(StoreIndex group) const noexcept {
  return object_bytes(impl_->projection->group_id(group));
}

std::uint32_t SegmentMap::segments_per_block(StoreIndex group) const noexcept {
  return static_cast<std::uint32_t>(
      impl_->placements[impl_->projection->group_id(group)].pieces.size());
}

bool SegmentMap::has_kernel_blocks(StoreIndex group) const noexcept {
  return impl_->placements[impl_->projection->group_id(group)].kernel_blocks;
}

void SegmentMap::append_segments(StoreIndex group, BlockId block, std::vector<Segment>& out) const {
  append_segments(impl_->projection->group_id(group), block, out);
}

void SegmentMap::append_segments(GroupId group, BlockId block, std::vector<Segment>& out) const {
  assert(is_block(block));
  for (const detail::Piece& piece : impl_->placements[group].pieces) {
    out.push_back(
        {piece.first + static_cast<std::uint64_t>(raw(block)) * piece.stride, piece.length});
  }
}

void SegmentMap::append_blocks(GroupId group, std::span<const BlockId> blocks,
                               std::vector<Segment>& out) const {
  for (const detail::Piece& piece : impl_->placements[group].pieces) {
    const std::size_t start = out.size();
    for (const BlockId block : blocks) {
      assert(is_block(block));
      std::byte* const at = piece.first + static_cast<std::uint64_t>(raw(block)) * piece.stride;
      if (out.size() > start && out.back().base + out.back().length == at) {
        out.back().length += piece.length;
      } else {
        out.push_back({at, piece.length});
      }
    }
  }
}

const std::vector<Region>& SegmentMap::regions() const noexcept { return impl_->regions; }
Digest SegmentMap::layout_fingerprint() const noexcept { return impl_->fingerprint; }

}  // namespace kvprism
