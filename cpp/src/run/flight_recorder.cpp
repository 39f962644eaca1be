#include "kvprism/run/flight_recorder.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace kvprism {

std::string_view to_string(FlightKind kind) noexcept {
  static constexpr std::array<std::string_view, 18> kNames{
      "asked",    "answered",   "load",      "save",     "outcome",      "quiet",
      "load_end", "quarantine", "expired",   "mismatch", "removed",      "purge",
      "mode",     "health",     "preempted", "finished", "report_error", "offers_paused"};
  const auto at = static_cast<std::size_t>(kind);
  return at < kNames.size() ? kNames[at] : "unknown";
}

std::string FlightRecorder::text(std::size_t most) const {
  std::string out;
  const std::size_t count = size();
  for (std::size_t i = count - std::min(most, count); i < count; ++i) {
    const FlightEvent& event = (*this)[i];
    const double before = static_cast<double>(((*this)[count - 1].at - event.at).ns) / 1e9;
    std::array<char, 128> line;
    const std::string_view name = to_string(event.kind);
    const int length = std::snprintf(
        line.data(), line.size(), "-%.6f %.*s %llu %llu %llu\n", before,
        static_cast<int>(name.size()), name.data(), static_cast<unsigned long long>(event.a),
        static_cast<unsigned long long>(event.b), static_cast<unsigned long long>(event.c));
    out.append(line.data(), static_cast<std::size_t>(std::max(length, 0)));
  }
  return out;
}

}  // namespace kvprism
