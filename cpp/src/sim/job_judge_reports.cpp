// What workers tell of their jobs, and what follows from it.
#include <algorithm>
#include <tuple>
#include <utility>

#include "kvprism/io/object_store.h"
#include "sim/job_judge.h"
#include "store/recent_prefixes.h"

namespace kvprism::sim {
namespace {

// Jobs of plans that the world made up itself.
constexpr std::uint64_t kForeignJobs = std::uint64_t{1} << 60;

std::string number(std::uint64_t value) { return std::to_string(value); }

}  // namespace

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
    const bool failed_whole = entry.outcome == JobOutcome::kFailed && entry.quiet != 0;
    if (found->second.lost[raw(report.rank)] && !failed_whole) {
      fail("outcome", "job " + number(raw(entry.job)) + ", whose plan was lost, is told as " +
                          std::string(to_string(entry.outcome)));
    }
    if (entry.outcome == JobOutcome::kPartial && entry.num_failed == 0)
      fail("outcome", "job " + number(raw(entry.job)) + " fails in part and names no chunk");
    std::uint32_t& outcomes = found->second.outcomes[raw(report.rank)];
    std::uint32_t& quiets = found->second.quiets[raw(report.rank)];
    // A worker answers for a job that it has forgotten, never for one that moves.
    const bool over = outcomes != 0 && quiets != 0;
    const bool answer = over && failed_whole && outcomes <= found->second.asked;
    if (entry.outcome != JobOutcome::kNone) ++outcomes;
    if (entry.quiet != 0) ++quiets;
    if (outcomes > 1 && !answer)
      fail("outcome", "job " + number(raw(entry.job)) + " has a second outcome");
    if (quiets > 1 && !answer)
      fail("quiet", "job " + number(raw(entry.job)) + " is quiet a second time");
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
    const auto failed = report.failed_of(entry);
    if (entry.outcome != JobOutcome::kNone && job.outcome_delivered[rank]) {
      for (const FailedChunk& chunk : failed) job.late.push_back({rank, chunk});
    } else if (entry.outcome != JobOutcome::kNone) {
      job.outcome_delivered[rank] = true;
      for (const FailedChunk& chunk : failed) job.failed.push_back({rank, chunk});
      job.whole |= entry.outcome == JobOutcome::kFailed ||
                   entry.outcome == JobOutcome::kCancelled ||
                   (entry.outcome != JobOutcome::kOk && failed.empty());
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
      if (job.kind == JobKind::kSave) {
        save_delivered(job, counts, present);
      } else {
        load_delivered(job, in_time, present);
      }
    }
    for (const BlockId block : job.blocks) {
      if (quiet_now && !quiet_before) {
        --at_least_[static_cast<std::size_t>(raw(block))];
        --holds_;
      }
      if (quiet_now && outcome_now && !(quiet_before && outcome_before))
        --at_most_[static_cast<std::size_t>(raw(block))];
    }
  }
}

void JobJudge::rank_gone(std::uint32_t rank, Instant now) {
  WorkerReport gone;
  gone.rank = Rank{rank};
  for (const auto& [id, job] : jobs_) {
    if (job.quiet_delivered[rank]) continue;
    JobReport& entry = gone.jobs.emplace_back();
    entry.job = JobId{id};
    entry.quiet = 1;
    if (job.outcome_delivered[rank]) continue;
    entry.outcome = JobOutcome::kFailed;
    if (job.kind == JobKind::kLoad) cut_loads_.insert(id);
  }
  delivered(gone, now);
}

void JobJudge::save_delivered(Job& job, bool counts, bool present) {
  // What ends while a purge waits for it is void, as is all before it.
  if (purging_) job.pieces.clear();
  for (Piece& piece : job.pieces) {
    const bool failed = has_failed(job, piece);
    if (!failed && !job.whole) {
      stored_.insert(piece.content);
      ++may_[piece.content];
      if (options_.tell_changes && counts && job.named) ++owed_[piece.content];
    }
    if (failed && !job.hand_off && counts && present) {
      holes_[raw(job.request)].push_back(
          {piece.chunk * chunk_tokens_[raw(piece.group)], std::move(piece.content),
           objects_.stored_group(raw(piece.group)).kind == GroupModel::Kind::kFull});
    }
  }
  job.pieces.clear();
}

