// Requests, hashes, modes, reports and the changes that are told.
#include "kvprism/store/store_scheduler.h"
#include "kvprism/base/log.h"

#include <set>

#include "scheduler_fixture.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::kEpoch;
using test::kRequest;
using test::Rows;
using test::SchedulerTest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

// Its new tokens' blocks must not be saved under the hashes of the old ones.
TEST_F(SchedulerTest, HashesThatContradictTheKnownOnesForgetThem) {
  build({test::full_group(16)});
  const Hashes old_hashes(6, 1);
  const Hashes new_hashes(6, 2);
  const Rows rows({{1, 2, 3, 4, 5, 6}});
  scheduler->advanced(kRequest, 96, old_hashes.list());
  scheduler->save(kRequest, {0, 32}, rows.get(), now);
  scheduler->advanced(kRequest, 96, new_hashes.list(2));
  EXPECT_EQ(scheduler->known_hashes(kRequest), 0u);
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
  EXPECT_EQ(scheduler->counters().hashes_refused, 1u);
  EXPECT_EQ(scheduler->counters().requests_replaced, 1u);
  scheduler->end_step(now);
  scheduler->advanced(kRequest, 96, new_hashes.list());
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 96}));
  scheduler->save(kRequest, {0, 96}, rows.get(), now);
  const StepPlan& plan = scheduler->end_step(now);
  for (std::uint32_t m = 0; m < 6; ++m) {
    const auto mark = plan.view().mark_hash(m);
    const auto own = new_hashes.list()[m];
    EXPECT_TRUE(std::equal(mark.begin(), mark.end(), own.begin(), own.end())) << m;
  }
}

// Rank threads may still read a plan while the engine schedules its next step.
TEST_F(SchedulerTest, APlanHoldsUntilTheNextOne) {
  build({test::full_group(16)});
  const Hashes hashes(6, 1);
  const Rows rows({{1, 2, 3, 4, 5, 6}});
  scheduler->advanced(kRequest, 32, hashes.list());
  scheduler->save(kRequest, {0, 32}, rows.get(), now);
  const StepPlan& plan = scheduler->end_step(now);
  scheduler->advanced(kRequest, 96, {});
  scheduler->save(kRequest, {32, 96}, rows.get(), now);
  EXPECT_EQ(plan.step, 1u);
  ASSERT_EQ(plan.jobs.size(), 1u);
  EXPECT_THAT(test::moves(plan, 0), ElementsAre(test::Move{0, 0, 1, 16}, test::Move{0, 1, 2, 32}));
  const StepPlan& next = scheduler->end_step(now);
  EXPECT_EQ(next.step, 2u);
  ASSERT_EQ(next.jobs.size(), 1u);
  EXPECT_EQ(next.digest, schema->plan_digest());
  EXPECT_EQ(next.epoch, kEpoch);
  EXPECT_EQ(test::moves(next, 0).size(), 4u);
}

