#include "kvprism/checked/checked_scheduler.h"

#include <gmock/gmock.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvprism/backend/memory_store.h"
#include "kvprism/base/error.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/store/store_worker.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::Rows;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr RequestId kRequest{7};

// Calls somebody when it is asked, which is in the middle of a scheduler's end_step.
class CallingIndex final : public ObjectIndex {
 public:
  bool start_exists(OpId, std::unique_ptr<ObjectBatch>&, Instant, Instant) override {
    call();
    return false;
  }
  bool poll_index(Instant, Completion&) override { return false; }
  CloseReport close_index(Duration) override { return {}; }

  std::function<void()> call;
};

// Full attention and states, both of 16 tokens, in memory that loads can write to.
class CheckedSchedulerTest : public ::testing::Test {
 protected:
  CheckedSchedulerTest()
      : projection_(test::make_projection({test::full_group(16), test::mamba_group(16)})),
        schema_(test::make_schema(projection_)),
        store_(std::make_shared<MemoryStore>(std::make_shared<MemoryPool>())),
        memory_(2 * kBlocks * kPage),
        scheduler_(schema_, store_, {.epoch = 1}),
        worker_(schema_, SegmentMap::make(projection_, {tensor("full", 0), tensor("mamba", 1)}),
                store_, {}) {}

  CacheTensor tensor(std::string layer, std::size_t at) {
    CacheTensor tensor;
    tensor.base = memory_.data() + at * kBlocks * kPage;
    tensor.bytes = kBlocks * kPage;
    tensor.layers = {std::move(layer)};
    tensor.block_stride = kPage;
    return tensor;
  }

  // What an engine does once a step.
  void step() {
    worker_.submit(scheduler_.end_step(now_).view(), ReadyToken::host());
    scheduler_.take_acquired(acquired_);
    while (worker_.pump(now_)) {
    }
    WorkerReport report;
    while (worker_.poll(report)) scheduler_.report(report, now_);
    scheduler_.take_released(released_);
    scheduler_.take_load_ends(ends_);
  }
  void save_two_blocks(RequestId request) {
    scheduler_.advanced(request, 32, hashes_.list());
    scheduler_.save(request, scheduler_.wants_save(request, now_), two_.get(), now_);
    scheduler_.boundary(request, GroupId{1}, BlockId{4}, 32);
    step();
    scheduler_.finished(request, FinishReason::kCompleted);
  }
  // The message of the one problem.
  template <class Call>
  static std::string refusal(Call&& call, ErrorCode code = ErrorCode::kInvalidArgument) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      return error.what();
    }
    return "not refused";
  }

  static constexpr std::size_t kBlocks = 64;
  static constexpr std::size_t kPage = 128;
  std::shared_ptr<const Projection> projection_;
  std::shared_ptr<const KeySchema> schema_;
  std::shared_ptr<MemoryStore> store_;
  std::vector<std::byte> memory_;
  CheckedScheduler scheduler_;
  StoreWorker worker_;
  Instant now_{1000};
  Hashes hashes_{2, 1};
  Hashes longer_{3, 1};
  Rows two_{{{1, 2}, {0, 4}}};
  Rows others_{{{5, 6}, {0, 8}}};
  std::vector<BlockId> acquired_;
  std::vector<BlockId> released_;
  std::vector<LoadEnd> ends_;
};

TEST_F(CheckedSchedulerTest, AnEngineThatKeepsTheOrderSeesNothing) {
  save_two_blocks(RequestId{1});
  EXPECT_EQ(scheduler_.lookup(kRequest, 40, hashes_.list(), 0, now_).pending, true);
  step();
  EXPECT_EQ(scheduler_.lookup(kRequest, 40, hashes_.list(), 0, now_).external_tokens, 32u);
  EXPECT_TRUE(scheduler_.allocated(kRequest, 32, others_.get(), now_));
  step();
  ASSERT_EQ(ends_.size(), 1u);
  EXPECT_TRUE(ends_[0].complete);
  scheduler_.advanced(kRequest, 40, hashes_.list());
  EXPECT_TRUE(scheduler_.wants_save(kRequest, now_).empty());
  scheduler_.finished(kRequest, FinishReason::kCompleted);
  step();
  EXPECT_EQ(acquired_.size(), released_.size());
  EXPECT_EQ(scheduler_.tracked(), 0u);
}

