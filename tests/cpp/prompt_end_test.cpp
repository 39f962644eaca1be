// Hits that end inside a block: the end of a prompt as it is saved, looked up and loaded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kvprism/hit/prompt_end.h"
#include "kvprism/store/store_scheduler.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr RequestId kRequest{41};
constexpr GroupId kFull{0};
constexpr GroupId kState{2};

// Group, chunk, block, tokens of its mark, valid tokens of it where it ends a run.
struct Move {
  std::uint32_t group, chunk;
  std::int32_t block;
  std::uint32_t mark, valid;
  bool operator==(const Move&) const = default;
  friend void PrintTo(const Move& m, std::ostream* out) {
    *out << "{g" << m.group << " c" << m.chunk << " b" << m.block << " t" << m.mark << " v"
         << m.valid << "}";
  }
};

std::vector<Move> moves(const StepPlan& plan, std::size_t job) {
  std::vector<Move> result;
  const JobRecord& record = plan.jobs[job];
  for (std::uint32_t r = 0; r < record.num_runs; ++r) {
    const RunRecord& run = plan.runs[record.first_run + r];
    for (std::uint32_t i = 0; i < run.count; ++i) {
      const std::uint32_t mark = plan.mark_tokens[run.first_mark + i];
      result.push_back({raw(run.group), run.first_chunk + i, raw(plan.ids[run.first_id + i]), mark,
                        i + 1 == run.count ? run.valid_tokens_last : 0});
    }
  }
  return result;
}

// Blocks of 8 tokens beside states each 16, hashes each 4: S is 16, hits end on multiples of 4.
class PromptEndTest : public ::testing::Test {
 protected:
  PromptEndTest() { build(false); }

  void build(bool draft) {
    CacheConfig config;
    config.num_blocks = 64;
    config.scheduler_block_size = 16;
    config.hash_block_size = 4;
    config.cache_hit_alignment_tokens = 4;
    config.groups = {test::full_group(8), test::ring_group(6), test::mamba_group(16)};
    config.groups[0].is_eagle_group = draft;
    projection = Projection::make(config, SpecRegistry::builtin());
    schema = test::make_schema(projection);
    StoreSchedulerOptions options;
    options.epoch = 7;
    scheduler.reset();
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  }

  std::string key(std::uint32_t group, std::uint32_t tokens) const {
    KeySlots keys;
    schema->append_key(keys, StoreIndex{group}, {}, hashes.list()[tokens / 4 - 1]);
    return keys[0];
  }
  void exists(std::uint32_t group, std::vector<std::uint32_t> ends) {
    for (const std::uint32_t tokens : ends) store->present[key(group, tokens)] = 1;
  }
  LookupResult look_up(std::uint32_t prompt, std::uint32_t local = 0) {
    const HashList known{hashes.bytes.data(), prompt / 4, Hashes::kWidth};
    LookupResult result = scheduler->lookup(kRequest, prompt, known, local, now);
    // What the first round leaves open is asked in a second one.
    for (int round = 0; result.pending && round < 2; ++round) {
      scheduler->end_step(now);
      while (!store->lookups.empty()) store->answer_lookup();
      result = scheduler->lookup(kRequest, prompt, known, local, now);
    }
    return result;
  }
  void end(JobId job, JobOutcome outcome, std::vector<FailedChunk> failed = {}) {
    WorkerReport report;
    report.epoch = 7;
    JobReport entry;
    entry.job = job;
    entry.outcome = outcome;
    entry.quiet = 1;
    entry.num_failed = static_cast<std::uint32_t>(failed.size());
    report.jobs = {entry};
    report.failed = std::move(failed);
    scheduler->report(report, now);
  }
  const StepPlan& compute(std::uint32_t tokens) {
    scheduler->advanced(kRequest, tokens, hashes.list());
    const TokenRange range = scheduler->wants_save(kRequest, now);
    if (!range.empty()) scheduler->save(kRequest, range, table.get(), now);
    return scheduler->end_step(now);
  }
  LoadEnd load_end() {
    std::vector<LoadEnd> ends;
    scheduler->take_load_ends(ends);
    return ends.empty() ? LoadEnd{} : ends.front();
  }

