// What an operator sees of the scheduler: its health, and the flight record at an incident.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <string>

#include "kvprism/base/log.h"
#include "store/scheduler_impl.h"

namespace kvprism {
namespace {

constexpr Duration kBetweenRecords = seconds(60);
constexpr std::size_t kLinesInTheLog = 40;
constexpr std::size_t kMostRecordBytes = 8 << 20;  // in the file, all records together

// By the bit of HealthReason.
constexpr std::array<std::string_view, 7> kReasons{
    "lookups fail",         "loads fail",         "saving is paused",  "a worker is silent",
    "blocks in quarantine", "jobs hold too much", "a purge is running"};

// What prevented it; empty: nothing.
std::string append(const std::string& path, const std::string& text) {
  // Another kind of file could hold up a step for ever; a FIFO does so when it is opened.
  const int file =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600);
  if (file < 0) return std::strerror(errno);
  std::string problem;
  struct stat found{};
  if (::fstat(file, &found) != 0) {
    problem = std::strerror(errno);
  } else if (!S_ISREG(found.st_mode)) {
    problem = "it is no regular file";
  } else if (static_cast<std::size_t>(found.st_size) + text.size() > kMostRecordBytes) {
    problem =
        fmt::format("it has {} bytes, and at most {} are kept", found.st_size, kMostRecordBytes);
  } else {
    errno = 0;
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written != static_cast<ssize_t>(text.size())) {
      problem = errno != 0 ? std::strerror(errno) : "only a part of it has been written";
    }
  }
  if (::close(file) != 0 && problem.empty()) problem = std::strerror(errno);
  return problem;
}

}  // namespace

std::string describe(const StoreHealth& health) {
  if (health.state == HealthState::kHealthy) return "healthy";
  if (health.state == HealthState::kOff) return "off";
  std::string text = "degraded: ";
  bool first = true;
  for (std::size_t bit = 0; bit < kReasons.size(); ++bit) {
    if ((health.reasons >> bit & 1) == 0) continue;
    if (!first) text += ", ";
    first = false;
    text += kReasons[bit];
  }
  return text;
}

void StoreScheduler::Impl::update_health(Instant now) {
  std::uint32_t reasons = 0;
  const auto note = [&](HealthReason reason, bool present) {
    if (present) reasons |= reason;
  };
  note(kLookupsFail, lookups_fail);
  note(kLoadsFail, loads_fail);
  note(kSavingPaused, now < backoff_until);
  note(kWorkerSilent, worker_silent);
  note(kQuarantine, ledger.in_quarantine() != 0);
  note(kHoldsTooMuch, holds_too_much());
  note(kPurging, purge.status.active());
  for (std::size_t bit = 0; bit < reason_seen.size(); ++bit) {
    const std::uint32_t reason = 1u << bit;
    if ((reasons & reason) != 0) {
      reason_seen[bit] = now;
    } else if (now - reason_seen[bit] < options.healthy_after) {
      reasons |= reason;
    }
  }
  StoreHealth fresh{reasons == 0 ? HealthState::kHealthy : HealthState::kDegraded, reasons};
  if (mode == StoreMode::kOff || (!options.loads && !options.saves)) fresh = {HealthState::kOff, 0};
  if (fresh == health) return;
  health = fresh;
  flight.add(now, FlightKind::kHealth, static_cast<std::uint64_t>(health.state), health.reasons);
  log(health.state == HealthState::kDegraded ? LogLevel::kWarning : LogLevel::kInfo,
      "the store is " + describe(health));
}

void StoreScheduler::Impl::incident(std::string_view what, Instant now) {
  ++counters.incidents;
  if (now - recorded_at < kBetweenRecords) return;
  recorded_at = now;
  if (options.flight_record_path.empty()) {
    log(LogLevel::kWarning,
        fmt::format("{}: the last events are\n{}", what, flight.text(kLinesInTheLog)));
    return;
  }
  const std::string text = fmt::format("epoch {}: {}\n", options.epoch, what) + flight.text();
  const std::string problem = append(options.flight_record_path, text);
  log(LogLevel::kWarning,
      problem.empty()
          ? fmt::format("{}: the flight record is in {}", what, options.flight_record_path)
          : fmt::format("{}: the flight record could not be written to {}: {}", what,
                        options.flight_record_path, problem));
}

StoreHealth StoreScheduler::health() const noexcept { return impl_->health; }
const FlightRecorder& StoreScheduler::flight_record() const noexcept { return impl_->flight; }

}  // namespace kvprism
