// Exceptions in the middle of a scheduler's call: no block is given back that was not taken, none
// is kept, and no load that was promised stays without its end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "failing_memory.h"
#include "kvprism/backend/run_file.h"
#include "kvprism/store/replay_run.h"
#include "kvprism/store/store_scheduler.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using test::counting;
using test::for_good;
using test::Hashes;
using test::NotCounted;
using test::Rows;
using test::ScriptedStore;
using test::until_failure;

// The fixture's store, which has memory, and whose next question throws where the test says.
class RichIndex final : public ObjectIndex {
 public:
  explicit RichIndex(std::shared_ptr<ScriptedStore> inner) : inner_(std::move(inner)) {}

  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                    Instant deadline) override {
    const NotCounted pause;
    if (std::exchange(throws, false)) {
      if (takes_the_batch) inner_->start_exists(op, batch, now, deadline);
      throw std::runtime_error("the index has failed");
    }
    return inner_->start_exists(op, batch, now, deadline);
  }
  bool start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal,
                    Instant now, Instant deadline) override {
    const NotCounted pause;
    return inner_->start_remove(op, batch, removal, now, deadline);
  }
  bool poll_index(Instant now, Completion& out) override {
    const NotCounted pause;
    return inner_->poll_index(now, out);
  }
  CloseReport close_index(Duration budget) override { return inner_->close_index(budget); }

  bool throws = false;
  bool takes_the_batch = false;  // before it throws

 private:
  std::shared_ptr<ScriptedStore> inner_;
};

// A sink in memory.
struct Recording {
  std::vector<std::byte> bytes;
  int cuts = 0;

  RunSink sink() {
    return {[](void* to, std::span<const std::byte> more) {
              auto& all = static_cast<Recording*>(to)->bytes;
              all.insert(all.end(), more.begin(), more.end());
              return true;
            },
            this, [](void* to) { ++static_cast<Recording*>(to)->cuts; }};
  }
};

constexpr RequestId kLoading{1};
constexpr RequestId kSaving{2};
constexpr RequestId kOffering{3};

// Blocks of 8 tokens beside states each 16, hits inside blocks each 4: a request that loads up to
// the end of a prompt, and one that saves whole steps, the end of its prompt and two states.
class SchedulerExceptionTest : public ::testing::Test {
 protected:
  void build(const StoreSchedulerOptions& options) {
    CacheConfig config;
    config.num_blocks = 64;
    config.scheduler_block_size = 16;
    config.hash_block_size = 4;
    config.cache_hit_alignment_tokens = 4;
    config.groups = {test::full_group(8), test::ring_group(6), test::mamba_group(16)};
    store = std::make_shared<ScriptedStore>();
    schema = test::make_schema(Projection::make(config, SpecRegistry::builtin()));
    index = std::make_shared<RichIndex>(store);
    scheduler = std::make_unique<StoreScheduler>(schema, index, options);
    now = Instant{seconds(1).ns};
    thrown = 0;
    acquired.clear();
    released.clear();
    promised.clear();
    ended.clear();
    sent.clear();
  }

