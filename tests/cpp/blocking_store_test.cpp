// The adapter from blocking clients to the asynchronous store, with a client that does what a
// script says.
#include "kvprism/backend/blocking_store.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/base/log.h"

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

namespace kvprism {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

enum class Call { kPut, kGet, kExists };

// A gate that holds whoever passes until it is opened.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    --waiting_;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // False when nobody comes.
  bool wait_for_visitor() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), [&] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  bool open_ = false;
};

// What all clients of one store share: the objects, what happened, and what shall happen.
struct Script {
  using Step = std::function<CallEnd(const ObjectBatch&, std::span<ItemResult>)>;

  std::mutex mutex;
  std::map<std::string, std::string> objects;
  std::vector<std::pair<int, Region>> registered;  // client, region
  std::vector<int> torn_down;
  std::function<void(int client)> on_make;
  std::function<void(int client, const Region&)> on_register;
  std::function<void(int client)> on_tear_down;
  // Takes the place of the call when it returns true.
  std::function<bool(int client, Call, const ObjectBatch&, CallEnd&)> on_call;
  std::atomic<int> made = 0;
  std::atomic<int> attempts = 0;

  bool is_torn_down(int client) {
    const std::lock_guard lock(mutex);
    return std::count(torn_down.begin(), torn_down.end(), client) > 0;
  }
  std::vector<Region> regions_of(int client) {
    const std::lock_guard lock(mutex);
    std::vector<Region> result;
    for (const auto& [owner, region] : registered) {
      if (owner == client) result.push_back(region);
    }
    return result;
  }
};

class ScriptedClient final : public BlockingClient {
 public:
  ScriptedClient(std::shared_ptr<Script> script, int number)
      : script_(std::move(script)), number_(number) {}

  StoreCapabilities capabilities() const override { return {"scripted", 16, 1 << 20, false}; }

  CallEnd exists(const ObjectBatch& batch, std::span<ItemResult> results) noexcept override {
    CallEnd end;
    if (scripted(Call::kExists, batch, end)) return end;
    const std::lock_guard lock(script_->mutex);
    for (std::size_t i = 0; i < batch.keys.size(); ++i) {
      results[i].status =
          script_->objects.contains(batch.keys[i]) ? ItemStatus::kOk : ItemStatus::kMissing;
    }
    return end;
  }

  CallEnd put(const ObjectBatch& batch, std::span<ItemResult> results) noexcept override {
    CallEnd end;
    if (scripted(Call::kPut, batch, end)) return end;
    const std::lock_guard lock(script_->mutex);
    for (std::size_t i = 0; i < batch.keys.size(); ++i) {
      const Segment& segment = batch.segments[i];
      script_->objects[batch.keys[i]].assign(reinterpret_cast<const char*>(segment.base),
                                             segment.length);
      results[i] = {ItemStatus::kOk, segment.length};
    }
    return end;
  }

  CallEnd get(const ObjectBatch& batch, std::span<ItemResult> results) noexcept override {
    CallEnd end;
    if (scripted(Call::kGet, batch, end)) return end;
    const std::lock_guard lock(script_->mutex);
    for (std::size_t i = 0; i < batch.keys.size(); ++i) {
      const auto at = script_->objects.find(batch.keys[i]);
      if (at == script_->objects.end()) {
        results[i] = {ItemStatus::kMissing, 0};
        continue;
      }
      std::memcpy(batch.segments[i].base, at->second.data(), batch.segments[i].length);
      results[i] = {ItemStatus::kOk, batch.segments[i].length};
    }
    return end;
  }

  void register_region(const Region& region) override {
    if (script_->on_register) script_->on_register(number_, region);
    const std::lock_guard lock(script_->mutex);
    script_->registered.emplace_back(number_, region);
  }

  void unregister_region(const Region& region) noexcept override {
    const std::lock_guard lock(script_->mutex);
    std::erase(script_->registered, std::pair(number_, region));
  }

  void tear_down() noexcept override {
    if (script_->on_tear_down) script_->on_tear_down(number_);
    const std::lock_guard lock(script_->mutex);
    script_->torn_down.push_back(number_);
  }

 private:
  bool scripted(Call call, const ObjectBatch& batch, CallEnd& end) {
    return script_->on_call && script_->on_call(number_, call, batch, end);
  }

  std::shared_ptr<Script> script_;
  int number_;
};

