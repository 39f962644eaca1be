#include "kvprism/layout/segment_map.h"

#include <algorithm>
#include <cassert>
#include <map>
#include <optional>
#include <utility>

#include "group/hash128.h"
#include "kvprism/base/error.h"
#include "layout/disjoint.h"
#include "spec/checked_math.h"

namespace kvprism {
namespace {

using detail::saturating_add;
using detail::saturating_mul;

constexpr std::string_view kSupportedLayout = "LBHNC";

// What one block of a group adds: `length` bytes at first + block * stride.
struct Piece {
  std::byte* first;
  std::uint64_t stride;
  std::uint64_t length;
  std::size_t region;
};

struct Placement {
  std::vector<Piece> pieces;  // in layer order, adjacent ones merged
  std::uint64_t bytes = 0;
};

// A layer in the tensor that holds it.
struct LayerPlace {
  std::size_t tensor;
  std::size_t position;
};

std::string tensor_path(std::size_t at) { return "tensors[" + std::to_string(at) + "]"; }

std::string bytes_text(std::uint64_t bytes) {
  return bytes == detail::kSaturated ? std::string("more than 2^64 bytes")
                                     : std::to_string(bytes) + " bytes";
}

std::uint64_t address(const std::byte* at) { return reinterpret_cast<std::uintptr_t>(at); }

class Builder {
 public:
  Builder(const Projection& projection, const std::vector<CacheTensor>& tensors)
      : projection_(projection), tensors_(tensors) {}

  void build() {
    check_tensors();
    find_regions();
    find_layers();
    for (const GroupId id : indices<GroupId>(projection_.num_groups()))
      place(projection_.group(id));
    problems_.throw_if_any(ErrorCode::kInvalidConfig, "cache tensors");
    check_disjoint();
    problems_.throw_if_any(ErrorCode::kInvalidConfig, "cache tensors");
  }

  std::vector<Region> regions;
  IndexedVector<GroupId, Placement> placements;

 private:
  void check_tensors() {
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const CacheTensor& tensor = tensors_[t];
      if (tensor.base == nullptr)
        problems_.add(tensor_path(t) + ".base", "null", "the address of an allocation");
      if (tensor.bytes == 0) problems_.add(tensor_path(t) + ".bytes", "0", "a positive integer");
      if (tensor.bytes > detail::kSaturated - address(tensor.base)) {
        problems_.add(tensor_path(t) + ".bytes", std::to_string(tensor.bytes),
                      "an end within the address space");
      }
      if (tensor.layers.empty())
        problems_.add(tensor_path(t) + ".layers", "[]", "at least one layer name");
      if (tensor.device < -1) {
        problems_.add(tensor_path(t) + ".device", std::to_string(tensor.device),
                      "-1 for host memory, or an ordinal");
      }
    }
  }

  // Tensors may be views of one allocation; two allocations never share bytes.
  void find_regions() {
    region_of_.assign(tensors_.size(), 0);
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const CacheTensor& tensor = tensors_[t];
      const std::uint64_t begin = address(tensor.base);
      const std::uint64_t end = saturating_add(begin, tensor.bytes);
      std::optional<std::size_t> same;
      for (std::size_t r = 0; r < regions.size(); ++r) {
        const Region& region = regions[r];
        if (region.base == tensor.base && region.length == tensor.bytes &&
            region.device == tensor.device) {
          same = r;
        } else if (begin < address(region.base) + region.length && address(region.base) < end) {
          problems_.add(
              tensor_path(t) + ".base",
              bytes_text(tensor.bytes) + " on device " + std::to_string(tensor.device),
              "the whole of one allocation, as " + tensor_path(first_tensor_of_[r]) + " has it: " +
                  bytes_text(region.length) + " on device " + std::to_string(region.device),
              "give views of one allocation the same base and bytes, and place them with offset");
        }
      }
      if (!same) {
        same = regions.size();
        regions.push_back({tensor.base, tensor.bytes, tensor.device});
        first_tensor_of_.push_back(t);
      }
      region_of_[t] = *same;
    }
  }

