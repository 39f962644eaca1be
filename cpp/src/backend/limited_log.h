// A place in the code whose lines could flood the log.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "kvprism/backend/clock.h"
#include "kvprism/base/log.h"
#include "run/rate_limit.h"

namespace kvprism::detail {

// At most one line in ten seconds. Threads: any.
class LimitedLog {
 public:
  void operator()(LogLevel level, std::string line) {
    std::optional<std::uint64_t> held_back;
    {
      const std::lock_guard lock(mutex_);
      held_back = limit_.pass(monotonic_now());
    }
    if (held_back) log(level, with_held_back(std::move(line), *held_back));
  }

 private:
  std::mutex mutex_;
  RateLimit limit_{seconds(10)};
};

}  // namespace kvprism::detail
