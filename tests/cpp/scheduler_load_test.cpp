// Lookups and loads: what is asked, what is offered, what has arrived.
#include "scheduler_fixture.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::kRequest;
using test::Move;
using test::moves;
using test::Rows;
using test::SchedulerTest;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

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

TEST_F(SchedulerTest, ALocalHitOffTheGridIsNotAnswered) {
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  exists(hashes, 64);
  EXPECT_EQ(settle_lookup(65, hashes, 20).external_tokens, 0u);
  EXPECT_EQ(scheduler->counters().lookups_refused, 1u);
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

// Groups of equal specs are searched as one, so what the flag of one asks for is saved and looked
// up of each. Only where nobody has said whether the engine drops blocks do the flags differ.
TEST_F(SchedulerTest, OneFlaggedGroupMakesAllOfItsSpecDrafts) {
  const auto build_twins = [&] {
    GroupConfig flagged = test::window_group(4, 5, "d");
    flagged.is_eagle_group = true;
    build({test::full_group(32), test::window_group(4, 5, "w"), flagged});
  };
  build_twins();
  const Hashes hashes(40, 1);
  exists(hashes, 160);
  EXPECT_EQ(settle_lookup(130, hashes, 0).external_tokens, 96u) << "what is behind it is asked for";

  build_twins();
  store->present.clear();
  std::vector<std::vector<std::int32_t>> tables(3);
  for (std::int32_t block = 1; block <= 4; ++block) tables[0].push_back(block);
  for (std::int32_t block = 1; block <= 32; ++block) {
    tables[1].push_back(block);
    tables[2].push_back(block);
  }
  const Rows rows(tables);
  scheduler->advanced(kRequest, 128, hashes.list());
  scheduler->save(kRequest, {0, 128}, rows.get(), now);
  const StepPlan& plan = scheduler->end_step(now);
  ASSERT_EQ(plan.jobs.size(), 1u);
  std::vector<std::vector<std::uint32_t>> chunks(3);
  KeySlots keys;
  for (const Move& move : moves(plan, 0)) {
    chunks[move.group].push_back(move.chunk);
    schema->append_key(keys, StoreIndex{move.group}, {}, hashes.list()[move.tokens / 4 - 1]);
  }
  EXPECT_THAT(chunks[1], ElementsAre(7, 8, 15, 16, 23, 24, 31));
  EXPECT_EQ(chunks[2], chunks[1]);
  for (const std::string& key : keys.strings()) store->present[key] = 1;
  report(plan.jobs[0].id, JobOutcome::kOk, true);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  EXPECT_EQ(settle_lookup(130, hashes, 0).external_tokens, 96u) << "of what has been saved";
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

// R41: the worker is cut off from a store that still answers the scheduler's lookups.
TEST_F(SchedulerTest, WhatCouldNotBeReachedIsNotOfferedForAWhile) {
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  report(job, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 0, static_cast<std::uint32_t>(ItemStatus::kUnavailable)}});
  scheduler->finished(kRequest, FinishReason::kCompleted);
  const Instant failed_at = now;
  EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, 0u);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  EXPECT_EQ(scheduler->counters().loads, 1u);
  now = failed_at + seconds(5);
  EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u) << "it may be reached again";
}

