// Watches one engine's life from outside and knows what must be true of it: jobs, references,
// lookups.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kvprism/sim/engine_observer.h"
#include "sim/object_judge.h"

namespace kvprism::sim {

// One engine's jobs. Rules that hold for every rank's reports and every reference.
class JobJudge final : public EngineObserver {
 public:
  JobJudge(ObjectJudge& objects, const Projection& projection, const StoreSchedulerOptions& options,
           bool clean,
           std::uint32_t step_tokens);  // options.ranks workers report

  // The first broken rule, or "".
  const std::string& broken() const noexcept { return broken_; }
  const std::string& invariant() const noexcept { return invariant_; }
  std::string check_references();
  // At the end: what was promised and has not happened.
  std::string check_ended() const;
  // After a worker has closed: every job must have told its outcome.
  std::string check_closed(std::uint32_t rank, std::size_t unquiet) const;
  // The scheduler has been given this report.
  void delivered(const WorkerReport& report, Instant now);
  void set_now(Instant now) noexcept { now_ = now; }
  void set_mode(StoreMode mode) noexcept { mode_ = mode; }
  // From now until it leaves.
  void restrict(RequestId request, RequestAccess access) { access_[raw(request)] = access; }
  RequestAccess access(RequestId request) const;
  // The oldest request that waits for an answer of the store.
  std::optional<RequestId> asking_request() const;
  // Workers answer for every job of the scheduler's; else for none before their first.
  void answer_for_all(bool all) noexcept { answer_for_all_ = all; }
  // Whether the rank has got a plan with a job.
  bool had_job(std::uint32_t rank) const noexcept { return had_job_[rank]; }
  // The next plan with a job does not reach the rank, if its worker can answer for it.
  void lose_plan(std::uint32_t rank) noexcept { losing_ = rank; }
  std::uint64_t plans_lost() const noexcept { return plans_lost_; }
  // Ranks (bits) whose workers do not move.
  void hold_still(std::uint32_t ranks) noexcept { still_ = ranks; }
  // The rank's process ends, and the scheduler will be told of it.
  void rank_died(std::uint32_t rank);
  // And another one takes its place.
  void rank_replaced(std::uint32_t rank);
  // The scheduler has been told: nothing that the rank has not told holds a block.
  void rank_gone(std::uint32_t rank, Instant now);
  // Called in the middle of each step.
  void set_moment(std::function<void()> moment) { moment_ = std::move(moment); }
  void set_held_channel(std::vector<WorkerReport>* channel) noexcept { channel_ = channel; }
  void set_trace(std::vector<std::string>* trace) noexcept { trace_ = trace; }
  // A purge has begun: what was learnt of the store's content is void.
  void purged();
  void purge_done() noexcept { purging_ = false; }
  // The request of this id has ended; a later one of the same id is another one.
  void forget(RequestId request);
  // Where the request leaves what others have stored (W-C19); 0: nowhere, or not known for certain.
  std::uint32_t junction(RequestId request) const;
  // What the scheduler announces.
  void told(const StoreChange& change);
  // The scheduler asks which objects are there.
  void asking();
  void asking(std::string_view key);
  // The store has not found an object that was asked for.
  void missed(std::string_view key);
  // The scheduler wants an object removed that is not what was stored; `key` is its name.
  void removing(std::string_view key);
  // And it has been: what is stored under that name now is another one.
  void removed(std::string_view key, bool still_there);
  // A new object is in the store: the one of its name that was damaged has gone.
  void stored_anew(std::string_view key);
  // The request whose load has found damage since the last call; 0: none.
  RequestId take_finder() noexcept { return std::exchange(finder_, RequestId{}); }
  // After an event: damage that was reported leads to removals, and nothing else does.
  std::string check_removals();
  bool loading(RequestId request) const;
  // The latest plan with a job, encoded.
  const std::vector<std::byte>& last_plan() const noexcept { return last_plan_; }
  std::uint64_t jobs() const noexcept { return jobs_.size(); }
  std::uint64_t loads() const noexcept { return num_loads_; }

