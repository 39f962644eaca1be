#include "sim/job_judge.h"

#include <algorithm>
#include <utility>

namespace kvprism::sim {
namespace {

std::string number(std::uint64_t value) { return std::to_string(value); }

}  // namespace

JobJudge::JobJudge(ObjectJudge& objects, const Projection& projection,
                   const StoreSchedulerOptions& options, bool clean, std::uint32_t step_tokens)
    : objects_(objects),
      options_(options),
      clean_(clean),
      step_tokens_(step_tokens),
      hash_tokens_(projection.hash_block_size()),
      tp_(projection.parallel().tp),
      pcp_(projection.parallel().pcp),
      drafts_(model_drafts(objects_.groups())),
      retains_(projection.retention_interval().has_value()),
      held_(projection.num_blocks()),
      at_least_(projection.num_blocks()),
      at_most_(projection.num_blocks()) {
  for (const GroupModel& group : objects_.groups()) {
    if (!group.stored) continue;
    chunk_tokens_.push_back(group.tokens);
    group_ids_.push_back(group.id);
    positional_.push_back(group.kind != GroupModel::Kind::kState);
  }
}

bool JobJudge::everywhere(const std::array<bool, kMaxRanks>& flags) const {
  return std::all_of(flags.begin(), flags.begin() + options_.ranks, [](bool flag) { return flag; });
}

void JobJudge::fail(const char* invariant, std::string what) {
  if (!broken_.empty()) return;
  invariant_ = invariant;
  broken_ = std::move(what);
}

void JobJudge::trace(std::string line) {
  if (trace_ != nullptr) trace_->push_back("    " + std::move(line));
}

void JobJudge::hash_made(std::span<const std::uint8_t> hash,
                         std::span<const std::uint32_t> tokens) {
  objects_.learn(hash, tokens);
}

void JobJudge::looked_up(RequestId request, std::span<const std::uint32_t> tokens,
                         std::uint32_t local, const LookupResult& answer) {
  left_.erase(raw(request));
  const bool may_load = mode_allows(JobKind::kLoad) && access(request).load && !purging_;
  const bool first = may_load && looked_up_.insert(raw(request)).second;
  if (!answer.pending && !purging_ && !ends_later(request)) {
    sound_.insert(raw(request));
  } else {
    sound_.erase(raw(request));
  }
  // Where the request leaves others may move, and of a window only what lies before that is kept.
  if (retains_) {
    std::erase_if(holes_[raw(request)], [](const Hole& hole) { return !hole.whole_prefix; });
  }
  const auto access = access_.find(raw(request));
  if ((answer.pending || answer.external_tokens > 0) && access != access_.end() &&
      !access->second.load) {
    fail("access", "request " + number(raw(request)) + " may not load and is looked up");
  }
  if (answer.pending) {
    open_questions_.insert(raw(request));
  } else if (mode_allows(JobKind::kLoad)) {  // else it may still be asked for, later
    open_questions_.erase(raw(request));
  }
  if (answer.pending) {
    if (answered_.erase(raw(request)) != 0 || !asked_at_.contains(raw(request)))
      asked_at_[raw(request)] = now_;
    if (!clean_ || asked_.contains(raw(request))) return;
  } else if (mode_allows(JobKind::kLoad)) {  // else the question stays open
    answered_.insert(raw(request));
  }
  if (!answer.pending && answer.external_tokens == 0 && !clean_) return;
  TokenTrail trail(hash_tokens_);
  trail.append(tokens);
  const auto size = static_cast<std::uint32_t>(tokens.size());
  const std::uint32_t replay = model_replay(objects_.groups());
  const std::uint32_t alignment = objects_.alignment();
  const std::uint32_t most = size > replay ? (size - replay) / alignment * alignment : 0;
  const std::uint32_t probed = drafts_ ? size / alignment * alignment : most;
  if (answer.pending) {
    if (!clean_ || asked_.contains(raw(request))) return;
    junctions_.erase(raw(request));  // another answer may move it
    asked_.emplace(raw(request), Asked{local, objects_.longest(trail, local, most, probed),
                                       objects_.shared(trail, local, probed)});
    return;
  }
  if (trace_ != nullptr) {
    trace("request " + number(raw(request)) + " of " + number(size) + " tokens has " +
          number(local) + " local ones and is offered " + number(answer.external_tokens));
  }
  const std::uint32_t hit = local + answer.external_tokens;
  if (answer.external_tokens > 0 && failed_loads_.contains(raw(request))) {
    fail("bypass",
         "request " + number(raw(request)) + " is offered tokens again after a load that failed");
  }
  if (answer.external_tokens > 0 && (hit > most || hit % alignment != 0)) {
    fail("hit", "a hit of " + number(hit) + " of " + number(size) + " tokens, at most " +
                    number(most) + " in steps of " + number(alignment));
  } else if (answer.external_tokens > 0) {
    using Behind = ObjectJudge::Behind;
    for (const auto& missing : objects_.missing(trail, local, hit, probed, Behind::kCertain)) {
      fail("hit", "a hit of " + number(hit) + " tokens, " + number(local) +
                      " of them local, for which chunk " + number(missing.chunk) + " of group " +
                      number(raw(missing.group)) + " was never stored");
    }
  }
  if (const auto asked = asked_.find(raw(request)); asked != asked_.end()) {
    // With fewer local tokens than when it was asked, more would have to be stored.
    const bool certain = local >= asked->second.local;
    // What others store meanwhile may be seen or not.
    const std::uint32_t shared = asked->second.shared;
    if (certain && shared > hit && shared == objects_.shared(trail, asked->second.local, probed))
      junctions_[raw(request)] = shared;
    if (certain && hit < asked->second.at_least) {
      fail("missed hit", "a hit of " + number(hit) + " tokens although " +
                             number(asked->second.at_least) + " are stored");
    }
    asked_.erase(asked);
  } else if (clean_ && first && hit == local && !failed_loads_.contains(raw(request)) &&
             !overtaken_.contains(raw(request))) {
    // Refused without a question.
    const std::uint32_t stored = objects_.longest(trail, local, most, probed);
    if (stored > local) {
      fail("missed hit", "nobody asks for a hit of " + number(stored) + " tokens, " +
                             number(local) + " of them local, which are stored");
    }
  }
}

void JobJudge::save_planned(RequestId request, const TokenRange& range) {
  if (trace_ != nullptr) {
    trace("request " + number(raw(request)) + " saves " + number(range.from) + ".." +
          number(range.to));
  }
  if (range.from % step_tokens_ != 0 || range.to % objects_.alignment() != 0 || range.empty()) {
    fail("save range", "a save of tokens " + number(range.from) + ".." + number(range.to));
  }
  // What the step has planned before is not counted yet.
  const auto most = static_cast<std::int64_t>(held_.size() * options_.max_held_percent / 100);
  if (options_.max_held_percent < 100 && holds_ > most) {
    fail("held", "a save begins while jobs hold " + std::to_string(holds_) + " blocks of at most " +
                     std::to_string(most));
  }
  std::vector<Hole>& holes = holes_[raw(request)];
  for (const Hole& hole : holes) {
    // Another request of the same prefix may have filled it.
    if (range.from > hole.tokens && !stored_.contains(hole.content))
      fail("hole",
           "a save begins at " + number(range.from) + " behind the hole at " + number(hole.tokens));
  }
  holes.clear();
}

bool JobJudge::mode_allows(JobKind kind) const noexcept {
  const StoreMode other = kind == JobKind::kSave ? StoreMode::kReadOnly : StoreMode::kWriteOnly;
  return mode_ != StoreMode::kOff && mode_ != other;
}

RequestAccess JobJudge::access(RequestId request) const {
  const auto found = access_.find(raw(request));
  return found == access_.end() ? RequestAccess{} : found->second;
}

std::optional<RequestId> JobJudge::asking_request() const {
  if (open_questions_.empty()) return std::nullopt;
  return RequestId{*std::min_element(open_questions_.begin(), open_questions_.end())};
}

void JobJudge::check_allowed(const JobRecord& record) {
  const bool save = record.kind == JobKind::kSave;
  // A load began when it was allocated, which was allowed.
  if (begun_.erase(raw(record.id)) != 0) return;
  if (!mode_allows(record.kind)) {
    fail("mode",
         "job " + number(raw(record.id)) + " is planned in mode " + std::string(to_string(mode_)));
  }
  const RequestAccess allowed = access(record.request);
  if (save ? allowed.save : allowed.load) return;
  fail("access", "job " + number(raw(record.id)) + " is of request " + number(raw(record.request)) +
                     ", which may not " + (save ? "save" : "load"));
}

void JobJudge::planned(const StepPlan& plan) {
  if (!plan.empty()) encode(plan.view(), last_plan_);
  for (const JobId id : plan.asked) {
    const auto found = jobs_.find(raw(id));
    if (found == jobs_.end()) {
      fail("job id", "a plan asks about job " + number(raw(id)) + ", which nobody planned");
    } else {
      ++found->second.asked;
    }
  }
  for (const JobRecord& record : plan.jobs) {
    check_allowed(record);
    Job job;
    job.request = record.request;
    job.kind = record.kind;
    job.planned_at = now_;
    job.generation = generations_[raw(record.request)];
    job.named = !left_.contains(raw(record.request));
    job.hand_off = record.kind == JobKind::kSave;
    if (record.kind == JobKind::kSave && outdated_.contains(raw(record.request))) {
      fail("purge", "request " + number(raw(record.request)) +
                        " saves, and has computed tokens before a purge");
    }
    std::string runs;
    std::uint32_t end = 0;  // of what is saved by position
    for (std::uint32_t r = record.first_run; r < record.first_run + record.num_runs; ++r) {
      const RunRecord& run = plan.runs[r];
      if (raw(run.group) < positional_.size() && positional_[raw(run.group)]) {
        job.hand_off = false;
        end = std::max(end, plan.mark_tokens[run.first_mark + run.count - 1]);
      }
      for (std::uint32_t i = 0; i < run.count; ++i) {
        const BlockId block = plan.ids[run.first_id + i];
        job.blocks.push_back(block);
        const auto hash = plan.view().mark_hash(run.first_mark + i);
        if (record.kind == JobKind::kLoad && !objects_.seen(run.group, hash)) {
          fail("hit", "load job " + number(raw(record.id)) + " names an object of " +
                          number(plan.mark_tokens[run.first_mark + i]) +
                          " tokens that was never stored");
        }
        std::string content(hash.begin(), hash.end());
        content += number(raw(run.group));
        if (record.kind == JobKind::kLoad) check_unloadable(record, run.group, content);
        // A block that is used in part may lie under a longer prefix.
        const std::uint32_t size = chunk_tokens_[raw(run.group)];
        const std::uint32_t used = i + 1 < run.count ? size : run.valid_tokens_last;
        job.pieces.push_back({run.group, run.first_chunk + i, (run.first_chunk + i) * size + used,
                              std::move(content)});
        if (raw(block) <= 0 || static_cast<std::size_t>(raw(block)) >= held_.size()) {
          fail("null block", "a plan names block " + std::to_string(raw(block)));
          return;
        }
        ++at_least_[static_cast<std::size_t>(raw(block))];
        ++holds_;
        ++at_most_[static_cast<std::size_t>(raw(block))];
        if (trace_ != nullptr) {
          runs += " " + number(raw(run.group)) + ":" + number(run.first_chunk + i) + "@" +
                  std::to_string(raw(block));
        }
      }
    }
    // The end of a prompt, which nothing follows; with drafts its last object may end a step.
    job.hand_off |= end % step_tokens_ != 0 || (drafts_ && objects_.alignment() < step_tokens_);
    if (trace_ != nullptr) {
      trace("job " + number(raw(record.id)) +
            (record.kind == JobKind::kSave ? " saves" : " loads") + " for request " +
            number(raw(record.request)) + ", group:chunk@block" + runs);
    }
    if (!jobs_.emplace(raw(record.id), std::move(job)).second)
      fail("job id", "job " + number(raw(record.id)) + " is planned twice");
  }
}

bool JobJudge::plan_reaches(std::uint32_t rank, const StepPlan& plan) {
  const bool dead = (dead_ >> rank & 1) != 0;
  const bool answers = had_job_[rank] || answer_for_all_;
  const bool lost = !dead && losing_ == rank && answers && !plan.jobs.empty();
  if (!dead && !lost) {
    had_job_[rank] |= !plan.jobs.empty();
    return true;
  }
  for (const JobRecord& record : plan.jobs) jobs_[raw(record.id)].lost[rank] = true;
  if (lost) {
    ++plans_lost_;
    losing_ = kMaxRanks;
    last_plan_.clear();  // whoever gives it to the rank gives it for the first time
  }
  return false;
}

void JobJudge::rank_died(std::uint32_t rank) {
  dead_ |= 1u << rank;
  sound_.clear();
  for (auto& [id, job] : jobs_) {
    job.lost[rank] = true;
    if (job.kind == JobKind::kSave && !everywhere(job.outcome_delivered)) cut_saves_.push_back(id);
  }
  for (const auto& [job, load] : open_loads_) excused_loads_.insert(job);
}

void JobJudge::rank_replaced(std::uint32_t rank) {
  dead_ &= ~(1u << rank);
  had_job_[rank] = false;
  last_plan_.clear();  // the new worker has not had it
}

bool JobJudge::ends_later(RequestId request) const {
  const auto generation = generations_.find(raw(request));
  return std::any_of(cut_saves_.begin(), cut_saves_.end(), [&](std::uint64_t id) {
    const Job& job = jobs_.at(id);
    return job.request == request && generation != generations_.end() &&
           job.generation == generation->second && !everywhere(job.outcome_delivered);
  });
}

void JobJudge::load_started(RequestId request, JobId job, std::uint32_t local, std::uint32_t hit) {
  ++num_loads_;
  if (!access(request).load)
    fail("access", "request " + number(raw(request)) + " may not load and begins a load");
  if (!mode_allows(JobKind::kLoad))
    fail("mode", "a load begins in mode " + std::string(to_string(mode_)));
  begun_.insert(raw(job));
  if (!open_loads_.emplace(raw(job), OpenLoad{request, local, hit}).second)
    fail("load end", "load job " + number(raw(job)) + " starts twice");
}

void JobJudge::load_ended(const LoadEnd& end) {
  if (trace_ != nullptr) {
    trace("load job " + number(raw(end.job)) + " of request " + number(raw(end.request)) +
          " ends with " + number(end.valid_tokens) + " tokens" +
          (end.complete ? ", complete" : ", failed " + number(end.failed.size())) +
          (end.blocks_quiet ? "" : ", not quiet"));
  }
  const auto job = jobs_.find(raw(end.job));
  const auto open = open_loads_.extract(raw(end.job));
  if (open.empty()) {
    fail("load end",
         "load job " + number(raw(end.job)) +
             (ended_loads_.contains(raw(end.job)) ? " ends twice" : " was never promised"));
  } else if (job != jobs_.end()) {
    check_load_end(end, job->second, open.mapped());
  }
  ended_loads_.insert(raw(end.job));
  if (end.complete && overtaken_loads_.contains(raw(end.job)))
    fail("purge", "load job " + number(raw(end.job)) + " brings what a purge has made void");
  const bool present =
      job != jobs_.end() && job->second.generation == generations_[raw(end.request)];
  // What is told of a load that was given up is true, and not owed.
  if (job != jobs_.end()) owe_gone(job->second, present && end.blocks_quiet);
  if (!end.complete && present && !cut_loads_.contains(raw(end.job)))
    failed_loads_.insert(raw(end.request));
  if (present && overtaken_loads_.contains(raw(end.job))) overtaken_.insert(raw(end.request));
  if (!end.complete && clean_ && !excused_loads_.contains(raw(end.job))) {
    fail("missed load", "load job " + number(raw(end.job)) + " fails, although nothing is lost");
  }
  // What came from the store closes the holes before it.
  std::erase_if(holes_[raw(end.request)],
                [&](const Hole& hole) { return hole.tokens < end.valid_tokens; });
  if (job != jobs_.end() && end.blocks_quiet && !everywhere(job->second.quiet_delivered)) {
    fail("quiet", "load job " + number(raw(end.job)) + " ends before it is quiet");
  }
}

void JobJudge::purged() {
  stored_.clear();
  holes_.clear();
  asked_.clear();
  owed_.clear();
  owed_gone_.clear();
  may_.clear();
  damaged_.clear();
  avoided_.assign(kAvoided, {});
  purging_ = true;
  sound_.clear();
  for (const auto& [job, load] : open_loads_) {
    overtaken_loads_.insert(job);
    excused_loads_.insert(job);
  }
}

void JobJudge::forget(RequestId request) {
  junctions_.erase(raw(request));
  asked_at_.erase(raw(request));
  answered_.erase(raw(request));
  holes_.erase(raw(request));
  asked_.erase(raw(request));
  failed_loads_.erase(raw(request));
  overtaken_.erase(raw(request));
  outdated_.erase(raw(request));
  looked_up_.erase(raw(request));
  sound_.erase(raw(request));
}

void JobJudge::left(RequestId request) {
  open_questions_.erase(raw(request));
  left_.insert(raw(request));
  access_.erase(raw(request));
  ++generations_[raw(request)];
}

std::uint32_t JobJudge::junction(RequestId request) const {
  const auto found = junctions_.find(raw(request));
  return found == junctions_.end() ? 0 : found->second;
}

bool JobJudge::loading(RequestId request) const {
  return std::any_of(open_loads_.begin(), open_loads_.end(),
                     [&](const auto& load) { return load.second.request == request; });
}

void JobJudge::acquired(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) ++held_[static_cast<std::size_t>(raw(block))];
}

void JobJudge::released(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) --held_[static_cast<std::size_t>(raw(block))];
}

}  // namespace kvprism::sim
