#include "sim/world_judge.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "kvprism/io/object_store.h"

namespace kvprism::sim {
namespace {

// Jobs of plans that the world made up itself.
constexpr std::uint64_t kForeignJobs = std::uint64_t{1} << 60;

bool parse_hash(std::string_view text, BlockHash& out) {
  if (text.size() != out.size() * 2) return false;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const char* const at = text.data() + 2 * i;
    if (std::from_chars(at, at + 2, out[i], 16).ptr != at + 2) return false;
  }
  return true;
}

std::string number(std::uint64_t value) { return std::to_string(value); }

}  // namespace

ObjectJudge::ObjectJudge(std::vector<GroupModel> groups, std::uint32_t ranks,
                         std::uint32_t alignment, std::string layout)
    : groups_(std::move(groups)), ranks_(ranks), alignment_(alignment), layout_(std::move(layout)) {
  for (const GroupModel& group : groups_) {
    if (group.stored) stored_.push_back(&group);
  }
  seen_.resize(stored_.size() * ranks_);
}

void ObjectJudge::learn(std::span<const std::uint8_t> hash, std::span<const std::uint32_t> tokens) {
  BlockHash key;
  if (hash.size() != key.size()) return;
  std::memcpy(key.data(), hash.data(), key.size());
  std::vector<std::uint32_t>& prefix = prefixes_[key];
  if (prefix.empty()) prefix.assign(tokens.begin(), tokens.end());
}

std::string ObjectJudge::check(std::string_view key, std::span<const std::byte> bytes) {
  ++checked_;
  const std::size_t last = key.rfind('/');
  const std::size_t before = last == std::string_view::npos ? last : key.rfind('/', last - 1);
  if (before == std::string_view::npos) return "a key without group and hash: " + std::string(key);
  BlockHash hash;
  if (!parse_hash(key.substr(last + 1), hash)) return "a key without a hash: " + std::string(key);
  std::uint32_t index = UINT32_MAX;
  std::from_chars(key.data() + before + 1, key.data() + last, index);
  if (index >= stored_.size()) return "a key of no stored group: " + std::string(key);
  std::uint32_t rank = UINT32_MAX;
  const std::size_t ahead = key.rfind('/', before - 1);
  std::from_chars(key.data() + ahead + 1, key.data() + before, rank);
  if (ahead == std::string_view::npos || rank >= ranks_)
    return "a key of no rank: " + std::string(key);
  const auto prefix = prefixes_.find(hash);
  if (prefix == prefixes_.end()) return "a key whose hash nobody made: " + std::string(key);
  seen_[index * ranks_ + rank].insert(hash);

  const GroupModel& group = *stored_[index];
  const std::vector<std::uint32_t>& tokens = prefix->second;
  const std::string what =
      "group " + number(raw(group.id)) + " at " + number(tokens.size()) + " tokens";
  if (tokens.size() % (group.fine ? alignment_ : group.tokens) != 0)
    return "an object of " + what + ", which ends no block: " + std::string(key);
  std::uint64_t size = 0;
  for (const std::uint64_t page : group.page_bytes) size += page;
  if (bytes.size() != size) {
    return "an object of " + what + " has " + number(bytes.size()) + " bytes instead of " +
           number(size);
  }
  Prefix state = kEmptyPrefix;
  std::vector<Prefix> states;
  for (std::uint32_t at = 0; at < tokens.size(); ++at) {
    state = extend(state, at, tokens[at]);
    if (at >= (tokens.size() - 1) / group.tokens * group.tokens) states.push_back(state);
  }
  // What lies behind the last token of the prefix, or pads a page, may be anything.
  expected_.assign(bytes.begin(), bytes.end());
  for (std::uint32_t layer = 0; layer < group.layers(); ++layer) {
    const PageShape shape = group.shape(layer, rank);
    const PageView page = page_in_object(group, layer, expected_.data());
    if (group.kind == GroupModel::Kind::kState) {
      write_state(shape, layer, state, page.base);
    } else {
      write_tokens(shape, layer, 0, states, page);
    }
  }
  const auto wrong = std::mismatch(expected_.begin(), expected_.end(), bytes.begin()).first;
  if (wrong == expected_.end()) return "";
  return "an object of " + what + " is wrong from byte " +
         number(static_cast<std::uint64_t>(wrong - expected_.begin()));
}

