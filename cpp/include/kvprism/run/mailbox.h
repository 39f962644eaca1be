// A bounded queue between two threads. It starts no thread and never waits.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <utility>

namespace kvprism {

// Threads: any number of writers and readers.
template <class T>
class Mailbox {
 public:
  explicit Mailbox(std::size_t capacity) : capacity_(capacity) {}

  // False when full: the item is untouched, and the caller decides.
  bool try_push(T&& item) {
    const std::lock_guard lock(mutex_);
    if (items_.size() >= capacity_) return false;
    items_.push_back(std::move(item));
    return true;
  }

  // False when empty.
  bool try_pop(T& item) {
    const std::lock_guard lock(mutex_);
    if (items_.empty()) return false;
    item = std::move(items_.front());
    items_.pop_front();
    return true;
  }

  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return items_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::deque<T> items_;
  const std::size_t capacity_;
};

}  // namespace kvprism
