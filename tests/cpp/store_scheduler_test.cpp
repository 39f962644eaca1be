#include "kvprism/store/store_scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "kvprism/base/log.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::Rows;
using test::ScriptedStore;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr RequestId kRequest{41};
constexpr std::uint64_t kEpoch = 0x5eed;

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
std::vector<Move> moves(const StepPlan& plan, std::size_t job) {
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
    projection =
        test::make_projection(std::move(groups), 64, options.ranks == 0 ? 1 : options.ranks);
    schema = test::make_schema(projection);
    if (options.epoch == 0) options.epoch = kEpoch;
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  }
  void build_hybrid(StoreSchedulerOptions options = {}) {
    build({test::full_group(16), test::ring_group(8), test::mamba_group(16)}, options);
  }

  // Everything of `hashes` up to `tokens` exists in the store.
  // As vLLM is by default: windows stay cached at the ends of prompts only.
  void build_with_retention(std::vector<GroupConfig> of) {
    CacheConfig config;
    config.num_blocks = 64;
    config.prefix_cache_retention_interval = 0;
    config.groups = std::move(of);
    projection = Projection::make(config, SpecRegistry::builtin());
    schema = test::make_schema(projection);
    StoreSchedulerOptions options;
    options.epoch = kEpoch;
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  }

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

TEST_F(SchedulerTest, FullHitLeavesOneTokenToCompute) {
  // R13: prompt 64 -> 48, 65 -> 64, 16 -> 0, 1 -> 0.
  const Hashes hashes(8, 1);
  const std::pair<std::uint32_t, std::uint32_t> cases[] = {
      {64, 48}, {65, 64}, {16, 0}, {1, 0}, {17, 16}};
  for (const auto& [prompt, hit] : cases) {
    build({test::full_group(16)});
    exists(hashes, 128);
    EXPECT_EQ(settle_lookup(prompt, hashes, 0).external_tokens, hit) << prompt;
  }
}

TEST_F(SchedulerTest, NoCallWhenTheEngineHasItAll) {
  // R13, R79: 48 of 64 are local and usable: nothing may be asked.
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  const LookupResult result = scheduler->lookup(kRequest, 64, hashes.list(), 48, now);
  EXPECT_FALSE(result.pending);
  EXPECT_EQ(result.external_tokens, 0u);
  scheduler->end_step(now);
  EXPECT_EQ(scheduler->counters().lookup_calls, 0u);
}

TEST_F(SchedulerTest, ScratchRingsAreRebuiltFromADeclaredDistance) {
  // R14: pages of 800; prompt 1600 -> 800; 2401 -> 2400, or 1600 with 8 tokens to rebuild.
  const Hashes hashes(4, 1);
  for (const std::uint32_t replay : {0u, 8u}) {
    GroupConfig ring = test::ring_group(8);
    if (replay != 0) ring.spec.replay_tokens = replay;
    build({test::full_group(800), ring});
    exists(hashes, 3200);
    EXPECT_EQ(settle_lookup(1600, hashes, 0).external_tokens, 800u);
    scheduler->finished(kRequest, FinishReason::kAborted);
    EXPECT_EQ(settle_lookup(2401, hashes, 0).external_tokens, replay == 0 ? 2400u : 1600u);
  }
}

TEST_F(SchedulerTest, LookupsOfAStepAreOneCallAndStartAtTheLocalHit) {
  build_hybrid();
  const Hashes first(8, 1);
  const Hashes second(8, 2);
  EXPECT_TRUE(scheduler->lookup(RequestId{1}, 100, first.list(), 32, now).pending);
  EXPECT_TRUE(scheduler->lookup(RequestId{2}, 100, second.list(), 0, now).pending);
  EXPECT_TRUE(store->lookups.empty()) << "nothing goes out before the step ends";
  scheduler->end_step(now);
  ASSERT_EQ(store->lookups.size(), 1u);
  // Up to 96 tokens: request 1 asks for chunks 2..5, request 2 for 0..5, each of two groups.
  EXPECT_EQ(store->lookups[0].keys().size(), 8u + 12u);
  EXPECT_EQ(scheduler->counters().lookup_calls, 1u);
  EXPECT_EQ(scheduler->counters().lookup_keys, 20u);
  EXPECT_TRUE(scheduler->lookup(RequestId{1}, 100, first.list(), 32, now).pending);
  scheduler->end_step(now);
  EXPECT_EQ(scheduler->counters().lookup_calls, 1u) << "a pending lookup is not asked again";
}

TEST_F(SchedulerTest, AnswersGoToTheRequestThatAsked) {
  build({test::full_group(16)});
  const Hashes first(8, 1);
  const Hashes second(8, 2);
  exists(first, 32);
  exists(second, 64);
  scheduler->lookup(RequestId{1}, 100, first.list(), 0, now);
  scheduler->lookup(RequestId{2}, 100, second.list(), 0, now);
  scheduler->end_step(now);
  store->answer_lookup();
  EXPECT_EQ(scheduler->lookup(RequestId{1}, 100, first.list(), 0, now).external_tokens, 32u);
  EXPECT_EQ(scheduler->lookup(RequestId{2}, 100, second.list(), 0, now).external_tokens, 64u);
}

TEST_F(SchedulerTest, LookupIsRepeatableWithoutEffect) {
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  EXPECT_EQ(settle_lookup(100, hashes, 0).external_tokens, 64u);
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(scheduler->lookup(kRequest, 100, hashes.list(), 0, now).external_tokens, 64u);
  EXPECT_EQ(scheduler->lookup(kRequest, 100, hashes.list(), 48, now).external_tokens, 16u);
  EXPECT_EQ(scheduler->lookup(kRequest, 100, hashes.list(), 80, now).external_tokens, 0u);
  EXPECT_EQ(scheduler->counters().lookup_calls, 1u);
}

TEST_F(SchedulerTest, AFallenLocalHitIsAskedAnew) {
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  EXPECT_EQ(settle_lookup(100, hashes, 48).external_tokens, 16u);
  EXPECT_TRUE(scheduler->lookup(kRequest, 100, hashes.list(), 16, now).pending)
      << "chunks 1 and 2 are not local now";
  EXPECT_EQ(settle_lookup(100, hashes, 16).external_tokens, 48u);
}

TEST_F(SchedulerTest, LateFailedAndRefusedLookupsAreMisses) {
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  scheduler->lookup(kRequest, 100, hashes.list(), 0, now);
  scheduler->end_step(now);
  now = now + milliseconds(499);
  EXPECT_TRUE(scheduler->lookup(kRequest, 100, hashes.list(), 0, now).pending);
  now = now + milliseconds(1);
  EXPECT_FALSE(scheduler->lookup(kRequest, 100, hashes.list(), 0, now).pending);
  store->answer_lookup();
  EXPECT_EQ(scheduler->lookup(kRequest, 100, hashes.list(), 0, now).external_tokens, 0u)
      << "late is a miss";
  EXPECT_EQ(scheduler->counters().lookups_late, 1u);

  scheduler->lookup(RequestId{2}, 100, hashes.list(), 0, now);
  scheduler->end_step(now);
  store->end_lookup(std::vector<ItemStatus>(6, ItemStatus::kUnavailable));
  EXPECT_EQ(scheduler->lookup(RequestId{2}, 100, hashes.list(), 0, now).external_tokens, 0u);
  EXPECT_EQ(scheduler->counters().lookups_failed, 1u);

  store->refuse = true;
  scheduler->lookup(RequestId{3}, 100, hashes.list(), 0, now);
  scheduler->end_step(now);
  const LookupResult refused = scheduler->lookup(RequestId{3}, 100, hashes.list(), 0, now);
  EXPECT_FALSE(refused.pending);
  EXPECT_EQ(refused.external_tokens, 0u);
  EXPECT_EQ(scheduler->counters().lookups_failed, 2u);
}

