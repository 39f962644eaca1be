// Removals by the store scheduler: purges and objects that no save could replace.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvprism/base/log.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::Rows;
using test::ScriptedStore;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr RequestId kRequest{7};
constexpr std::uint64_t kEpoch = 0x5eed;

std::vector<std::string>& logged() {
  static std::vector<std::string> lines;
  return lines;
}

class PurgeTest : public ::testing::Test {
 protected:
  void build(StoreSchedulerOptions options = {}, std::uint32_t tp = 1) {
    projection =
        test::make_projection({test::full_group(16), test::full_group(16, "second")}, 64, tp);
    schema = test::make_schema(projection);
    options.epoch = kEpoch;
    scheduler.reset();
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  }

  void report(JobId job, JobOutcome outcome, bool quiet, std::vector<FailedChunk> failed = {},
              Rank rank = Rank{0}) {
    WorkerReport report;
    report.rank = rank;
    report.epoch = kEpoch;
    JobReport entry;
    entry.job = job;
    entry.outcome = outcome;
    entry.quiet = quiet ? 1 : 0;
    entry.num_failed = static_cast<std::uint32_t>(failed.size());
    report.jobs = {entry};
    report.failed = std::move(failed);
    scheduler->report(report, now);
  }
  static FailedChunk failed(std::uint32_t group, std::uint32_t chunk, ItemStatus status) {
    return {StoreIndex{group}, chunk, static_cast<std::uint32_t>(status)};
  }

  static void keep_warnings() {
    logged().clear();
    set_log_sink(
        +[](void*, LogLevel level, std::string_view text) {
          if (level == LogLevel::kWarning) logged().emplace_back(text);
        },
        nullptr, LogLevel::kInfo);
  }

  // Computes 64 tokens and plans their save.
  JobId save(RequestId id = kRequest) {
    scheduler->advanced(id, 64, hashes.list());
    const TokenRange wanted = scheduler->wants_save(id, now);
    EXPECT_FALSE(wanted.empty());
    scheduler->save(id, wanted, rows.get(), now);
    const StepPlan& plan = scheduler->end_step(now);
    EXPECT_EQ(plan.jobs.size(), 1u);
    return plan.jobs.at(0).id;
  }
  std::uint32_t offered(RequestId id) {
    LookupResult result = scheduler->lookup(id, 65, hashes.list(), 0, now);
    if (!result.pending) return result.external_tokens;
    scheduler->end_step(now);
    std::vector<ItemStatus> all(store->lookups.front().keys().size(), ItemStatus::kOk);
    store->end_lookup(all);
    return scheduler->lookup(id, 65, hashes.list(), 0, now).external_tokens;
  }
  // Lets a purge come to its end; nothing else is in flight.
  void finish_purge() {
    for (const Duration wait : {seconds(0), seconds(12)}) {
      now = now + wait;
      scheduler->end_step(now);
      store->end_removal({ItemStatus::kOk, 1});
      scheduler->end_step(now);
    }
    EXPECT_EQ(state(), PurgeState::kDone);
  }
  PurgeState state() const { return scheduler->purge_status().state; }
  std::vector<LoadEnd> load_ends() {
    std::vector<LoadEnd> ends;
    scheduler->take_load_ends(ends);
    return ends;
  }

  std::shared_ptr<ScriptedStore> store = std::make_shared<ScriptedStore>();
  std::shared_ptr<const Projection> projection;
  std::shared_ptr<const KeySchema> schema;
  std::unique_ptr<StoreScheduler> scheduler;
  const Hashes hashes{8, 1};
  const Rows rows{{{1, 2, 3, 4}, {5, 6, 7, 8}}};
  Instant now{seconds(1).ns};
};

TEST_F(PurgeTest, GoesOnWhileTheStoreIsOffAndLeavesItOff) {
  build();
  scheduler->set_mode(StoreMode::kOff);
  scheduler->purge(now);
  store->end_removal({ItemStatus::kOk, 40});
  scheduler->end_step(now);
  now = now + seconds(12);
  scheduler->end_step(now);
  store->end_removal({ItemStatus::kOk, 2});
  scheduler->end_step(now);
  EXPECT_EQ(state(), PurgeState::kDone);
  EXPECT_FALSE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);
  scheduler->set_mode(StoreMode::kReadWrite);
  EXPECT_TRUE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);
}