TEST_F(SchedulerTest, AReportOfARankThatThereIsNotIsCounted) {
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  exists(hashes, 64);
  ASSERT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  const Rows rows({{1, 2, 3, 4}});
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  scheduler->end_step(now);
  const auto damaged = static_cast<std::uint32_t>(ItemStatus::kChecksumMismatch);
  report(job, JobOutcome::kPartial, true, {{StoreIndex{0}, 1, damaged}}, Rank{7});
  EXPECT_EQ(scheduler->counters().reports_malformed, 1u);
  report(job, JobOutcome::kOk, true);
  const auto ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_TRUE(ends[0].complete);
  EXPECT_EQ(scheduler->counters().mismatches, 0u);
  EXPECT_TRUE(store->removals.empty());
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

// A worker in its place would move bytes into blocks that have been given back, and save from
// memory in which nothing has been computed.
TEST_F(SchedulerTest, WhatNoPlanHasNamedYetEndsWithARankThatIsGone) {
  for (const std::uint32_t ranks : {1u, 2u}) {
    StoreSchedulerOptions options;
    options.ranks = ranks;
    build_hybrid(options);
    const Hashes hashes(5, 1);
    const Hashes others(5, 2);
    ASSERT_TRUE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);
    scheduler->end_step(now);
    store->end_lookup(
        std::vector<ItemStatus>(store->lookups.front().keys().size(), ItemStatus::kOk));
    ASSERT_EQ(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).external_tokens, 64u);
    const Rows rows({{1, 2, 3, 4}, {20}, {0, 0, 0, 10}});
    const JobId load = *scheduler->allocated(kRequest, 64, rows.get(), now);
    const RequestId saving{8};
    const Rows sources({{5, 6}, {21}, {0, 11}});
    scheduler->advanced(saving, 32, others.list());
    scheduler->save(saving, {0, 32}, sources.get(), now);
    scheduler->boundary(saving, GroupId{2}, BlockId{11}, 32);
    EXPECT_THAT(acquired(), ElementsAre(1, 2, 3, 4, 10, 5, 6, 11));
    scheduler->rank_gone(Rank{ranks}, now);
    EXPECT_THAT(released(), IsEmpty()) << "there is no such rank";
    scheduler->rank_gone(Rank{0}, now);
    EXPECT_THAT(released(), ::testing::UnorderedElementsAre(1, 2, 3, 4, 10, 5, 6, 11));
    const auto ends = load_ends();
    ASSERT_EQ(ends.size(), 1u);
    EXPECT_EQ(ends[0].job, load);
    EXPECT_EQ(ends[0].valid_tokens, 0u);
    EXPECT_TRUE(ends[0].blocks_quiet);
    EXPECT_THAT(scheduler->end_step(now).jobs, IsEmpty());
    EXPECT_EQ(scheduler->counters().ledger.alive, 0u);
    // Computed anew it is saved at once: the store has not refused it.
    scheduler->preempted(saving);
    scheduler->advanced(saving, 32, others.list());
    EXPECT_EQ(scheduler->wants_save(saving, now), (TokenRange{0, 32}));
    // What is planned from now on is for the worker in its place.
    const Hashes fresh(5, 3);
    scheduler->advanced(RequestId{9}, 32, fresh.list());
    scheduler->save(RequestId{9}, {0, 32}, sources.get(), now);
    EXPECT_THAT(test::moves(scheduler->end_step(now), 0),
                ElementsAre(test::Move{0, 0, 5, 16}, test::Move{0, 1, 6, 32}));
  }
}

