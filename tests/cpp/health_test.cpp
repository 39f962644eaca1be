// Health of the store scheduler, and what it tells at an incident.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

#include "kvprism/backend/flight_file.h"
#include "kvprism/base/log.h"
#include "store_fixtures.h"
#include "thread_sanitizer.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::Rows;
using test::ScriptedStore;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr RequestId kRequest{3};

class HealthTest : public ::testing::Test {
 protected:
  HealthTest() {
    set_log_sink(
        [](void* to, LogLevel, std::string_view line) {
          auto& test = *static_cast<HealthTest*>(to);
          const std::lock_guard lock(test.lines_mutex);  // flight records are told by their thread
          test.lines.emplace_back(line);
        },
        this, LogLevel::kInfo);
  }
  ~HealthTest() override { set_log_sink(nullptr, nullptr, LogLevel::kOff); }

  void build(StoreSchedulerOptions options = {}) {
    options.epoch = 9;
    schema = test::make_schema(test::make_projection({test::full_group(16)}));
    scheduler.reset();
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
  }
  std::vector<std::string> health_lines() {
    std::vector<std::string> found;
    for (const std::string& line : lines) {
      if (line.starts_with("the store is ")) found.push_back(line);
    }
    return found;
  }
  std::string health() const { return describe(scheduler->health()); }
  void step(Duration later = {}) {
    now = now + later;
    scheduler->end_step(now);
    if (file) {
      ASSERT_TRUE(file->flush(seconds(60)));
    }
  }
  void build_with_file(const std::filesystem::path& path) {
    file = std::make_unique<FlightFile>(path.string());
    StoreSchedulerOptions options;
    options.flight = file->sink();
    options.quarantine_after = seconds(1);
    build(options);
  }
  // 32 tokens of another prompt each time.
  JobId save(std::uint8_t salt, RequestId id = kRequest) {
    const Hashes hashes(2, salt);
    scheduler->advanced(id, 32, hashes.list());
    scheduler->save(id, {0, 32}, rows.get(), now);
    return scheduler->end_step(now).jobs.at(0).id;
  }
  void report(JobId job, JobOutcome outcome, bool quiet, std::vector<FailedChunk> failed = {}) {
    WorkerReport told;
    told.epoch = 9;
    JobReport entry;
    entry.job = job;
    entry.outcome = outcome;
    entry.quiet = quiet ? 1 : 0;
    entry.num_failed = static_cast<std::uint32_t>(failed.size());
    told.jobs = {entry};
    told.failed = std::move(failed);
    scheduler->report(told, now);
  }

  std::mutex lines_mutex;
  std::vector<std::string> lines;
  std::unique_ptr<FlightFile> file;
  std::shared_ptr<ScriptedStore> store = std::make_shared<ScriptedStore>();
  std::shared_ptr<const KeySchema> schema;
  std::unique_ptr<StoreScheduler> scheduler;
  const Rows rows{{{1, 2, 3, 4}}};
  Instant now{seconds(1).ns};
};