TEST_F(SchedulerTest, AnUnfinishedObjectIsAMiss) {
  // R46: not ready counts as not there, without a retry.
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  scheduler->lookup(kRequest, 100, hashes.list(), 0, now);
  scheduler->end_step(now);
  using enum ItemStatus;
  store->end_lookup({kOk, kNotReady, kOk, kOk, kOk, kOk});
  EXPECT_EQ(scheduler->lookup(kRequest, 100, hashes.list(), 0, now).external_tokens, 16u);
  EXPECT_EQ(scheduler->counters().lookups_failed, 0u);
}

TEST_F(SchedulerTest, LoadFetchesWhatIsMissingIntoTheEnginesBlocks) {
  build({test::full_group(16), test::ring_group(8), test::mamba_group(16),
         test::window_group(16, 33)});
  const Hashes hashes(8, 1);
  exists(hashes, 96);
  ASSERT_EQ(settle_lookup(100, hashes, 32).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4, 5, 6}, {50}, {0, 0, 0, 0, 0, 9}, {0, 0, 0, 0, 15, 16}});
  const std::optional<JobId> job = scheduler->allocated(kRequest, 64, rows.get(), now);
  ASSERT_TRUE(job.has_value());
  const StepPlan& plan = scheduler->end_step(now);
  ASSERT_EQ(plan.jobs.size(), 1u);
  EXPECT_EQ(plan.jobs[0].id, *job);
  EXPECT_EQ(plan.jobs[0].kind, JobKind::kLoad);
  EXPECT_THAT(moves(plan, 0), ElementsAre(Move{0, 2, 3, 48}, Move{0, 3, 4, 64}, Move{0, 4, 5, 80},
                                          Move{0, 5, 6, 96}, Move{1, 5, 9, 96}, Move{2, 4, 15, 80},
                                          Move{2, 5, 16, 96}));
  EXPECT_EQ(plan.mark_tokens.size(), 4u) << "runs of one job share their marks";
  EXPECT_THAT(acquired(), UnorderedElementsAre(3, 4, 5, 6, 9, 15, 16));
  EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty()) << "emitted once";

  report(*job, JobOutcome::kOk, false);
  EXPECT_THAT(load_ends(), IsEmpty())
      << "an outcome is not quiet: the engine would reuse the blocks at once";
  EXPECT_THAT(released(), IsEmpty());
  report(*job, JobOutcome::kNone, true);
  const auto ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].request, kRequest);
  EXPECT_TRUE(ends[0].complete);
  EXPECT_TRUE(ends[0].blocks_quiet);
  EXPECT_EQ(ends[0].valid_tokens, 96u);
  EXPECT_THAT(released(), UnorderedElementsAre(3, 4, 5, 6, 9, 15, 16));
  EXPECT_THAT(load_ends(), IsEmpty());
  EXPECT_EQ(scheduler->counters().loaded_tokens, 64u);
}

TEST_F(SchedulerTest, FailedChunksRewindToTheCommonBoundary) {
  // R08: g0 of 16 and g1 of 32 tokens; the failure of g1's block 9 rewinds R1 to 32 and leaves R2
  // alone.
  build({test::full_group(16, "a"), test::full_group(32, "b")});
  const Hashes hashes(8, 1);
  exists(hashes, 128);
  const Rows first({{5, 6, 7, 8}, {15, 9}});
  const Rows second({{19, 10}, {20}});
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const JobId job = *scheduler->allocated(kRequest, 64, first.get(), now);
  scheduler->lookup(RequestId{2}, 33, hashes.list(), 0, now);
  scheduler->end_step(now);
  store->answer_lookup();
  ASSERT_EQ(scheduler->lookup(RequestId{2}, 33, hashes.list(), 0, now).external_tokens, 32u);
  const JobId other = *scheduler->allocated(RequestId{2}, 32, second.get(), now);

  report(job, JobOutcome::kPartial, true,
         {{StoreIndex{1}, 1, static_cast<std::uint32_t>(ItemStatus::kMissing)}});
  auto ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].request, kRequest);
  EXPECT_EQ(ends[0].valid_tokens, 32u);
  EXPECT_FALSE(ends[0].complete);
  ASSERT_EQ(ends[0].failed.size(), 1u);
  EXPECT_EQ(ends[0].failed[0], (FailedBlock{GroupId{1}, 1, BlockId{9}}));
  EXPECT_EQ(scheduler->counters().load_races, 1u);
  report(other, JobOutcome::kOk, true);
  ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].request, RequestId{2});
  EXPECT_TRUE(ends[0].complete);
}

TEST_F(SchedulerTest, FailureOfAnyChunkOfThePrefixRewindsBeforeIt) {
  const Hashes hashes(8, 1);
  const std::pair<std::uint32_t, std::uint32_t> cases[] = {{2, 32}, {0, 0}, {3, 32}};
  for (const auto& [chunk, valid] : cases) {
    build({test::full_group(16, "a"), test::full_group(32, "b")});
    exists(hashes, 128);
    ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
    const Rows rows({{5, 6, 7, 8}, {15, 9}});
    const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
    report(job, JobOutcome::kPartial, true,
           {{StoreIndex{0}, chunk, static_cast<std::uint32_t>(ItemStatus::kFailed)}});
    const auto ends = load_ends();
    ASSERT_EQ(ends.size(), 1u);
    EXPECT_EQ(ends[0].valid_tokens, valid) << "chunk " << chunk;
  }
}

TEST_F(SchedulerTest, AShorterHitMayNeedAStateThatWasNeverFetched) {
  build({test::full_group(16), test::mamba_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}, {0, 0, 0, 9}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  report(job, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 3, static_cast<std::uint32_t>(ItemStatus::kFailed)}});
  const auto ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].valid_tokens, 0u) << "48 tokens would need the state at 48";
}

TEST_F(SchedulerTest, AFailedLoadIsNotTriedAgain) {
  // R41: one bypass per request; another request may try.
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  report(job, JobOutcome::kFailed, true);
  auto ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].valid_tokens, 0u);
  EXPECT_EQ(ends[0].failed.size(), 4u) << "as a whole: every block";
  const LookupResult again = scheduler->lookup(kRequest, 65, hashes.list(), 0, now);
  EXPECT_FALSE(again.pending);
  EXPECT_EQ(again.external_tokens, 0u);
  EXPECT_EQ(scheduler->counters().bypasses, 1u);
  EXPECT_TRUE(scheduler->lookup(RequestId{7}, 65, hashes.list(), 0, now).pending);
}

TEST_F(SchedulerTest, AChunkThatCouldNotBeLoadedIsAvoidedForAWhile) {
  // R41: the table lists it, every load of it fails, and no put replaces it.
  build({test::full_group(16), test::full_group(16, "second")});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}, {5, 6, 7, 8}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  report(job, JobOutcome::kPartial, true,
         {{StoreIndex{1}, 2, static_cast<std::uint32_t>(ItemStatus::kChecksumMismatch)},
          {StoreIndex{0}, 3, static_cast<std::uint32_t>(ItemStatus::kMissing)}});
  scheduler->finished(kRequest, FinishReason::kCompleted);

  // What is missing is left to the index, which here still lists it.
  const auto hit_of_another = [&](const Hashes& of, Instant at) {
    now = at;
    const std::uint32_t hit = settle_lookup(65, of, 0).external_tokens;
    scheduler->finished(kRequest, FinishReason::kCompleted);
    return hit;
  };
  const Instant failed_at = now;
  EXPECT_EQ(hit_of_another(hashes, failed_at + milliseconds(4999)), 32u);
  EXPECT_EQ(scheduler->counters().chunks_avoided, 1u);
  const Hashes other(8, 2);
  exists(other, 64);
  EXPECT_EQ(hit_of_another(other, failed_at + milliseconds(4999)), 64u) << "other prefixes";
  EXPECT_EQ(hit_of_another(hashes, failed_at + seconds(5)), 64u) << "and only for a while";
  EXPECT_EQ(scheduler->counters().chunks_avoided, 1u);
}

