#include "kvprism/wire/step_plan.h"

#include <algorithm>

#include "kvprism/key/key_schema.h"
#include "wire/bytes.h"

namespace kvprism {
namespace {

constexpr std::uint32_t kMagic = 0x3150564b;  // "KVP1"
constexpr std::uint16_t kVersion = 1;
constexpr std::uint16_t kFlagAsks = 1;  // behind the hashes: a count of jobs, and their ids
constexpr std::int64_t kLongestTimeout =
    1'000'000'000'000'000'000;  // ns; a sum with a time must not overflow
constexpr std::string_view kSubject = "step plan";

// Whatever a later version adds comes behind the jobs: from any plan the epoch and the ids of the
// jobs can be read, so that nobody waits for jobs of a plan that is refused.
struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t flags;  // a bit that is not known refuses the plan
  std::uint64_t total_bytes;
  Digest digest;
  std::uint64_t epoch;
  std::uint64_t step;
  std::uint32_t hash_width;
  std::uint32_t jobs;
  std::uint32_t runs;
  std::uint32_t ids;
  std::uint32_t marks;
  std::uint32_t job_bytes;  // of a job record, which begins with its id
};
static_assert(sizeof(Header) == 72 && sizeof(Header) % 8 == 0);

Header header_of(const StepPlanView& plan) {
  Header header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.flags = plan.asked.empty() ? 0 : kFlagAsks;
  header.digest = plan.digest;
  header.epoch = plan.epoch;
  header.step = plan.step;
  header.hash_width = plan.hash_width;
  header.jobs = static_cast<std::uint32_t>(plan.jobs.size());
  header.runs = static_cast<std::uint32_t>(plan.runs.size());
  header.ids = static_cast<std::uint32_t>(plan.ids.size());
  header.marks = static_cast<std::uint32_t>(plan.mark_tokens.size());
  header.job_bytes = sizeof(JobRecord);
  return header;
}

void check_run(const RunRecord& run, std::size_t index, const StepPlanView& plan) {
  const std::string path = "runs[" + std::to_string(index) + "]";
  const std::uint64_t ids_end = std::uint64_t{run.first_id} + run.count;
  const std::uint64_t marks_end = std::uint64_t{run.first_mark} + run.count;
  if (run.count == 0)
    detail::refuse(ErrorCode::kInvalidArgument, kSubject, path + ".count", 0, "at least 1 chunk");
  if (ids_end > plan.ids.size()) {
    detail::refuse(ErrorCode::kInvalidArgument, kSubject, path + ".first_id + count", ids_end,
                   "at most " + std::to_string(plan.ids.size()) + " ids");
  }
  if (marks_end > plan.mark_tokens.size()) {
    detail::refuse(ErrorCode::kInvalidArgument, kSubject, path + ".first_mark + count", marks_end,
                   "at most " + std::to_string(plan.mark_tokens.size()) + " marks");
  }
}

void check_jobs(const StepPlanView& plan) {
  for (std::size_t j = 0; j < plan.jobs.size(); ++j) {
    const JobRecord& job = plan.jobs[j];
    const std::string path = "jobs[" + std::to_string(j) + "]";
    if (job.kind != JobKind::kSave && job.kind != JobKind::kLoad) {
      detail::refuse(ErrorCode::kInvalidArgument, kSubject, path + ".kind",
                     static_cast<std::uint32_t>(job.kind), "1 (save) or 2 (load)");
    }
    // One id twice would tell of both what holds for one.
    if (j > 0 && raw(job.id) <= raw(plan.jobs[j - 1].id)) {
      detail::refuse(ErrorCode::kInvalidArgument, kSubject, path + ".id", raw(job.id),
                     "more than " + std::to_string(raw(plan.jobs[j - 1].id)));
    }
    if (job.timeout.ns <= 0 || job.timeout.ns > kLongestTimeout) {
      fail(ErrorCode::kInvalidArgument, kSubject,
           {path + ".timeout",
            std::to_string(job.timeout.ns) + " ns",
            "1 to " + std::to_string(kLongestTimeout) + " ns",
            {}});
    }
    const std::uint64_t runs_end = std::uint64_t{job.first_run} + job.num_runs;
    if (runs_end > plan.runs.size()) {
      detail::refuse(ErrorCode::kInvalidArgument, kSubject, path + ".first_run + num_runs",
                     runs_end, "at most " + std::to_string(plan.runs.size()) + " runs");
    }
  }
}

}  // namespace