  void find_layers() {
    std::map<std::string_view, std::string> known;
    for (const GroupId id : indices<GroupId>(projection_.num_groups())) {
      for (const std::string& layer : projection_.group(id).layers)
        known.emplace(layer, std::string());
    }
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      for (std::size_t l = 0; l < tensors_[t].layers.size(); ++l) {
        const std::string& layer = tensors_[t].layers[l];
        const std::string path = tensor_path(t) + ".layers[" + std::to_string(l) + "]";
        const auto group = known.find(layer);
        if (group == known.end()) {
          problems_.add(path, layer, "a layer of a group", nearest(layer, known));
        } else if (!places_.emplace(layer, LayerPlace{t, l}).second) {
          problems_.add(path, layer, "a layer in one tensor", "also at " + group->second);
        } else {
          group->second = path;
        }
      }
    }
  }

  static std::string nearest(const std::string& layer,
                             const std::map<std::string_view, std::string>& known) {
    std::vector<std::string_view> names;
    for (const auto& entry : known) names.push_back(entry.first);
    return suggest(layer, names);
  }

  void place(const ResolvedGroup& group) {
    Placement placement;
    std::map<std::size_t, std::vector<std::size_t>> positions;  // of this group's layers, by tensor
    for (std::size_t l = 0; l < group.layers.size(); ++l) {
      const auto found = places_.find(group.layers[l]);
      if (found == places_.end()) {
        if (!group.enable_kv_transfer) continue;  // never moved, so its place does not matter
        problems_.add(
            "groups[" + std::to_string(raw(group.id)) + "].layers[" + std::to_string(l) + "]",
            group.layers[l], "a layer of a tensor");
        continue;
      }
      positions[found->second.tensor].push_back(found->second.position);
      add_piece(group, found->second, placement);
    }
    for (const auto& [tensor, of_tensor] : positions) check_layout(group, tensor, of_tensor.size());
    placements.push_back(std::move(placement));
  }

  void add_piece(const ResolvedGroup& group, const LayerPlace& at, Placement& placement) {
    const CacheTensor& tensor = tensors_[at.tensor];
    const std::uint64_t page = group.page_size_bytes;
    const std::string path = tensor_path(at.tensor);
    if (tensor.block_stride < page) {
      problems_.add(
          path + ".block_stride", std::to_string(tensor.block_stride),
          "at least the page of layer " + tensor.layers[at.position] + ", " + bytes_text(page));
      return;
    }
    const std::uint64_t begin =
        saturating_add(tensor.offset, saturating_mul(at.position, tensor.layer_stride));
    const std::uint64_t end = saturating_add(
        saturating_add(begin, saturating_mul(projection_.num_blocks() - 1, tensor.block_stride)),
        page);
    if (end > tensor.bytes) {
      problems_.add(path + ".bytes", std::to_string(tensor.bytes),
                    "at least " + bytes_text(end) + ", where block " +
                        std::to_string(projection_.num_blocks() - 1) + " of layer " +
                        tensor.layers[at.position] + " ends");
      return;
    }
    rows_.push_back({address(tensor.base) + begin, tensor.block_stride, page, group.id});
    row_names_.push_back(tensor.layers[at.position]);
    placement.bytes += page;
    std::byte* const first = tensor.base + begin;
    if (!placement.pieces.empty()) {
      Piece& last = placement.pieces.back();
      if (last.first + last.length == first && last.stride == tensor.block_stride &&
          last.region == region_of_[at.tensor]) {
        last.length += page;
        return;
      }
    }
    placement.pieces.push_back({first, tensor.block_stride, page, region_of_[at.tensor]});
  }

  // Layer outermost: in a tensor of several layers all blocks of one come before the next.
  void check_layout(const ResolvedGroup& group, std::size_t at, std::size_t layers) {
    const CacheTensor& tensor = tensors_[at];
    if (layers < 2 || tensor.block_stride < group.page_size_bytes) return;
    const std::uint64_t span = saturating_add(
        saturating_mul(projection_.num_blocks() - 1, tensor.block_stride), group.page_size_bytes);
    if (tensor.layer_stride >= span) return;
    problems_.add(tensor_path(at) + ".layer_stride", std::to_string(tensor.layer_stride),
                  "at least " + bytes_text(span) + ", all blocks of one layer, in layout " +
                      std::string(kSupportedLayout),
                  "the strides show another layout than kv_layout names");
  }

  void check_disjoint() {
    const auto overlap = detail::find_overlap(rows_, projection_.num_blocks());
    if (!overlap) return;
    const auto name = [&](std::size_t row, std::uint32_t block) {
      return "block " + std::to_string(block) + " of layer " + row_names_[row] + " (group " +
             std::to_string(raw(rows_[row].group)) + ")";
    };
    problems_.add(
        "tensors",
        name(overlap->row_a, overlap->block_a) + " and " + name(overlap->row_b, overlap->block_b),
        "blocks that share no byte",
        "only blocks of one id and different groups may overlay each other");
  }

  const Projection& projection_;
  const std::vector<CacheTensor>& tensors_;
  ProblemList problems_;
  std::vector<std::size_t> region_of_;
  std::vector<std::size_t> first_tensor_of_;
  std::map<std::string_view, LayerPlace> places_;
  std::vector<detail::PageRow> rows_;
  std::vector<std::string> row_names_;
};

}  // namespace