TEST_F(SchedulerTest, AStoreThatCannotBeReachedIsNotHeldAgainstItsObjects) {
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  report(job, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 0, static_cast<std::uint32_t>(ItemStatus::kUnavailable)}});
  scheduler->finished(kRequest, FinishReason::kCompleted);
  EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  EXPECT_EQ(scheduler->counters().chunks_avoided, 0u);
}

TEST_F(SchedulerTest, NothingIsSavedWhileJobsHoldTooMuchOfThePool) {
  StoreSchedulerOptions options;
  options.max_held_percent = 5;  // of 64 blocks: 3 are less, 4 are more
  build({test::full_group(16), test::mamba_group(16)}, options);
  std::vector<JobId> jobs;
  for (const std::uint64_t id : {1u, 2u}) {
    const Hashes hashes(2, static_cast<int>(id));
    const RequestId request{id};
    scheduler->advanced(request, 32, hashes.list());
    const int first = static_cast<int>(id) * 4;
    const Rows rows({{first, first + 1}, {}});
    scheduler->save(request, {0, 32}, rows.get(), now);
    const StepPlan& plan = scheduler->end_step(now);
    ASSERT_EQ(plan.jobs.size(), 1u);
    jobs.push_back(plan.jobs[0].id);
  }
  const Hashes third(2, 3);
  scheduler->advanced(kRequest, 32, third.list());
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
  EXPECT_EQ(scheduler->counters().saves_held_back, 1u);
  scheduler->boundary(kRequest, GroupId{1}, BlockId{20}, 16);
  EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
  report(jobs[0], JobOutcome::kOk, true);
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 32}));
}

TEST_F(SchedulerTest, LookupsAreCutByTheKeysOfACall) {
  build({test::full_group(16)});
  const Hashes large(70'000, 1);
  const Hashes small(4, 2);
  scheduler->lookup(RequestId{1}, 70'000 * 16, large.list(), 0, now);
  scheduler->lookup(RequestId{2}, 65, small.list(), 0, now);
  scheduler->end_step(now);
  ASSERT_EQ(store->lookups.size(), 1u);
  EXPECT_EQ(store->lookups.front().keys().size(), 69'999u) << "the first goes whole";
  scheduler->end_step(now);
  ASSERT_EQ(store->lookups.size(), 2u);
  EXPECT_EQ(store->lookups.back().keys().size(), 4u);
}

TEST_F(SchedulerTest, SavesOfWhichNothingArrivesAreToldOnce) {
  // R04
  std::vector<std::string> lines;
  set_log_sink(
      [](void* to, LogLevel, std::string_view line) {
        static_cast<std::vector<std::string>*>(to)->emplace_back(line);
      },
      &lines, LogLevel::kWarning);
  build({test::full_group(16)});
  for (std::uint64_t id = 1; id <= 40; ++id) {
    const Hashes hashes(1, static_cast<int>(id));
    scheduler->advanced(RequestId{id}, 16, hashes.list());
    const Rows rows({std::vector<std::int32_t>{1}});
    scheduler->save(RequestId{id}, {0, 16}, rows.get(), now);
    const StepPlan& plan = scheduler->end_step(now);
    ASSERT_EQ(plan.jobs.size(), 1u) << id;
    report(plan.jobs[0].id, JobOutcome::kPartial, true,
           {{StoreIndex{0}, 0, static_cast<std::uint32_t>(ItemStatus::kInvalid)}});
    EXPECT_EQ(lines.size(), id < 20 ? 0u : 1u) << id;
  }
  set_log_sink(nullptr, nullptr, LogLevel::kOff);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(
      lines[0],
      "20 saves have ended and the store has taken no object: the last failure is \"invalid\"");
}

TEST_F(SchedulerTest, AnAllocationThatTakesNothingLoadsNothing) {
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}});
  EXPECT_EQ(scheduler->allocated(kRequest, 0, rows.get(), now), std::nullopt);
  EXPECT_EQ(scheduler->allocated(kRequest, 64, rows.get(), now), std::nullopt)
      << "the offer is gone";
  EXPECT_EQ(scheduler->allocated(RequestId{99}, 64, rows.get(), now), std::nullopt);
  EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
}

TEST_F(SchedulerTest, NullShortAndForeignDestinationsFailTheLoad) {
  const Hashes hashes(8, 1);
  for (const auto& row :
       std::vector<std::vector<std::int32_t>>{{1, 0, 3, 4}, {1, 2}, {1, 2, 3, 64}, {1, 2, -3, 4}}) {
    build({test::full_group(16)});
    exists(hashes, 64);
    ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
    const Rows rows({row});
    const std::optional<JobId> job = scheduler->allocated(kRequest, 64, rows.get(), now);
    ASSERT_TRUE(job.has_value()) << "the engine waits, so an end must come";
    EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
    const auto ends = load_ends();
    ASSERT_EQ(ends.size(), 1u);
    EXPECT_EQ(ends[0].job, *job);
    EXPECT_EQ(ends[0].valid_tokens, 0u);
    EXPECT_THAT(acquired(), IsEmpty());
  }
}

TEST_F(SchedulerTest, SavesOnlyStorableGroupsFromThePresentTable) {
  // R01 and R05: the ring's block 77 and the null block never appear; states only when the engine
  // hands them off.
  build({test::full_group(800), test::ring_group(8), test::mamba_group(800)});
  const Hashes hashes(3, 1);
  scheduler->advanced(kRequest, 2400, hashes.list());
  const TokenRange range = scheduler->wants_save(kRequest, now);
  EXPECT_EQ(range, (TokenRange{0, 2400}));
  const Rows rows({{10, 11, 12}, {7}, {0, 0, 31}});
  scheduler->save(kRequest, range, rows.get(), now);
  scheduler->boundary(kRequest, GroupId{2}, BlockId{31}, 2400);
  const StepPlan& plan = scheduler->end_step(now);
  ASSERT_EQ(plan.jobs.size(), 2u);
  EXPECT_THAT(moves(plan, 0),
              ElementsAre(Move{0, 0, 10, 800}, Move{0, 1, 11, 1600}, Move{0, 2, 12, 2400}));
  EXPECT_THAT(moves(plan, 1), ElementsAre(Move{1, 2, 31, 2400}))
      << "one state, under the mark of its boundary";
  EXPECT_THAT(acquired(), UnorderedElementsAre(10, 11, 12, 31));
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
}

TEST_F(SchedulerTest, DoubtfulStatesAreRefused) {
  build_hybrid();
  const Hashes hashes(4, 1);
  scheduler->advanced(kRequest, 48, hashes.list());
  scheduler->boundary(kRequest, GroupId{2}, BlockId{0}, 48);   // the null block
  scheduler->boundary(kRequest, GroupId{2}, BlockId{64}, 48);  // outside the pool
  scheduler->boundary(kRequest, GroupId{2}, BlockId{5}, 80);   // beyond the known hashes
  scheduler->boundary(kRequest, GroupId{2}, BlockId{5}, 40);   // off the grid
  scheduler->boundary(kRequest, GroupId{0}, BlockId{5}, 48);   // positional
  scheduler->boundary(RequestId{9}, GroupId{2}, BlockId{5}, 48);
  EXPECT_EQ(scheduler->counters().offers_refused, 6u);
  scheduler->boundary(kRequest, GroupId{1}, BlockId{5},
                      48);  // not storable: skipped without a word
  EXPECT_EQ(scheduler->counters().offers_refused, 6u);
  EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
  EXPECT_THAT(acquired(), IsEmpty());
}

TEST_F(SchedulerTest, AWindowThatSlidOutIsSkipped) {
  build({test::full_group(16), test::window_group(16, 20)});
  const Hashes hashes(4, 1);
  scheduler->advanced(kRequest, 64, hashes.list());
  const Rows rows({{1, 2, 3, 4}, {0, 0, 13, 14}});
  scheduler->save(kRequest, {0, 64}, rows.get(), now);
  const StepPlan& plan = scheduler->end_step(now);
  ASSERT_EQ(plan.jobs.size(), 1u);
  EXPECT_THAT(moves(plan, 0),
              ElementsAre(Move{0, 0, 1, 16}, Move{0, 1, 2, 32}, Move{0, 2, 3, 48},
                          Move{0, 3, 4, 64}, Move{1, 2, 13, 48}, Move{1, 3, 14, 64}));
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
}

