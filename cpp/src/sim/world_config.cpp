#include "sim/world_config.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

namespace kvprism::sim {
namespace {

using detail::SeededRandom;

template <class T, std::size_t N>
T pick(SeededRandom& random, const std::array<T, N>& of) {
  return of[random.below(N)];
}

AttentionPayload attention(SeededRandom& random) {
  AttentionPayload payload;
  payload.num_kv_heads = static_cast<std::uint32_t>(random.between(1, 2));
  payload.head_size = static_cast<std::uint32_t>(random.between(1, 3));
  payload.head_size_v = static_cast<std::uint32_t>(random.between(0, 2));
  payload.dtype = pick(random, std::array{DType::kFloat16, DType::kInt8, DType::kFloat32});
  return payload;
}

GroupConfig group(SeededRandom& random, const std::string& kind, std::uint32_t block_size,
                  std::size_t number) {
  GroupConfig config;
  config.spec.kind = kind;
  config.spec.block_size = block_size;
  for (std::uint64_t layer = random.between(1, 3); layer > 0; --layer) {
    config.layers.push_back(kind.substr(0, 1) + std::to_string(number) + "." +
                            std::to_string(layer));
  }
  if (kind == "mamba") {
    StatePayload state;
    state.shapes = {{static_cast<std::uint32_t>(random.between(1, 4)), 3},
                    {static_cast<std::uint32_t>(random.between(2, 9))}};
    state.dtypes = {DType::kFloat32, DType::kBFloat16};
    state.cache_mode = "align";
    config.spec.payload = state;
  } else {
    config.spec.payload = attention(random);
  }
  if (kind == "sliding_window") {
    config.spec.sliding_window = static_cast<std::uint32_t>(random.between(2, 3 * block_size));
  }
  if (kind == "circular_buffer") {
    config.enable_kv_transfer = random.chance(2, 3);
    if (random.chance(1, 2))
      config.spec.replay_tokens = static_cast<std::uint32_t>(random.between(1, block_size));
  }
  return config;
}

// Hits inside blocks, where the groups allow it: of windows a block may not be larger than a hash.
void allow_partial_hits(SeededRandom& random, CacheConfig& config) {
  std::uint32_t unit = 0;
  for (const GroupConfig& group : config.groups) {
    if (group.spec.kind != "circular_buffer") unit = std::gcd(unit, group.spec.block_size);
  }
  if (unit % 2 == 0 && random.chance(1, 2)) unit /= 2;
  for (GroupConfig& group : config.groups) {
    if (group.spec.kind != "sliding_window") continue;
    group.spec.block_size = unit;
    group.spec.sliding_window = static_cast<std::uint32_t>(random.between(2, 3 * unit));
  }
  config.hash_block_size = unit;
  config.cache_hit_alignment_tokens = unit;
}

CacheConfig cache_config(SeededRandom& random) {
  struct Sizes {
    std::uint32_t small;
    std::uint32_t large;
  };
  const Sizes sizes = pick(random, std::array{Sizes{4, 8}, Sizes{8, 8}, Sizes{8, 16}, Sizes{4, 16},
                                              Sizes{6, 12}, Sizes{16, 32}});
  const std::uint32_t ring = static_cast<std::uint32_t>(random.between(3, 9));
  const auto size = [&] { return random.chance(1, 2) ? sizes.small : sizes.large; };
  CacheConfig config;
  std::vector<std::pair<std::string, std::uint32_t>> kinds;
  switch (random.below(8)) {
    case 0:
    case 1:
      kinds = {{"full_attention", size()}, {"circular_buffer", ring}, {"mamba", size()}};
      break;
    case 2:
      kinds = {{"full_attention", size()}, {"sliding_window", size()}};
      break;
    case 3:
      kinds = {{"full_attention", size()},
               {"circular_buffer", ring},
               {"sliding_window", size()},
               {"mamba", size()}};
      break;
    case 4:
      kinds = {{"full_attention", size()}, {"circular_buffer", ring}};
      break;
    case 5:
      kinds = {{"full_attention", sizes.small},
               {"full_attention", sizes.large},
               {"circular_buffer", ring}};
      break;
    case 6:
      kinds = {{"sliding_window", size()}, {"circular_buffer", ring}, {"sliding_window", size()}};
      break;
    default:
      kinds = {{"circular_buffer", ring},
               {"mamba", sizes.small},
               {"full_attention", size()},
               {"mamba", sizes.large}};
      break;
  }
  for (std::size_t i = kinds.size(); i > 1; --i) std::swap(kinds[i - 1], kinds[random.below(i)]);
  for (std::size_t i = 0; i < kinds.size(); ++i)
    config.groups.push_back(group(random, kinds[i].first, kinds[i].second, i));
  config.num_blocks = static_cast<std::uint32_t>(random.between(24, 64));
  if (random.chance(1, 2)) allow_partial_hits(random, config);
  config.parallel.tp = random.chance(1, 3) ? 2 : 1;
  config.key_namespace = random.chance(1, 2) ? "" : "tenant-" + std::to_string(random.below(9));
  return config;
}

// A few kinds of fault at a time, so that each of them meets an otherwise working house as well.
FaultPlan fault_plan(SeededRandom& random) {
  FaultPlan plan;
  plan.seed = random.next();
  plan.delay = milliseconds(static_cast<std::int64_t>(random.between(1, 30)));
  plan.late = milliseconds(static_cast<std::int64_t>(random.between(5, 150)));
  plan.lookup_late = milliseconds(static_cast<std::int64_t>(random.between(5, 80)));
  const bool everything = random.chance(1, 4);
  for (std::size_t i = 0; i < kNumFaultKinds; ++i) {
    if (static_cast<FaultKind>(i) == FaultKind::kSilentCorrupt) continue;
    if (everything || random.chance(1, 4)) {
      plan.chance[i] = static_cast<std::uint16_t>(random.between(30, everything ? 200 : 1000));
    }
  }
  // Removals are rare.
  std::uint16_t& removals = plan[FaultKind::kRemoveFailed];
  removals = static_cast<std::uint16_t>(removals * 5);
  return plan;
}

std::string dashes(bool value, const std::string& word) { return value ? ", " + word : ""; }

}  // namespace

WorldConfig make_world_config(std::uint64_t seed) {
  SeededRandom random(seed * 0x9e3779b97f4a7c15ull + 0x5eed);
  WorldConfig config;
  config.cache = cache_config(random);
  config.clean = random.chance(1, 4);

  config.engine.local_cache = random.chance(1, 2);
  config.engine.token_budget = static_cast<std::uint32_t>(random.between(8, 72));
  config.engine.max_running = static_cast<std::uint32_t>(random.between(1, 5));
  config.engine.keep_blocks_of_aborted_loads = random.chance(1, 2);
  config.engine.offer_states_late = random.chance(1, 3);
  config.engine.aligned_steps = random.chance(3, 4);

  StoreSchedulerOptions& scheduler = config.scheduler;
  scheduler.lookup_timeout = milliseconds(static_cast<std::int64_t>(random.between(5, 60)));
  scheduler.lookup_fresh_for = milliseconds(static_cast<std::int64_t>(random.between(10, 200)));
  scheduler.load_timeout = milliseconds(static_cast<std::int64_t>(random.between(15, 200)));
  scheduler.save_timeout = milliseconds(static_cast<std::int64_t>(random.between(20, 150)));
  scheduler.quarantine_after = milliseconds(static_cast<std::int64_t>(random.between(5, 100)));
  scheduler.detach_quarantined_loads = random.chance(1, 2);
  scheduler.saved_fresh_for = milliseconds(static_cast<std::int64_t>(random.between(1, 400)));
  scheduler.purge_settle = milliseconds(static_cast<std::int64_t>(random.between(1, 40)));
  scheduler.backoff = milliseconds(static_cast<std::int64_t>(random.between(5, 60)));

  StoreWorkerOptions& worker = config.worker;
  worker.max_segments_per_call = static_cast<std::uint32_t>(random.between(1, 24));
  worker.max_bytes_per_call = random.between(64, 4096);
  worker.max_gets_in_flight = static_cast<std::uint32_t>(random.between(1, 4));
  worker.max_puts_in_flight = static_cast<std::uint32_t>(random.between(1, 3));

  config.store.latency = Duration{static_cast<std::int64_t>(random.below(3'000'000))};
  config.store.latency_per_kib = Duration{static_cast<std::int64_t>(random.below(2'000'000))};
  config.pool.unfinished_for = milliseconds(200);
  config.faults = fault_plan(random);
  config.hold_reports = random.chance(2, 3);
  config.reorder_reports = random.chance(1, 3);
  config.erase_objects = random.chance(1, 3);
  if (random.chance(1, 3)) {
    config.pool.capacity_bytes = random.between(4'000, 40'000);
    config.pool.evict = random.chance(1, 2);
  }
  if (random.chance(1, 8))
    config.store.lease = Duration{static_cast<std::int64_t>(random.between(1'000'000, 6'000'000))};
  config.guard_bytes = static_cast<std::uint32_t>(8 * random.between(1, 3));
  config.max_requests = static_cast<std::uint32_t>(random.between(2, 8));
  config.max_prompt = static_cast<std::uint32_t>(random.between(40, 140));
  config.max_new_tokens = static_cast<std::uint32_t>(random.between(1, 30));
  config.families = static_cast<std::uint32_t>(random.between(1, 4));

  config.cache.kv_layout = random.chance(1, 2) ? "LBHNC" : "BLHNC";

  if (config.clean) {
    // Nothing may be lost here, so no bound may pass either.
    config.faults = FaultPlan{};
    config.pool = MemoryPoolOptions{};
    config.pool.unfinished_for = {};  // what a restart cut off may be written again
    config.store.lease = {};
    config.erase_objects = false;
    scheduler.lookup_timeout = scheduler.load_timeout = scheduler.save_timeout = seconds(3600);
    scheduler.quarantine_after = scheduler.lookup_fresh_for = seconds(3600);
    scheduler.saved_fresh_for = seconds(3600);
  }
  return config;
}

std::string WorldConfig::describe() const {
  std::string text =
      std::to_string(cache.num_blocks) + " blocks" + (cache.parallel.tp > 1 ? ", 2 ranks:" : ":");
  text += " " + cache.kv_layout;
  for (const GroupConfig& group : cache.groups) {
    text += " " + group.spec.kind + "(" + std::to_string(group.spec.block_size);
    if (group.spec.sliding_window) text += " window " + std::to_string(*group.spec.sliding_window);
    if (group.spec.replay_tokens) text += " replay " + std::to_string(*group.spec.replay_tokens);
    if (!group.enable_kv_transfer) text += " not transferred";
    text += ")x" + std::to_string(group.layers.size());
  }
  if (cache.cache_hit_alignment_tokens) {
    text += "; hits in steps of " + std::to_string(*cache.cache_hit_alignment_tokens);
  }
  text += "; budget " + std::to_string(engine.token_budget) + ", running " +
          std::to_string(engine.max_running);
  text += dashes(engine.local_cache, "local cache") +
          dashes(engine.offer_states_late, "late offers") +
          dashes(!engine.aligned_steps, "steps end anywhere") +
          dashes(engine.keep_blocks_of_aborted_loads, "aborted loads keep blocks") +
          dashes(scheduler.detach_quarantined_loads, "detached loads") + dashes(clean, "clean") +
          dashes(hold_reports, "held reports") + dashes(reorder_reports, "reordered reports");
  if (pool.capacity_bytes != 0) {
    text += ", pool of " + std::to_string(pool.capacity_bytes) +
            (pool.evict ? " bytes with eviction" : " bytes");
  }
  for (std::size_t i = 0; i < kNumFaultKinds; ++i) {
    if (faults.chance[i] == 0) continue;
    text += ", " + std::string(to_string(static_cast<FaultKind>(i))) + " " +
            std::to_string(faults.chance[i] / 100) + "%";
  }
  return text;
}

}  // namespace kvprism::sim