void encode(const StepPlanView& plan, std::vector<std::byte>& out) {
  out.clear();
  Header header = header_of(plan);
  header.total_bytes = sizeof(Header) + detail::padded8(plan.jobs.size_bytes()) +
                       detail::padded8(plan.runs.size_bytes()) +
                       detail::padded8(plan.ids.size_bytes()) +
                       detail::padded8(plan.mark_tokens.size_bytes()) +
                       detail::padded8(plan.mark_hashes.size_bytes());
  const std::uint64_t asked = plan.asked.size();
  if (asked != 0) header.total_bytes += sizeof(asked) + plan.asked.size_bytes();
  out.reserve(header.total_bytes);
  detail::append_array(out, std::span<const Header>(&header, 1));
  detail::append_array(out, plan.jobs);
  detail::append_array(out, plan.runs);
  detail::append_array(out, plan.ids);
  detail::append_array(out, plan.mark_tokens);
  detail::append_array(out, plan.mark_hashes);
  if (asked == 0) return;
  detail::append_array(out, std::span<const std::uint64_t>(&asked, 1));
  detail::append_array(out, plan.asked);
}

void check_plan(const StepPlanView& plan) {
  if (!plan.jobs.empty() && (plan.hash_width < kMinHashWidth || plan.hash_width > kMaxHashWidth)) {
    detail::refuse(
        ErrorCode::kInvalidArgument, kSubject, "hash_width", plan.hash_width,
        std::to_string(kMinHashWidth) + " to " + std::to_string(kMaxHashWidth) + " bytes");
  }
  if (plan.mark_hashes.size() != plan.mark_tokens.size() * plan.hash_width) {
    detail::refuse(ErrorCode::kInvalidArgument, kSubject, "mark_hashes", plan.mark_hashes.size(),
                   std::to_string(plan.mark_tokens.size()) + " hashes of " +
                       std::to_string(plan.hash_width) + " bytes");
  }
  check_jobs(plan);
  for (std::size_t r = 0; r < plan.runs.size(); ++r) check_run(plan.runs[r], r, plan);
  const auto bad =
      std::find_if(plan.ids.begin(), plan.ids.end(), [](BlockId id) { return raw(id) <= 0; });
  if (bad != plan.ids.end()) {
    fail(ErrorCode::kInvalidArgument, kSubject,
         {"ids[" + std::to_string(bad - plan.ids.begin()) + "]",
          std::to_string(raw(*bad)),
          "a block id of 1 or more (0 is the null block)",
          {}});
  }
}

StepPlanView decode_plan(std::span<const std::byte> bytes) {
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % 8 != 0) {
    detail::refuse(ErrorCode::kInvalidArgument, kSubject, "address modulo 8",
                   reinterpret_cast<std::uintptr_t>(bytes.data()) % 8, "8-byte alignment");
  }
  const std::size_t size = bytes.size();
  std::span<const Header> headers;
  if (!detail::take_array(bytes, 1, headers)) {
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
  if (header.job_bytes != sizeof(JobRecord)) {
    detail::refuse(ErrorCode::kMismatch, kSubject, "job_bytes", header.job_bytes,
                   std::to_string(sizeof(JobRecord)));
  }
  if ((header.flags & ~kFlagAsks) != 0)
    detail::refuse(ErrorCode::kMismatch, kSubject, "flags", header.flags, "0 or 1");
  if (header.total_bytes != size) {
    detail::refuse(ErrorCode::kInvalidArgument, kSubject, "bytes", size,
                   std::to_string(header.total_bytes) + " as the header says");
  }

  StepPlanView plan;
  plan.digest = header.digest;
  plan.epoch = header.epoch;
  plan.step = header.step;
  plan.hash_width = header.hash_width;
  const bool asks = header.flags != 0;
  std::span<const std::uint64_t> asked;
  const bool whole = detail::take_array(bytes, header.jobs, plan.jobs) &&
                     detail::take_array(bytes, header.runs, plan.runs) &&
                     detail::take_array(bytes, header.ids, plan.ids) &&
                     detail::take_array(bytes, header.marks, plan.mark_tokens) &&
                     detail::take_array(bytes, std::uint64_t{header.marks} * header.hash_width,
                                        plan.mark_hashes) &&
                     (!asks || (detail::take_array(bytes, 1, asked) && asked[0] != 0 &&
                                detail::take_array(bytes, asked[0], plan.asked)));
  if (!whole || !bytes.empty()) {
    detail::refuse(ErrorCode::kInvalidArgument, kSubject, "bytes", size,
                   "the arrays that the header counts");
  }
  check_plan(plan);
  return plan;
}

PlanOutline outline_of(std::span<const std::byte> bytes) noexcept {
  PlanOutline outline;
  if (bytes.size() < sizeof(Header)) return outline;
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(Header));
  if (header.magic != kMagic || header.job_bytes < sizeof(JobId)) return outline;
  outline.epoch = header.epoch;
  const std::size_t readable = (bytes.size() - sizeof(Header)) / header.job_bytes;
  const std::size_t count = std::min<std::size_t>(header.jobs, readable);
  try {
    outline.jobs.reserve(count);
    for (std::size_t j = 0; j < count; ++j) {
      JobId id{};
      std::memcpy(&id, bytes.data() + sizeof(Header) + j * header.job_bytes, sizeof(id));
      outline.jobs.push_back(id);
    }
  } catch (...) {
    outline.jobs.clear();  // out of memory: these jobs expire at the scheduler instead
  }
  return outline;
}

}  // namespace kvprism