struct SegmentMap::Impl {
  std::shared_ptr<const Projection> projection;
  IndexedVector<GroupId, Placement> placements;
  std::vector<Region> regions;
  Digest fingerprint;
};

namespace {

Digest fingerprint_of(const Projection& projection,
                      const IndexedVector<GroupId, Placement>& placements) {
  std::vector<DigestFact> facts{{"layout_version", "1"}, {"kv_layout", projection.kv_layout()}};
  for (const TransferIndex index : indices<TransferIndex>(projection.num_transfer_groups())) {
    const ResolvedGroup& group = projection.group(index);
    const std::string path = "groups[" + std::to_string(raw(group.id)) + "].";
    facts.push_back({path + "kind", group.spec.kind});
    facts.push_back({path + "page_size_bytes", std::to_string(group.page_size_bytes)});
    facts.push_back(
        {path + "segments_per_block", std::to_string(placements[group.id].pieces.size())});
    for (const std::string& layer : group.layers) facts.push_back({path + "layer", layer});
  }
  return detail::hash128(detail::canonical_text(facts));
}

}  // namespace

std::shared_ptr<const SegmentMap> SegmentMap::make(std::shared_ptr<const Projection> projection,
                                                   std::vector<CacheTensor> tensors) {
  if (projection->kv_layout() != kSupportedLayout) {
    fail(ErrorCode::kUnsupported, "cache tensors",
         {"kv_layout", projection->kv_layout(),
          "a supported layout: " + std::string(kSupportedLayout),
          "this version does not support others"});
  }
  Builder builder(*projection, tensors);
  builder.build();
  auto impl = std::make_unique<Impl>();
  impl->fingerprint = fingerprint_of(*projection, builder.placements);
  impl->placements = std::move(builder.placements);
  impl->regions = std::move(builder.regions);
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

void SegmentMap::append_segments(StoreIndex group, BlockId block, std::vector<Segment>& out) const {
  append_segments(impl_->projection->group_id(group), block, out);
}

void SegmentMap::append_segments(GroupId group, BlockId block, std::vector<Segment>& out) const {
  assert(is_block(block));
  for (const Piece& piece : impl_->placements[group].pieces) {
    out.push_back(
        {piece.first + static_cast<std::uint64_t>(raw(block)) * piece.stride, piece.length});
  }
}

void SegmentMap::append_blocks(GroupId group, std::span<const BlockId> blocks,
                               std::vector<Segment>& out) const {
  for (const Piece& piece : impl_->placements[group].pieces) {
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