  template <class Call>
  void guarded(Call call) {
    counting = true;
    try {
      call();
    } catch (const std::bad_alloc&) {
      ++thrown;
    }
    counting = false;
    take();
  }
  // What an engine does behind each call.
  void take() {
    scheduler->take_acquired(acquired);
    scheduler->take_released(released);
    std::vector<LoadEnd> ends;
    scheduler->take_load_ends(ends);
    for (const LoadEnd& end : ends) ++ended[raw(end.job)];
    for (const BlockId block : released) {
      EXPECT_GE(std::count(acquired.begin(), acquired.end(), block),
                std::count(released.begin(), released.end(), block))
          << "block " << raw(block) << " is given back and was not taken";
    }
  }
  void step() {
    const StepPlan* plan = nullptr;
    guarded([&] { plan = &scheduler->end_step(now); });
    if (plan == nullptr) return;
    EXPECT_NO_THROW(check_plan(plan->view())) << "a worker would refuse all of it";
    for (const JobRecord& job : plan->jobs) sent.push_back(job.id);
    for (const JobId job : plan->asked) asked.push_back(job);
    while (!store->lookups.empty()) {
      store->end_lookup(
          std::vector<ItemStatus>(store->lookups.front().keys().size(), ItemStatus::kOk));
    }
    while (!store->removals.empty()) store->end_removal({ItemStatus::kOk, 1});
  }
  void report(JobId job, JobOutcome outcome, std::vector<FailedChunk> failed) {
    WorkerReport told;
    told.epoch = 7;
    told.jobs = {{job, outcome, 1, 0, static_cast<std::uint32_t>(failed.size()), 0, 0, 0}};
    told.failed = std::move(failed);
    guarded([&] { scheduler->report(told, now); });
  }
  void begin_load() {
    LookupResult found;
    for (int round = 0; round < 3; ++round) {
      const HashList known{hashes.bytes.data(), 7, Hashes::kWidth};
      guarded([&] { found = scheduler->lookup(kLoading, 30, known, 0, now); });
      if (!found.pending) break;
      step();
    }
    if (found.pending || found.external_tokens == 0) return;
    const Rows rows({{1, 2, 3, 4}, {40}, {0, 5}});
    std::optional<JobId> job;
    guarded([&] { job = scheduler->allocated(kLoading, found.external_tokens, rows.get(), now); });
    if (job) promised.push_back(raw(*job));
  }
  void begin_saves() {
    guarded([&] { scheduler->prompt(kSaving, 46); });
    guarded([&] { scheduler->advanced(kSaving, 46, others.list()); });
    guarded([&] { scheduler->advanced(kOffering, 16, more.list()); });
    guarded([&] { scheduler->boundary(kSaving, GroupId{2}, BlockId{21}, 32); });
    guarded([&] { scheduler->boundary(kSaving, GroupId{2}, BlockId{22}, 44); });
    guarded([&] { scheduler->boundary(kOffering, GroupId{2}, BlockId{23}, 16); });
    const Rows sources({{11, 12, 13, 14, 15, 16}, {41}, {0, 21, 22}});
    TokenRange wanted;
    guarded([&] { wanted = scheduler->wants_save(kSaving, now); });
    if (!wanted.empty()) guarded([&] { scheduler->save(kSaving, wanted, sources.get(), now); });
  }
  void live() {
    if (!load_is_silent) begin_saves();
    begin_load();
    if (load_is_silent) begin_saves();
    step();
    step();
    const auto status = static_cast<std::uint32_t>(ItemStatus::kChecksumMismatch);
    const std::vector<JobId> planned = sent;
    for (std::size_t i = 0; i < planned.size(); ++i) {
      const bool loads = !promised.empty() && raw(planned[i]) == promised[0];
      if (loads == load_is_silent) continue;
      report(planned[i], JobOutcome::kPartial, {{StoreIndex{0}, 2, status}});
      step();
    }
    // The others are given up, and their blocks go to quarantine.
    for (int turn = 0; turn < 3; ++turn) {
      now = now + seconds(130);
      step();
    }
  }
  // Until nothing is left, with memory again: whoever is asked says that it has nothing.
  void wind_down() {
    for (int turn = 0; turn < 20; ++turn) {
      now = now + seconds(40);
      asked.clear();
      step();
      const std::vector<JobId> open = asked;
      for (const JobId job : open) report(job, JobOutcome::kFailed, {});
    }
    scheduler->finished(kLoading, FinishReason::kCompleted);
    scheduler->finished(kSaving, FinishReason::kCompleted);
    scheduler->finished(kOffering, FinishReason::kCompleted);
  }

  std::shared_ptr<ScriptedStore> store;
  std::shared_ptr<RichIndex> index;
  std::shared_ptr<const KeySchema> schema;
  std::unique_ptr<StoreScheduler> scheduler;
  const Hashes hashes{16, 1};
  const Hashes others{16, 2};
  const Hashes more{16, 3};
  Instant now;
  bool load_is_silent = false;
  int thrown = 0;
  std::vector<BlockId> acquired, released;
  std::vector<std::uint64_t> promised;
  std::map<std::uint64_t, int> ended;
  std::vector<JobId> sent, asked;
};

TEST_F(SchedulerExceptionTest, AQuestionThatThrowsIsAMissAndMayBeUnderWay) {
  for (const bool taken : {false, true}) {
    StoreSchedulerOptions options;
    options.epoch = 7;
    Recording recording;
    options.record = recording.sink();
    build(options);
    const HashList known{hashes.bytes.data(), 7, Hashes::kWidth};
    ASSERT_TRUE(scheduler->lookup(kLoading, 30, known, 0, now).pending);
    index->throws = true;
    index->takes_the_batch = taken;
    EXPECT_THROW(scheduler->end_step(now), std::runtime_error);
    EXPECT_EQ(scheduler->tracked(), 1u) << "the request";
    EXPECT_EQ(recording.cuts, 1);
    now = now + options.lookup_timeout;
    const LookupResult late = scheduler->lookup(kLoading, 30, known, 0, now);
    EXPECT_FALSE(late.pending);
    EXPECT_EQ(late.external_tokens, 0u);
    EXPECT_EQ(scheduler->counters().lookups_late, 1u);
    scheduler->purge(now);
    scheduler->end_step(now);
    EXPECT_EQ(store->removals.size(), taken ? 0u : 1u) << "a question may renew leases";
    const ReplayRunResult replay = replay_run(recording.bytes);
    EXPECT_TRUE(replay.same) << replay.difference;
    EXPECT_EQ(replay.calls, 1u) << "the lookup before it";
    EXPECT_EQ(replay.ignored_bytes, 0u);
    EXPECT_EQ(recording.cuts, 1);
    if (!taken) continue;
    store->answer_lookup();
    scheduler->end_step(now);
    EXPECT_EQ(store->removals.size(), 1u) << "it is quiet";
  }
}