TEST_F(CheckedSchedulerTest, LoadsOnlyWhatALookupOffered) {
  scheduler_.prompt(kRequest, 40);
  EXPECT_EQ(refusal([&] { scheduler_.allocated(kRequest, 32, others_.get(), now_); }),
            "scheduler call: allocated(request 7) = 32 tokens to load, no answer of a lookup: "
            "expected all that the last lookup of this request offered, or 0");
  save_two_blocks(RequestId{1});
  scheduler_.lookup(kRequest, 40, hashes_.list(), 0, now_);
  EXPECT_EQ(refusal([&] { scheduler_.allocated(kRequest, 16, others_.get(), now_); }),
            "scheduler call: allocated(request 7) = 16 tokens to load, no answer of a lookup: "
            "expected all that the last lookup of this request offered, or 0");
  step();
  scheduler_.lookup(kRequest, 40, hashes_.list(), 0, now_);
  EXPECT_EQ(refusal([&] { scheduler_.allocated(kRequest, 48, others_.get(), now_); }),
            "scheduler call: allocated(request 7) = 48 tokens to load, 32 tokens offered: "
            "expected all that the last lookup of this request offered, or 0");
  EXPECT_EQ(refusal([&] { scheduler_.allocated(kRequest, 16, others_.get(), now_); }),
            "scheduler call: allocated(request 7) = 16 tokens to load, 32 tokens offered: "
            "expected all that the last lookup of this request offered, or 0");
  const Rows one_row({{5, 6}});
  EXPECT_EQ(refusal([&] { scheduler_.allocated(kRequest, 32, one_row.get(), now_); }),
            "scheduler call: allocated(request 7) = 1 block tables: expected 2, one for every "
            "group of the engine, stored or not");
  const Rows short_row({{5, 6}, {8}});
  EXPECT_EQ(refusal([&] { scheduler_.allocated(kRequest, 32, short_row.get(), now_); }),
            "scheduler call: allocated(request 7) = a table of 1 blocks for group 1: expected at "
            "least 2 blocks, for 32 tokens");
  const Rows no_state({{5, 6}, {8, 0}});
  EXPECT_EQ(
      refusal([&] { scheduler_.allocated(kRequest, 32, no_state.get(), now_); }),
      "scheduler call: allocated(request 7) = the null block as entry 1 of the table of group "
      "1: expected the block of tokens 16 to 32");
  EXPECT_EQ(refusal([&] { scheduler_.advanced(kRequest, 40, hashes_.list()); }),
            "scheduler call: advanced(request 7) = 32 tokens offered: expected allocated first, "
            "with all of them or 0");
  EXPECT_EQ(refusal([&] { scheduler_.save(kRequest, {0, 32}, others_.get(), now_); }),
            "scheduler call: save(request 7) = 32 tokens offered: expected allocated first, with "
            "all of them or 0");
  EXPECT_FALSE(scheduler_.allocated(kRequest, 0, others_.get(), now_));
  EXPECT_EQ(refusal([&] { scheduler_.allocated(kRequest, 32, others_.get(), now_); }),
            "scheduler call: allocated(request 7) = 32 tokens to load, no answer of a lookup: "
            "expected all that the last lookup of this request offered, or 0");
}

TEST_F(CheckedSchedulerTest, ARequestThatLoadsIsLeftAlone) {
  save_two_blocks(RequestId{1});
  scheduler_.lookup(kRequest, 40, hashes_.list(), 0, now_);
  step();
  scheduler_.lookup(kRequest, 40, hashes_.list(), 0, now_);
  const std::optional<JobId> job = scheduler_.allocated(kRequest, 32, others_.get(), now_);
  ASSERT_TRUE(job);
  const std::string rest = " = waiting for load " + std::to_string(raw(*job)) +
                           ": expected the job's LoadEnd first: until then its blocks belong to "
                           "the load";
  EXPECT_EQ(refusal([&] { scheduler_.advanced(kRequest, 40, hashes_.list()); }),
            "scheduler call: advanced(request 7)" + rest);
  EXPECT_EQ(refusal([&] { scheduler_.lookup(kRequest, 40, hashes_.list(), 0, now_); }),
            "scheduler call: lookup(request 7)" + rest);
  EXPECT_EQ(refusal([&] { scheduler_.allocated(kRequest, 0, others_.get(), now_); }),
            "scheduler call: allocated(request 7)" + rest);
  EXPECT_EQ(refusal([&] { scheduler_.save(kRequest, {0, 32}, others_.get(), now_); }),
            "scheduler call: save(request 7)" + rest);
  EXPECT_EQ(refusal([&] { scheduler_.boundary(kRequest, GroupId{1}, BlockId{8}, 32); }),
            "scheduler call: boundary(request 7)" + rest);
  step();
  scheduler_.advanced(kRequest, 40, hashes_.list());
}