TEST_F(PurgeTest, NothingOfBeforeIsToldAsStored) {
  StoreSchedulerOptions options;
  options.tell_changes = true;
  build(options);
  const auto told = [&] {
    std::vector<StoreChange> changes;
    scheduler->take_changes(changes);
    return changes.size();
  };
  const JobId ended = save();
  const Hashes other(8, 2);
  scheduler->advanced(RequestId{8}, 64, other.list());
  scheduler->save(RequestId{8}, {0, 64}, rows.get(), now);
  const JobId in_flight = scheduler->end_step(now).jobs.at(0).id;
  report(ended, JobOutcome::kOk, true);
  scheduler->purge(now);
  EXPECT_EQ(told(), 0u) << "queued before the purge";
  report(in_flight, JobOutcome::kOk, true);
  scheduler->end_step(now);
  EXPECT_EQ(told(), 0u) << "in flight when it began";
  ASSERT_EQ(store->removals.size(), 1u);
  store->end_removal({ItemStatus::kOk, 16});
  scheduler->end_step(now);
  now = now + seconds(12);
  scheduler->end_step(now);
  store->end_removal({ItemStatus::kOk, 0});
  scheduler->end_step(now);
  ASSERT_EQ(state(), PurgeState::kDone);
  report(save(RequestId{9}), JobOutcome::kOk, true);
  EXPECT_EQ(told(), 8u) << "4 chunks of 2 groups";
}

TEST_F(PurgeTest, RemovesWhatBeginsAsOurKeysDoAndSettles) {
  build();
  scheduler->purge(now);
  ASSERT_EQ(store->removals.size(), 1u) << "nothing is in flight, so it is asked for at once";
  EXPECT_THAT(store->removals[0].keys(), ElementsAre(schema->prefix()));
  EXPECT_TRUE(store->removal_kinds[0].prefix);
  EXPECT_FALSE(store->removal_kinds[0].leased) << "what somebody reads stays";
  EXPECT_EQ(state(), PurgeState::kRemoving);
  EXPECT_TRUE(scheduler->has_pending_work());
  store->end_removal({ItemStatus::kOk, 40});
  scheduler->end_step(now);
  EXPECT_EQ(state(), PurgeState::kWaiting);
  EXPECT_FALSE(scheduler->has_pending_work()) << "an engine without work need not turn for leases";

  // What was leased is taken by the pass that begins after every lease of ours.
  now = now + milliseconds(11'999);
  scheduler->end_step(now);
  EXPECT_TRUE(store->removals.empty());
  now = now + milliseconds(1);
  scheduler->end_step(now);
  ASSERT_EQ(store->removals.size(), 1u);
  store->end_removal({ItemStatus::kOk, 2});
  scheduler->end_step(now);
  EXPECT_EQ(state(), PurgeState::kDone);
  EXPECT_EQ(scheduler->purge_status().removed, 42u);
  EXPECT_EQ(scheduler->purge_status().passes, 2u);
  EXPECT_EQ(scheduler->counters().purges, 1u);
  EXPECT_EQ(scheduler->counters().objects_purged, 42u);
  EXPECT_EQ(scheduler->tracked(), 0u);
}

TEST_F(PurgeTest, WaitsUntilEverySaveIsQuietOnEveryRank) {
  build({}, 2);
  const JobId job = save();
  scheduler->purge(now);
  EXPECT_EQ(state(), PurgeState::kDraining);
  report(job, JobOutcome::kOk, true);
  scheduler->end_step(now);
  EXPECT_TRUE(store->removals.empty()) << "rank 1 may still write";
  report(job, JobOutcome::kOk, false, {}, Rank{1});
  scheduler->end_step(now);
  EXPECT_TRUE(store->removals.empty()) << "an outcome is not quiet";
  EXPECT_TRUE(scheduler->has_pending_work());
  report(job, JobOutcome::kNone, true, {}, Rank{1});
  scheduler->end_step(now);
  EXPECT_EQ(store->removals.size(), 1u);
}

TEST_F(PurgeTest, WaitsForLookupsThatTheStoreMayStillAnswer) {
  build();
  ASSERT_TRUE(scheduler->lookup(RequestId{8}, 65, hashes.list(), 0, now).pending);
  scheduler->end_step(now);
  ASSERT_EQ(store->lookups.size(), 1u);
  const auto op = store->lookups.front().op;
  scheduler->purge(now);
  EXPECT_EQ(state(), PurgeState::kDraining) << "it would renew leases";
  // The lookup ends late; the call itself is over only after that.
  now = now + seconds(2);
  store->lookup_ends.push_back(
      {.op = op, .outcome = true, .quiet = false, .items = {}, .batch = {}});
  scheduler->end_step(now);
  EXPECT_EQ(state(), PurgeState::kDraining) << "an outcome is not quiet";
  now = now + seconds(1);
  store->lookup_ends.push_back(
      {.op = op, .outcome = false, .quiet = true, .items = {}, .batch = {}});
  scheduler->end_step(now);
  ASSERT_EQ(state(), PurgeState::kRemoving);
  store->end_removal({ItemStatus::kOk, 1});
  scheduler->end_step(now);
  now = now + milliseconds(11'999);
  scheduler->end_step(now);
  EXPECT_TRUE(store->removals.empty()) << "12 s from the last use, not from the purge";
  now = now + milliseconds(1);
  scheduler->end_step(now);
  EXPECT_EQ(store->removals.size(), 1u);
}

TEST_F(PurgeTest, ASaveThatEndsWhileItDrainsIsNotKnownAfterwards) {
  build();
  const JobId job = save();
  scheduler->purge(now);
  report(job, JobOutcome::kOk, true);
  finish_purge();
  scheduler->advanced(RequestId{9}, 64, hashes.list());
  EXPECT_EQ(scheduler->wants_save(RequestId{9}, now), (TokenRange{0, 64}));
  EXPECT_EQ(scheduler->counters().saves_known, 0u);
}

TEST_F(PurgeTest, TokensAnnouncedBeforeItAreNotSavedHoweverFew) {
  build();
  scheduler->advanced(kRequest, 1, hashes.list());
  scheduler->purge(now);
  finish_purge();
  scheduler->advanced(kRequest, 64, hashes.list());
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
  // The id comes back with other tokens: what they rest on is unknown.
  const Hashes others{8, 2};
  scheduler->advanced(kRequest, 64, others.list());
  EXPECT_EQ(scheduler->counters().requests_replaced, 1u);
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
  scheduler->preempted(kRequest);
  scheduler->advanced(kRequest, 64, others.list());
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 64}));
}