  using Hashes = test::Hashes;
  const Hashes hashes{16, 1};
  const test::Rows table{{{11, 12, 13, 14, 15, 16}, {21}, {31, 32, 33}}};
  std::shared_ptr<test::ScriptedStore> store = std::make_shared<test::ScriptedStore>();
  std::shared_ptr<const Projection> projection;
  std::shared_ptr<const KeySchema> schema;
  std::unique_ptr<StoreScheduler> scheduler;
  Instant now{seconds(1).ns};
};

TEST_F(PromptEndTest, LiesWhereAReplayStarts) {
  const HitGrid grid{16, 4, 4};
  EXPECT_EQ(prompt_end(30, grid, false, 1), (PromptEnd{28, 28}));
  EXPECT_EQ(prompt_end(32, grid, false, 1), (PromptEnd{28, 28}))
      << "the last token is computed anew";
  EXPECT_EQ(prompt_end(33, grid, false, 1), PromptEnd{}) << "whole steps are saved as such";
  EXPECT_EQ(prompt_end(4, grid, false, 1), PromptEnd{});
  EXPECT_EQ(prompt_end(5, grid, false, 1), (PromptEnd{4, 4}));
  EXPECT_EQ(prompt_end(0, grid, false, 1), PromptEnd{});
  EXPECT_EQ(prompt_end(30, grid, true, 1), (PromptEnd{24, 28}));
  EXPECT_EQ(prompt_end(32, grid, true, 1), (PromptEnd{28, 32}));
  EXPECT_EQ(prompt_end(36, grid, true, 1), (PromptEnd{32, 36}))
      << "what proves it is no whole step";
  EXPECT_EQ(prompt_end(7, grid, true, 1), PromptEnd{});
  EXPECT_EQ(prompt_end(30, HitGrid{16, 4, 16}, false, 1), PromptEnd{}) << "whole blocks only";
}

TEST_F(PromptEndTest, LiesBeforeAllThatAReplayComputesAnew) {
  const HitGrid grid{16, 4, 4};
  EXPECT_EQ(prompt_end(30, grid, false, 3), (PromptEnd{24, 24}));
  EXPECT_EQ(prompt_end(34, grid, false, 6), (PromptEnd{28, 28}));
  EXPECT_EQ(prompt_end(34, grid, false, 2), PromptEnd{}) << "whole steps are saved as such";
  EXPECT_EQ(prompt_end(6, grid, false, 6), PromptEnd{});
  EXPECT_EQ(prompt_end(30, grid, true, 3), (PromptEnd{24, 28}));
  EXPECT_EQ(prompt_end(30, grid, true, 9), (PromptEnd{20, 24}));
}

// A ring whose last 6 tokens are computed anew: whoever asks again is offered 24 of 30 tokens.
TEST_F(PromptEndTest, ARingFindsWhatItsOwnSaveHasLeft) {
  CacheConfig config = projection->config();
  config.groups[1].spec.replay_tokens = 6;
  config.groups[2] = test::window_group(4, 5);
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = test::make_schema(projection);
  StoreSchedulerOptions options;
  options.epoch = 7;
  scheduler.reset();
  scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  const test::Rows rows{{{11, 12, 13, 14}, {21}, {0, 0, 0, 0, 35, 36, 37, 38}}};
  scheduler->prompt(kRequest, 30);
  scheduler->advanced(kRequest, 30, hashes.list());
  scheduler->save(kRequest, scheduler->wants_save(kRequest, now), rows.get(), now);
  const StepPlan& plan = scheduler->end_step(now);
  for (std::size_t job = 0; job < plan.jobs.size(); ++job) {
    for (const Move& move : moves(plan, job)) exists(move.group, {move.mark});
  }
  scheduler->finished(kRequest, FinishReason::kCompleted);
  EXPECT_EQ(look_up(30).external_tokens, 24u);
}

TEST_F(PromptEndTest, OneThatEndsWithItsRankIsSavedAgain) {
  scheduler->prompt(kRequest, 30);
  ASSERT_THAT(compute(30).jobs, SizeIs(2));
  scheduler->rank_gone(Rank{0}, now);
  scheduler->preempted(kRequest);
  EXPECT_THAT(compute(30).jobs, SizeIs(2)) << "the steps and the end of the prompt";
}