// The same for what a plan has named: the store has refused none of it, and can be reached.
TEST_F(SchedulerTest, WhatARankTakesWithItIsSavedAndOfferedAgain) {
  for (const std::uint32_t ranks : {1u, 2u}) {
    StoreSchedulerOptions options;
    options.ranks = ranks;
    build_hybrid(options);
    const Hashes hashes(5, 1);
    const Hashes others(5, 2);
    const auto look_up = [&](RequestId request) {
      if (!scheduler->lookup(request, 65, hashes.list(), 0, now).pending) return 0u;
      scheduler->end_step(now);
      store->end_lookup(
          std::vector<ItemStatus>(store->lookups.front().keys().size(), ItemStatus::kOk));
      return scheduler->lookup(request, 65, hashes.list(), 0, now).external_tokens;
    };
    const Rows rows({{1, 2, 3, 4}, {20}, {0, 0, 0, 10}});
    std::vector<JobId> jobs;
    for (const std::uint64_t id : {101u, 102u, 103u}) {
      ASSERT_EQ(look_up(RequestId{id}), 64u);
      jobs.push_back(*scheduler->allocated(RequestId{id}, 64, rows.get(), now));
      scheduler->end_step(now);
    }
    const RequestId saving{8};
    const Rows sources({{5, 6}, {21}, {0, 11}});
    scheduler->advanced(saving, 32, others.list());
    scheduler->save(saving, {0, 32}, sources.get(), now);
    scheduler->boundary(saving, GroupId{2}, BlockId{11}, 32);
    for (const JobRecord& job : scheduler->end_step(now).jobs) jobs.push_back(job.id);
    ASSERT_EQ(jobs.size(), 5u);
    scheduler->rank_gone(Rank{0}, now);
    scheduler->preempted(saving);
    if (ranks == 2) {
      for (const JobId job : jobs) report(job, JobOutcome::kOk, true, {}, Rank{1});
    }
    EXPECT_EQ(scheduler->counters().ledger.alive, 0u);
    scheduler->advanced(saving, 32, others.list());
    EXPECT_EQ(scheduler->wants_save(saving, now), (TokenRange{0, 32}));
    scheduler->boundary(saving, GroupId{2}, BlockId{11}, 32);
    EXPECT_EQ(scheduler->end_step(now).jobs.size(), 1u) << "the state as well";
    EXPECT_EQ(look_up(RequestId{104}), 64u);
    scheduler->preempted(RequestId{101});
    EXPECT_EQ(look_up(RequestId{101}), 64u) << "to the request itself as well";
    EXPECT_EQ(scheduler->counters().bypasses, 0u);
    EXPECT_EQ(scheduler->counters().offers_paused, 0u);
    EXPECT_EQ(scheduler->counters().chunks_avoided, 0u);
    EXPECT_EQ(scheduler->health().state, HealthState::kHealthy);
  }
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

// W-C25: one lost report pins no block for ever.
TEST_F(SchedulerTest, RanksAreAskedForAReportThatWasLost) {
  build({test::full_group(16)});
  const Hashes hashes(1, 1);
  const Rows rows(std::vector<std::vector<std::int32_t>>{{1}});
  scheduler->advanced(kRequest, 16, hashes.list());
  scheduler->save(kRequest, {0, 16}, rows.get(), now);
  const JobId job = scheduler->end_step(now).jobs[0].id;
  now = now + seconds(75);
  EXPECT_THAT(scheduler->end_step(now).asked, IsEmpty()) << "its outcome has just expired";
  now = now + seconds(31);
  EXPECT_THAT(scheduler->end_step(now).asked, ElementsAre(job));
  EXPECT_THAT(scheduler->end_step(now).asked, IsEmpty()) << "once in 30 s";
  EXPECT_THAT(released(), IsEmpty());
  report(job, JobOutcome::kFailed, true);
  EXPECT_THAT(released(), ElementsAre(1));
  now = now + seconds(31);
  EXPECT_THAT(scheduler->end_step(now).asked, IsEmpty());
  EXPECT_EQ(scheduler->counters().ledger.asked, 1u);
  EXPECT_EQ(scheduler->counters().ledger.quarantined, 0u);
}

TEST_F(SchedulerTest, ManyJobsInQuarantineAreOneLineAndACount) {
  std::vector<std::string> lines;
  set_log_sink(
      [](void* to, LogLevel, std::string_view line) {
        if (line.find("is not quiet after") != line.npos)
          static_cast<std::vector<std::string>*>(to)->emplace_back(line);
      },
      &lines, LogLevel::kWarning);
  build({test::full_group(16)});
  const auto leave_unquiet = [&](std::uint64_t id) {
    const Hashes hashes(1, static_cast<int>(id));
    const Rows rows(std::vector<std::vector<std::int32_t>>{{1}});
    scheduler->advanced(RequestId{id}, 16, hashes.list());
    scheduler->save(RequestId{id}, {0, 16}, rows.get(), now);
    report(scheduler->end_step(now).jobs[0].id, JobOutcome::kOk, false);
  };
  for (std::uint64_t id = 1; id <= 4; ++id) leave_unquiet(id);
  now = now + seconds(60);
  leave_unquiet(5);
  now = now + seconds(60);
  scheduler->end_step(now);
  now = now + seconds(60);
  scheduler->end_step(now);
  set_log_sink(nullptr, nullptr, LogLevel::kOff);
  EXPECT_EQ(scheduler->counters().ledger.quarantined, 5u);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], testing::StartsWith("job 1 of request 1 is not quiet after 120 s"));
  EXPECT_THAT(lines[1], testing::EndsWith(" (and 3 more since the last line)"));
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

