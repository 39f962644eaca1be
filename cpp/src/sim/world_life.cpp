// One engine from its start to its restart, and what it leaves to the totals.
#include "sim/world_run.h"

#include <algorithm>

#include "kvprism/store/replay_run.h"

namespace kvprism::sim {
namespace {

constexpr std::uint64_t kReplayedSeeds = 16;  // one in so many is repeated from its recording

}  // namespace

// A rank's process, in the place of the one before.
EngineRank WorldRun::start_rank(std::uint32_t rank, std::uint64_t faults_seed) {
  const ParallelSizes& parallel = config_.cache.parallel;
  const std::uint32_t stage = rank / parallel.tp / parallel.pcp;
  const std::shared_ptr<const KeySchema>& schema = stages_[stage];
  SimMemoryOptions own = config_.memory;
  own.first_layers = config_.stages[stage].first_layers;
  const auto memory = std::make_shared<SimMemory>(schema->projection(), own);
  config_.faults.seed = faults_seed;
  const auto injector = std::make_shared<FaultInjector>(
      std::make_shared<MemoryStore>(pool_, config_.store), nullptr, config_.faults);
  // What a put reads late must still be what its key says.
  injector->set_late_read([this](std::string_view key, std::span<const std::byte> bytes) {
    const std::string wrong = objects_.check(key, bytes);
    if (!wrong.empty()) fail("quiet", "before its put is quiet, " + wrong);
  });
  StoreWorkerOptions worker = config_.worker;
  worker.rank = Rank{rank};
  life_.memories[rank] = memory;
  life_.injectors[rank] = injector;
  life_.flights[rank] = std::make_shared<FlightWatch>(injector, config_.worker.max_bytes_in_flight);
  life_.workers[rank] = std::make_shared<StoreWorker>(
      schema, SegmentMap::make(schema->projection().shared_from_this(), memory->tensors()),
      life_.flights[rank], worker);
  return {life_.workers[rank], memory};
}

void WorldRun::start_life() {
  life_.epoch = random_.next() | 1;
  std::vector<EngineRank> ranks;
  const ParallelSizes& parallel = config_.cache.parallel;
  life_.memories.resize(parallel.world());
  life_.injectors.resize(parallel.world());
  life_.flights.resize(parallel.world());
  life_.workers.resize(parallel.world());
  for (std::uint32_t r = 0; r < parallel.world(); ++r)
    ranks.push_back(start_rank(r, random_.next()));
  const auto cut = [](const CacheTensor& tensor) { return tensor.kernel_block_size != 0; };
  const std::vector<CacheTensor>& tensors = life_.memories[0]->tensors();
  if (std::any_of(tensors.begin(), tensors.end(), cut)) count(WorldFault::kKernelBlocks);
  config_.faults.seed = random_.next();
  life_.index = std::make_shared<FaultInjector>(
      nullptr, std::make_shared<MemoryStore>(pool_, config_.store), config_.faults);
  life_.watch = std::make_shared<RemovalWatch>(
      life_.index, *pool_,
      RemovalWatch::Lookups{.keys = objects_.bare_stages(),
                            .answers = config_.scheduler.tell_changes});
  config_.scheduler.epoch = life_.epoch;
  config_.scheduler.ranks = parallel.world();
  recording_.clear();
  if (options_.seed % kReplayedSeeds == 0) {
    config_.scheduler.record = {[](void* to, std::span<const std::byte> more) {
                                  auto& all = *static_cast<std::vector<std::byte>*>(to);
                                  all.insert(all.end(), more.begin(), more.end());
                                  return true;
                                },
                                &recording_};
  }
  life_.scheduler = std::make_shared<StoreScheduler>(schema_, life_.watch, config_.scheduler);
  life_.judge = std::make_unique<JobJudge>(objects_, *projection_, config_.scheduler, config_.clean,
                                           step_tokens_);
  life_.judge->answer_for_all(config_.worker.only);
  life_.judge->set_held_channel(config_.hold_reports ? &channel_ : nullptr);
  life_.watch->set_judge(life_.judge.get());
  life_.judge->set_now(now_);
  life_.judge->set_moment([this] { in_a_step(); });
  life_.engine = std::make_unique<Engine>(projection_, life_.scheduler, std::move(ranks),
                                          config_.engine, life_.judge.get());
}

void WorldRun::end_life(bool drained) {
  life_.engine->finish_step(now_);
  const Duration budget = drained || random_.chance(1, 2) ? seconds(1) : Duration{};
  for (std::uint32_t r = 0; r < life_.workers.size(); ++r) {
    if (r == dead_) continue;
    const CloseReport closed = life_.workers[r]->close(now_, budget);
    WorkerReport report;
    while (life_.workers[r]->poll(report)) {
      life_.judge->hold_report(report);
      stale_.push_back(report);
    }
    const std::string broken = life_.judge->check_closed(r, closed.unquiet);
    if (!broken.empty()) fail("close", broken);
    if (drained && closed.unquiet != 0)
      fail("close", std::to_string(closed.unquiet) + " operations are not quiet");
    if (life_.injectors[r]->unquiet() != 0)
      ghosts_.push_back({life_.injectors[r], life_.memories[r]});
  }
  life_.index->close_index({});
  if (!recording_.empty()) {
    const ReplayRunResult replay = replay_run(recording_, world_registry());
    if (!replay.same) fail("replay", replay.difference);
    count(WorldFault::kReplayed);
  }
  if (!life_.judge->broken().empty()) fail(life_.judge->invariant(), life_.judge->broken());
  channel_.clear();
  queue_.clear();
  while (stale_.size() > 4) stale_.pop_front();

  WorldTotals& totals = result_.totals;
  const EngineStats& stats = life_.engine->stats();
  totals.requests += stats.submitted;
  totals.finished += stats.finished;
  totals.aborted += stats.aborted;
  totals.computed_tokens += stats.computed_tokens;
  totals.local_hit_tokens += stats.local_hit_tokens;
  totals.external_hit_tokens += stats.external_hit_tokens;
  totals.loads += life_.judge->loads();
  totals.jobs += life_.judge->jobs();
  const auto add_faults = [&](const FaultInjector& injector) {
    for (const FaultCount& row : injector.table())
      totals.faults[static_cast<std::size_t>(row.kind)] += row.raised;
  };
  add_faults(*life_.index);
  for (const auto& injector : life_.injectors) add_faults(*injector);
  count(WorldFault::kPreemption, stats.preemptions);
  count(WorldFault::kResumedAtOnce, stats.resumed_at_once);
  count(WorldFault::kPlanLost, life_.judge->plans_lost());
  count(WorldFault::kDraftRejected, stats.rejected_tokens);
  count(WorldFault::kDetachedLoad, stats.loads_detached);
  count(WorldFault::kPartialLoad, stats.loads_partial);
  count(WorldFault::kObjectRemoved, life_.scheduler->counters().objects_removed);
  for (const auto& worker : life_.workers)
    count(WorldFault::kSavesHeldUp, worker->counters().saves_held_up);
  count(WorldFault::kSavesHeldBack, life_.scheduler->counters().saves_held_back);
  count(WorldFault::kAvoided, life_.scheduler->counters().chunks_avoided);
  count(WorldFault::kQuarantine, life_.scheduler->counters().ledger.quarantined);

  // Native code may still own parts of it.
  graveyard_.insert(graveyard_.end(), life_.memories.begin(), life_.memories.end());
  life_ = Life();
  dead_.reset();
  purging_ = false;
  mode_ = StoreMode::kReadWrite;
  live_.clear();
  leaving_.clear();
  completed_.clear();
}

void WorldRun::restart() {
  trace("restart");
  count(WorldFault::kRestart);
  end_life(false);
  start_life();
}

}  // namespace kvprism::sim
