// Room for slices in a queue that several native calls share.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <list>
#include <mutex>

namespace kvprism::detail {

// Whoever finds no room waits, and nobody overtakes, so that a large call comes to its turn.
// Threads: any.
class SliceRoom {
 public:
  explicit SliceRoom(std::size_t all) : all_(all) {}

  // Gives back what it has taken.
  class Taken {
   public:
    Taken(SliceRoom& room, std::size_t slices, std::chrono::nanoseconds limit)
        : room_(room), slices_(room.take(slices, limit) ? slices : 0) {}
    ~Taken() {
      if (slices_ != 0) room_.give(slices_);
    }
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;
    // False: there was no room within the limit.
    explicit operator bool() const noexcept { return slices_ != 0; }

   private:
    SliceRoom& room_;
    const std::size_t slices_;
  };

 private:
  bool take(std::size_t slices, std::chrono::nanoseconds limit) {
    std::unique_lock lock(mutex_);
    const auto own = line_.insert(line_.end(), slices);
    const bool has_room = changed_.wait_for(
        lock, limit, [&] { return own == line_.begin() && slices <= all_ - used_; });
    if (has_room) used_ += slices;
    line_.erase(own);
    changed_.notify_all();
    return has_room;
  }
  void give(std::size_t slices) {
    {
      const std::lock_guard lock(mutex_);
      used_ -= slices;
    }
    changed_.notify_all();
  }

  const std::size_t all_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t used_ = 0;
  std::list<std::size_t> line_;  // of those who wait
};

}  // namespace kvprism::detail
