#include "kvprism/backend/pump_thread.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kvprism/backend/blocking_store.h"
#include "kvprism/backend/clock.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/backend/wake_signal.h"
#include "kvprism/group/projection.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/layout/segment_map.h"

namespace kvprism {
namespace {

constexpr std::uint32_t kBlocks = 8;
constexpr std::uint64_t kEpoch = 7;

std::shared_ptr<const Projection> one_group() {
  CacheConfig config;
  config.num_blocks = kBlocks;
  GroupConfig group;
  group.spec.kind = "full_attention";
  group.spec.block_size = 4;
  group.spec.payload = AttentionPayload{1, 0, 8, 8, DType::kFloat16, 1};
  group.layers = {"l0"};
  config.groups = {group};
  return Projection::make(config, SpecRegistry::builtin());
}

// A worker over a memory of its own.
struct Rank {
  explicit Rank(std::shared_ptr<ObjectStore> object_store) : store(std::move(object_store)) {
    const auto projection = one_group();
    page = projection->group(GroupId{0}).page_size_bytes;
    bytes.resize(kBlocks * page);
    CacheTensor tensor;
    tensor.base = bytes.data();
    tensor.bytes = bytes.size();
    tensor.layers = {"l0"};
    tensor.layer_stride = bytes.size();
    tensor.block_stride = page;
    const auto schema = KeySchema::kvprism(
        projection, {.model = "model", .kv_quantization = "none", .hash_algorithm = "test"});
    worker = std::make_shared<StoreWorker>(schema, SegmentMap::make(projection, {tensor}), store,
                                           StoreWorkerOptions{});
    digest = schema->plan_digest();
  }

  // One job over one block.
  StepPlan plan(JobKind kind, std::uint64_t job, std::int32_t block, std::uint8_t hash) const {
    StepPlan plan;
    plan.digest = digest;
    plan.epoch = kEpoch;
    plan.step = job;
    plan.hash_width = 16;
    plan.jobs = {{JobId{job}, RequestId{1}, kind, 0, 1, 0, seconds(30)}};
    plan.runs = {{StoreIndex{0}, 0, 1, 0, 0, 4}};
    plan.ids = {BlockId{block}};
    plan.mark_tokens = {4};
    plan.mark_hashes.assign(16, hash);
    return plan;
  }

  std::byte* block(std::int32_t id) { return bytes.data() + static_cast<std::size_t>(id) * page; }

  std::uint64_t page = 0;
  std::vector<std::byte> bytes;
  Digest digest;
  std::shared_ptr<ObjectStore> store;
  std::shared_ptr<StoreWorker> worker;
};

// Waits for both ends of one job.
JobReport wait_for(StoreWorker& worker, PumpThread& pump) {
  JobReport end;
  for (int round = 0; round < 5000; ++round) {
    const std::uint64_t seen = pump.moves();
    WorkerReport report;
    if (worker.poll(report)) {
      for (const JobReport& job : report.jobs) {
        if (job.outcome != JobOutcome::kNone) end = job;
        if (job.quiet != 0) {
          end.quiet = 1;
          return end;
        }
      }
      continue;
    }
    pump.wait_moved(seen, milliseconds(10));
  }
  ADD_FAILURE() << "the job did not end";
  return end;
}

bool thread_exists(const std::string& name) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string line;
    std::getline(std::ifstream(entry.path() / "comm"), line);
    if (line == name) return true;
  }
  return false;
}

// Takes a moment for every call, as a network does.
class SlowClient final : public BlockingClient {
 public:
  StoreCapabilities capabilities() const override { return {"slow", 0, 0, false}; }
  CallEnd exists(const ObjectBatch&, std::span<ItemResult> results) noexcept override {
    return answer(results);
  }
  CallEnd put(const ObjectBatch&, std::span<ItemResult> results) noexcept override {
    return answer(results);
  }
  CallEnd get(const ObjectBatch&, std::span<ItemResult> results) noexcept override {
    return answer(results);
  }
  void register_region(const Region&) override {}
  void unregister_region(const Region&) noexcept override {}
  void tear_down() noexcept override {}