TEST_F(PromptEndTest, OneThatALookupNoLongerFindsIsSavedAgain) {
  ASSERT_EQ(look_up(30).external_tokens, 0u);
  const StepPlan& plan = compute(30);
  const std::vector<JobId> jobs{plan.jobs.at(0).id, plan.jobs.at(1).id};
  for (const JobId job : jobs) end(job, JobOutcome::kOk);
  now = now + scheduler->options().saved_fresh_for;
  scheduler->preempted(kRequest);
  exists(0, {8, 16, 24, 28});
  exists(1, {16, 28});
  ASSERT_EQ(look_up(30).external_tokens, 28u);
  EXPECT_THAT(compute(30).jobs, IsEmpty());
  scheduler->preempted(kRequest);
  store->present.erase(key(0, 28));
  ASSERT_EQ(look_up(30).external_tokens, 16u);
  const StepPlan& again = compute(30);
  ASSERT_THAT(again.jobs, SizeIs(1));
  EXPECT_THAT(moves(again, 0), ElementsAre(Move{0, 2, 13, 24, 0}, Move{0, 3, 14, 28, 4}));
}

TEST_F(PromptEndTest, IsSavedBesideTheWholeSteps) {
  scheduler->prompt(kRequest, 30);
  scheduler->advanced(kRequest, 30, hashes.list());
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 28}));
  const StepPlan& plan = compute(30);
  ASSERT_THAT(plan.jobs, SizeIs(2));
  EXPECT_THAT(moves(plan, 0), ElementsAre(Move{0, 0, 11, 8, 0}, Move{0, 1, 12, 16, 8}));
  EXPECT_THAT(moves(plan, 1), ElementsAre(Move{0, 2, 13, 24, 0}, Move{0, 3, 14, 28, 4}));
  const auto last = plan.view().mark_hash(plan.runs.back().first_mark + 1);
  const auto wanted = hashes.list()[28 / 4 - 1];
  EXPECT_TRUE(std::equal(last.begin(), last.end(), wanted.begin(), wanted.end()));
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty()) << "once";
}

TEST_F(PromptEndTest, IsSavedWithoutALookupOnlyWhenThePromptIsKnown) {
  EXPECT_THAT(compute(30).jobs, SizeIs(1)) << "nobody has said how long the prompt is";
  scheduler->prompt(kRequest, 30);
  EXPECT_THAT(moves(compute(30), 0), ElementsAre(Move{0, 2, 13, 24, 0}, Move{0, 3, 14, 28, 4}));
}

TEST_F(PromptEndTest, WaitsUntilItIsComputed) {
  scheduler->prompt(kRequest, 30);
  EXPECT_THAT(compute(20).jobs, SizeIs(1));
  EXPECT_THAT(compute(27).jobs, IsEmpty());
  EXPECT_EQ(moves(compute(28), 0).back(), (Move{0, 3, 14, 28, 4}));
}

TEST_F(PromptEndTest, WaitsForWhatHasFailedBeforeIt) {
  scheduler->prompt(kRequest, 30);
  const JobId steps = compute(16).jobs[0].id;
  end(steps, JobOutcome::kPartial,
      {{StoreIndex{0}, 1, static_cast<std::uint32_t>(ItemStatus::kFailed)}});
  EXPECT_THAT(compute(30).jobs, IsEmpty()) << "behind a hole it is of no use";
  const StepPlan& plan = compute(48);
  ASSERT_THAT(plan.jobs, SizeIs(2)) << "the hole is tried again with progress";
  EXPECT_EQ(moves(plan, 0).front(), (Move{0, 0, 11, 8, 0}));
  EXPECT_EQ(moves(plan, 1).back(), (Move{0, 3, 14, 28, 4}));
}

TEST_F(PromptEndTest, IsNotSavedAgainForAWhileByWhoeverSharesIt) {
  scheduler->prompt(kRequest, 30);
  const StepPlan& plan = compute(30);
  const JobId steps = plan.jobs[0].id;
  const JobId tail = plan.jobs[1].id;
  end(steps, JobOutcome::kOk);
  end(tail, JobOutcome::kOk);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  scheduler->prompt(kRequest, 31);
  EXPECT_THAT(compute(31).jobs, IsEmpty());
  EXPECT_EQ(scheduler->counters().saves_known, 2u);
  now = now + seconds(61);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  scheduler->prompt(kRequest, 31);
  EXPECT_THAT(compute(31).jobs, SizeIs(2));
}