TEST_F(CheckedSchedulerTest, SavesWhatIsWanted) {
  scheduler_.advanced(kRequest, 32, hashes_.list());
  EXPECT_EQ(refusal([&] { scheduler_.save(kRequest, {16, 32}, two_.get(), now_); }),
            "scheduler call: save(request 7) = range [16, 32): expected what wants_save says, "
            "[0, 32), or a first part of it in multiples of 16 tokens");
  scheduler_.prompt(RequestId{9}, 16);
  EXPECT_EQ(refusal([&] { scheduler_.save(RequestId{9}, {0, 16}, two_.get(), now_); }),
            "scheduler call: save(request 9) = range [0, 16): expected no save, as wants_save has "
            "nothing");
  const Rows one_block({{1}, {0, 4}});
  EXPECT_EQ(
      refusal([&] { scheduler_.save(kRequest, {0, 32}, one_block.get(), now_); }),
      "scheduler call: save(request 7) = a table of 1 blocks for group 0: expected at least 2 "
      "blocks, for 32 tokens");
  const Rows hole({{1, 0}, {0, 4}});
  EXPECT_EQ(refusal([&] { scheduler_.save(kRequest, {0, 32}, hole.get(), now_); }),
            "scheduler call: save(request 7) = the null block as entry 1 of the table of group 0: "
            "expected the block of tokens 16 to 32");
  EXPECT_EQ(refusal([&] { scheduler_.boundary(kRequest, GroupId{0}, BlockId{3}, 16); }),
            "scheduler call: boundary(request 7) = group 0: expected a group whose states are "
            "handed off");
  EXPECT_EQ(refusal([&] { scheduler_.boundary(kRequest, GroupId{1}, BlockId{0}, 16); }),
            "scheduler call: boundary(request 7) = block 0 at 16 tokens: expected a block of the "
            "pool, at a multiple of 16 tokens whose hash is known");
  scheduler_.save(kRequest, {0, 16}, two_.get(), now_);
}

// What purge() asks for: every request that has computed tokens tells of them first.
TEST_F(CheckedSchedulerTest, LocalTokensAreToldAlsoWhileARequestWaits) {
  save_two_blocks(RequestId{1});
  const auto ask = [&] { return scheduler_.lookup(kRequest, 56, longer_.list(), 16, now_); };
  ask();
  step();
  ASSERT_EQ(ask().external_tokens, 16u);
  scheduler_.advanced(kRequest, 16, {});
  EXPECT_EQ(refusal([&] { scheduler_.advanced(kRequest, 17, {}); }),
            "scheduler call: advanced(request 7) = 16 tokens offered: expected allocated first, "
            "with all of them or 0");
  ASSERT_TRUE(scheduler_.allocated(kRequest, 16, others_.get(), now_));
  scheduler_.advanced(kRequest, 16, {});
  EXPECT_THAT(refusal([&] { scheduler_.advanced(kRequest, 32, {}); }),
              ::testing::StartsWith("scheduler call: advanced(request 7) = waiting for load"));
  scheduler_.purge(now_);
  step();
  scheduler_.advanced(kRequest, 48, longer_.list());
  EXPECT_TRUE(scheduler_.wants_save(kRequest, now_).empty());
}

TEST_F(CheckedSchedulerTest, ARefusedCallLeavesTheClock) {
  const Instant later{9000};
  EXPECT_THAT(refusal([&] { scheduler_.wants_save(kRequest, later); }),
              ::testing::HasSubstr("not known"));
  EXPECT_THAT(refusal([&] { scheduler_.lookup(kRequest, 40, hashes_.list(), 7, later); }),
              ::testing::HasSubstr("a multiple of 16"));
  scheduler_.end_step(now_);
  const std::vector<std::byte> rubbish(24);
  EXPECT_THAT(refusal([&] { scheduler_.report(rubbish, later); }, ErrorCode::kMismatch),
              ::testing::HasSubstr("cannot be read"));
  EXPECT_THAT(refusal([&] { scheduler_.end_step(now_); }),
              ::testing::HasSubstr("at least 9000 ns"));
}