 private:
  static CallEnd answer(std::span<ItemResult> results) noexcept {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    for (ItemResult& result : results) result = {ItemStatus::kOk, 128};
    return {};
  }
};

// Never answers, and counts how often it was closed.
class SilentStore final : public ObjectStore {
 public:
  StoreCapabilities capabilities() const override { return {"silent", 0, 0, false}; }
  void add_region(const Region&) override {}
  void remove_region(const Region&) override {}
  bool start_put(OpId, std::unique_ptr<ObjectBatch>& batch, Instant, Instant) override {
    return take(batch);
  }
  bool start_get(OpId, std::unique_ptr<ObjectBatch>& batch, Instant, Instant) override {
    return take(batch);
  }
  bool poll_store(Instant, Completion&) override {
    ++polls;
    if (polls_that_throw > 0) {
      --polls_that_throw;
      throw std::runtime_error("no memory for an answer");
    }
    return false;
  }
  CloseReport close_store(Duration) override {
    if (throw_in_close) throw std::bad_alloc();
    closing = true;
    while (hang_in_close) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ++closed;
    if (returned) return {};
    return {1, {OpId{1}}};
  }

  std::atomic<int> polls{0};
  std::atomic<bool> returned{false};  // the call that it never answered
  std::atomic<int> closed{0};
  std::atomic<bool> closing{false};
  std::atomic<bool> hang_in_close{false};
  std::atomic<bool> throw_in_close{false};
  std::atomic<int> polls_that_throw{0};

 private:
  bool take(std::unique_ptr<ObjectBatch>& batch) {
    taken_.push_back(std::move(batch));
    return true;
  }
  std::vector<std::unique_ptr<ObjectBatch>> taken_;
};

TEST(MonotonicNow, DoesNotGoBack) {
  const Instant first = monotonic_now();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_GE(monotonic_now() - first, milliseconds(2));
}

TEST(WakeSignal, KeepsANoticeForTheNextWait) {
  WakeSignal signal;
  EXPECT_FALSE(signal.wait(milliseconds(1)));
  signal.notify();
  EXPECT_TRUE(signal.wait(seconds(60)));
  EXPECT_FALSE(signal.wait(milliseconds(1)));
}

TEST(WakeSignal, EndsASleepOfAnotherThread) {
  WakeSignal signal;
  std::thread other([wakeup = signal.wakeup()] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    wakeup.call(wakeup.context);
  });
  EXPECT_TRUE(signal.wait({std::numeric_limits<std::int64_t>::max()}));
  other.join();
}

TEST(WakeSignal, AWakeupMayComeAfterTheSignalIsGone) {
  Wakeup late;
  {
    const WakeSignal signal;
    late = signal.wakeup();
  }
  late.call(late.context);
  WakeSignal next;
  next.wait(milliseconds(1));
}

TEST(PumpThread, SavesAndLoadsWithoutTheEngine) {
  const auto pool = std::make_shared<MemoryPool>();
  Rank first(std::make_shared<MemoryStore>(pool));
  PumpThread pump(first.worker, first.store);
  std::memset(first.block(3), 0x5a, first.page);
  ASSERT_TRUE(first.worker->submit(first.plan(JobKind::kSave, 1, 3, 9).view(), ReadyToken::host())
                  .accepted);
  pump.notify();
  const JobReport saved = wait_for(*first.worker, pump);
  EXPECT_EQ(saved.outcome, JobOutcome::kOk);
  EXPECT_EQ(saved.bytes, first.page);
  EXPECT_EQ(pool->counters().objects, 1u);

  Rank second(std::make_shared<MemoryStore>(pool));
  PumpThread other(second.worker, second.store);
  ASSERT_TRUE(second.worker->submit(second.plan(JobKind::kLoad, 1, 5, 9).view(), ReadyToken::host())
                  .accepted);
  other.notify();
  EXPECT_EQ(wait_for(*second.worker, other).outcome, JobOutcome::kOk);
  EXPECT_EQ(std::memcmp(second.block(5), first.block(3), first.page), 0);
  EXPECT_EQ(other.stop(seconds(1)).unquiet, 0u);
}

