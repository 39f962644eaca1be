// What a step costs in heap allocations: none in steady decoding, a constant per job, none per
// block (decision 8).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <new>

#include "kvprism/job/job_ledger.h"
#include "kvprism/store/store_worker.h"
#include "store_fixtures.h"

// The replaced operators pair with each other; g++ 12 sees only one side of an inlined pair.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace {
std::atomic<std::uint64_t> allocations{0};
}

void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* const memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace kvprism {
namespace {

// Every call succeeds at the next poll, and the store itself allocates nothing.
class InstantStore final : public ObjectStore, public ObjectIndex {
 public:
  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant, Instant) override {
    return start(index_, op, batch);
  }
  bool start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant, Instant) override {
    return start(store_, op, batch);
  }
  bool start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant, Instant) override {
    return start(store_, op, batch);
  }
  bool poll_index(Instant, Completion& out) override { return pop(index_, out); }
  bool poll_store(Instant, Completion& out) override { return pop(store_, out); }
  CloseReport close_index(Duration) override { return {}; }
  CloseReport close_store(Duration) override { return {}; }
  StoreCapabilities capabilities() const override { return {"instant", 0, 0, true}; }
  void add_region(const Region&) override {}
  void remove_region(const Region&) override {}

 private:
  struct Queue {
    std::array<std::pair<OpId, std::unique_ptr<ObjectBatch>>, 64> items;
    std::size_t size = 0;
  };
  static bool start(Queue& queue, OpId op, std::unique_ptr<ObjectBatch>& batch) {
    if (queue.size == queue.items.size()) return false;
    queue.items[queue.size++] = {op, std::move(batch)};
    return true;
  }
  static bool pop(Queue& queue, Completion& out) {
    if (queue.size == 0) return false;
    auto& [op, batch] = queue.items[--queue.size];
    out.op = op;
    out.outcome = out.quiet = true;
    out.items.clear();
    std::size_t first = 0;
    for (std::size_t i = 0; i < batch->keys.size(); ++i) {
      std::uint64_t bytes = 0;
      for (; i < batch->ends.size() && first < batch->ends[i]; ++first)
        bytes += batch->segments[first].length;
      out.items.push_back({ItemStatus::kOk, bytes});
    }
    out.batch = std::move(batch);
    return true;
  }
  Queue index_, store_;
};

constexpr std::uint32_t kBlocks = 2048;

class AllocationTest : public ::testing::Test {
 protected:
  AllocationTest() {
    projection = test::make_projection(
        {test::full_group(16), test::ring_group(8), test::mamba_group(16)}, kBlocks);
    schema = test::make_schema(projection);
    memory.resize(std::size_t{3} * kBlocks * 128);
    std::vector<CacheTensor> tensors(3);
    const char* layers[] = {"full", "ring", "mamba"};
    for (std::size_t t = 0; t < 3; ++t) {
      tensors[t] = {memory.data(), memory.size(),     {layers[t]}, kBlocks * 128,
                    128,           t * kBlocks * 128, -1};
    }
    map = SegmentMap::make(projection, tensors);
    build_scheduler({});
    worker = std::make_unique<StoreWorker>(schema, map, store, StoreWorkerOptions{});
    for (std::uint32_t i = 0; i < kBlocks; ++i)
      row.push_back(BlockId{static_cast<std::int32_t>(1 + i % (kBlocks - 1))});
    spans.assign(3, row);
  }

  void build_scheduler(StoreSchedulerOptions options) {
    options.epoch = 1;
    scheduler.reset();
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  }

  void exchange() {
    const StepPlan& plan = scheduler->end_step(now);
    if (!plan.empty()) worker->submit(plan.view(), ReadyToken::host());
    while (worker->pump(now)) {
    }
    while (worker->poll(report)) scheduler->report(report, now);
    ids.clear();
    ends.clear();
    scheduler->take_acquired(ids);
    scheduler->take_released(ids);
    scheduler->take_load_ends(ends);
    changes.clear();
    scheduler->take_changes(changes);
  }

  std::uint64_t cost_of_save(RequestId id, std::uint32_t chunks) {
    const test::Hashes hashes(chunks, static_cast<std::uint8_t>(raw(id)));
    scheduler->advanced(id, chunks * 16, hashes.list());
    const std::uint64_t before = allocations;
    scheduler->save(id, scheduler->wants_save(id, now), rows(), now);
    exchange();
    const std::uint64_t cost = allocations - before;
    EXPECT_TRUE(scheduler->wants_save(id, now).empty());
    scheduler->finished(id, FinishReason::kCompleted);
    EXPECT_EQ(scheduler->tracked(), 0u);
    return cost;
  }

  std::uint64_t cost_of_load(RequestId id, std::uint32_t chunks) {
    const test::Hashes hashes(chunks, static_cast<std::uint8_t>(raw(id)));
    const std::uint32_t prompt = chunks * 16 + 1;
    scheduler->lookup(id, prompt, hashes.list(), 0, now);
    const std::uint64_t before = allocations;
    exchange();
    const LookupResult hit = scheduler->lookup(id, prompt, hashes.list(), 0, now);
    EXPECT_EQ(hit.external_tokens, chunks * 16);
    EXPECT_TRUE(scheduler->allocated(id, hit.external_tokens, rows(), now).has_value());
    exchange();
    const std::uint64_t cost = allocations - before;
    EXPECT_EQ(ends.size(), 1u);
    scheduler->finished(id, FinishReason::kCompleted);
    EXPECT_EQ(scheduler->tracked(), 0u);
    return cost;
  }

