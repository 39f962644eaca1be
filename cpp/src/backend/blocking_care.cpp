// The thread that keeps every wait bounded: deadlines, calls that do not return, ended threads.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "backend/blocking_core.h"
#include "kvprism/base/log.h"

namespace kvprism {

using namespace detail;  // NOLINT(google-build-using-namespace)

void BlockingStore::Core::wake_care() {
  care_wake = TimePoint::min();
  care_wakes.notify_all();
}

void BlockingStore::Core::watch() {
  Lock lock(mutex);
  while (!stop_care) {
    const TimePoint now = Clock::now();
    TimePoint next = now + std::chrono::hours(1);
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      expire(static_cast<Kind>(kind), now, next);
    }
    watch_calls(now, next);
    reap();
    consider_attempt(now, next);
    care_wake = next;
    care_wakes.wait_until(lock, next,
                          [&] { return stop_care || care_wake == TimePoint::min() || can_reap(); });
  }
}

void BlockingStore::Core::expire(Kind kind, TimePoint now, TimePoint& next) {
  auto& queue = queues[kind];
  for (auto at = queue.begin(); at != queue.end();) {
    if (at->deadline > now) {
      next = std::min(next, at->deadline);
      ++at;
      continue;
    }
    ++counters.expired;
    end_unstarted(kind, at->op, std::move(at->batch), ItemStatus::kTimedOut);
    at = queue.erase(at);
  }
}

void BlockingStore::Core::watch_calls(TimePoint now, TimePoint& next) {
  for (const std::shared_ptr<Running>& call : running) {
    if (call->abandoned) continue;
    if (!call->late && call->deadline <= now) {
      call->late = true;
      ++counters.late_calls;
      if (call->generation == current) {
        // Behind it, operations would only wait for their own deadlines.
        log(LogLevel::kWarning, std::string("a call of ") + kLaneNames[call->kind] +
                                    " is late: until it returns, new ones end at once");
        end_queue(call->kind, ItemStatus::kUnavailable);
      }
    }
    if (!call->late) next = std::min(next, call->deadline);
    const TimePoint limit = call->began + to_chrono(options.stuck_after);
    if (limit > now) {
      next = std::min(next, limit);
      continue;
    }
    ++counters.stuck_calls;
    log(LogLevel::kWarning, std::string("a store client is replaced: a call of ") +
                                kLaneNames[call->kind] + " does not return");
    abandon(*call, ItemStatus::kTimedOut);
  }
}

bool BlockingStore::Core::can_reap() const {
  return (maker != nullptr && maker->done) ||
         std::any_of(graves.begin(), graves.end(), [](const Worker& grave) { return grave.done; });
}

void BlockingStore::Core::reap() {
  if (maker != nullptr && maker->done) maker.reset();
  for (auto grave = graves.begin(); grave != graves.end();) {
    grave = grave->done ? graves.erase(grave) : std::next(grave);
  }
}

void BlockingStore::Core::consider_attempt(TimePoint now, TimePoint& next) {
  if (current != nullptr || finished || maker != nullptr) return;
  if (options.max_attempts != 0 && failed_attempts >= options.max_attempts) return;
  if (counters.retired_now >= options.max_retired) return;
  if (next_attempt > now) {
    next = std::min(next, next_attempt);
    return;
  }
  try {
    start_maker();
  } catch (const std::exception&) {
    maker.reset();
    next_attempt = now + to_chrono(options.max_retry);
    next = std::min(next, next_attempt);
  }
}

}  // namespace kvprism
