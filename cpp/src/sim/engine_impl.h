// The inside of the simulated engine, shared by its source files.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvprism/sim/block_pool.h"
#include "kvprism/sim/engine.h"
#include "kvprism/sim/group_model.h"
#include "kvprism/sim/prefix_cache.h"
#include "kvprism/sim/token_trail.h"

namespace kvprism::sim {

inline constexpr std::uint32_t kVocabulary = 1u << 16;

// Fires when the step's bytes are in memory; may be asked by another thread.
class StepFence final : public ReadySource {
 public:
  ReadyState query() noexcept override {
    return fired_ ? ReadyState::kReady : ReadyState::kPending;
  }
  void fire() noexcept { fired_ = true; }

 private:
  std::atomic<bool> fired_{false};
};

// A block that a load writes.
struct Destination {
  GroupId group{};
  std::uint32_t chunk = 0;
  BlockId block{};
};

// One request inside the engine.
struct Sequence {
  enum class Phase : std::uint8_t {
    kWaiting,  // no blocks
    kLoading,  // blocks that a load fills
    kReady,    // loaded, waits to be scheduled
    kRunning,
    kDraining,  // aborted, keeps its blocks until its load ends
  };

  Sequence(RequestId request, std::uint32_t unit) : id(request), trail(unit) {}

  RequestId id;
  Phase phase = Phase::kWaiting;
  TokenTrail trail;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t max_new_tokens = 0;
  std::uint32_t computed = 0;   // tokens whose contents are in the blocks
  std::uint32_t ring_from = 0;  // the ring holds no position before this
  bool offered = false;         // the state after `computed` tokens has been offered
  bool frozen = false;          // and lies inside a block, which must not change from then on
  std::uint32_t prefill = 0;    // tokens that were there when it was scheduled from the start
  bool started = false;
  bool uncached = false;           // it rests on what the engine's own cache has forgotten
  std::uint64_t preempted_in = 0;  // the last pass that took its blocks; 0: none
  std::vector<std::vector<BlockId>> tables;  // by group
  std::uint32_t reported_hashes = 0;         // to the observer
  FinishedRequest result;
};

struct LoadRecord {
  Sequence* sequence = nullptr;  // null: aborted, its blocks were given up
  std::uint32_t local = 0;
  std::uint32_t hit = 0;
  std::vector<Destination> destinations;
  bool again = false;  // a rank has lost the local tokens: its request begins again
};

struct Scheduled {
  Sequence* sequence = nullptr;
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t accepted = 0;  // drafts behind `to` that turn out right
  std::uint32_t rejected = 0;  // and those behind them, whose bytes are of no use
};

struct Engine::Impl {
  std::shared_ptr<const Projection> projection;
  std::shared_ptr<StoreScheduler> scheduler;
  std::vector<EngineRank> ranks;
  EngineOptions options;
  EngineObserver* observer = nullptr;
  EngineObserver silent;

  std::vector<GroupModel> groups;
  std::vector<std::vector<std::vector<PageShape>>> shapes;  // by rank, group and its layer
  std::uint32_t step_tokens = 1;                            // S, by our own arithmetic
  std::uint32_t alignment = 1;  // hits of the store end on multiples of it
  std::uint32_t replay = 1;
  bool has_state = false;
  bool drafts = false;  // a hit is followed by objects that are computed anew
  BlockPool pool{2};
  PrefixCache cache;

  std::unordered_map<std::uint64_t, std::unique_ptr<Sequence>>
      sequences;  // by request, but not draining ones
  std::vector<std::unique_ptr<Sequence>> draining;
  std::vector<Sequence*> running;
  std::deque<Sequence*> waiting;
  std::unordered_map<std::uint64_t, LoadRecord> loads;  // by job
  std::unordered_map<std::int32_t, GroupId>
      ghosts;                       // blocks of detached loads, until their job lets go
  std::vector<std::uint32_t> held;  // references of jobs, by block
  std::vector<RequestId> late_aborts;
  std::vector<FinishedRequest> finished;