TEST_F(PromptEndTest, AFailedOneIsLeftToTheNextRequest) {
  scheduler->prompt(kRequest, 30);
  const JobId tail = compute(30).jobs[1].id;
  end(tail, JobOutcome::kPartial,
      {{StoreIndex{0}, 3, static_cast<std::uint32_t>(ItemStatus::kFailed)}});
  EXPECT_THAT(compute(31).jobs, IsEmpty());
  scheduler->finished(kRequest, FinishReason::kCompleted);
  scheduler->prompt(kRequest, 30);
  EXPECT_THAT(compute(30).jobs, SizeIs(2)) << "nothing of it counts as stored";
}

TEST_F(PromptEndTest, StatesInsideABlockAreTakenWhereAHitMayEnd) {
  scheduler->advanced(kRequest, 30, hashes.list());
  scheduler->boundary(kRequest, kState, BlockId{40}, 28);
  scheduler->boundary(kRequest, kState, BlockId{41}, 26);
  scheduler->boundary(kRequest, kState, BlockId{42}, 16);
  const StepPlan& plan = scheduler->end_step(now);
  ASSERT_THAT(plan.jobs, SizeIs(1));
  EXPECT_THAT(moves(plan, 0), ElementsAre(Move{1, 1, 40, 28, 12}, Move{1, 0, 42, 16, 16}));
  EXPECT_EQ(scheduler->counters().offers_refused, 1u) << "no hash names 26 tokens";
}

TEST_F(PromptEndTest, StatesInsideConsecutiveBlocksAreRunsOfTheirOwn) {
  scheduler->advanced(kRequest, 30, hashes.list());
  scheduler->boundary(kRequest, kState, BlockId{40}, 12);
  scheduler->boundary(kRequest, kState, BlockId{41}, 28);
  const StepPlan& plan = scheduler->end_step(now);
  EXPECT_THAT(plan.runs, SizeIs(2)) << "only the last chunk of a run may be a part of one";
  EXPECT_THAT(moves(plan, 0), ElementsAre(Move{1, 0, 40, 12, 12}, Move{1, 1, 41, 28, 12}));
}

TEST_F(PromptEndTest, AWholeStateIsFollowedByOneInsideTheNextBlock) {
  scheduler->advanced(kRequest, 30, hashes.list());
  scheduler->boundary(kRequest, kState, BlockId{40}, 16);
  scheduler->boundary(kRequest, kState, BlockId{41}, 28);
  const StepPlan& plan = scheduler->end_step(now);
  EXPECT_THAT(plan.runs, SizeIs(1));
  EXPECT_THAT(moves(plan, 0), ElementsAre(Move{1, 0, 40, 16, 0}, Move{1, 1, 41, 28, 12}));
}

TEST_F(PromptEndTest, IsSavedAgainAfterAPurgeByWhoIsPreempted) {
  scheduler->prompt(kRequest, 30);
  const StepPlan& plan = compute(30);
  const std::vector<JobId> jobs{plan.jobs.at(0).id, plan.jobs.at(1).id};
  for (const JobId job : jobs) end(job, JobOutcome::kOk);
  for (const bool before : {false, true}) {
    if (before) scheduler->preempted(kRequest);
    scheduler->purge(now);
    for (const Duration wait : {seconds(0), seconds(12)}) {
      now = now + wait;
      scheduler->end_step(now);
      store->end_removal({ItemStatus::kOk, 1});
      scheduler->end_step(now);
    }
    ASSERT_EQ(scheduler->purge_status().state, PurgeState::kDone);
    if (!before) scheduler->preempted(kRequest);
    const StepPlan& again = compute(30);
    ASSERT_THAT(again.jobs, SizeIs(2)) << "the steps and the end of the prompt";
    const std::vector<JobId> anew{again.jobs[0].id, again.jobs[1].id};
    for (const JobId job : anew) end(job, JobOutcome::kOk);
  }
}

TEST_F(PromptEndTest, ARequestThatReplacesAnotherKeepsThePromptThatWasTold) {
  scheduler->advanced(kRequest, 4, Hashes(1, 9).list());
  scheduler->prompt(kRequest, 30);
  EXPECT_THAT(compute(30).jobs, SizeIs(2));
  EXPECT_EQ(scheduler->counters().requests_replaced, 1u);
}

