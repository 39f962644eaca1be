#include "kvprism/sim/sim_memory.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string_view>
#include <variant>

namespace kvprism::sim {
namespace {

constexpr std::size_t kAlignment = 4096;
constexpr int kGuard = 0x9d;

}  // namespace

SimMemory::SimMemory(const Projection& projection, const SimMemoryOptions& options)
    : num_blocks_(projection.num_blocks()), open_(projection.num_blocks()) {
  place(projection, options);
  base_ = static_cast<std::byte*>(::operator new(bytes_, std::align_val_t{kAlignment}));
  std::memset(base_, kGuard, bytes_);
  if (options.shadow) shadow_.assign(base_, base_ + bytes_);
  for (std::uint32_t block = 0; block < num_blocks_; ++block)
    poison(BlockId{static_cast<std::int32_t>(block)});
  make_tensors(projection, options);
}

SimMemory::~SimMemory() { ::operator delete(base_, std::align_val_t{kAlignment}); }

void SimMemory::place(const Projection& projection, const SimMemoryOptions& options) {
  const std::string_view layout = projection.kv_layout();
  const auto inside = [&](char inner, char outer) {
    return layout.find(inner) > layout.find(outer);
  };
  splits_heads_ = inside('L', 'H') || inside('B', 'H');
  heads_first_ = inside('N', 'H');

  std::uint64_t slot = 0;
  std::uint64_t layers = 0;
  std::uint64_t heads = 1;
  for (const GroupModel& group : model_groups(projection)) {
    std::vector<Page>& pages = pages_[pages_.push_back({})];
    for (std::uint32_t layer = 0; layer < group.layers(); ++layer) {
      PageShape shape = group.shapes[layer];
      if (!options.first_layers.empty()) shape.first_layer = options.first_layers[raw(group.id)];
      Page page{shape, group.page_bytes[layer], shape.positions};
      // Of opaque bytes nobody says where positions are.
      const bool opaque =
          std::holds_alternative<RawPayload>(projection.group(group.id).layer_spec(layer).payload);
      const bool whole =
          page.bytes == shape.bytes() && !opaque && !(splits_heads_ && layout[0] == 'B');
      if (options.kernel_blocks && whole && shape.positions % 2 == 0) page.kernel_slots /= 2;
      slot = std::max(slot, splits_heads_ ? page.bytes / shape.heads : page.bytes);
      heads = std::max<std::uint64_t>(heads, shape.heads);
      pages.push_back(page);
    }
    layers = std::max<std::uint64_t>(layers, group.layers());
  }

  // From the innermost letter outwards; a guard behind each.
  const std::uint64_t guard = options.guard_bytes;
  std::uint64_t stride = (slot + 7) / 8 * 8 + guard;
  slot = stride - guard;
  for (auto letter = layout.rbegin(); letter != layout.rend(); ++letter) {
    if (*letter == 'N' || *letter == 'C' || (*letter == 'H' && !splits_heads_)) continue;
    std::uint64_t& own =
        *letter == 'L' ? layer_stride_ : (*letter == 'B' ? block_stride_ : head_stride_);
    own = stride;
    const std::uint64_t count = *letter == 'L' ? layers : (*letter == 'B' ? num_blocks_ : heads);
    stride = stride * count + guard;
  }
  front_ = guard;
  bytes_ = front_ + stride;
  for (std::uint64_t layer = 0; layer < layers; ++layer) {
    for (std::uint64_t head = 0; head < (splits_heads_ ? heads : 1); ++head)
      parts_.push_back({front_ + layer * layer_stride_ + head * head_stride_, slot});
  }
  for (const std::vector<Page>& pages : pages_) {
    std::vector<Part>& parts = group_parts_[group_parts_.push_back({})];
    for (std::uint32_t layer = 0; layer < pages.size(); ++layer) {
      const std::uint64_t first = front_ + layer * layer_stride_;
      const PageShape& shape = pages[layer].shape;
      for (std::uint32_t head = 0; head < (splits_heads_ ? shape.heads : 1); ++head) {
        parts.push_back(
            {first + head * head_stride_, pages[layer].bytes / (splits_heads_ ? shape.heads : 1)});
      }
    }
  }
}

void SimMemory::make_tensors(const Projection& projection, const SimMemoryOptions& options) {
  for (const GroupId id : indices<GroupId>(projection.num_groups())) {
    const std::vector<std::string>& layers = projection.group(id).layers;
    const std::size_t cut =
        options.split_tensors && layers.size() > 1 ? layers.size() - 1 : layers.size();
    for (std::size_t first = 0; first < layers.size(); first = first == 0 ? cut : layers.size()) {
      const Page& page = pages_[id][first];
      const std::size_t end = first == 0 ? cut : layers.size();
      CacheTensor tensor;
      tensor.base = base_;
      tensor.bytes = bytes_;
      tensor.layers.assign(layers.begin() + static_cast<std::ptrdiff_t>(first),
                           layers.begin() + static_cast<std::ptrdiff_t>(end));
      tensor.layer_stride = layer_stride_;
      tensor.block_stride = block_stride_;
      tensor.head_stride = splits_heads_ ? head_stride_ : 0;
      tensor.offset = front_ + first * layer_stride_;
      tensor.kernel_block_size = page.kernel_slots < page.shape.positions ? page.kernel_slots : 0;
      tensors_.push_back(std::move(tensor));
    }
  }
}

PageView SimMemory::view(std::byte* memory, GroupId group, std::uint32_t layer,
                         BlockId block) const noexcept {
  if (memory == nullptr) return {};
  const Page& page = pages_[group][layer];
  const PageShape& shape = page.shape;
  PageView view = dense_view(shape, memory + front_ + layer * layer_stride_ +
                                        static_cast<std::uint64_t>(raw(block)) * block_stride_);
  if (splits_heads_) {
    view.head_stride = head_stride_;
  } else if (!heads_first_) {
    view.head_stride = shape.content;
    view.slot_stride = std::uint64_t{shape.content} * shape.heads;
  } else {
    view.group_slots = page.kernel_slots;
    view.head_stride = std::uint64_t{page.kernel_slots} * shape.content;
    view.group_stride = view.head_stride * shape.heads;
  }
  return view;
}

void SimMemory::poison(BlockId block) noexcept {
  for (const Part& part : parts_) {
    std::memset(base_ + at(part, block), std::to_integer<int>(kPoison), part.length);
    if (!shadow_.empty())
      std::memset(shadow_.data() + at(part, block), std::to_integer<int>(kPoison), part.length);
  }
}

bool SimMemory::is_poisoned(BlockId block) const noexcept {
  return std::all_of(parts_.begin(), parts_.end(), [&](const Part& part) {
    const std::byte* const bytes = base_ + at(part, block);
    return bytes[0] == kPoison && bytes[part.length - 1] == kPoison;
  });
}

void SimMemory::open(GroupId group, BlockId block) {
  Open& entry = open_[static_cast<std::size_t>(raw(block))];
  if (entry.count++ == 0) ++num_open_;
  entry.group = group;
}

void SimMemory::close(GroupId group, BlockId block) {
  Open& entry = open_[static_cast<std::size_t>(raw(block))];
  if (entry.count == 0 || --entry.count != 0) return;
  --num_open_;
  if (shadow_.empty()) return;
  for (const Part& part : group_parts_[group])
    std::memcpy(shadow_.data() + at(part, block), base_ + at(part, block), part.length);
}

std::string SimMemory::first_difference() const {
  if (shadow_.empty()) return "";
  const auto same = [&](std::uint64_t from, std::uint64_t to) {
    return std::memcmp(base_ + from, shadow_.data() + from, to - from) == 0;
  };
  const auto first = [&](std::uint64_t from, std::uint64_t to) {
    return describe(static_cast<std::uint64_t>(
        std::mismatch(base_ + from, base_ + to, shadow_.data() + from).first - base_));
  };
  if (num_open_ == 0) return same(0, bytes_) ? "" : first(0, bytes_);
  open_parts_.clear();
  for (std::uint32_t b = 0; b < num_blocks_; ++b) {
    if (open_[b].count == 0) continue;
    for (const Part& part : group_parts_[open_[b].group])
      open_parts_.push_back({at(part, BlockId{static_cast<std::int32_t>(b)}), part.length});
  }
  std::sort(open_parts_.begin(), open_parts_.end(),
            [](const Part& a, const Part& b) { return a.offset < b.offset; });
  std::uint64_t cursor = 0;
  for (const Part& part : open_parts_) {
    if (!same(cursor, part.offset)) return first(cursor, part.offset);
    cursor = part.offset + part.length;
  }
  return same(cursor, bytes_) ? "" : first(cursor, bytes_);
}

std::string SimMemory::describe(std::uint64_t offset) const {
  std::string where = "byte " + std::to_string(offset) + ": ";
  const std::size_t known = where.size();
  const std::uint64_t row = parts_.size();
  for (std::uint32_t block = 0; block < num_blocks_ && where.size() == known; ++block) {
    for (std::size_t p = 0; p < row; ++p) {
      const std::uint64_t begin = at(parts_[p], BlockId{static_cast<std::int32_t>(block)});
      if (offset < begin || offset - begin >= parts_[p].length) continue;
      where += "layer " + std::to_string((parts_[p].offset - front_) / layer_stride_) + ", block " +
               std::to_string(block) + ", byte " + std::to_string(offset - begin);
    }
  }
  if (where.size() == known) where += "guard";
  const auto hex = [](std::byte value) {
    static constexpr char kDigits[] = "0123456789abcdef";
    return std::string{kDigits[static_cast<unsigned>(value) >> 4],
                       kDigits[static_cast<unsigned>(value) & 15]};
  };
  return where + " is " + hex(base_[offset]) + ", should be " + hex(shadow_[offset]);
}

}  // namespace kvprism::sim
