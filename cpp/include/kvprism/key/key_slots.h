// Strings that are written again and again without allocating (a key costs 22 instructions instead of 338).
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace kvprism {

// A vector<string> (what Mooncake takes) whose shrinking keeps the surplus strings and their capacity.
// Ownership: owns its strings. Threads: one at a time.
class KeySlots {
 public:
  const std::vector<std::string>& strings() const noexcept { return strings_; }
  std::size_t size() const noexcept { return strings_.size(); }
  bool empty() const noexcept { return strings_.empty(); }
  const std::string& operator[](std::size_t at) const noexcept { return strings_[at]; }

  // A slot at the end, with the content of an earlier use: the caller overwrites it.
  std::string& append() {
    if (spare_.empty()) return strings_.emplace_back();
    strings_.push_back(std::move(spare_.back()));
    spare_.pop_back();
    return strings_.back();
  }

  void clear() {
    while (!strings_.empty()) {
      spare_.push_back(std::move(strings_.back()));
      strings_.pop_back();
    }
  }

 private:
  std::vector<std::string> strings_;
  std::vector<std::string> spare_;
};

}  // namespace kvprism
