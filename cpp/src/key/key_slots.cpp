#include "kvprism/key/key_slots.h"

#include <cstring>
#include <span>

#include "key/hex.h"

namespace kvprism {

void KeySlots::append_later(std::string_view prefix, const std::uint8_t* hashes, std::size_t width,
                            std::size_t stride, std::size_t count) {
  if (count == 0) return;
  Later* last = later_.empty() ? nullptr : &later_.back();
  const std::size_t first_byte = hashes_.size();
  if (last == nullptr || last->width != width ||
      std::string_view(prefixes_).substr(last->prefix, last->prefix_size) != prefix) {
    later_.push_back({first_byte, width, 0, prefixes_.size(), prefix.size()});
    prefixes_ += prefix;
    last = &later_.back();
  }
  if (stride == width) {
    hashes_.insert(hashes_.end(), hashes, hashes + width * count);
  } else {
    hashes_.resize(first_byte + width * count);
    for (std::size_t i = 0; i < count; ++i)
      std::memcpy(hashes_.data() + first_byte + i * width, hashes + i * stride, width);
  }
  last->count += count;
  size_ += count;
}

void KeySlots::make() const {
  for (const Later& later : later_) {
    for (std::size_t i = 0; i < later.count; ++i) {
      std::string& key = next_slot();
      key.resize(later.prefix_size + 2 * later.width);
      std::memcpy(key.data(), prefixes_.data() + later.prefix, later.prefix_size);
      detail::write_hex(std::span(hashes_).subspan(later.first_byte + i * later.width, later.width),
                        key.data() + later.prefix_size);
    }
  }
  forget_later();
}

}  // namespace kvprism