TEST_F(SchedulerTest, ChangesOfTheStoreAreToldByGroupWithTheirParents) {
  StoreSchedulerOptions options;
  options.tell_changes = true;
  options.ranks = 2;
  build_hybrid(options);
  const Hashes hashes(4, 1);
  const auto hash = [&](std::uint32_t tokens) { return HashBytes(hashes.list()[tokens / 16 - 1]); };
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
  acquired();
  released();
  EXPECT_TRUE(scheduler->has_pending_work()) << "the changes are for others, who wait for them";
  scheduler->take_changes(changes);
  EXPECT_FALSE(scheduler->has_pending_work());
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

TEST_F(SchedulerTest, WhatALookupNoLongerFindsIsToldAsGoneOnce) {
  StoreSchedulerOptions options;
  options.tell_changes = true;
  build({test::ring_group(8), test::full_group(16)}, options);
  const Hashes hashes(4, 1);
  const Rows rows({{9}, {5, 6, 7, 8}});
  const auto taken = [&] {
    std::vector<StoreChange> changes;
    scheduler->take_changes(changes);
    return changes;
  };
  scheduler->advanced(kRequest, 64, hashes.list());
  scheduler->save(kRequest, {0, 64}, rows.get(), now);
  const JobId job = scheduler->end_step(now).jobs.at(0).id;
  // Asked before the save has ended, and answered afterwards: what it did not find is there now.
  const RequestId early{8};
  ASSERT_TRUE(scheduler->lookup(early, 65, hashes.list(), 0, now).pending);
  scheduler->end_step(now);
  now = now + milliseconds(1);
  report(job, JobOutcome::kOk, true);
  ASSERT_EQ(taken().size(), 4u);
  store->answer_lookup();
  EXPECT_EQ(scheduler->lookup(early, 65, hashes.list(), 0, now).external_tokens, 0u);
  EXPECT_THAT(taken(), IsEmpty());

  now = now + milliseconds(1);
  exists(hashes, 64);
  KeySlots evicted;
  schema->append_key(evicted, StoreIndex{0}, {}, hashes.list()[2]);
  store->present.erase(evicted[0]);
  const auto look = [&](std::uint64_t id) {
    ASSERT_TRUE(scheduler->lookup(RequestId{id}, 65, hashes.list(), 0, now).pending);
    scheduler->end_step(now);
    store->answer_lookup();
    scheduler->end_step(now);
  };
  look(9);
  const std::vector<StoreChange> gone = taken();
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0], (StoreChange{false, RequestId{9}, GroupId{1}, 2, 48, hashes.list()[2],
                                  hashes.list()[1]}));
  look(10);
  EXPECT_THAT(taken(), IsEmpty()) << "it has been told";
  const Hashes others(4, 2);
  ASSERT_TRUE(scheduler->lookup(RequestId{11}, 65, others.list(), 0, now).pending);
  scheduler->end_step(now);
  store->answer_lookup();
  scheduler->end_step(now);
  EXPECT_THAT(taken(), IsEmpty()) << "nobody was told that it was there";
}

TEST_F(SchedulerTest, DamageIsToldAsGoneWhateverOtherRanksFindOfTheChunk) {
  StoreSchedulerOptions options;
  options.tell_changes = true;
  options.ranks = 2;
  build({test::full_group(16)}, options);
  const Hashes hashes(4, 1);
  scheduler->advanced(kRequest, 32, hashes.list());
  std::vector<ItemStatus> present(4, ItemStatus::kOk);
  ASSERT_TRUE(scheduler->lookup(kRequest, 33, hashes.list(), 0, now).pending);
  scheduler->end_step(now);
  store->end_lookup(present);
  ASSERT_EQ(scheduler->lookup(kRequest, 33, hashes.list(), 0, now).external_tokens, 32u);
  const Rows rows({{5, 6}});
  const JobId job = *scheduler->allocated(kRequest, 32, rows.get(), now);
  scheduler->end_step(now);
  const auto fails = [&](Rank rank, ItemStatus status) {
    report(job, JobOutcome::kPartial, true,
           {{StoreIndex{0}, 1, static_cast<std::uint32_t>(status)}}, rank);
  };
  fails(Rank{0}, ItemStatus::kLeaseLost);
  fails(Rank{1}, ItemStatus::kChecksumMismatch);
  std::vector<StoreChange> changes;
  scheduler->take_changes(changes);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_FALSE(changes[0].stored);
  EXPECT_EQ(changes[0].tokens, 32u);
  // Nor is it offered again before it has been removed.
  ASSERT_TRUE(scheduler->lookup(RequestId{9}, 33, hashes.list(), 0, now).pending);
  scheduler->end_step(now);
  store->end_lookup(present);
  EXPECT_EQ(scheduler->lookup(RequestId{9}, 33, hashes.list(), 0, now).external_tokens, 16u);
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

TEST_F(SchedulerTest, ARestrictionHoldsForWhatIsAskedAndOfferedInTheSameStep) {
  build({test::full_group(16), test::mamba_group(16)});
  const Hashes hashes(4, 1);
  exists(hashes, 64);
  EXPECT_TRUE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);
  scheduler->advanced(kRequest, 64, hashes.list());
  scheduler->boundary(kRequest, GroupId{1}, BlockId{5}, 16);
  scheduler->advanced(RequestId{42}, 64, hashes.list());
  scheduler->boundary(RequestId{42}, GroupId{1}, BlockId{6}, 16);
  scheduler->restrict(kRequest, {false, false});
  const StepPlan& plan = scheduler->end_step(now);
  EXPECT_TRUE(store->lookups.empty());
  ASSERT_EQ(plan.jobs.size(), 1u) << "the other request's";
  EXPECT_EQ(test::moves(plan, 0), (std::vector<test::Move>{{1, 0, 6, 16}}));
  EXPECT_EQ(released(), (std::vector<std::int32_t>{5}));
  EXPECT_EQ(scheduler->counters().saves_dropped, 1u);
  EXPECT_FALSE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);

  scheduler->restrict(kRequest, {});
  EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
  scheduler->boundary(kRequest, GroupId{1}, BlockId{5}, 16);
  EXPECT_EQ(scheduler->end_step(now).jobs.size(), 1u) << "it was not saved then";
}

