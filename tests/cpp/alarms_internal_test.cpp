#include <gtest/gtest.h>

#include "job/alarms.h"

namespace kvprism {
namespace {

// A job mostly ends long before its alarm: what waits must follow the jobs that are alive.
TEST(Alarms, ThoseOfJobsThatAreOverAreForgottenAndNoOther) {
  constexpr std::uint64_t kJobs = 100'000;
  constexpr std::size_t kAlive = 100;
  detail::Alarms alarms;
  std::size_t most = 0;
  for (std::uint64_t job = 1; job <= kJobs; ++job) {
    // Every second alarm is earlier than the one before it.
    alarms.add(Instant{static_cast<std::int64_t>(1'000'000 + job * (job % 2))}, JobId{job}, kAlive,
               [&](JobId other) { return raw(other) + kAlive >= job; });
    most = std::max(most, alarms.size());
  }
  EXPECT_LE(most, 2 * kAlive + 65);
  EXPECT_FALSE(alarms.take(Instant{999'999}).has_value());
  std::vector<std::uint64_t> alive;
  std::uint64_t last_odd = 0;
  while (const auto job = alarms.take(Instant{2'000'000})) {
    if (raw(*job) + kAlive <= kJobs) continue;
    alive.push_back(raw(*job));
    if (raw(*job) % 2 == 0) {
      EXPECT_EQ(last_odd, 0u) << "the later ones come last";
    } else {
      EXPECT_GT(raw(*job), last_odd);
      last_odd = raw(*job);
    }
  }
  EXPECT_EQ(alive.size(), kAlive);
}

}  // namespace
}  // namespace kvprism