// Another request stores the same prefix in between, so that nothing is wanted any more.
TEST_F(CheckedSchedulerTest, WhatWasOfferedInThisStepMayBeSaved) {
  constexpr RequestId kOther{8};
  scheduler_.advanced(kOther, 32, hashes_.list());
  scheduler_.save(kOther, scheduler_.wants_save(kOther, now_), two_.get(), now_);
  worker_.submit(scheduler_.end_step(now_).view(), ReadyToken::host());
  scheduler_.take_acquired(acquired_);
  scheduler_.advanced(kRequest, 32, hashes_.list());
  const TokenRange range = scheduler_.wants_save(kRequest, now_);
  ASSERT_EQ(range.to, 32u);
  while (worker_.pump(now_)) {
  }
  WorkerReport report;
  while (worker_.poll(report)) scheduler_.report(report, now_);
  scheduler_.save(kRequest, range, others_.get(), now_);
  EXPECT_EQ(scheduler_.counters().saves, 1u);
  EXPECT_EQ(scheduler_.counters().saves_known, 2u);
  EXPECT_EQ(refusal([&] { scheduler_.save(kRequest, range, others_.get(), now_); }),
            "scheduler call: save(request 7) = range [0, 32): expected no save, as wants_save has "
            "nothing");
}

TEST_F(CheckedSchedulerTest, BlocksOfAPoolInHostMemoryAreItsOwn) {
  std::vector<GroupConfig> groups{test::full_group(16), test::ring_group(16)};
  groups[1].host_resident = true;
  groups[1].enable_kv_transfer = false;
  const auto projection = test::make_projection(groups);
  CheckedScheduler scheduler(test::make_schema(projection),
                             std::make_shared<MemoryStore>(std::make_shared<MemoryPool>()),
                             {.epoch = 1});
  scheduler.advanced(kRequest, 32, hashes_.list());
  scheduler.save(kRequest, scheduler.wants_save(kRequest, now_),
                 Rows({{1, 2}, {2, 500, 500}}).get(), now_);
  EXPECT_EQ(scheduler.counters().saves, 1u);
}

TEST_F(CheckedSchedulerTest, TablesNameBlocksOfThePoolAndEachOnce) {
  scheduler_.advanced(kRequest, 32, hashes_.list());
  const auto refused = [&](const Rows& rows) {
    return refusal([&] { scheduler_.save(kRequest, {0, 32}, rows.get(), now_); });
  };
  EXPECT_EQ(refused(Rows({{1, 64}, {0, 4}})),
            "scheduler call: save(request 7) = block 64 in the table of group 0: expected 0 to 63, "
            "the blocks of the pool");
  EXPECT_EQ(refused(Rows({{1, 2}, {0, -1}})),
            "scheduler call: save(request 7) = block -1 in the table of group 1: expected 0 to 63, "
            "the blocks of the pool");
  EXPECT_EQ(refused(Rows({{1, 1}, {0, 4}})),
            "scheduler call: save(request 7) = block 1 twice in the table of group 0: expected a "
            "block of its own for every entry");
  EXPECT_EQ(refused(Rows({{1, 2}, {0, 2}})),
            "scheduler call: save(request 7) = block 2 in the tables of groups 0 and 1: expected a "
            "block of its own for every entry");
  const std::vector<std::span<const BlockId>> null_row{
      std::span<const BlockId>(static_cast<const BlockId*>(nullptr), 2), {}};
  EXPECT_EQ(refusal([&] { scheduler_.save(kRequest, {0, 32}, BlockRows(null_row), now_); }),
            "scheduler call: save(request 7) = a null table for group 0: expected an array of "
            "block ids");
  EXPECT_EQ(scheduler_.counters().saves, 0u);
  EXPECT_EQ(refused(Rows({{1, 2}, {0, 0}})), "not refused") << "the null block may come twice";
}

TEST_F(CheckedSchedulerTest, ARequestBeginsOnceAndFinishesOnce) {
  const auto message = [](const std::string& call) {
    return "scheduler call: " + call +
           "(request 7) = not known: expected a request that lookup, prompt, restrict or advanced "
           "has begun and finished has not ended";
  };
  const auto unknown = [&] {
    EXPECT_EQ(refusal([&] { scheduler_.allocated(kRequest, 0, two_.get(), now_); }),
              message("allocated"));
    EXPECT_EQ(refusal([&] { scheduler_.wants_save(kRequest, now_); }), message("wants_save"));
    EXPECT_EQ(refusal([&] { scheduler_.save(kRequest, {0, 16}, two_.get(), now_); }),
              message("save"));
    EXPECT_EQ(refusal([&] { scheduler_.boundary(kRequest, GroupId{1}, BlockId{4}, 16); }),
              message("boundary"));
    EXPECT_EQ(refusal([&] { scheduler_.preempted(kRequest); }), message("preempted"));
    EXPECT_EQ(refusal([&] { scheduler_.finished(kRequest, FinishReason::kAborted); }),
              message("finished"));
  };
  unknown();
  scheduler_.restrict(kRequest, {});
  scheduler_.preempted(kRequest);
  scheduler_.finished(kRequest, FinishReason::kCompleted);
  unknown();
}