TEST_F(PurgeTest, NothingIsUsedMeanwhileAndNoOlderTokenIsSavedAfterwards) {
  build();
  const JobId job = save();
  report(job, JobOutcome::kOk, true);
  EXPECT_EQ(offered(RequestId{8}), 64u);
  scheduler->purge(now);
  EXPECT_FALSE(scheduler->allocated(RequestId{8}, 64, rows.get(), now))
      << "an offer of before is void";
  EXPECT_EQ(offered(RequestId{9}), 0u);
  scheduler->advanced(RequestId{9}, 64, hashes.list());
  EXPECT_TRUE(scheduler->wants_save(RequestId{9}, now).empty());
  store->end_removal({ItemStatus::kOk, 8});
  scheduler->end_step(now);
  now = now + seconds(12);
  scheduler->end_step(now);
  store->end_removal({ItemStatus::kOk, 0});
  scheduler->end_step(now);
  ASSERT_EQ(state(), PurgeState::kDone);

  scheduler->advanced(kRequest, 64, hashes.list());
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty()) << "computed before the purge";
  EXPECT_EQ(scheduler->wants_save(RequestId{9}, now), (TokenRange{0, 64}))
      << "begun after it, although the same prefix was saved lately";
  // A preempted request is computed anew.
  scheduler->preempted(kRequest);
  scheduler->advanced(kRequest, 64, hashes.list());
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 64}));
}

