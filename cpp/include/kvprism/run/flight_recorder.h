// The last events of a part, for the moment in which something has gone wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/run/instant.h"

namespace kvprism {

// What happened, and what the three numbers of its event are.
enum class FlightKind : std::uint8_t {
  kAsked,         // request, tokens from, tokens to
  kAnswered,      // request, hit in tokens, 1 when the index could not tell
  kLoad,          // request, job, tokens
  kSave,          // request, job, tokens up to which
  kOutcome,       // job, JobOutcome, failed chunks
  kQuiet,         // job, blocks released
  kLoadEnd,       // request, job, valid tokens
  kQuarantine,    // request, job, blocks held
  kExpired,       // request, job, 0: a rank was silent
  kMismatch,      // request, group, chunk
  kRemoved,       // call, objects, 1 when something stayed
  kPurge,         // PurgeState, objects removed, passes
  kMode,          // StoreMode
  kHealth,        // HealthState, reasons
  kPreempted,     // request
  kFinished,      // request
  kReportError,   // reports that could not be used so far
  kOffersPaused,  // times so far: nothing is offered for a while
};

KVPRISM_API std::string_view to_string(FlightKind kind) noexcept;

struct FlightEvent {
  Instant at;
  FlightKind kind{};
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  std::uint64_t c = 0;
};

// A ring: recording allocates nothing and never fails.
// Ownership: value. Threads: one at a time.
class KVPRISM_API FlightRecorder {
 public:
  static constexpr std::size_t kEvents = 4096;

  FlightRecorder() : events_(kEvents) {}

  void add(Instant at, FlightKind kind, std::uint64_t a = 0, std::uint64_t b = 0,
           std::uint64_t c = 0) noexcept {
    events_[total_++ % kEvents] = {at, kind, a, b, c};
  }

  std::uint64_t total() const noexcept { return total_; }  // ever recorded
  std::size_t size() const noexcept {
    return total_ < kEvents ? static_cast<std::size_t>(total_) : kEvents;
  }
  // Oldest first; `at` below size().
  const FlightEvent& operator[](std::size_t at) const noexcept {
    return events_[(total_ - size() + at) % kEvents];
  }

  // The last `most` events, one a line, with the seconds before the last one in front.
  std::string text(std::size_t most = kEvents) const;

 private:
  std::vector<FlightEvent> events_;
  std::uint64_t total_ = 0;
};

}  // namespace kvprism
