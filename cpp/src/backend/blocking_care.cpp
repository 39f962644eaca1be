// The thread that keeps every wait bounded: deadlines, calls that do not return, ended threads.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "backend/blocking_core.h"
#include "kvprism/backend/clock.h"

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
    // What is given up is replaced in the same turn.
    watch_calls(now, next);
    consider_probe(now, next);
    reap();
    consider_burials(now, next);
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
        if (const auto held_back = late_lines[call->kind].pass(monotonic_now())) {
          late_told[call->kind] = true;
          say(LogLevel::kWarning,
              with_held_back(std::string("a call of ") + kLaneNames[call->kind] +
                                 " is late: until it returns, new ones end at once",
                             *held_back));
        }
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
    abandon(*call, ItemStatus::kTimedOut);
  }
}

bool BlockingStore::Core::can_reap() const {
  return (!maker.empty() && maker.front().done) ||
         std::any_of(helpers.begin(), helpers.end(), [](const Worker& one) { return one.done; });
}

void BlockingStore::Core::reap() {
  if (!maker.empty() && maker.front().done) maker.clear();
  for (auto helper = helpers.begin(); helper != helpers.end();) {
    helper = helper->done ? helpers.erase(helper) : std::next(helper);
  }
}

void BlockingStore::Core::consider_burials(TimePoint now, TimePoint& next) {
  if (next_burial <= now) {
    next_burial = TimePoint::max();
    try {
      for (; !unburied.empty(); unburied.pop_back()) dig(unburied.back());
    } catch (const std::exception&) {
      next_burial = now + to_chrono(options.max_retry);
    }
  }
  next = std::min(next, next_burial);
}

bool BlockingStore::Core::has_use() const {
  return (used[kStore] || !closed[kIndex]) && (used[kIndex] || !closed[kStore]);
}

void BlockingStore::Core::consider_attempt(TimePoint now, TimePoint& next) {
  if (current != nullptr || finished) return;
  const auto limit = [&] {
    return after(after(attempt->began, options.setup_timeout), options.region_timeout);
  };
  if (!maker.empty()) {
    if (attempt->over) return;  // its thread is about to end
    if (limit() > now) {
      next = std::min(next, limit());
      return;
    }
    give_up_maker();
  }
  if (!has_use()) return;
  if (options.max_attempts != 0 && failed_attempts >= options.max_attempts) return;
  if (counters.retired_now >= options.max_retired) return;
  if (next_attempt > now) {
    next = std::min(next, next_attempt);
    return;
  }
  try {
    start_maker();
    next = std::min(next, limit());
  } catch (const std::exception&) {
    maker.clear();
    next_attempt = now + to_chrono(options.max_retry);
    next = std::min(next, next_attempt);
  }
}

void BlockingStore::Core::consider_probe(TimePoint now, TimePoint& next) {
  if (probed != nullptr) {
    const TimePoint limit = probe_at + to_chrono(options.stuck_after);
    if (limit > now) {
      next = std::min(next, limit);
      return;
    }
    ++counters.stuck_calls;
    retire(std::shared_ptr<Generation>(probed), "a question does not return");
    return;
  }
  if (!silent || probe_due) return;
  if (probe_at > now) {
    next = std::min(next, probe_at);
    return;
  }
  try {
    ensure_lane(current, kLook);
    probe_due = true;
    lane_wakes[kLook].notify_all();
  } catch (const std::exception&) {
    probe_at = now + to_chrono(options.probe_interval);
    next = std::min(next, probe_at);
  }
}

}  // namespace kvprism