// R51: each prompt lies where nothing can be reached, and each load would cost a client.
TEST_F(SchedulerTest, AfterLoadsThatReachedNothingNothingIsOfferedForAWhile) {
  build({test::full_group(16)});
  const Rows rows({{1, 2, 3, 4}});
  const auto offered = [&](std::uint8_t salt) {
    const Hashes hashes(8, salt);
    exists(hashes, 64);
    return settle_lookup(65, hashes, 0).external_tokens;
  };
  const auto load = [&](std::uint8_t salt, JobOutcome outcome, std::vector<FailedChunk> failed) {
    ASSERT_EQ(offered(salt), 64u) << int{salt};
    report(*scheduler->allocated(kRequest, 64, rows.get(), now), outcome, true, std::move(failed));
    scheduler->finished(kRequest, FinishReason::kCompleted);
  };
  const auto fail_with = [](ItemStatus status) {
    return std::vector<FailedChunk>{{StoreIndex{0}, 0, static_cast<std::uint32_t>(status)}};
  };
  load(1, JobOutcome::kPartial, fail_with(ItemStatus::kFailed));
  load(2, JobOutcome::kOk, {});
  load(3, JobOutcome::kOk, {});
  load(4, JobOutcome::kPartial, fail_with(ItemStatus::kFailed));
  load(5, JobOutcome::kPartial, fail_with(ItemStatus::kMissing));  // says nothing of the way
  load(6, JobOutcome::kPartial, fail_with(ItemStatus::kTimedOut));
  EXPECT_EQ(scheduler->counters().offers_paused, 0u);
  load(7, JobOutcome::kCancelled, {});
  EXPECT_EQ(scheduler->counters().offers_paused, 1u);
  EXPECT_THAT(scheduler->flight_record().text(), HasSubstr(" offers_paused 1 0 0\n"));
  const std::uint64_t calls = scheduler->counters().lookup_calls;
  EXPECT_EQ(offered(8), 0u);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  EXPECT_EQ(scheduler->counters().lookup_calls, calls) << "nobody is asked";
  now = now + seconds(5);
  load(9, JobOutcome::kPartial, fail_with(ItemStatus::kFailed));  // one finds out
  EXPECT_EQ(offered(10), 0u);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  now = now + seconds(5);
  load(11, JobOutcome::kOk, {});
  load(12, JobOutcome::kOk, {});
  load(13, JobOutcome::kOk, {});
  load(14, JobOutcome::kPartial, fail_with(ItemStatus::kFailed));
  EXPECT_EQ(offered(15), 64u);
  EXPECT_EQ(scheduler->counters().offers_paused, 2u);
}

// R51: half of the pool's processes are dead, and short prefixes lie whole on the others.
TEST_F(SchedulerTest, LoadsThatComeWholeBetweenDoNotHideADeadProcess) {
  build({test::full_group(16)});
  const Rows rows({{1, 2, 3, 4}});
  std::uint32_t pairs = 0;
  while (scheduler->counters().offers_paused == 0 && pairs < 6) {
    ++pairs;
    for (const bool whole : {false, true}) {
      const Hashes hashes(8, static_cast<std::uint8_t>(2 * pairs + (whole ? 1 : 0)));
      exists(hashes, 64);
      if (settle_lookup(65, hashes, 0).external_tokens == 0) break;
      const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
      if (whole) {
        report(job, JobOutcome::kOk, true);
      } else {
        report(job, JobOutcome::kPartial, true,
               {{StoreIndex{0}, 0, static_cast<std::uint32_t>(ItemStatus::kFailed)}});
      }
      scheduler->finished(kRequest, FinishReason::kCompleted);
    }
  }
  EXPECT_EQ(pairs, 5u);
  EXPECT_EQ(scheduler->counters().offers_paused, 1u);
}

TEST_F(SchedulerTest, WhatFailedAsAWholeIsNotOfferedForAWhile) {
  build({test::full_group(16)});
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  report(job, JobOutcome::kCancelled, true, {});
  scheduler->finished(kRequest, FinishReason::kCompleted);
  const Instant failed_at = now;
  EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, 0u);
  scheduler->finished(kRequest, FinishReason::kCompleted);
  now = failed_at + seconds(5);
  EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
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
    scheduler->preempted(kRequest);
    EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, 0u) << "it would be tried at each step";
    EXPECT_EQ(scheduler->counters().bypasses, 1u);
  }
}

// A hit that needs no object is a load all the same, and its rank may end before it has told.
TEST_F(SchedulerTest, ALoadOfNothingThatEndsWithItsRankIsOfferedAgain) {
  const Hashes hashes(8, 1);
  build({test::window_group(16, 1)});
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{0, 0, 0, 0}});
  ASSERT_TRUE(scheduler->allocated(kRequest, 64, rows.get(), now).has_value());
  const StepPlan& plan = scheduler->end_step(now);
  ASSERT_EQ(plan.jobs.size(), 1u);
  EXPECT_EQ(plan.jobs[0].num_runs, 0u);
  scheduler->rank_gone(Rank{0}, now);
  const auto ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].valid_tokens, 0u);
  scheduler->preempted(kRequest);
  EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  EXPECT_EQ(scheduler->counters().bypasses, 0u);
}

