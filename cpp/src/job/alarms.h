// Times at which something is due about a job, unless the job is over by then.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "kvprism/base/ids.h"
#include "kvprism/run/instant.h"

namespace kvprism::detail {

// The earliest first; at one time, by job. Most jobs end long before their alarm, so those of jobs
// that are over are dropped before they are many.
// Ownership: value. Threads: one.
class Alarms {
 public:
  // With room for so many jobs no add() fails.
  void reserve(std::size_t jobs) {
    const std::size_t most = 2 * jobs + kFew + 1;
    if (most > heap_.capacity()) heap_.reserve(2 * most);
  }

  // `jobs`: how many are alive; at most one alarm of each may be in here. `waits(job)`: whether an
  // alarm of it still means something.
  template <class Waits>
  void add(Instant at, JobId job, std::size_t jobs, Waits waits) {
    if (heap_.size() >= 2 * jobs + kFew) {
      std::erase_if(heap_, [&](const Alarm& alarm) { return !waits(alarm.job); });
      std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    }
    heap_.push_back({at, job});
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  // The next one that is due at `now`.
  std::optional<JobId> take(Instant now) {
    if (!due(now)) return std::nullopt;
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const JobId job = heap_.back().job;
    heap_.pop_back();
    return job;
  }

  bool due(Instant now) const noexcept { return !heap_.empty() && heap_.front().at <= now; }
  std::size_t size() const noexcept { return heap_.size(); }

 private:
  static constexpr std::size_t kFew = 64;  // not worth a search

  struct Alarm {
    Instant at;
    JobId job{};
    bool operator>(const Alarm& other) const noexcept {
      return at != other.at ? at > other.at : raw(job) > raw(other.job);
    }
  };

  std::vector<Alarm> heap_;
};

}  // namespace kvprism::detail