  BlockRows rows() const { return BlockRows(std::span<const std::span<const BlockId>>(spans)); }

  std::shared_ptr<InstantStore> store = std::make_shared<InstantStore>();
  std::shared_ptr<const Projection> projection;
  std::shared_ptr<const KeySchema> schema;
  std::vector<std::byte> memory;
  std::shared_ptr<const SegmentMap> map;
  std::unique_ptr<StoreScheduler> scheduler;
  std::unique_ptr<StoreWorker> worker;
  std::vector<BlockId> row;
  std::vector<std::span<const BlockId>> spans;
  WorkerReport report;
  std::vector<BlockId> ids;
  std::vector<LoadEnd> ends;
  std::vector<StoreChange> changes;
  Instant now{seconds(1).ns};
};

// The least of several jobs: the vectors of the past double now and then.
template <class Cost>
std::uint64_t least(Cost cost, std::uint64_t first_id) {
  std::uint64_t fewest = UINT64_MAX;
  for (std::uint64_t id = first_id; id < first_id + 4; ++id)
    fewest = std::min(fewest, cost(RequestId{id}));
  return fewest;
}

TEST_F(AllocationTest, ASteadyDecodeStepAllocatesNothing) {
  const test::Hashes hashes(100, 1);
  for (std::uint64_t id = 1; id <= 64; ++id) {
    scheduler->advanced(RequestId{id}, 1601, hashes.list());
    scheduler->save(RequestId{id}, scheduler->wants_save(RequestId{id}, now), rows(), now);
  }
  exchange();
  exchange();
  const std::uint64_t before = allocations;
  for (std::uint32_t step = 1; step <= 14; ++step) {
    now = now + milliseconds(20);
    for (std::uint64_t id = 1; id <= 64; ++id) {
      scheduler->advanced(RequestId{id}, 1601 + step, {});
      EXPECT_TRUE(scheduler->wants_save(RequestId{id}, now).empty());
    }
    exchange();
  }
  EXPECT_EQ(allocations - before, 0u);
}

TEST_F(AllocationTest, ASaveCostsTheSameForAnyNumberOfBlocks) {
  for (std::uint64_t warm = 1; warm <= 8; ++warm)
    cost_of_save(RequestId{warm}, warm % 2 == 0 ? 480 : 1600);
  const std::uint64_t small = least([&](RequestId id) { return cost_of_save(id, 8); }, 20);
  const std::uint64_t large = least([&](RequestId id) { return cost_of_save(id, 480); }, 30);
  EXPECT_EQ(small, large) << "480 chunks still fit one call of 512 segments";
  EXPECT_LE(small, 8u);
  RecordProperty("allocations_per_save_job", static_cast<int>(small));
}

TEST_F(AllocationTest, WhatIsToldOfASaveCostsTheSameForAnyNumberOfBlocks) {
  StoreSchedulerOptions options;
  options.tell_changes = true;
  build_scheduler(options);
  for (std::uint64_t warm = 1; warm <= 8; ++warm)
    cost_of_save(RequestId{warm}, warm % 2 == 0 ? 480 : 1600);
  const std::uint64_t small = least([&](RequestId id) { return cost_of_save(id, 8); }, 20);
  EXPECT_EQ(changes.size(), 8u);
  const std::uint64_t large = least([&](RequestId id) { return cost_of_save(id, 480); }, 30);
  EXPECT_EQ(changes.size(), 480u);
  EXPECT_EQ(small, large);
  EXPECT_LE(small, 9u);
}

TEST_F(AllocationTest, ALoadCostsTheSameForAnyNumberOfBlocks) {
  for (std::uint64_t warm = 1; warm <= 8; ++warm)
    cost_of_load(RequestId{warm}, warm % 2 == 0 ? 480 : 1600);
  const std::uint64_t small = least([&](RequestId id) { return cost_of_load(id, 8); }, 20);
  const std::uint64_t large = least([&](RequestId id) { return cost_of_load(id, 480); }, 30);
  EXPECT_EQ(small, large);
  EXPECT_LE(small, 16u);
  RecordProperty("allocations_per_load_job", static_cast<int>(small));
}

TEST(LedgerAllocation, WhatRanksTellOfOneJobIsNotCopiedForEachOfThem) {
  constexpr std::uint32_t kRanks = 64;
  constexpr std::uint32_t kFailed = 100;
  JobLedger ledger(LedgerOptions{kRanks});
  const JobId job =
      ledger.start(JobKind::kLoad, RequestId{1}, std::vector<BlockId>{BlockId{4}}, Instant{1});
  JobReport told;
  told.job = job;
  told.outcome = JobOutcome::kPartial;
  std::vector<std::vector<FailedChunk>> failed(kRanks);
  for (std::uint32_t i = 0; i < kRanks * kFailed; ++i)
    failed[i / kFailed].push_back(
        {StoreIndex{0}, i, static_cast<std::uint32_t>(ItemStatus::kMissing)});
  std::uint64_t before = allocations;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank)
    ledger.notice(Rank{rank}, told, failed[rank], Instant{});
  EXPECT_LE(allocations - before, 10u);
  before = allocations;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank)
    ledger.notice(Rank{rank}, told, failed[rank], Instant{});
  EXPECT_EQ(allocations - before, 0u) << "a second notice adds nothing";
  JobEvent event;
  ASSERT_TRUE(ledger.take_outcome(event));
  EXPECT_EQ(event.failed.size(), std::size_t{kRanks} * kFailed);
  EXPECT_EQ(ledger.counters().duplicate_notices, kRanks);
}

}  // namespace
}  // namespace kvprism