TEST(PumpThread, MovesWithoutANoticeWithinTheInterval) {
  Rank rank(std::make_shared<MemoryStore>(std::make_shared<MemoryPool>()));
  PumpThread pump(rank.worker, nullptr, {milliseconds(1), milliseconds(5)});
  ASSERT_TRUE(
      rank.worker->submit(rank.plan(JobKind::kSave, 1, 1, 1).view(), ReadyToken::host()).accepted);
  EXPECT_EQ(wait_for(*rank.worker, pump).outcome, JobOutcome::kOk);
}

TEST(PumpThread, AStoreWithThreadsEndsItsSleep) {
  Rank rank(std::make_shared<BlockingStore>([] { return std::make_unique<SlowClient>(); }));
  PumpThread pump(rank.worker, rank.store, {seconds(60), seconds(60)});
  const Instant before = monotonic_now();
  for (std::uint64_t job = 1; job <= 5; ++job) {
    ASSERT_TRUE(rank.worker->submit(rank.plan(JobKind::kSave, job, 1, 1).view(), ReadyToken::host())
                    .accepted);
    pump.notify();
    EXPECT_EQ(wait_for(*rank.worker, pump).outcome, JobOutcome::kOk);
  }
  EXPECT_LT(monotonic_now() - before, seconds(30));
  EXPECT_EQ(pump.stop(seconds(1)).unquiet, 0u);
}

TEST(PumpThread, ASaveWaitsForItsToken) {
  class Gate final : public ReadySource {
   public:
    ReadyState query() noexcept override {
      return open.load() ? ReadyState::kReady : ReadyState::kPending;
    }
    std::atomic<bool> open{false};
  };
  const auto pool = std::make_shared<MemoryPool>();
  Rank rank(std::make_shared<MemoryStore>(pool));
  PumpThread pump(rank.worker, rank.store);
  const auto gate = std::make_shared<Gate>();
  ASSERT_TRUE(
      rank.worker->submit(rank.plan(JobKind::kSave, 1, 1, 1).view(), ReadyToken::source(gate))
          .accepted);
  pump.notify();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(pool->counters().objects, 0u);
  std::memset(rank.block(1), 0x11, rank.page);
  gate->open = true;
  EXPECT_EQ(wait_for(*rank.worker, pump).outcome, JobOutcome::kOk);
}

TEST(PumpThread, IsNamedAndBlocksSignals) {
  Rank rank(std::make_shared<MemoryStore>(std::make_shared<MemoryPool>()));
  PumpThread pump(rank.worker, rank.store);
  pump.wait_moved(pump.moves(), milliseconds(20));
  EXPECT_TRUE(thread_exists("kvp-pump"));
  sigset_t here;
  pthread_sigmask(SIG_SETMASK, nullptr, &here);
  EXPECT_FALSE(sigismember(&here, SIGTERM)) << "the caller's own mask is as before";
  pump.stop(seconds(1));
  EXPECT_FALSE(thread_exists("kvp-pump"));
}

// A call that hangs for days must not cost a thousand wakes a second.
TEST(PumpThread, SleepsWhileAJobThatHasBeenToldWaitsForItsCall) {
  const auto store = std::make_shared<SilentStore>();
  Rank rank(store);
  PumpThread pump(rank.worker, rank.store, {milliseconds(1), seconds(60)});
  StepPlan plan = rank.plan(JobKind::kSave, 1, 1, 1);
  plan.jobs[0].timeout = milliseconds(20);
  ASSERT_TRUE(rank.worker->submit(plan.view(), ReadyToken::host()).accepted);
  pump.notify();
  WorkerReport report;
  while (!rank.worker->poll(report)) pump.wait_moved(pump.moves(), milliseconds(10));
  ASSERT_EQ(report.jobs.size(), 1u);
  EXPECT_EQ(report.jobs[0].outcome, JobOutcome::kExpired);
  EXPECT_EQ(report.jobs[0].quiet, 0);
  EXPECT_EQ(rank.worker->counters().jobs_alive, 1u);
  const int before = store->polls;
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(store->polls - before, 10);
  // A job that has no outcome is looked after as before.
  plan.jobs[0].id = JobId{2};
  plan.step = 2;
  ASSERT_TRUE(rank.worker->submit(plan.view(), ReadyToken::host()).accepted);
  pump.notify();
  while (!rank.worker->poll(report)) pump.wait_moved(pump.moves(), milliseconds(10));
  EXPECT_EQ(report.jobs[0].outcome, JobOutcome::kExpired);
}

