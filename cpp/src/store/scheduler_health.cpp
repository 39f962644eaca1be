// What an operator sees of the scheduler: its health, and the flight record at an incident.
#include <fmt/format.h>

#include <bit>
#include <string>

#include "kvprism/base/log.h"
#include "store/scheduler_impl.h"

namespace kvprism {
namespace {

constexpr Duration kBetweenRecords = seconds(60);
constexpr std::size_t kLinesInTheLog = 40;

// By the bit of HealthReason.
constexpr std::array<std::string_view, 7> kReasons{
    "lookups fail",         "loads fail",         "saving is paused",  "a worker is silent",
    "blocks in quarantine", "jobs hold too much", "a purge is running"};

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
  // Nothing is asked any more that could say otherwise.
  if (!mode_loads()) lookups_fail = loads_fail = false;
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
  if (options.flight.take != nullptr) {
    try {
      options.flight.take(options.flight.context, options.epoch, what, flight);
      return;
    } catch (...) {  // of the engine's own: a step must not throw
      options.flight.take = nullptr;
      log(LogLevel::kWarning, "the flight record goes to the log from now on: its sink has thrown");
    }
  }
  log(LogLevel::kWarning,
      fmt::format("{}: the last events are\n{}", what, flight.text(kLinesInTheLog)));
}

StoreHealth StoreScheduler::health() const noexcept { return impl_->health; }
const FlightRecorder& StoreScheduler::flight_record() const noexcept { return impl_->flight; }

}  // namespace kvprism
