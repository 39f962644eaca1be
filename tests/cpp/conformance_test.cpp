// The stores that need nothing from outside, over the conformance suite.
#include <algorithm>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "kvprism/backend/blocking_store.h"
#include "kvprism/backend/clock.h"
#include "kvprism/backend/fault_injection.h"
#include "kvprism/backend/memory_store.h"
#include "store_conformance.h"

namespace kvprism::test {
namespace {

// A clock that moves only when the test rests.
void virtual_time(StoreUnderTest& test) {
  auto now = std::make_shared<Instant>(Instant{1});
  test.now = [now] { return *now; };
  test.rest = [now] { *now = *now + milliseconds(1); };
}

StoreUnderTest memory(const MemoryStoreOptions& options) {
  StoreUnderTest test;
  auto store = std::make_shared<MemoryStore>(std::make_shared<MemoryPool>(), options);
  test.store = store;
  test.index = store;
  test.queue_limit = options.max_operations;
  virtual_time(test);
  return test;
}

StoreUnderTest no_faults(const MemoryStoreOptions& options) {
  StoreUnderTest test = memory(options);
  auto injector = std::make_shared<FaultInjector>(test.store, test.index, FaultPlan{});
  test.store = injector;
  test.index = injector;
  return test;
}

// A pool's client whose calls block: what BlockingStore makes asynchronous.
class BlockingMemoryClient final : public BlockingClient {
 public:
  explicit BlockingMemoryClient(std::shared_ptr<MemoryPool> pool) : store_(std::move(pool)) {}

  StoreCapabilities capabilities() const override { return store_.capabilities(); }
  CallEnd exists(const ObjectBatch& batch, std::span<ItemResult> results) noexcept override {
    return call(batch, results, &MemoryStore::start_exists, &MemoryStore::poll_index);
  }
  CallEnd remove(const ObjectBatch& batch, const Removal& removal,
                 std::span<ItemResult> results) noexcept override {
    const auto start = [&](OpId op, std::unique_ptr<ObjectBatch>& copy) {
      store_.start_remove(op, copy, removal, Instant{0}, Instant{1});
    };
    return run(batch, results, start, &MemoryStore::poll_index);
  }
  CallEnd put(const ObjectBatch& batch, std::span<ItemResult> results) noexcept override {
    return call(batch, results, &MemoryStore::start_put, &MemoryStore::poll_store);
  }
  CallEnd get(const ObjectBatch& batch, std::span<ItemResult> results) noexcept override {
    return call(batch, results, &MemoryStore::start_get, &MemoryStore::poll_store);
  }
  void register_region(const Region& region) override {
    const std::lock_guard lock(mutex_);
    store_.add_region(region);
  }
  void unregister_region(const Region& region) noexcept override {
    const std::lock_guard lock(mutex_);
    store_.remove_region(region);
  }
  void tear_down() noexcept override {}

 private:
  template <class Start, class Poll>
  CallEnd call(const ObjectBatch& batch, std::span<ItemResult> results, Start start, Poll poll) {
    const auto started = [&](OpId op, std::unique_ptr<ObjectBatch>& copy) {
      (store_.*start)(op, copy, Instant{0}, Instant{1});
    };
    return run(batch, results, started, poll);
  }
  template <class Start, class Poll>
  CallEnd run(const ObjectBatch& batch, std::span<ItemResult> results, Start start, Poll poll) {
    const std::lock_guard lock(mutex_);
    auto copy = std::make_unique<ObjectBatch>();
    for (const std::string& key : batch.keys.strings()) copy->keys.append() = key;
    copy->segments = batch.segments;
    copy->ends = batch.ends;
    start(OpId{1}, copy);
    Completion done;
    (store_.*poll)(Instant{0}, done);
    std::copy(done.items.begin(), done.items.end(), results.begin());
    return {};
  }

  std::mutex mutex_;
  MemoryStore store_;
};

StoreUnderTest blocking() {
  StoreUnderTest test;
  BlockingStoreOptions options;
  options.queue_limit = 4;
  const auto pool = std::make_shared<MemoryPool>();
  const auto store = std::make_shared<BlockingStore>(
      [pool] { return std::make_unique<BlockingMemoryClient>(pool); }, options);
  test.store = store;
  test.index = store;
  test.now = &monotonic_now;
  test.rest = [store] { store->wait_for_completion(milliseconds(5)); };
  return test;
}

const MemoryStoreOptions kSlow{.latency = milliseconds(2),
                               .latency_per_kib = milliseconds(1),
                               .lease = {},
                               .max_operations = 4};

INSTANTIATE_TEST_SUITE_P(InProcess, StoreConformance,
                         testing::Values(StoreFactory{"memory", [] { return memory({}); }},
                                         StoreFactory{"slow_memory", [] { return memory(kSlow); }},
                                         StoreFactory{"no_faults", [] { return no_faults({}); }},
                                         StoreFactory{"no_faults_slow",
                                                      [] { return no_faults(kSlow); }},
                                         StoreFactory{"blocking", [] { return blocking(); }}),
                         factory_name);

INSTANTIATE_TEST_SUITE_P(InProcess, BoundedStoreConformance,
                         testing::Values(StoreFactory{"slow_memory", [] { return memory(kSlow); }},
                                         StoreFactory{"no_faults_slow",
                                                      [] { return no_faults(kSlow); }}),
                         factory_name);

}  // namespace
}  // namespace kvprism::test
