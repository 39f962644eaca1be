#include "kvprism/backend/blocking_store.h"

#include <algorithm>
#include <exception>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "backend/blocking_core.h"
#include "backend/native_thread.h"
#include "kvprism/base/error.h"

namespace kvprism {

using namespace detail;  // NOLINT(google-build-using-namespace)

void BlockingStore::Core::say(LogLevel level, std::string line) {
  constexpr std::size_t kMostLines = 64;  // a sink that blocks must not cost memory for ever
  // Behind leave() nobody would join or detach the thread.
  if (stop_care || lines.size() == kMostLines) return;
  lines.emplace_back(level, std::move(line));
  if (telling) return;
  Worker& teller = helpers.emplace_back();
  try {
    teller.thread = start_thread("kvp-log", [core = shared_from_this(), &teller] {
      Lock lock(core->mutex);
      while (!core->lines.empty()) {
        const auto taken = std::exchange(core->lines, {});
        lock.unlock();
        for (const auto& [of, text] : taken) log(of, text);
        lock.lock();
      }
      core->telling = false;
      teller.done = true;
      core->care_wakes.notify_all();
      core->changed.notify_all();
    });
    telling = true;
  } catch (const std::exception&) {
    helpers.pop_back();  // the next line tries again
  }
}

void BlockingStore::Core::publish(Kind kind, Completion completion) {
  completions[side_of(kind)].push_back(std::move(completion));
  changed.notify_all();
  if (wakeup.call != nullptr) wakeup.call(wakeup.context);
}

void BlockingStore::Core::end_unstarted(Kind kind, OpId op, std::unique_ptr<ObjectBatch> batch,
                                        ItemStatus status) {
  Completion completion;
  completion.op = op;
  completion.outcome = true;
  completion.quiet = true;
  completion.items = all(*batch, status);
  completion.batch = std::move(batch);
  publish(kind, std::move(completion));
}

void BlockingStore::Core::end_queue(Kind kind, ItemStatus status) {
  if (status == ItemStatus::kUnavailable) counters.circuit_open += queues[kind].size();
  for (Request& request : queues[kind]) {
    end_unstarted(kind, request.op, std::move(request.batch), status);
  }
  queues[kind].clear();
}

void BlockingStore::Core::mark_unquiet(Kind kind, OpId op) {
  unquiet[side_of(kind)].push_back(op);
  ++counters.unquiet_now;
}

void BlockingStore::Core::abandon(Running& call, ItemStatus status) {
  call.abandoned = true;
  Completion completion;
  completion.op = call.op;
  completion.outcome = true;
  completion.items = all(*call.batch, status);
  mark_unquiet(call.kind, call.op);
  publish(call.kind, std::move(completion));
  retire(call.generation,
         status == ItemStatus::kTimedOut
             ? std::string("a call of ") + kLaneNames[call.kind] + " does not return"
             : std::string());
}

bool BlockingStore::Core::start(Kind kind, OpId op, std::unique_ptr<ObjectBatch>& batch,
                                Instant now, Instant deadline,
                                const std::optional<Removal>& removal) {
  if (in_child() || batch == nullptr) return false;
  const Lock lock(mutex);
  if (closed[side_of(kind)] || finished) return false;
  use(side_of(kind));
  if (current == nullptr || silent || held_up(kind)) {
    ++counters.circuit_open;
    end_unstarted(kind, op, std::move(batch), ItemStatus::kUnavailable);
    return true;
  }
  if (deadline <= now) {
    ++counters.expired;
    end_unstarted(kind, op, std::move(batch), ItemStatus::kTimedOut);
    return true;
  }
  if (queues[kind].size() >= options.queue_limit) {
    ++counters.queue_full;
    return false;
  }
  try {
    ensure_lane(current, kind);
  } catch (const std::exception&) {
    ++counters.circuit_open;
    end_unstarted(kind, op, std::move(batch), ItemStatus::kUnavailable);
    return true;
  }
  const TimePoint limit = after(Clock::now(), deadline - now);
  // The batch last: a start that throws leaves it alone.
  Request& request = queues[kind].emplace_back();
  request = {op, std::move(batch), limit, removal};
  lane_wakes[kind].notify_all();
  if (limit < care_wake) wake_care();
  return true;
}

bool BlockingStore::Core::poll(Side side, Completion& out) {
  if (in_child()) return false;
  const Lock lock(mutex);
  auto& list = completions[side];
  if (list.empty()) return false;
  out = std::move(list.front());
  list.pop_front();
  return true;
}

void BlockingStore::Core::use(Side side) {
  if (!std::exchange(used[side], true)) wake_care();
}

bool BlockingStore::Core::idle(Side side) const {
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    if (side_of(static_cast<Kind>(kind)) == side && !queues[kind].empty()) return false;
  }
  return std::none_of(running.begin(), running.end(), [&](const auto& call) {
    return side_of(call->kind) == side && !call->abandoned;
  });
}

