// Recordings of a scheduler's run, and their repetition.
#include "kvprism/store/replay_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "kvprism/backend/run_file.h"
#include "kvprism/base/error.h"
#include "kvprism/base/version.h"
#include "kvprism/run/flight_recorder.h"
#include "kvprism/spec/spec_registry.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::Rows;
using test::ScriptedStore;
using ::testing::HasSubstr;

using Bytes = std::vector<std::byte>;

// A request that is looked up, loaded in part, saved and preempted, and a purge.
void run(const RunSink& sink) {
  const auto store = std::make_shared<ScriptedStore>();
  const auto schema =
      test::make_schema(test::make_projection({test::full_group(16), test::full_group(16, "b")}));
  StoreSchedulerOptions options;
  options.epoch = 77;
  options.record = sink;
  StoreScheduler scheduler(schema, store, options);
  const Hashes hashes(8, 1);
  const Rows rows({{1, 2, 3, 4}, {5, 6, 7, 8}});
  Instant now{seconds(1).ns};
  const auto report = [&](JobId job, JobOutcome outcome, std::vector<FailedChunk> failed = {}) {
    WorkerReport told;
    told.epoch = 77;
    JobReport entry;
    entry.job = job;
    entry.outcome = outcome;
    entry.quiet = 1;
    entry.num_failed = static_cast<std::uint32_t>(failed.size());
    told.jobs = {entry};
    told.failed = std::move(failed);
    scheduler.report(told, now);
  };

  const RequestId id{5};
  ASSERT_TRUE(scheduler.lookup(id, 65, hashes.list(), 0, now).pending);
  scheduler.end_step(now);
  store->end_lookup(std::vector<ItemStatus>(8, ItemStatus::kOk));
  now = now + milliseconds(3);
  ASSERT_EQ(scheduler.lookup(id, 65, hashes.list(), 0, now).external_tokens, 64u);
  const auto job = scheduler.allocated(id, 64, rows.get(), now);
  ASSERT_TRUE(job);
  std::vector<BlockId> ids;
  scheduler.take_acquired(ids);
  scheduler.end_step(now);
  report(*job, JobOutcome::kPartial,
         {{StoreIndex{1}, 2, static_cast<std::uint32_t>(ItemStatus::kChecksumMismatch)}});
  std::vector<LoadEnd> ends;
  scheduler.take_load_ends(ends);
  ASSERT_EQ(ends.size(), 1u);
  ASSERT_EQ(ends[0].valid_tokens, 32u);
  scheduler.take_released(ids);
  scheduler.advanced(id, 64, hashes.list());
  const TokenRange wanted = scheduler.wants_save(id, now);
  ASSERT_EQ(wanted, (TokenRange{32, 64}));
  scheduler.save(id, wanted, rows.get(), now);
  const JobId save = scheduler.end_step(now).jobs.at(0).id;
  store->end_removal({ItemStatus::kOk, 1});
  report(save, JobOutcome::kOk);
  scheduler.preempted(id);
  scheduler.purge(now);
  store->end_removal({ItemStatus::kOk, 9});
  scheduler.end_step(now);
  scheduler.finished(id, FinishReason::kAborted);
  scheduler.set_mode(StoreMode::kOff);
  scheduler.end_step(now);
}

RunSink into(Bytes& bytes) {
  return {[](void* to, std::span<const std::byte> more) {
            auto& all = *static_cast<Bytes*>(to);
            all.insert(all.end(), more.begin(), more.end());
            return true;
          },
          &bytes};
}

Bytes recorded() {
  Bytes bytes;
  run(into(bytes));
  return bytes;
}

TEST(RunRecord, ASinkThatThrowsEndsTheRecordingOnly) {
  std::uint32_t writes = 0;
  run({[](void* count, std::span<const std::byte>) -> bool {
         if (++*static_cast<std::uint32_t*>(count) < 3) return true;
         throw std::runtime_error("the disk is gone");
       },
       &writes});
  EXPECT_EQ(writes, 3u) << "the scheduler has gone on without it";
}

TEST(RunRecord, ARepetitionDecidesTheSame) {
  const ReplayRunResult result = replay_run(recorded());
  EXPECT_TRUE(result.same) << result.difference;
  EXPECT_EQ(result.steps, 5u);
  EXPECT_EQ(result.plans, 2u);
  EXPECT_EQ(result.calls, 20u);
  EXPECT_EQ(result.ignored_bytes, 0u);
  EXPECT_FALSE(result.ended) << "only a file tells its end";
  EXPECT_THAT(result.recorded_by, HasSubstr(std::string("kvprism ") + kVersionString + ", "));
  EXPECT_EQ(result.recorded_by, result.repeated_by);
}

