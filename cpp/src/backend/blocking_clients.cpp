// Clients from set-up to tear-down, and the pauses between attempts.
#include <algorithm>
#include <string>
#include <utility>

#include "backend/blocking_core.h"
#include "backend/native_thread.h"
#include "kvprism/base/error.h"

namespace kvprism {

using namespace detail;  // NOLINT(google-build-using-namespace)

namespace {

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown exception";
  }
}

}  // namespace

void BlockingStore::Core::retire(const std::shared_ptr<Generation>& generation,
                                 const std::string& why) {
  if (generation->retired) return;
  if (!why.empty()) say(LogLevel::kWarning, "a store client is replaced: " + why);
  generation->retired = true;
  ++counters.retired_now;
  if (current == generation) {
    current = nullptr;
    silent = false;
    probe_due = false;
    probed = nullptr;
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      end_queue(static_cast<Kind>(kind), ItemStatus::kUnavailable);
    }
    // A client that dies young is replaced more and more slowly.
    const TimePoint now = Clock::now();
    if (now - generation->born >= to_chrono(options.max_retry)) failures = 0;
    next_attempt = failures == 0 ? now : now + retry_pause.after(failures);
    ++failures;
  }
  for (std::condition_variable& wake : lane_wakes) wake.notify_all();
  wake_care();
  try {
    dig(generation);
  } catch (const std::exception& error) {
    // Until there is a thread, what is unquiet stays so: held, never wrong.
    unburied.push_back(generation);
    next_burial = std::min(next_burial, Clock::now() + to_chrono(options.max_retry));
    say(LogLevel::kError,
        std::string("no thread to tear a store client down, trying on: ") + error.what());
  }
}

void BlockingStore::Core::dig(const std::shared_ptr<Generation>& generation) {
  Worker& grave = helpers.emplace_back();
  try {
    grave.thread = start_thread("kvp-grave", [core = shared_from_this(), generation, &grave] {
      core->bury(generation);
      const Lock lock(core->mutex);
      grave.done = true;
      core->care_wakes.notify_all();
      core->changed.notify_all();
    });
  } catch (...) {
    helpers.pop_back();
    throw;
  }
}

void BlockingStore::Core::bury(const std::shared_ptr<Generation>& generation) {
  {
    Lock lock(mutex);
    changed.wait(lock, [&] {
      if (generation->busy != 0) return false;
      for (std::size_t kind = 0; kind < kKinds; ++kind) {
        if (generation->has_lane[kind] && !generation->lanes[kind].done) return false;
      }
      return true;
    });
  }
  for (Worker& lane : generation->lanes) {
    if (lane.thread.joinable()) lane.thread.join();
  }
  generation->client->tear_down();
  generation->client.reset();
  const Lock lock(mutex);
  for (Unquiet& operation : generation->unquiet) {
    Completion completion;
    completion.op = operation.op;
    completion.quiet = true;
    completion.batch = std::move(operation.batch);
    auto& list = unquiet[side_of(operation.kind)];
    list.erase(std::find(list.begin(), list.end(), operation.op));
    --counters.unquiet_now;
    publish(operation.kind, std::move(completion));
  }
  generation->unquiet.clear();
  --counters.retired_now;
  changed.notify_all();
}

void BlockingStore::Core::start_maker() {
  attempt = std::make_shared<Attempt>(Attempt{Clock::now()});
  Worker& worker = maker.emplace_back();
  worker.thread = start_thread("kvp-make", [core = shared_from_this(), mine = attempt, &worker] {
    core->make_client(mine);
    const Lock lock(core->mutex);
    worker.done = true;
    core->care_wakes.notify_all();
    core->changed.notify_all();
  });
}

void BlockingStore::Core::count_retired(Attempt& mine) {
  if (!std::exchange(mine.counted, true)) ++counters.retired_now;
}

void BlockingStore::Core::give_up_maker() {
  attempt->given_up = true;
  if (std::exchange(attempt->has_regions, false)) end_regions();
  count_retired(*attempt);
  helpers.splice(helpers.end(), maker);
  const std::int64_t limit =
      options.setup_timeout.ns / 1'000'000 + options.region_timeout.ns / 1'000'000;
  note_failure("it was not made within " + std::to_string(limit) + " ms");
  changed.notify_all();
}

CallEnd BlockingStore::Core::ask(BlockingClient& client, ItemStatus& answer) noexcept {
  ObjectBatch question;
  question.keys.append() = "kvprism-probe";
  ItemResult result;
  const CallEnd end = client.exists(question, {&result, 1});
  answer = result.status;
  return end;
}

void BlockingStore::Core::probe(BlockingClient& client) {
  ItemStatus answer{};
  const CallEnd end = ask(client, answer);
  if (end.quiet && !end.broken && answers(answer)) return;
  fail(ErrorCode::kUnavailable, kSubject,
       {"exists",
        std::string(to_string(answer)),
        "an answer about a key that need not be there",
        {}});
}

void BlockingStore::Core::note_failure(const std::string& why) {
  ++counters.failed_attempts;
  ++failed_attempts;
  ++failures;
  if (away != why) say(LogLevel::kWarning, "no store client, trying on: " + why);
  away = why;
  next_attempt = Clock::now() + retry_pause.after(failures);
}

void BlockingStore::Core::take_over(Attempt& mine, std::shared_ptr<Generation>& generation) {
  generation->born = Clock::now();
  if (capabilities.name.empty()) {
    capabilities = generation->client->capabilities();
  } else {
    ++counters.replacements;
    say(LogLevel::kWarning, "the store has a new client");
  }
  current = std::move(generation);
  mine.over = true;
  failed_attempts = 0;
  away.clear();
}

void BlockingStore::Core::make_client(const std::shared_ptr<Attempt>& mine) {
  auto generation = std::make_shared<Generation>();
  std::exception_ptr error;
  Lock lock(mutex, std::defer_lock);
  const auto wanted = [&] { return !finished && !mine->given_up; };
  const auto goes_on = [&] {
    const Lock held(mutex);
    return wanted();
  };
  try {
    generation->client = factory();
    if (generation->client == nullptr) {
      fail(ErrorCode::kUnavailable, kSubject, {"factory", "null", "a client", {}});
    }
    lock.lock();
    // Others give up after region_timeout.
    changed.wait(lock, [&] { return !regions_busy || !wanted(); });
    if (wanted()) {
      regions_busy = mine->has_regions = true;
      const std::vector<Region> present = regions.regions();
      lock.unlock();
      for (const Region& region : present) {
        if (!goes_on()) break;
        generation->client->register_region(region);
      }
      if (!capabilities.name.empty() && goes_on()) probe(*generation->client);
      lock.lock();
    }
    if (wanted()) take_over(*mine, generation);
  } catch (...) {
    error = std::current_exception();
    if (!lock.owns_lock()) lock.lock();
  }
  // Whoever may change regions next finds the client: in use, or counted as retired.
  if (std::exchange(mine->has_regions, false)) end_regions();
  if (mine->over) return;
  if (generation->client != nullptr) {
    count_retired(*mine);
    lock.unlock();
    generation->client->tear_down();
    generation.reset();
    lock.lock();
  }
  if (mine->counted) --counters.retired_now;
  if (!mine->given_up && error != nullptr) {
    mine->over = true;
    make_error = error;
    note_failure(message_of(error));
  }
  changed.notify_all();
}

}  // namespace kvprism