  void hash_made(std::span<const std::uint8_t> hash,
                 std::span<const std::uint32_t> tokens) override;
  void looked_up(RequestId request, std::span<const std::uint32_t> tokens, std::uint32_t local,
                 const LookupResult& answer) override;
  void save_planned(RequestId request, const TokenRange& range) override;
  void planned(const StepPlan& plan) override;
  void scheduled() override {
    if (moment_) moment_();
  }
  bool plan_reaches(std::uint32_t rank, const StepPlan& plan) override;
  bool moves(std::uint32_t rank) override { return ((still_ | dead_) >> rank & 1) == 0; }
  // Whether all that the request has computed since it began, or began again, is to be stored:
  // neither a purge nor the end of a rank has come between.
  bool sound(RequestId request) const { return sound_.contains(raw(request)); }
  void preempted(RequestId request) override {
    outdated_.erase(raw(request));
    looked_up_.erase(raw(request));
  }
  void left(RequestId request) override;
  void outdated(RequestId request) override { outdated_.insert(raw(request)); }
  void load_started(RequestId request, JobId job, std::uint32_t local, std::uint32_t hit) override;
  void load_ended(const LoadEnd& end) override;
  void acquired(std::span<const BlockId> blocks) override;
  void released(std::span<const BlockId> blocks) override;
  bool hold_report(const WorkerReport& report) override;

 private:
  static constexpr std::uint32_t kMaxRanks = 4;
  static constexpr std::size_t kAvoided = 1024;

  // One chunk of a save, and the name of its content: the group and the hash of its prefix.
  struct Piece {
    StoreIndex group{};
    std::uint32_t chunk = 0;
    std::uint32_t tokens = 0;  // of the prefix
    std::string content;
  };
  struct Failed {
    std::uint32_t rank = 0;
    FailedChunk chunk{};
  };
  // Where a save failed and was not planned again.
  struct Hole {
    std::uint32_t tokens = 0;
    std::string content;
    bool whole_prefix = false;  // needed wherever a hit ends
  };
  struct Job {
    RequestId request{};
    JobKind kind{};
    bool hand_off = false;         // or the end of a prompt: a failure is no hole
    std::uint32_t generation = 0;  // of the request
    Instant planned_at{};
    std::vector<BlockId> blocks;
    // By rank: told by its worker, and delivered to the scheduler.
    std::array<std::uint32_t, kMaxRanks> outcomes{};
    std::array<std::uint32_t, kMaxRanks> quiets{};
    std::uint32_t asked = 0;             // plans that asked about it: each may be answered
    std::array<bool, kMaxRanks> lost{};  // the rank never had its plan, or has ended
    std::array<bool, kMaxRanks> outcome_delivered{};
    std::array<bool, kMaxRanks> quiet_delivered{};
    std::vector<Piece> pieces;
    bool whole = false;          // a rank failed as a whole
    bool in_time = false;        // of loads: the outcome was there before their bound
    bool named = true;           // its request was there when it was planned
    std::vector<Failed> failed;  // on any rank
    std::vector<Failed> late;    // told when the outcome was known: true, and nobody's duty
  };
  struct OpenLoad {
    RequestId request{};
    std::uint32_t local = 0;
    std::uint32_t hit = 0;
  };
  // A save of the request, of which a rank that has ended had a part, has not ended yet.
  bool ends_later(RequestId request) const;
  void check_allowed(const JobRecord& record);
  bool mode_allows(JobKind kind) const noexcept;
  bool everywhere(const std::array<bool, kMaxRanks>& flags) const;
  void fail(const char* invariant, std::string what);
  void trace(std::string line);
  void check_unloadable(const JobRecord& record, StoreIndex group, const std::string& content);
  // Of chunks whose load has failed; a smaller one than the scheduler's forgets all that it does.
  struct Avoided {
    std::string content;  // "": unknown which
    Instant at{INT64_MIN / 2};
  };
  Avoided& avoided(StoreIndex group, const std::string& content);
  void avoid(StoreIndex group, const std::string& content);
  void avoid_failed(const Job& job, bool told);
  void save_delivered(Job& job, bool counts, bool present);
  void load_delivered(Job& job, bool in_time, bool present);
  void owe_gone(const Job& job, bool present);
  void check_load_end(const LoadEnd& end, const Job& job, const OpenLoad& load);
  static bool has_failed(const Job& job, const Piece& piece);
  // The longest prefix of which the load has brought all that the engine has not.
  std::uint32_t arrived(const Job& job, const OpenLoad& load) const;
  bool names_prefix(const StoreChange& change) const;
  std::string place_name(const ObjectPlace& place, std::string_view content) const;