void BlockingStore::Core::finish_clients() {
  finished = true;
  if (current != nullptr) retire(std::shared_ptr<Generation>(current), {});
  wake_care();
  changed.notify_all();
}

CloseReport BlockingStore::Core::close(Side side, Duration budget) {
  if (in_child()) return {};
  const TimePoint end = after(Clock::now(), budget);
  Lock lock(mutex);
  closed[side] = true;
  changed.wait_until(lock, end, [&] { return idle(side) && unquiet[side].empty(); });
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    if (side_of(static_cast<Kind>(kind)) == side) {
      end_queue(static_cast<Kind>(kind), ItemStatus::kCancelled);
    }
  }
  for (const std::shared_ptr<Running>& call : running) {
    if (side_of(call->kind) == side && !call->abandoned) abandon(*call, ItemStatus::kCancelled);
  }
  std::uint64_t registered = side == kStore ? release_regions(lock, end) : 0;
  const Side other = side == kStore ? kIndex : kStore;
  if (closed[other]) {
    finish_clients();
    const TimePoint limit =
        registered == 0 ? end : std::max(end, after(Clock::now(), milliseconds(500)));
    // One in the making may be registering.
    const auto gone = [&] { return counters.retired_now == 0 && !regions_busy; };
    if (changed.wait_until(lock, limit, gone)) registered = 0;
  }
  return {unquiet[side].size() + registered, unquiet[side]};
}

void BlockingStore::Core::leave(TimePoint end) {
  std::vector<std::jthread> joinable;
  {
    Lock lock(mutex);
    finish_clients();
    const auto all_done = [&] {
      return (maker.empty() || maker.front().done) &&
             std::all_of(helpers.begin(), helpers.end(),
                         [](const Worker& helper) { return helper.done; });
    };
    changed.wait_until(lock, end, all_done);
    stop_care = true;
    care_wakes.notify_all();
  }
  if (care.joinable()) care.join();
  const Lock lock(mutex);
  // A client that is never torn down must not wait for its own threads.
  for (const std::shared_ptr<Generation>& generation : unburied) {
    for (Worker& lane : generation->lanes) {
      if (lane.thread.joinable()) lane.thread.detach();
    }
  }
  unburied.clear();
  helpers.splice(helpers.end(), maker);
  for (Worker& helper : helpers) {
    if (helper.done) {
      joinable.push_back(std::move(helper.thread));
    } else {
      helper.thread.detach();
    }
  }
}

std::vector<Problem> validate_blocking_store_options(const BlockingStoreOptions& options) {
  constexpr Duration kLongest{1'000'000'000'000'000'000};  // thirty years: sums stay in 63 bits
  ProblemList problems;
  const auto positive = [&](Duration duration, const char* path) {
    if (duration.ns <= 0) problems.add(path, std::to_string(duration.ns), "positive nanoseconds");
    if (duration.ns > kLongest.ns) {
      problems.add(path, std::to_string(duration.ns),
                   "at most " + std::to_string(kLongest.ns) + " nanoseconds");
    }
  };
  positive(options.stuck_after, "stuck_after");
  positive(options.setup_timeout, "setup_timeout");
  positive(options.region_timeout, "region_timeout");
  positive(options.probe_interval, "probe_interval");
  positive(options.first_retry, "first_retry");
  positive(options.max_retry, "max_retry");
  if (options.queue_limit == 0) problems.add("queue_limit", "0", "at least 1");
  if (options.max_retired == 0) problems.add("max_retired", "0", "at least 1");
  return problems.problems();
}

