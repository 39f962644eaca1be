// Saves: what is saved, from where, and what is left alone for a while.
#include <algorithm>

#include "kvprism/base/log.h"
#include "scheduler_fixture.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::kRequest;
using test::Move;
using test::moves;
using test::Rows;
using test::SchedulerTest;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

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
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty()) << "and not with as little";
  const Hashes enough(6, 1);
  scheduler->advanced(kRequest, 96, enough.list(5));
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{48, 96}));
}

// Blocks freed in the middle of a table never come back: the cost must not follow the context.
TEST_F(SchedulerTest, AHoleThatStaysCostsLittle) {
  build({test::full_group(16)});
  const Hashes hashes(50, 1);
  std::vector<std::int32_t> row;
  for (std::int32_t block = 1; block <= 50; ++block) row.push_back(block);
  row[2] = 0;
  const Rows rows({row});
  std::size_t moved = 0;
  std::size_t marks = 0;
  std::size_t asked = 0;
  for (std::uint32_t tokens = 16; tokens <= 800; tokens += 16) {
    scheduler->advanced(kRequest, tokens, hashes.list());
    const TokenRange wanted = scheduler->wants_save(kRequest, now);
    if (wanted.empty()) continue;
    ++asked;
    scheduler->save(kRequest, wanted, rows.get(), now);
    const StepPlan& plan = scheduler->end_step(now);
    marks += plan.mark_tokens.size();
    for (std::size_t job = 0; job < plan.jobs.size(); ++job) moved += moves(plan, job).size();
  }
  EXPECT_EQ(moved, 2u) << "what lies behind a hole serves no prefix";
  EXPECT_EQ(marks, 2u);
  EXPECT_LE(asked, 9u);
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

// An engine may fill the width of a hash with the hash again.
TEST_F(SchedulerTest, HashesOfTwoEqualHalvesAreToldApart) {
  build({test::full_group(16)});
  const Rows rows({{1, 2, 3, 4}});
  const auto doubled = [](std::uint8_t salt) {
    Hashes hashes(4, salt);
    for (std::size_t at = 0; at < hashes.bytes.size(); at += Hashes::kWidth)
      std::copy_n(hashes.bytes.begin() + static_cast<std::ptrdiff_t>(at), 8,
                  hashes.bytes.begin() + static_cast<std::ptrdiff_t>(at) + 8);
    return hashes;
  };
  const Hashes hashes = doubled(1);
  const Hashes others = doubled(2);
  scheduler->advanced(kRequest, 64, hashes.list());
  scheduler->save(kRequest, {0, 64}, rows.get(), now);
  report(scheduler->end_step(now).jobs.at(0).id, JobOutcome::kOk, true);
  scheduler->advanced(RequestId{2}, 64, others.list());
  EXPECT_EQ(scheduler->wants_save(RequestId{2}, now), (TokenRange{0, 64}));
  scheduler->advanced(RequestId{3}, 64, hashes.list());
  EXPECT_TRUE(scheduler->wants_save(RequestId{3}, now).empty());
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

TEST_F(SchedulerTest, RetentionKeepsTheWindowWhereARingsReplayStarts) {
  std::vector<GroupConfig> groups{test::full_group(64), test::window_group(16, 20),
                                  test::ring_group(8)};
  groups[2].spec.replay_tokens = 8;
  build_with_retention(groups);
  const Hashes hashes(8, 1);
  settle_lookup(130, hashes, 0);
  ASSERT_EQ(projection->max_hit(130), 64u);
  scheduler->advanced(kRequest, 128, hashes.list());
  const Rows rows({{1, 2}, {10, 11, 12, 13, 14, 15, 16, 17}, {20}});
  scheduler->save(kRequest, scheduler->wants_save(kRequest, now), rows.get(), now);
  EXPECT_THAT(moves(scheduler->end_step(now), 0),
              ElementsAre(Move{0, 0, 1, 64}, Move{0, 1, 2, 128}, Move{1, 2, 12, 48},
                          Move{1, 3, 13, 64}, Move{1, 6, 16, 112}, Move{1, 7, 17, 128}));
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

TEST_F(SchedulerTest, WhereAPromptLeavesOthersADraftsWindowIsKeptAStepEarlier) {
  // Of a draft the object behind a hit must be there too, and behind the junction prompts differ.
  std::vector<GroupConfig> groups{test::full_group(16), test::window_group(16, 17)};
  groups[1].is_eagle_group = true;
  build_with_retention(std::move(groups));
  const Hashes hashes(10, 1);
  const auto store_object = [&](std::uint32_t group, std::uint32_t tokens) {
    KeySlots keys;
    schema->append_key(keys, StoreIndex{group}, {}, hashes.list()[tokens / 16 - 1]);
    store->present[keys[0]] = 1;
  };
  for (const std::uint32_t tokens : {16u, 32u, 48u, 64u}) store_object(0, tokens);
  EXPECT_EQ(settle_lookup(129, hashes, 0).external_tokens, 0u);
  scheduler->advanced(kRequest, 128, hashes.list());
  const Rows rows({{1, 2, 3, 4, 5, 6, 7, 8}, {11, 12, 13, 14, 15, 16, 17, 18}});
  scheduler->save(kRequest, scheduler->wants_save(kRequest, now), rows.get(), now);
  std::vector<Move> windows;
  for (const Move& move : moves(scheduler->end_step(now), 0)) {
    store_object(move.group, move.tokens);
    if (move.group == 1) windows.push_back(move);
  }
  EXPECT_THAT(windows, ElementsAre(Move{1, 2, 13, 48}, Move{1, 3, 14, 64}, Move{1, 6, 17, 112},
                                   Move{1, 7, 18, 128}));
  // The next question after the same 64 tokens.
  Hashes other(10, 2);
  std::copy_n(hashes.bytes.begin(), 4 * Hashes::kWidth, other.bytes.begin());
  const RequestId next{42};
  scheduler->lookup(next, 129, other.list(), 0, now);
  scheduler->end_step(now);
  store->answer_lookup();
  EXPECT_EQ(scheduler->lookup(next, 129, other.list(), 0, now).external_tokens, 48u);
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

}  // namespace
}  // namespace kvprism
