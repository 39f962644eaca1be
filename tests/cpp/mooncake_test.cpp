// The Mooncake backend against a real master and the real library.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "kvprism/base/error.h"
#include "mooncake_fixture.h"

namespace kvprism::test {
namespace {

using Clock = std::chrono::steady_clock;
using S = std::vector<ItemStatus>;

class Mooncake : public MooncakeTest {};

TEST_F(Mooncake, RoundTripOfOddSizes) {
  MooncakeMaster master(site_packages_);
  BlockingStore store(mooncake_client_factory(options(master)));
  EXPECT_EQ(store.capabilities().name, "mooncake 0.3.13.post1 tcp");
  EXPECT_EQ(store.capabilities().max_segments_per_call, 8192u);
  EXPECT_FALSE(store.capabilities().device_memory);
  const Memory memory(8 << 20);
  store.add_region(memory.region());
  Operations run(store);

  const std::vector<std::vector<std::size_t>> shapes = {
      {1}, {3, 4097}, {65537, 1, 4095}, {(1 << 20) + 13, 31}, {17, 17, 17, 17, 17}, {999999}};
  std::vector<Item> sources, targets;
  std::vector<std::string> keys;
  std::size_t at = 7;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    Item source{"odd-" + std::to_string(i), {}};
    Item target = source;
    for (const std::size_t bytes : shapes[i]) {
      memory.fill(at, bytes, static_cast<std::uint32_t>(at));
      source.segments.push_back({memory.at(at), bytes});
      target.segments.push_back({memory.at(at + (4 << 20)), bytes});
      at += bytes + 3;
    }
    keys.push_back(source.key);
    sources.push_back(source);
    targets.push_back(target);
  }
  EXPECT_EQ(run.exists(keys), S(keys.size(), ItemStatus::kMissing));
  EXPECT_EQ(run.put(sources), S(keys.size(), ItemStatus::kOk));
  EXPECT_EQ(run.exists(keys), S(keys.size(), ItemStatus::kOk));
  EXPECT_EQ(run.get(targets), S(keys.size(), ItemStatus::kOk));
  for (const Item& source : sources) {
    for (const Segment& segment : source.segments) {
      EXPECT_EQ(std::memcmp(segment.base, segment.base + (4 << 20), segment.length), 0);
      EXPECT_EQ(segment.base[(4 << 20) + segment.length], std::byte{0});
      EXPECT_EQ(segment.base[(4 << 20) - 1], std::byte{0});
    }
  }
  EXPECT_EQ(store.counters().replacements, 0u);
}

TEST_F(Mooncake, RegionsThatAreRegisteredInPiecesMoveTheSameBytes) {
  // R67: objects lie across the borders of the pieces, one of them across two.
  MooncakeMaster master(site_packages_);
  MooncakeOptions wanted = options(master);
  wanted.max_region_bytes = 1 << 20;
  BlockingStore store(mooncake_client_factory(wanted));
  const Memory memory((8 << 20) + 12345);
  store.add_region(memory.region());
  Operations run(store);
  constexpr std::size_t kMiB = 1 << 20;
  memory.fill(0, 4 * kMiB, 21);
  const std::size_t from = 4 * kMiB + 777;
  const std::vector<Item> sources = {{"inside", {{memory.at(100), 5000}}},
                                     {"across", {{memory.at(kMiB - 17), 40}, {memory.at(0), 1}}},
                                     {"three", {{memory.at(kMiB + 5), 2 * kMiB}}}};
  const std::vector<Item> targets = {
      {"inside", {{memory.at(from), 5000}}},
      {"across", {{memory.at(5 * kMiB - 20), 40}, {memory.at(from + 6000), 1}}},
      {"three", {{memory.at(5 * kMiB + 999), 2 * kMiB}}}};
  EXPECT_EQ(run.put(sources), S(3, ItemStatus::kOk));
  EXPECT_EQ(run.get(targets), S(3, ItemStatus::kOk));
  for (std::size_t i = 0; i < sources.size(); ++i) {
    for (std::size_t s = 0; s < sources[i].segments.size(); ++s) {
      EXPECT_EQ(std::memcmp(sources[i].segments[s].base, targets[i].segments[s].base,
                            sources[i].segments[s].length),
                0)
          << sources[i].key;
    }
  }
  EXPECT_EQ(store.counters().replacements, 0u);
  store.remove_region(memory.region());
  store.add_region(memory.region());
  EXPECT_EQ(run.get(targets), S(3, ItemStatus::kOk)) << "every piece was given back";
}

TEST_F(Mooncake, ManySlicesAreCutAndSucceed) {
  MooncakeMaster master(site_packages_);
  MooncakeOptions wanted = options(master);
  wanted.max_slices_per_call = 512;
  BlockingStore store(mooncake_client_factory(wanted));
  const Memory memory(8 << 20);
  store.add_region(memory.region());
  Operations run(store);
  memory.fill(0, 4 << 20, 11);
  std::vector<Item> sources, targets;
  constexpr std::size_t kKeys = 600, kSegments = 4, kBytes = 512;
  for (std::size_t i = 0; i < kKeys; ++i) {
    Item source{"many-" + std::to_string(i), {}};
    Item target = source;
    for (std::size_t j = 0; j < kSegments; ++j) {
      const std::size_t offset = (i * kSegments + j) * kBytes;
      source.segments.push_back({memory.at(offset), kBytes});
      target.segments.push_back({memory.at((4 << 20) + offset), kBytes});
    }
    sources.push_back(source);
    targets.push_back(target);
  }
  const auto began = Clock::now();
  EXPECT_EQ(run.put(sources), S(kKeys, ItemStatus::kOk));
  EXPECT_EQ(run.get(targets), S(kKeys, ItemStatus::kOk));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));
  EXPECT_EQ(std::memcmp(memory.at(0), memory.at(4 << 20), kKeys * kSegments * kBytes), 0);
}

