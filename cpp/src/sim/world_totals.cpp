// What the simulated world counts, and the names of its faults.
#include "kvprism/sim/world.h"

namespace kvprism::sim {

std::string_view to_string(WorldFault kind) noexcept {
  static constexpr std::string_view kNames[kNumWorldFaults] = {"abort",
                                                               "abort while loading",
                                                               "preemption",
                                                               "report delayed",
                                                               "report duplicated",
                                                               "report garbage",
                                                               "report foreign",
                                                               "plan foreign",
                                                               "plan repeated",
                                                               "null offer",
                                                               "tokens shrunk",
                                                               "unknown request",
                                                               "late token",
                                                               "evicted",
                                                               "erased",
                                                               "unfinished",
                                                               "pool full",
                                                               "time jump",
                                                               "restart",
                                                               "quarantine",
                                                               "detached load",
                                                               "partial load",
                                                               "id reused",
                                                               "purge",
                                                               "purge done",
                                                               "object removed",
                                                               "object replaced",
                                                               "draft rejected",
                                                               "announced",
                                                               "windows kept",
                                                               "several stages",
                                                               "stages without",
                                                               "keys of vllm",
                                                               "mode changed",
                                                               "request restricted",
                                                               "saves held up",
                                                               "saves held back",
                                                               "chunks avoided",
                                                               "run repeated",
                                                               "report lost",
                                                               "plan lost",
                                                               "rank gone",
                                                               "ranks lag",
                                                               "resumed at once",
                                                               "restricted late",
                                                               "landed after end",
                                                               "context ranks",
                                                               "tokens not shared",
                                                               "prefill ranks",
                                                               "partial hits",
                                                               "wrappers",
                                                               "replicas",
                                                               "compressed",
                                                               "doubled",
                                                               "padded",
                                                               "packed",
                                                               "extra states",
                                                               "kernel blocks",
                                                               "windows of one token",
                                                               "purge of a clean one",
                                                               "rank replaced"};
  const auto at = static_cast<std::size_t>(kind);
  return at < kNumWorldFaults ? kNames[at] : "unknown";
}

void WorldTotals::add(const WorldTotals& other) noexcept {
  events += other.events;
  requests += other.requests;
  finished += other.finished;
  aborted += other.aborted;
  computed_tokens += other.computed_tokens;
  local_hit_tokens += other.local_hit_tokens;
  external_hit_tokens += other.external_hit_tokens;
  objects_checked += other.objects_checked;
  loads += other.loads;
  jobs += other.jobs;
  clean_worlds += other.clean_worlds;
  for (std::size_t i = 0; i < faults.size(); ++i) faults[i] += other.faults[i];
  for (std::size_t i = 0; i < world_faults.size(); ++i) world_faults[i] += other.world_faults[i];
  for (std::size_t i = 0; i < arrangements.size(); ++i) arrangements[i] += other.arrangements[i];
  for (std::size_t kind = 0; kind < checked.size(); ++kind) {
    for (std::size_t i = 0; i < kLayouts.size(); ++i) checked[kind][i] += other.checked[kind][i];
  }
}

}  // namespace kvprism::sim
