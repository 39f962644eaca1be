#include "kvprism/sim/world.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>

#include "kvprism/base/error.h"
#include "kvprism/sim/engine.h"
#include "kvprism/store/replay_run.h"
#include "sim/world_config.h"
#include "sim/world_judge.h"

namespace kvprism::sim {

std::string_view to_string(WorldFault kind) noexcept {
  static constexpr std::string_view kNames[kNumWorldFaults] = {"abort",
                                                               "abort while loading",
                                                               "preemption",
                                                               "report delayed",
                                                               "report duplicated",
                                                               "report garbage",
                                                               "report foreign",
                                                               "plan foreign",
                                                               "plan repeated",
                                                               "null offer",
                                                               "tokens shrunk",
                                                               "unknown request",
                                                               "late token",
                                                               "evicted",
                                                               "erased",
                                                               "unfinished",
                                                               "pool full",
                                                               "time jump",
                                                               "restart",
                                                               "quarantine",
                                                               "detached load",
                                                               "partial load",
                                                               "id reused",
                                                               "purge",
                                                               "purge done",
                                                               "object removed",
                                                               "run repeated"};
  const auto at = static_cast<std::size_t>(kind);
  return at < kNumWorldFaults ? kNames[at] : "unknown";
}

void WorldTotals::add(const WorldTotals& other) noexcept {
  events += other.events;
  requests += other.requests;
  finished += other.finished;
  aborted += other.aborted;
  computed_tokens += other.computed_tokens;
  local_hit_tokens += other.local_hit_tokens;
  external_hit_tokens += other.external_hit_tokens;
  objects_checked += other.objects_checked;
  loads += other.loads;
  jobs += other.jobs;
  clean_worlds += other.clean_worlds;
  for (std::size_t i = 0; i < faults.size(); ++i) faults[i] += other.faults[i];
  for (std::size_t i = 0; i < world_faults.size(); ++i) world_faults[i] += other.world_faults[i];
}

namespace {

using detail::SeededRandom;

constexpr std::uint32_t kDrainTurns = 5000;
constexpr std::uint64_t kReplayedSeeds = 16;  // one in so many is repeated from its recording

// One engine from its start to its restart. Members go in reverse: the engine first, the memory
// last.
struct Life {
  std::uint64_t epoch = 0;
  std::vector<std::shared_ptr<SimMemory>> memories;       // by rank
  std::vector<std::shared_ptr<FaultInjector>> injectors;  // by rank
  std::shared_ptr<FaultInjector> index;
  std::shared_ptr<StoreScheduler> scheduler;
  std::vector<std::shared_ptr<StoreWorker>> workers;  // by rank
  std::unique_ptr<JobJudge> judge;
  std::unique_ptr<Engine> engine;
};

struct HeldReport {
  WorkerReport report;
  Instant due;
};

struct Completed {
  RequestId id{};
  std::vector<std::uint32_t> tokens;
  std::uint32_t prompt = 0;  // tokens; 0 when it has started more than once
  std::uint32_t size = 0;    // tokens of the prompt
};

class WorldRun {
 public:
  explicit WorldRun(const WorldOptions& options)
      : options_(options),
        config_(make_world_config(options.seed)),
        random_(options.seed ^ 0x776f726c64ull),
        projection_(Projection::make(config_.cache, SpecRegistry::builtin())),
        schema_(KeySchema::kvprism(projection_, facts())),
        pool_(std::make_shared<MemoryPool>(config_.pool)),
        objects_(model_groups(*projection_), config_.cache.parallel.tp,
                 projection_->hit_alignment(), projection_->kv_layout()),
        step_tokens_(model_step(objects_.groups())) {
    if (options.silent_corrupt) config_.faults[FaultKind::kSilentCorrupt] = 1000;
    fit_prompts();
    for (std::uint32_t family = 0; family < config_.families; ++family) {
      families_.emplace_back();
      for (std::uint32_t i = 0; i < config_.max_prompt; ++i) families_.back().push_back(token());
    }
    result_.config = config_.describe();
    result_.totals.clean_worlds = config_.clean ? 1 : 0;
  }