TEST_F(SchedulerTest, WhatWasAskedBeforeAModeWithoutLoadsIsNotAskedLater) {
  build({test::full_group(16)});
  const Hashes hashes(4, 1);
  EXPECT_TRUE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);
  scheduler->set_mode(StoreMode::kOff);
  EXPECT_FALSE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending)
      << "the engine goes on without";
  scheduler->end_step(now);
  scheduler->set_mode(StoreMode::kReadWrite);
  scheduler->end_step(now);
  EXPECT_TRUE(store->lookups.empty()) << "nobody waits for it any more";
  exists(hashes, 64);
  EXPECT_EQ(settle_lookup(65, hashes, 0).external_tokens, 64u);
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

// R63: a later save of a request takes nothing from an earlier one that still runs.
TEST_F(SchedulerTest, SavesOfOneRequestEndInAnyOrder) {
  build({test::full_group(16)});
  const Hashes hashes(3, 1);
  const Rows rows(std::vector<std::vector<std::int32_t>>{{4, 5, 6}});
  std::vector<JobId> jobs;
  for (std::uint32_t end = 16; end <= 48; end += 16) {
    scheduler->advanced(kRequest, end, hashes.list());
    ASSERT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{end - 16, end}));
    scheduler->save(kRequest, {end - 16, end}, rows.get(), now);
    const StepPlan& plan = scheduler->end_step(now);
    ASSERT_EQ(plan.jobs.size(), 1u);
    jobs.push_back(plan.jobs[0].id);
  }
  scheduler->finished(kRequest, FinishReason::kCompleted);
  report(jobs[2], JobOutcome::kOk, true);
  EXPECT_THAT(released(), ElementsAre(6));
  report(jobs[0], JobOutcome::kOk, true);
  EXPECT_THAT(released(), ElementsAre(4));
  EXPECT_EQ(scheduler->counters().ledger.blocks_held, 1u);
  report(jobs[1], JobOutcome::kOk, false);
  EXPECT_THAT(released(), IsEmpty());
  report(jobs[1], JobOutcome::kNone, true);
  EXPECT_THAT(released(), ElementsAre(5));
  EXPECT_EQ(scheduler->tracked(), 0u);
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

