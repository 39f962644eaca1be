// What a driver of the simulated engine may watch and hold back.
#pragma once

#include <cstdint>
#include <span>

#include "kvprism/base/ids.h"
#include "kvprism/store/store_scheduler.h"
#include "kvprism/wire/step_plan.h"
#include "kvprism/wire/worker_report.h"

namespace kvprism::sim {

// Every call has an empty default. Threads: the engine's.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;

  // `hash` stands for all of `tokens`.
  virtual void hash_made(std::span<const std::uint8_t> /*hash*/,
                         std::span<const std::uint32_t> /*tokens*/) {}
  // The scheduler has answered a lookup for a request with `tokens`.
  virtual void looked_up(RequestId, std::span<const std::uint32_t> /*tokens*/,
                         std::uint32_t /*local_tokens*/, const LookupResult&) {}
  virtual void save_planned(RequestId, const TokenRange&) {}
  virtual void planned(const StepPlan&) {}
  // A step is scheduled, and the scheduler knows nothing of it yet.
  virtual void scheduled() {}
  // False: the plan never reaches the rank.
  virtual bool plan_reaches(std::uint32_t /*rank*/, const StepPlan&) { return true; }
  // False: the rank's worker does not move this time.
  virtual bool moves(std::uint32_t /*rank*/) { return true; }
  virtual void preempted(RequestId) {}
  // The scheduler has been told of its end.
  virtual void left(RequestId) {}
  // A purge has begun, and this request has computed tokens.
  virtual void outdated(RequestId) {}
  // A load of the tokens from `local` to `hit`.
  virtual void load_started(RequestId, JobId, std::uint32_t /*local*/, std::uint32_t /*hit*/) {}
  virtual void load_ended(const LoadEnd&) {}
  virtual void acquired(std::span<const BlockId>) {}
  virtual void released(std::span<const BlockId>) {}
  // True: the observer will hand it to Engine::deliver.
  virtual bool hold_report(const WorkerReport&) { return false; }
};

}  // namespace kvprism::sim
