// The simulated engine beside a worker with a thread of its own: what an engine in Python runs on.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "kvprism/backend/clock.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/backend/pump_thread.h"
#include "kvprism/group/projection.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/sim/engine.h"
#include "kvprism/sim/sim_memory.h"

namespace kvprism {
namespace {

GroupConfig group(const char* kind, const char* layer, std::uint32_t block_size) {
  GroupConfig group;
  group.spec.kind = kind;
  group.spec.block_size = block_size;
  group.spec.payload = AttentionPayload{1, 0, 8, 8, DType::kFloat16, 1};
  group.layers = {layer};
  return group;
}

std::shared_ptr<const Projection> hybrid() {
  CacheConfig config;
  config.num_blocks = 40;
  config.groups = {group("full_attention", "f0", 16), group("circular_buffer", "r0", 8),
                   group("sliding_window", "w0", 16)};
  config.groups[2].spec.sliding_window = 32;
  return Projection::make(config, SpecRegistry::builtin());
}

// An engine from its start to its end.
struct Life {
  Life(const std::shared_ptr<const Projection>& projection, const std::shared_ptr<MemoryPool>& pool)
      : memory(std::make_shared<sim::SimMemory>(*projection, sim::SimMemoryOptions{64, true})) {
    const auto schema = KeySchema::kvprism(
        projection, {.model = "model", .kv_quantization = "none", .hash_algorithm = "test"});
    const auto store = std::make_shared<MemoryStore>(pool);
    worker = std::make_shared<StoreWorker>(schema, SegmentMap::make(projection, memory->tensors()),
                                           store, StoreWorkerOptions{});
    StoreSchedulerOptions options;
    options.epoch = 5;
    const auto scheduler =
        std::make_shared<StoreScheduler>(schema, std::make_shared<MemoryStore>(pool), options);
    sim::EngineOptions engine_options;
    engine_options.pump_workers = false;
    engine_options.token_budget = 64;
    engine = std::make_unique<sim::Engine>(
        projection, scheduler, std::vector<sim::EngineRank>{{worker, memory}}, engine_options);
    pump = std::make_unique<PumpThread>(worker, store);
  }

  void serve(std::uint32_t requests) {
    for (std::uint32_t r = 0; r < requests; ++r) {
      std::vector<std::uint32_t> prompt(100 + 7 * r);
      std::iota(prompt.begin(), prompt.end(), r % 3);
      engine->submit({RequestId{r + 1}, std::move(prompt), 5});
    }
    const Instant until = monotonic_now() + seconds(60);
    while (!engine->idle() && monotonic_now() < until) {
      const std::uint64_t seen = pump->moves();
      const bool moved = engine->step(monotonic_now());
      pump->notify();
      if (!moved) pump->wait_moved(seen, milliseconds(1));
    }
    EXPECT_TRUE(engine->idle()) << engine->describe();
    EXPECT_EQ(engine->check(), "");
    EXPECT_EQ(pump->stop(seconds(1)).unquiet, 0u);
  }

  std::shared_ptr<sim::SimMemory> memory;
  std::shared_ptr<StoreWorker> worker;
  std::unique_ptr<sim::Engine> engine;
  std::unique_ptr<PumpThread> pump;
};

TEST(RealTime, AnEngineLoadsWhatAnotherHasSaved) {
  const auto projection = hybrid();
  const auto pool = std::make_shared<MemoryPool>();
  Life first(projection, pool);
  first.serve(6);
  EXPECT_EQ(first.engine->stats().finished, 6u);
  EXPECT_GT(pool->counters().objects, 0u);

  Life second(projection, pool);
  second.serve(6);
  EXPECT_GT(second.engine->stats().external_hit_tokens, 0u);
  EXPECT_GT(second.engine->stats().bytes_verified, 0u);
  EXPECT_EQ(second.engine->stats().bytes_mismatched, 0u);
}

}  // namespace
}  // namespace kvprism