BlockingClientFactory factory_of(const std::shared_ptr<Script>& script) {
  return [script]() -> std::unique_ptr<BlockingClient> {
    const int attempt = script->attempts++;
    if (script->on_make) script->on_make(attempt);
    return std::make_unique<ScriptedClient>(script, script->made++);
  };
}

BlockingStoreOptions quick() {
  BlockingStoreOptions options;
  options.stuck_after = kvprism::milliseconds(150);
  options.first_retry = kvprism::milliseconds(5);
  options.max_retry = kvprism::milliseconds(20);
  options.close_budget = kvprism::seconds(5);
  return options;
}

std::unique_ptr<ObjectBatch> batch_of(const std::vector<std::string>& keys,
                                      std::byte* memory = nullptr, std::size_t bytes = 0) {
  auto batch = std::make_unique<ObjectBatch>();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    batch->keys.append() = keys[i];
    if (memory == nullptr) continue;
    batch->segments.push_back({memory + i * bytes, bytes});
    batch->ends.push_back(static_cast<std::uint32_t>(i + 1));
  }
  return batch;
}

constexpr Instant kNow{1000};
constexpr Instant kLater{1000 + 60'000'000'000};

// Collects both ends of operations and refuses what may not be: a second end, quiet before outcome.
class Ends {
 public:
  explicit Ends(BlockingStore& store) : store_(store) {}

  void drain() {
    Completion completion;
    while (store_.poll_store(kNow, completion)) take(std::move(completion));
    while (store_.poll_index(kNow, completion)) take(std::move(completion));
  }
  bool wait(const std::function<bool()>& until, milliseconds limit = milliseconds(10000)) {
    const auto end = Clock::now() + limit;
    for (drain(); !until(); drain()) {
      if (Clock::now() > end) return false;
      store_.wait_for_completion(kvprism::milliseconds(1));
    }
    return true;
  }
  bool has_outcome(int op) const { return outcomes.contains(op); }
  bool is_quiet(int op) const { return quiet.contains(op); }
  bool wait_outcome(int op) {
    return wait([&] { return has_outcome(op); });
  }
  bool wait_quiet(int op) {
    return wait([&] { return is_quiet(op); });
  }
  ItemStatus status(int op) const { return outcomes.at(op).at(0).status; }

  std::map<int, std::vector<ItemResult>> outcomes;
  std::map<int, std::unique_ptr<ObjectBatch>> quiet;

 private:
  void take(Completion completion) {
    const int op = static_cast<int>(completion.op);
    EXPECT_TRUE(completion.outcome || completion.quiet);
    if (completion.outcome) {
      EXPECT_TRUE(outcomes.emplace(op, std::move(completion.items)).second) << op;
    }
    if (completion.quiet) {
      EXPECT_TRUE(outcomes.contains(op)) << "quiet before outcome: " << op;
      EXPECT_NE(completion.batch, nullptr) << op;
      EXPECT_TRUE(quiet.emplace(op, std::move(completion.batch)).second) << op;
    } else {
      EXPECT_EQ(completion.batch, nullptr) << op;
    }
  }

  BlockingStore& store_;
};

bool start_put(BlockingStore& store, int op, std::unique_ptr<ObjectBatch> batch) {
  return store.start_put(OpId{static_cast<std::uint64_t>(op)}, batch, kNow, kLater);
}
bool start_get(BlockingStore& store, int op, std::unique_ptr<ObjectBatch> batch,
               Instant deadline = kLater) {
  return store.start_get(OpId{static_cast<std::uint64_t>(op)}, batch, kNow, deadline);
}
bool start_exists(BlockingStore& store, int op, std::unique_ptr<ObjectBatch> batch) {
  return store.start_exists(OpId{static_cast<std::uint64_t>(op)}, batch, kNow, kLater);
}

template <class Condition>
bool eventually(Condition condition) {
  const auto end = Clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

TEST(BlockingStore, MovesBytesAndGivesTheBatchBack) {
  const auto script = std::make_shared<Script>();
  BlockingStore store(factory_of(script), quick());
  EXPECT_EQ(store.capabilities().name, "scripted");
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), memory.size(), -1});
  Ends ends(store);

  std::memset(memory.data(), 7, 32);
  ASSERT_TRUE(start_put(store, 1, batch_of({"a", "b"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(ends.outcomes[1], (std::vector<ItemResult>(2, {ItemStatus::kOk, 16})));
  EXPECT_EQ(ends.quiet[1]->keys[1], "b");

  ASSERT_TRUE(start_exists(store, 2, batch_of({"b", "c"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.outcomes[2][0].status, ItemStatus::kOk);
  EXPECT_EQ(ends.outcomes[2][1].status, ItemStatus::kMissing);

  ASSERT_TRUE(start_get(store, 3, batch_of({"a", "c"}, memory.data() + 32, 16)));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(ends.outcomes[3][1].status, ItemStatus::kMissing);
  EXPECT_EQ(std::memcmp(memory.data(), memory.data() + 32, 16), 0);

  const BlockingStoreCounters counters = store.counters();
  EXPECT_EQ(counters.put_calls, 1u);
  EXPECT_EQ(counters.put_items, 2u);
  EXPECT_EQ(counters.put_bytes, 32u);
  EXPECT_EQ(counters.get_items, 2u);
  EXPECT_EQ(counters.get_bytes, 16u);
  EXPECT_EQ(counters.exists_items, 2u);
  EXPECT_EQ(counters.replacements, 0u);
  EXPECT_TRUE(counters.usable);
}

TEST(BlockingStore, StartsNeverWaitAndFullQueuesRefuse) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int, Call call, const ObjectBatch&, CallEnd&) {
    if (call == Call::kPut) gate->pass();
    return false;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  options.queue_limit = 2;
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  const auto began = Clock::now();
  ASSERT_TRUE(start_put(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(start_put(store, 2, batch_of({"b"}, memory.data(), 16)));
  ASSERT_TRUE(start_put(store, 3, batch_of({"c"}, memory.data(), 16)));
  auto refused = batch_of({"d"}, memory.data(), 16);
  EXPECT_FALSE(store.start_put(OpId{4}, refused, kNow, kLater));
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->keys[0], "d");
  EXPECT_EQ(store.counters().queue_full, 1u);
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(5));
  // The other kinds have threads of their own.
  ASSERT_TRUE(start_exists(store, 5, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(5));
  EXPECT_FALSE(ends.has_outcome(1));
  gate->open();
  for (const int op : {1, 2, 3}) EXPECT_TRUE(ends.wait_quiet(op));
}

TEST(BlockingStore, UnquietCallReplacesTheClientAndIsQuietOnlyAfterTearDown) {
  const auto script = std::make_shared<Script>();
  const auto call_gate = std::make_shared<Gate>();
  const auto grave_gate = std::make_shared<Gate>();
  script->on_call = [call_gate](int client, Call call, const ObjectBatch&, CallEnd& end) {
    if (client != 0 || call != Call::kGet) return false;
    call_gate->pass();
    end.quiet = false;
    return true;
  };
  script->on_tear_down = [grave_gate](int client) {
    if (client == 0) grave_gate->pass();
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 64> memory{};
  const Region first{memory.data(), 32, -1};
  const Region second{memory.data() + 32, 32, -1};
  store.add_region(first);
  store.add_region(second);
  Ends ends(store);
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(call_gate->wait_for_visitor());
  ASSERT_TRUE(start_get(store, 2, batch_of({"b"}, memory.data(), 16)));
  call_gate->open();
  ASSERT_TRUE(ends.wait_outcome(1));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kUnavailable);
  EXPECT_FALSE(ends.is_quiet(1));

  // The new client knows the regions and works while the old one is still there.
  ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
  EXPECT_EQ(script->regions_of(1), (std::vector<Region>{first, second}));
  ASSERT_TRUE(start_put(store, 3, batch_of({"c"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(ends.status(3), ItemStatus::kOk);
  std::this_thread::sleep_for(milliseconds(50));
  ends.drain();
  EXPECT_FALSE(ends.is_quiet(1));
  EXPECT_EQ(store.counters().unquiet_now, 1u);
  EXPECT_EQ(store.counters().retired_now, 1u);

  grave_gate->open();
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(store.counters().unquiet_now, 0u);
  EXPECT_EQ(store.counters().unquiet_calls, 1u);
  EXPECT_EQ(script->made, 2);
}

TEST(BlockingStore, BrokenClientGoesAlthoughItsCallWasQuiet) {
  const auto script = std::make_shared<Script>();
  script->on_call = [](int client, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = client == 0;
    return end.broken;
  };
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return script->is_torn_down(0) && store.counters().usable; }));
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
}

TEST(BlockingStore, StuckCallEndsAsTimedOutAndIsQuietAfterItsReturnAndTheTearDown) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  std::array<std::byte, 16> memory{};
  script->on_call = [gate, &memory](int client, Call call, const ObjectBatch&, CallEnd&) {
    if (client != 0 || call != Call::kGet) return false;
    gate->pass();
    memory.fill(std::byte{9});  // the late write
    return true;
  };
  BlockingStore store(factory_of(script), quick());
  store.add_region({memory.data(), memory.size(), -1});
  Ends ends(store);
  const auto began = Clock::now();
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(start_get(store, 2, batch_of({"b"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_outcome(1));
  EXPECT_GE(Clock::now() - began, milliseconds(150));
  EXPECT_EQ(ends.status(1), ItemStatus::kTimedOut);
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kUnavailable);
  EXPECT_FALSE(ends.is_quiet(1));
  EXPECT_FALSE(script->is_torn_down(0));
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  ASSERT_TRUE(start_exists(store, 3, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(store.counters().stuck_calls, 1u);

  gate->open();
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_TRUE(script->is_torn_down(0));
  memory.fill(std::byte{1});
  std::this_thread::sleep_for(milliseconds(20));
  for (const std::byte byte : memory) EXPECT_EQ(byte, std::byte{1});
}

TEST(BlockingStore, CallsOfTheOldClientThatRunOnEndNormally) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int client, Call call, const ObjectBatch&, CallEnd& end) {
    if (client == 0 && call == Call::kPut) gate->pass();
    if (client == 0 && call == Call::kExists) {
      end.broken = true;
      return true;
    }
    return false;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  ASSERT_TRUE(start_put(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
  EXPECT_FALSE(script->is_torn_down(0));
  gate->open();
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(ends.status(1), ItemStatus::kOk);
  EXPECT_TRUE(eventually([&] { return script->is_torn_down(0); }));
}

TEST(BlockingStore, OpenCircuitAnswersAtOnceAndCloses) {
  const auto script = std::make_shared<Script>();
  std::atomic<bool> up = true;
  script->on_make = [&up](int) {
    if (!up) fail(ErrorCode::kUnavailable, "store client", {"master", "m", "an answer", {}});
  };
  script->on_call = [&up](int, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = !up;
    return end.broken;
  };
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  up = false;
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  const auto began = Clock::now();
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a", "b"})));
  ends.drain();
  ASSERT_TRUE(ends.is_quiet(2));
  EXPECT_LT(Clock::now() - began, milliseconds(500));
  EXPECT_EQ(ends.outcomes[2], (std::vector<ItemResult>(2, {ItemStatus::kUnavailable, 0})));
  EXPECT_EQ(store.counters().circuit_open, 1u);
  std::byte byte{};
  EXPECT_THROW(store.add_region({&byte, 1, -1}), Error);

  // With pauses of 5, 10, 20, 20 ms ... at least 7/8 of them, half a second holds no more than
  // this.
  const int before = script->attempts;
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_LE(script->attempts - before, 35);
  EXPECT_GE(script->attempts - before, 2);
  EXPECT_FALSE(store.counters().usable);

  up = true;
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  ASSERT_TRUE(start_exists(store, 3, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(ends.status(3), ItemStatus::kMissing);
}

// The library's log lines while this lives.
class LogLines {
 public:
  LogLines() { set_log_sink(&LogLines::take, this, LogLevel::kWarning); }
  ~LogLines() { set_log_sink(nullptr, nullptr, LogLevel::kOff); }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;

  std::vector<std::string> containing(std::string_view part) {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> found;
    for (const std::string& line : lines_) {
      if (line.find(part) != std::string::npos) found.push_back(line);
    }
    return found;
  }

 private:
  static void take(void* context, LogLevel, std::string_view line) {
    auto& self = *static_cast<LogLines*>(context);
    const std::lock_guard lock(self.mutex_);
    self.lines_.emplace_back(line);
  }

  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST(BlockingStore, LateCallHoldsUpOnlyItsKindAndNobodyWaitsBehindIt) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  std::atomic<int> asked = 0;
  script->on_call = [gate, &asked](int, Call call, const ObjectBatch&, CallEnd&) {
    if (call == Call::kExists && asked++ == 0) gate->pass();
    return false;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  LogLines lines;
  BlockingStore store(factory_of(script), options);
  Ends ends(store);
  auto late = batch_of({"a"});
  ASSERT_TRUE(store.start_exists(OpId{1}, late, kNow, kNow + kvprism::milliseconds(200)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(start_exists(store, 2, batch_of({"b"})));  // waits behind it, for a minute if need be
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kUnavailable);
  EXPECT_FALSE(ends.has_outcome(1));
  ASSERT_TRUE(start_exists(store, 3, batch_of({"c"})));
  ends.drain();
  ASSERT_TRUE(ends.is_quiet(3));
  EXPECT_EQ(ends.status(3), ItemStatus::kUnavailable);
  std::array<std::byte, 16> memory{};
  ASSERT_TRUE(start_put(store, 4, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(4));
  EXPECT_EQ(ends.status(4), ItemStatus::kOk);

  gate->open();
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(ends.status(1), ItemStatus::kOk);
  ASSERT_TRUE(start_exists(store, 5, batch_of({"d"})));
  ASSERT_TRUE(ends.wait_quiet(5));
  EXPECT_EQ(ends.status(5), ItemStatus::kMissing);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(store.counters().late_calls, 1u);
  EXPECT_EQ(store.counters().circuit_open, 1u);
  EXPECT_EQ(store.counters().replacements, 0u);
  EXPECT_EQ(lines.containing("kvp-look is late").size(), 1u);
  EXPECT_EQ(lines.containing("kvp-look return again").size(), 1u);
}

TEST(BlockingStore, NewClientMustAnswerBeforeItIsUsedAndEachChangeIsOneLine) {
  const auto script = std::make_shared<Script>();
  std::atomic<bool> answers = false;
  script->on_call = [&answers](int client, Call call, const ObjectBatch&, CallEnd& end) {
    if (client == 0) end.broken = true;
    if (client > 0 && call == Call::kExists && !answers) return true;  // leaves kCancelled
    return client == 0;
  };
  LogLines lines;
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return script->made >= 5; }));
  EXPECT_FALSE(store.counters().usable);
  EXPECT_EQ(store.counters().replacements, 0u);
  answers = true;
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  EXPECT_EQ(store.counters().replacements, 1u);
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
  EXPECT_EQ(lines.containing("no store client").size(), 1u);
  EXPECT_EQ(lines.containing("has a new client").size(), 1u);
}

TEST(BlockingStore, AttemptsCanBeBounded) {
  const auto script = std::make_shared<Script>();
  script->on_make = [](int attempt) {
    if (attempt > 0) throw std::runtime_error("gone");
  };
  script->on_call = [](int, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = true;
    return true;
  };
  BlockingStoreOptions options = quick();
  options.max_attempts = 3;
  BlockingStore store(factory_of(script), options);
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return store.counters().failed_attempts == 3; }));
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(script->attempts, 4);
}

TEST(BlockingStore, RetiredClientsAreBounded) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [](int, Call call, const ObjectBatch&, CallEnd& end) {
    end.quiet = call != Call::kGet;
    return !end.quiet;
  };
  script->on_tear_down = [gate](int) { gate->pass(); };
  BlockingStoreOptions options = quick();
  options.max_retired = 2;
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  for (const int op : {1, 2}) {
    ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
    ASSERT_TRUE(start_get(store, op, batch_of({"a"}, memory.data(), 16)));
    ASSERT_TRUE(ends.wait_outcome(op));
  }
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(store.counters().usable);
  EXPECT_EQ(store.counters().retired_now, 2u);
  EXPECT_EQ(store.counters().unquiet_now, 2u);
  gate->open();
  EXPECT_TRUE(ends.wait_quiet(1));
  EXPECT_TRUE(ends.wait_quiet(2));
  EXPECT_TRUE(eventually([&] { return store.counters().usable; }));
}

TEST(BlockingStore, WaitingOperationsExpire) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int, Call, const ObjectBatch&, CallEnd&) {
    gate->pass();
    return true;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(
      start_get(store, 2, batch_of({"a"}, memory.data(), 16), kNow + kvprism::milliseconds(50)));
  ASSERT_TRUE(start_get(store, 3, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(start_get(store, 4, batch_of({"a"}, memory.data(), 16), kNow));
  ends.drain();
  EXPECT_TRUE(ends.is_quiet(4));
  const auto began = Clock::now();
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
  for (const int op : {2, 4}) EXPECT_EQ(ends.status(op), ItemStatus::kTimedOut);
  EXPECT_EQ(store.counters().expired, 2u);
  EXPECT_FALSE(ends.has_outcome(1));
  EXPECT_FALSE(ends.has_outcome(3));
  gate->open();
  EXPECT_TRUE(ends.wait_quiet(3));
}

TEST(BlockingStore, CloseDrains) {
  const auto script = std::make_shared<Script>();
  script->on_call = [](int, Call, const ObjectBatch&, CallEnd&) {
    std::this_thread::sleep_for(milliseconds(20));
    return false;
  };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  for (int op = 1; op <= 4; ++op) {
    ASSERT_TRUE(start_put(store, op, batch_of({"k" + std::to_string(op)}, memory.data(), 16)));
  }
  EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
  EXPECT_FALSE(script->is_torn_down(0)) << "the other side may still want it";
  EXPECT_EQ(store.close_index(kvprism::seconds(5)).unquiet, 0u);
  EXPECT_TRUE(script->is_torn_down(0));
  ends.drain();
  for (int op = 1; op <= 4; ++op) {
    EXPECT_TRUE(ends.is_quiet(op));
    EXPECT_EQ(ends.status(op), ItemStatus::kOk);
  }
  EXPECT_FALSE(start_put(store, 5, batch_of({"x"}, memory.data(), 16)));
  EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
}

TEST(BlockingStore, OneSideClosesWithoutTheOther) {
  const auto script = std::make_shared<Script>();
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(store.close_store(kvprism::seconds(1)).unquiet, 0u);
  EXPECT_FALSE(script->is_torn_down(0));
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(store.close_index(kvprism::seconds(5)).unquiet, 0u);
  EXPECT_TRUE(script->is_torn_down(0));
  EXPECT_FALSE(start_exists(store, 3, batch_of({"a"})));
}

TEST(BlockingStore, ASideThatClosesEarlyLeavesTheClientToTheOther) {
  // A scheduler may end before its worker has had its first job.
  const auto script = std::make_shared<Script>();
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  EXPECT_EQ(store.close_index(kvprism::seconds(5)).unquiet, 0u);
  std::array<std::byte, 16> memory{};
  ASSERT_TRUE(start_put(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(ends.status(1), ItemStatus::kOk);
  EXPECT_FALSE(script->is_torn_down(0));
  EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
  EXPECT_TRUE(script->is_torn_down(0));
}

TEST(BlockingStore, CloseCancelsReportsAndNeverHangs) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  // Outlives the store, because the hung call may still write.
  const auto memory = std::make_shared<std::array<std::byte, 16>>();
  script->on_call = [gate, memory](int, Call call, const ObjectBatch& batch, CallEnd&) {
    if (call != Call::kGet) return false;  // the question to a new client
    gate->pass();
    std::memset(batch.segments[0].base, 5, batch.segments[0].length);
    return true;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  options.close_budget = kvprism::milliseconds(50);
  {
    BlockingStore store(factory_of(script), options);
    Ends ends(store);
    ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory->data(), 16)));
    ASSERT_TRUE(gate->wait_for_visitor());
    ASSERT_TRUE(start_get(store, 2, batch_of({"a"}, memory->data(), 16)));
    const auto began = Clock::now();
    const CloseReport report = store.close_store(kvprism::milliseconds(50));
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
    EXPECT_EQ(report.unquiet, 1u);
    EXPECT_EQ(report.ops, std::vector<OpId>{OpId{1}});
    ends.drain();
    EXPECT_EQ(ends.status(1), ItemStatus::kCancelled);
    EXPECT_EQ(ends.status(2), ItemStatus::kCancelled);
    EXPECT_FALSE(ends.is_quiet(1));
    EXPECT_TRUE(ends.is_quiet(2));
  }
  // The threads that were left behind still have all that they need.
  gate->open();
  EXPECT_TRUE(eventually([&] { return script->is_torn_down(0); }));
  EXPECT_EQ((*memory)[15], std::byte{5});
}

TEST(BlockingStore, LateQuietIsDeliveredAfterClose) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int, Call, const ObjectBatch&, CallEnd&) {
    gate->pass();
    return true;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  EXPECT_EQ(store.close_store(kvprism::milliseconds(20)).unquiet, 1u);
  gate->open();
  EXPECT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
}

TEST(BlockingStore, ConstructorThrowsWhatTheFactoryThrows) {
  const auto script = std::make_shared<Script>();
  script->on_make = [](int) {
    fail(ErrorCode::kNotFound, "library", {"library", "x", "a file", {}});
  };
  try {
    BlockingStore store(factory_of(script), quick());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  }
  EXPECT_THROW(BlockingStore([] { return std::unique_ptr<BlockingClient>(); }, quick()), Error);
}

TEST(BlockingStore, ConstructorGivesUpAndTheLateClientIsTornDown) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_make = [gate](int) { gate->pass(); };
  BlockingStoreOptions options = quick();
  options.setup_timeout = kvprism::milliseconds(50);
  try {
    BlockingStore store(factory_of(script), options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimedOut);
  }
  gate->open();
  EXPECT_TRUE(eventually([&] { return script->is_torn_down(0); }));
}

TEST(BlockingStore, OptionsAreCheckedTogether) {
  BlockingStoreOptions options;
  options.queue_limit = 0;
  options.stuck_after = {-1};
  options.first_retry = {0};
  try {
    BlockingStore store(nullptr, options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidConfig);
    EXPECT_EQ(error.problems().size(), 4u);
  }
}

TEST(BlockingStore, RegionsAreCheckedAndIdempotent) {
  const auto script = std::make_shared<Script>();
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), 32, -1});
  store.add_region({memory.data(), 32, -1});
  EXPECT_EQ(script->regions_of(0).size(), 1u);
  for (const Region& bad : {Region{memory.data() + 16, 32, -1}, Region{memory.data(), 31, -1},
                            Region{nullptr, 8, -1}, Region{memory.data(), 0, -1}}) {
    try {
      store.add_region(bad);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    }
  }
  script->on_register = [](int, const Region&) {
    fail(ErrorCode::kUnavailable, "store client", {"region", "r", "0", {}});
  };
  EXPECT_THROW(store.add_region({memory.data() + 32, 32, -1}), Error);
  script->on_register = nullptr;
  store.add_region({memory.data() + 32, 32, -1});
  EXPECT_EQ(script->regions_of(0).size(), 2u);
  store.remove_region({memory.data(), 32, -1});
  store.remove_region({memory.data(), 32, -1});
  EXPECT_EQ(script->regions_of(0).size(), 1u);
}

TEST(BlockingStore, ClientThatCannotTakeTheRegionsIsNotUsed) {
  const auto script = std::make_shared<Script>();
  script->on_call = [](int client, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = client == 0;
    return end.broken;
  };
  script->on_register = [](int client, const Region&) {
    if (client == 1) throw std::runtime_error("no memory to lock");
  };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), 64, -1});
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
  EXPECT_TRUE(script->is_torn_down(1));
  EXPECT_EQ(script->regions_of(2).size(), 1u);
  EXPECT_EQ(store.counters().failed_attempts, 1u);
}

std::set<std::string> thread_names() {
  std::set<std::string> names;
  DIR* folder = ::opendir("/proc/self/task");
  while (const dirent* entry = ::readdir(folder)) {
    std::ifstream file(std::string("/proc/self/task/") + entry->d_name + "/comm");
    std::string name;
    if (std::getline(file, name)) names.insert(name);
  }
  ::closedir(folder);
  return names;
}

TEST(BlockingStore, ThreadsHaveNamesAndLeaveSignalsAlone) {
  const auto script = std::make_shared<Script>();
  sigset_t in_call;
  sigemptyset(&in_call);
  script->on_call = [&in_call](int, Call, const ObjectBatch&, CallEnd&) {
    pthread_sigmask(SIG_SETMASK, nullptr, &in_call);
    return false;
  };
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  {
    BlockingStore store(factory_of(script), quick());
    std::array<std::byte, 16> memory{};
    Ends ends(store);
    ASSERT_TRUE(start_put(store, 1, batch_of({"a"}, memory.data(), 16)));
    ASSERT_TRUE(start_get(store, 2, batch_of({"a"}, memory.data(), 16)));
    ASSERT_TRUE(start_exists(store, 3, batch_of({"a"})));
    for (const int op : {1, 2, 3}) ASSERT_TRUE(ends.wait_quiet(op));
    for (const char* name : {"kvp-put", "kvp-get", "kvp-look", "kvp-care"}) {
      EXPECT_TRUE(eventually([&] { return thread_names().contains(name); })) << name;
    }
  }
  EXPECT_TRUE(eventually([] { return !thread_names().contains("kvp-care"); }));
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  for (int signal = 1; signal < NSIG; ++signal) {
    EXPECT_EQ(sigismember(&before, signal), sigismember(&now, signal)) << signal;
  }
  EXPECT_TRUE(sigismember(&in_call, SIGTERM));
  EXPECT_FALSE(sigismember(&in_call, SIGSEGV));
}

// R71: the child gets refusals, ends cleanly, and the parent goes on.
TEST(BlockingStore, ForkedChildIsRefused) {
  if (kThreadSanitizer) GTEST_SKIP() << "fork with threads";
  const auto script = std::make_shared<Script>();
  auto store = std::make_unique<BlockingStore>(factory_of(script), quick());
  std::array<std::byte, 16> memory{};
  store->add_region({memory.data(), memory.size(), -1});
  Ends ends(*store);
  ASSERT_TRUE(start_put(*store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(1));
  const pid_t child = ::fork();
  if (child == 0) {
    Completion completion;
    bool right = !start_put(*store, 2, batch_of({"b"}, memory.data(), 16)) &&
                 !store->poll_store(kNow, completion) &&
                 store->close_store(kvprism::seconds(1)).unquiet == 0;
    try {
      std::array<std::byte, 16> other{};
      store->add_region({other.data(), other.size(), -1});
      right = false;
    } catch (const Error& error) {
      right = right && error.code() == ErrorCode::kClosed;
    }
    store.reset();
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ASSERT_TRUE(start_get(*store, 3, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(ends.status(3), ItemStatus::kOk);
}

// Every operation has each end exactly once, whatever its client does, and bytes are there when the
// outcome is (R56).
TEST(BlockingStore, ManyOperationsEachEndOnce) {
  const auto script = std::make_shared<Script>();
  std::atomic<std::uint32_t> counter = 0;
  script->on_call = [&counter](int, Call, const ObjectBatch&, CallEnd& end) {
    std::minstd_rand random(counter++);
    random.discard(3);
    const auto dice = random() % 100;
    if (dice < 3) {
      end.quiet = false;
      return true;
    }
    if (dice < 6) {
      end.broken = true;
      return true;
    }
    if (dice < 8) std::this_thread::sleep_for(milliseconds(30));
    return false;
  };
  script->on_tear_down = [](int client) { std::this_thread::sleep_for(milliseconds(client % 4)); };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::milliseconds(20);
  options.first_retry = kvprism::milliseconds(1);
  options.max_retry = kvprism::milliseconds(2);
  BlockingStore store(factory_of(script), options);
  constexpr int kOperations = 3000;
  constexpr std::size_t kBytes = 64;
  std::vector<std::byte> sources(kOperations * kBytes);
  std::vector<std::byte> targets(kOperations * kBytes);
  Ends ends(store);
  int started = 0;
  for (int op = 0; op < kOperations; ++op) {
    std::byte* source = sources.data() + op * kBytes;
    std::byte* target = targets.data() + op * kBytes;
    const std::string key = "k" + std::to_string(op % 50);
    bool taken = false;
    while (!taken) {
      switch (op % 3) {
        case 0:
          std::fill_n(source, kBytes, static_cast<std::byte>(op % 50));
          taken = start_put(store, op, batch_of({key}, source, kBytes));
          break;
        case 1:
          taken = start_get(store, op, batch_of({key}, target, kBytes));
          break;
        default:
          taken = start_exists(store, op, batch_of({key}));
      }
      ends.drain();
    }
    ++started;
    if (op % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  ASSERT_TRUE(ends.wait([&] { return ends.quiet.size() == static_cast<std::size_t>(started); },
                        std::chrono::seconds(60)));
  EXPECT_EQ(ends.outcomes.size(), static_cast<std::size_t>(kOperations));
  int right = 0;
  for (int op = 1; op < kOperations; op += 3) {
    if (ends.status(op) != ItemStatus::kOk) continue;
    ++right;
    for (std::size_t i = 0; i < kBytes; ++i) {
      ASSERT_EQ(targets[op * kBytes + i], static_cast<std::byte>(op % 50));
    }
  }
  EXPECT_GT(right, 100);
  const BlockingStoreCounters counters = store.counters();
  EXPECT_EQ(counters.unquiet_now, 0u);
  EXPECT_GT(counters.replacements, 5u);
}

}  // namespace
}  // namespace kvprism