TEST_F(SchedulerTest, OnlyAcceptedTokensAreSavedAndTheWatermarkNeverFalls) {
  // R25: 47, 51, 49 (rejected drafts), 52 computed: boundaries 16, 32, 48 once each.
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  const Rows rows({{1, 2, 3, 4}});
  std::vector<std::uint32_t> saved;
  std::uint32_t known = 0;
  for (const std::uint32_t computed : {47u, 51u, 49u, 52u}) {
    Hashes all(computed / 16, 1);
    if (all.list().count > known) {
      scheduler->advanced(kRequest, computed, all.list(known));
      known = all.list().count;
    } else {
      scheduler->advanced(kRequest, computed, {});
    }
    const TokenRange range = scheduler->wants_save(kRequest, now);
    if (!range.empty()) scheduler->save(kRequest, range, rows.get(), now);
    const StepPlan& plan = scheduler->end_step(now);
    for (std::size_t j = 0; j < plan.jobs.size(); ++j) {
      for (const Move& move : moves(plan, j)) saved.push_back(move.tokens);
    }
  }
  EXPECT_THAT(saved, ElementsAre(16, 32, 48));
}

TEST_F(SchedulerTest, AShortTableIsABoundedSkip) {
  // R07: 64 tokens claimed, three blocks given.
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  scheduler->advanced(kRequest, 64, hashes.list());
  const Rows rows({{20, 21, 22}});
  scheduler->save(kRequest, {0, 64}, rows.get(), now);
  const StepPlan& plan = scheduler->end_step(now);
  EXPECT_THAT(moves(plan, 0),
              ElementsAre(Move{0, 0, 20, 16}, Move{0, 1, 21, 32}, Move{0, 2, 22, 48}));
  EXPECT_EQ(scheduler->counters().sources_skipped, 1u);
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty()) << "no retry without progress";
  const Hashes more(5, 1);
  scheduler->advanced(kRequest, 80, more.list(4));
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{48, 80}));
}

TEST_F(SchedulerTest, TheWatermarkStopsAtTheFirstHole) {
  // R50
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  const Rows rows({{1, 2, 3, 4, 5}});
  scheduler->advanced(kRequest, 64, hashes.list());
  scheduler->save(kRequest, {0, 64}, rows.get(), now);
  const JobId job = scheduler->end_step(now).jobs[0].id;
  report(job, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 2, static_cast<std::uint32_t>(ItemStatus::kFailed)}});
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty()) << "not again without progress";
  const Hashes more(7, 1);
  scheduler->advanced(kRequest, 96, more.list(4));
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty()) << "and not with a little";
  scheduler->advanced(kRequest, 112, {});
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{32, 112}));
}

TEST_F(SchedulerTest, RepeatedHashesAreTakenOnce) {
  // Hashes that were appended twice would put every later chunk under the key of another prefix.
  build({test::full_group(16)});
  const Hashes hashes(6, 1);
  const Hashes first(2, 1);
  scheduler->advanced(kRequest, 32, first.list());
  scheduler->advanced(kRequest, 32, first.list());
  scheduler->advanced(kRequest, 96, hashes.list());
  scheduler->advanced(kRequest, 96, hashes.list(2));
  EXPECT_EQ(scheduler->known_hashes(kRequest), 6u);
  scheduler->advanced(kRequest, 96, hashes.list(5));
  const Hashes longer(9, 1);
  scheduler->advanced(kRequest, 96, longer.list(7));
  EXPECT_EQ(scheduler->known_hashes(kRequest), 6u) << "a gap";
  EXPECT_EQ(scheduler->counters().hashes_refused, 1u);
  const Rows rows({{1, 2, 3, 4, 5, 6}});
  scheduler->save(kRequest, {0, 96}, rows.get(), now);
  const StepPlan& plan = scheduler->end_step(now);
  for (std::uint32_t m = 0; m < 6; ++m) {
    const auto mark = plan.view().mark_hash(m);
    const auto own = hashes.list()[m];
    EXPECT_TRUE(std::equal(mark.begin(), mark.end(), own.begin(), own.end())) << m;
  }
}

TEST_F(SchedulerTest, AnIdThatComesWithOtherHashesIsAnotherRequest) {
  build({test::full_group(16)});
  const Hashes old_hashes(4, 1);
  const Hashes new_hashes(4, 2);
  exists(new_hashes, 64);
  scheduler->advanced(kRequest, 64, old_hashes.list());
  EXPECT_EQ(settle_lookup(65, new_hashes, 0).external_tokens, 64u);
  EXPECT_EQ(scheduler->counters().requests_replaced, 1u);
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty()) << "nothing of it is computed yet";
}

TEST_F(SchedulerTest, ALocalHitOffTheGridIsNotAnswered) {
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  exists(hashes, 64);
  EXPECT_EQ(settle_lookup(65, hashes, 20).external_tokens, 0u);
  EXPECT_EQ(scheduler->counters().lookups_refused, 1u);
}

TEST_F(SchedulerTest, RowsOfAProjectionAreRefused) {
  build({test::ring_group(8), test::full_group(16, "a"), test::full_group(16, "b")});
  const Hashes hashes(4, 1);
  const Rows projected(std::vector<std::vector<std::int32_t>>{{1, 2}, {3, 4}});
  scheduler->advanced(kRequest, 32, hashes.list());
  scheduler->save(kRequest, {0, 32}, projected.get(), now);
  EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
  EXPECT_EQ(scheduler->counters().tables_refused, 1u);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows loads(std::vector<std::vector<std::int32_t>>{{1, 2, 3, 4}, {5, 6, 7, 8}});
  ASSERT_TRUE(scheduler->allocated(kRequest, 64, loads.get(), now).has_value());
  EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
  const auto ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].valid_tokens, 0u);
}

TEST_F(SchedulerTest, RanksAreThoseOfTheConfiguration) {
  projection = test::make_projection({test::full_group(16)}, 64, 2);
  schema = test::make_schema(projection);
  StoreSchedulerOptions options;
  options.epoch = kEpoch;
  EXPECT_EQ(StoreScheduler(schema, store, options).options().ranks, 2u);
  options.ranks = 1;
  try {
    StoreScheduler(schema, store, options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("ranks = 1: expected 2 workers, tp x pp x pcp"));
  }
}

TEST_F(SchedulerTest, AnIdReusedWithinAStepKeepsItsStatesApart) {
  build({test::full_group(16), test::mamba_group(16)});
  const Hashes first(1, 1);
  const Hashes second(1, 2);
  scheduler->advanced(kRequest, 16, first.list());
  scheduler->boundary(kRequest, GroupId{1}, BlockId{10}, 16);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  scheduler->advanced(kRequest, 16, second.list());
  scheduler->boundary(kRequest, GroupId{1}, BlockId{20}, 16);
  const StepPlan& plan = scheduler->end_step(now);
  ASSERT_EQ(plan.jobs.size(), 2u);
  for (std::size_t j = 0; j < 2; ++j) {
    const RunRecord& run = plan.runs[plan.jobs[j].first_run];
    EXPECT_EQ(plan.ids[run.first_id], BlockId{j == 0 ? 10 : 20});
    const auto mark = plan.view().mark_hash(run.first_mark);
    const auto own = (j == 0 ? first : second).list()[0];
    EXPECT_TRUE(std::equal(mark.begin(), mark.end(), own.begin(), own.end())) << j;
  }
}