TEST_F(PromptEndTest, AFailedStateMayBeOfferedAgain) {
  scheduler->advanced(kRequest, 30, hashes.list());
  scheduler->boundary(kRequest, kState, BlockId{40}, 28);
  const JobId job = scheduler->end_step(now).jobs[0].id;
  scheduler->boundary(kRequest, kState, BlockId{40}, 28);
  EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
  end(job, JobOutcome::kPartial,
      {{StoreIndex{1}, 1, static_cast<std::uint32_t>(ItemStatus::kFailed)}});
  scheduler->boundary(kRequest, kState, BlockId{40}, 28);
  EXPECT_THAT(scheduler->end_step(now).jobs, SizeIs(1));
}

TEST_F(PromptEndTest, IsFoundAndLoaded) {
  exists(0, {8, 16, 24, 28});
  exists(1, {16, 28});
  EXPECT_EQ(look_up(30).external_tokens, 28u);
  const auto job = scheduler->allocated(kRequest, 28, table.get(), now);
  const StepPlan& plan = scheduler->end_step(now);
  ASSERT_TRUE(job);
  EXPECT_THAT(moves(plan, 0),
              ElementsAre(Move{0, 0, 11, 8, 0}, Move{0, 1, 12, 16, 0}, Move{0, 2, 13, 24, 0},
                          Move{0, 3, 14, 28, 4}, Move{1, 1, 32, 28, 12}));
  end(*job, JobOutcome::kOk);
  EXPECT_EQ(load_end().valid_tokens, 28u);
  EXPECT_THAT(compute(30).jobs, IsEmpty()) << "what came from the store is in the store";
}

TEST_F(PromptEndTest, BeyondTheLocalHitOnly) {
  exists(0, {8, 16, 24, 28});
  exists(1, {28});
  EXPECT_EQ(look_up(30, 16).external_tokens, 12u);
  ASSERT_TRUE(scheduler->allocated(kRequest, 12, table.get(), now));
  EXPECT_THAT(moves(scheduler->end_step(now), 0),
              ElementsAre(Move{0, 2, 13, 24, 0}, Move{0, 3, 14, 28, 4}, Move{1, 1, 32, 28, 12}));
}

TEST_F(PromptEndTest, ALongerObjectOfTheSameBlockServesAShorterHit) {
  exists(0, {8, 16, 24, 32});
  exists(1, {28});
  EXPECT_EQ(look_up(40).external_tokens, 28u);
  ASSERT_TRUE(scheduler->allocated(kRequest, 28, table.get(), now));
  const std::vector<Move> all = moves(scheduler->end_step(now), 0);
  EXPECT_EQ(all[3], (Move{0, 3, 14, 32, 4})) << "32 tokens are there, 28 count";
}

TEST_F(PromptEndTest, AHoleBeforeItEndsTheHit) {
  exists(0, {8, 24, 28});
  exists(1, {28});
  EXPECT_EQ(look_up(30).external_tokens, 0u);
}

TEST_F(PromptEndTest, LeavesTheLastTokenToCompute) {
  exists(0, {8, 16, 24, 28, 32});
  exists(1, {16, 28, 32});
  EXPECT_EQ(look_up(32).external_tokens, 28u);
}

TEST_F(PromptEndTest, WithoutItsStateTheHitIsShorter) {
  exists(0, {8, 16, 24, 28});
  exists(1, {16});
  EXPECT_EQ(look_up(30).external_tokens, 16u);
}

TEST_F(PromptEndTest, AFailedStateRewindsToTheEndBeforeIt) {
  exists(0, {8, 16, 24, 28});
  exists(1, {28});
  look_up(30);
  const auto job = scheduler->allocated(kRequest, 28, table.get(), now);
  scheduler->end_step(now);
  end(*job, JobOutcome::kPartial,
      {{StoreIndex{1}, 1, static_cast<std::uint32_t>(ItemStatus::kMissing)}});
  const LoadEnd ended = load_end();
  EXPECT_EQ(ended.valid_tokens, 0u) << "no other state was fetched";
  EXPECT_THAT(ended.failed, ElementsAre(FailedBlock{kState, 1, BlockId{32}}));
}