TEST_F(PurgeTest, WhatWasPreemptedBeforeItIsSavedAfterIt) {
  for (const JobOutcome outcome : {JobOutcome::kOk, JobOutcome::kFailed}) {
    build();
    report(save(), outcome, true);
    scheduler->preempted(kRequest);
    scheduler->purge(now);
    finish_purge();
    scheduler->advanced(kRequest, 64, hashes.list());
    EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 64})) << to_string(outcome);
  }
}

TEST_F(PurgeTest, ASaveOfBeforeThatEndsWhileItDrainsHoldsUpNothing) {
  build();
  const JobId job = save();
  scheduler->preempted(kRequest);
  scheduler->purge(now);
  report(job, JobOutcome::kPartial, true, {failed(0, 1, ItemStatus::kFailed)});
  finish_purge();
  scheduler->advanced(kRequest, 64, hashes.list());
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 64}));
}

TEST_F(PurgeTest, WhatWasLoadedBeforeItIsNotSaved) {
  build();
  ASSERT_EQ(offered(kRequest), 64u);
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  scheduler->end_step(now);
  report(job, JobOutcome::kOk, true);
  ASSERT_EQ(load_ends().at(0).valid_tokens, 64u);
  scheduler->purge(now);
  finish_purge();
  scheduler->advanced(kRequest, 64, hashes.list());
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
}

TEST_F(PurgeTest, AnOvertakenLoadFailsAsAWholeOnceItIsQuiet) {
  build();
  ASSERT_EQ(offered(kRequest), 64u);
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  scheduler->end_step(now);
  scheduler->purge(now);
  EXPECT_THAT(load_ends(), IsEmpty());
  report(job, JobOutcome::kOk, true);
  const std::vector<LoadEnd> ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_FALSE(ends[0].complete);
  EXPECT_TRUE(ends[0].blocks_quiet);
  EXPECT_EQ(ends[0].valid_tokens, 0u);
  EXPECT_EQ(ends[0].failed.size(), 8u);
  finish_purge();
  scheduler->advanced(kRequest, 64, hashes.list());
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 64}))
      << "it has nothing of before, and is computed from its first token";
}

TEST_F(PurgeTest, BesideAnOvertakenLoadLocalTokensAreOfBefore) {
  build();
  LookupResult found = scheduler->lookup(kRequest, 65, hashes.list(), 16, now);
  ASSERT_TRUE(found.pending);
  scheduler->end_step(now);
  store->end_lookup(std::vector<ItemStatus>(store->lookups.front().keys().size(), ItemStatus::kOk));
  found = scheduler->lookup(kRequest, 65, hashes.list(), 16, now);
  ASSERT_EQ(found.external_tokens, 48u);
  const JobId job = *scheduler->allocated(kRequest, 48, rows.get(), now);
  scheduler->end_step(now);
  scheduler->purge(now);
  report(job, JobOutcome::kOk, true);
  ASSERT_EQ(load_ends().at(0).valid_tokens, 16u);
  finish_purge();
  scheduler->advanced(kRequest, 64, hashes.list());
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
}

TEST_F(PurgeTest, AnEngineThatDetachesHearsOfItAtOnce) {
  StoreSchedulerOptions options;
  options.detach_quarantined_loads = true;
  build(options);
  ASSERT_EQ(offered(kRequest), 64u);
  const JobId job = *scheduler->allocated(kRequest, 64, rows.get(), now);
  scheduler->end_step(now);
  scheduler->purge(now);
  const std::vector<LoadEnd> ends = load_ends();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_FALSE(ends[0].blocks_quiet);
  EXPECT_EQ(ends[0].valid_tokens, 0u);
  report(job, JobOutcome::kOk, true);
  EXPECT_THAT(load_ends(), IsEmpty()) << "once";
  EXPECT_EQ(scheduler->counters().ledger.blocks_held, 0u);
}