void JobJudge::load_delivered(Job& job, bool in_time, bool present) {
  // A load that was given up knows no key once its request has left.
  const bool known = present || !options_.detach_quarantined_loads;
  job.in_time = in_time;
  avoid_failed(job, in_time && !job.whole && known);
  for (const Failed& one : job.failed) {
    const auto status = static_cast<ItemStatus>(one.chunk.status);
    if (status != ItemStatus::kChecksumMismatch) continue;
    const auto piece = std::find_if(job.pieces.begin(), job.pieces.end(), [&](const Piece& p) {
      return p.group == one.chunk.group && p.chunk == one.chunk.chunk;
    });
    if (piece == job.pieces.end()) continue;
    const std::size_t stored = raw(piece->group);
    const std::uint32_t above = one.rank / tp_;
    const std::string place =
        place_name({.stored = stored,
                    .stage = above / pcp_,
                    .pcp = above % pcp_,
                    .shard = objects_.shard_of(stored, one.rank % tp_)},
                   std::string_view(piece->content).substr(0, sizeof(BlockHash)));
    may_go_.insert(place);
    if (!in_time || job.whole || !known) continue;
    must_go_.insert(place);
    damaged_[piece->content] = now_;
    finder_ = job.request;
    // Whoever computes it anew stores it anew.
    stored_.erase(piece->content);
    if (present && objects_.stored_group(stored).kind == GroupModel::Kind::kFull &&
        piece->tokens % chunk_tokens_[stored] == 0) {
      holes_[raw(job.request)].push_back(
          {piece->chunk * chunk_tokens_[stored], piece->content, true});
    }
  }
}

bool JobJudge::has_failed(const Job& job, const Piece& piece) {
  return std::any_of(job.failed.begin(), job.failed.end(), [&](const Failed& one) {
    return one.chunk.group == piece.group && one.chunk.chunk == piece.chunk;
  });
}

std::uint32_t JobJudge::arrived(const Job& job, const OpenLoad& load) const {
  const auto has = [&](std::size_t stored, std::uint32_t chunk, std::uint32_t tokens) {
    return std::any_of(job.pieces.begin(), job.pieces.end(), [&](const Piece& piece) {
      if (raw(piece.group) != stored || piece.chunk != chunk || has_failed(job, piece))
        return false;
      const std::uint32_t wanted = std::min((chunk + 1) * chunk_tokens_[stored], tokens);
      return positional_[stored] ? piece.tokens >= wanted : piece.tokens == wanted;
    });
  };
  for (std::uint32_t tokens = load.hit; tokens > load.local; tokens -= objects_.alignment()) {
    bool all = true;
    for (std::size_t stored = 0; stored < objects_.num_stored() && all; ++stored) {
      const GroupModel& group = objects_.stored_group(stored);
      // The next token attends to itself only.
      if (group.kind == GroupModel::Kind::kWindow && group.window == 1) continue;
      for (std::uint32_t chunk = group.first_needed(tokens); chunk < group.chunks(tokens) && all;
           ++chunk) {
        all = (chunk + 1) * group.tokens <= load.local || has(stored, chunk, tokens);
      }
    }
    if (all) return tokens;
  }
  return load.local;
}

// Of a load whose ranks have told what they lack: it counts on all the rest, and names what it
// cannot count on.
void JobJudge::check_load_end(const LoadEnd& end, const Job& job, const OpenLoad& load) {
  if (!end.blocks_quiet || !job.in_time || job.whole || overtaken_loads_.contains(raw(end.job)) ||
      cut_loads_.contains(raw(end.job))) {
    return;
  }
  const auto place = [](const FailedBlock& block) {
    return std::tuple(raw(block.group), block.chunk, raw(block.block));
  };
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::int32_t>> failed;
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::int32_t>> told;
  for (std::size_t i = 0; i < job.pieces.size(); ++i) {
    const Piece& piece = job.pieces[i];
    if (has_failed(job, piece))
      failed.push_back(place({group_ids_[raw(piece.group)], piece.chunk, job.blocks[i]}));
  }
  for (const FailedBlock& block : end.failed) told.push_back(place(block));
  std::sort(failed.begin(), failed.end());
  std::sort(told.begin(), told.end());
  const std::string what = "load job " + number(raw(end.job));
  if (failed != told) {
    fail("load end", what + " names " + number(told.size()) + " blocks as failed, and " +
                         number(failed.size()) + " have");
  }
  const std::uint32_t valid = arrived(job, load);
  if (end.valid_tokens != valid) {
    fail("load end", what + " from " + number(load.local) + " to " + number(load.hit) +
                         " tokens ends with " + number(end.valid_tokens) +
                         " valid ones instead of " + number(valid));
  }
}

