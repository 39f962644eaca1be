// One seed of the simulated world while it runs.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvprism/sim/engine.h"
#include "kvprism/sim/world.h"
#include "sim/flight_watch.h"
#include "sim/job_judge.h"
#include "sim/object_judge.h"
#include "sim/removal_watch.h"
#include "sim/world_config.h"

namespace kvprism::sim {

using detail::SeededRandom;

// One engine from its start to its restart. Members go in reverse: the engine first, the memory
// last.
struct Life {
  std::uint64_t epoch = 0;
  std::vector<std::shared_ptr<SimMemory>> memories;       // by rank
  std::vector<std::shared_ptr<FaultInjector>> injectors;  // by rank
  std::vector<std::shared_ptr<FlightWatch>> flights;      // by rank, over the injectors
  std::shared_ptr<FaultInjector> index;
  std::shared_ptr<RemovalWatch> watch;  // over the index
  std::shared_ptr<StoreScheduler> scheduler;
  std::vector<std::shared_ptr<StoreWorker>> workers;  // by rank
  std::unique_ptr<JobJudge> judge;
  std::unique_ptr<Engine> engine;
};

struct HeldReport {
  WorkerReport report;
  Instant due;
};

struct Completed {
  RequestId id{};
  std::vector<std::uint32_t> tokens;
  std::uint32_t prompt = 0;    // tokens that it was looked up for; 0: not known
  std::uint32_t size = 0;      // tokens of the prompt
  std::uint32_t start = 0;     // of those that it found, local or in the store
  std::uint32_t junction = 0;  // where it left what others had stored; 0: unknown
  std::uint32_t found = 0;     // the most that one of its starts found
};

// A client of an engine that has ended, with calls that still go on, and the memory that they
// touch.
struct Ghost {
  std::shared_ptr<FaultInjector> calls;
  std::shared_ptr<SimMemory> memory;
};

class WorldRun {
 public:
  explicit WorldRun(const WorldOptions& options);
  WorldResult run();

 private:
  std::uint32_t token() { return static_cast<std::uint32_t>(random_.below(1u << 16)); }
  void count(WorldFault kind, std::uint64_t times = 1) {
    result_.totals.world_faults[static_cast<std::size_t>(kind)] += times;
  }
  void fit_prompts();
  void count_features();
  bool tracing() const { return event_ >= options_.trace_from; }
  void trace(const std::string& line);
  void fail(std::string invariant, std::string what);

  // An engine's beginning and end (world_life.cpp).
  void start_life();
  EngineRank start_rank(std::uint32_t rank, std::uint64_t faults_seed);
  void end_life(bool drained);
  void restart();

  // What happens (world_events.cpp).
  void event();
  void release_hung();
  void step_event();
  void pump_event();
  void deliver_event();
  bool leaving(RequestId request) const;
  void submit_event();
  void submit(RequestId id);
  void submit(Request request);
  void follow_damage();
  void abort_event();
  void object_event();
  void move_ghosts();

  // Ranks that die, plans and reports that are lost, restrictions that come late (world_later.cpp).
  void later_event();
  void rank_dies();
  void tell_rank_gone();
  void replace_rank();
  void in_a_step();
  void restrict_late();
  bool loses_report();
  std::uint32_t draw_still();
  bool draining() const { return event_ > options_.events; }

  void take_finished();

  // Calls that nobody should make, and purges (world_noise.cpp).
  void noise_event();
  void purge_event();
  void mode_event();
  void set_mode(StoreMode mode);
  void foreign_plan();

  // What must be true of it (world_check.cpp).
  void check();
  void check_purge();
  void verify();
  void check_pool();
  bool drained() const;
  void drain();
  // Of which groups a prefix is wanted, beside those that need all of it.
  struct Asked {
    bool windows = false;
    bool states = false;
    bool only_these = false;  // whoever asks shares these tokens and none behind them
  };
  void check_stored(const Completed& done);
  void check_stored(const Completed& done, const TokenTrail& trail, std::uint32_t end,
                    const Asked& asked);

  const WorldOptions options_;
  WorldConfig config_;
  SeededRandom random_;
  SeededRandom later_random_;  // of later_event and the like
  SeededRandom again_random_;  // of what makes requests of clean worlds begin again
  Instant now_{1'000'000'000};
  std::uint32_t event_ = 0;
  WorldResult result_;

  std::shared_ptr<const Projection> projection_;
  std::shared_ptr<const KeySchema> schema_;
  std::vector<std::shared_ptr<const KeySchema>> stages_;  // by pipeline stage, of its layers
  std::shared_ptr<MemoryPool> pool_;
  ObjectJudge objects_;
  const std::uint32_t step_tokens_;
  std::uint64_t version_ = 0;
  std::vector<std::shared_ptr<SimMemory>> graveyard_;
  std::vector<Ghost> ghosts_;
  bool landed_in_purge_ = false;  // a call of theirs, which no purge of another engine can know
  Life life_;
  std::optional<std::uint32_t> dead_;  // a rank of this life
  std::uint32_t dead_until_ = 0;       // the event that restarts it

  std::vector<WorkerReport> channel_;
  std::deque<HeldReport> queue_;
  std::deque<WorkerReport> stale_;
  std::vector<std::byte> encoded_;
  std::vector<std::byte> bytes_;

  std::vector<std::vector<std::uint32_t>> families_;
  std::vector<std::vector<std::uint32_t>> turns_;  // conversations that may go on
  std::vector<Completed> completed_;               // in clean worlds
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> prompts_;
  std::uint64_t next_request_ = 1;
  std::vector<RequestId> live_;
  std::vector<RequestId> leaving_;  // aborted, but not gone yet
  std::deque<RequestId> past_;      // ended lately
  std::vector<FinishedRequest> finished_;
  std::vector<std::string> keys_;
  std::vector<StoreChange> changes_;
  bool purging_ = false;
  StoreMode mode_ = StoreMode::kReadWrite;
  std::vector<std::byte> recording_;
};

}  // namespace kvprism::sim