TEST_F(SchedulerTest, AStoreThatStaysAwayIsNotSentTheWholeContextEachStep) {
  StoreSchedulerOptions options;
  options.backoff_after = 1000;
  build({test::full_group(16)}, options);
  const Hashes hashes(64, 1);
  std::vector<std::int32_t> row(64);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<std::int32_t>(1 + i % 63);
  const Rows rows({row});
  std::uint32_t chunks = 0;
  for (std::uint32_t tokens = 256; tokens <= 1024; tokens += 16) {
    scheduler->advanced(kRequest, tokens, hashes.list());
    scheduler->save(kRequest, scheduler->wants_save(kRequest, now), rows.get(), now);
    const StepPlan& plan = scheduler->end_step(now);
    chunks += static_cast<std::uint32_t>(plan.ids.size());
    for (const JobRecord& job : plan.jobs) report(job.id, JobOutcome::kFailed, true);
  }
  EXPECT_LE(chunks, 16u + 33u + 64u) << "each try waits for twice the progress";
}

TEST_F(SchedulerTest, AnUnavailableStorePausesSaving) {
  build({test::full_group(16)});
  for (std::uint64_t request = 1; request <= 3; ++request) {
    const Hashes hashes(1, static_cast<std::uint8_t>(request));
    const Rows rows(std::vector<std::vector<std::int32_t>>{{1}});
    scheduler->advanced(RequestId{request}, 16, hashes.list());
    scheduler->save(RequestId{request}, {0, 16}, rows.get(), now);
    report(scheduler->end_step(now).jobs[0].id, JobOutcome::kPartial, true,
           {{StoreIndex{0}, 0, static_cast<std::uint32_t>(ItemStatus::kUnavailable)}});
  }
  const Hashes hashes(1, 9);
  scheduler->advanced(RequestId{4}, 16, hashes.list());
  EXPECT_TRUE(scheduler->wants_save(RequestId{4}, now).empty());
}

TEST_F(SchedulerTest, ALoadBehindUnsavedLocalTokensLeavesThemToBeSaved) {
  build({test::full_group(16)});
  const Hashes hashes(6, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(97, hashes, 32).external_tokens, 32u);
  const Rows rows({{1, 2, 3, 4, 5, 6}});
  report(*scheduler->allocated(kRequest, 32, rows.get(), now), JobOutcome::kOk, true);
  scheduler->advanced(kRequest, 96, {});
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 96}));
}

TEST_F(SchedulerTest, QuarantinedJobsDoNotKeepTheEngineStepping) {
  build({test::full_group(16)});
  const Hashes hashes(1, 1);
  const Rows rows(std::vector<std::vector<std::int32_t>>{{1}});
  scheduler->advanced(kRequest, 16, hashes.list());
  scheduler->save(kRequest, {0, 16}, rows.get(), now);
  const JobId job = scheduler->end_step(now).jobs[0].id;
  EXPECT_TRUE(scheduler->has_pending_work());
  now = now + seconds(75);
  scheduler->end_step(now);
  now = now + seconds(120);
  scheduler->end_step(now);
  EXPECT_FALSE(scheduler->has_pending_work());
  EXPECT_EQ(scheduler->counters().ledger.blocks_in_quarantine, 1u);
  report(job, JobOutcome::kOk, true);
  EXPECT_THAT(released(), ElementsAre(1));
}

TEST_F(SchedulerTest, ReportsNeedNoAlignment) {
  build({test::full_group(16)});
  WorkerReport foreign;
  foreign.epoch = kEpoch + 1;
  std::vector<std::byte> bytes;
  encode(foreign, bytes);
  std::vector<std::byte> framed(4);
  framed.insert(framed.end(), bytes.begin(), bytes.end());
  scheduler->report(std::span<const std::byte>(framed).subspan(4), now);
  EXPECT_EQ(scheduler->counters().reports_foreign, 1u);
}

TEST_F(SchedulerTest, WhatWasSavedLatelyIsNotSavedAgain) {
  build({test::full_group(16)});
  const Hashes hashes(6, 1);
  const Rows rows({{1, 2, 3, 4, 5, 6}});
  scheduler->advanced(kRequest, 64, hashes.list());
  scheduler->save(kRequest, {0, 64}, rows.get(), now);
  const JobId job = scheduler->end_step(now).jobs[0].id;
  const RequestId other{2};
  scheduler->advanced(other, 96, hashes.list());
  EXPECT_EQ(scheduler->wants_save(other, now), (TokenRange{0, 96})) << "nothing is confirmed yet";
  report(job, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 2, static_cast<std::uint32_t>(ItemStatus::kFailed)}});
  EXPECT_EQ(scheduler->wants_save(other, now), (TokenRange{32, 96})) << "up to the first hole";
  EXPECT_EQ(scheduler->counters().saves_known, 2u);
  now = now + scheduler->options().saved_fresh_for;
  const RequestId later{3};
  scheduler->advanced(later, 64, hashes.list());
  EXPECT_EQ(scheduler->wants_save(later, now), (TokenRange{0, 64})) << "it may have been evicted";
}

TEST_F(SchedulerTest, ChangesOfTheStoreAreToldByGroupWithTheirParents) {
  StoreSchedulerOptions options;
  options.tell_changes = true;
  options.ranks = 2;
  build_hybrid(options);
  const Hashes hashes(4, 1);
  const auto hash = [&](std::uint32_t tokens) {
    const auto bytes = hashes.list()[tokens / 16 - 1];
    return std::vector<std::uint8_t>(bytes.begin(), bytes.end());
  };
  scheduler->advanced(kRequest, 48, hashes.list());
  const Rows rows({{1, 2, 3}, {7}, {0, 0, 9}});
  scheduler->save(kRequest, {0, 48}, rows.get(), now);
  scheduler->boundary(kRequest, GroupId{2}, BlockId{9}, 48);
  const StepPlan& plan = scheduler->end_step(now);
  const JobId positional = plan.jobs[0].id;
  const JobId state = plan.jobs[1].id;
  scheduler->finished(kRequest, FinishReason::kCompleted);
  std::vector<StoreChange> changes;
  report(positional, JobOutcome::kOk, true);
  report(state, JobOutcome::kOk, true);
  scheduler->take_changes(changes);
  EXPECT_THAT(changes, IsEmpty()) << "one rank has not stored them yet";
  report(positional, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 1, static_cast<std::uint32_t>(ItemStatus::kFailed)}}, Rank{1});
  report(state, JobOutcome::kOk, true, {}, Rank{1});
  scheduler->take_changes(changes);
  EXPECT_THAT(changes,
              ElementsAre(StoreChange{true, kRequest, GroupId{0}, 0, 16, hash(16), {}},
                          StoreChange{true, kRequest, GroupId{0}, 2, 48, hash(48), hash(32)},
                          StoreChange{true, kRequest, GroupId{2}, 2, 48, hash(48), hash(32)}));
  changes.clear();
  scheduler->take_changes(changes);
  EXPECT_THAT(changes, IsEmpty());
}

TEST_F(SchedulerTest, WhatALoadNoLongerFindsIsToldAsGone) {
  StoreSchedulerOptions options;
  options.tell_changes = true;
  build({test::ring_group(8), test::full_group(16)}, options);
  const Hashes hashes(4, 1);
  exists(hashes, 64);
  const Rows rows({{9}, {5, 6, 7, 8}});
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  scheduler->end_step(now);
  report(job, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 1, static_cast<std::uint32_t>(ItemStatus::kMissing)},
          {StoreIndex{0}, 2, static_cast<std::uint32_t>(ItemStatus::kUnavailable)},
          {StoreIndex{0}, 3, static_cast<std::uint32_t>(ItemStatus::kChecksumMismatch)}});
  std::vector<StoreChange> changes;
  scheduler->take_changes(changes);
  ASSERT_EQ(changes.size(), 2u) << "what cannot be reached may still be there";
  EXPECT_FALSE(changes[0].stored);
  EXPECT_EQ(changes[0].group, GroupId{1});
  EXPECT_EQ(changes[0].tokens, 32u);
  EXPECT_FALSE(changes[1].stored) << "what is damaged is removed";
  EXPECT_EQ(changes[1].tokens, 64u);
}

