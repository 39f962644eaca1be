// A store scheduler that refuses calls out of order instead of bearing them: for the first weeks of
// an engine's connector and for its debug builds.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/store/store_scheduler.h"

namespace kvprism {

// StoreScheduler takes every call in any order, and counts what it cannot use. Here such a call
// throws Error (kInvalidArgument; a report kMismatch) that names the call, its request, the state
// and what was expected, and does nothing, but for hashes of another prefix, which have replaced
// the request's, and for reports, of which what can be used has been taken:
//
//   allocated, wants_save, save, boundary, preempted, finished of a request that no lookup, prompt,
//     restrict or advanced has begun, or that has finished
//   allocated of other than all tokens that the last lookup offered, or 0; without an answer, or
//     with tables that have no block where the load writes
//   save, and advanced beyond the local tokens or with hashes, while an offer of tokens is open:
//     allocated has not been called
//   lookup, allocated, save, boundary, and advanced as above, while the request waits for a load
//   a lookup off the grid of S; hashes that do not continue those that are known, or null
//   save of tokens that wants_save did not offer, in this step or now, or with tables that are too
//     short for them
//   save and allocated without a row for every group; with a block outside of the pool, or one that
//     the tables name twice (groups with a pool of their own in host memory may)
//   boundary of a group that hands nothing off, of a null block, or off the grid
//   finished, preempted, take_released, and the next end_step, while take_acquired has blocks:
//     the engine would free what a job is about to use
//   end_step when take_released or take_load_ends have had something for a whole step
//   a report that cannot be read, of another epoch, or of chunks that its job does not move
//   rank_gone of a rank that the configuration does not have
//   a time before that of an earlier call; two calls at once
//
// What is not named here is as in StoreScheduler; through a reference to it nothing is checked.
// Ownership and threads: as StoreScheduler. Costs a look-up and a few comparisons a call, and a
// pass over the tables that it is given.
class KVPRISM_API CheckedScheduler : public StoreScheduler {
 public:
  CheckedScheduler(std::shared_ptr<const KeySchema> schema, std::shared_ptr<ObjectIndex> index,
                   const StoreSchedulerOptions& options);
  ~CheckedScheduler();

  void set_mode(StoreMode mode);
  void purge(Instant now);
  void restrict(RequestId request, RequestAccess access);
  void prompt(RequestId request, std::uint32_t prompt_tokens);
  LookupResult lookup(RequestId request, std::uint32_t prompt_tokens, const HashList& hashes,
                      std::uint32_t local_tokens, Instant now);
  std::optional<JobId> allocated(RequestId request, std::uint32_t external_tokens,
                                 const BlockRows& rows, Instant now);
  void advanced(RequestId request, std::uint32_t accepted_tokens, const HashList& hashes);
  TokenRange wants_save(RequestId request, Instant now);
  void save(RequestId request, const TokenRange& range, const BlockRows& rows, Instant now);
  void boundary(RequestId request, GroupId group, BlockId block, std::uint32_t tokens);
  void preempted(RequestId request);
  void finished(RequestId request, FinishReason how);
  const StepPlan& end_step(Instant now);
  bool report(std::span<const std::byte> bytes, Instant now);
  bool report(const WorkerReport& report, Instant now);
  void rank_gone(Rank rank, Instant now);
  void take_load_ends(std::vector<LoadEnd>& out);
  void take_changes(std::vector<StoreChange>& out);
  void take_acquired(std::vector<BlockId>& out);
  void take_released(std::vector<BlockId>& out);
  bool has_pending_work() const noexcept;

 private:
  struct State;
  class Call;
  std::unique_ptr<State> state_;
};

// What an engine's source names: checked where its assertions are.
#ifdef NDEBUG
using EngineScheduler = StoreScheduler;
#else
using EngineScheduler = CheckedScheduler;
#endif

}  // namespace kvprism
