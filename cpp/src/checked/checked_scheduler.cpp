#include "kvprism/checked/checked_scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "hit/fetched_chunks.h"
#include "kvprism/base/error.h"
#include "kvprism/hit/hit_group.h"

namespace kvprism {
namespace {

// What the checks remember of a request that has begun and not finished.
struct Known {
  bool answered = false;      // its last lookup was not pending, and nothing was allocated since
  std::uint32_t local = 0;    // tokens, of the last lookup
  std::uint32_t offered = 0;  // tokens beyond `local`
  std::optional<JobId> loading;
  TokenRange wanted;            // what wants_save has offered, not yet planned
  std::uint64_t wanted_in = 0;  // the step in which it did
};

std::string tokens(std::uint32_t count) { return std::to_string(count) + " tokens"; }

// What an engine has to take, kept here from one step to the next.
template <class Item>
struct Untaken {
  std::vector<Item> items;
  bool overdue = false;  // they have been there for a whole step

  void give(std::vector<Item>& out) {
    std::move(items.begin(), items.end(), std::back_inserter(out));
    items.clear();
    overdue = false;
  }
};

}  // namespace

struct CheckedScheduler::State {
  explicit State(const Projection& groups) : hits(hit_groups(groups)) {}

  std::vector<HitGroup> hits;  // by store group
  std::unordered_map<std::uint64_t, Known> requests;
  Untaken<BlockId> acquired;
  Untaken<BlockId> released;
  Untaken<LoadEnd> ends;
  std::unordered_map<std::int32_t, GroupId> named;  // the blocks of the tables of one call
  std::uint64_t step = 0;
  Instant latest{std::numeric_limits<std::int64_t>::min()};
  std::atomic<bool> busy{false};
};

// One call, while it runs: its name, and the only place that refuses.
class CheckedScheduler::Call {
 public:
  Call(CheckedScheduler& scheduler, const char* name) : scheduler_(scheduler), name_(name) {
    if (state().busy.exchange(true, std::memory_order_acquire)) {
      refuse("another call is running", "one call at a time, from the engine's thread");
    }
  }
  Call(CheckedScheduler& scheduler, const char* name, RequestId request) : Call(scheduler, name) {
    request_ = request;
  }
  ~Call() { state().busy.store(false, std::memory_order_release); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  State& state() const { return *scheduler_.state_; }
  Known& known() const { return state().requests[raw(*request_)]; }
  // Null for a request that no lookup has named: nothing is remembered of it.
  Known* find() const {
    const auto found = state().requests.find(raw(*request_));
    return found == state().requests.end() ? nullptr : &found->second;
  }

  [[noreturn]] void refuse(std::string value, std::string expected,
                           ErrorCode code = ErrorCode::kInvalidArgument) const {
    if (earlier_) state().latest = *earlier_;
    std::string path = name_;
    if (request_) path += fmt::format("(request {})", raw(*request_));
    fail(code, "scheduler call", {std::move(path), std::move(value), std::move(expected), {}});
  }
  void at(Instant now) const {
    if (now < state().latest) {
      refuse(fmt::format("now is {} ns", now.ns),
             fmt::format("at least {} ns, the time of an earlier call", state().latest.ns));
    }
    earlier_ = std::exchange(state().latest, now);
  }
  Known& needs_known() const {
    Known* const request = find();
    if (request == nullptr) {
      refuse("not known",
             "a request that lookup, prompt, restrict or advanced has begun and "
             "finished has not ended");
    }
    return *request;
  }
  void needs_no_offer() const {
    const Known* const request = find();
    if (request == nullptr || !request->answered || request->offered == 0) return;
    refuse(tokens(request->offered) + " offered", "allocated first, with all of them or 0");
  }
  void needs_no_load() const {
    const Known* const request = find();
    if (request == nullptr || !request->loading) return;
    refuse(fmt::format("waiting for load {}", raw(*request->loading)),
           "the job's LoadEnd first: until then its blocks belong to the load");
  }
  void needs_rows(const BlockRows& rows) const {
    const std::size_t groups = scheduler_.projection().num_groups();
    if (rows.size() != groups) {
      refuse(fmt::format("{} block tables", rows.size()),
             fmt::format("{}, one for every group of the engine, stored or not", groups));
    }
    state().named.clear();
    for (const GroupId group : indices<GroupId>(groups)) {
      if (rows[group].data() == nullptr && !rows[group].empty())
        refuse(fmt::format("a null table for group {}", raw(group)), "an array of block ids");
      if (scheduler_.projection().group(group).host_resident) continue;  // of another pool
      for (const BlockId block : rows[group]) needs_own_block(group, block);
    }
  }
  // A table's entry: the null block, or one of the pool that nothing else of the request has.
  void needs_own_block(GroupId group, BlockId block) const {
    const std::uint32_t blocks = scheduler_.projection().num_blocks();
    if (raw(block) < 0 || static_cast<std::uint32_t>(raw(block)) >= blocks) {
      refuse(fmt::format("block {} in the table of group {}", raw(block), raw(group)),
             fmt::format("0 to {}, the blocks of the pool", blocks - 1));
    }
    if (raw(block) == 0) return;
    const auto [other, fresh] = state().named.emplace(raw(block), group);
    if (fresh) return;
    refuse(other->second == group
               ? fmt::format("block {} twice in the table of group {}", raw(block), raw(group))
               : fmt::format("block {} in the tables of groups {} and {}", raw(block),
                             raw(other->second), raw(group)),
           "a block of its own for every entry");
  }
  // Entries for all tokens before `end`, and in `chunks` no null block.
  void needs_blocks(const BlockRows& rows, const ResolvedGroup& group, std::uint32_t end,
                    const ChunkRange& chunks) const {
    const std::span<const BlockId> row = rows[group.id];
    const std::uint32_t blocks = end / group.tokens_per_block + (end % group.tokens_per_block != 0);
    if (row.size() < blocks) {
      refuse(fmt::format("a table of {} blocks for group {}", row.size(), raw(group.id)),
             fmt::format("at least {} blocks, for {}", blocks, tokens(end)));
    }
    for (std::uint32_t chunk = chunks.first; chunk < std::min(chunks.end, blocks); ++chunk) {
      if (raw(row[chunk]) != 0) continue;
      refuse(
          fmt::format("the null block as entry {} of the table of group {}", chunk, raw(group.id)),
          fmt::format("the block of tokens {} to {}", chunk * group.tokens_per_block,
                      (chunk + 1) * group.tokens_per_block));
    }
  }
  void needs_acquired_taken() const {
    if (state().acquired.items.empty()) return;
    refuse(fmt::format("{} acquired blocks not taken", state().acquired.items.size()),
           "take_acquired first: a block freed before it may be reused while a job needs it");
  }
  void needs_hashes(const HashList& hashes) const {
    if (hashes.count == 0 || hashes.data != nullptr) return;
    refuse(fmt::format("{} hashes at a null address", hashes.count), "an array of hashes, or none");
  }
  // After a call that took hashes: did the scheduler refuse them?
  void check_hashes(const StoreSchedulerCounters& before, const HashList& hashes) const {
    earlier_.reset();
    const StoreSchedulerCounters after = scheduler_.counters();
    if (after.hashes_refused != before.hashes_refused) {
      refuse(fmt::format("hashes {} to {} of {} bytes", hashes.first, hashes.end(), hashes.width),
             fmt::format("hashes of one width that begin at or before number {}",
                         scheduler_.known_hashes(*request_)));
    }
    if (after.requests_replaced != before.requests_replaced) {
      refuse("other hashes than before",
             "the same prefix, or finished() before the id is used again");
    }
  }
  // Before the caller sees the state that the call has left.
  void drain_acquired() const { scheduler_.StoreScheduler::take_acquired(state().acquired.items); }
  // After a report: was there something in it that is of no use?
  void check_report(const StoreSchedulerCounters& before, const std::string& what) const {
    earlier_.reset();
    const StoreSchedulerCounters after = scheduler_.counters();
    if (after.reports_foreign != before.reports_foreign) {
      refuse(what + " of another epoch",
             fmt::format("reports of epoch {}, from workers that take no other scheduler's plans",
                         scheduler_.options().epoch),
             ErrorCode::kMismatch);
    }
    if (after.reports_malformed != before.reports_malformed) {
      refuse(what + " that cannot be read, or tells of chunks that its job does not move",
             "reports as a worker's poll gave them, one behind the other", ErrorCode::kMismatch);
    }
  }

 private:
  CheckedScheduler& scheduler_;
  const char* name_;
  std::optional<RequestId> request_;
  mutable std::optional<Instant> earlier_;  // the clock, while the call has done nothing
};

CheckedScheduler::CheckedScheduler(std::shared_ptr<const KeySchema> schema,
                                   std::shared_ptr<ObjectIndex> index,
                                   const StoreSchedulerOptions& options)
    : StoreScheduler(std::move(schema), std::move(index), options),
      state_(std::make_unique<State>(projection())) {}
CheckedScheduler::~CheckedScheduler() = default;

void CheckedScheduler::set_mode(StoreMode mode) {
  const Call call(*this, "set_mode");
  StoreScheduler::set_mode(mode);
}

void CheckedScheduler::purge(Instant now) {
  const Call call(*this, "purge");
  call.at(now);
  StoreScheduler::purge(now);
}

void CheckedScheduler::restrict(RequestId request, RequestAccess access) {
  const Call call(*this, "restrict", request);
  call.known();
  StoreScheduler::restrict(request, access);
}

void CheckedScheduler::prompt(RequestId request, std::uint32_t prompt_tokens) {
  const Call call(*this, "prompt", request);
  call.known();
  StoreScheduler::prompt(request, prompt_tokens);
}

LookupResult CheckedScheduler::lookup(RequestId request, std::uint32_t prompt_tokens,
                                      const HashList& hashes, std::uint32_t local_tokens,
                                      Instant now) {
  const Call call(*this, "lookup", request);
  call.at(now);
  call.needs_no_load();
  const std::uint32_t step = projection().scheduler_block_size();
  if (local_tokens % step != 0) {
    call.refuse("local hit of " + tokens(local_tokens), "a multiple of " + tokens(step));
  }
  if (local_tokens > prompt_tokens) {
    call.refuse("local hit of " + tokens(local_tokens),
                "at most the prompt, " + tokens(prompt_tokens));
  }
  call.needs_hashes(hashes);
  // The scheduler remembers the request also when it refuses the hashes.
  Known& known = call.known();
  known.answered = false;
  known.wanted = {};
  const StoreSchedulerCounters before = counters();
  const LookupResult result =
      StoreScheduler::lookup(request, prompt_tokens, hashes, local_tokens, now);
  call.check_hashes(before, hashes);
  known.answered = !result.pending;
  known.local = local_tokens;
  known.offered = result.external_tokens;
  return result;
}

std::optional<JobId> CheckedScheduler::allocated(RequestId request, std::uint32_t external_tokens,
                                                 const BlockRows& rows, Instant now) {
  const Call call(*this, "allocated", request);
  call.at(now);
  call.needs_no_load();
  Known& known = call.needs_known();
  if (external_tokens != 0) {
    if (!known.answered || external_tokens != known.offered) {
      call.refuse(fmt::format("{} to load, {}", tokens(external_tokens),
                              known.answered ? tokens(known.offered) + " offered"
                                             : std::string("no answer of a lookup")),
                  "all that the last lookup of this request offered, or 0");
    }
    call.needs_rows(rows);
    const std::uint32_t end = known.local + external_tokens;
    for (const StoreIndex index : indices<StoreIndex>(projection().num_store_groups())) {
      call.needs_blocks(rows, projection().group(index), end,
                        detail::fetched_chunks(state_->hits[raw(index)], end, known.local));
    }
  }
  const std::optional<JobId> job = StoreScheduler::allocated(request, external_tokens, rows, now);
  call.drain_acquired();
  known.answered = false;  // it is used up, or not wanted
  known.loading = job;
  return job;
}

void CheckedScheduler::advanced(RequestId request, std::uint32_t accepted_tokens,
                                const HashList& hashes) {
  const Call call(*this, "advanced", request);
  call.needs_hashes(hashes);
  // Before a purge also of requests that wait, whose local tokens are computed.
  Known& known = call.known();
  if (accepted_tokens > known.local || hashes.count != 0) {
    call.needs_no_load();
    call.needs_no_offer();
  }
  known.wanted = {};
  const StoreSchedulerCounters before = counters();
  StoreScheduler::advanced(request, accepted_tokens, hashes);
  call.check_hashes(before, hashes);
}

TokenRange CheckedScheduler::wants_save(RequestId request, Instant now) {
  const Call call(*this, "wants_save", request);
  call.at(now);
  Known& known = call.needs_known();
  known.wanted = StoreScheduler::wants_save(request, now);
  known.wanted_in = state_->step;
  return known.wanted;
}

void CheckedScheduler::save(RequestId request, const TokenRange& range, const BlockRows& rows,
                            Instant now) {
  const Call call(*this, "save", request);
  call.at(now);
  Known& known = call.needs_known();
  call.needs_no_load();
  call.needs_no_offer();
  call.needs_rows(rows);
  // A report may have come since; what was offered in this step may be saved.
  const bool offered = known.wanted_in == state_->step && !known.wanted.empty();
  const TokenRange wanted = offered ? known.wanted : StoreScheduler::wants_save(request, now);
  if (range.empty() || range.from != wanted.from || range.to > wanted.to ||
      (range.to != wanted.to && range.to % projection().scheduler_block_size() != 0)) {
    call.refuse(fmt::format("range [{}, {})", range.from, range.to),
                wanted.empty() ? std::string("no save, as wants_save has nothing")
                               : fmt::format("what wants_save says, [{}, {}), or a first part of "
                                             "it in multiples of {}",
                                             wanted.from, wanted.to,
                                             tokens(projection().scheduler_block_size())));
  }
  for (const StoreIndex index : indices<StoreIndex>(projection().num_store_groups())) {
    const ResolvedGroup& group = projection().group(index);
    if (group.traits.save != SaveRule::kPositional) continue;
    // Of a window the oldest blocks may be gone; a prefix has all of them.
    ChunkRange chunks;
    if (group.traits.hit == HitRule::kPrefix)
      chunks = {range.from / group.tokens_per_block, UINT32_MAX};
    call.needs_blocks(rows, group, range.to, chunks);
  }
  StoreScheduler::save(request, range, rows, now);
  known.wanted = {};
  call.drain_acquired();
}

void CheckedScheduler::boundary(RequestId request, GroupId group, BlockId block,
                                std::uint32_t prefix) {
  const Call call(*this, "boundary", request);
  call.needs_known();
  call.needs_no_load();
  if (raw(group) >= projection().num_groups() ||
      projection().group(group).traits.save != SaveRule::kHandOff) {
    call.refuse(fmt::format("group {}", raw(group)), "a group whose states are handed off");
  }
  const std::uint64_t before = counters().offers_refused;
  StoreScheduler::boundary(request, group, block, prefix);
  call.drain_acquired();
  if (counters().offers_refused != before) {
    call.refuse(fmt::format("block {} at {}", raw(block), tokens(prefix)),
                fmt::format("a block of the pool, at a multiple of {} whose hash is known",
                            tokens(projection().hit_alignment())));
  }
}

void CheckedScheduler::preempted(RequestId request) {
  const Call call(*this, "preempted", request);
  Known& known = call.needs_known();
  call.needs_acquired_taken();
  StoreScheduler::preempted(request);
  known.answered = false;
  known.wanted = {};
}

void CheckedScheduler::finished(RequestId request, FinishReason how) {
  const Call call(*this, "finished", request);
  call.needs_known();
  call.needs_acquired_taken();
  StoreScheduler::finished(request, how);
  call.state().requests.erase(raw(request));
}

const StepPlan& CheckedScheduler::end_step(Instant now) {
  const Call call(*this, "end_step");
  call.at(now);
  State& state = call.state();
  if (state.acquired.overdue) call.needs_acquired_taken();
  if (state.released.overdue) {
    call.refuse(fmt::format("{} released blocks not taken", state.released.items.size()),
                "take_released once a step: they are nobody's until then");
  }
  if (state.ends.overdue) {
    call.refuse(fmt::format("{} load ends not taken", state.ends.items.size()),
                "take_load_ends once a step: their requests wait for them");
  }
  StoreScheduler::take_released(state.released.items);
  StoreScheduler::take_load_ends(state.ends.items);
  state.released.overdue = !state.released.items.empty();
  state.ends.overdue = !state.ends.items.empty();
  const StepPlan& plan = StoreScheduler::end_step(now);
  ++state.step;
  call.drain_acquired();
  state.acquired.overdue = !state.acquired.items.empty();
  return plan;
}

bool CheckedScheduler::report(std::span<const std::byte> bytes, Instant now) {
  const Call call(*this, "report");
  call.at(now);
  const StoreSchedulerCounters before = counters();
  const bool all = StoreScheduler::report(bytes, now);
  call.check_report(before, fmt::format("{} bytes", bytes.size()));
  return all;
}

bool CheckedScheduler::report(const WorkerReport& report, Instant now) {
  const Call call(*this, "report");
  call.at(now);
  const StoreSchedulerCounters before = counters();
  const bool all = StoreScheduler::report(report, now);
  call.check_report(before, fmt::format("a report of {} jobs", report.jobs.size()));
  return all;
}

void CheckedScheduler::rank_gone(Rank rank, Instant now) {
  const Call call(*this, "rank_gone");
  call.at(now);
  if (raw(rank) >= options().ranks) {
    call.refuse(fmt::format("rank {}", raw(rank)), fmt::format("a rank below {}", options().ranks));
  }
  StoreScheduler::rank_gone(rank, now);
}

void CheckedScheduler::take_load_ends(std::vector<LoadEnd>& out) {
  const Call call(*this, "take_load_ends");
  const std::size_t first = out.size();
  call.state().ends.give(out);
  StoreScheduler::take_load_ends(out);
  for (std::size_t i = first; i < out.size(); ++i) {
    const auto found = call.state().requests.find(raw(out[i].request));
    // The id may serve another request now, whose load is another job.
    if (found != call.state().requests.end() && found->second.loading == out[i].job)
      found->second.loading.reset();
  }
}

void CheckedScheduler::take_changes(std::vector<StoreChange>& out) {
  const Call call(*this, "take_changes");
  StoreScheduler::take_changes(out);
}

void CheckedScheduler::take_acquired(std::vector<BlockId>& out) {
  const Call call(*this, "take_acquired");
  call.drain_acquired();
  call.state().acquired.give(out);
}

void CheckedScheduler::take_released(std::vector<BlockId>& out) {
  const Call call(*this, "take_released");
  call.drain_acquired();
  call.needs_acquired_taken();
  call.state().released.give(out);
  StoreScheduler::take_released(out);
}

bool CheckedScheduler::has_pending_work() const noexcept {
  return StoreScheduler::has_pending_work() || !state_->released.items.empty() ||
         !state_->ends.items.empty();
}

}  // namespace kvprism
