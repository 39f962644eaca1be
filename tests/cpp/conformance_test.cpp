// The stores that need nothing from outside, over the conformance suite.
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

const MemoryStoreOptions kSlow{.latency = milliseconds(2),
                               .latency_per_kib = milliseconds(1),
                               .lease = {},
                               .max_operations = 4};

INSTANTIATE_TEST_SUITE_P(InProcess, StoreConformance,
                         testing::Values(StoreFactory{"memory", [] { return memory({}); }},
                                         StoreFactory{"slow_memory", [] { return memory(kSlow); }},
                                         StoreFactory{"no_faults", [] { return no_faults({}); }},
                                         StoreFactory{"no_faults_slow",
                                                      [] { return no_faults(kSlow); }}),
                         factory_name);

}  // namespace
}  // namespace kvprism::test