  ObjectJudge& objects_;
  StoreSchedulerOptions options_;
  bool clean_;
  std::uint32_t step_tokens_;
  std::uint32_t hash_tokens_;
  std::uint32_t tp_;
  std::uint32_t pcp_;
  bool drafts_;
  bool retains_;
  std::vector<std::uint32_t> chunk_tokens_;  // by store index
  std::vector<bool> positional_;             // by store index
  Instant now_{};
  StoreMode mode_ = StoreMode::kReadWrite;
  std::unordered_map<std::uint64_t, RequestAccess> access_;  // of restricted requests
  std::unordered_set<std::uint64_t> open_questions_;         // requests that wait for an answer
  std::unordered_set<std::uint64_t> begun_;                  // loads of this step, by job
  std::function<void()> moment_;
  std::uint32_t losing_ = kMaxRanks;
  std::uint64_t plans_lost_ = 0;
  std::array<bool, kMaxRanks> had_job_{};
  bool answer_for_all_ = false;
  std::uint32_t still_ = 0;  // bits
  std::uint32_t dead_ = 0;
  std::string broken_;
  std::string invariant_;
  std::vector<std::byte> last_plan_;
  std::vector<WorkerReport>* channel_ = nullptr;
  std::vector<std::string>* trace_ = nullptr;

  std::map<std::uint64_t, Job> jobs_;
  std::unordered_map<std::uint64_t, OpenLoad> open_loads_;  // by job
  std::unordered_set<std::uint64_t> ended_loads_;
  std::unordered_set<std::uint64_t> overtaken_loads_;  // by a purge
  std::unordered_set<std::uint64_t> excused_loads_;    // the same, or by the end of a rank
  std::unordered_set<std::uint64_t> sound_;            // requests
  std::vector<std::uint64_t> cut_saves_;               // by the end of a rank
  std::unordered_set<std::uint64_t> cut_loads_;        // which says nothing of the store
  std::uint64_t num_loads_ = 0;
  std::unordered_map<std::uint64_t, std::vector<Hole>> holes_;  // by request
  std::unordered_set<std::string> stored_;  // contents that every rank has said to have stored
  std::unordered_map<std::uint64_t, std::uint32_t> generations_;
  std::unordered_set<std::uint64_t>
      failed_loads_;  // requests that must compute for themselves now (R41)
  std::unordered_set<std::uint64_t> overtaken_;  // whose loads a purge has ended: not asked again
  std::unordered_set<std::uint64_t> outdated_;   // requests that rest on what a purge came after
  struct Asked {
    std::uint32_t local = 0;
    std::uint32_t at_least = 0;
    std::uint32_t shared = 0;
  };
  std::unordered_map<std::uint64_t, Asked>
      asked_;  // pending lookups, by request, and what they must find
  std::unordered_map<std::uint64_t, std::uint32_t> junctions_;  // by request
  std::unordered_map<std::uint64_t, Instant> asked_at_;         // the question being answered
  std::unordered_set<std::uint64_t> answered_;                  // the next question is a new one
  std::unordered_set<std::uint64_t> left_;                      // the scheduler forgets them
  std::unordered_set<std::uint64_t> looked_up_;                 // since they began, or began again

  // Announcements: contents that are owed one, or may have one, of each save that stored it.
  bool purging_ = false;
  std::unordered_map<std::string, std::int64_t> owed_;
  std::unordered_map<std::string, std::int64_t> owed_gone_;
  std::unordered_map<std::string, std::int64_t> may_;
  std::unordered_set<std::string> lost_;
  std::vector<GroupId> group_ids_;  // by store index

  // Damage: what a load has told of an object of one rank.
  std::unordered_map<std::string, Instant> damaged_;  // by content
  std::vector<Avoided> avoided_{kAvoided};
  RequestId finder_{};
  std::unordered_set<std::string> must_go_;  // places, in this event
  std::unordered_set<std::string> may_go_;
  std::unordered_set<std::string> going_;
  std::vector<std::int64_t> held_;      // acquired and not released, by block
  std::vector<std::int64_t> at_least_;  // by jobs that may still touch the block
  std::int64_t holds_ = 0;              // their sum
  std::vector<std::int64_t> at_most_;   // and by jobs whose end is not known in full
};

}  // namespace kvprism::sim