  WorldResult run() {
    if (projection_->scheduler_block_size() != step_tokens_) {
      fail("S", "S is " + std::to_string(projection_->scheduler_block_size()) + ", should be " +
                    std::to_string(step_tokens_));
      return std::move(result_);
    }
    start_life();
    while (result_.passed && event_ < options_.events) {
      ++event_;
      event();
      check();
    }
    if (result_.passed) drain();
    if (result_.passed) end_life(true);
    result_.totals.events = event_;
    result_.totals.objects_checked = objects_.checked();
    count(WorldFault::kEvicted, pool_->counters().evicted);
    count(WorldFault::kPoolFull, pool_->counters().refused);
    return std::move(result_);
  }

 private:
  static KeyFacts facts() {
    KeyFacts facts;
    facts.model = "simulated";
    facts.hash_algorithm = "sim_chain";
    return facts;
  }

  std::uint32_t token() { return static_cast<std::uint32_t>(random_.below(1u << 16)); }
  void count(WorldFault kind, std::uint64_t times = 1) {
    result_.totals.world_faults[static_cast<std::size_t>(kind)] += times;
  }

  // A request may take about two thirds of the pool.
  void fit_prompts() {
    const auto blocks = [&](std::uint32_t tokens) {
      std::uint32_t total = 0;
      for (const GroupModel& group : objects_.groups()) {
        const std::uint32_t all = tokens / group.tokens + 1;
        if (group.kind == GroupModel::Kind::kFull) total += all;
        if (group.kind == GroupModel::Kind::kWindow || group.kind == GroupModel::Kind::kChunk) {
          total += std::min(all, (group.window + config_.engine.token_budget) / group.tokens + 2);
        }
        if (group.kind == GroupModel::Kind::kState) total += group.fine ? 3 : 2;
        if (group.kind == GroupModel::Kind::kRing) total += 1;
      }
      return total;
    };
    while (config_.max_prompt > 2 * step_tokens_ &&
           blocks(config_.max_prompt + config_.max_new_tokens) > config_.cache.num_blocks * 2 / 3) {
      config_.max_prompt -= 2;
    }
  }

  bool tracing() const { return event_ >= options_.trace_from; }
  void trace(const std::string& line) {
    if (!tracing()) return;
    result_.trace.push_back("#" + std::to_string(event_) + " at " + std::to_string(now_.ns / 1000) +
                            " us: " + line + " [" + life_.engine->describe() + "]");
    life_.judge->set_trace(&result_.trace);
  }

  void fail(std::string invariant, std::string what) {
    if (!result_.passed) return;
    result_.passed = false;
    result_.failed_at = event_;
    result_.invariant = std::move(invariant);
    result_.failure = std::move(what);
  }

  void start_life() {
    life_.epoch = random_.next() | 1;
    std::vector<EngineRank> ranks;
    for (std::uint32_t r = 0; r < config_.cache.parallel.tp; ++r) {
      const auto memory = std::make_shared<SimMemory>(*projection_, config_.memory);
      config_.faults.seed = random_.next();
      const auto injector = std::make_shared<FaultInjector>(
          std::make_shared<MemoryStore>(pool_, config_.store), nullptr, config_.faults);
      StoreWorkerOptions worker = config_.worker;
      worker.rank = Rank{r};
      life_.memories.push_back(memory);
      life_.injectors.push_back(injector);
      life_.workers.push_back(std::make_shared<StoreWorker>(
          schema_, SegmentMap::make(projection_, memory->tensors()), injector, worker));
      ranks.push_back({life_.workers.back(), memory});
    }
    config_.faults.seed = random_.next();
    life_.index = std::make_shared<FaultInjector>(
        nullptr, std::make_shared<MemoryStore>(pool_, config_.store), config_.faults);
    config_.scheduler.epoch = life_.epoch;
    config_.scheduler.ranks = config_.cache.parallel.tp;
    recording_.clear();
    if (options_.seed % kReplayedSeeds == 0) {
      config_.scheduler.record = {[](void* to, std::span<const std::byte> more) {
                                    auto& all = *static_cast<std::vector<std::byte>*>(to);
                                    all.insert(all.end(), more.begin(), more.end());
                                    return true;
                                  },
                                  &recording_};
    }
    life_.scheduler = std::make_shared<StoreScheduler>(schema_, life_.index, config_.scheduler);
    life_.judge = std::make_unique<JobJudge>(objects_, *projection_, config_.scheduler,
                                             config_.clean, step_tokens_);
    life_.judge->set_held_channel(config_.hold_reports ? &channel_ : nullptr);
    life_.judge->set_now(now_);
    life_.engine = std::make_unique<Engine>(projection_, life_.scheduler, std::move(ranks),
                                            config_.engine, life_.judge.get());
  }