TEST_F(PurgeTest, AStoreThatIsAwayIsAskedAgainAndNotUsedBefore) {
  build();
  logged().clear();
  set_log_sink(
      +[](void*, LogLevel level, std::string_view text) {
        if (level == LogLevel::kWarning) logged().emplace_back(text);
      },
      nullptr, LogLevel::kInfo);
  scheduler->purge(now);
  for (int i = 0; i < 3; ++i) {
    store->end_removal({ItemStatus::kUnavailable, 0});
    scheduler->end_step(now);
    EXPECT_EQ(state(), PurgeState::kWaiting);
    EXPECT_EQ(offered(RequestId{100u + static_cast<unsigned>(i)}), 0u);
    now = now + seconds(5);
    scheduler->end_step(now);
    ASSERT_EQ(store->removals.size(), 1u);
  }
  // The fourth pass began 15 s after the last use, when no lease was left.
  store->end_removal({ItemStatus::kOk, 1});
  scheduler->end_step(now);
  EXPECT_EQ(state(), PurgeState::kDone);
  EXPECT_EQ(scheduler->counters().removals_failed, 3u);
  EXPECT_THAT(logged(),
              Contains(HasSubstr("the store does not answer a purge (\"unavailable\")")).Times(1));
  set_log_sink(nullptr, nullptr, LogLevel::kOff);
}

TEST_F(PurgeTest, AnIndexThatCannotRemoveLeavesTheStoreUnused) {
  build();
  store->refuse = true;
  scheduler->purge(now);
  EXPECT_EQ(state(), PurgeState::kWaiting);
  store->refuse = false;
  EXPECT_EQ(offered(kRequest), 0u);
  EXPECT_EQ(scheduler->counters().removals_failed, 1u);
}

TEST_F(PurgeTest, ASecondPurgeBeginsAgain) {
  build();
  scheduler->purge(now);
  scheduler->purge(now);
  ASSERT_EQ(store->removals.size(), 2u);
  store->end_removal({ItemStatus::kOk, 5});
  scheduler->end_step(now);
  EXPECT_EQ(state(), PurgeState::kRemoving) << "the end of the first pass is not the second's";
  store->end_removal({ItemStatus::kOk, 0});
  scheduler->end_step(now);
  EXPECT_EQ(state(), PurgeState::kWaiting);
}

TEST_F(PurgeTest, ALookupThatDoesNotReturnIsToldOnce) {
  build();
  ASSERT_TRUE(scheduler->lookup(RequestId{8}, 65, hashes.list(), 0, now).pending);
  scheduler->end_step(now);
  const auto op = store->lookups.front().op;
  keep_warnings();
  scheduler->purge(now);
  scheduler->end_step(now);
  EXPECT_THAT(logged(), Not(Contains(HasSubstr("a purge waits")))) << "it may still return";
  store->lookup_ends.push_back(
      {.op = op, .outcome = true, .quiet = false, .items = {}, .batch = {}});
  for (int i = 0; i < 3; ++i) {
    now = now + seconds(31);
    scheduler->end_step(now);
  }
  EXPECT_EQ(state(), PurgeState::kDraining);
  EXPECT_THAT(logged(), Contains(HasSubstr("a purge waits for 1 lookups that do not")).Times(1));
  set_log_sink(nullptr, nullptr, LogLevel::kOff);
}

TEST_F(PurgeTest, WhatKeepsItFromItsEndIsToldOnce) {
  StoreSchedulerOptions options;
  options.quarantine_after = seconds(30);
  build(options);
  keep_warnings();
  const JobId job = save();
  scheduler->purge(now);
  report(job, JobOutcome::kOk, false);
  for (int i = 0; i < 3; ++i) {
    now = now + seconds(31);
    scheduler->end_step(now);
  }
  EXPECT_EQ(state(), PurgeState::kDraining);
  EXPECT_THAT(logged(), Contains(HasSubstr("a purge waits for 1 jobs in quarantine")).Times(1));
  logged().clear();
  store->refuse = true;
  report(job, JobOutcome::kNone, true);
  for (int i = 0; i < 3; ++i) {
    scheduler->end_step(now);
    now = now + seconds(5);
  }
  EXPECT_EQ(state(), PurgeState::kWaiting);
  EXPECT_THAT(logged(), Contains(HasSubstr("the store's client does not take a purge")).Times(1));
  set_log_sink(nullptr, nullptr, LogLevel::kOff);
}

