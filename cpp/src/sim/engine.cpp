#include "kvprism/sim/engine.h"

#include <algorithm>
#include <utility>

#include "kvprism/base/error.h"
#include "sim/engine_impl.h"

namespace kvprism::sim {

Engine::Engine(std::shared_ptr<const Projection> projection,
               std::shared_ptr<StoreScheduler> scheduler, std::vector<EngineRank> ranks,
               const EngineOptions& options, EngineObserver* observer)
    : impl_(std::make_unique<Impl>()) {
  ProblemList problems;
  if (!projection) problems.add("projection", "null", "a projection");
  if (!scheduler) problems.add("scheduler", "null", "a store scheduler");
  if (ranks.empty()) problems.add("ranks", "0", "at least one worker with its memory");
  for (const EngineRank& rank : ranks) {
    if (!rank.worker || !rank.memory) problems.add("ranks", "null", "a worker and its memory");
  }
  problems.throw_if_any(ErrorCode::kInvalidArgument, "simulated engine");
  Impl& e = *impl_;
  e.projection = std::move(projection);
  e.scheduler = std::move(scheduler);
  e.ranks = std::move(ranks);
  e.options = options;
  e.observer = observer == nullptr ? &e.silent : observer;
  e.groups = model_groups(*e.projection);
  for (std::uint32_t rank = 0; rank < e.ranks.size(); ++rank) {
    const ParallelSizes& parallel = e.projection->parallel();
    const std::uint32_t tensor_rank = rank % parallel.tp;
    const std::uint32_t prefill_rank = rank / parallel.tp % parallel.pcp;
    const SimMemory& memory = *e.ranks[rank].memory;
    std::vector<std::vector<PageShape>>& of_rank = e.shapes.emplace_back();
    for (const GroupModel& group : e.groups) {
      std::vector<PageShape>& layers = of_rank.emplace_back();
      for (std::uint32_t layer = 0; layer < memory.num_layers(group.id); ++layer)
        layers.push_back(
            group.of_rank(memory.page_shape(group.id, layer), tensor_rank, prefill_rank));
    }
  }
  e.drafts = model_drafts(e.groups);
  e.step_tokens = e.projection->scheduler_block_size();
  e.alignment = e.projection->hit_alignment();
  e.replay = model_replay(e.groups);
  e.has_state = std::any_of(e.groups.begin(), e.groups.end(), [](const GroupModel& group) {
    return group.kind == GroupModel::Kind::kState;
  });
  e.options.token_budget = std::max(options.token_budget, e.step_tokens);
  e.options.max_running = std::max(options.max_running, 1U);
  e.pool = BlockPool(e.projection->num_blocks());
  e.held.assign(e.projection->num_blocks(), 0);
  for (const GroupModel& group : e.groups) e.stats.groups.push_back({group.id, 0, 0, 0});
}

Engine::~Engine() = default;

void Engine::submit(Request request) {
  Impl& e = *impl_;
  ++e.stats.submitted;
  e.stats.prompt_tokens += request.prompt.size();
  if (e.sequences.contains(raw(request.id)) || !e.can_ever_fit(request)) {
    ++e.stats.rejected;
    FinishedRequest result;
    result.id = request.id;
    result.rejected = true;
    result.prompt_tokens = static_cast<std::uint32_t>(request.prompt.size());
    e.finished.push_back(std::move(result));
    return;
  }
  auto sequence = std::make_unique<Sequence>(request.id, e.projection->hash_block_size());
  sequence->trail.append(request.prompt);
  sequence->prompt_tokens = static_cast<std::uint32_t>(request.prompt.size());
  sequence->max_new_tokens = request.max_new_tokens;
  sequence->tables.resize(e.groups.size());
  sequence->result.id = request.id;
  if (!request.access.load || !request.access.save)
    e.scheduler->restrict(request.id, request.access);
  e.waiting.push_back(sequence.get());
  e.sequences.emplace(raw(request.id), std::move(sequence));
}

void Engine::abort(RequestId request) {
  if (impl_->in_flight) {
    impl_->late_aborts.push_back(request);
  } else {
    impl_->abort_now(request);
  }
}

bool Engine::begin_step(Instant now) {
  Impl& e = *impl_;
  if (e.in_flight) return !e.scheduled.empty();
  e.in_flight = true;
  ++e.stats.steps;
  e.fence = std::make_shared<StepFence>();
  e.scheduled.clear();
  e.schedule(now);
  e.observer->scheduled();
  e.connect(now);
  return !e.scheduled.empty();
}

void Engine::finish_step(Instant) {
  Impl& e = *impl_;
  if (!e.in_flight) return;
  e.in_flight = false;
  for (Scheduled& work : e.scheduled) {
    for (std::uint32_t i = 0; i < work.accepted; ++i) e.generate(*work.sequence);
    e.draft(work);
    work.to += work.accepted;
    e.execute(work);
  }
  e.fence->fire();
  for (const Scheduled& work : e.scheduled) {
    Sequence& sequence = *work.sequence;
    sequence.computed = work.to;
    e.remember(sequence, work.from, work.to);
    if (work.to < sequence.trail.size()) continue;
    e.generate(sequence);
    if (sequence.trail.size() < sequence.prompt_tokens + sequence.max_new_tokens) continue;
    e.scheduler->finished(sequence.id, FinishReason::kCompleted);
    e.observer->left(sequence.id);
    std::erase(e.running, &sequence);
    e.finish(sequence, false);
    e.sequences.erase(raw(sequence.id));
  }
  e.scheduled.clear();
  for (const RequestId request : e.late_aborts) e.abort_now(request);
  e.late_aborts.clear();
}

void Engine::purge(Instant now) {
  Impl& e = *impl_;
  for (const auto& [id, sequence] : e.sequences) {
    if (sequence->computed == 0) continue;
    // Of one that waits for a load the scheduler knows.
    if (sequence->phase != Sequence::Phase::kLoading)
      e.scheduler->advanced(sequence->id, sequence->computed, HashList{});
    e.observer->outdated(sequence->id);
  }
  e.scheduler->purge(now);
}

bool Engine::step_in_flight() const noexcept { return impl_->in_flight; }

bool Engine::pump(Instant now) {
  Impl& e = *impl_;
  bool moved = false;
  for (std::uint32_t r = 0; r < e.ranks.size(); ++r) {
    const EngineRank& rank = e.ranks[r];
    if (!e.observer->moves(r)) continue;
    if (e.options.pump_workers) moved |= rank.worker->pump(now);
    while (rank.worker->poll(e.report)) {
      moved = true;
      if (!e.observer->hold_report(e.report)) e.scheduler->report(e.report, now);
    }
  }
  e.settle();
  return moved;
}

void Engine::deliver(std::span<const std::byte> reports, Instant now) {
  impl_->scheduler->report(reports, now);
  impl_->settle();
}

void Engine::rank_gone(Rank rank, Instant now) {
  impl_->scheduler->rank_gone(rank, now);
  impl_->settle();
}

void Engine::empty_cache() {
  Impl& e = *impl_;
  std::vector<BlockId> cached;
  e.cache.for_each([&](BlockId block, const PrefixCache::Entry&) { cached.push_back(block); });
  for (const BlockId block : cached) {
    e.cache.erase(block);
    if (e.pool.state(block) != BlockPool::State::kCached) continue;
    e.pool.drop_cached(block);
    e.poison(block);
  }
  for (const auto& [id, sequence] : e.sequences)
    sequence->uncached = sequence->phase != Sequence::Phase::kWaiting;
}

void Engine::replace_rank(Rank rank, EngineRank by, Instant now) {
  Impl& e = *impl_;
  empty_cache();
  e.ranks[raw(rank)] = std::move(by);
  rank_gone(rank, now);
  while (!e.running.empty()) {
    Sequence& sequence = *e.running.back();
    e.running.pop_back();
    e.preempt(sequence);
    e.waiting.push_front(&sequence);
  }
  for (Sequence* const sequence : e.waiting) {
    if (sequence->phase == Sequence::Phase::kReady) e.preempt(*sequence);
  }
  for (auto& [job, load] : e.loads) {
    if (load.sequence == nullptr || load.sequence->phase != Sequence::Phase::kLoading) continue;
    load.again = true;
    e.scheduler->preempted(load.sequence->id);
  }
}

bool Engine::step(Instant now) {
  const bool computed = begin_step(now);
  finish_step(now);
  return pump(now) || computed;
}

bool Engine::idle() const noexcept {
  return !impl_->in_flight && unfinished() == 0 && impl_->loads.empty() &&
         !impl_->scheduler->has_pending_work();
}

std::size_t Engine::unfinished() const noexcept {
  return impl_->sequences.size() + impl_->draining.size();
}

void Engine::take_finished(std::vector<FinishedRequest>& out) {
  std::move(impl_->finished.begin(), impl_->finished.end(), std::back_inserter(out));
  impl_->finished.clear();
}

const EngineStats& Engine::stats() const noexcept { return impl_->stats; }

std::string Engine::describe() const {
  const Impl& e = *impl_;
  return std::to_string(e.running.size()) + " running, " + std::to_string(e.waiting.size()) +
         " waiting, " + std::to_string(e.draining.size()) + " draining, " +
         std::to_string(e.loads.size()) + " loads, " + std::to_string(e.pool.free()) +
         " free and " + std::to_string(e.pool.available() - e.pool.free()) + " cached of " +
         std::to_string(e.pool.size() - 1) + " blocks, " +
         std::to_string(e.scheduler->counters().ledger.alive) + " jobs";
}

}  // namespace kvprism::sim