BlockingStore::BlockingStore(BlockingClientFactory factory, BlockingStoreOptions options)
    : core_(std::make_shared<Core>(std::move(factory), options)) {
  ProblemList problems;
  problems.append(validate_blocking_store_options(options));
  if (!core_->factory) problems.add("factory", "empty", "a callable");
  problems.throw_if_any(ErrorCode::kInvalidConfig, "blocking store options");

  Core& core = *core_;
  std::exception_ptr error;
  {
    Lock lock(core.mutex);
    try {
      core.start_maker();
    } catch (const std::system_error& why) {
      core.maker.clear();
      throw no_thread(why);
    }
    core.changed.wait_until(lock, after(Clock::now(), options.setup_timeout),
                            [&] { return core.current != nullptr || core.maker.front().done; });
    if (core.current == nullptr) {
      error = core.maker.front().done ? core.make_error : nullptr;
      if (error == nullptr) {
        error = std::make_exception_ptr(
            Error(ErrorCode::kTimedOut, std::string(kSubject),
                  {{"set-up", "no client",
                    "one within " + std::to_string(options.setup_timeout.ns / 1'000'000) + " ms",
                    "the service accepts connections but does not answer"}}));
      }
    } else {
      core.failures = 0;
    }
  }
  if (error != nullptr) {
    core.leave(Clock::now());
    std::rethrow_exception(error);
  }
  try {
    core.care = start_thread("kvp-care", [core = core_.get()] { core->watch(); });
  } catch (const std::system_error& why) {
    core.leave(after(Clock::now(), options.close_budget));
    throw no_thread(why);
  }
}

BlockingStore::~BlockingStore() {
  if (core_->in_child()) {
    // The threads live in the parent only: neither they nor their handles may be touched here
    // (R71).
    static_cast<void>(new std::shared_ptr<Core>(core_));
    return;
  }
  const TimePoint end = after(Clock::now(), core_->options.close_budget);
  const auto left = [&] {
    return Duration{std::max<std::int64_t>(0, (end - Clock::now()) / std::chrono::nanoseconds(1))};
  };
  core_->close(kStore, left());
  core_->close(kIndex, left());
  core_->leave(end);
}

StoreCapabilities BlockingStore::capabilities() const { return core_->capabilities; }

bool BlockingStore::start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                              Instant deadline) {
  return core_->start(kPut, op, batch, now, deadline);
}

bool BlockingStore::start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                              Instant deadline) {
  return core_->start(kGet, op, batch, now, deadline);
}

void BlockingStore::set_wakeup(Wakeup wakeup) {
  const Lock lock(core_->mutex);
  core_->wakeup = wakeup;
}

bool BlockingStore::poll_store(Instant, Completion& out) { return core_->poll(kStore, out); }

CloseReport BlockingStore::close_store(Duration budget) { return core_->close(kStore, budget); }

bool BlockingStore::start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                                 Instant deadline) {
  return core_->start(kLook, op, batch, now, deadline);
}

bool BlockingStore::start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch,
                                 const Removal& removal, Instant now, Instant deadline) {
  return core_->start(kLook, op, batch, now, deadline, removal);
}

bool BlockingStore::poll_index(Instant, Completion& out) { return core_->poll(kIndex, out); }

CloseReport BlockingStore::close_index(Duration budget) { return core_->close(kIndex, budget); }

bool BlockingStore::wait_for_completion(Duration budget) {
  Core& core = *core_;
  if (core.in_child()) return false;
  Lock lock(core.mutex);
  return core.changed.wait_until(lock, after(Clock::now(), budget), [&] {
    return !core.completions[kStore].empty() || !core.completions[kIndex].empty();
  });
}

BlockingStoreCounters BlockingStore::counters() const {
  if (core_->in_child()) return {};
  const Lock lock(core_->mutex);
  BlockingStoreCounters counters = core_->counters;
  counters.usable = core_->current != nullptr && !core_->silent;
  return counters;
}

}  // namespace kvprism
