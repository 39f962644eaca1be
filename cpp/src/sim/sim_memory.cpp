#include "kvprism/sim/sim_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace kvprism::sim {
namespace {

constexpr std::size_t kAlignment = 4096;
constexpr int kGuard = 0x9d;
constexpr int kPoison = 0xe7;

}  // namespace

SimMemory::SimMemory(const Projection& projection, const SimMemoryOptions& options)
    : num_blocks_(projection.num_blocks()), open_(projection.num_blocks()) {
  for (const GroupId id : indices<GroupId>(projection.num_groups())) {
    const ResolvedGroup& group = projection.group(id);
    pages_.push_back({group.layers.size(), group.page_size_bytes});
    num_slots_ = std::max(num_slots_, static_cast<std::uint32_t>(group.layers.size()));
    slot_bytes_ = std::max(slot_bytes_, group.page_size_bytes);
  }
  const std::uint64_t guard = options.guard_bytes;
  slot_bytes_ = (slot_bytes_ + 7) / 8 * 8;
  blocks_outermost_ = projection.kv_layout().front() == 'B';
  const std::uint64_t slot = slot_bytes_ + guard;
  layer_stride_ = blocks_outermost_ ? slot : slot * num_blocks_ + guard;
  block_stride_ = blocks_outermost_ ? slot * num_slots_ + guard : slot;
  front_ = guard;
  bytes_ = front_ + guard +
           (blocks_outermost_ ? block_stride_ * num_blocks_ : layer_stride_ * num_slots_);
  base_ = static_cast<std::byte*>(::operator new(bytes_, std::align_val_t{kAlignment}));
  std::memset(base_, kGuard, bytes_);
  for (std::uint32_t layer = 0; layer < num_slots_; ++layer) {
    for (std::uint32_t block = 0; block < num_blocks_; ++block) {
      std::memset(base_ + at(layer, BlockId{static_cast<std::int32_t>(block)}), kPoison,
                  slot_bytes_);
    }
  }
  if (options.shadow) shadow_.assign(base_, base_ + bytes_);
  for (const GroupId id : indices<GroupId>(projection.num_groups())) {
    CacheTensor tensor;
    tensor.base = base_;
    tensor.bytes = bytes_;
    tensor.layers = projection.group(id).layers;
    tensor.layer_stride = layer_stride_;
    tensor.block_stride = block_stride_;
    tensor.offset = front_;
    tensors_.push_back(std::move(tensor));
  }
}

SimMemory::~SimMemory() { ::operator delete(base_, std::align_val_t{kAlignment}); }

const std::byte* SimMemory::page(GroupId, std::uint32_t layer, BlockId block) const noexcept {
  return base_ + at(layer, block);
}
std::byte* SimMemory::page(GroupId, std::uint32_t layer, BlockId block) noexcept {
  return base_ + at(layer, block);
}
std::byte* SimMemory::shadow_page(GroupId, std::uint32_t layer, BlockId block) noexcept {
  return shadow_.empty() ? nullptr : shadow_.data() + at(layer, block);
}

void SimMemory::poison(BlockId block) noexcept {
  for (std::uint32_t layer = 0; layer < num_slots_; ++layer) {
    std::memset(base_ + at(layer, block), kPoison, slot_bytes_);
    if (!shadow_.empty()) std::memset(shadow_.data() + at(layer, block), kPoison, slot_bytes_);
  }
}

bool SimMemory::is_poisoned(BlockId block) const noexcept {
  for (std::uint32_t layer = 0; layer < num_slots_; ++layer) {
    const std::byte* const page = base_ + at(layer, block);
    if (page[0] != std::byte{kPoison} || page[slot_bytes_ - 1] != std::byte{kPoison}) return false;
  }
  return true;
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
  for (std::uint32_t layer = 0; layer < pages_[group].layers; ++layer) {
    std::memcpy(shadow_.data() + at(layer, block), base_ + at(layer, block), pages_[group].bytes);
  }
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
  std::uint64_t cursor = 0;
  // Pages in the order of their addresses.
  const std::uint32_t inner = blocks_outermost_ ? num_slots_ : num_blocks_;
  for (std::uint32_t i = 0; i < num_slots_ * num_blocks_; ++i) {
    const std::uint32_t layer = blocks_outermost_ ? i % inner : i / inner;
    const BlockId block{static_cast<std::int32_t>(blocks_outermost_ ? i / inner : i % inner)};
    const Open& entry = open_[static_cast<std::size_t>(raw(block))];
    if (entry.count == 0 || layer >= pages_[entry.group].layers) continue;
    if (!same(cursor, at(layer, block))) return first(cursor, at(layer, block));
    cursor = at(layer, block) + pages_[entry.group].bytes;
  }
  return same(cursor, bytes_) ? "" : first(cursor, bytes_);
}

std::string SimMemory::describe(std::uint64_t offset) const {
  std::string where = "byte " + std::to_string(offset) + ": ";
  if (offset < front_ || offset >= bytes_ - front_) {
    where += "guard around the tensor";
  } else {
    const std::uint64_t at = offset - front_;
    const std::uint64_t outer_stride = blocks_outermost_ ? block_stride_ : layer_stride_;
    const std::uint64_t inner_stride = blocks_outermost_ ? layer_stride_ : block_stride_;
    const std::uint64_t outer = at / outer_stride;
    const std::uint64_t inner = at % outer_stride / inner_stride;
    const std::uint64_t in_page = at % outer_stride % inner_stride;
    const char* const outer_word = blocks_outermost_ ? "block " : "layer ";
    const char* const inner_word = blocks_outermost_ ? "layer " : "block ";
    where += outer_word + std::to_string(outer) + ", ";
    if (inner >= (blocks_outermost_ ? num_slots_ : num_blocks_)) {
      where += "guard behind it";
    } else {
      where += inner_word + std::to_string(inner) + ", ";
      where += in_page >= slot_bytes_ ? "guard behind it" : "byte " + std::to_string(in_page);
    }
  }
  const auto hex = [](std::byte value) {
    static constexpr char kDigits[] = "0123456789abcdef";
    return std::string{kDigits[static_cast<unsigned>(value) >> 4],
                       kDigits[static_cast<unsigned>(value) & 15]};
  };
  return where + " is " + hex(base_[offset]) + ", should be " + hex(shadow_[offset]);
}

}  // namespace kvprism::sim