TEST_F(CheckedSchedulerTest, WhatHasEndedIsTakenOnceAStep) {
  save_two_blocks(RequestId{1});
  scheduler_.lookup(kRequest, 40, hashes_.list(), 0, now_);
  step();
  scheduler_.lookup(kRequest, 40, hashes_.list(), 0, now_);
  ASSERT_TRUE(scheduler_.allocated(kRequest, 32, others_.get(), now_));
  worker_.submit(scheduler_.end_step(now_).view(), ReadyToken::host());
  scheduler_.take_acquired(acquired_);
  while (worker_.pump(now_)) {
  }
  WorkerReport report;
  while (worker_.poll(report)) EXPECT_TRUE(scheduler_.report(report, now_));
  scheduler_.end_step(now_);
  EXPECT_TRUE(scheduler_.has_pending_work());
  EXPECT_EQ(refusal([&] { scheduler_.end_step(now_); }),
            "scheduler call: end_step = 3 released blocks not taken: expected take_released once a "
            "step: they are nobody's until then");
  scheduler_.take_released(released_);
  EXPECT_EQ(released_.size(), acquired_.size());
  EXPECT_EQ(
      refusal([&] { scheduler_.end_step(now_); }),
      "scheduler call: end_step = 1 load ends not taken: expected take_load_ends once a step: "
      "their requests wait for them");
  scheduler_.take_load_ends(ends_);
  EXPECT_EQ(ends_.size(), 1u);
  scheduler_.end_step(now_);
  EXPECT_FALSE(scheduler_.has_pending_work());
}

TEST_F(CheckedSchedulerTest, BlocksAreHeldBeforeOthersAreFreed) {
  scheduler_.advanced(kRequest, 32, hashes_.list());
  scheduler_.save(kRequest, scheduler_.wants_save(kRequest, now_), two_.get(), now_);
  const auto message = [](const std::string& call) {
    return "scheduler call: " + call +
           " = 2 acquired blocks not taken: expected take_acquired first: a block freed before "
           "it may be reused while a job needs it";
  };
  EXPECT_EQ(refusal([&] { scheduler_.finished(kRequest, FinishReason::kAborted); }),
            message("finished(request 7)"));
  EXPECT_EQ(refusal([&] { scheduler_.preempted(kRequest); }), message("preempted(request 7)"));
  EXPECT_EQ(refusal([&] { scheduler_.take_released(released_); }), message("take_released"));
  scheduler_.end_step(now_);
  EXPECT_EQ(refusal([&] { scheduler_.end_step(now_); }), message("end_step"));
  scheduler_.take_acquired(acquired_);
  EXPECT_THAT(acquired_, ElementsAre(BlockId{1}, BlockId{2}));
  scheduler_.end_step(now_);
  scheduler_.finished(kRequest, FinishReason::kAborted);
  scheduler_.take_released(released_);
  EXPECT_THAT(released_, IsEmpty());
}

TEST_F(CheckedSchedulerTest, ARequestWhoseFirstLookupIsRefusedCanBeFinished) {
  const Hashes four(4, 1);
  EXPECT_THAT(refusal([&] { scheduler_.lookup(kRequest, 64, four.list(3), 0, now_); }),
              ::testing::HasSubstr("lookup(request 7) = hashes 3 to 4 of 16 bytes"));
  scheduler_.finished(kRequest, FinishReason::kAborted);
  EXPECT_EQ(scheduler_.tracked(), 0u);
}