TEST_F(SchedulerTest, RequestsWithSavesInFlightAreToldAlsoWhenTheyHaveFinished) {
  StoreSchedulerOptions options;
  options.ranks = 2;
  build_hybrid(options);
  const Hashes hashes(4, 1);
  const auto saving = [&] {
    std::vector<RequestId> found;
    scheduler->saving_requests(found);
    return found;
  };
  EXPECT_THAT(saving(), IsEmpty());
  scheduler->advanced(kRequest, 48, hashes.list());
  scheduler->boundary(kRequest, GroupId{2}, BlockId{9}, 48);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  EXPECT_THAT(saving(), ElementsAre(kRequest)) << "its save is planned at the end of the step";
  const JobId job = scheduler->end_step(now).jobs.at(0).id;
  EXPECT_THAT(saving(), ElementsAre(kRequest));
  report(job, JobOutcome::kOk, true);
  EXPECT_THAT(saving(), ElementsAre(kRequest)) << "one rank has not stored it yet";
  report(job, JobOutcome::kOk, false, {}, Rank{1});
  EXPECT_THAT(saving(), IsEmpty()) << "its outcome is known";
}

TEST_F(SchedulerTest, ChangesThatNobodyTakesHaveABound) {
  StoreSchedulerOptions options;
  options.tell_changes = true;
  build({test::full_group(16)}, options);
  const Rows rows({{1, 2, 3, 4, 5, 6, 7, 8}});
  constexpr std::uint32_t kSaves = (1 << 16) / 8 + 2;
  for (std::uint32_t i = 0; i < kSaves; ++i) {
    const Hashes hashes(8, static_cast<std::uint8_t>(1 + i % 200));
    const RequestId id{i + 1};
    scheduler->advanced(id, 128, hashes.list());
    scheduler->save(id, {0, 128}, rows.get(), now);
    const StepPlan& plan = scheduler->end_step(now);
    ASSERT_EQ(plan.jobs.size(), 1u);
    report(plan.jobs[0].id, JobOutcome::kOk, true);
    scheduler->finished(id, FinishReason::kCompleted);
    now = now + seconds(1);  // what was saved 200 saves ago is saved again
  }
  EXPECT_EQ(scheduler->counters().changes_dropped, 16u);
  std::vector<StoreChange> changes;
  scheduler->take_changes(changes);
  EXPECT_EQ(changes.size(), 1u << 16);
}

TEST_F(SchedulerTest, ASaveWithHolesInItsTableProvesNothing) {
  build({test::full_group(16), test::window_group(16, 20)});
  const Hashes hashes(4, 1);
  const Rows slid({{1, 2, 3, 4}, {0, 0, 13, 14}});
  scheduler->advanced(kRequest, 64, hashes.list());
  scheduler->save(kRequest, {0, 64}, slid.get(), now);
  report(scheduler->end_step(now).jobs[0].id, JobOutcome::kOk, true);
  const RequestId other{2};
  scheduler->advanced(other, 64, hashes.list());
  EXPECT_EQ(scheduler->wants_save(other, now), (TokenRange{0, 64}))
      << "the window's first chunks are not in the store";
}

TEST_F(SchedulerTest, TheModeSaysWhatTheStoreIsUsedFor) {
  struct Case {
    StoreMode mode;
    std::string_view name;
    bool loads;
    bool saves;
  };
  const Case cases[] = {{StoreMode::kReadWrite, "read_write", true, true},
                        {StoreMode::kReadOnly, "read_only", true, false},
                        {StoreMode::kWriteOnly, "write_only", false, true},
                        {StoreMode::kOff, "off", false, false}};
  const Hashes hashes(4, 1);
  for (const Case& c : cases) {
    build({test::full_group(16), test::mamba_group(16)});
    exists(hashes, 64);
    scheduler->set_mode(c.mode);
    EXPECT_EQ(scheduler->mode(), c.mode);
    EXPECT_EQ(to_string(c.mode), c.name);
    EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, c.loads ? 64u : 0u) << c.name;
    EXPECT_EQ(scheduler->counters().lookup_calls, c.loads ? 1u : 0u) << c.name;
    scheduler->advanced(kRequest, 64, hashes.list());
    EXPECT_EQ(scheduler->wants_save(kRequest, now), c.saves ? (TokenRange{0, 64}) : TokenRange{})
        << c.name;
    scheduler->boundary(kRequest, GroupId{1}, BlockId{5}, 16);
    EXPECT_EQ(scheduler->end_step(now).jobs.size(), c.saves ? 1u : 0u) << c.name;
    EXPECT_EQ(acquired(), c.saves ? (std::vector<std::int32_t>{5}) : std::vector<std::int32_t>{})
        << c.name;
  }
}

TEST_F(SchedulerTest, AModeChangesBetweenStepsAndLosesNothing) {
  build({test::full_group(16), test::mamba_group(16)});
  const Hashes hashes(4, 1);
  scheduler->advanced(kRequest, 64, hashes.list());
  scheduler->boundary(kRequest, GroupId{1}, BlockId{5}, 16);
  scheduler->set_mode(StoreMode::kReadOnly);
  EXPECT_TRUE(scheduler->end_step(now).jobs.empty()) << "a state that was offered before goes back";
  EXPECT_EQ(acquired(), (std::vector<std::int32_t>{5}));
  EXPECT_EQ(released(), (std::vector<std::int32_t>{5}));
  EXPECT_EQ(scheduler->counters().saves_dropped, 1u);
  scheduler->set_mode(StoreMode::kReadWrite);
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 64}));
  scheduler->boundary(kRequest, GroupId{1}, BlockId{5}, 16);
  EXPECT_EQ(scheduler->end_step(now).jobs.size(), 1u);
}

TEST_F(SchedulerTest, ARequestMayBeKeptOutOfTheStore) {
  const Hashes hashes(4, 1);
  for (const bool load : {false, true}) {
    for (const bool save : {false, true}) {
      build({test::full_group(16), test::mamba_group(16)});
      exists(hashes, 64);
      scheduler->restrict(kRequest, {load, save});
      EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, load ? 64u : 0u);
      scheduler->advanced(kRequest, 64, hashes.list());
      EXPECT_EQ(scheduler->wants_save(kRequest, now).empty(), !save);
      scheduler->boundary(kRequest, GroupId{1}, BlockId{5}, 16);
      EXPECT_EQ(scheduler->end_step(now).jobs.size(), save ? 1u : 0u);

      // The same id with other hashes: who is to be kept out stays out.
      const Hashes other(4, 2);
      exists(other, 64);
      EXPECT_EQ(settle_lookup(65, other, 0).external_tokens, load ? 64u : 0u);
      EXPECT_EQ(scheduler->counters().requests_replaced, 1u);
      scheduler->advanced(kRequest, 64, other.list());
      EXPECT_EQ(scheduler->wants_save(kRequest, now).empty(), !save);
      scheduler->finished(kRequest, FinishReason::kCompleted);
      EXPECT_EQ(settle_lookup(65, other, 0).external_tokens, 64u) << "finished() ends it";
    }
  }
}

TEST_F(SchedulerTest, AFullPoolIsLeftAloneForAWhile) {
  // R50: three full answers, then a pause; nothing is thrown and the engine goes on.
  build({test::full_group(16)});
  const Rows rows({{1, 2, 3, 4}});
  for (std::uint64_t request = 1; request <= 3; ++request) {
    const RequestId id{request};
    const Hashes hashes(4, static_cast<std::uint8_t>(request));
    scheduler->advanced(id, 64, hashes.list());
    const TokenRange range = scheduler->wants_save(id, now);
    ASSERT_FALSE(range.empty()) << request;
    scheduler->save(id, range, rows.get(), now);
    const JobId job = scheduler->end_step(now).jobs[0].id;
    report(job, JobOutcome::kPartial, true,
           {{StoreIndex{0}, 1, static_cast<std::uint32_t>(ItemStatus::kNoSpace)}});
  }
  const Hashes hashes(4, 9);
  const RequestId fourth{4};
  scheduler->advanced(fourth, 64, hashes.list());
  EXPECT_TRUE(scheduler->wants_save(fourth, now).empty());
  scheduler->finished(fourth, FinishReason::kCompleted);
  EXPECT_EQ(scheduler->counters().saves_dropped, 1u + 0u) << "what was never saved is counted";
  const RequestId fifth{5};
  scheduler->advanced(fifth, 64, hashes.list());
  now = now + seconds(5);
  EXPECT_EQ(scheduler->wants_save(fifth, now), (TokenRange{0, 64})) << "resumed";
}

