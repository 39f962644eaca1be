#include "kvprism/checked/checked_scheduler.h"

#include <fmt/format.h>

#include <atomic>
#include <limits>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "kvprism/base/error.h"

namespace kvprism {
namespace {

// What the checks remember of a request.
struct Known {
  bool answered = false;      // its last lookup was not pending
  std::uint32_t local = 0;    // tokens, of the last lookup
  std::uint32_t offered = 0;  // tokens beyond `local`
  std::optional<JobId> loading;
};

std::string tokens(std::uint32_t count) { return std::to_string(count) + " tokens"; }

}  // namespace

struct CheckedScheduler::State {
  std::unordered_map<std::uint64_t, Known> requests;
  std::vector<BlockId> acquired;
  bool overdue = false;  // `acquired` has been there for a whole step
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

  [[noreturn]] void refuse(std::string value, std::string expected) const {
    std::string path = name_;
    if (request_) path += fmt::format("(request {})", raw(*request_));
    fail(ErrorCode::kInvalidArgument, "scheduler call",
         {std::move(path), std::move(value), std::move(expected), {}});
  }
  void at(Instant now) const {
    if (now < state().latest) {
      refuse(fmt::format("now is {} ns", now.ns),
             fmt::format("at least {} ns, the time of an earlier call", state().latest.ns));
    }
    state().latest = now;
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
  }
  void needs_acquired_taken() const {
    if (state().acquired.empty()) return;
    refuse(fmt::format("{} acquired blocks not taken", state().acquired.size()),
           "take_acquired first: a block freed before it may be reused while a job needs it");
  }
  // After a call that took hashes: did the scheduler refuse them?
  void check_hashes(const StoreSchedulerCounters& before, const HashList& hashes) const {
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
  void drain_acquired() const { scheduler_.StoreScheduler::take_acquired(state().acquired); }

 private:
  CheckedScheduler& scheduler_;
  const char* name_;
  std::optional<RequestId> request_;
};

CheckedScheduler::CheckedScheduler(std::shared_ptr<const KeySchema> schema,
                                   std::shared_ptr<ObjectIndex> index,
                                   const StoreSchedulerOptions& options)
    : StoreScheduler(std::move(schema), std::move(index), options),
      state_(std::make_unique<State>()) {}
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
  StoreScheduler::restrict(request, access);
}

void CheckedScheduler::prompt(RequestId request, std::uint32_t prompt_tokens) {
  const Call call(*this, "prompt", request);
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
  const StoreSchedulerCounters before = counters();
  const LookupResult result =
      StoreScheduler::lookup(request, prompt_tokens, hashes, local_tokens, now);
  call.check_hashes(before, hashes);
  Known& known = call.known();
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
  Known* const known = call.find();
  if (external_tokens != 0) {
    const bool answered = known != nullptr && known->answered;
    if (!answered || external_tokens != known->offered) {
      call.refuse(fmt::format("{} to load, {}", tokens(external_tokens),
                              answered ? tokens(known->offered) + " offered"
                                       : std::string("no answer of a lookup")),
                  "all that the last lookup of this request offered, or 0");
    }
    call.needs_rows(rows);
    const std::uint32_t end = known->local + external_tokens;
    for (const StoreIndex index : indices<StoreIndex>(projection().num_store_groups())) {
      const ResolvedGroup& group = projection().group(index);
      const std::uint32_t blocks = (end + group.tokens_per_block - 1) / group.tokens_per_block;
      if (rows[group.id].size() < blocks) {
        call.refuse(
            fmt::format("a table of {} blocks for group {}", rows[group.id].size(), raw(group.id)),
            fmt::format("at least {} blocks, for {}", blocks, tokens(end)));
      }
    }
  }
  const std::optional<JobId> job = StoreScheduler::allocated(request, external_tokens, rows, now);
  call.drain_acquired();
  if (known != nullptr) {
    known->answered = false;  // it is used up, or not wanted
    known->loading = job;
  }
  return job;
}

void CheckedScheduler::advanced(RequestId request, std::uint32_t accepted_tokens,
                                const HashList& hashes) {
  const Call call(*this, "advanced", request);
  call.needs_no_load();
  const StoreSchedulerCounters before = counters();
  StoreScheduler::advanced(request, accepted_tokens, hashes);
  call.check_hashes(before, hashes);
}

TokenRange CheckedScheduler::wants_save(RequestId request, Instant now) {
  const Call call(*this, "wants_save", request);
  call.at(now);
  return StoreScheduler::wants_save(request, now);
}

void CheckedScheduler::save(RequestId request, const TokenRange& range, const BlockRows& rows,
                            Instant now) {
  const Call call(*this, "save", request);
  call.at(now);
  call.needs_no_load();
  call.needs_rows(rows);
  const TokenRange wanted = StoreScheduler::wants_save(request, now);
  if (range.empty() || range.from != wanted.from || range.to > wanted.to ||
      (range.to != wanted.to && range.to % projection().scheduler_block_size() != 0)) {
    call.refuse(fmt::format("range [{}, {})", range.from, range.to),
                wanted.empty() ? std::string("no save, as wants_save has nothing")
                               : fmt::format("what wants_save says, [{}, {}), or a first part of "
                                             "it in multiples of {}",
                                             wanted.from, wanted.to,
                                             tokens(projection().scheduler_block_size())));
  }
  StoreScheduler::save(request, range, rows, now);
  call.drain_acquired();
}

void CheckedScheduler::boundary(RequestId request, GroupId group, BlockId block,
                                std::uint32_t prefix) {
  const Call call(*this, "boundary", request);
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
  call.needs_acquired_taken();
  StoreScheduler::preempted(request);
  if (Known* const known = call.find()) known->answered = false;
}

void CheckedScheduler::finished(RequestId request, FinishReason how) {
  const Call call(*this, "finished", request);
  call.needs_acquired_taken();
  StoreScheduler::finished(request, how);
  call.state().requests.erase(raw(request));
}

const StepPlan& CheckedScheduler::end_step(Instant now) {
  const Call call(*this, "end_step");
  call.at(now);
  if (call.state().overdue) call.needs_acquired_taken();
  const StepPlan& plan = StoreScheduler::end_step(now);
  call.drain_acquired();
  call.state().overdue = !call.state().acquired.empty();
  return plan;
}

void CheckedScheduler::report(std::span<const std::byte> bytes, Instant now) {
  const Call call(*this, "report");
  call.at(now);
  const std::uint64_t before = counters().reports_malformed;
  StoreScheduler::report(bytes, now);
  if (counters().reports_malformed != before) {
    call.refuse(fmt::format("{} bytes that cannot be read", bytes.size()),
                "reports as StoreWorker::poll gave them, one behind the other");
  }
}

void CheckedScheduler::report(const WorkerReport& report, Instant now) {
  const Call call(*this, "report");
  call.at(now);
  StoreScheduler::report(report, now);
}

void CheckedScheduler::take_load_ends(std::vector<LoadEnd>& out) {
  const Call call(*this, "take_load_ends");
  const std::size_t first = out.size();
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
  State& state = call.state();
  call.drain_acquired();
  out.insert(out.end(), state.acquired.begin(), state.acquired.end());
  state.acquired.clear();
  state.overdue = false;
}

void CheckedScheduler::take_released(std::vector<BlockId>& out) {
  const Call call(*this, "take_released");
  call.drain_acquired();
  call.needs_acquired_taken();
  StoreScheduler::take_released(out);
}

}  // namespace kvprism
