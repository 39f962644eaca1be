// Jobs in order, in room that was made before.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "kvprism/base/ids.h"

namespace kvprism::detail {

// Ownership: value. Threads: one.
class JobQueue {
 public:
  // Room for `more` beyond those that are in it: so many pushes will not fail.
  void reserve(std::size_t more) {
    if (size_ + more <= ring_.size()) return;
    std::vector<JobId> wider(2 * (size_ + more));
    for (std::size_t i = 0; i < size_; ++i) wider[i] = ring_[(first_ + i) % ring_.size()];
    ring_ = std::move(wider);
    first_ = 0;
  }
  void push(JobId job) noexcept { ring_[(first_ + size_++) % ring_.size()] = job; }
  JobId front() const noexcept { return ring_[first_]; }
  void pop() noexcept {
    first_ = (first_ + 1) % ring_.size();
    --size_;
  }
  bool empty() const noexcept { return size_ == 0; }

 private:
  std::vector<JobId> ring_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

}  // namespace kvprism::detail