// What a lookup saw and a load did not find is told to be gone.
void JobJudge::owe_gone(const Job& job, bool present) {
  if (!options_.tell_changes) return;
  for (const Failed& one : job.late) {
    for (const Piece& piece : job.pieces) {
      const bool same = piece.group == one.chunk.group && piece.chunk == one.chunk.chunk;
      if (same && static_cast<ItemStatus>(one.chunk.status) == ItemStatus::kChecksumMismatch)
        lost_.insert(piece.content);
    }
  }
  std::unordered_set<std::string> told;  // once, whatever ranks miss it
  for (const Failed& one : job.failed) {
    const auto status = static_cast<ItemStatus>(one.chunk.status);
    if (status != ItemStatus::kMissing && status != ItemStatus::kChecksumMismatch) continue;
    for (const Piece& piece : job.pieces) {
      if (piece.group != one.chunk.group || piece.chunk != one.chunk.chunk) continue;
      lost_.insert(piece.content);
      const bool full = piece.tokens % chunk_tokens_[raw(piece.group)] == 0;
      const bool in_time = now_ < job.planned_at + options_.load_timeout;
      if (full && present && in_time && !job.whole && !purging_ &&
          told.insert(piece.content).second) {
        ++owed_gone_[piece.content];
      }
    }
  }
}

bool JobJudge::names_prefix(const StoreChange& change) const {
  BlockHash hash;
  if (change.hash.size() != hash.size()) return false;
  std::copy(change.hash.begin(), change.hash.end(), hash.begin());
  const auto tokens = objects_.tokens_of(hash);
  const std::size_t stored = static_cast<std::size_t>(
      std::find(group_ids_.begin(), group_ids_.end(), change.group) - group_ids_.begin());
  if (stored == group_ids_.size() || tokens.size() != change.tokens || tokens.empty()) return false;
  const std::uint32_t size = chunk_tokens_[stored];
  if (change.chunk != (change.tokens - 1) / size) return false;
  const std::uint32_t length = change.tokens % size == 0 ? size : hash_tokens_;
  if (change.parent.empty()) return change.tokens == length;
  if (change.parent.size() != hash.size()) return false;
  std::copy(change.parent.begin(), change.parent.end(), hash.begin());
  const auto before = objects_.tokens_of(hash);
  return before.size() + length == tokens.size() &&
         std::equal(before.begin(), before.end(), tokens.begin());
}

void JobJudge::told(const StoreChange& change) {
  const auto group = std::find(group_ids_.begin(), group_ids_.end(), change.group);
  const std::string what = std::string(change.stored ? "stored" : "gone") + ": chunk " +
                           number(change.chunk) + " of group " + number(raw(change.group)) +
                           ", at " + number(change.tokens) + " tokens";
  if (!names_prefix(change)) {
    fail("event", "an event of no such prefix, " + what);
    return;
  }
  std::string content(change.hash.begin(), change.hash.end());
  content += number(static_cast<std::uint64_t>(group - group_ids_.begin()));
  if (trace_ != nullptr) trace("told as " + what);
  if (change.stored ? may_[content]-- <= 0 : !lost_.contains(content))
    fail("event", "an event of what no report said, or said less often, " + what);
  if (change.stored && purging_) fail("event", "a purge removes what is told as " + what);
  // One that is not owed stands for no other that is.
  std::int64_t& owed = (change.stored ? owed_ : owed_gone_)[content];
  if (owed > 0) --owed;
}

std::string JobJudge::place_name(const ObjectPlace& place, std::string_view content) const {
  std::string name;
  for (const std::uint64_t part : {std::uint64_t{place.stored}, std::uint64_t{place.stage},
                                   std::uint64_t{place.pcp}, std::uint64_t{place.shard}}) {
    name += number(part) + " ";
  }
  return name + std::string(content);
}

void JobJudge::asking() {
  if (mode_ == StoreMode::kOff || mode_ == StoreMode::kWriteOnly)
    fail("mode", "the store is asked in mode " + std::string(to_string(mode_)));
  const bool wanted =
      std::any_of(open_questions_.begin(), open_questions_.end(),
                  [&](std::uint64_t request) { return access(RequestId{request}).load; });
  if (!wanted) fail("access", "the store is asked, and nobody who waits for an answer may load");
}

void JobJudge::asking(std::string_view key) {
  ObjectPlace place;
  const std::string wrong = objects_.read_key(key, place);
  if (!wrong.empty()) {
    fail("stage", wrong);
  } else if (!objects_.has_place(place)) {
    fail("stage",
         "a lookup asks for an object that its stage holds no layers of: " + std::string(key));
  }
}

void JobJudge::missed(std::string_view key) {
  ObjectPlace place;
  if (!objects_.read_key(key, place).empty()) return;  // told when it was asked for
  std::string content(place.hash.begin(), place.hash.end());
  lost_.insert(content + number(place.stored));
}

void JobJudge::removing(std::string_view key) {
  ObjectPlace place;
  const std::string wrong = objects_.read_key(key, place);
  if (!wrong.empty()) {
    fail("mismatch", wrong);
    return;
  }
  const std::string_view hash(reinterpret_cast<const char*>(place.hash.data()), place.hash.size());
  going_.insert(place_name(place, hash));
}