// What an engine puts together by hand may be what no decoder would take.
TEST(RunRecord, AReportThatNoDecoderTakesIsRepeatedAsItWasTaken) {
  struct Case {
    JobReport told;
    std::uint64_t malformed;
    std::uint32_t valid_tokens;
  };
  const JobOutcome none_such{9};
  const Case cases[] = {{{.outcome = JobOutcome::kPartial, .quiet = 1, .num_failed = 5}, 1, 0},
                        {{.outcome = JobOutcome::kOk, .quiet = 7}, 0, 64},
                        {{.outcome = none_such, .quiet = 1}, 1, 0}};
  for (const Case& one : cases) {
    Bytes bytes;
    const auto store = std::make_shared<ScriptedStore>();
    StoreSchedulerOptions options;
    options.epoch = 77;
    options.record = into(bytes);
    StoreScheduler scheduler(test::make_schema(test::make_projection({test::full_group(16)})),
                             store, options);
    const Hashes hashes(8, 1);
    const Rows rows({{1, 2, 3, 4}});
    const Instant now{seconds(1).ns};
    ASSERT_TRUE(scheduler.lookup(RequestId{5}, 65, hashes.list(), 0, now).pending);
    scheduler.end_step(now);
    store->end_lookup(std::vector<ItemStatus>(4, ItemStatus::kOk));
    ASSERT_EQ(scheduler.lookup(RequestId{5}, 65, hashes.list(), 0, now).external_tokens, 64u);
    const auto job = scheduler.allocated(RequestId{5}, 64, rows.get(), now);
    ASSERT_TRUE(job);
    scheduler.end_step(now);
    WorkerReport report;
    report.epoch = 77;
    report.jobs = {one.told};
    report.jobs[0].job = *job;
    EXPECT_EQ(scheduler.report(report, now), one.malformed == 0);
    EXPECT_EQ(scheduler.counters().reports_malformed, one.malformed);
    std::vector<LoadEnd> ends;
    scheduler.take_load_ends(ends);
    ASSERT_EQ(ends.size(), 1u);
    EXPECT_EQ(ends[0].valid_tokens, one.valid_tokens);
    std::vector<BlockId> ids;
    scheduler.take_released(ids);
    EXPECT_EQ(ids.size(), 4u) << "that it is quiet counts";
    scheduler.end_step(now);
    const ReplayRunResult result = replay_run(bytes);
    EXPECT_TRUE(result.same) << result.difference;
    EXPECT_EQ(result.steps, 3u);
  }
}

TEST(RunRecord, AStateOfAGroupThatThereIsNotIsRepeatedAsItWasTaken) {
  Bytes bytes;
  StoreSchedulerOptions options;
  options.epoch = 77;
  options.record = into(bytes);
  StoreScheduler scheduler(test::make_schema(test::make_projection({test::mamba_group(16)})),
                           std::make_shared<ScriptedStore>(), options);
  const Hashes hashes(8, 1);
  scheduler.advanced(RequestId{5}, 32, hashes.list());
  scheduler.boundary(RequestId{5}, GroupId{99}, BlockId{3}, 32);
  scheduler.boundary(RequestId{5}, GroupId{0}, BlockId{3}, 32);
  EXPECT_EQ(scheduler.end_step(Instant{seconds(1).ns}).jobs.size(), 1u);
  const ReplayRunResult result = replay_run(bytes);
  EXPECT_TRUE(result.same) << result.difference;
  EXPECT_EQ(result.plans, 1u);
}

TEST(RunRecord, TheSameRunGivesTheSameBytes) { EXPECT_EQ(recorded(), recorded()); }

TEST(RunRecord, TheFirstDifferenceIsNamed) {
  Bytes bytes = recorded();
  // The second lookup's result: {0, 64} at the end of a return record.
  const std::uint64_t result[2] = {0, 64};
  const auto* const words = reinterpret_cast<const std::byte*>(result);
  const auto at = std::search(bytes.begin(), bytes.end(), words, words + sizeof(result));
  ASSERT_NE(at, bytes.end());
  at[8] = std::byte{48};
  const ReplayRunResult found = replay_run(bytes);
  EXPECT_FALSE(found.same);
  EXPECT_EQ(found.difference, "call 3, lookup in step 1: it returned 0 30, and now 0 40");
}