  void end_life(bool drained) {
    life_.engine->finish_step(now_);
    const Duration budget = drained || random_.chance(1, 2) ? seconds(1) : Duration{};
    for (std::uint32_t r = 0; r < life_.workers.size(); ++r) {
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
    }
    life_.index->close_index({});
    if (!recording_.empty()) {
      const ReplayRunResult replay = replay_run(recording_);
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
    count(WorldFault::kDetachedLoad, stats.loads_detached);
    count(WorldFault::kPartialLoad, stats.loads_partial);
    count(WorldFault::kObjectRemoved, life_.scheduler->counters().objects_removed);
    count(WorldFault::kQuarantine, life_.scheduler->counters().ledger.quarantined);

    // Native code may still own parts of it.
    graveyard_.insert(graveyard_.end(), life_.memories.begin(), life_.memories.end());
    life_ = Life();
    purging_ = false;
    live_.clear();
    leaving_.clear();
    completed_.clear();
  }

  // One thing happens.
  void event() {
    now_ = now_ + Duration{static_cast<std::int64_t>(random_.below(600'000))};
    life_.judge->set_now(now_);
    const std::uint64_t roll = random_.below(1000);
    if (roll < 380) {
      step_event();
    } else if (roll < 640) {
      pump_event();
    } else if (roll < 800) {
      deliver_event();
    } else if (roll < 930) {
      submit_event();
    } else if (roll < 945) {
      abort_event();
    } else if (roll < 955) {
      trace("hung operations go on");
      release_hung();
    } else if (roll < 965) {
      object_event();
    } else if (roll < 975) {
      now_ = now_ + milliseconds(static_cast<std::int64_t>(random_.between(10, 200)));
      life_.judge->set_now(now_);
      count(WorldFault::kTimeJump);
      trace("time jumps");
    } else if (roll < 998) {
      noise_event();
    } else if (config_.restarts) {
      trace("restart");
      count(WorldFault::kRestart);
      end_life(false);
      start_life();
    }
    take_finished();
  }

  void release_hung() {
    for (const auto& injector : life_.injectors) injector->release_hung();
  }

  void step_event() {
    if (life_.engine->step_in_flight()) {
      trace("finish step");
      life_.engine->finish_step(now_);
    } else {
      trace("begin step");
      life_.engine->begin_step(now_);
    }
  }

  void pump_event() {
    trace("pump");
    if (life_.engine->step_in_flight()) count(WorldFault::kLateToken);
    life_.engine->pump(now_);
    for (WorkerReport& report : channel_) {
      const auto within = [&](std::uint64_t ms) {
        return now_ + Duration{static_cast<std::int64_t>(random_.below(ms * 1'000'000))};
      };
      const Instant due = within(random_.chance(1, 4) ? 40 : 8);
      queue_.push_back({report, due});
      if (random_.chance(1, 8)) {
        // At once, or when it is long forgotten.
        count(WorldFault::kReportDuplicated);
        queue_.push_back({std::move(report), random_.chance(1, 2) ? due : within(60)});
      }
    }
    channel_.clear();
  }

  void deliver_event() {
    trace("deliver");
    bytes_.clear();
    for (std::size_t i = 0; i < queue_.size();) {
      if (queue_[i].due > now_ && config_.reorder_reports) {
        ++i;
        continue;
      }
      if (queue_[i].due > now_) break;
      if (i > 0) count(WorldFault::kReportDelayed);
      const WorkerReport report = std::move(queue_[i].report);
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
      if (random_.chance(1, 20)) stale_.push_back(report);
      life_.judge->delivered(report, now_);
      encode(report, encoded_);
      bytes_.insert(bytes_.end(), encoded_.begin(), encoded_.end());
    }
    while (stale_.size() > 4) stale_.pop_front();
    if (!bytes_.empty()) life_.engine->deliver(bytes_, now_);
  }

  bool leaving(RequestId request) const {
    return std::find(leaving_.begin(), leaving_.end(), request) != leaving_.end();
  }

  void submit_event() {
    if (life_.engine->unfinished() >= config_.max_requests) {
      step_event();
      return;
    }
    RequestId id{next_request_++};
    if (!past_.empty() && random_.chance(1, 3)) {
      const RequestId past = past_[random_.below(past_.size())];
      if (!leaving(past) && std::find(live_.begin(), live_.end(), past) == live_.end()) {
        count(WorldFault::kIdReused);
        id = past;
      }
    }
    submit(id);
  }

  void submit(RequestId id) {
    Request request;
    request.id = id;
    const auto& base = !turns_.empty() && random_.chance(1, 3)
                           ? turns_[random_.below(turns_.size())]
                           : families_[random_.below(families_.size())];
    const std::size_t longest = std::min<std::size_t>(base.size(), config_.max_prompt);
    const std::size_t kept = random_.chance(1, 2) ? longest : random_.below(longest + 1);
    request.prompt.assign(base.begin(), base.begin() + static_cast<std::ptrdiff_t>(kept));
    const std::uint64_t more = random_.below(1 + config_.max_prompt - kept);
    for (std::uint64_t i = 0; i < std::min<std::uint64_t>(more, 24); ++i) {
      request.prompt.push_back(token());
    }
    if (request.prompt.empty()) request.prompt.push_back(token());
    request.max_new_tokens = static_cast<std::uint32_t>(random_.between(1, config_.max_new_tokens));
    trace("submit request " + std::to_string(raw(request.id)) + " of " +
          std::to_string(request.prompt.size()) + " tokens");
    live_.push_back(request.id);
    prompts_[raw(request.id)] = request.prompt;
    life_.engine->submit(std::move(request));
  }

  void abort_event() {
    if (live_.empty()) return;
    RequestId request = live_[random_.below(live_.size())];
    const auto loading = std::find_if(live_.begin(), live_.end(),
                                      [&](RequestId live) { return life_.judge->loading(live); });
    if (loading != live_.end() && random_.chance(1, 2)) request = *loading;
    trace("abort request " + std::to_string(raw(request)));
    count(WorldFault::kAbort);
    const bool while_loading = life_.judge->loading(request);
    if (while_loading) count(WorldFault::kAbortLoading);
    std::erase(live_, request);
    leaving_.push_back(request);
    life_.engine->abort(request);
    take_finished();
    // Its load goes on, and ends for a request that is another one by then.
    if (while_loading && !leaving(request) && random_.chance(1, 2)) {
      count(WorldFault::kIdReused);
      submit(request);
    }
  }

  void object_event() {
    if (!config_.erase_objects || config_.clean || keys_.empty()) return;
    const std::string& key = keys_[random_.below(keys_.size())];
    trace("object " + key + " goes");
    if (!pool_->erase(key)) return;
    if (random_.chance(1, 2)) {
      count(WorldFault::kErased);
    } else {
      count(WorldFault::kUnfinished);
      pool_->add_unfinished(key, 64, now_);
    }
  }

  void noise_event() {
    StoreScheduler& scheduler = *life_.scheduler;
    switch (random_.below(7)) {
      case 6:
        if (!config_.clean) purge_event();
        break;
      case 0: {
        trace("calls for an unknown request");
        count(WorldFault::kUnknownRequest);
        const RequestId unknown{1'000'000 + random_.below(100)};
        scheduler.finished(unknown, FinishReason::kAborted);
        scheduler.preempted(unknown);
        scheduler.boundary(unknown, GroupId{0}, BlockId{1}, step_tokens_);
        if (!scheduler.wants_save(unknown, now_).empty())
          fail("unknown request", "it wants to be saved");
        break;
      }
      case 1:
        if (live_.empty()) break;
        trace("a state is offered in the null block");
        count(WorldFault::kNullOffer);
        for (const GroupModel& group : objects_.groups()) {
          scheduler.boundary(live_[random_.below(live_.size())], group.id, kNullBlock,
                             step_tokens_);
        }
        break;
      case 2:
        if (live_.empty() || life_.engine->step_in_flight()) break;
        trace("accepted tokens shrink");
        count(WorldFault::kShrunk);
        scheduler.advanced(live_[random_.below(live_.size())],
                           static_cast<std::uint32_t>(random_.below(4)), HashList{});
        break;
      case 3: {
        trace("garbage instead of a report");
        count(WorldFault::kReportGarbage);
        std::vector<std::byte> garbage(8 * random_.below(12));
        for (std::byte& byte : garbage) byte = static_cast<std::byte>(random_.next());
        scheduler.report(std::span<const std::byte>(garbage), now_);
        break;
      }
      case 4: {
        if (stale_.empty()) break;
        const WorkerReport& old = stale_[random_.below(stale_.size())];
        trace("an old report again");
        count(old.epoch == life_.epoch ? WorldFault::kReportDuplicated
                                       : WorldFault::kReportForeign);
        encode(old, encoded_);
        life_.engine->deliver(encoded_, now_);
        break;
      }
      default:
        foreign_plan();
        break;
    }
  }

  void purge_event() {
    trace("purge");
    count(WorldFault::kPurge);
    life_.judge->purged();
    life_.engine->purge(now_);
    purging_ = true;
  }

  // Nothing may be saved before it is done, so that whatever lies there then is older.
  void check_purge() {
    if (!purging_ || life_.scheduler->purge_status().active()) return;
    purging_ = false;
    count(WorldFault::kPurged);
    objects_.forget_stored();
    pool_->for_each_object([&](std::string_view key, std::span<const std::byte>) {
      fail("purge", "an object is left: " + std::string(key));
    });
  }

  // A plan that is not the next one of this worker's scheduler must be refused, whatever is wrong.
  void foreign_plan() {
    trace("a foreign plan");
    count(WorldFault::kPlanForeign);
    const std::uint32_t chunk_tokens = projection_->group(StoreIndex{0}).tokens_per_block;
    StepPlan plan;
    plan.digest = projection_->digest();
    plan.epoch = life_.epoch;
    plan.step = UINT64_MAX;
    plan.hash_width = sizeof(BlockHash);
    plan.jobs.push_back({JobId{(std::uint64_t{1} << 60) + random_.below(1000)}, RequestId{1},
                         JobKind::kLoad, 0, 1, 0, seconds(1)});
    plan.runs.push_back({StoreIndex{0}, 0, 1, 0, 0, chunk_tokens});
    plan.ids.push_back(BlockId{1});
    plan.mark_tokens.push_back(chunk_tokens);
    plan.mark_hashes.assign(sizeof(BlockHash), 7);
    static constexpr std::array<const char*, 7> kWhat{
        "another digest", "an unknown block",      "the null block", "an unknown group",
        "a shifted mark", "a partly filled chunk", "another epoch"};
    // The epoch is known only once a first plan has come.
    const std::uint64_t wrong = random_.below(life_.judge->jobs() > 0 ? kWhat.size() : 6);
    if (wrong == 0) plan.digest.bytes[random_.below(plan.digest.bytes.size())] ^= 1;
    if (wrong == 1) plan.ids[0] = BlockId{static_cast<std::int32_t>(projection_->num_blocks())};
    if (wrong == 2) plan.ids[0] = kNullBlock;
    if (wrong == 3) {
      const auto groups = static_cast<std::uint32_t>(projection_->num_store_groups());
      plan.runs[0].group = StoreIndex{groups};
    }
    if (wrong == 4) plan.mark_tokens[0] += chunk_tokens;
    if (wrong == 5) --plan.runs[0].valid_tokens_last;
    if (wrong == 6) plan.epoch ^= 2;
    StoreWorker& worker = *life_.workers[random_.below(life_.workers.size())];
    const SubmitResult answer = worker.submit(plan.view(), ReadyToken::host());
    if (answer.accepted) {
      fail("foreign plan", std::string("a worker takes a plan with ") + kWhat[wrong]);
    } else if (answer.refusal.empty()) {
      fail("foreign plan", "a worker refuses a plan without a reason");
    }
    const auto& last = life_.judge->last_plan();
    if (last.empty()) return;
    count(WorldFault::kPlanRepeated);
    if (worker.submit(last, ReadyToken::host()).accepted) {
      fail("foreign plan", "a worker takes a plan twice");
    }
  }

  void take_finished() {
    finished_.clear();
    life_.engine->take_finished(finished_);
    for (FinishedRequest& request : finished_) {
      std::erase(live_, request.id);
      std::erase(leaving_, request.id);
      life_.judge->forget(request.id);
      if (request.rejected) continue;
      // Their jobs may still be running.
      past_.push_back(request.id);
      if (past_.size() > 3) past_.pop_front();
      std::vector<std::uint32_t> tokens = std::move(prompts_[raw(request.id)]);
      tokens.insert(tokens.end(), request.output.begin(), request.output.end());
      if (request.aborted) continue;
      // One that was preempted has started again somewhere else.
      const std::uint32_t prompt = request.preemptions == 0 ? request.prompt_tokens : 0;
      if (config_.clean) completed_.push_back({request.id, tokens, prompt, request.prompt_tokens});
      if (turns_.size() < 16) turns_.emplace_back();
      turns_[random_.below(turns_.size())] = std::move(tokens);
    }
  }

  void check() {
    const std::string engine = life_.engine->check();
    if (!engine.empty()) {
      const std::size_t colon = engine.find(':');
      fail(engine.substr(0, colon), engine.substr(colon + 2));
    }
    if (!life_.judge->broken().empty()) fail(life_.judge->invariant(), life_.judge->broken());
    check_purge();
    // Of one whose request has just been aborted the scheduler knows no key.
    if (life_.judge->mismatches() >= 4 && life_.scheduler->counters().mismatches == 0)
      fail("mismatch", "a damaged object is left in its place");
    const std::string references = life_.judge->check_references();
    if (!references.empty()) fail("references", references);
    version_ = pool_->for_each_new_object_since(
        version_, [&](std::string_view key, std::span<const std::byte> bytes) {
          const std::string wrong = objects_.check(key, bytes);
          if (!wrong.empty()) fail("object", wrong);
          if (!config_.erase_objects) return;
          if (keys_.size() < 128) keys_.emplace_back();
          keys_[random_.below(keys_.size())] = key;
        });
    if (event_ % 128 == 0) verify();
  }

  // The slow way to the same answer as the shadow's: everything believed, against the oracle.
  void verify() {
    const VerifyResult all = life_.engine->verify_all();
    if (all.mismatched != 0) {
      fail("oracle", std::to_string(all.mismatched) + " of " + std::to_string(all.bytes) +
                         " believed bytes are wrong: " + all.first);
    }
  }

  bool drained() const {
    return life_.engine->idle() && life_.scheduler->tracked() == 0 && queue_.empty() &&
           channel_.empty() && !life_.scheduler->purge_status().active();
  }

  // No more work and no more faults: everything must come to its end.
  void drain() {
    life_.index->set_plan(FaultPlan{});
    for (const auto& injector : life_.injectors) injector->set_plan(FaultPlan{});
    for (std::uint32_t turn = 0; turn < kDrainTurns && result_.passed && !drained(); ++turn) {
      ++event_;
      now_ = now_ + milliseconds(2);
      life_.judge->set_now(now_);
      release_hung();
      step_event();
      pump_event();
      for (HeldReport& held : queue_) held.due = now_;
      deliver_event();
      take_finished();
      check();
    }
    if (!result_.passed) return;
    if (!drained()) {
      fail("drain", "never ends: " + life_.engine->describe() + ", " +
                        std::to_string(life_.scheduler->tracked()) + " tracked, " +
                        std::to_string(queue_.size()) + " reports");
      return;
    }
    verify();
    const std::string ended = life_.judge->check_ended();
    if (!ended.empty()) fail("drain", ended);
    for (const auto& worker : life_.workers) {
      const StoreWorkerCounters counters = worker->counters();
      if (counters.jobs_alive == 0 && counters.unquiet_calls == 0) continue;
      fail("drain", "a worker still knows " + std::to_string(counters.jobs_alive) + " jobs and " +
                        std::to_string(counters.unquiet_calls) + " calls that are not quiet");
    }
    const LedgerCounters ledger = life_.scheduler->counters().ledger;
    if (ledger.blocks_held != 0 || ledger.blocks_in_quarantine != 0) {
      fail("drain", "the ledger still holds " + std::to_string(ledger.blocks_held) + " blocks");
    }
    for (const Completed& done : completed_) {
      TokenTrail trail(projection_->hash_block_size());
      trail.append(done.tokens);
      const std::uint32_t computed = trail.size() - 1;
      const bool partial = objects_.alignment() < step_tokens_;
      for (const std::uint32_t end :
           {computed - computed % step_tokens_,
            partial ? model_checkpoint(done.prompt, objects_.alignment()) : 0}) {
        const auto missing = objects_.missing(trail, 0, end, end);
        if (!missing) continue;
        // A request that leaves before its next step never offers its last state, and long steps
        // pass states by.
        const GroupModel& group = objects_.groups()[raw(missing->group)];
        const bool state = group.kind == GroupModel::Kind::kState;
        // Nor are generated tokens whose blocks are gone before a step is full.
        if (group.gap_window != 0 && missing->chunk >= group.chunks(done.size)) continue;
        if (state && (config_.engine.offer_states_late || !config_.engine.aligned_steps)) continue;
        fail("not stored", "a request of " + std::to_string(computed) +
                               " computed tokens is not stored up to " + std::to_string(end) +
                               ": group " + std::to_string(raw(missing->group)) + ", chunk " +
                               std::to_string(missing->chunk) + " of request " +
                               std::to_string(raw(done.id)));
      }
    }
  }

  const WorldOptions options_;
  WorldConfig config_;
  SeededRandom random_;
  Instant now_{1'000'000'000};
  std::uint32_t event_ = 0;
  WorldResult result_;

  std::shared_ptr<const Projection> projection_;
  std::shared_ptr<const KeySchema> schema_;
  std::shared_ptr<MemoryPool> pool_;
  ObjectJudge objects_;
  const std::uint32_t step_tokens_;
  std::uint64_t version_ = 0;
  std::vector<std::shared_ptr<SimMemory>> graveyard_;
  Life life_;

  std::vector<WorkerReport> channel_;
  std::deque<HeldReport> queue_;
  std::deque<WorkerReport> stale_;
  std::vector<std::byte> encoded_;
  std::vector<std::byte> bytes_;

  std::vector<std::vector<std::uint32_t>> families_;
  std::vector<std::vector<std::uint32_t>> turns_;  // conversations that may go on
  std::vector<Completed> completed_;               // in clean worlds
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> prompts_;
  std::uint64_t next_request_ = 1;
  std::vector<RequestId> live_;
  std::vector<RequestId> leaving_;  // aborted, but not gone yet
  std::deque<RequestId> past_;      // ended lately
  std::vector<FinishedRequest> finished_;
  std::vector<std::string> keys_;
  bool purging_ = false;
  std::vector<std::byte> recording_;
};

}  // namespace

WorldResult run_world(const WorldOptions& options) { return WorldRun(options).run(); }

}  // namespace kvprism::sim