TEST_F(SchedulerTest, SourcesStayReferencedUntilEveryRankIsQuiet) {
  // R06: two ranks; rank 1 is late.
  StoreSchedulerOptions options;
  options.ranks = 2;
  build({test::full_group(16)}, options);
  const Hashes hashes(3, 1);
  scheduler->advanced(kRequest, 48, hashes.list());
  const Rows rows({{3, 4, 5}});
  scheduler->save(kRequest, {0, 48}, rows.get(), now);
  const JobId job = scheduler->end_step(now).jobs[0].id;
  EXPECT_THAT(acquired(), ElementsAre(3, 4, 5));
  scheduler->preempted(kRequest);
  scheduler->finished(kRequest, FinishReason::kAborted);
  report(job, JobOutcome::kOk, true, {}, Rank{0});
  EXPECT_THAT(released(), IsEmpty());
  EXPECT_TRUE(scheduler->has_pending_work());
  report(job, JobOutcome::kOk, true, {}, Rank{1});
  EXPECT_THAT(released(), ElementsAre(3, 4, 5));
  EXPECT_EQ(scheduler->tracked(), 0u);
}

TEST_F(SchedulerTest, ALoadEndsOnceAlsoAfterItsRequest) {
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  scheduler->finished(kRequest, FinishReason::kAborted);
  scheduler->finished(kRequest, FinishReason::kAborted);
  EXPECT_EQ(scheduler->end_step(now).jobs.size(), 1u);
  report(job, JobOutcome::kOk, true);
  report(job, JobOutcome::kOk, true);
  EXPECT_EQ(load_ends().size(), 1u);
  EXPECT_EQ(scheduler->counters().ledger.unknown_notices, 1u);
  EXPECT_EQ(scheduler->tracked(), 0u);
}

TEST_F(SchedulerTest, QuarantineHoldsTheBlocksAndMayDetachTheLoad) {
  for (const bool detach : {false, true}) {
    StoreSchedulerOptions options;
    options.detach_quarantined_loads = detach;
    build({test::full_group(16)}, options);
    const Hashes hashes(8, 1);
    exists(hashes, 64);
    ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
    const Rows rows({{1, 2, 3, 4}});
    const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
    report(job, JobOutcome::kPartial, false,
           {{StoreIndex{0}, 3, static_cast<std::uint32_t>(ItemStatus::kTimedOut)}});
    now = now + options.quarantine_after;
    scheduler->end_step(now);
    auto ends = load_ends();
    EXPECT_EQ(ends.size(), detach ? 1u : 0u);
    if (detach) {
      EXPECT_FALSE(ends[0].blocks_quiet);
      EXPECT_EQ(ends[0].valid_tokens, 0u) << "what seems to have arrived may still change";
    }
    EXPECT_THAT(released(), IsEmpty());
    EXPECT_EQ(scheduler->counters().ledger.blocks_in_quarantine, 4u);
    report(job, JobOutcome::kNone, true);
    ends = load_ends();
    ASSERT_EQ(ends.size(), detach ? 0u : 1u);
    if (!detach) {
      EXPECT_EQ(ends[0].valid_tokens, 48u);
    }
    EXPECT_THAT(released(), ElementsAre(1, 2, 3, 4));
  }
}

TEST_F(SchedulerTest, ASilentWorkerExpiresTheLoadButHoldsItsBlocks) {
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}});
  (void)scheduler->allocated(kRequest, 64, rows.get(), now);
  now = now + seconds(25);
  scheduler->end_step(now);
  EXPECT_EQ(scheduler->counters().ledger.expired, 1u);
  EXPECT_THAT(load_ends(), IsEmpty()) << "nobody said that the blocks are quiet";
  EXPECT_THAT(released(), IsEmpty());
}

TEST_F(SchedulerTest, ForeignAndMalformedReportsAreCounted) {
  build({test::full_group(16)});
  WorkerReport report;
  report.epoch = kEpoch + 1;
  report.jobs = {{JobId{1}, JobOutcome::kOk, 1, 0, 0, 0, 0, 0}};
  std::vector<std::byte> bytes;
  encode(report, bytes);
  scheduler->report(std::span<const std::byte>(bytes), now);
  EXPECT_EQ(scheduler->counters().reports_foreign, 1u);
  bytes.pop_back();
  scheduler->report(std::span<const std::byte>(bytes), now);
  EXPECT_EQ(scheduler->counters().reports_malformed, 1u);
  report.epoch = kEpoch;
  report.failed = {{StoreIndex{9}, 0, 0}};
  report.jobs[0].num_failed = 1;
  scheduler->report(report, now);
  EXPECT_EQ(scheduler->counters().reports_malformed, 2u);
}

TEST_F(SchedulerTest, AReportThatNamesWhatTheJobNeverMovedFailsItAsAWhole) {
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  exists(hashes, 48);
  ASSERT_EQ(settle_lookup(49, hashes, 0).external_tokens, 48u);
  const Rows rows({{1, 2, 3}});
  const auto job = scheduler->allocated(kRequest, 48, rows.get(), now);
  ASSERT_TRUE(job);
  scheduler->end_step(now);
  report(*job, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 1000, static_cast<std::uint32_t>(ItemStatus::kChecksumMismatch)}});
  EXPECT_EQ(scheduler->counters().reports_malformed, 1u);
  EXPECT_THAT(store->removals, IsEmpty());
  const std::vector<LoadEnd> ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].valid_tokens, 0u);
  EXPECT_TRUE(ends[0].blocks_quiet) << "what it says of quiet counts";
  EXPECT_EQ(ends[0].failed.size(), 3u);
}

TEST_F(SchedulerTest, HashesBehindAGapAreRefusedAlsoWhenThereAreNone) {
  build({test::full_group(16)});
  const HashList none{nullptr, 0, Hashes::kWidth, 100};
  EXPECT_FALSE(scheduler->lookup(kRequest, 2000, none, 0, now).pending);
  EXPECT_EQ(scheduler->counters().hashes_refused, 1u);
  scheduler->end_step(now);
  EXPECT_THAT(store->lookups, IsEmpty());
  scheduler->advanced(kRequest, 2000, none);
  EXPECT_EQ(scheduler->counters().hashes_refused, 2u);
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
}

TEST_F(SchedulerTest, HashesOfNoWidthOrOneThatNoKeyHasAreRefused) {
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  const std::vector<std::uint8_t> bytes(4 * 65);
  std::uint64_t refused = 0;
  for (const std::uint32_t width : {0u, 15u, 65u}) {
    const HashList list{bytes.data(), 4, width, 0};
    EXPECT_FALSE(scheduler->lookup(kRequest, 64, list, 0, now).pending);
    EXPECT_EQ(scheduler->counters().hashes_refused, ++refused) << width;
    EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
    EXPECT_EQ(scheduler->known_hashes(kRequest), 0u);
  }
  scheduler->advanced(kRequest, 64, hashes.list());
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 64})) << "a good width still fits";
}

TEST_F(SchedulerTest, UnknownRequestsAreHarmless) {
  // R62
  build_hybrid();
  scheduler->finished(RequestId{1}, FinishReason::kAborted);
  scheduler->preempted(RequestId{1});
  EXPECT_TRUE(scheduler->wants_save(RequestId{1}, now).empty());
  const Rows rows({{1}, {2}, {3}});
  scheduler->save(RequestId{1}, {0, 16}, rows.get(), now);
  EXPECT_EQ(scheduler->known_hashes(RequestId{1}), 0u);
  EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
  EXPECT_EQ(scheduler->tracked(), 0u);
}

