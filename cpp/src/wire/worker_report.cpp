#include "kvprism/wire/worker_report.h"

#include "wire/bytes.h"

namespace kvprism {
namespace {

constexpr std::uint32_t kMagic = 0x3152564b;  // "KVR1"
constexpr std::uint16_t kVersion = 1;
constexpr std::string_view kSubject = "worker report";

struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t flags;  // none known: a set bit refuses the report
  std::uint64_t epoch;
  std::uint32_t rank;
  std::uint32_t jobs;
  std::uint32_t failed;
  std::uint32_t reserved;
};
static_assert(sizeof(Header) == 32);

}  // namespace

std::string_view to_string(JobOutcome outcome) noexcept {
  switch (outcome) {
    case JobOutcome::kNone:
      return "none";
    case JobOutcome::kOk:
      return "ok";
    case JobOutcome::kPartial:
      return "partial";
    case JobOutcome::kFailed:
      return "failed";
    case JobOutcome::kCancelled:
      return "cancelled";
    case JobOutcome::kExpired:
      return "expired";
  }
  return "unknown";
}

void encode(const WorkerReport& report, std::vector<std::byte>& out) {
  out.clear();
  Header header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.epoch = report.epoch;
  header.rank = raw(report.rank);
  header.jobs = static_cast<std::uint32_t>(report.jobs.size());
  header.failed = static_cast<std::uint32_t>(report.failed.size());
  detail::append_array(out, std::span<const Header>(&header, 1));
  detail::append_array(out, std::span<const JobReport>(report.jobs));
  detail::append_array(out, std::span<const FailedChunk>(report.failed));
}

void decode_report(std::span<const std::byte>& bytes, WorkerReport& out) {
  out.clear();
  const std::size_t size = bytes.size();
  std::span<const std::byte> rest = bytes;
  std::vector<Header> headers;
  if (!detail::copy_array(rest, 1, headers)) {
    detail::refuse(ErrorCode::kInvalidArgument, kSubject, "bytes", size,
                   "at least the header of " + std::to_string(sizeof(Header)));
  }
  const Header& header = headers[0];
  if (header.magic != kMagic) {
    detail::refuse(ErrorCode::kMismatch, kSubject, "magic", header.magic, std::to_string(kMagic));
  }
  if (header.version != kVersion) {
    detail::refuse(ErrorCode::kMismatch, kSubject, "version", header.version,
                   std::to_string(kVersion));
  }
  if (header.flags != 0) detail::refuse(ErrorCode::kMismatch, kSubject, "flags", header.flags, "0");
  std::vector<JobReport>& jobs = out.jobs;
  std::vector<FailedChunk>& failed = out.failed;
  if (!detail::copy_array(rest, header.jobs, jobs) ||
      !detail::copy_array(rest, header.failed, failed)) {
    detail::refuse(ErrorCode::kInvalidArgument, kSubject, "bytes", size,
                   "the arrays that the header counts");
  }
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    const JobReport& job = jobs[j];
    const std::string path = "jobs[" + std::to_string(j) + "]";
    if (static_cast<std::uint32_t>(job.outcome) >
        static_cast<std::uint32_t>(JobOutcome::kExpired)) {
      detail::refuse(ErrorCode::kInvalidArgument, kSubject, path + ".outcome",
                     static_cast<std::uint32_t>(job.outcome), "0 to 5");
    }
    if (job.quiet > 1)
      detail::refuse(ErrorCode::kInvalidArgument, kSubject, path + ".quiet", job.quiet, "0 or 1");
    const std::uint64_t end = std::uint64_t{job.first_failed} + job.num_failed;
    if (end > failed.size()) {
      detail::refuse(ErrorCode::kInvalidArgument, kSubject, path + ".first_failed + num_failed",
                     end, "at most " + std::to_string(failed.size()) + " failed chunks");
    }
  }
  out.rank = Rank{header.rank};
  out.epoch = header.epoch;
  bytes = rest;
}

}  // namespace kvprism