TEST_F(PurgeTest, OnlyTheDamagedShardIsRemovedAndSavedAgain) {
  build({}, 2);
  const JobId first = save();
  for (const Rank rank : {Rank{0}, Rank{1}}) report(first, JobOutcome::kOk, true, {}, rank);
  ASSERT_EQ(offered(RequestId{8}), 64u);
  const JobId load = *scheduler->allocated(RequestId{8}, 64, rows.get(), now);
  scheduler->end_step(now);
  report(load, JobOutcome::kOk, true);
  report(load, JobOutcome::kPartial, true,
         {failed(0, 2, ItemStatus::kChecksumMismatch), failed(1, 1, ItemStatus::kSizeMismatch),
          failed(1, 3, ItemStatus::kMissing)},
         Rank{1});
  ASSERT_EQ(store->removals.size(), 2u);
  KeySlots keys;
  schema->append_key(keys, StoreIndex{0}, {.tp = 1}, hashes.list()[2]);
  EXPECT_EQ(store->removals[0].keys(), keys.strings());
  EXPECT_TRUE(store->removal_kinds[0].leased) << "no reader may believe it";
  keys.clear();
  schema->append_key(keys, StoreIndex{1}, {.tp = 1}, hashes.list()[1]);
  EXPECT_EQ(store->removals[1].keys(), keys.strings());
  EXPECT_FALSE(store->removal_kinds[1].leased) << "another size may be right for another engine";
  store->end_removal({ItemStatus::kOk, 1});
  store->end_removal({ItemStatus::kInUse, 0});
  scheduler->end_step(now);
  EXPECT_EQ(scheduler->counters().mismatches, 2u);
  EXPECT_EQ(scheduler->counters().objects_removed, 1u);
  EXPECT_EQ(scheduler->counters().removals_failed, 1u);

  // What is gone may be believed again once somebody has stored it; what stayed is avoided.
  EXPECT_EQ(offered(RequestId{9}), 16u);
  EXPECT_EQ(scheduler->counters().chunks_avoided, 1u);

  // The stretches of the removed chunks are not known to be saved any more: what is computed there
  // replaces them.
  scheduler->advanced(RequestId{8}, 64, hashes.list());
  EXPECT_EQ(scheduler->wants_save(RequestId{8}, now), (TokenRange{16, 64}));
}

TEST_F(PurgeTest, WhoeverFindsItsOwnSaveDamagedOrGoneSavesItAgain) {
  for (const ItemStatus found : {ItemStatus::kChecksumMismatch, ItemStatus::kMissing}) {
    build();
    report(save(), JobOutcome::kOk, true);
    // It was preempted, and begins again with what it has saved.
    scheduler->preempted(RequestId{7});
    ASSERT_EQ(offered(RequestId{7}), 64u);
    const JobId load = *scheduler->allocated(RequestId{7}, 64, rows.get(), now);
    scheduler->end_step(now);
    report(load, JobOutcome::kPartial, true, {failed(0, 2, found)});
    scheduler->advanced(RequestId{7}, 64, hashes.list());
    EXPECT_EQ(scheduler->wants_save(RequestId{7}, now), (TokenRange{32, 64})) << to_string(found);
    // So does whoever else computes it, although it was saved lately.
    scheduler->advanced(RequestId{8}, 64, hashes.list());
    EXPECT_EQ(scheduler->wants_save(RequestId{8}, now), (TokenRange{32, 64})) << to_string(found);
    store->removals.clear();
    store->removal_kinds.clear();
  }
}

TEST_F(PurgeTest, WhoeverIsPreemptedSavesAgainWhatItsLookupNoLongerFinds) {
  const auto look_up = [&](std::size_t there) {
    ASSERT_TRUE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);
    scheduler->end_step(now);
    std::vector<ItemStatus> items(store->lookups.front().keys().size(), ItemStatus::kMissing);
    // Of both groups, one behind the other.
    for (std::size_t chunk = 0; chunk < there; ++chunk)
      items[chunk] = items[items.size() / 2 + chunk] = ItemStatus::kOk;
    store->end_lookup(items);
    ASSERT_FALSE(scheduler->lookup(kRequest, 65, hashes.list(), 0, now).pending);
    scheduler->allocated(kRequest, 0, rows.get(), now);
    scheduler->advanced(kRequest, 64, hashes.list());
  };
  build();
  const JobId job = save();
  scheduler->preempted(kRequest);
  look_up(0);
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty()) << "it is on its way";
  report(job, JobOutcome::kOk, true);
  scheduler->preempted(kRequest);
  look_up(4);
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty()) << "all of it is there";
  scheduler->preempted(kRequest);
  look_up(1);
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{16, 64}));
  // With that on its way only what lies before it is missing.
  scheduler->save(kRequest, {16, 64}, rows.get(), now);
  scheduler->preempted(kRequest);
  look_up(1);
  EXPECT_TRUE(scheduler->wants_save(kRequest, now).empty());
  scheduler->preempted(kRequest);
  look_up(0);
  EXPECT_EQ(scheduler->wants_save(kRequest, now), (TokenRange{0, 64}));
}