TEST_F(Mooncake, ThousandsOfSlicesGoInOneCallAlsoBesideThoseOfAPut) {
  MooncakeMaster master(site_packages_);
  BlockingStore store(mooncake_client_factory(options(master)));
  const Memory memory(8 << 20);
  store.add_region(memory.region());
  Operations run(store);
  memory.fill(0, 4 << 20, 12);
  constexpr std::size_t kKeys = 512, kSegments = 16, kBytes = 256;
  const auto items = [&](const std::string& name, std::size_t begin) {
    std::vector<Item> made;
    for (std::size_t i = 0; i < kKeys; ++i) {
      Item item{name + std::to_string(i), {}};
      for (std::size_t j = 0; j < kSegments; ++j) {
        item.segments.push_back({memory.at(begin + (i * kSegments + j) * kBytes), kBytes});
      }
      made.push_back(std::move(item));
    }
    return made;
  };
  const std::vector<Item> first = items("first-", 0), second = items("second-", 0);
  EXPECT_EQ(run.put(first), S(kKeys, ItemStatus::kOk));
  const OpId put = run.start_put(second);
  const OpId get = run.start_get(items("first-", 4 << 20));
  EXPECT_EQ(run.finish(put), S(kKeys, ItemStatus::kOk));
  EXPECT_EQ(run.finish(get), S(kKeys, ItemStatus::kOk));
  EXPECT_EQ(store.counters().replacements, 0u);
  EXPECT_EQ(std::memcmp(memory.at(0), memory.at(4 << 20), kKeys * kSegments * kBytes), 0);
}