// In the order of the layout's name, without the blocks.
PageView ObjectJudge::page_in_object(const GroupModel& group, std::uint32_t layer,
                                     std::byte* object) const {
  const PageShape& shape = group.shapes[layer];
  std::uint64_t before = 0;
  for (std::uint32_t l = 0; l < layer; ++l) before += group.page_bytes[l];
  PageView page = dense_view(shape, object + before);
  if (layout_.find('N') < layout_.find('H')) {
    page.head_stride = shape.content;
    page.slot_stride = std::uint64_t{shape.content} * shape.heads;
  }
  if (layout_.find('H') < layout_.find('L')) {
    // Every layer of one head, and then of the next; all layers have as many heads.
    page.head_stride = 0;
    for (const PageShape& other : group.shapes)
      page.head_stride += std::uint64_t{other.positions} * other.content;
    page.base = object + before / shape.heads;
  }
  return page;
}

void ObjectJudge::forget_stored() {
  for (auto& hashes : seen_) hashes.clear();
}

bool ObjectJudge::seen(StoreIndex group, std::span<const std::uint8_t> hash) const {
  BlockHash key;
  if (hash.size() != key.size()) return false;
  std::memcpy(key.data(), hash.data(), key.size());
  return seen(raw(group), key);
}

bool ObjectJudge::seen(std::size_t stored, const BlockHash& hash) const {
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    if (!seen_[stored * ranks_ + rank].contains(hash)) return false;
  }
  return true;
}

bool ObjectJudge::has_chunk(std::size_t stored, const TokenTrail& trail, std::uint32_t chunk,
                            std::uint32_t tokens, std::uint32_t most) const {
  const GroupModel& group = *stored_[stored];
  const std::uint32_t end = (chunk + 1) * group.tokens;
  if (end <= tokens) return seen(stored, trail.hash_of(end));
  const bool state = group.kind == GroupModel::Kind::kState;
  const std::uint32_t last = state ? tokens : std::max(tokens, std::min(end, most));
  for (std::uint32_t mark = tokens; mark <= last; mark += alignment_) {
    if (seen(stored, trail.hash_of(mark))) return true;
  }
  return false;
}

std::optional<ObjectJudge::Missing> ObjectJudge::missing(const TokenTrail& trail,
                                                         std::uint32_t local, std::uint32_t tokens,
                                                         std::uint32_t most) const {
  for (std::size_t s = 0; s < stored_.size(); ++s) {
    const GroupModel& group = *stored_[s];
    for (std::uint32_t chunk = group.first_needed(tokens); chunk < group.chunks(tokens); ++chunk) {
      if ((chunk + 1) * group.tokens <= local) continue;
      if (!has_chunk(s, trail, chunk, tokens, most)) return Missing{group.id, chunk};
    }
  }
  return std::nullopt;
}

std::uint32_t ObjectJudge::longest(const TokenTrail& trail, std::uint32_t local,
                                   std::uint32_t most) const {
  for (std::uint32_t tokens = most - most % alignment_; tokens > local; tokens -= alignment_) {
    // Groups of equal specs are searched as one: what only some have of longer objects is no use.
    if (!missing(trail, local, tokens, tokens)) return tokens;
  }
  return local;
}

