// Strings that are written again and again without allocating: malloc, not hex, is what a key
// costs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvprism/base/export.h"

namespace kvprism {

// A vector<string> (what Mooncake takes) whose strings keep their capacity over clear(). Keys may
// be appended as what they are made of: then whoever reads them first makes the strings, so that a
// step can leave that to the thread that calls the store.
// Ownership: owns its strings and copies what they will be made of. Threads: one at a time, also
// for the const functions.
class KVPRISM_API KeySlots {
 public:
  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  const std::string& operator[](std::size_t at) const {
    if (made_ != size_) make();
    return strings_[at];
  }

  // Exactly size() strings. Surplus ones of an earlier, longer use are set aside here and not in
  // clear(), so that uses of equal length move nothing.
  const std::vector<std::string>& strings() const {
    if (made_ != size_) make();
    while (strings_.size() > size_) {
      spare_.push_back(std::move(strings_.back()));
      strings_.pop_back();
    }
    return strings_;
  }

  // A slot at the end, with the content of an earlier use: the caller overwrites it.
  std::string& append() {
    if (made_ != size_) make();
    ++size_;
    return next_slot();
  }

  // `count` keys at the end, each of them `prefix` and then the hex digits of a hash: `width` bytes
  // at `hashes`, the next one `stride` bytes further on.
  void append_later(std::string_view prefix, const std::uint8_t* hashes, std::size_t width,
                    std::size_t stride, std::size_t count);

  void clear() noexcept {
    size_ = made_ = 0;
    forget_later();
  }

 private:
  struct Later {
    std::size_t first_byte = 0;  // of its hashes
    std::size_t width = 0;
    std::size_t count = 0;
    std::size_t prefix = 0;  // where it begins in prefixes_
    std::size_t prefix_size = 0;
  };

  std::string& next_slot() const {
    if (made_ == strings_.size()) add_slot();
    return strings_[made_++];
  }
  void add_slot() const {
    if (spare_.empty()) {
      strings_.emplace_back();
    } else {
      strings_.push_back(std::move(spare_.back()));
      spare_.pop_back();
    }
  }
  void make() const;
  void forget_later() const noexcept {
    later_.clear();
    hashes_.clear();
    prefixes_.clear();
  }

  // Mutable: which strings are made, and which of the two lists holds a surplus one, is not part of
  // the value.
  mutable std::vector<std::string> strings_;
  mutable std::vector<std::string> spare_;
  mutable std::size_t made_ = 0;
  std::size_t size_ = 0;
  mutable std::vector<Later> later_;  // of the keys from made_ to size_
  mutable std::vector<std::uint8_t> hashes_;
  mutable std::string prefixes_;
};

}  // namespace kvprism