TEST(PumpThread, StopTellsWhatIsUnquietNow) {
  const auto store = std::make_shared<SilentStore>();
  Rank rank(store);
  PumpThread pump(rank.worker, rank.store);
  EXPECT_EQ(pump.stop(milliseconds(1)).unquiet, 1u);
  EXPECT_EQ(pump.stop(milliseconds(1)).unquiet, 1u);
  store->returned = true;
  EXPECT_EQ(pump.stop(milliseconds(1)).unquiet, 0u);
  EXPECT_EQ(store->closed.load(), 3);
  EXPECT_EQ(pump.stop(milliseconds(1)).unquiet, 0u);
  EXPECT_EQ(store->closed.load(), 3) << "nothing is left to ask for";
}

TEST(PumpThread, AWorkerThatComesBackLateIsToldAsQuiet) {
  const auto store = std::make_shared<SilentStore>();
  store->hang_in_close = true;
  Rank rank(store);
  PumpThread pump(rank.worker, rank.store);
  EXPECT_EQ(pump.stop(milliseconds(1)).unquiet, 1u) << "it was left behind";
  store->returned = true;
  store->hang_in_close = false;
  std::size_t unquiet = 1;
  for (int round = 0; round < 2000 && unquiet != 0; ++round) {
    unquiet = pump.stop(milliseconds(1)).unquiet;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(unquiet, 0u);
}

TEST(PumpThread, StopTellsTheSameToEveryCaller) {
  const auto store = std::make_shared<SilentStore>();
  Rank rank(store);
  PumpThread pump(rank.worker, rank.store);
  ASSERT_TRUE(
      rank.worker->submit(rank.plan(JobKind::kLoad, 1, 1, 1).view(), ReadyToken::host()).accepted);
  pump.notify();
  std::array<std::size_t, 4> unquiet{};
  std::vector<std::thread> callers;
  for (std::size_t& answer : unquiet) {
    callers.emplace_back([&pump, &answer] { answer = pump.stop(milliseconds(1)).unquiet; });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::size_t answer : unquiet) EXPECT_EQ(answer, 1u);
  EXPECT_TRUE(pump.wait_moved(pump.moves(), seconds(60))) << "nobody waits for an ended thread";
}

TEST(PumpThread, StopIsBoundedWhenTheStoreDoesNotComeBack) {
  const auto store = std::make_shared<SilentStore>();
  store->hang_in_close = true;
  Rank rank(store);
  const Instant before = monotonic_now();
  {
    PumpThread pump(rank.worker, rank.store);
    EXPECT_EQ(pump.stop(milliseconds(1)).unquiet, 1u);
    EXPECT_EQ(pump.stop(seconds(60)).unquiet, 1u) << "it was given up already";
  }
  EXPECT_LT(monotonic_now() - before, seconds(30)) << "the second stop asked for 60 s";
  // The thread that was left behind ends when the store does; the memory stays until then.
  store->hang_in_close = false;
  while (store->closed.load() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

TEST(PumpThread, TheLongestWaitsAreNotTheShortest) {
  constexpr Duration kLongest{std::numeric_limits<std::int64_t>::max()};
  const auto store = std::make_shared<SilentStore>();
  store->hang_in_close = true;
  Rank rank(store);
  PumpThread pump(rank.worker, rank.store, {kLongest, kLongest});
  std::atomic<bool> moved{false};
  std::atomic<int> closed{-1};
  std::thread waiter([&] { moved = pump.wait_moved(pump.moves(), kLongest); });
  std::thread stopper([&] {
    pump.stop(kLongest);
    closed = store->closed.load();
  });
  while (!store->closing) std::this_thread::yield();
  store->hang_in_close = false;
  waiter.join();
  stopper.join();
  EXPECT_TRUE(moved) << "nothing was waited for";
  EXPECT_EQ(closed, 1) << "stop has waited for the store";
}

TEST(PumpThread, ManyThreadsSubmitAndPoll) {
  const auto pool = std::make_shared<MemoryPool>();
  Rank rank(std::make_shared<MemoryStore>(pool));
  PumpThread pump(rank.worker, rank.store);
  std::atomic<int> ended{0};
  std::mutex order;  // plans are taken in the order of their steps
  std::uint64_t last_job = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        {
          const std::lock_guard lock(order);
          const std::uint64_t job = ++last_job;
          rank.worker->submit(
              rank.plan(JobKind::kSave, job, 1 + t, static_cast<std::uint8_t>(job)).view(),
              ReadyToken::host());
        }
        pump.notify();
        WorkerReport report;
        if (rank.worker->poll(report)) ended += static_cast<int>(report.jobs.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // A job is forgotten behind its last report.
  const auto done = [&] { return ended == 150 && rank.worker->counters().jobs_alive == 0; };
  for (int round = 0; round < 5000 && !done(); ++round) {
    const std::uint64_t seen = pump.moves();
    WorkerReport report;
    if (rank.worker->poll(report))
      ended += static_cast<int>(report.jobs.size());
    else
      pump.wait_moved(seen, milliseconds(10));
  }
  EXPECT_EQ(ended.load(), 150);
  EXPECT_EQ(pool->counters().objects, 150u);
  EXPECT_EQ(rank.worker->counters().jobs_alive, 0u);
}

TEST(PumpThread, GoesOnAfterAnException) {
  const auto store = std::make_shared<SilentStore>();
  store->polls_that_throw = 3;
  Rank rank(store);
  PumpThread pump(rank.worker, rank.store, {milliseconds(1), milliseconds(1)});
  ASSERT_TRUE(
      rank.worker->submit(rank.plan(JobKind::kLoad, 1, 1, 1).view(), ReadyToken::host()).accepted);
  pump.notify();
  for (int round = 0; round < 5000 && rank.worker->counters().gets == 0; ++round)
    pump.wait_moved(pump.moves(), milliseconds(10));
  EXPECT_EQ(rank.worker->counters().gets, 1u) << "the job was started after the errors";
  EXPECT_EQ(pump.errors(), 3u);
  EXPECT_EQ(pump.stop(milliseconds(1)).unquiet, 1u);
}

TEST(PumpThread, AnExceptionWhileClosingEndsNoProcess) {
  const auto store = std::make_shared<SilentStore>();
  store->throw_in_close = true;
  Rank rank(store);
  PumpThread pump(rank.worker, rank.store);
  EXPECT_EQ(pump.stop(seconds(1)).unquiet, 1u) << "what could not be closed may go on";
  EXPECT_EQ(pump.errors(), 1u);
}

TEST(PumpThread, RefusesNothingToPump) {
  EXPECT_THROW(PumpThread(nullptr, nullptr), Error);
  Rank rank(std::make_shared<MemoryStore>(std::make_shared<MemoryPool>()));
  EXPECT_THROW(PumpThread(rank.worker, nullptr, {Duration{0}, milliseconds(1)}), Error);
}

TEST(PumpThread, AWorkerHasOneAtATime) {
  Rank rank(std::make_shared<MemoryStore>(std::make_shared<MemoryPool>()));
  for (int round = 0; round < 2; ++round) {
    PumpThread pump(rank.worker, rank.store);
    try {
      const PumpThread second(rank.worker, rank.store);
      FAIL() << "two threads would pump one worker";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_STREQ(error.what(),
                   "pump thread: worker = in use: expected a store worker of its own (one thread "
                   "pumps it; destroy its other PumpThread first)");
    }
    if (round == 1) break;
    rank.worker->submit(rank.plan(JobKind::kSave, 1, 1, 7).view(), ReadyToken::host());
    pump.notify();
    EXPECT_EQ(wait_for(*rank.worker, pump).outcome, JobOutcome::kOk);
  }
}

}  // namespace
}  // namespace kvprism