// The load itself has taken a lease on it.
TEST_F(PurgeTest, AnObjectOfAnotherSizeIsTriedAgainOnceItsLeaseHasEnded) {
  StoreSchedulerOptions options;
  options.purge_settle = seconds(12);
  build(options);
  ASSERT_EQ(offered(RequestId{8}), 64u);
  const JobId load = *scheduler->allocated(RequestId{8}, 64, rows.get(), now);
  scheduler->end_step(now);
  report(load, JobOutcome::kPartial, true, {failed(1, 1, ItemStatus::kSizeMismatch)});
  scheduler->finished(RequestId{8}, FinishReason::kCompleted);
  KeySlots wrong;
  schema->append_key(wrong, StoreIndex{1}, {}, hashes.list()[1]);
  // Four tries; whoever asks meanwhile renews no lease and is not offered it.
  for (std::uint64_t attempt = 1; attempt <= 4; ++attempt) {
    ASSERT_EQ(store->removals.size(), 1u) << attempt;
    EXPECT_EQ(store->removals[0].keys(), wrong.strings());
    EXPECT_FALSE(store->removal_kinds[0].leased);
    store->end_removal({ItemStatus::kInUse, 0});
    scheduler->end_step(now);
    EXPECT_EQ(scheduler->counters().removals_failed, attempt);
    if (attempt == 4) break;
    for (std::uint32_t second = 0; second < 12; second += 3) {
      const RequestId asking{100 * attempt + second};
      ASSERT_TRUE(scheduler->lookup(asking, 65, hashes.list(), 0, now).pending);
      scheduler->end_step(now);
      EXPECT_THAT(store->lookups.front().keys(), Not(Contains(wrong[0])));
      EXPECT_EQ(store->lookups.front().keys().size(), 7u);
      store->end_lookup(std::vector<ItemStatus>(7, ItemStatus::kOk));
      EXPECT_EQ(scheduler->lookup(asking, 65, hashes.list(), 0, now).external_tokens, 16u);
      scheduler->finished(asking, FinishReason::kCompleted);
      EXPECT_THAT(store->removals, IsEmpty());
      now = now + seconds(3);
      scheduler->end_step(now);
    }
  }
  now = now + seconds(60);
  scheduler->end_step(now);
  EXPECT_THAT(store->removals, IsEmpty()) << "somebody uses it all the time";
  EXPECT_EQ(offered(RequestId{9}), 64u) << "and may be told of it again";
}

TEST_F(PurgeTest, AnObjectOfAnotherSizeThatHasGoneIsBelievedAgain) {
  build();
  ASSERT_EQ(offered(RequestId{8}), 64u);
  const JobId load = *scheduler->allocated(RequestId{8}, 64, rows.get(), now);
  scheduler->end_step(now);
  report(load, JobOutcome::kPartial, true, {failed(0, 0, ItemStatus::kSizeMismatch)});
  store->end_removal({ItemStatus::kInUse, 0});
  scheduler->end_step(now);
  // Somebody computes it meanwhile, and what is put meets the wrong object.
  report(save(RequestId{10}), JobOutcome::kOk, true);
  now = now + seconds(12);
  scheduler->end_step(now);
  store->end_removal({ItemStatus::kOk, 1});
  scheduler->end_step(now);
  EXPECT_EQ(scheduler->counters().objects_removed, 1u);
  scheduler->advanced(RequestId{11}, 64, hashes.list());
  EXPECT_EQ(scheduler->wants_save(RequestId{11}, now), (TokenRange{0, 64})) << "nothing is there";
  EXPECT_EQ(offered(RequestId{9}), 64u) << "whatever is there now is another object";
}