// A status has 8 bits, on the wire 32: cut, this one would be a damaged object, which is removed.
TEST_F(SchedulerTest, AReportOfAStatusThatThereIsNotFailsItsJobAsAWhole) {
  const auto cut = static_cast<std::uint32_t>(ItemStatus::kChecksumMismatch) | 0x100;
  const auto beyond = static_cast<std::uint32_t>(ItemStatus::kInUse) + 1;
  for (const std::uint32_t status : {cut, beyond, 0u}) {
    build({test::full_group(16)});
    const Hashes hashes(4, 1);
    exists(hashes, 48);
    ASSERT_EQ(settle_lookup(49, hashes, 0).external_tokens, 48u);
    const Rows rows({{1, 2, 3}});
    const JobId job = *scheduler->allocated(kRequest, 48, rows.get(), now);
    scheduler->end_step(now);
    report(job, JobOutcome::kPartial, true, {{StoreIndex{0}, 0, status}});
    EXPECT_EQ(scheduler->counters().reports_malformed, 1u) << status;
    EXPECT_EQ(scheduler->counters().mismatches, 0u) << status;
    EXPECT_THAT(store->removals, IsEmpty()) << status;
    const std::vector<LoadEnd> ends = load_ends();
    ASSERT_EQ(ends.size(), 1u) << status;
    EXPECT_EQ(ends[0].valid_tokens, 0u) << status;
    EXPECT_EQ(ends[0].failed.size(), 3u) << status;
    EXPECT_TRUE(ends[0].blocks_quiet) << status;
    EXPECT_THAT(released(), ElementsAre(1, 2, 3)) << status;
  }
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

TEST_F(SchedulerTest, HashesAtANullAddressAreRefused) {
  build_hybrid();
  const HashList null{nullptr, 4, 16, 0};
  scheduler->advanced(kRequest, 64, null);
  EXPECT_EQ(scheduler->counters().hashes_refused, 1u);
  EXPECT_EQ(scheduler->known_hashes(kRequest), 0u);
  EXPECT_EQ(scheduler->lookup(kRequest, 65, null, 0, now).pending, false);
  EXPECT_EQ(scheduler->counters().hashes_refused, 2u);
  const Hashes hashes(4, 1);
  HashList wraps = hashes.list();
  wraps.first = UINT32_MAX - 1;
  scheduler->advanced(kRequest, 64, wraps);
  EXPECT_EQ(scheduler->counters().hashes_refused, 3u);
  scheduler->advanced(kRequest, 64, hashes.list());
  EXPECT_EQ(scheduler->known_hashes(kRequest), 4u);
}

TEST_F(SchedulerTest, AnIndexHasOneSchedulerAtATime) {
  build_hybrid();
  StoreSchedulerOptions options;
  options.epoch = 3;
  const auto second = [&] { StoreScheduler(schema, store, options); };
  try {
    second();
    FAIL() << "two schedulers would take each other's answers";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "store scheduler: index = in use: expected an object index of its own "
                 "(completions go to whoever polls; destroy its user first, or connect again)");
  }
  scheduler.reset();
  options.epoch = 0;
  EXPECT_THROW(second(), Error) << "and one that could not be made does not hold it";
  options.epoch = 3;
  second();
}

TEST_F(SchedulerTest, AnswersToAnEarlierSchedulerAreNotTaken) {
  build_hybrid();
  const Hashes hashes(4, 1);
  scheduler->lookup(kRequest, 65, hashes.list(), 0, now);
  scheduler->end_step(now);
  scheduler->lookup(RequestId{7}, 65, hashes.list(), 0, now);
  scheduler->end_step(now);
  ASSERT_EQ(store->lookups.size(), 2u);
  scheduler.reset();
  StoreSchedulerOptions options;
  options.epoch = kEpoch + 1;  // a neighbour's numbers are not the earlier one's next
  scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  exists(hashes, 64);
  ASSERT_TRUE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);
  scheduler->end_step(now);
  for (int i = 0; i < 2; ++i) {
    store->answer_lookup();  // the earlier one's
    EXPECT_TRUE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);
  }
  store->answer_lookup();
  EXPECT_EQ(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).external_tokens, 64u);
}

TEST_F(SchedulerTest, AReportTellsWhetherAllOfItCouldBeTaken) {
  build_hybrid();
  const std::vector<std::byte> garbage(40, std::byte{0x5a});
  EXPECT_FALSE(scheduler->report(std::span<const std::byte>(garbage), now));
  WorkerReport report;
  report.epoch = kEpoch;
  std::vector<std::byte> bytes;
  encode(report, bytes);
  EXPECT_TRUE(scheduler->report(std::span<const std::byte>(bytes), now));
  report.epoch = 1;
  EXPECT_FALSE(scheduler->report(report, now));
  report.epoch = kEpoch;
  report.jobs.resize(1);
  report.jobs[0].first_failed = 3;  // of none
  report.jobs[0].num_failed = 2;
  EXPECT_FALSE(scheduler->report(report, now));
  EXPECT_EQ(scheduler->counters().reports_malformed, 2u);
  EXPECT_EQ(scheduler->counters().reports_foreign, 1u);
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

}  // namespace
}  // namespace kvprism
