// What a seed's world looks like.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/seeded_random.h"
#include "kvprism/backend/fault_injection.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/group/cache_config.h"
#include "kvprism/sim/engine.h"
#include "kvprism/sim/sim_memory.h"
#include "kvprism/store/store_scheduler.h"
#include "kvprism/store/store_worker.h"

namespace kvprism::sim {

// What a pipeline stage holds.
struct StageConfig {
  CacheConfig cache;
  std::vector<std::uint32_t> first_layers;  // by group: layers of the stages before it
};

struct WorldConfig {
  CacheConfig cache;  // of the whole model
  std::vector<StageConfig> stages;
  EngineOptions engine;
  StoreSchedulerOptions scheduler;
  StoreWorkerOptions worker;
  MemoryPoolOptions pool;
  MemoryStoreOptions store;
  FaultPlan faults;
  bool clean = false;        // no faults, no evictions, no deadlines that could pass
  bool hold_reports = true;  // the report channel delays
  bool reorder_reports = false;
  bool erase_objects = false;
  bool restarts = true;
  SimMemoryOptions memory;
  std::uint32_t max_requests = 6;  // unfinished at a time
  std::uint32_t max_prompt = 96;
  std::uint32_t max_new_tokens = 24;
  std::uint32_t families = 3;  // prefixes that prompts share

  std::string describe() const;
};

WorldConfig make_world_config(std::uint64_t seed);

}  // namespace kvprism::sim