TEST_F(Mooncake, BadItemsAreRefusedAndTheOthersGo) {
  MooncakeMaster master(site_packages_);
  BlockingStore store(mooncake_client_factory(options(master)));
  const Memory memory(1 << 20);
  const Memory foreign(1 << 16);
  store.add_region(memory.region());
  Operations run(store);
  memory.fill(0, 4096, 1);
  foreign.fill(0, 4096, 2);
  std::vector<Segment> too_many(16385, Segment{memory.at(0), 1});
  EXPECT_EQ(run.put({{"", {{memory.at(0), 16}}},
                     {"none", {}},
                     {"zero", {{memory.at(0), 16}, {memory.at(16), 0}}},
                     {"foreign", {{memory.at(0), 16}, {foreign.at(0), 16}}},
                     {"edge", {{memory.at(memory.size() - 15), 16}}},
                     {"many", too_many},
                     {"good", {{memory.at(0), 16}, {memory.at(64), 32}}}}),
            (S{ItemStatus::kInvalid, ItemStatus::kInvalid, ItemStatus::kInvalid,
               ItemStatus::kInvalid, ItemStatus::kInvalid, ItemStatus::kInvalid, ItemStatus::kOk}));
  EXPECT_EQ(run.exists({"zero", "", "foreign", "good"}),
            (S{ItemStatus::kMissing, ItemStatus::kInvalid, ItemStatus::kMissing, ItemStatus::kOk}));
  EXPECT_EQ(run.get({{"good", {{foreign.at(8192), 48}}}, {"good", {{memory.at(8192), 48}}}}),
            (S{ItemStatus::kInvalid, ItemStatus::kOk}));
  EXPECT_EQ(foreign.at(8192)[0], std::byte{0});
  EXPECT_EQ(std::memcmp(memory.at(8192), memory.at(0), 16), 0);
  EXPECT_EQ(std::memcmp(memory.at(8192 + 16), memory.at(64), 32), 0);
}

TEST_F(Mooncake, AnotherSizeIsAMismatchAndNoReasonToReplaceTheClient) {
  MooncakeMaster master(site_packages_);
  BlockingStore store(mooncake_client_factory(options(master)));
  const Memory memory(1 << 20);
  store.add_region(memory.region());
  Operations run(store);
  memory.fill(0, 1000, 1);
  memory.fill(1000, 1000, 2);
  EXPECT_EQ(run.put({{"k", {{memory.at(0), 1000}}}}), S{ItemStatus::kOk});
  // A second put of the key is accepted and changes nothing (R47).
  EXPECT_TRUE(stored(run.put({{"k", {{memory.at(1000), 500}}}})[0]));
  EXPECT_EQ(run.get({{"k", {{memory.at(4096), 999}}}}), S{ItemStatus::kSizeMismatch});
  EXPECT_EQ(run.get({{"k", {{memory.at(8192), 1001}}}}), S{ItemStatus::kSizeMismatch});
  EXPECT_EQ(run.get({{"absent", {{memory.at(12288), 1000}}}, {"k", {{memory.at(16384), 1000}}}}),
            (S{ItemStatus::kMissing, ItemStatus::kOk}));
  EXPECT_TRUE(memory.holds(16384, 1000, 1));
  EXPECT_EQ(memory.at(8192)[0], std::byte{0});
  EXPECT_EQ(store.counters().replacements, 0u);
  EXPECT_EQ(store.counters().unquiet_calls, 0u);
}

// R50: what does not fit is dropped with its reason, and what is there stays readable.
TEST_F(Mooncake, FullPoolSaysSoPerItem) {
  MooncakeMaster master(site_packages_, {"-eviction_high_watermark_ratio=1.0"});
  BlockingStore store(mooncake_client_factory(options(master, 16 << 20)));
  const Memory memory(1 << 20);
  store.add_region(memory.region());
  Operations run(store);
  memory.fill(0, 1 << 20, 5);
  std::vector<Item> items;
  for (int i = 0; i < 40; ++i)
    items.push_back({"full-" + std::to_string(i), {{memory.at(0), 1 << 20}}});
  const S statuses = run.put(items);
  const auto kept = std::count(statuses.begin(), statuses.end(), ItemStatus::kOk);
  EXPECT_GT(kept, 5);
  EXPECT_LT(kept, 17);
  EXPECT_EQ(std::count(statuses.begin(), statuses.end(), ItemStatus::kNoSpace), 40 - kept);
  EXPECT_EQ(store.counters().replacements, 0u);
}

