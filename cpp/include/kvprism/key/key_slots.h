// Strings that are written again and again without allocating: malloc, not hex, is what a key
// costs.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace kvprism {

// A vector<string> (what Mooncake takes) whose strings keep their capacity over clear().
// Ownership: owns its strings. Threads: one at a time, also for strings().
class KeySlots {
 public:
  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  const std::string& operator[](std::size_t at) const noexcept { return strings_[at]; }

  // Exactly size() strings. Surplus ones of an earlier, longer use are set aside here and not in
  // clear(), so that uses of equal length move nothing.
  const std::vector<std::string>& strings() const {
    while (strings_.size() > size_) {
      spare_.push_back(std::move(strings_.back()));
      strings_.pop_back();
    }
    return strings_;
  }

  // A slot at the end, with the content of an earlier use: the caller overwrites it.
  std::string& append() {
    if (size_ == strings_.size()) add_slot();
    return strings_[size_++];
  }

  void clear() noexcept { size_ = 0; }

 private:
  void add_slot() {
    if (spare_.empty()) {
      strings_.emplace_back();
    } else {
      strings_.push_back(std::move(spare_.back()));
      spare_.pop_back();
    }
  }

  // Mutable for strings(): which of the two holds a surplus string is not part of the value.
  mutable std::vector<std::string> strings_;
  mutable std::vector<std::string> spare_;
  std::size_t size_ = 0;
};

}  // namespace kvprism
