// One thread per client and kind of call: takes operations from the queue and calls the client.
#include <algorithm>
#include <string>
#include <utility>

#include "backend/blocking_core.h"
#include "backend/native_thread.h"

namespace kvprism {

using namespace detail;  // NOLINT(google-build-using-namespace)

void BlockingStore::Core::ensure_lane(const std::shared_ptr<Generation>& generation, Kind kind) {
  if (generation->has_lane[kind]) return;
  Worker& lane = generation->lanes[kind];
  lane.thread =
      start_thread(kLaneNames[kind], [core = shared_from_this(), generation, kind, &lane] {
        core->serve(generation, kind);
        const Lock lock(core->mutex);
        lane.done = true;
        core->changed.notify_all();
      });
  generation->has_lane[kind] = true;
}

void BlockingStore::Core::serve(const std::shared_ptr<Generation>& generation, Kind kind) {
  Lock lock(mutex);
  auto& queue = queues[kind];
  for (;;) {
    const bool asks = kind == kLook;
    lane_wakes[kind].wait(
        lock, [&] { return generation->retired || !queue.empty() || (asks && probe_due); });
    if (generation->retired) return;
    if (asks && probe_due) {
      ask_again(lock, generation);
      continue;
    }
    Request request = std::move(queue.front());
    queue.pop_front();
    const TimePoint now = Clock::now();
    if (now >= request.deadline) {
      ++counters.expired;
      end_unstarted(kind, request.op, std::move(request.batch), ItemStatus::kTimedOut);
      continue;
    }
    auto call = std::make_shared<Running>();
    call->op = request.op;
    call->kind = kind;
    call->batch = std::move(request.batch);
    call->results.resize(call->batch->keys.size());
    call->began = now;
    call->deadline = request.deadline;
    call->removal = request.removal;
    call->generation = generation;
    running.push_back(call);
    ++generation->busy;
    count(*call);
    if (std::min(now + to_chrono(options.stuck_after), call->deadline) < care_wake) wake_care();

    lock.unlock();
    const CallEnd end = perform(*generation->client, *call);
    lock.lock();

    --generation->busy;
    running.erase(std::find(running.begin(), running.end(), call));
    if (call->late && generation == current && std::exchange(late_told[kind], false)) {
      say(LogLevel::kWarning, std::string("calls of ") + kLaneNames[kind] + " return again");
    }
    finish(*call, end);
    changed.notify_all();
  }
}

CallEnd BlockingStore::Core::perform(BlockingClient& client, Running& call) noexcept {
  switch (call.kind) {
    case kPut:
      return client.put(*call.batch, call.results);
    case kGet:
      return client.get(*call.batch, call.results);
    case kLook:
      break;
  }
  if (call.removal) return client.remove(*call.batch, *call.removal, call.results);
  return client.exists(*call.batch, call.results);
}

void BlockingStore::Core::count(const Running& call) noexcept {
  const std::size_t items = call.batch->keys.size();
  switch (call.kind) {
    case kPut:
      ++counters.put_calls;
      counters.put_items += items;
      return;
    case kGet:
      ++counters.get_calls;
      counters.get_items += items;
      return;
    case kLook:
      if (call.removal) {
        ++counters.remove_calls;
        return;
      }
      ++counters.exists_calls;
      counters.exists_items += items;
      return;
  }
}

void BlockingStore::Core::finish(Running& call, CallEnd end) {
  Generation& generation = *call.generation;
  if (call.abandoned) {
    generation.unquiet.push_back({call.op, call.kind, std::move(call.batch)});
    return;
  }
  std::uint64_t bytes = 0;
  for (const ItemResult& item : call.results) bytes += item.bytes;
  if (call.kind == kPut) counters.put_bytes += bytes;
  if (call.kind == kGet) counters.get_bytes += bytes;

  Completion completion;
  completion.op = call.op;
  completion.outcome = true;
  completion.quiet = end.quiet;
  completion.items = std::move(call.results);
  if (end.quiet) {
    completion.batch = std::move(call.batch);
  } else {
    ++counters.unquiet_calls;
    mark_unquiet(call.kind, call.op);
    generation.unquiet.push_back({call.op, call.kind, std::move(call.batch)});
  }
  publish(call.kind, std::move(completion));
  if (!end.quiet || end.broken) {
    retire(call.generation, std::string("a call of ") + kLaneNames[call.kind] + " came back " +
                                (end.quiet ? "broken" : "without being quiet"));
  } else if (end.unreachable && call.generation == current) {
    fall_silent();
  }
}

void BlockingStore::Core::fall_silent() {
  if (silent) return;
  say(LogLevel::kWarning, "the store does not answer: until it does, operations end at once");
  silent = true;
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    end_queue(static_cast<Kind>(kind), ItemStatus::kUnavailable);
  }
  probe_at = Clock::now() + to_chrono(options.probe_interval);
  wake_care();
}

// A replaced client has been asked by its maker; this one may just have lost its service for a
// while.
void BlockingStore::Core::ask_again(Lock& lock, const std::shared_ptr<Generation>& generation) {
  probe_due = false;
  probed = generation;
  probe_at = Clock::now();
  ++generation->busy;
  ++counters.probes;
  wake_care();
  lock.unlock();
  ItemStatus answer{};
  const CallEnd end = ask(*generation->client, answer);
  lock.lock();
  --generation->busy;
  changed.notify_all();
  if (probed == generation) probed = nullptr;
  if (generation != current) return;
  if (end.broken || !end.quiet) {
    retire(generation, "a question came back broken");
  } else if (answers(answer)) {
    silent = false;
    say(LogLevel::kWarning, "the store answers again");
  } else {
    probe_at = Clock::now() + to_chrono(options.probe_interval);
    wake_care();
  }
}

bool BlockingStore::Core::held_up(Kind kind) const {
  return std::any_of(running.begin(), running.end(), [&](const auto& call) {
    return call->late && call->kind == kind && call->generation == current;
  });
}

}  // namespace kvprism