// As images are made: the wheel's folders and no list of its files. The build-id tells what it is.
TEST_F(Mooncake, ACopyOfTheWheelsFolderIsOfTheSameDistribution) {
  namespace fs = std::filesystem;
  MooncakeMaster master(site_packages_);
  const fs::path original = site_packages_;
  const fs::path prefix = master.folder() / "copied";
  const fs::path copy = prefix / "lib" / "python3" / "site-packages";
  fs::create_directories(copy / "mooncake");
  for (const auto& entry : fs::directory_iterator(original)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("mooncake") && name.ends_with(".libs"))
      fs::create_directory_symlink(entry.path(), copy / name);
  }
  for (const auto& entry : fs::directory_iterator(original / "mooncake")) {
    if (entry.path().filename() != "store.so")
      fs::create_symlink(entry.path(), copy / "mooncake" / entry.path().filename());
  }
  fs::copy_file(original / "mooncake" / "store.so", copy / "mooncake" / "store.so");
  const fs::path environment = original / "../../../pyvenv.cfg";
  if (fs::exists(environment)) fs::copy_file(environment, prefix / "pyvenv.cfg");
  MooncakeOptions wanted = options(master);
  wanted.library = (copy / "mooncake" / "store.so").string();
  // In a process of its own: one can hold one library. It would read a device's address and crash.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto tell = [&] {
    const auto client = mooncake_client_factory(wanted)();
    const StoreCapabilities told = client->capabilities();
    client->tear_down();
    std::fprintf(stderr, "%s, %s", told.name.c_str(), told.device_memory ? "devices" : "host only");
    std::_Exit(0);
  };
  EXPECT_EXIT(tell(), testing::ExitedWithCode(0), "mooncake 0.3.13.post1 tcp, host only");
}

// The scheduler's client: no segment, no buffer, lookups only, beside another client of the
// process.
TEST_F(Mooncake, LookupClientSeesWhatAnotherClientStored) {
  MooncakeMaster master(site_packages_);
  BlockingStore worker(mooncake_client_factory(options(master)));
  BlockingStore scheduler(mooncake_client_factory(options(master, 0)));
  const Memory memory(1 << 16);
  worker.add_region(memory.region());
  Operations puts(worker), looks(scheduler);
  EXPECT_EQ(looks.exists({"a", "b"}), S(2, ItemStatus::kMissing));
  EXPECT_EQ(puts.put({{"a", {{memory.at(0), 4096}}}}), S{ItemStatus::kOk});
  EXPECT_EQ(looks.exists({"a", "b"}), (S{ItemStatus::kOk, ItemStatus::kMissing}));
  EXPECT_EQ(scheduler.close_index(seconds(10)).unquiet, 0u);
  EXPECT_EQ(worker.close_store(seconds(10)).unquiet, 0u);
}

// Objects in a storage process live on when the writer closes (R52).
TEST_F(Mooncake, ObjectsInAStorageProcessOutliveTheirWriter) {
  MooncakeMaster master(site_packages_);
  master.add_storage(kPool);
  const Memory memory(1 << 20);
  memory.fill(0, 100001, 3);
  {
    BlockingStore writer(mooncake_client_factory(options(master, 0)));
    writer.add_region(memory.region());
    EXPECT_EQ(Operations(writer).put({{"k", {{memory.at(0), 100001}}}}), S{ItemStatus::kOk});
  }
  BlockingStore reader(mooncake_client_factory(options(master, 0)));
  reader.add_region(memory.region());
  EXPECT_EQ(Operations(reader).get({{"k", {{memory.at(1 << 19), 100001}}}}), S{ItemStatus::kOk});
  EXPECT_TRUE(memory.holds(1 << 19, 100001, 3));
}