TEST_F(HealthTest, LookupsThatFailAreOneLineAndTheirEndAnother) {
  build();
  step();
  EXPECT_EQ(health(), "healthy");
  EXPECT_THAT(health_lines(), IsEmpty());
  for (std::uint64_t id = 1; id <= 5; ++id) {
    const Hashes hashes(4, 1);
    scheduler->lookup(RequestId{id}, 65, hashes.list(), 0, now);
    step();
    store->end_lookup(std::vector<ItemStatus>(4, ItemStatus::kUnavailable));
    step(milliseconds(10));
  }
  EXPECT_EQ(health(), "degraded: lookups fail");
  EXPECT_EQ(scheduler->counters().health, 1u);
  const Hashes hashes(4, 2);
  scheduler->lookup(kRequest, 65, hashes.list(), 0, now);
  step();
  store->end_lookup(std::vector<ItemStatus>(4, ItemStatus::kMissing));
  step();
  EXPECT_EQ(health(), "degraded: lookups fail") << "for a while, so that it does not flicker";
  step(seconds(5));
  EXPECT_EQ(health(), "healthy");
  EXPECT_THAT(health_lines(),
              ElementsAre("the store is degraded: lookups fail", "the store is healthy"));
  EXPECT_EQ(scheduler->counters().lookup_time.count, 6u);
  EXPECT_EQ(scheduler->counters().lookup_time.sum_us, 50'000u);
}

// Nothing is asked that could say otherwise.
TEST_F(HealthTest, WhatLookupsHaveFoundIsForgottenInAModeWithoutLoads) {
  build();
  const Hashes hashes(4, 1);
  scheduler->lookup(kRequest, 65, hashes.list(), 0, now);
  step();
  store->end_lookup(std::vector<ItemStatus>(4, ItemStatus::kUnavailable));
  step();
  EXPECT_EQ(health(), "degraded: lookups fail");
  scheduler->set_mode(StoreMode::kWriteOnly);
  step(seconds(5));
  EXPECT_EQ(health(), "healthy");
}

TEST_F(HealthTest, ReasonsAddUp) {
  StoreSchedulerOptions options;
  options.backoff_after = 1;
  options.backoff = seconds(30);
  build(options);
  const JobId full = save(1);
  report(full, JobOutcome::kPartial, true,
         {{StoreIndex{0}, 0, static_cast<std::uint32_t>(ItemStatus::kNoSpace)}});
  step();
  EXPECT_EQ(health(), "degraded: saving is paused");
  scheduler->purge(now);
  step();
  EXPECT_EQ(health(), "degraded: saving is paused, a purge is running");
  scheduler->set_mode(StoreMode::kOff);
  step();
  EXPECT_EQ(health(), "off");
  EXPECT_EQ(scheduler->counters().health, 2u);
  EXPECT_EQ(health_lines().back(), "the store is off");
}

TEST_F(HealthTest, ASilentRankIsAnIncidentWithTheLastEvents) {
  build();
  save(1);
  step(seconds(75));
  EXPECT_EQ(health(), "degraded: a worker is silent");
  EXPECT_EQ(scheduler->counters().incidents, 1u);
  ASSERT_THAT(lines, ::testing::Contains(HasSubstr("a rank has not told the outcome of a job: the "
                                                   "last events are\n")));
  EXPECT_THAT(lines[0], HasSubstr("save 3 1 32\n"));
  EXPECT_THAT(lines[0], HasSubstr("-0.000000 expired 3 1 0\n"));
  // Then its blocks go to quarantine: another incident, and within a minute of the first no more.
  const std::size_t told = lines.size();
  step(seconds(120));
  EXPECT_EQ(health(), "degraded: a worker is silent, blocks in quarantine");
  EXPECT_EQ(scheduler->counters().incidents, 2u);
  EXPECT_GT(lines.size(), told);
  report(JobId{1}, JobOutcome::kOk, true);
  step(seconds(5));
  EXPECT_EQ(health(), "degraded: a worker is silent") << "until it tells an outcome in time";
  const JobId next = save(2, RequestId{4});
  report(next, JobOutcome::kOk, true);
  step(seconds(5));
  EXPECT_EQ(health(), "healthy");
}

TEST_F(HealthTest, ASinkThatThrowsIsNotCalledAgain) {
  StoreSchedulerOptions options;
  std::uint32_t calls = 0;
  options.flight = {[](void* count, std::uint64_t, std::string_view, const FlightRecorder&) {
                      ++*static_cast<std::uint32_t*>(count);
                      throw 7;
                    },
                    &calls};
  build(options);
  save(1);
  step(seconds(75));
  step(seconds(120));
  EXPECT_EQ(scheduler->counters().incidents, 2u);
  EXPECT_EQ(calls, 1u);
  EXPECT_THAT(lines, ::testing::Contains(
                         "the flight record goes to the log from now on: its sink has thrown"));
  EXPECT_THAT(lines, ::testing::Contains(HasSubstr("the last events are\n")));
}

TEST_F(HealthTest, TheRecordGoesToAFileOnceAMinute) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-flight-" + std::to_string(::getpid()));
  build_with_file(path);
  const JobId job = save(1);
  report(job, JobOutcome::kOk, false);
  step(seconds(1));
  EXPECT_THAT(lines,
              ::testing::UnorderedElementsAre(
                  HasSubstr("blocks went to quarantine: the flight record is in " + path.string()),
                  HasSubstr("is not quiet after"), HasSubstr("the store is degraded")));
  const auto content = [&] {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  };
  const std::string first = "epoch 9: blocks went to quarantine\n";
  ASSERT_TRUE(content().starts_with(first));
  const std::string events = content().substr(first.size());
  EXPECT_EQ(events, scheduler->flight_record().text().substr(0, events.size()));
  EXPECT_EQ(std::filesystem::status(path).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  EXPECT_THAT(content(), HasSubstr("quarantine 3 1 2\n"));
  std::filesystem::remove(path);
  const JobId second = save(2, RequestId{4});
  report(second, JobOutcome::kOk, false);
  step(seconds(1));
  EXPECT_EQ(scheduler->counters().incidents, 2u);
  EXPECT_FALSE(std::filesystem::exists(path)) << "within a minute";
}

// The thread that writes is not in the child, and its mutex may be locked there for ever.
TEST_F(HealthTest, AForkedChildDropsItsRecords) {
  if (test::kThreadSanitizer) GTEST_SKIP() << "fork with threads";
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-child-" + std::to_string(::getpid()));
  build_with_file(path);
  report(save(1), JobOutcome::kOk, false);
  step(seconds(1));
  const std::uintmax_t size = std::filesystem::file_size(path);
  const FlightSink sink = file->sink();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // ends it, should it wait for a thread that it does not have
    lines.clear();
    for (int i = 0; i < 2; ++i) sink.take(sink.context, 9, "an incident", FlightRecorder{});
    const bool right =
        lines == std::vector<std::string>(
                     2, "an incident: the flight record is dropped in a forked child") &&
        file->flush(seconds(60));
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(std::filesystem::file_size(path), size);
  std::filesystem::remove(path);
}

TEST_F(HealthTest, ARecordFollowsThoseBeforeItUpToABound) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-flights-" + std::to_string(::getpid()));
  std::ofstream(path) << "of a run before\n";
  build_with_file(path);
  const auto incident = [&](std::uint8_t salt) {
    lines.clear();
    report(save(salt, RequestId{salt}), JobOutcome::kOk, false);
    step(seconds(61));
  };
  const auto content = [&] {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  };
  incident(1);
  EXPECT_TRUE(content().starts_with("of a run before\nepoch 9: blocks went to quarantine\n"));
  const std::size_t size = content().size();
  incident(2);
  EXPECT_TRUE(content().substr(size).starts_with("epoch 9: blocks went to quarantine\n"));
  std::filesystem::resize_file(path, 8 << 20);
  incident(3);
  EXPECT_EQ(std::filesystem::file_size(path), 8u << 20);
  EXPECT_THAT(lines, ::testing::Contains(
                         HasSubstr("could not be written to " + path.string() +
                                   ": it has 8388608 bytes, and at most 8388608 are kept")));
  std::filesystem::remove(path);
}