TEST(RunRecord, AnotherProgramIsNamedWithTheDifference) {
  Bytes bytes = recorded();
  const std::string program = replay_run(bytes).recorded_by;
  const auto* const first = reinterpret_cast<const std::byte*>(program.data());
  const auto at = std::search(bytes.begin(), bytes.end(), first, first + program.size());
  ASSERT_NE(at, bytes.end());
  at[0] = std::byte{'K'};
  EXPECT_TRUE(replay_run(bytes).same) << "it decides the same";
  const std::uint64_t result[2] = {0, 64};
  const auto* const words = reinterpret_cast<const std::byte*>(result);
  std::search(bytes.begin(), bytes.end(), words, words + sizeof(result))[8] = std::byte{48};
  EXPECT_EQ(replay_run(bytes).difference,
            "call 3, lookup in step 1: it returned 0 30, and now 0 40 (recorded by K" +
                program.substr(1) + ", repeated by " + program + ")");
}

TEST(RunRecord, ACutOffCallIsIgnored) {
  const Bytes bytes = recorded();
  std::uint64_t calls = 0;
  for (std::size_t size = bytes.size(); size >= 8; size -= 8) {
    try {
      const ReplayRunResult result = replay_run(std::span(bytes).first(size));
      EXPECT_TRUE(result.same) << size << ": " << result.difference;
      EXPECT_LT(result.ignored_bytes, size);
      calls = std::max(calls, result.calls);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("a setup record")) << size;
    }
  }
  EXPECT_EQ(calls, 20u);
}

TEST(RunRecord, EveryDamagedByteIsAnErrorOrADifferenceOrHarmless) {
  const Bytes bytes = recorded();
  std::size_t noticed = 0;
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    Bytes damaged = bytes;
    damaged[at] ^= std::byte{0x15};
    try {
      if (!replay_run(damaged).same) ++noticed;
    } catch (const Error&) {
      ++noticed;
    }
  }
  EXPECT_GT(noticed, bytes.size() / 4);
}

TEST(RunRecord, WhatIsNoRecordingIsRefused) {
  Bytes bytes = recorded();
  const auto error_of = [](std::span<const std::byte> input) -> std::string {
    try {
      replay_run(input);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(error_of({}), HasSubstr("a recording, which begins with 8 bytes"));
  EXPECT_THAT(error_of(std::span(bytes).subspan(8)), HasSubstr("magic"));
  bytes[4] = std::byte{9};
  EXPECT_THAT(error_of(bytes), HasSubstr("version = 9: expected 3"));
}

TEST(RunRecord, AFileTakesIt) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-run-" + std::to_string(::getpid()));
  {
    RunFile file(path.string());
    run(file.sink());
    // Before it is closed: a crash loses nothing.
    EXPECT_EQ(std::filesystem::file_size(path), recorded().size());
  }
  EXPECT_EQ(std::filesystem::status(path).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  // It may be what explains a crash.
  try {
    RunFile again(path.string());
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("record_to = " + path.string() +
                                        ": expected the name of a new file that can be written"));
    EXPECT_THAT(error.what(), HasSubstr("File exists"));
  }
  EXPECT_EQ(std::filesystem::file_size(path), recorded().size() + 16) << "and its end";
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  EXPECT_TRUE(replay_run(bytes).ended);
  EXPECT_EQ(replay_run(bytes).calls, 20u);
  bytes.resize(bytes.size() + 3);
  try {
    replay_run(bytes);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("byte " + std::to_string(text.size()) +
                          " = 3 more bytes: expected nothing behind the end, which byte " +
                          std::to_string(text.size() - 16) + " tells"));
  }
  std::filesystem::remove(path);
  EXPECT_THROW(RunFile("/nowhere/at/all"), Error);
}

TEST(RunRecord, ARefusedSchedulerLeavesNoFileBehind) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-refused-" + std::to_string(::getpid()));
  const auto store = std::make_shared<ScriptedStore>();
  const auto schema = test::make_schema(test::make_projection({test::full_group(16)}));
  const StoreScheduler first(schema, store, {.epoch = 1});
  for (int attempt = 0; attempt < 2; ++attempt) {
    RunFile file(path.string());
    StoreSchedulerOptions options{.epoch = 2};
    options.record = file.sink();
    EXPECT_THROW(StoreScheduler(schema, store, options), Error) << "the index is in use";
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(RunRecord, AForkedChildNeitherWritesNorEndsTheRecording) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-forked-" + std::to_string(::getpid()));
  auto file = std::make_unique<RunFile>(path.string());
  const auto in_child = [&](bool uses_it) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      if (uses_it) run(file->sink());
      file.reset();
      ::_exit(0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  };
  in_child(false);
  ASSERT_TRUE(std::filesystem::exists(path)) << "it is the parent's";
  run(file->sink());
  in_child(true);
  EXPECT_EQ(std::filesystem::file_size(path), recorded().size());
  file.reset();
  EXPECT_EQ(std::filesystem::file_size(path), recorded().size() + 16) << "and its end";
  std::filesystem::remove(path);
}

