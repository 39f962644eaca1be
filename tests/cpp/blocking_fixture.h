// A blocking client that does what a script says, and what watches the store around it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "kvprism/backend/blocking_store.h"
#include "kvprism/base/log.h"

namespace kvprism::test {

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
  std::function<void(int client, const Region&)> on_unregister;
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
    if (script_->on_unregister) script_->on_unregister(number_, region);
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

inline BlockingClientFactory factory_of(const std::shared_ptr<Script>& script) {
  return [script]() -> std::unique_ptr<BlockingClient> {
    const int attempt = script->attempts++;
    if (script->on_make) script->on_make(attempt);
    return std::make_unique<ScriptedClient>(script, script->made++);
  };
}

inline BlockingStoreOptions quick() {
  BlockingStoreOptions options;
  options.stuck_after = kvprism::milliseconds(150);
  options.first_retry = kvprism::milliseconds(5);
  options.max_retry = kvprism::milliseconds(20);
  options.close_budget = kvprism::seconds(5);
  return options;
}

inline std::unique_ptr<ObjectBatch> batch_of(const std::vector<std::string>& keys,
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

inline constexpr Instant kNow{1000};
inline constexpr Instant kLater{1000 + 60'000'000'000};

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

inline bool start_put(BlockingStore& store, int op, std::unique_ptr<ObjectBatch> batch) {
  return store.start_put(OpId{static_cast<std::uint64_t>(op)}, batch, kNow, kLater);
}
inline bool start_get(BlockingStore& store, int op, std::unique_ptr<ObjectBatch> batch,
                      Instant deadline = kLater) {
  return store.start_get(OpId{static_cast<std::uint64_t>(op)}, batch, kNow, deadline);
}
inline bool start_exists(BlockingStore& store, int op, std::unique_ptr<ObjectBatch> batch) {
  return store.start_exists(OpId{static_cast<std::uint64_t>(op)}, batch, kNow, kLater);
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

  // The same, once there is one: the store logs from a thread of its own.
  std::vector<std::string> awaited(std::string_view part) {
    const auto end = Clock::now() + std::chrono::seconds(10);
    std::vector<std::string> found = containing(part);
    while (found.empty() && Clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      found = containing(part);
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

template <class Condition>
bool eventually(Condition condition) {
  const auto end = Clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

}  // namespace kvprism::test
