// Any bytes: decode_report either throws Error or gives a report whose every index can be followed.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/wire/worker_report.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::uint64_t> aligned(size / 8 + 1);
  if (size > 0) std::memcpy(aligned.data(), data, size);
  std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(aligned.data()), size);
  kvprism::WorkerReport report;
  try {
    while (!bytes.empty()) {
      const std::size_t before = bytes.size();
      kvprism::decode_report(bytes, report);
      if (bytes.size() >= before) std::abort();
      for (const kvprism::JobReport& job : report.jobs) {
        if (report.failed_of(job).size() != job.num_failed) std::abort();
      }
    }
  } catch (const kvprism::Error&) {
  }
  return 0;
}