TEST_F(SchedulerTest, PlanBytesFollowTheRangeNotTheContext) {
  build({test::full_group(16), test::mamba_group(16)});
  std::set<std::size_t> sizes;
  for (const std::uint32_t context : {160u, 16000u}) {
    const RequestId id{context};
    const Hashes hashes(context / 16, 1);
    std::vector<std::int32_t> row(context / 16);
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = 1 + static_cast<std::int32_t>(i % 63);
    const Rows rows({row, row});
    scheduler->advanced(id, context - 32, hashes.list());
    scheduler->save(id, scheduler->wants_save(id, now), rows.get(), now);
    scheduler->end_step(now);
    scheduler->advanced(id, context, {});
    scheduler->save(id, scheduler->wants_save(id, now), rows.get(), now);
    std::vector<std::byte> bytes;
    encode(scheduler->end_step(now).view(), bytes);
    sizes.insert(bytes.size());
  }
  EXPECT_EQ(sizes.size(), 1u) << "two chunks cost the same at any context";
  EXPECT_LT(*sizes.begin(), 256u);
}

TEST_F(SchedulerTest, RefusesAConfigurationThatCannotStore) {
  const auto message = [&](std::vector<GroupConfig> groups,
                           StoreSchedulerOptions options = {}) -> std::string {
    try {
      build(std::move(groups), options);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(message({test::ring_group(8)}), HasSubstr("at least one group to store"));
  GroupConfig mamba = test::mamba_group(16);
  std::get<StatePayload>(mamba.spec.payload).cache_mode = "none";
  EXPECT_THAT(message({test::full_group(16), mamba}), HasSubstr("align"));
  StoreSchedulerOptions options;
  options.load_timeout = {};
  options.save_timeout = Duration{INT64_MAX};
  const std::string both = message({test::full_group(16)}, options);
  EXPECT_THAT(both, HasSubstr("save_timeout = 9223372036854775807 ns: expected a bound"));
  EXPECT_THAT(both, HasSubstr("load_timeout = 0 ns: expected a bound of more than 0"));
}

// Full attention in blocks of 64 and a window of 20 tokens in blocks of 16: a hit needs two blocks
// of the window before each multiple of 64.
TEST_F(SchedulerTest, OfAWindowOnlyWhatCanServeAHitIsAskedForAndSaved) {
  build({test::full_group(64), test::window_group(16, 20)});
  const Hashes hashes(8, 1);
  EXPECT_TRUE(scheduler->lookup(kRequest, 129, hashes.list(), 0, now).pending);
  scheduler->end_step(now);
  EXPECT_EQ(store->lookups.front().keys().size(), 2u + 4u) << "chunks 2, 3, 6 and 7 of the window";
  store->lookups.clear();
  scheduler->advanced(kRequest, 128, hashes.list());
  const Rows rows({{1, 2}, {10, 11, 12, 13, 14, 15, 16, 17}});
  scheduler->save(kRequest, scheduler->wants_save(kRequest, now), rows.get(), now);
  EXPECT_THAT(moves(scheduler->end_step(now), 0),
              ElementsAre(Move{0, 0, 1, 64}, Move{0, 1, 2, 128}, Move{1, 2, 12, 48},
                          Move{1, 3, 13, 64}, Move{1, 6, 16, 112}, Move{1, 7, 17, 128}));
}

TEST_F(SchedulerTest, TheEnginesRetentionThinsWindowsOut) {
  build_with_retention({test::full_group(64), test::window_group(16, 20)});
  const Hashes hashes(8, 1);
  settle_lookup(129, hashes, 0);
  scheduler->advanced(kRequest, 128, hashes.list());
  const Rows rows({{1, 2}, {10, 11, 12, 13, 14, 15, 16, 17}});
  scheduler->save(kRequest, scheduler->wants_save(kRequest, now), rows.get(), now);
  EXPECT_THAT(
      moves(scheduler->end_step(now), 0),
      ElementsAre(Move{0, 0, 1, 64}, Move{0, 1, 2, 128}, Move{1, 6, 16, 112}, Move{1, 7, 17, 128}))
      << "a prompt of 129 tokens is replayed from 128";
}

TEST_F(SchedulerTest, RetentionDoesNotMakeSharedPrefixesBeSavedAgain) {
  build_with_retention({test::full_group(16), test::window_group(16, 17)});
  const Hashes hashes(10, 1);
  const test::Rows rows({{1, 2, 3, 4}, {11, 12, 13, 14}});
  const auto run = [&](RequestId request, std::uint32_t prompt) {
    scheduler->prompt(request, prompt);
    scheduler->advanced(request, prompt, hashes.list());
    scheduler->save(request, {0, 64}, rows.get(), now);
    const StepPlan& plan = scheduler->end_step(now);
    const std::vector<Move> all = plan.jobs.empty() ? std::vector<Move>{} : moves(plan, 0);
    for (const JobRecord& job : plan.jobs) report(job.id, JobOutcome::kOk, true);
    return all;
  };
  EXPECT_THAT(run(RequestId{1}, 66),
              ElementsAre(Move{0, 0, 1, 16}, Move{0, 1, 2, 32}, Move{0, 2, 3, 48},
                          Move{0, 3, 4, 64}, Move{1, 3, 14, 64}));
  EXPECT_THAT(run(RequestId{2}, 67), ElementsAre(Move{0, 3, 4, 64}, Move{1, 3, 14, 64}))
      << "its own window's end; the steps before it are known";
  EXPECT_THAT(run(RequestId{3}, 50), ElementsAre(Move{0, 2, 3, 48}, Move{1, 2, 13, 48}));
}

TEST_F(SchedulerTest, WhereAPromptLeavesOthersItsWindowIsKept) {
  // W-C19: a long system prompt, and questions that all differ.
  build_with_retention({test::full_group(16), test::window_group(16, 17)});
  const Hashes hashes(10, 1);
  // Somebody has stored 64 of its tokens, and of the window only the end of its own, longer prompt.
  KeySlots keys;
  for (std::uint32_t block = 0; block < 4; ++block)
    schema->append_key(keys, StoreIndex{0}, {}, hashes.list()[block]);
  for (const std::string& key : keys.strings()) store->present[key] = 1;
  EXPECT_EQ(settle_lookup(129, hashes, 0).external_tokens, 0u) << "the window at 64 is nowhere";
  scheduler->advanced(kRequest, 128, hashes.list());
  const Rows rows({{1, 2, 3, 4, 5, 6, 7, 8}, {11, 12, 13, 14, 15, 16, 17, 18}});
  scheduler->save(kRequest, scheduler->wants_save(kRequest, now), rows.get(), now);
  std::vector<Move> windows;
  for (const Move& move : moves(scheduler->end_step(now), 0))
    if (move.group == 1) windows.push_back(move);
  EXPECT_THAT(windows, ElementsAre(Move{1, 3, 14, 64}, Move{1, 7, 18, 128}));
}

TEST_F(SchedulerTest, APromptThatIsNotAskedForIsKnownToo) {
  build_with_retention({test::full_group(16)});
  const Hashes hashes(4, 1);
  const Rows rows({{1, 2, 3, 4}});
  for (const RequestId request : {RequestId{1}, RequestId{2}}) {
    // The engine's own cache covers all that may be used.
    EXPECT_FALSE(scheduler->lookup(request, 65, hashes.list(), 64, now).pending);
    scheduler->advanced(request, 64, hashes.list());
    scheduler->save(request, {0, 64}, rows.get(), now);
    for (const JobRecord& job : scheduler->end_step(now).jobs)
      report(job.id, JobOutcome::kOk, true);
  }
  EXPECT_EQ(scheduler->counters().saves, 1u);
  EXPECT_EQ(scheduler->counters().saves_known, 4u);
}

TEST_F(SchedulerTest, OfADraftTheObjectBehindTheHitIsAskedForToo) {
  GroupConfig group = test::full_group(16);
  group.is_eagle_group = true;
  build({group});
  const Hashes hashes(10, 1);
  exists(hashes, 160);
  EXPECT_EQ(settle_lookup(160, hashes, 0).external_tokens, 144u)
      << "block 9 is computed again, for the draft and for the last token";
}

}  // namespace
}  // namespace kvprism