void JobJudge::removed(std::string_view key, bool still_there) {
  if (still_there) fail("mismatch", "a removed object is there: " + std::string(key));
}

void JobJudge::stored_anew(std::string_view key) {
  ObjectPlace place;
  if (damaged_.empty() || !objects_.read_key(key, place).empty()) return;
  std::string content(place.hash.begin(), place.hash.end());
  damaged_.erase(content + number(place.stored));
}

std::string JobJudge::check_removals() {
  std::string wrong;
  for (const std::string& place : must_go_) {
    if (!going_.contains(place)) wrong = "a damaged object is left in its place";
  }
  for (const std::string& place : going_) {
    if (!may_go_.contains(place)) wrong = "an object is removed that no load found damaged";
  }
  must_go_.clear();
  may_go_.clear();
  going_.clear();
  return wrong;
}

JobJudge::Avoided& JobJudge::avoided(StoreIndex group, const std::string& content) {
  const auto* const hash = reinterpret_cast<const std::uint8_t*>(content.data());
  return avoided_[detail::RecentPrefixes::tag_of({hash, sizeof(BlockHash)}, group) % kAvoided];
}

void JobJudge::avoid(StoreIndex group, const std::string& content) {
  Avoided& slot = avoided(group, content);
  // In which order one event's chunks come is the scheduler's affair.
  const bool alone = slot.at != now_ || slot.content == content;
  slot = {alone ? content : "", now_};
}

// What has failed here may fail for all who ask, but for what the next lookup sees by itself (R41).
void JobJudge::avoid_failed(const Job& job, bool told) {
  const auto seen_by_lookups = [](const Failed& one) {
    const auto status = static_cast<ItemStatus>(one.chunk.status);
    return status == ItemStatus::kMissing || status == ItemStatus::kNotReady ||
           status == ItemStatus::kUnavailable || status == ItemStatus::kCancelled;
  };
  for (const Piece& piece : job.pieces) {
    bool failed = false;
    // One that was damaged is absent until somebody stores it anew, and forgotten once it is
    // removed.
    bool certain = told && !damaged_.contains(piece.content);
    for (const Failed& one : job.failed) {
      if (one.chunk.group != piece.group || one.chunk.chunk != piece.chunk) continue;
      failed = true;
      certain &= !seen_by_lookups(one) &&
                 static_cast<ItemStatus>(one.chunk.status) != ItemStatus::kChecksumMismatch;
    }
    if (!failed) continue;
    if (certain) {
      avoid(piece.group, piece.content);
    } else {
      avoided(piece.group, piece.content) = {"", now_};
    }
  }
}

void JobJudge::check_unloadable(const JobRecord& record, StoreIndex group,
                                const std::string& content) {
  const auto asked = asked_at_.find(raw(record.request));
  if (asked == asked_at_.end()) return;
  const auto lately = [&](Instant failed) {
    return failed < asked->second && now_ < failed + options_.avoid_failed_for;
  };
  const Avoided& slot = avoided(group, content);
  if (slot.content == content && lately(slot.at)) {
    fail("avoided", "load job " + number(raw(record.id)) +
                        " names an object whose load had failed before it was asked for");
  }
  const auto damaged = damaged_.find(content);
  if (damaged != damaged_.end() && lately(damaged->second)) {
    fail("mismatch", "load job " + number(raw(record.id)) +
                         " names an object that was found damaged before it was asked for");
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
      if (job.lost[rank] && job.quiet_delivered[rank]) continue;  // it ended with its rank
      if (job.outcomes[rank] == 0)
        return "job " + number(id) + " never had an outcome on rank " + number(rank);
      if (job.quiets[rank] == 0)
        return "job " + number(id) + " never became quiet on rank " + number(rank);
    }
  }
  if (!open_loads_.empty())
    return "load job " + number(open_loads_.begin()->first) + " never ended";
  for (const auto* owed : {&owed_, &owed_gone_}) {
    for (const auto& [content, count] : *owed) {
      if (count > 0) {
        return std::string("nobody was told of an object that is ") +
               (owed == &owed_ ? "stored" : "gone");
      }
    }
  }
  return "";
}

std::string JobJudge::check_closed(std::uint32_t rank, std::size_t unquiet) const {
  for (const auto& [id, job] : jobs_) {
    if (job.lost[rank]) continue;
    if (job.outcomes[rank] == 0)
      return "job " + number(id) + " has no outcome although its worker has closed";
    if (job.quiets[rank] == 0 && unquiet == 0) {
      return "job " + number(id) + " is not quiet although its worker has closed";
    }
  }
  return "";
}

}  // namespace kvprism::sim