// Nothing but avoided chunks to ask for: no call.
TEST_F(PurgeTest, ALookupOfWhatIsAvoidedAsksNobody) {
  build();
  ASSERT_EQ(offered(RequestId{8}), 64u);
  const JobId load = *scheduler->allocated(RequestId{8}, 64, rows.get(), now);
  scheduler->end_step(now);
  report(load, JobOutcome::kFailed, true);
  const std::uint64_t calls = scheduler->counters().lookup_calls;
  ASSERT_TRUE(scheduler->lookup(RequestId{9}, 65, hashes.list(), 0, now).pending);
  scheduler->end_step(now);
  EXPECT_THAT(store->lookups, IsEmpty());
  const LookupResult answer = scheduler->lookup(RequestId{9}, 65, hashes.list(), 0, now);
  EXPECT_FALSE(answer.pending);
  EXPECT_EQ(answer.external_tokens, 0u);
  EXPECT_EQ(scheduler->counters().lookup_calls, calls);
  EXPECT_EQ(scheduler->counters().chunks_avoided, 8u);
}

TEST_F(PurgeTest, WhatAnAbortedRequestFindsDamagedIsRemovedToo) {
  build();
  ASSERT_EQ(offered(RequestId{8}), 64u);
  const JobId load = *scheduler->allocated(RequestId{8}, 64, rows.get(), now);
  scheduler->end_step(now);
  scheduler->finished(RequestId{8}, FinishReason::kAborted);
  // The id serves another request meanwhile.
  const Hashes other{8, 2};
  scheduler->advanced(RequestId{8}, 16, other.list());
  report(load, JobOutcome::kPartial, true, {failed(1, 3, ItemStatus::kChecksumMismatch)});
  ASSERT_EQ(store->removals.size(), 1u);
  KeySlots keys;
  schema->append_key(keys, StoreIndex{1}, {}, hashes.list()[3]);
  EXPECT_EQ(store->removals[0].keys(), keys.strings());
  EXPECT_EQ(scheduler->counters().mismatches, 1u);
  EXPECT_EQ(scheduler->counters().incidents, 1u);
  EXPECT_EQ(load_ends().size(), 1u);
  store->end_removal({ItemStatus::kOk, 1});
  scheduler->end_step(now);
  EXPECT_EQ(scheduler->counters().objects_removed, 1u);
  scheduler->finished(RequestId{8}, FinishReason::kCompleted);
  EXPECT_EQ(scheduler->tracked(), 0u);
}

// Keys of schema `vllm` name neither dtype nor layout.
TEST_F(PurgeTest, WhereKeysDoNotNameTheSizeAnotherSizeIsAnotherEngines) {
  CacheConfig config;
  config.num_blocks = 64;
  config.key_schema = "vllm";
  config.model_total_kv_heads = 1;
  config.groups = {test::full_group(16), test::full_group(16, "second")};
  projection = Projection::make(config, SpecRegistry::builtin());
  KeyFacts facts;
  facts.model = "test-model";
  facts.hash_algorithm = "test";
  schema = KeySchema::vllm(projection, facts);
  StoreSchedulerOptions options;
  options.epoch = kEpoch;
  scheduler.reset();
  scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  ASSERT_EQ(offered(RequestId{8}), 64u);
  const JobId load = *scheduler->allocated(RequestId{8}, 64, rows.get(), now);
  scheduler->end_step(now);
  report(load, JobOutcome::kPartial, true,
         {failed(0, 2, ItemStatus::kChecksumMismatch), failed(1, 1, ItemStatus::kSizeMismatch)});
  ASSERT_EQ(store->removals.size(), 1u);
  EXPECT_TRUE(store->removal_kinds[0].leased);
  KeySlots keys;
  schema->append_key(keys, StoreIndex{0}, {}, hashes.list()[2]);
  EXPECT_EQ(store->removals[0].keys(), keys.strings());
  EXPECT_EQ(scheduler->counters().mismatches, 2u);
  EXPECT_EQ(offered(RequestId{9}), 16u) << "both are avoided for a while";
}

}  // namespace
}  // namespace kvprism
