// A simulated hybrid serving engine: makes the calls of a real one, in its order, and checks every
// byte it loads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvprism/base/ids.h"
#include "kvprism/group/projection.h"
#include "kvprism/run/instant.h"
#include "kvprism/sim/engine_observer.h"
#include "kvprism/sim/sim_memory.h"
#include "kvprism/store/store_scheduler.h"
#include "kvprism/store/store_worker.h"

namespace kvprism::sim {

struct EngineOptions {
  bool local_cache = true;                    // the engine's own prefix cache
  std::uint32_t token_budget = 2048;          // tokens computed per step
  std::uint32_t max_running = 8;              // requests computed per step
  std::uint32_t max_model_tokens = 1u << 20;  // a prompt with its output must fit
  bool pump_workers = true;                   // false: threads of their own do it
  bool keep_blocks_of_aborted_loads =
      true;  // until the load ends; false: only the job's references hold them
  bool offer_states_late = false;  // in the step after the one that computes them
  bool aligned_steps = true;       // a prefill step ends where a state can be kept; false: anywhere
  bool resume_at_once = false;     // what a pass has preempted may start again in the same pass
  // Tokens that a draft model proposes in each decoding step. Some of them are accepted, and the
  // bytes of the others are overwritten later. Windows must retain as many.
  std::uint32_t draft_tokens = 0;
};

struct Request {
  RequestId id{};
  std::vector<std::uint32_t> prompt;  // token ids, at least one
  std::uint32_t max_new_tokens = 1;   // at least one
  RequestAccess access{};
};

struct FinishedRequest {
  RequestId id{};
  bool aborted = false;
  bool rejected = false;  // can never fit into the pool
  std::uint32_t prompt_tokens = 0;
  std::uint32_t local_hit_tokens = 0;     // of its first start
  std::uint32_t external_hit_tokens = 0;  // delivered by the store at its first start
  std::uint32_t found_tokens = 0;  // the most that one of its starts found, local or in the store
  std::uint32_t preemptions = 0;
  std::vector<std::uint32_t> output;  // a function of the tokens before each
};

// Chunks of one group, in the engine's order of groups.
struct GroupStats {
  GroupId group{};
  std::uint64_t chunks_saved = 0;   // planned for the store
  std::uint64_t chunks_loaded = 0;  // planned to be fetched
  std::uint64_t bytes_loaded = 0;   // arrived and compared
  std::uint64_t bytes_mismatched = 0;
};

struct EngineStats {
  std::uint64_t steps = 0;
  std::uint64_t submitted = 0;
  std::uint64_t finished = 0;  // completed
  std::uint64_t aborted = 0;
  std::uint64_t rejected = 0;
  std::uint64_t preemptions = 0;
  std::uint64_t resumed_at_once = 0;  // in the pass that had preempted them
  std::uint64_t prompt_tokens = 0;    // of submitted requests
  std::uint64_t local_hit_tokens = 0;
  std::uint64_t external_hit_tokens = 0;  // delivered
  std::uint64_t computed_tokens = 0;
  std::uint64_t generated_tokens = 0;
  std::uint64_t rejected_tokens = 0;  // that a draft model proposed
  std::uint64_t loads_complete = 0;
  std::uint64_t loads_partial = 0;
  std::uint64_t loads_detached = 0;
  std::uint64_t jobs_saved = 0;  // planned
  std::uint64_t jobs_loaded = 0;
  std::uint64_t bytes_verified = 0;  // loaded bytes compared with the oracle when their load ended
  std::uint64_t bytes_mismatched = 0;
  std::vector<GroupStats> groups;
};

struct VerifyResult {
  std::uint64_t bytes = 0;
  std::uint64_t mismatched = 0;
  std::string first;  // where the first mismatch is, in words
};

// One worker and the memory that its map describes.
struct EngineRank {
  std::shared_ptr<StoreWorker> worker;
  std::shared_ptr<SimMemory> memory;
};

// In virtual time a driver calls begin_step, finish_step, pump and deliver as it likes; in real
// time step() does all. Ownership: shares scheduler, workers and memories. Threads: one.
class Engine {
 public:
  Engine(std::shared_ptr<const Projection> projection, std::shared_ptr<StoreScheduler> scheduler,
         std::vector<EngineRank> ranks, const EngineOptions& options,
         EngineObserver* observer = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void submit(Request request);
  // Harmless for unknown ids. A step in flight ends first.
  void abort(RequestId request);

  // Purges the store, once the scheduler knows of every request that has computed something.
  void purge(Instant now);

  // One whole step: begin, finish, pump. True when something moved; else wait a moment (the store
  // is at work).
  bool step(Instant now);
  // No request is left and no job is unquiet.
  bool idle() const noexcept;
  // Requests that have not finished.
  std::size_t unfinished() const noexcept;

  // Schedules a step and submits its plan with a token that fires in finish_step. True when tokens
  // are computed.
  bool begin_step(Instant now);
  // Writes what the step computed, fires the token, ends and frees requests.
  void finish_step(Instant now);
  bool step_in_flight() const noexcept;
  // Pumps the workers and hands their reports to the observer, or else to the scheduler.
  bool pump(Instant now);
  // Reports that an observer has held back.
  void deliver(std::span<const std::byte> reports, Instant now);
  // The rank's process has ended.
  void rank_gone(Rank rank, Instant now);
  // Between steps: and another one has taken its place. Every request begins again.
  void replace_rank(Rank rank, EngineRank by, Instant now);
  // The engine's own cache forgets everything.
  void empty_cache();

  // Appends and forgets.
  void take_finished(std::vector<FinishedRequest>& out);

  const EngineStats& stats() const noexcept;
  // Compares everything the engine believes computed with the oracle.
  VerifyResult verify_all() const;
  // The first broken invariant (memory, guards, block references), or "". Needs memories with a
  // shadow.
  std::string check() const;
  // One line: requests, blocks, jobs.
  std::string describe() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvprism::sim