// The next token attends to itself alone, so the engine has no block before it.
TEST_F(SchedulerTest, OfAWindowOfOneTokenNothingIsLoaded) {
  build({test::full_group(16), test::window_group(16, 1)});
  const Hashes hashes(6, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4, 5, 6}, {0, 0, 0, 0, 15, 16}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  EXPECT_THAT(
      moves(scheduler->end_step(now), 0),
      ElementsAre(Move{0, 0, 1, 16}, Move{0, 1, 2, 32}, Move{0, 2, 3, 48}, Move{0, 3, 4, 64}));
  report(job, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 3, static_cast<std::uint32_t>(ItemStatus::kMissing)}});
  const auto ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].valid_tokens, 48u);
  // Also where the engine has given it blocks: nobody has written them.
  const Rows full({{1, 2, 3, 4, 5, 6}, {11, 12, 13, 14, 15, 16}});
  scheduler->advanced(kRequest, 96, hashes.list());
  scheduler->save(kRequest, scheduler->wants_save(kRequest, now), full.get(), now);
  EXPECT_THAT(moves(scheduler->end_step(now), 0),
              ElementsAre(Move{0, 3, 4, 64}, Move{0, 4, 5, 80}, Move{0, 5, 6, 96},
                          Move{1, 3, 14, 64}, Move{1, 4, 15, 80}, Move{1, 5, 16, 96}));
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

// An engine may give a window blocks where neither it nor a load has left bytes.
TEST_F(SchedulerTest, WhatALoadLeavesUnwrittenIsNotSaved) {
  build({test::full_group(16), test::window_group(16, 20)});
  const Hashes hashes(6, 1);
  exists(hashes, 96);
  ASSERT_EQ(settle_lookup(97, hashes, 32).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4, 5, 6}, {11, 12, 13, 14, 15, 16}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  EXPECT_THAT(moves(scheduler->end_step(now), 0),
              ElementsAre(Move{0, 2, 3, 48}, Move{0, 3, 4, 64}, Move{0, 4, 5, 80},
                          Move{0, 5, 6, 96}, Move{1, 4, 15, 80}, Move{1, 5, 16, 96}));
  report(job, JobOutcome::kOk, true);
  scheduler->advanced(kRequest, 96, {});
  ASSERT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 96}));
  scheduler->save(kRequest, {0, 96}, rows.get(), now);
  EXPECT_THAT(
      moves(scheduler->end_step(now), 0),
      ElementsAre(Move{0, 0, 1, 16}, Move{0, 1, 2, 32}, Move{0, 2, 3, 48}, Move{0, 3, 4, 64},
                  Move{0, 4, 5, 80}, Move{0, 5, 6, 96}, Move{1, 0, 11, 16}, Move{1, 1, 12, 32},
                  Move{1, 4, 15, 80}, Move{1, 5, 16, 96}));
  EXPECT_EQ(scheduler->counters().sources_skipped, 2u);
}

TEST_F(SchedulerTest, WhatIsComputedAnewAfterAPreemptionIsSaved) {
  build({test::full_group(16), test::window_group(16, 20)});
  const Hashes hashes(6, 1);
  exists(hashes, 96);
  ASSERT_EQ(settle_lookup(97, hashes, 32).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4, 5, 6}, {11, 12, 13, 14, 15, 16}});
  report(*scheduler->allocated(kRequest, 64, rows.get(), now), JobOutcome::kOk, true);
  scheduler->preempted(kRequest);
  scheduler->advanced(kRequest, 96, {});
  scheduler->save(kRequest, {0, 96}, rows.get(), now);
  const auto saved = moves(scheduler->end_step(now), 1);
  EXPECT_THAT(saved, Contains(Move{1, 2, 13, 48}));
  EXPECT_THAT(saved, Contains(Move{1, 3, 14, 64}));
}

TEST_F(SchedulerTest, WhatALoadLeftUnwrittenIsNotSavedUnderOtherHashesEither) {
  build({test::full_group(16), test::window_group(16, 20)});
  const Hashes hashes(6, 1);
  const Hashes other_hashes(6, 2);
  exists(hashes, 96);
  ASSERT_EQ(settle_lookup(97, hashes, 32).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4, 5, 6}, {11, 12, 13, 14, 15, 16}});
  report(*scheduler->allocated(kRequest, 64, rows.get(), now), JobOutcome::kOk, true);
  scheduler->end_step(now);
  scheduler->advanced(kRequest, 96, other_hashes.list());
  scheduler->save(kRequest, {0, 96}, rows.get(), now);
  const auto saved = moves(scheduler->end_step(now), 0);
  EXPECT_THAT(saved, Contains(Move{1, 4, 15, 80}));
  EXPECT_THAT(saved, Not(Contains(Move{1, 2, 13, 48})));
  EXPECT_THAT(saved, Not(Contains(Move{1, 3, 14, 64})));
}