TEST(RunRecord, KindsOfTheEngineAreKnownByItsRegistry) {
  const SpecRegistry registry = SpecRegistry::builtin().with({
      .name = "pooled_keys",
      .payload = PayloadKind::kRaw,
      .needs = ParameterSet{},
      .allows = ParameterSet{},
      .dcp_sharded = false,
      .latent = true,
      .traits = [](const CacheSpec&) -> SpecTraits {
        return {.prefix_cacheable = true,
                .hit = HitRule::kPrefix,
                .window = 0,
                .save = SaveRule::kPositional,
                .peer = PeerRule::kSuffix,
                .replay_tokens = 0,
                .fine_grained_lookup = false};
      },
  });
  const auto projection = Projection::make(
      cache_config_from_json(R"({"num_blocks": 8, "groups": [{"kind": "pooled_keys",
          "layers": ["p0"], "block_size": 16, "page_size_bytes": 256}]})",
                             registry),
      registry);
  Bytes bytes;
  {
    StoreSchedulerOptions options{.epoch = 3};
    options.record = {[](void* to, std::span<const std::byte> more) {
                        auto& all = *static_cast<Bytes*>(to);
                        all.insert(all.end(), more.begin(), more.end());
                        return true;
                      },
                      &bytes};
    StoreScheduler scheduler(test::make_schema(projection), std::make_shared<ScriptedStore>(),
                             options);
    scheduler.advanced(RequestId{1}, 32, Hashes(2, 1).list());
    const Rows rows({{1, 2}});
    scheduler.save(RequestId{1}, {0, 32}, rows.get(), Instant{5});
    scheduler.end_step(Instant{6});
  }
  const ReplayRunResult result = replay_run(bytes, registry);
  EXPECT_TRUE(result.same) << result.difference;
  EXPECT_EQ(result.plans, 1u);
  try {
    replay_run(bytes);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("pooled_keys"));
  }
}

TEST(RunRecord, AFileWithoutAReaderDoesNotHoldUpItsMaking) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kvprism-fifo-" + std::to_string(::getpid()));
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_THROW(RunFile(path.string()), Error);
  std::filesystem::remove(path);
}

TEST(RunRecord, ASinkThatTakesNoMoreEndsTheRecording) {
  int calls = 0;
  run({[](void* to, std::span<const std::byte>) { return ++*static_cast<int*>(to) < 3; }, &calls});
  EXPECT_EQ(calls, 3);
}

TEST(Flight, KeepsTheLastEventsInOrder) {
  FlightRecorder flight;
  EXPECT_EQ(flight.size(), 0u);
  EXPECT_EQ(flight.text(), "");
  for (std::uint64_t i = 0; i < 5000; ++i)
    flight.add(Instant{static_cast<std::int64_t>(i) * 1'000'000}, FlightKind::kSave, i, 1, 2);
  EXPECT_EQ(flight.total(), 5000u);
  ASSERT_EQ(flight.size(), 4096u);
  EXPECT_EQ(flight[0].a, 904u);
  EXPECT_EQ(flight[4095].a, 4999u);
  EXPECT_EQ(flight.text(2), "-0.001000 save 4998 1 2\n-0.000000 save 4999 1 2\n");
  const std::string all = flight.text();
  EXPECT_EQ(std::count(all.begin(), all.end(), '\n'), 4096);
}

TEST(Flight, EveryKindHasAName) {
  for (std::size_t kind = 0; kind <= static_cast<std::size_t>(FlightKind::kReportError); ++kind)
    EXPECT_NE(to_string(static_cast<FlightKind>(kind)), "unknown") << kind;
}

TEST(Histogram, CountsByUpperBound) {
  DurationHistogram times;
  times.add(milliseconds(-1));
  times.add(Duration{500'000});
  times.add(Duration{501'000});
  times.add(milliseconds(1));
  times.add(seconds(61));
  EXPECT_EQ(times.counts.front(), 2u);
  EXPECT_EQ(times.counts[1], 2u);
  EXPECT_EQ(times.counts.back(), 1u);
  EXPECT_EQ(times.count, 5u);
  EXPECT_EQ(times.sum_us, 500u + 501u + 1000u + 61'000'000u);
}

}  // namespace
}  // namespace kvprism
