// What a seed's world looks like.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
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

// Faults that came to the world later: drawn apart, so that the rest of a seed is as it was.
struct LaterFaults {
  bool lag = false;  // ranks move one without the other
  bool lose_reports = false;
  bool lose_plans = false;
  bool ranks_die = false;
  bool restrict_late = false;  // requests, and the mode, at any time
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
  LaterFaults later;
  bool purges = false;          // of clean worlds: those that are purged
  bool replaces_ranks = false;  // and those whose ranks end and are replaced
  SimMemoryOptions memory;
  std::uint32_t max_requests = 6;  // unfinished at a time
  std::uint32_t max_prompt = 96;
  std::uint32_t max_new_tokens = 24;
  std::uint32_t families = 3;  // prefixes that prompts share

  std::string describe() const;
};

// `without`: as of WorldOptions.
WorldConfig make_world_config(std::uint64_t seed, std::string_view without);

// Built-in kinds, and `engine_prefix`: opaque pages that are found like full attention's.
const SpecRegistry& world_registry();

}  // namespace kvprism::sim