TEST_F(SchedulerTest, WhatARunningLoadLeavesUnwrittenIsNotSavedUnderOtherHashesEither) {
  build({test::full_group(16), test::window_group(16, 20)});
  const Hashes hashes(6, 1);
  const Hashes other_hashes(6, 2);
  const Hashes third_hashes(6, 3);
  exists(hashes, 96);
  exists(third_hashes, 96);
  ASSERT_EQ(settle_lookup(97, hashes, 32).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4, 5, 6}, {11, 12, 13, 14, 15, 16}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  scheduler->end_step(now);
  scheduler->advanced(kRequest, 96, other_hashes.list());
  scheduler->advanced(kRequest, 96, third_hashes.list());
  const LookupResult meanwhile = scheduler->lookup(kRequest, 97, third_hashes.list(), 32, now);
  EXPECT_FALSE(meanwhile.pending) << "its blocks still wait for a load";
  EXPECT_EQ(meanwhile.external_tokens, 0u);
  report(job, JobOutcome::kOk, true);
  EXPECT_EQ(load_ends().size(), 1u);
  scheduler->save(kRequest, {0, 96}, rows.get(), now);
  const auto saved = moves(scheduler->end_step(now), 0);
  EXPECT_THAT(saved, Contains(Move{1, 4, 15, 80}));
  EXPECT_THAT(saved, Not(Contains(Move{1, 2, 13, 48})));
  EXPECT_THAT(saved, Not(Contains(Move{1, 3, 14, 64})));
  EXPECT_EQ(settle_lookup(97, third_hashes, 32).external_tokens, 64u) << "the load is over";
}

// Positions are counted in 32 bits.
TEST_F(SchedulerTest, APromptOfMoreTokensThanCanBeCountedIsCut) {
  build({test::full_group(65536), test::mamba_group(65536)});
  const Hashes hashes(65536, 1);
  ASSERT_TRUE(scheduler->lookup(kRequest, UINT32_MAX, hashes.list(), 0, now).pending);
  scheduler->end_step(now);
  ASSERT_EQ(store->lookups.size(), 1u);
  EXPECT_EQ(store->lookups.front().batch->keys.size(), 2u * 32767);
  scheduler->advanced(kRequest, UINT32_MAX, {});
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 32767u * 65536}));
}

TEST_F(SchedulerTest, AFailureThatNamesNothingIsWhole) {
  for (const JobOutcome outcome : {JobOutcome::kPartial, JobOutcome::kExpired}) {
    build({test::full_group(16)});
    const Hashes hashes(4, 1);
    exists(hashes, 64);
    ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
    const Rows rows({{1, 2, 3, 4}});
    report(*scheduler->allocated(kRequest, 64, rows.get(), now), outcome, true);
    const auto ends = load_ends();
    ASSERT_EQ(ends.size(), 1u);
    EXPECT_FALSE(ends[0].complete);
    EXPECT_EQ(ends[0].valid_tokens, 0u);
    EXPECT_EQ(ends[0].failed.size(), 4u);
  }
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

TEST_F(SchedulerTest, WhatADetachedLoadFoundGoneIsSavedAnew) {
  StoreSchedulerOptions options;
  options.detach_quarantined_loads = true;
  build({test::full_group(16)}, options);
  const Hashes hashes(8, 1);
  exists(hashes, 64);
  const Rows rows({{1, 2, 3, 4}});
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  report(*scheduler->allocated(kRequest, 64, rows.get(), now), JobOutcome::kOk, true);
  scheduler->preempted(kRequest);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  report(*scheduler->allocated(kRequest, 64, rows.get(), now), JobOutcome::kPartial, false,
         {{StoreIndex{0}, 1, static_cast<std::uint32_t>(ItemStatus::kMissing)}});
  now = now + options.quarantine_after;
  scheduler->end_step(now);
  scheduler->advanced(kRequest, 64, HashList{});
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{16, 64}));
}

}  // namespace
}  // namespace kvprism
