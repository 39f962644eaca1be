// One scheduling pass in the order of a real engine: running requests, then waiting ones, then the
// connector.
#include <algorithm>

#include "sim/engine_impl.h"

namespace kvprism::sim {

std::uint32_t Engine::Impl::max_hit(std::uint32_t tokens) const {
  if (tokens <= replay) return 0;
  return (tokens - replay) / alignment * alignment;
}

// Alone in the pool, could the request run to its end?
bool Engine::Impl::can_ever_fit(const Request& request) const {
  const auto total = static_cast<std::uint32_t>(request.prompt.size()) + request.max_new_tokens;
  if (request.prompt.empty() || request.max_new_tokens == 0 || total > options.max_model_tokens)
    return false;
  const std::uint32_t chunk = std::min(options.token_budget, total);
  std::uint64_t blocks = 0;
  for (const GroupModel& group : groups) {
    const std::uint32_t all = (total + group.tokens - 1) / group.tokens;
    switch (group.kind) {
      case GroupModel::Kind::kFull:
        blocks += all;
        break;
      case GroupModel::Kind::kWindow:
      case GroupModel::Kind::kChunk:
        blocks += std::min(all, (group.window + chunk) / group.tokens + 2);
        break;
      case GroupModel::Kind::kState:
        blocks += (group.fine ? 3 : 2) + group.extra;
        break;
      case GroupModel::Kind::kRing:
        blocks += 1;
        break;
    }
  }
  return blocks < pool.size();
}

// Up to where the next step computes. Steps of a prefill end where a state can be kept.
std::uint32_t Engine::Impl::target(const Sequence& sequence, std::uint32_t budget) const {
  const std::uint32_t size = sequence.trail.size();
  std::uint32_t to = sequence.computed + std::min(size - sequence.computed, budget);
  if (!has_state || !options.aligned_steps) return to;
  // With drafts a hit ends a step earlier.
  const std::uint32_t whole = size - size % step_tokens;
  const std::uint32_t last = drafts ? whole - std::min(whole, step_tokens) : whole;
  if (to < last) {
    to -= to % step_tokens;
  } else if (sequence.computed < last && to > last) {
    to = last;
  }
  const std::uint32_t end = checkpoint(sequence);
  if (sequence.computed < end && end < to) to = end;
  return std::max(to, sequence.computed);
}

void Engine::Impl::preempt(Sequence& sequence) {
  drop_tables(sequence);
  sequence.computed = 0;
  sequence.offered = false;
  sequence.frozen = false;
  sequence.uncached = false;
  sequence.phase = Sequence::Phase::kWaiting;
  ++sequence.result.preemptions;
  ++stats.preemptions;
  sequence.preempted_in = stats.steps;
  scheduler->preempted(sequence.id);
  observer->preempted(sequence.id);
}

// Takes blocks from the request that came last, or from one that is only ready. False when there is
// nobody but `sequence`.
bool Engine::Impl::preempt_for(const Sequence& sequence) {
  if (!running.empty() && running.back() != &sequence) {
    Sequence& victim = *running.back();
    running.pop_back();
    preempt(victim);
    waiting.push_front(&victim);
    return true;
  }
  for (auto other = waiting.rbegin(); other != waiting.rend(); ++other) {
    if (*other == &sequence || (*other)->phase != Sequence::Phase::kReady) continue;
    preempt(**other);
    return true;
  }
  return false;
}

void Engine::Impl::run(Sequence& sequence, std::uint32_t to, std::uint32_t& budget) {
  Scheduled work{&sequence, sequence.computed, to};
  if (const std::uint32_t drafts_made = proposals(sequence, to)) {
    // A step that accepts several tokens would pass states by.
    const auto told = static_cast<std::uint64_t>(sequence.trail.last());
    work.accepted = has_state ? 0 : static_cast<std::uint32_t>(told % (drafts_made + 1));
    work.rejected = drafts_made - work.accepted;
  }
  scheduled.push_back(work);
  budget -= to - sequence.computed;
}

// Drafts of a step that computes up to `to`: none in a prefill, and none beyond the request's end.
std::uint32_t Engine::Impl::proposals(const Sequence& sequence, std::uint32_t to) const {
  if (to < sequence.trail.size()) return 0;
  const std::uint32_t end = sequence.prompt_tokens + sequence.max_new_tokens;
  return std::min(options.draft_tokens, end - to - 1);
}

bool Engine::Impl::schedule_running(Instant, std::uint32_t& budget) {
  bool preempted = false;
  for (std::size_t i = 0; i < running.size() && budget > 0; ++i) {
    Sequence& sequence = *running[i];
    if (options.offer_states_late) {
      offer_states(sequence, sequence.computed);
      apply_acquired();
    }
    slide(sequence);
    const std::uint32_t to = target(sequence, budget);
    if (to == sequence.computed) continue;
    bool fits = allocate(sequence, to);
    while (!fits && preempt_for(sequence)) {
      preempted = true;
      fits = allocate(sequence, to);
    }
    if (fits) {
      run(sequence, to, budget);
      continue;
    }
    // Only jobs hold the blocks that it needs: it gives up its own and starts again.
    preempted = true;
    running.pop_back();
    preempt(sequence);
    waiting.push_front(&sequence);
  }
  return preempted;
}

void Engine::Impl::first_start(Sequence& sequence, std::uint32_t local) {
  stats.local_hit_tokens += local;
  if (!sequence.started) sequence.result.local_hit_tokens = local;
  sequence.result.found_tokens = std::max(sequence.result.found_tokens, local);
}

bool Engine::Impl::start_ready(Sequence& sequence, std::uint32_t& budget) {
  slide(sequence);
  const std::uint32_t to = target(sequence, budget);
  if (to == sequence.computed) return false;
  bool fits = allocate(sequence, to);
  while (!fits && running.empty() && preempt_for(sequence)) fits = allocate(sequence, to);
  if (!fits) return false;
  sequence.ring_from = sequence.computed;
  run(sequence, to, budget);
  return true;
}

bool Engine::Impl::start_waiting(Sequence& sequence, std::uint32_t& budget, Instant now) {
  const std::uint32_t size = sequence.trail.size();
  const std::uint32_t local =
      options.local_cache ? cache.longest(groups, sequence.trail, step_tokens, max_hit(size)) : 0;
  sequence.prefill = size;
  const auto hashes = sequence.trail.hashes();
  const HashList list{hashes.empty() ? nullptr : hashes[0].data(), sequence.trail.num_hashes(),
                      sizeof(BlockHash)};
  tell_hashes(sequence);
  const LookupResult answer = scheduler->lookup(sequence.id, size, list, local, now);
  observer->looked_up(sequence.id, sequence.trail.tokens(), local, answer);
  if (answer.pending) return false;
  const std::uint32_t external = answer.external_tokens;
  if (external % alignment != 0 || local + external > std::max(local, max_hit(size))) {
    fail("a lookup of " + std::to_string(size) + " tokens offers " + std::to_string(external) +
         " beyond " + std::to_string(local));
    return false;
  }

  adopt_local(sequence, local);
  if (external > 0) {
    LoadRecord load{&sequence, local, local + external, {}};
    if (!allocate_load(sequence, local, local + external, load.destinations)) {
      drop_tables(sequence);
      return false;
    }
    const std::optional<JobId> job =
        scheduler->allocated(sequence.id, external, rows(sequence), now);
    apply_acquired();
    if (job) {
      for (const Destination& destination : load.destinations) {
        for (const EngineRank& rank : ranks)
          rank.memory->open(destination.group, destination.block);
      }
      sequence.phase = Sequence::Phase::kLoading;
      observer->load_started(sequence.id, *job, local, local + external);
      loads.emplace(raw(*job), std::move(load));
      first_start(sequence, local);
      return true;
    }
    truncate(sequence, local);
  }
  sequence.computed = local;
  const std::uint32_t to = target(sequence, budget);
  if (to == local || !allocate(sequence, to)) {
    drop_tables(sequence);
    sequence.computed = 0;
    return false;
  }
  if (external == 0) scheduler->allocated(sequence.id, 0, rows(sequence), now);
  first_start(sequence, local);
  sequence.started = true;
  sequence.ring_from = local;
  run(sequence, to, budget);
  return true;
}

// The oldest request that has been preempted so often that only its turn alone will end it.
const Sequence* Engine::Impl::patient() const {
  constexpr std::uint32_t kPatience = 5;
  const Sequence* oldest = nullptr;
  const auto consider = [&](const Sequence* sequence) {
    if (sequence->result.preemptions < kPatience) return;
    if (oldest == nullptr || raw(sequence->id) < raw(oldest->id)) oldest = sequence;
  };
  for (const Sequence* sequence : running) consider(sequence);
  for (const Sequence* sequence : waiting) consider(sequence);
  return oldest;
}

void Engine::Impl::schedule(Instant now) {
  std::uint32_t budget = options.token_budget;
  // A pass that took blocks away from somebody gives none to newcomers, in most engines (W-C5).
  if (schedule_running(now, budget) && !options.resume_at_once) return;
  // Those that hold blocks already come first.
  const Sequence* const alone = patient();
  if (alone != nullptr && alone->phase == Sequence::Phase::kWaiting && running.empty()) {
    while (preempt_for(*alone)) {
    }
  }
  bool starved = false;
  for (const bool ready : {true, false}) {
    // A newcomer's load would take the blocks that a loaded request waits for, and so on in turns.
    if (starved) return;
    for (std::size_t i = 0; i < waiting.size();) {
      Sequence& sequence = *waiting[i];
      const bool turn =
          sequence.phase == (ready ? Sequence::Phase::kReady : Sequence::Phase::kWaiting);
      if (!turn || (alone != nullptr && alone != &sequence)) {
        ++i;
        continue;
      }
      if (budget == 0 || running.size() >= options.max_running) return;
      const bool started =
          ready ? start_ready(sequence, budget) : start_waiting(sequence, budget, now);
      if (!started || sequence.phase == Sequence::Phase::kLoading) {
        starved |= ready;
        ++i;
        continue;
      }
      if (sequence.preempted_in == stats.steps) ++stats.resumed_at_once;
      sequence.phase = Sequence::Phase::kRunning;
      running.push_back(&sequence);
      waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

// Names the blocks with the state after `tokens`, where that can end a hit: at multiples of S, and
// at the end of the prompt.
void Engine::Impl::offer_states(Sequence& sequence, std::uint32_t tokens) {
  if (sequence.offered || tokens == 0) return;
  if (tokens % step_tokens != 0 && tokens != checkpoint(sequence)) return;
  for (const GroupModel& group : groups) {
    if (group.kind != GroupModel::Kind::kState) continue;
    const auto& table = sequence.tables[raw(group.id)];
    const std::uint32_t column = (tokens - 1) / group.tokens;
    if (column < table.size()) scheduler->boundary(sequence.id, group.id, table[column], tokens);
  }
  sequence.offered = true;
  sequence.frozen = true;
}

void Engine::Impl::tell_hashes(Sequence& sequence) {
  const auto hashes = sequence.trail.hashes();
  const std::uint32_t unit = projection->hash_block_size();
  for (; sequence.reported_hashes < hashes.size(); ++sequence.reported_hashes) {
    observer->hash_made(hashes[sequence.reported_hashes],
                        sequence.trail.tokens().first((sequence.reported_hashes + 1) * unit));
  }
}

// What a connector does after a scheduling pass: progress, saves, one plan for the workers.
void Engine::Impl::connect(Instant now) {
  for (const Scheduled& work : scheduled) {
    Sequence& sequence = *work.sequence;
    tell_hashes(sequence);
    const auto hashes = sequence.trail.hashes();
    const std::uint32_t known =
        std::min(scheduler->known_hashes(sequence.id), sequence.trail.num_hashes());
    const HashList fresh{known < hashes.size() ? hashes[known].data() : nullptr,
                         sequence.trail.num_hashes() - known, sizeof(BlockHash), known};
    scheduler->advanced(sequence.id, work.to, fresh);
    sequence.offered = false;
    sequence.frozen = false;
    if (!options.offer_states_late) offer_states(sequence, work.to);
    const TokenRange range = scheduler->wants_save(sequence.id, now);
    if (range.empty()) continue;
    observer->save_planned(sequence.id, range);
    scheduler->save(sequence.id, range, rows(sequence), now);
  }
  const StepPlan& plan = scheduler->end_step(now);
  observer->planned(plan);
  count_plan(plan);
  check_destinations(plan);
  const bool nothing = plan.empty();
  if (!nothing) encode(plan.view(), plan_bytes);
  settle();
  if (nothing) return;
  for (std::uint32_t r = 0; r < ranks.size(); ++r) {
    if (!observer->plan_reaches(r, plan)) continue;
    const SubmitResult result = ranks[r].worker->submit(plan_bytes, ReadyToken::source(fence));
    if (!result.accepted) fail("a worker refuses a plan: " + result.refusal);
  }
}

// A load writes exactly the blocks that were taken for it.
void Engine::Impl::check_destinations(const StepPlan& plan) {
  for (const JobRecord& job : plan.jobs) {
    const auto load = loads.find(raw(job.id));
    if (job.kind != JobKind::kLoad || load == loads.end()) continue;
    std::size_t matched = 0;
    std::size_t planned = 0;
    for (std::uint32_t r = job.first_run; r < job.first_run + job.num_runs; ++r) {
      const RunRecord& run = plan.runs[r];
      planned += run.count;
      for (const Destination& destination : load->second.destinations) {
        const std::uint32_t at = destination.chunk - run.first_chunk;
        if (destination.group != projection->group_id(run.group) || at >= run.count) continue;
        if (plan.ids[run.first_id + at] == destination.block) ++matched;
      }
    }
    if (matched == load->second.destinations.size() && matched == planned) continue;
    fail("load job " + std::to_string(raw(job.id)) + " has " + std::to_string(planned) +
         " destinations, of which " + std::to_string(matched) + " are among the " +
         std::to_string(load->second.destinations.size()) + " taken for it");
  }
}

void Engine::Impl::count_plan(const StepPlan& plan) {
  for (const JobRecord& job : plan.jobs) {
    ++(job.kind == JobKind::kSave ? stats.jobs_saved : stats.jobs_loaded);
    for (std::uint32_t r = job.first_run; r < job.first_run + job.num_runs; ++r) {
      GroupStats& group = stats.groups[raw(projection->group_id(plan.runs[r].group))];
      (job.kind == JobKind::kSave ? group.chunks_saved : group.chunks_loaded) += plan.runs[r].count;
    }
  }
}

}  // namespace kvprism::sim
