// Any bytes: decode_plan either throws Error or gives a plan whose every index can be followed.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kvprism/wire/step_plan.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::uint64_t> aligned(size / 8 + 1);
  if (size > 0) std::memcpy(aligned.data(), data, size);
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(aligned.data()), size);
  (void)kvprism::outline_of(bytes);
  try {
    const kvprism::StepPlanView plan = kvprism::decode_plan(bytes);
    std::uint64_t sum = 0;
    for (const kvprism::JobRecord& job : plan.jobs) {
      for (const kvprism::RunRecord& run : plan.runs.subspan(job.first_run, job.num_runs)) {
        for (const kvprism::BlockId id : plan.ids.subspan(run.first_id, run.count)) {
          if (kvprism::raw(id) <= 0) std::abort();
        }
        for (std::uint32_t i = 0; i < run.count; ++i) {
          for (const std::uint8_t byte : plan.mark_hash(run.first_mark + i)) sum += byte;
        }
      }
    }
    for (const kvprism::JobId id : plan.asked) sum += kvprism::raw(id) & 1;
    std::vector<std::byte> again;
    kvprism::encode(plan, again);
    if (again.size() != size || sum == UINT64_MAX) std::abort();
  } catch (const kvprism::Error&) {
  }
  return 0;
}
