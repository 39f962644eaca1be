// A scheduler over small configurations, with a store whose every answer the test decides.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvprism/store/store_scheduler.h"
#include "store_fixtures.h"

namespace kvprism::test {

inline constexpr RequestId kRequest{41};
inline constexpr std::uint64_t kEpoch = 0x5eed;

// What one job of a plan moves, spelled out.
struct Move {
  std::uint32_t group, chunk;
  std::int32_t block;
  std::uint32_t tokens;
  bool operator==(const Move&) const = default;
  friend void PrintTo(const Move& m, std::ostream* out) {
    *out << "{g" << m.group << " c" << m.chunk << " b" << m.block << " t" << m.tokens << "}";
  }
};
inline std::vector<Move> moves(const StepPlan& plan, std::size_t job) {
  std::vector<Move> result;
  const JobRecord& record = plan.jobs[job];
  for (std::uint32_t r = 0; r < record.num_runs; ++r) {
    const RunRecord& run = plan.runs[record.first_run + r];
    for (std::uint32_t i = 0; i < run.count; ++i) {
      result.push_back({raw(run.group), run.first_chunk + i, raw(plan.ids[run.first_id + i]),
                        plan.mark_tokens[run.first_mark + i]});
    }
  }
  return result;
}

class SchedulerTest : public ::testing::Test {
 protected:
  void build(std::vector<GroupConfig> groups, StoreSchedulerOptions options = {}) {
    projection = make_projection(std::move(groups), 64, options.ranks == 0 ? 1 : options.ranks);
    schema = make_schema(projection);
    if (options.epoch == 0) options.epoch = kEpoch;
    scheduler.reset();
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  }
  void build_hybrid(StoreSchedulerOptions options = {}) {
    build({test::full_group(16), test::ring_group(8), test::mamba_group(16)}, options);
  }

  // As vLLM is by default: windows stay cached at the ends of prompts only.
  void build_with_retention(std::vector<GroupConfig> of) {
    CacheConfig config;
    config.num_blocks = 64;
    config.prefix_cache_retention_interval = 0;
    config.groups = std::move(of);
    projection = Projection::make(config, SpecRegistry::builtin());
    schema = make_schema(projection);
    StoreSchedulerOptions options;
    options.epoch = kEpoch;
    scheduler.reset();
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  }

  // Everything of `hashes` up to `tokens` exists in the store.
  void exists(const Hashes& hashes, std::uint32_t tokens) {
    KeySlots keys;
    for (const StoreIndex group : indices<StoreIndex>(projection->num_store_groups())) {
      const std::uint32_t chunk = projection->group(group).tokens_per_block;
      for (std::uint32_t end = chunk; end <= tokens; end += chunk) {
        schema->append_key(keys, group, {}, hashes.list()[end / projection->hash_block_size() - 1]);
      }
    }
    for (const std::string& key : keys.strings()) store->present[key] = 1;
  }

  LookupResult settle_lookup(std::uint32_t prompt, const Hashes& hashes, std::uint32_t local) {
    LookupResult result = scheduler->lookup(kRequest, prompt, hashes.list(), local, now);
    if (!result.pending) return result;
    scheduler->end_step(now);
    while (!store->lookups.empty()) store->answer_lookup();
    return scheduler->lookup(kRequest, prompt, hashes.list(), local, now);
  }

  void report(JobId job, JobOutcome outcome, bool quiet, std::vector<FailedChunk> failed = {},
              Rank rank = Rank{0}) {
    WorkerReport report;
    report.rank = rank;
    report.epoch = scheduler->options().epoch;
    JobReport entry;
    entry.job = job;
    entry.outcome = outcome;
    entry.quiet = quiet ? 1 : 0;
    entry.num_failed = static_cast<std::uint32_t>(failed.size());
    entry.objects = outcome == JobOutcome::kOk ? 3 : 0;
    report.jobs = {entry};
    report.failed = std::move(failed);
    std::vector<std::byte> bytes;
    encode(report, bytes);
    scheduler->report(std::span<const std::byte>(bytes), now);
  }
  std::vector<LoadEnd> load_ends() {
    std::vector<LoadEnd> ends;
    scheduler->take_load_ends(ends);
    return ends;
  }
  std::vector<std::int32_t> acquired() {
    std::vector<BlockId> ids;
    scheduler->take_acquired(ids);
    return numbers(ids);
  }
  std::vector<std::int32_t> released() {
    std::vector<BlockId> ids;
    scheduler->take_released(ids);
    return numbers(ids);
  }
  static std::vector<std::int32_t> numbers(const std::vector<BlockId>& ids) {
    std::vector<std::int32_t> result;
    for (const BlockId id : ids) result.push_back(raw(id));
    return result;
  }

  std::shared_ptr<ScriptedStore> store = std::make_shared<ScriptedStore>();
  std::shared_ptr<const Projection> projection;
  std::shared_ptr<const KeySchema> schema;
  std::unique_ptr<StoreScheduler> scheduler;
  Instant now{seconds(1).ns};
};

}  // namespace kvprism::test