TEST_F(PromptEndTest, AStateServesNoShorterPrefix) {
  exists(0, {8, 16, 24, 28});
  exists(1, {28});
  look_up(30, 16);
  const auto job = scheduler->allocated(kRequest, 12, table.get(), now);
  scheduler->end_step(now);
  end(*job, JobOutcome::kPartial,
      {{StoreIndex{0}, 3, static_cast<std::uint32_t>(ItemStatus::kMissing)}});
  EXPECT_EQ(load_end().valid_tokens, 16u) << "the state of 28 tokens is not that of 24";
}

TEST_F(PromptEndTest, AnObjectThatCannotBeLoadedIsAvoidedForAWhile) {
  exists(0, {8, 16, 24, 28});
  exists(1, {16, 28});
  look_up(30);
  const auto job = scheduler->allocated(kRequest, 28, table.get(), now);
  scheduler->end_step(now);
  end(*job, JobOutcome::kPartial,
      {{StoreIndex{0}, 3, static_cast<std::uint32_t>(ItemStatus::kChecksumMismatch)}});
  EXPECT_THAT(load_end().failed, ElementsAre(FailedBlock{kFull, 3, BlockId{14}}));
  scheduler->finished(kRequest, FinishReason::kAborted);
  EXPECT_EQ(look_up(30).external_tokens, 16u);
  EXPECT_EQ(scheduler->counters().chunks_avoided, 1u);
}

// Two groups of attention without a state, whose loads fail in part.
TEST_F(PromptEndTest, FailuresRewindToAUnitThatAllGroupsHave) {
  CacheConfig config;
  config.num_blocks = 64;
  config.scheduler_block_size = 16;
  config.hash_block_size = 4;
  config.cache_hit_alignment_tokens = 4;
  config.groups = {test::full_group(16, "a"), test::full_group(8, "b")};
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = test::make_schema(projection);
  StoreSchedulerOptions options;
  options.epoch = 7;
  scheduler.reset();
  scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  exists(0, {16, 28});
  exists(1, {8, 16, 24, 28});
  EXPECT_EQ(look_up(30).external_tokens, 28u);
  const test::Rows rows{{{1, 2}, {3, 4, 5, 6}}};
  const auto job = scheduler->allocated(kRequest, 28, rows.get(), now);
  scheduler->end_step(now);
  end(*job, JobOutcome::kPartial,
      {{StoreIndex{1}, 3, static_cast<std::uint32_t>(ItemStatus::kMissing)}});
  EXPECT_EQ(load_end().valid_tokens, 24u) << "the object of 28 tokens holds the first 24 too";
}

// R23: prompts that end on a hash unit.
TEST_F(PromptEndTest, ADraftFindsWhatItsOwnSaveHasLeft) {
  for (const std::uint32_t prompt : {30u, 31u, 32u, 33u, 36u, 40u, 44u}) {
    store = std::make_shared<test::ScriptedStore>();
    build(true);
    scheduler->prompt(kRequest, prompt);
    const StepPlan& plan = compute(prompt);
    for (std::size_t job = 0; job < plan.jobs.size(); ++job) {
      for (const Move& move : moves(plan, job)) exists(move.group, {move.mark});
    }
    const std::uint32_t boundary = prompt / 4 * 4 - 4;
    exists(1, {boundary});  // the state that the engine hands off there
    scheduler->finished(kRequest, FinishReason::kCompleted);
    EXPECT_EQ(look_up(prompt).external_tokens, boundary) << prompt;
    scheduler->finished(kRequest, FinishReason::kCompleted);
    EXPECT_EQ(look_up(prompt + 9).external_tokens, boundary)
        << "and whoever goes on from " << prompt;
  }
}

// Groups of equal specs are searched as one, so one flag counts for all of them.
TEST_F(PromptEndTest, WhatProvesADraftsHitIsSavedOfItsWholeFamily) {
  CacheConfig config = projection->config();
  config.groups[2] = test::full_group(8, "twin");
  config.groups[0].is_eagle_group = true;
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = test::make_schema(projection);
  scheduler.reset();
  StoreSchedulerOptions options;
  options.epoch = 7;
  scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  scheduler->prompt(kRequest, 22);
  const StepPlan& plan = compute(22);
  ASSERT_THAT(plan.jobs, SizeIs(2));
  EXPECT_THAT(moves(plan, 1), ElementsAre(Move{0, 2, 13, 20, 4}, Move{1, 2, 33, 20, 4}));
}

