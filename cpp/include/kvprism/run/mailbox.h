// A bounded queue between two threads. It starts no thread and never waits.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
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

  // All of them, or false and none. An exception leaves them untouched as well.
  bool try_push_all(std::span<T> items) {
    const std::lock_guard lock(mutex_);
    if (items.size() > capacity_ - items_.size()) return false;
    std::size_t pushed = 0;
    try {
      for (; pushed < items.size(); ++pushed) items_.push_back(std::move(items[pushed]));
    } catch (...) {
      for (; pushed > 0; --pushed) {
        items[pushed - 1] = std::move(items_.back());
        items_.pop_back();
      }
      throw;
    }
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