// What it had not come to is as lost as a report that never came.
TEST_F(SchedulerExceptionTest, AReportThatLacksMemoryIsAskedForAgain) {
  int again = 0;
  for (int allowed = 0; !HasFailure(); ++allowed) {
    SCOPED_TRACE(allowed);
    ASSERT_LT(allowed, 100);
    until_failure = INT32_MAX;
    build({.epoch = 7});
    begin_load();
    step();
    ASSERT_EQ(promised.size(), 1u);
    WorkerReport told;
    told.epoch = 7;
    told.jobs = {{JobId{promised[0]}, JobOutcome::kPartial, 1, 0, 1, 0, 0, 0}};
    told.failed = {{StoreIndex{0}, 2, static_cast<std::uint32_t>(ItemStatus::kChecksumMismatch)}};
    std::vector<std::byte> bytes;
    encode(told, bytes);
    until_failure = allowed;
    guarded([&] { EXPECT_TRUE(scheduler->report(bytes, now)); });
    until_failure = INT32_MAX;
    const bool done = thrown == 0;
    for (int turn = 0; turn < 20; ++turn) {
      now = now + seconds(40);
      asked.clear();
      step();
      const std::vector<JobId> open = asked;
      for (const JobId job : open) {
        EXPECT_EQ(raw(job), promised[0]);
        report(job, JobOutcome::kFailed, {});
        ++again;
      }
    }
    EXPECT_EQ(ended[promised[0]], 1);
    std::sort(acquired.begin(), acquired.end());
    std::sort(released.begin(), released.end());
    EXPECT_EQ(acquired, released);
    EXPECT_EQ(scheduler->counters().ledger.alive, 0u);
    if (done) break;
  }
  EXPECT_GT(again, 0);
}

// Whether memory lacks for the recording or for the call, what is recorded is the run up to there,
// and no file says that nothing follows.
TEST_F(SchedulerExceptionTest, WhicheverAllocationFailsARecordingEndsBeforeIt) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-short-" + std::to_string(::getpid()));
  for (int allowed = 0; !HasFailure(); ++allowed) {
    SCOPED_TRACE(allowed);
    ASSERT_LT(allowed, 2000);
    bool done = false;
    {
      RunFile file(path.string());
      StoreSchedulerOptions options{.epoch = 7};
      options.record = file.sink();
      build(options);
      until_failure = allowed;
      live();
      done = until_failure >= 0;
      until_failure = INT32_MAX;
      wind_down();
      scheduler.reset();
    }
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    std::filesystem::remove(path);
    std::vector<std::byte> bytes(text.size());
    std::memcpy(bytes.data(), text.data(), text.size());
    const ReplayRunResult replay = replay_run(bytes);
    EXPECT_TRUE(replay.same) << replay.difference;
    EXPECT_EQ(replay.ended, done);
    EXPECT_EQ(replay.ignored_bytes, 0u);
    if (done) break;
  }
}

struct Variant {
  bool tells, load_is_silent, alone;  // alone: one allocation fails; else all behind it too
};

class SchedulerExceptions : public SchedulerExceptionTest,
                            public ::testing::WithParamInterface<Variant> {};

TEST_P(SchedulerExceptions, WhicheverAllocationFailsNoBlockIsLostOrGivenBackTwice) {
  StoreSchedulerOptions options;
  options.epoch = 7;
  options.tell_changes = options.detach_quarantined_loads = GetParam().tells;
  load_is_silent = GetParam().load_is_silent;
  int failures = 0;
  for (int allowed = 0; !HasFailure(); ++allowed) {
    SCOPED_TRACE(allowed);
    ASSERT_LT(allowed, 2000);
    build(options);
    until_failure = allowed;
    for_good = !GetParam().alone;
    live();
    const bool done = until_failure >= 0;
    until_failure = INT32_MAX;
    wind_down();
    std::sort(acquired.begin(), acquired.end());
    std::sort(released.begin(), released.end());
    EXPECT_EQ(acquired, released);
    EXPECT_EQ(scheduler->tracked(), 0u);
    EXPECT_EQ(scheduler->counters().ledger.alive, 0u);
    EXPECT_EQ(scheduler->counters().ledger.blocks_held, 0u);
    EXPECT_EQ(ended.size(), promised.size());
    for (const std::uint64_t job : promised) EXPECT_EQ(ended[job], 1) << "load job " << job;
    if (done) {
      EXPECT_EQ(acquired.size(), 5u + 6u + 3u) << "all of it has happened";
      EXPECT_EQ(promised.size(), 1u);
      EXPECT_EQ(thrown, 0);
      break;
    }
    failures += thrown;
  }
  EXPECT_GT(failures, 10);
  for_good = false;
}

INSTANTIATE_TEST_SUITE_P(Variants, SchedulerExceptions,
                         ::testing::Values(Variant{false, false, true}, Variant{false, true, false},
                                           Variant{true, true, true}, Variant{true, false, false}));

}  // namespace
}  // namespace kvprism
