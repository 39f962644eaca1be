// Repeats what a StoreScheduler did from its recorded inputs (StoreSchedulerOptions::record).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kvprism/base/export.h"
#include "kvprism/spec/spec_registry.h"

namespace kvprism {

struct ReplayRunResult {
  std::uint64_t calls = 0;          // repeated
  std::uint64_t steps = 0;          // of those, end_step()
  std::uint64_t plans = 0;          // of those, with a job
  bool same = true;                 // every call did and returned what it had
  std::string difference;           // the first one: which call, what was recorded, what came now
  std::uint64_t ignored_bytes = 0;  // of a last call that was cut off, e.g. by a crash
  bool ended = false;       // the recording says that nothing follows: its RunFile was closed
  std::string recorded_by;  // version and compiler
  std::string repeated_by;
};

// `recording` is everything that the sink was given, in order. The scheduler is built again from
// the recorded cache config, key facts and options, with an index that answers as recorded. Ends at
// the first difference. `registry` must know the kinds of the config. Throws Error (kMismatch,
// kInvalidArgument) naming the offset when the bytes are no recording of this version or go on
// behind its end, and what building the scheduler throws.
KVPRISM_API ReplayRunResult replay_run(std::span<const std::byte> recording,
                                       const SpecRegistry& registry = SpecRegistry::builtin());

}  // namespace kvprism