JobJudge::JobJudge(ObjectJudge& objects, const Projection& projection,
                   const StoreSchedulerOptions& options, bool clean, std::uint32_t step_tokens)
    : objects_(objects),
      options_(options),
      clean_(clean),
      step_tokens_(step_tokens),
      hash_tokens_(projection.hash_block_size()),
      held_(projection.num_blocks()),
      at_least_(projection.num_blocks()),
      at_most_(projection.num_blocks()) {
  for (const GroupModel& group : objects_.groups()) {
    if (!group.stored) continue;
    chunk_tokens_.push_back(group.tokens);
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
  if (answer.pending && (!clean_ || asked_.contains(raw(request)))) return;
  if (!answer.pending && answer.external_tokens == 0 && !clean_) return;
  TokenTrail trail(hash_tokens_);
  trail.append(tokens);
  const auto size = static_cast<std::uint32_t>(tokens.size());
  const std::uint32_t replay = model_replay(objects_.groups());
  const std::uint32_t alignment = objects_.alignment();
  const std::uint32_t most = size > replay ? (size - replay) / alignment * alignment : 0;
  if (answer.pending) {
    asked_.emplace(raw(request), Asked{local, objects_.longest(trail, local, most)});
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
  } else if (const auto missing = objects_.missing(trail, local, hit, most)) {
    fail("hit", "a hit of " + number(hit) + " tokens, " + number(local) +
                    " of them local, of which chunk " + number(missing->chunk) + " of group " +
                    number(raw(missing->group)) + " was never stored");
  }
  if (const auto asked = asked_.find(raw(request)); asked != asked_.end()) {
    // With fewer local tokens than when it was asked, more would have to be stored.
    if (local >= asked->second.local && hit < asked->second.at_least) {
      fail("missed hit", "a hit of " + number(hit) + " tokens although " +
                             number(asked->second.at_least) + " are stored");
    }
    asked_.erase(asked);
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
  std::vector<Hole>& holes = holes_[raw(request)];
  for (const Hole& hole : holes) {
    // Another request of the same prefix may have filled it.
    if (range.from > hole.tokens && !stored_.contains(hole.content))
      fail("hole",
           "a save begins at " + number(range.from) + " behind the hole at " + number(hole.tokens));
  }
  holes.clear();
}

void JobJudge::planned(const StepPlan& plan) {
  if (!plan.empty()) encode(plan.view(), last_plan_);
  for (const JobRecord& record : plan.jobs) {
    Job job;
    job.request = record.request;
    job.kind = record.kind;
    job.planned_at = now_;
    job.generation = generations_[raw(record.request)];
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
        if (record.kind == JobKind::kSave) {
          std::string content(hash.begin(), hash.end());
          content += number(raw(run.group));
          job.pieces.push_back({run.group, run.first_chunk + i, std::move(content)});
        }
        if (raw(block) <= 0 || static_cast<std::size_t>(raw(block)) >= held_.size()) {
          fail("null block", "a plan names block " + std::to_string(raw(block)));
          return;
        }
        ++at_least_[static_cast<std::size_t>(raw(block))];
        ++at_most_[static_cast<std::size_t>(raw(block))];
        if (trace_ != nullptr) {
          runs += " " + number(raw(run.group)) + ":" + number(run.first_chunk + i) + "@" +
                  std::to_string(raw(block));
        }
      }
    }
    // The end of a prompt, which nothing follows.
    job.hand_off |= end % step_tokens_ != 0;
    if (trace_ != nullptr) {
      trace("job " + number(raw(record.id)) +
            (record.kind == JobKind::kSave ? " saves" : " loads") + " for request " +
            number(raw(record.request)) + ", group:chunk@block" + runs);
    }
    if (!jobs_.emplace(raw(record.id), std::move(job)).second)
      fail("job id", "job " + number(raw(record.id)) + " is planned twice");
  }
}

void JobJudge::load_started(RequestId request, JobId job) {
  ++num_loads_;
  if (!open_loads_.emplace(raw(job), request).second)
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
  if (open_loads_.erase(raw(end.job)) != 1) {
    fail("load end",
         "load job " + number(raw(end.job)) +
             (ended_loads_.contains(raw(end.job)) ? " ends twice" : " was never promised"));
  }
  ended_loads_.insert(raw(end.job));
  if (end.complete && overtaken_loads_.contains(raw(end.job)))
    fail("purge", "load job " + number(raw(end.job)) + " brings what a purge has made void");
  const bool present =
      job != jobs_.end() && job->second.generation == generations_[raw(end.request)];
  if (!end.complete && present) failed_loads_.insert(raw(end.request));
  if (!end.complete && clean_) {
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
  for (const auto& [job, request] : open_loads_) overtaken_loads_.insert(job);
}

void JobJudge::forget(RequestId request) {
  holes_.erase(raw(request));
  asked_.erase(raw(request));
  failed_loads_.erase(raw(request));
  outdated_.erase(raw(request));
  ++generations_[raw(request)];
}

bool JobJudge::loading(RequestId request) const {
  return std::any_of(open_loads_.begin(), open_loads_.end(),
                     [&](const auto& load) { return load.second == request; });
}

void JobJudge::acquired(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) ++held_[static_cast<std::size_t>(raw(block))];
}

void JobJudge::released(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) --held_[static_cast<std::size_t>(raw(block))];
}

bool JobJudge::hold_report(const WorkerReport& report) {
  if (raw(report.rank) >= options_.ranks) {
    fail("rank", "a report of rank " + number(raw(report.rank)));
    return false;
  }
  for (const JobReport& entry : report.jobs) {
    if (raw(entry.job) >= kForeignJobs) continue;
    const auto found = jobs_.find(raw(entry.job));
    if (found == jobs_.end()) {
      fail("job id", "a worker reports job " + number(raw(entry.job)) + ", which nobody planned");
      continue;
    }
    std::uint32_t& outcomes = found->second.outcomes[raw(report.rank)];
    std::uint32_t& quiets = found->second.quiets[raw(report.rank)];
    if (entry.outcome != JobOutcome::kNone) ++outcomes;
    if (entry.quiet != 0) ++quiets;
    if (outcomes > 1) fail("outcome", "job " + number(raw(entry.job)) + " has a second outcome");
    if (quiets > 1) fail("quiet", "job " + number(raw(entry.job)) + " is quiet a second time");
    if (quiets > outcomes)
      fail("quiet", "job " + number(raw(entry.job)) + " is quiet before its outcome");
    if (trace_ != nullptr) {
      std::string failed;
      for (const FailedChunk& chunk : report.failed_of(entry)) {
        failed += ", " + number(raw(chunk.group)) + ":" + number(chunk.chunk) + " " +
                  std::string(to_string(static_cast<ItemStatus>(chunk.status)));
      }
      trace("job " + number(raw(entry.job)) + ": " + std::string(to_string(entry.outcome)) +
            (entry.quiet != 0 ? ", quiet" : "") + failed);
    }
  }
  if (channel_ == nullptr) {
    delivered(report, now_);
    return false;
  }
  channel_->push_back(report);
  return true;
}

