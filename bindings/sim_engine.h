// The simulated engine in real time, and what it measures.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "handles.h"
#include "kvprism/sim/engine.h"
#include "kvprism/sim/group_model.h"

namespace kvprism::bindings {

// How long loads and saves were under way, and what they moved.
class JobMeter final : public sim::EngineObserver {
 public:
  struct Total {
    std::uint64_t bytes = 0;
    std::uint64_t objects = 0;
    std::uint64_t duplicates = 0;
    std::uint64_t failed_chunks = 0;
    Duration busy;  // while at least one job was neither waiting for its bytes nor quiet
  };

  void planned(const StepPlan& plan) override;
  bool hold_report(const WorkerReport& report) override;
  // The bytes of the saves that were planned are in memory: their time begins.
  // True when there are such saves.
  bool fence_fired();

  const Total& loads() const noexcept { return totals_[0]; }
  const Total& saves() const noexcept { return totals_[1]; }

 private:
  void begin(std::size_t side);
  void end(std::size_t side);

  std::array<Total, 2> totals_;
  std::array<std::uint64_t, 2> open_{};
  std::array<Instant, 2> since_;
  std::unordered_map<std::uint64_t, std::size_t> side_of_;  // by job
  std::uint64_t fenced_ = 0;                                // saves whose bytes are not there yet
};

struct BoundMemory {
  BoundMemory(std::shared_ptr<const Projection> groups, const sim::SimMemoryOptions& options)
      : projection(std::move(groups)), memory(*projection, options) {}

  std::shared_ptr<const Projection> projection;
  sim::SimMemory memory;
};

// Ownership: shares what it is given, adopts the worker. Threads: one call at a time.
class BoundEngine {
 public:
  BoundEngine(std::shared_ptr<BoundScheduler> scheduler, std::shared_ptr<BoundWorker> worker,
              std::shared_ptr<BoundMemory> memory, const sim::EngineOptions& options);
  ~BoundEngine();
  BoundEngine(const BoundEngine&) = delete;
  BoundEngine& operator=(const BoundEngine&) = delete;

  // Throws Error (kClosed), also when the scheduler has been closed behind the engine's back.
  sim::Engine& get();
  const JobMeter& meter() const noexcept { return meter_; }
  bool step();
  // Steps until the engine is idle or `longest` has passed; true when it is idle.
  bool run(Duration longest);
  CloseReport close(Duration budget);

  std::atomic<bool> in_use{false};
  std::vector<std::uint32_t> prompt;  // reused by submit

 private:
  std::shared_ptr<BoundScheduler> scheduler_;
  std::shared_ptr<BoundWorker> worker_;
  std::shared_ptr<BoundMemory> memory_;
  JobMeter meter_;
  std::unique_ptr<sim::Engine> engine_;
  bool closed_ = false;
};

// Knows how every position of every scratch ring begins, for given tokens, and finds such
// beginnings in other bytes.
class RingDetector {
 public:
  explicit RingDetector(const Projection& projection);

  // Every position of the tokens.
  void add(std::span<const std::uint32_t> tokens);
  std::size_t patterns() const noexcept { return words_.size(); }
  // How many aligned words of `bytes` begin a ring's position.
  std::uint64_t count(std::span<const std::byte> bytes) const noexcept;

 private:
  static std::size_t slot(std::uint64_t word) noexcept { return word >> 42; }

  std::vector<sim::GroupModel> rings_;
  std::vector<bool> seen_;  // rejects nearly all other words
  std::unordered_set<std::uint64_t> words_;
};

}  // namespace kvprism::bindings