TEST_F(HealthTest, WhatIsNoFileDoesNotHoldUpAStep) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-fifo-" + std::to_string(::getpid()));
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  build_with_file(path);
  report(save(1), JobOutcome::kOk, false);
  step(seconds(1));
  EXPECT_THAT(lines, ::testing::Contains(HasSubstr("could not be written to " + path.string() +
                                                   ": No such device or address")));
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);
  lines.clear();
  report(save(2, RequestId{4}), JobOutcome::kOk, false);
  step(seconds(61));
  EXPECT_THAT(lines, ::testing::Contains(HasSubstr("it is no regular file")));
  ::close(reader);
  std::filesystem::remove(path);
}

TEST_F(HealthTest, TheRecordIsWrittenByAThreadOfItsOwn) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-thread-" + std::to_string(::getpid()));
  static std::array<char, 16> name{};
  set_log_sink(
      [](void*, LogLevel, std::string_view line) {
        if (line.find("the flight record is in") == std::string_view::npos) return;
        pthread_getname_np(pthread_self(), name.data(), name.size());
      },
      nullptr, LogLevel::kInfo);
  build_with_file(path);
  report(save(1), JobOutcome::kOk, false);
  step(seconds(1));
  EXPECT_STREQ(name.data(), "kvp-flight");
  std::filesystem::remove(path);
}

TEST_F(HealthTest, ALoadThatIsLateIsTroubleBeforeItEnds) {
  build();
  const Hashes hashes(4, 1);
  scheduler->lookup(RequestId{1}, 65, hashes.list(), 0, now);
  step();
  store->end_lookup(std::vector<ItemStatus>(4, ItemStatus::kOk));
  ASSERT_EQ(scheduler->lookup(RequestId{1}, 65, hashes.list(), 0, now).external_tokens, 64u);
  const JobId job = *scheduler->allocated(RequestId{1}, 64, rows.get(), now);
  step(milliseconds(40));
  EXPECT_EQ(health(), "healthy");
  report(job, JobOutcome::kExpired, false,
         {{StoreIndex{0}, 1, static_cast<std::uint32_t>(ItemStatus::kTimedOut)}});
  step();
  EXPECT_EQ(health(), "degraded: loads fail");
  std::vector<LoadEnd> ends;
  scheduler->take_load_ends(ends);
  EXPECT_TRUE(ends.empty()) << "its blocks are not quiet";
}

TEST_F(HealthTest, ALostRaceIsNoTrouble) {
  build();
  for (const ItemStatus status : {ItemStatus::kMissing, ItemStatus::kFailed}) {
    const RequestId id{status == ItemStatus::kMissing ? 1u : 2u};
    const Hashes hashes(4, 1);
    scheduler->lookup(id, 65, hashes.list(), 0, now);
    step();
    store->end_lookup(std::vector<ItemStatus>(4, ItemStatus::kOk));
    ASSERT_EQ(scheduler->lookup(id, 65, hashes.list(), 0, now).external_tokens, 64u);
    const JobId job = *scheduler->allocated(id, 64, rows.get(), now);
    step(milliseconds(40));
    report(job, JobOutcome::kPartial, true,
           {{StoreIndex{0}, 1, static_cast<std::uint32_t>(status)}});
    step();
    EXPECT_EQ(health(), status == ItemStatus::kMissing ? "healthy" : "degraded: loads fail");
  }
  EXPECT_EQ(scheduler->counters().load_time.count, 2u);
  EXPECT_EQ(scheduler->counters().load_time.sum_us, 80'000u);
}

}  // namespace
}  // namespace kvprism