TEST_F(CheckedSchedulerTest, HashesContinueThoseThatAreKnown) {
  scheduler_.advanced(kRequest, 16, hashes_.list());
  const Hashes four(4, 1);
  EXPECT_EQ(refusal([&] { scheduler_.advanced(kRequest, 48, four.list(3)); }),
            "scheduler call: advanced(request 7) = hashes 3 to 4 of 16 bytes: expected hashes of "
            "one width that begin at or before number 2");
  const HashList null{nullptr, 3, 16, 0};
  EXPECT_EQ(
      refusal([&] { scheduler_.advanced(kRequest, 48, null); }),
      "scheduler call: advanced(request 7) = 3 hashes at a null address: expected an array of "
      "hashes, or none");
  EXPECT_EQ(refusal([&] { scheduler_.lookup(kRequest, 49, null, 0, now_); }),
            "scheduler call: lookup(request 7) = 3 hashes at a null address: expected an array of "
            "hashes, or none");
  const Hashes foreign(2, 99);
  EXPECT_EQ(refusal([&] { scheduler_.lookup(kRequest, 40, foreign.list(), 0, now_); }),
            "scheduler call: lookup(request 7) = other hashes than before: expected the same "
            "prefix, or finished() before the id is used again");
  EXPECT_EQ(refusal([&] { scheduler_.lookup(kRequest, 40, hashes_.list(), 48, now_); }),
            "scheduler call: lookup(request 7) = local hit of 48 tokens: expected at most the "
            "prompt, 40 tokens");
  EXPECT_EQ(refusal([&] { scheduler_.lookup(kRequest, 40, hashes_.list(), 7, now_); }),
            "scheduler call: lookup(request 7) = local hit of 7 tokens: expected a multiple of 16 "
            "tokens");
}

TEST_F(CheckedSchedulerTest, TimeDoesNotGoBackAndReportsCanBeRead) {
  scheduler_.end_step(Instant{5000});
  EXPECT_EQ(refusal([&] { scheduler_.wants_save(kRequest, Instant{4000}); }),
            "scheduler call: wants_save(request 7) = now is 4000 ns: expected at least 5000 ns, "
            "the time of an earlier call");
  EXPECT_EQ(refusal([&] { scheduler_.purge(Instant{4000}); }),
            "scheduler call: purge = now is 4000 ns: expected at least 5000 ns, the time of an "
            "earlier call");
  EXPECT_EQ(scheduler_.purge_status().state, PurgeState::kNone);
  EXPECT_EQ(refusal([&] { scheduler_.rank_gone(Rank{99}, Instant{5000}); }),
            "scheduler call: rank_gone = rank 99: expected a rank below 1");
  const std::vector<std::byte> rubbish(24);
  EXPECT_EQ(
      refusal([&] { scheduler_.report(rubbish, Instant{5000}); }, ErrorCode::kMismatch),
      "scheduler call: report = 24 bytes that cannot be read, or tells of chunks that its job "
      "does not move: expected reports as a worker's poll gave them, one behind the other");
  WorkerReport foreign;
  foreign.epoch = 2;
  foreign.jobs.resize(1);
  EXPECT_EQ(refusal([&] { scheduler_.report(foreign, Instant{5000}); }, ErrorCode::kMismatch),
            "scheduler call: report = a report of 1 jobs of another epoch: expected reports of "
            "epoch 1, from workers that take no other scheduler's plans");
  foreign.epoch = 1;
  foreign.jobs[0].num_failed = 7;
  EXPECT_THAT(refusal([&] { scheduler_.report(foreign, Instant{5000}); }, ErrorCode::kMismatch),
              ::testing::StartsWith("scheduler call: report = a report of 1 jobs that cannot be "
                                    "read"));
}

TEST_F(CheckedSchedulerTest, OneCallAtATime) {
  const auto index = std::make_shared<CallingIndex>();
  StoreSchedulerOptions options;
  options.epoch = 1;
  options.tell_changes = true;
  CheckedScheduler scheduler(schema_, index, options);
  std::vector<std::string> refusals;
  std::vector<StoreChange> changes;
  index->call = [&] {
    refusals = {refusal([&] { scheduler.set_mode(StoreMode::kOff); }),
                refusal([&] { scheduler.purge(now_); }),
                refusal([&] { scheduler.restrict(kRequest, {}); }),
                refusal([&] { scheduler.prompt(kRequest, 40); }),
                refusal([&] { scheduler.take_changes(changes); })};
  };
  scheduler.lookup(kRequest, 40, hashes_.list(), 0, now_);
  scheduler.end_step(now_);
  const auto message = [](const std::string& call) {
    return "scheduler call: " + call +
           " = another call is running: expected one call at a time, from the engine's thread";
  };
  EXPECT_THAT(refusals, ElementsAre(message("set_mode"), message("purge"), message("restrict"),
                                    message("prompt"), message("take_changes")));
  EXPECT_EQ(scheduler.mode(), StoreMode::kReadWrite);
  EXPECT_EQ(scheduler.purge_status().state, PurgeState::kNone);
}

}  // namespace
}  // namespace kvprism