// R51: while the master is away everything ends quickly as a miss; afterwards it works again
// without a restart.
// Address space of this process.
std::uint64_t mapped_bytes() {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

TEST_F(Mooncake, MasterGoesAndComesBack) {
  // So large that a segment which is not given back shows.
  constexpr std::int64_t kSegment = std::int64_t{1} << 30;
  MooncakeMaster master(site_packages_);
  BlockingStoreOptions store_options;
  store_options.max_retry = milliseconds(500);
  BlockingStore store(mooncake_client_factory(options(master, kSegment)), store_options);
  const Memory memory(1 << 20);
  store.add_region(memory.region());
  Operations run(store);
  EXPECT_EQ(run.put({{"before", {{memory.at(0), 4096}}}}), S{ItemStatus::kOk});
  const std::uint64_t mapped = mapped_bytes();
  master.kill();
  // A get that finds no master leaves its client in doubt; a lookup would only have closed the way.
  run.get({{"before", {{memory.at(8192), 4096}}}});
  run.exists({"before"});
  for (int i = 0; i < 20; ++i) {
    const auto began = Clock::now();
    EXPECT_NE(run.exists({"before"}), S{ItemStatus::kOk});
    EXPECT_NE(run.put({{"during", {{memory.at(0), 4096}}}}), S{ItemStatus::kOk});
    EXPECT_LT(Clock::now() - began, std::chrono::milliseconds(500));
  }
  ASSERT_TRUE(master.start());
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    return run.put({{"after", {{memory.at(0), 4096}}}}) == S{ItemStatus::kOk};
  }));
  memory.fill(0, 4096, 9);
  EXPECT_EQ(run.put({{"after2", {{memory.at(0), 4096}}}}), S{ItemStatus::kOk});
  EXPECT_EQ(run.get({{"after2", {{memory.at(16384), 4096}}}}), S{ItemStatus::kOk});
  EXPECT_TRUE(memory.holds(16384, 4096, 9));
  // The memory of the client that is gone has been given back (R51).
  EXPECT_GE(store.counters().replacements, 1u);
  ASSERT_TRUE(within(std::chrono::seconds(60), [&] { return store.counters().retired_now == 0; }));
  EXPECT_LT(mapped_bytes(), mapped + kSegment / 2);
}

// A client that only asks needs no replacement: it asks again when the master is back.
TEST_F(Mooncake, LookupClientRecovers) {
  MooncakeMaster master(site_packages_);
  BlockingStore scheduler(mooncake_client_factory(options(master, 0)));
  Operations looks(scheduler);
  EXPECT_EQ(looks.exists({"a"}), S{ItemStatus::kMissing});
  master.kill();
  looks.exists({"a"});
  for (int i = 0; i < 20; ++i) {
    const auto began = Clock::now();
    EXPECT_EQ(looks.exists({"a", "b"}), S(2, ItemStatus::kUnavailable));
    EXPECT_LT(Clock::now() - began, std::chrono::milliseconds(500));
  }
  ASSERT_TRUE(master.start());
  EXPECT_TRUE(within(std::chrono::seconds(20),
                     [&] { return looks.exists({"a"}) == S{ItemStatus::kMissing}; }));
}

// A master that accepts connections and says nothing must not hold the caller (R54).
TEST_F(Mooncake, SilentMasterIsGivenUpAtSetUp) {
  MooncakeMaster master(site_packages_);
  master.process().signal(SIGSTOP);
  BlockingStoreOptions store_options;
  store_options.setup_timeout = seconds(1);
  const auto began = Clock::now();
  try {
    BlockingStore store(mooncake_client_factory(options(master)), store_options);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimedOut);
  }
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(4));
  master.process().signal(SIGCONT);
}

