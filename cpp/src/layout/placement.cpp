#include "layout/placement.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "kvprism/base/error.h"
#include "layout/disjoint.h"
#include "layout/layer_runs.h"
#include "layout/layout_name.h"
#include "spec/checked_math.h"

namespace kvprism::detail {
namespace {

// A layer in the tensor that holds it.
struct LayerPlace {
  std::size_t tensor;
  std::size_t position;
};

std::string tensor_path(std::size_t at) { return "tensors[" + std::to_string(at) + "]"; }

// Beyond it lies no memory of a process, and distances fit signed numbers.
constexpr std::uint64_t kAddressEnd = std::uint64_t{1} << 63;

std::uint64_t address(const std::byte* at) { return reinterpret_cast<std::uintptr_t>(at); }

class Builder {
 public:
  Builder(const Projection& projection, const std::vector<CacheTensor>& tensors)
      : projection_(projection), tensors_(tensors), layout_(*layout_of(projection.kv_layout())) {}

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

  Placements placements;

 private:
  void check_tensors() {
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const CacheTensor& tensor = tensors_[t];
      if (tensor.base == nullptr)
        problems_.add(tensor_path(t) + ".base", "null", "the address of an allocation");
      if (tensor.bytes == 0) problems_.add(tensor_path(t) + ".bytes", "0", "a positive integer");
      if (address(tensor.base) > kAddressEnd || tensor.bytes > kAddressEnd - address(tensor.base)) {
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
      for (std::size_t r = 0; r < placements.regions.size(); ++r) {
        const Region& region = placements.regions[r];
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
        same = placements.regions.size();
        placements.regions.push_back({tensor.base, tensor.bytes, tensor.device});
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
    std::vector<LayerShape> shapes;  // of the group's layers that have a place, in their order
    std::map<std::size_t, std::vector<std::size_t>> of_tensor;  // positions in `shapes`
    std::vector<std::uint32_t> specs;                           // of each shape
    for (std::size_t l = 0; l < group.layers.size(); ++l) {
      const auto found = places_.find(group.layers[l]);
      if (found == places_.end()) {
        if (!group.enable_kv_transfer) continue;  // never moved, so its place does not matter
        problems_.add(
            "groups[" + std::to_string(raw(group.id)) + "].layers[" + std::to_string(l) + "]",
            group.layers[l], "a layer of a tensor");
        continue;
      }
      const auto& [tensor, position] = found->second;
      of_tensor[tensor].push_back(shapes.size());
      specs.push_back(group.spec_of_layer[l]);
      const CacheSpec& spec = group.layer_spec(l);
      shapes.push_back({layout_, &tensors_[tensor], position, page_axes(spec),
                        page_size_bytes(spec), group.moved_bytes(l), projection_.num_blocks()});
    }
    for (const auto& [tensor, members] : of_tensor) check_tensor(tensor, members, shapes, specs);
    Placement placement;
    if (problems_.empty()) {
      for (const LayerShape& shape : shapes) add_rows(group.id, shape);
      add_pieces(shapes, placement);
    }
    placements.groups.push_back(std::move(placement));
  }

  // Layers of one spec are alike, so one of them is told.
  void check_tensor(std::size_t tensor, const std::vector<std::size_t>& members,
                    const std::vector<LayerShape>& shapes,
                    const std::vector<std::uint32_t>& specs) {
    std::uint64_t low = kSaturated;
    std::uint64_t high = 0;
    for (const std::size_t member : members) {
      low = std::min(low, shapes[member].position);
      high = std::max(high, shapes[member].position);
    }
    std::set<std::uint32_t> told;
    for (const std::size_t member : members) {
      if (told.insert(specs[member]).second)
        check_strides(shapes[member], members.size(), high - low, tensor_path(tensor), problems_);
    }
    const auto last = std::max_element(
        members.begin(), members.end(),
        [&](std::size_t a, std::size_t b) { return shapes[a].end() < shapes[b].end(); });
    const LayerShape& shape = shapes[*last];
    if (shape.end() <= shape.tensor->bytes) return;
    problems_.add(tensor_path(tensor) + ".bytes", std::to_string(shape.tensor->bytes),
                  "at least " + bytes_text(shape.end()) + ", where block " +
                      std::to_string(projection_.num_blocks() - 1) + " of layer " +
                      shape.tensor->layers[shape.position] + " ends");
  }

  void add_rows(GroupId group, const LayerShape& shape) {
    for (const Run& part : parts_of(shape)) {
      rows_.push_back({address(shape.tensor->base) + part.offset, shape.tensor->block_stride,
                       part.length, group});
      row_names_.push_back(shape.tensor->layers[shape.position]);
    }
  }

  void add_pieces(const std::vector<LayerShape>& shapes, Placement& placement) {
    struct Part {
      const LayerShape* shape;
      Run run;
      std::size_t place;  // in the order of layers
    };
    std::vector<Part> parts;
    for (const LayerShape& shape : shapes) {
      placement.kernel_blocks |= shape.kernel_blocks() > 1;
      for (const Run& run : runs_of(shape)) parts.push_back({&shape, run, parts.size()});
    }
    if (layout_.heads_before_layers) {
      std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
        return std::pair(a.run.head, a.place) < std::pair(b.run.head, b.place);
      });
    }
    for (const Part& part : parts) {
      const CacheTensor& tensor = *part.shape->tensor;
      const auto index = static_cast<std::size_t>(&tensor - tensors_.data());
      add_piece(
          {tensor.base + part.run.offset, tensor.block_stride, part.run.length, region_of_[index]},
          placement);
    }
  }

  static void add_piece(const Piece& piece, Placement& placement) {
    placement.bytes += piece.length;
    if (!placement.pieces.empty()) {
      Piece& last = placement.pieces.back();
      if (last.first + last.length == piece.first && last.stride == piece.stride &&
          last.region == piece.region) {
        last.length += piece.length;
        return;
      }
    }
    placement.pieces.push_back(piece);
  }

  void check_disjoint() {
    const auto overlap = find_overlap(rows_, projection_.num_blocks());
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
  LayoutOrder layout_;
  ProblemList problems_;
  std::vector<std::size_t> region_of_;
  std::vector<std::size_t> first_tensor_of_;
  std::map<std::string_view, LayerPlace> places_;
  std::vector<PageRow> rows_;
  std::vector<std::string> row_names_;
};

}  // namespace

Placements place(const Projection& projection, const std::vector<CacheTensor>& tensors) {
  Builder builder(projection, tensors);
  builder.build();
  return std::move(builder.placements);
}

}  // namespace kvprism::detail