  bool in_flight = false;
  std::vector<Scheduled> scheduled;
  std::shared_ptr<StepFence> fence;
  EngineStats stats;
  std::string broken;  // what the engine itself found wrong, e.g. a load end that makes no sense

  // Reused between calls.
  std::vector<BlockId> block_list;
  std::vector<LoadEnd> load_ends;
  std::vector<std::span<const BlockId>> row_list;
  std::vector<Destination> missing;
  std::vector<std::byte> plan_bytes;
  std::vector<std::byte> scratch;
  std::vector<std::byte> expected;
  WorkerReport report;

  void fail(std::string what) {
    if (broken.empty()) broken = std::move(what);
  }

  // Blocks (engine_blocks.cpp).
  void poison(BlockId block);
  BlockId take_block();
  void drop(BlockId block);
  void drop_tables(Sequence& sequence);
  void truncate(Sequence& sequence, std::uint32_t tokens);
  void slide(Sequence& sequence);
  void adopt_local(Sequence& sequence, std::uint32_t tokens);
  bool add_missing(Sequence& sequence, std::vector<Destination>* taken);
  bool allocate(Sequence& sequence, std::uint32_t to);
  void draft(const Scheduled& work);
  bool allocate_load(Sequence& sequence, std::uint32_t local, std::uint32_t hit,
                     std::vector<Destination>& taken);
  void remember(Sequence& sequence, std::uint32_t from, std::uint32_t to);
  void apply_acquired();
  void apply_released();
  BlockRows rows(const Sequence& sequence);

  // Scheduling (engine_schedule.cpp).
  std::uint32_t max_hit(std::uint32_t tokens) const;
  // Where the state at the end of the prompt is kept; 0 when hits end on whole blocks only.
  std::uint32_t checkpoint(const Sequence& sequence) const {
    if (alignment == step_tokens) return 0;
    return model_checkpoint(sequence.prefill, alignment, drafts, replay);
  }
  bool can_ever_fit(const Request& request) const;
  std::uint32_t target(const Sequence& sequence, std::uint32_t budget) const;
  void schedule(Instant now);
  bool schedule_running(Instant now, std::uint32_t& budget);
  bool start_ready(Sequence& sequence, std::uint32_t& budget);
  bool start_waiting(Sequence& sequence, std::uint32_t& budget, Instant now);
  bool preempt_for(const Sequence& sequence);
  void preempt(Sequence& sequence);
  const Sequence* patient() const;
  void run(Sequence& sequence, std::uint32_t to, std::uint32_t& budget);
  std::uint32_t proposals(const Sequence& sequence, std::uint32_t to) const;
  void first_start(Sequence& sequence, std::uint32_t local);
  void offer_states(Sequence& sequence, std::uint32_t tokens);
  void connect(Instant now);
  void tell_hashes(Sequence& sequence);
  void count_plan(const StepPlan& plan);
  void check_destinations(const StepPlan& plan);

  // Execution and loads (engine_execute.cpp).
  void generate(Sequence& sequence) {
    sequence.trail.append(next_token(sequence.trail.last(), kVocabulary));
    ++stats.generated_tokens;
  }
  void execute(const Scheduled& work);
  void settle();
  void end_load(const LoadEnd& end);
  void accept_load(Sequence& sequence, const LoadRecord& load, std::uint32_t valid);
  void finish(Sequence& sequence, bool aborted);
  void abort_now(RequestId request);

  // Checks (engine_check.cpp).
  std::uint64_t compare(const GroupModel& group, std::uint32_t chunk, BlockId block,
                        const TokenTrail& trail, std::uint32_t from, std::uint32_t to,
                        std::uint64_t* bytes);
  std::uint64_t difference(const PageShape& shape, const PageView& page);
  void verify(const Sequence& sequence, VerifyResult& result);
  std::string check_references() const;
};

}  // namespace kvprism::sim