std::atomic<int> terminations = 0;

// The engine's signal handling stays as it was, although no Python is in this program.
TEST_F(Mooncake, SignalsStayWithTheEngine) {
  MooncakeMaster master(site_packages_);
  struct sigaction action{};
  action.sa_handler = [](int) { ++terminations; };
  struct sigaction before{};
  ASSERT_EQ(::sigaction(SIGTERM, &action, &before), 0);
  sigset_t mask_before;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask_before);

  // Made in this thread, as an embedder may do it.
  const std::unique_ptr<BlockingClient> client = mooncake_client_factory(options(master))();
  sigset_t mask_after;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask_after);
  for (int number = 1; number < NSIG; ++number) {
    EXPECT_EQ(sigismember(&mask_before, number), sigismember(&mask_after, number)) << number;
  }
  ::kill(::getpid(), SIGTERM);
  EXPECT_TRUE(within(std::chrono::seconds(5), [] { return terminations == 1; }));
  struct sigaction present{};
  ::sigaction(SIGTERM, nullptr, &present);
  EXPECT_EQ(present.sa_handler, action.sa_handler);
  client->tear_down();
  ::sigaction(SIGTERM, &before, nullptr);
}

TEST_F(Mooncake, OneLibraryAndOneEnvironmentPerProcess) {
  MooncakeMaster master(site_packages_);
  const auto client = mooncake_client_factory(options(master))();
  MooncakeOptions other = options(master);
  other.environment = {{"MC_STORE_MEMCPY", "1"}};
  try {
    mooncake_client_factory(other)();
    ADD_FAILURE() << "another environment was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(error.problems()[0].path, "environment.MC_STORE_MEMCPY");
  }
  const std::filesystem::path copy = master.folder() / "mooncake" / "store.so";
  std::filesystem::create_directory(copy.parent_path());
  std::filesystem::copy_file(site_packages_ + "/mooncake/store.so", copy);
  other = options(master);
  other.library = copy.string();
  try {
    mooncake_client_factory(other)();
    ADD_FAILURE() << "another library was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
  // Protocol rdma is refused as well: Mooncake was told to use TCP alone.
  other = options(master);
  other.protocol = "rdma";
  std::filesystem::create_directories(master.folder() / "devices" / "mlx5_0");
  other.rdma_device_folder = (master.folder() / "devices").string();
  EXPECT_THROW(mooncake_client_factory(other)(), Error);
  client->tear_down();
}

// R71 with the real library: the parent's memory stays registered and its transfers right.
TEST_F(Mooncake, ForkedChildIsRefusedAndHarmless) {
  MooncakeMaster master(site_packages_);
  auto store = std::make_unique<BlockingStore>(mooncake_client_factory(options(master)));
  const Memory memory(4 << 20);
  store->add_region(memory.region());
  Operations run(*store);
  memory.fill(0, 1 << 20, 4);
  EXPECT_EQ(run.put({{"k", {{memory.at(0), 1 << 20}}}}), S{ItemStatus::kOk});
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    auto batch = batch_of({{"c", {{memory.at(0), 16}}}});
    const bool refused = !store->start_put(OpId{99}, batch, {0}, {1'000'000'000});
    store.reset();
    std::string told;
    try {
      mooncake_client_factory(options(master))();
    } catch (const Error& error) {
      told = error.what();
    }
    const std::string expected =
        "expected one that was not forked after Mooncake was used (by "
        "process " +
        std::to_string(::getppid()) + ")";
    ::_exit(!refused ? 1 : told.find(expected) == std::string::npos ? 2 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(run.get({{"k", {{memory.at(2 << 20), 1 << 20}}}}), S{ItemStatus::kOk});
  EXPECT_TRUE(memory.holds(2 << 20, 1 << 20, 4));
}

}  // namespace
}  // namespace kvprism::test

int main(int argc, char** argv) {
  kvprism::test::enter_private_network();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