// Hits end on multiples of two hashes.
TEST_F(PromptEndTest, ADraftsProofIsLookedForAsFarAsItIsSaved) {
  CacheConfig config;
  config.num_blocks = 64;
  config.scheduler_block_size = 16;
  config.hash_block_size = 4;
  config.cache_hit_alignment_tokens = 8;
  config.groups = {test::full_group(16), test::ring_group(6), test::mamba_group(16)};
  config.groups[0].is_eagle_group = true;
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = test::make_schema(projection);
  for (const std::uint32_t prompt : {40u, 41u, 47u, 48u, 56u, 60u}) {
    store = std::make_shared<test::ScriptedStore>();
    StoreSchedulerOptions options;
    options.epoch = 7;
    scheduler.reset();
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
    scheduler->prompt(kRequest, prompt);
    const StepPlan& plan = compute(prompt);
    for (std::size_t job = 0; job < plan.jobs.size(); ++job) {
      for (const Move& move : moves(plan, job)) exists(move.group, {move.mark});
    }
    const std::uint32_t boundary = prompt / 8 * 8 - 8;
    exists(1, {boundary});
    scheduler->finished(kRequest, FinishReason::kCompleted);
    EXPECT_EQ(look_up(prompt).external_tokens, boundary) << prompt;
  }
}

// What a prompt's end is decided by is not asked for again, so it is kept also of a lookup that the
// store may not answer.
TEST_F(PromptEndTest, IsSavedOfWhoCameWhileTheStoreWasNotUsed) {
  for (const bool purged : {true, false}) {
    build(false);
    purged ? scheduler->purge(now) : scheduler->set_mode(StoreMode::kOff);
    EXPECT_FALSE(look_up(30).pending);
    for (const Duration wait : {seconds(0), seconds(12)}) {
      now = now + wait;
      scheduler->end_step(now);
      if (purged) store->end_removal({ItemStatus::kOk, 1});
      scheduler->end_step(now);
    }
    EXPECT_FALSE(scheduler->purge_status().active());
    scheduler->set_mode(StoreMode::kReadWrite);
    const StepPlan& plan = compute(30);
    ASSERT_THAT(plan.jobs, SizeIs(2)) << "the whole step and the end, purged: " << purged;
    EXPECT_THAT(moves(plan, 1), ElementsAre(Move{0, 2, 13, 24, 0}, Move{0, 3, 14, 28, 4}));
  }
}

// A window of 5 tokens in blocks of 4: a hit needs one block, and 28 tokens have 7.
TEST_F(PromptEndTest, OfAWindowOnlyItsReachIsSavedAndTheSaveIsKnownAsWhole) {
  CacheConfig config;
  config.num_blocks = 64;
  config.scheduler_block_size = 32;
  config.hash_block_size = 4;
  config.cache_hit_alignment_tokens = 4;
  config.groups = {test::full_group(8), test::window_group(4, 5), test::mamba_group(32)};
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = test::make_schema(projection);
  StoreSchedulerOptions options;
  options.epoch = 7;
  scheduler.reset();
  scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  // The blocks before the window have been given back.
  const test::Rows rows{{{11, 12, 13, 14}, {0, 0, 0, 0, 0, 25, 26, 27}, {31}}};
  const auto compute_end = [&]() -> const StepPlan& {
    scheduler->prompt(kRequest, 30);
    scheduler->advanced(kRequest, 30, hashes.list());
    scheduler->save(kRequest, scheduler->wants_save(kRequest, now), rows.get(), now);
    return scheduler->end_step(now);
  };
  const StepPlan& plan = compute_end();
  ASSERT_THAT(plan.jobs, SizeIs(1));
  EXPECT_THAT(moves(plan, 0),
              ElementsAre(Move{0, 0, 11, 8, 0}, Move{0, 1, 12, 16, 0}, Move{0, 2, 13, 24, 0},
                          Move{0, 3, 14, 28, 4}, Move{1, 6, 26, 28, 4}));
  EXPECT_EQ(scheduler->counters().sources_skipped, 0u);
  end(plan.jobs[0].id, JobOutcome::kOk);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  EXPECT_THAT(compute_end().jobs, IsEmpty()) << "the next request knows of it";
}

}  // namespace
}  // namespace kvprism
