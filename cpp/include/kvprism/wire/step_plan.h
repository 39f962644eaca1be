// One step's jobs from the scheduler to the workers: self-contained, bounded, no shared state
// (decision 7).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/group/projection.h"
#include "kvprism/run/instant.h"

namespace kvprism {

enum class JobKind : std::uint32_t { kSave = 1, kLoad = 2 };

// Consecutive chunks of one group: chunk first_chunk + i uses block ids[first_id + i] and mark
// first_mark + i.
struct RunRecord {
  StoreIndex group{};
  std::uint32_t first_chunk = 0;
  std::uint32_t count = 0;
  std::uint32_t first_id = 0;
  std::uint32_t first_mark = 0;
  std::uint32_t valid_tokens_last =
      0;  // of the last chunk; the group's chunk size when it is full (R22)

  bool operator==(const RunRecord&) const = default;
};
static_assert(sizeof(RunRecord) == 24);

struct JobRecord {
  JobId id{};
  RequestId request{};
  JobKind kind{};
  std::uint32_t first_run = 0;
  std::uint32_t num_runs = 0;
  std::uint32_t reserved = 0;
  Duration timeout;  // from the worker's receipt of the plan: clocks of two processes differ

  bool operator==(const JobRecord&) const = default;
};
static_assert(sizeof(JobRecord) == 40);

// Views over a plan, wherever it lies.
// Ownership: none. Threads: as the viewed memory.
struct StepPlanView {
  Digest digest;
  std::uint64_t epoch = 0;
  std::uint64_t step = 0;
  std::uint32_t hash_width = 0;  // bytes
  std::span<const JobRecord> jobs;
  std::span<const RunRecord> runs;
  std::span<const BlockId> ids;
  std::span<const std::uint32_t> mark_tokens;  // prefix length in tokens at each mark
  std::span<const std::uint8_t> mark_hashes;   // hash_width bytes per mark
  // Jobs of earlier plans that some rank has not told as quiet for long: a worker that does not
  // know one tells it as failed and quiet, since its report, or its plan, was lost.
  std::span<const JobId> asked{};

  std::span<const std::uint8_t> mark_hash(std::uint32_t mark) const noexcept {
    return mark_hashes.subspan(static_cast<std::size_t>(mark) * hash_width, hash_width);
  }
};

// A plan under construction; clear() keeps the capacity.
// Ownership: owns its arrays; view() is valid until the next change. Threads: one at a time.
class StepPlan {
 public:
  Digest digest;
  std::uint64_t epoch = 0;
  std::uint64_t step = 0;
  std::uint32_t hash_width = 0;
  std::vector<JobRecord> jobs;
  std::vector<RunRecord> runs;
  std::vector<BlockId> ids;
  std::vector<std::uint32_t> mark_tokens;
  std::vector<std::uint8_t> mark_hashes;
  std::vector<JobId> asked;

  bool empty() const noexcept { return jobs.empty() && asked.empty(); }
  void clear() noexcept {
    jobs.clear();
    runs.clear();
    ids.clear();
    mark_tokens.clear();
    mark_hashes.clear();
    asked.clear();
    hash_width = 0;
  }
  StepPlanView view() const noexcept {
    return {digest, epoch, step, hash_width, jobs, runs, ids, mark_tokens, mark_hashes, asked};
  }
};

// Little-endian, 8-byte aligned; replaces `out`'s content, keeping its capacity.
KVPRISM_API void encode(const StepPlanView& plan, std::vector<std::byte>& out);

// Spans over `bytes`, which must be 8-byte aligned and outlive the view. Every index in the plan is
// proven to lie inside it. Throws Error (kMismatch or kInvalidArgument) naming the field: bad
// magic, unknown version or flag, truncated, trailing bytes, a run outside its arrays, a null or
// negative block id.
KVPRISM_API StepPlanView decode_plan(std::span<const std::byte> bytes);

// What decode_plan proves, for a plan that was never encoded. Throws the same errors.
KVPRISM_API void check_plan(const StepPlanView& plan);

// The (epoch, job ids) of a plan that decode_plan refuses, also of another version, as far as they
// can be read safely: they are reported failed.
struct PlanOutline {
  std::uint64_t epoch = 0;
  std::vector<JobId> jobs;
};
KVPRISM_API PlanOutline outline_of(std::span<const std::byte> bytes) noexcept;

}  // namespace kvprism