void JobJudge::delivered(const WorkerReport& report, Instant now) {
  for (const JobReport& entry : report.jobs) {
    const auto found = jobs_.find(raw(entry.job));
    if (found == jobs_.end()) continue;
    Job& job = found->second;
    const std::uint32_t rank = raw(report.rank);
    const bool quiet_before = everywhere(job.quiet_delivered);
    const bool outcome_before = everywhere(job.outcome_delivered);
    if (entry.outcome != JobOutcome::kNone && !job.outcome_delivered[rank]) {
      job.outcome_delivered[rank] = true;
      const auto failed = report.failed_of(entry);
      job.failed.insert(job.failed.end(), failed.begin(), failed.end());
      job.whole |= entry.outcome == JobOutcome::kFailed || entry.outcome == JobOutcome::kCancelled;
    }
    if (entry.quiet != 0) job.quiet_delivered[rank] = true;
    const bool outcome_now = everywhere(job.outcome_delivered);
    const bool quiet_now = everywhere(job.quiet_delivered);
    if (outcome_now && !outcome_before) {
      // After the scheduler's own bound its answer does not depend on these reports any more.
      const bool counts = now < job.planned_at + options_.save_timeout;
      const bool present = job.generation == generations_[raw(job.request)];
      // What the ledger has given up as a whole names no chunk.
      const bool in_time = now < job.planned_at + options_.load_timeout;
      if (job.kind == JobKind::kLoad && in_time && present && !job.whole) {
        for (const FailedChunk& chunk : job.failed) {
          if (static_cast<ItemStatus>(chunk.status) == ItemStatus::kChecksumMismatch) ++mismatches_;
        }
      }
      for (Piece& piece : job.pieces) {
        const bool failed =
            std::any_of(job.failed.begin(), job.failed.end(), [&](const FailedChunk& chunk) {
              return chunk.group == piece.group && chunk.chunk == piece.chunk;
            });
        if (!failed && !job.whole) stored_.insert(piece.content);
        if (failed && !job.hand_off && counts && present) {
          holes_[raw(job.request)].push_back(
              {piece.chunk * chunk_tokens_[raw(piece.group)], std::move(piece.content)});
        }
      }
      job.pieces.clear();
    }
    for (const BlockId block : job.blocks) {
      if (quiet_now && !quiet_before) --at_least_[static_cast<std::size_t>(raw(block))];
      if (quiet_now && outcome_now && !(quiet_before && outcome_before))
        --at_most_[static_cast<std::size_t>(raw(block))];
    }
  }
}

std::string JobJudge::check_references() {
  for (std::size_t b = 0; b < held_.size(); ++b) {
    if (held_[b] >= at_least_[b] && held_[b] <= at_most_[b]) continue;
    return "jobs hold block " + number(b) + " " + std::to_string(held_[b]) +
           " times, their reports say " + std::to_string(at_least_[b]) + " to " +
           std::to_string(at_most_[b]);
  }
  return "";
}

std::string JobJudge::check_ended() const {
  for (const auto& [id, job] : jobs_) {
    for (std::uint32_t rank = 0; rank < options_.ranks; ++rank) {
      if (job.outcomes[rank] != 1)
        return "job " + number(id) + " never had an outcome on rank " + number(rank);
      if (job.quiets[rank] != 1)
        return "job " + number(id) + " never became quiet on rank " + number(rank);
    }
  }
  if (!open_loads_.empty())
    return "load job " + number(open_loads_.begin()->first) + " never ended";
  return "";
}

std::string JobJudge::check_closed(std::uint32_t rank, std::size_t unquiet) const {
  for (const auto& [id, job] : jobs_) {
    if (job.outcomes[rank] != 1)
      return "job " + number(id) + " has no outcome although its worker has closed";
    if (job.quiets[rank] != 1 && unquiet == 0) {
      return "job " + number(id) + " is not quiet although its worker has closed";
    }
  }
  return "";
}

}  // namespace kvprism::sim
