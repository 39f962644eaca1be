// Pure parts of the Mooncake backend: result codes, option checks, pre-flight, file facts.
#include <elf.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/mooncake_native.h"
#include "backend/mooncake_status.h"
#include "backend/preflight.h"
#include "backend/region_table.h"
#include "backend/registration.h"
#include "backend/retry_pause.h"
#include "kvprism/backend/mooncake_client.h"
#include "mooncake/elf.h"
#include "mooncake/finder.h"
#include "mooncake/library.h"
#include "mooncake/probe.h"
#include "run/rate_limit.h"

namespace kvprism {
namespace {

namespace fs = std::filesystem;
using detail::MooncakeCall;
using std::chrono::milliseconds;
using std::chrono::seconds;

// A folder that goes with the test.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "kvprism-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }
  void write(const fs::path& name, const std::string& text) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
  }

 private:
  fs::path path_;
};

MooncakeOptions good_options() {
  MooncakeOptions options;
  options.master = "127.0.0.1:50051";
  return options;
}

const Problem* find_problem(const std::vector<Problem>& problems, const std::string& path) {
  const auto at = std::find_if(problems.begin(), problems.end(),
                               [&](const Problem& problem) { return problem.path == path; });
  return at == problems.end() ? nullptr : &*at;
}

TEST(RateLimit, LetsOneLineThroughInAnIntervalAndCountsTheRest) {
  RateLimit limit(kvprism::seconds(10));
  EXPECT_EQ(limit.pass(Instant{5}), 0u);
  EXPECT_EQ(limit.pass(Instant{5} + kvprism::seconds(9)), std::nullopt);
  EXPECT_EQ(limit.pass(Instant{5} + kvprism::seconds(9)), std::nullopt);
  EXPECT_EQ(limit.pass(Instant{5} + kvprism::seconds(10)), 2u);
  EXPECT_EQ(limit.pass(Instant{5} + kvprism::seconds(19)), std::nullopt);
  EXPECT_EQ(limit.pass(Instant{5} + kvprism::seconds(30)), 1u);
  EXPECT_EQ(with_held_back("full", 0), "full");
  EXPECT_EQ(with_held_back("full", 2), "full (and 2 more since the last line)");
}

TEST(MooncakeStatus, ExistsTellsMissingFromUnfinishedAndUnknown) {
  const auto status = [](int code) {
    return detail::mooncake_item(MooncakeCall::kExists, code, 0).status;
  };
  EXPECT_EQ(status(1), ItemStatus::kOk);
  EXPECT_EQ(status(0), ItemStatus::kMissing);
  for (const int code : {-703, -714}) EXPECT_EQ(status(code), ItemStatus::kNotReady) << code;
  for (const int code : {-704, -710, -712}) EXPECT_EQ(status(code), ItemStatus::kMissing) << code;
  for (const int code : {-601, -900}) EXPECT_EQ(status(code), ItemStatus::kUnavailable) << code;
  EXPECT_EQ(status(-901), ItemStatus::kTimedOut);
  EXPECT_EQ(status(-1), ItemStatus::kFailed);
}

TEST(MooncakeStatus, GetComparesBytes) {
  const auto item = [](int code) { return detail::mooncake_item(MooncakeCall::kGet, code, 100); };
  EXPECT_EQ(item(100), (ItemResult{ItemStatus::kOk, 100}));
  EXPECT_EQ(item(99).status, ItemStatus::kSizeMismatch);
  EXPECT_EQ(item(0).status, ItemStatus::kSizeMismatch);
  EXPECT_EQ(item(-600).status, ItemStatus::kSizeMismatch);
  EXPECT_EQ(item(-10).status, ItemStatus::kSizeMismatch);
  EXPECT_EQ(item(-707).status, ItemStatus::kLeaseLost);
  EXPECT_EQ(item(-801).status, ItemStatus::kChecksumMismatch);
  EXPECT_EQ(item(-800).status, ItemStatus::kFailed);
  EXPECT_EQ(item(-703).status, ItemStatus::kNotReady);
  EXPECT_EQ(item(-704).status, ItemStatus::kMissing);
  EXPECT_EQ(item(-123456).status, ItemStatus::kFailed);
}

TEST(MooncakeStatus, PutKeepsFullAndDuplicateApart) {
  const auto status = [](int code) {
    return detail::mooncake_item(MooncakeCall::kPut, code, 100).status;
  };
  EXPECT_EQ(status(0), ItemStatus::kOk);
  EXPECT_EQ(status(-705), ItemStatus::kDuplicate);
  EXPECT_EQ(status(-200), ItemStatus::kNoSpace);
  EXPECT_EQ(status(-1700), ItemStatus::kNoSpace);
  EXPECT_EQ(status(-600), ItemStatus::kFailed);
  EXPECT_EQ(status(-400), ItemStatus::kInvalid);
}

TEST(MooncakeStatus, OnlyCertainAnswersAreQuiet) {
  const auto doubtful = [](int code, auto took) {
    return detail::mooncake_may_have_given_up(code, took);
  };
  for (const int code : {-800, -900, -901}) EXPECT_TRUE(doubtful(code, milliseconds(1))) << code;
  for (const int code : {0, 100}) EXPECT_FALSE(doubtful(code, seconds(90))) << code;
  for (const int code : {-1, -200, -600, -703, -704, -707}) {
    EXPECT_FALSE(doubtful(code, milliseconds(1))) << code;
    EXPECT_TRUE(doubtful(code, seconds(60))) << code;
  }
  EXPECT_TRUE(detail::mooncake_client_is_lost(-601));
  EXPECT_FALSE(detail::mooncake_client_is_lost(-900));
}

TEST(MooncakeOptions, GoodOnesHaveNoProblem) {
  EXPECT_TRUE(validate_mooncake_options(good_options()).empty());
  MooncakeOptions options = good_options();
  options.master = "[::1]:50051";
  options.local_hostname = "host.example";
  options.global_segment_size = 16 << 20;
  options.protocol = "rdma";
  options.rdma_devices = {"mlx5_0", "mlx5_1"};
  options.metadata_server = "http://127.0.0.1:8080/metadata";
  EXPECT_TRUE(validate_mooncake_options(options).empty());
}

TEST(MooncakeOptions, AllProblemsAtOnce) {
  MooncakeOptions options;
  options.master = "host";
  options.local_hostname = "a:b:c";
  options.metadata_server = "10.0.0.1:2379";
  options.protocol = "rmda";
  options.rdma_devices = {"mlx5_0", "mlx5_0", "", "a b"};
  options.global_segment_size = -1;
  options.local_buffer_size = 4096;
  options.max_slices_per_call = 0;
  options.connect_timeout = {0};
  const std::vector<Problem> problems = validate_mooncake_options(options);
  for (const char* path :
       {"master", "local_hostname", "metadata_server", "protocol", "rdma_devices[1]",
        "rdma_devices[2]", "rdma_devices[3]", "global_segment_size", "local_buffer_size",
        "max_slices_per_call", "connect_timeout"}) {
    EXPECT_NE(find_problem(problems, path), nullptr) << path;
  }
  EXPECT_EQ(problems.size(), 11u);
  EXPECT_NE(find_problem(problems, "protocol")->hint.find("rdma"), std::string::npos);
  EXPECT_THROW(mooncake_client_factory(options), Error);
}

TEST(MooncakeOptions, PortsAndSizesAtTheirBounds) {
  MooncakeOptions options = good_options();
  for (const char* master : {"h:0", "h:65536", "h:", ":1", "", "[::1", "::1"}) {
    options.master = master;
    EXPECT_EQ(validate_mooncake_options(options).size(), 1u) << master;
  }
  options = good_options();
  for (const std::int64_t size : {std::int64_t{1}, std::int64_t{(16 << 20) - 1}}) {
    options.global_segment_size = size;
    EXPECT_EQ(validate_mooncake_options(options).size(), 1u) << size;
  }
  options = good_options();
  options.connect_timeout = kvprism::seconds(1'000'000);
  EXPECT_TRUE(validate_mooncake_options(options).empty());
  options.connect_timeout = {INT64_MAX};
  EXPECT_NE(find_problem(validate_mooncake_options(options), "connect_timeout"), nullptr);
  options = good_options();
  options.rdma_devices = {"mlx5_0"};
  EXPECT_NE(find_problem(validate_mooncake_options(options), "rdma_devices"), nullptr);
}

// A port of this machine that nobody else has.
class LoopbackPort {
 public:
  LoopbackPort() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    socklen_t size = sizeof(address);
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    number_ = ntohs(address.sin_port);
  }
  ~LoopbackPort() {
    ::close(socket_);
    for (const int waiting : waiting_) ::close(waiting);
  }
  LoopbackPort(const LoopbackPort&) = delete;
  LoopbackPort& operator=(const LoopbackPort&) = delete;

  void listen() const { ASSERT_EQ(::listen(socket_, 8), 0); }
  // Accepts nobody, and answers nobody once a few wait.
  void fall_silent() {
    ASSERT_EQ(::listen(socket_, 0), 0);
    sockaddr_in address{};
    socklen_t size = sizeof(address);
    ASSERT_EQ(::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    for (int& waiting : waiting_) {
      waiting = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
      ::connect(waiting, reinterpret_cast<sockaddr*>(&address), size);
    }
  }
  std::uint16_t number() const { return number_; }

 private:
  int socket_;
  std::array<int, 4> waiting_{-1, -1, -1, -1};
  std::uint16_t number_ = 0;
};

// A resolver that answers when the gate opens, with this machine.
struct SlowResolver {
  std::promise<void> gate;
  std::shared_future<void> open = gate.get_future().share();
  std::shared_ptr<std::atomic<int>> lookups = std::make_shared<std::atomic<int>>(0);

  detail::Knock::LookUp look_up() const {
    return [open = open, lookups = lookups](const char*, const char* port, const addrinfo* hints,
                                            addrinfo** found) {
      ++*lookups;
      open.wait();
      return ::getaddrinfo("127.0.0.1", port, hints, found);
    };
  }
};

TEST(Preflight, ConnectsWithinItsLimit) {
  const LoopbackPort port;
  const HostPort target{"127.0.0.1", port.number()};
  EXPECT_NE(detail::Knock(target).failure(kvprism::seconds(2)), "");
  port.listen();
  EXPECT_EQ(detail::Knock(target).failure(kvprism::seconds(2)), "");
  EXPECT_EQ(detail::Knock(target).failure(Duration{1}), "") << "a millisecond is the least";
  const auto began = std::chrono::steady_clock::now();
  EXPECT_NE(detail::Knock({"no-such-host.invalid", 1}).failure(kvprism::milliseconds(300)), "");
  EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(10));
}

TEST(RetryPause, DoublesAndVariesOtherwiseInEveryStore) {
  const auto pauses = [](std::uint64_t seed) {
    detail::RetryPause pause(kvprism::milliseconds(100), kvprism::milliseconds(800), seed);
    std::vector<std::chrono::nanoseconds> all;
    for (std::uint32_t failures = 0; failures < 8; ++failures) all.push_back(pause.after(failures));
    return all;
  };
  const int around[] = {100, 100, 200, 400, 800, 800, 800, 800};
  const int here = 0;
  const int there = 0;
  const auto first = pauses(detail::seed_for(&here));
  const auto second = pauses(detail::seed_for(&there));
  for (std::size_t i = 0; i < first.size(); ++i) {
    const std::chrono::nanoseconds middle = milliseconds(around[i]);
    EXPECT_GE(first[i], middle * 7 / 8) << i;
    EXPECT_LE(first[i], middle * 9 / 8) << i;
  }
  EXPECT_NE(first, second);
}

// As a container's file sets what it has no value for.
TEST(Finder, AVariableWithoutAValueIsNotSet) {
  const Folder folder;
  const fs::path before = fs::current_path();
  fs::create_directories(folder.path() / "lib" / "python3.11" / "site-packages");
  fs::current_path(folder.path());
  ::setenv("VIRTUAL_ENV", "", 1);
  for (const std::string& found : mooncake::default_site_packages())
    EXPECT_TRUE(fs::path(found).is_absolute()) << found;
  ::unsetenv("VIRTUAL_ENV");
  fs::current_path(before);
  const std::string probe = mooncake::find_probe();
  ::setenv("KVPRISM_MOONCAKE_PROBE", "", 1);
  EXPECT_EQ(mooncake::find_probe(), probe);
  ::unsetenv("KVPRISM_MOONCAKE_PROBE");
}

// The address of a master that has moved, perhaps: packets to it are dropped.
TEST(Preflight, ASilentAddressLeavesTimeForTheNext) {
  LoopbackPort silent;
  silent.fall_silent();
  const LoopbackPort port;
  port.listen();
  const auto look_up = [&](const char*, const char* of_master, const addrinfo* hints,
                           addrinfo** found) {
    const std::string first = std::to_string(silent.number());
    const int error = ::getaddrinfo("127.0.0.1", first.c_str(), hints, found);
    return error != 0 ? error : ::getaddrinfo("127.0.0.1", of_master, hints, &(*found)->ai_next);
  };
  EXPECT_EQ(detail::Knock({"127.0.0.1", silent.number()}).failure(kvprism::milliseconds(300)),
            "no answer in time");
  EXPECT_EQ(detail::Knock({"master.test", port.number()}, look_up).failure(kvprism::seconds(2)),
            "");
}

// A resolver slower than a question must not keep a client away for good, nor cost a thread each.
TEST(Preflight, ALateAnswerOfTheResolverServesTheNextQuestion) {
  const LoopbackPort port;
  port.listen();
  SlowResolver resolver;
  detail::Knock knock({"master.test", port.number()}, resolver.look_up());
  for (int question = 0; question < 3; ++question)
    EXPECT_EQ(knock.failure(kvprism::milliseconds(1)), "the name did not resolve in time");
  EXPECT_LE(*resolver.lookups, 1);
  resolver.gate.set_value();
  const auto end = std::chrono::steady_clock::now() + seconds(10);
  while (!knock.failure(kvprism::milliseconds(200)).empty())
    ASSERT_LT(std::chrono::steady_clock::now(), end);
  EXPECT_EQ(knock.failure(kvprism::seconds(10)), "");
  EXPECT_GE(*resolver.lookups, 2) << "each answer serves once: addresses change";
}

// The same of attempts to make a client: each has connect_timeout.
TEST(Preflight, ALateAnswerOfTheResolverServesTheNextClient) {
  const LoopbackPort port;
  port.listen();
  SlowResolver resolver;
  MooncakeOptions options = good_options();
  options.master = "master.test:" + std::to_string(port.number());
  options.connect_timeout = kvprism::milliseconds(50);
  options.library = "/nonexistent/store.so";  // looked for once the master has answered
  const BlockingClientFactory make = detail::mooncake_client_factory(options, resolver.look_up());
  const auto reason = [&]() -> std::string {
    try {
      make();
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  for (int attempt = 0; attempt < 3; ++attempt)
    EXPECT_NE(reason().find("the name did not resolve in time"), std::string::npos);
  EXPECT_LE(*resolver.lookups, 1) << "a thread for each attempt";
  resolver.gate.set_value();
  const auto end = std::chrono::steady_clock::now() + seconds(10);
  while (reason().find("/nonexistent/store.so") == std::string::npos)
    ASSERT_LT(std::chrono::steady_clock::now(), end);
}

TEST(Preflight, RdmaDevicesAreNamed) {
  const Folder folder;
  EXPECT_TRUE(detail::list_rdma_devices((folder.path() / "none").string()).empty());
  auto problems = detail::check_rdma_devices({}, {}, "/sys/x");
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].expected.find("/sys/x"), std::string::npos);
  fs::create_directory(folder.path() / "mlx5_1");
  fs::create_directory(folder.path() / "mlx5_0");
  const auto present = detail::list_rdma_devices(folder.path().string());
  EXPECT_EQ(present, (std::vector<std::string>{"mlx5_0", "mlx5_1"}));
  EXPECT_TRUE(detail::check_rdma_devices({"mlx5_1"}, present, "f").empty());
  problems = detail::check_rdma_devices({"mlx5_0", "mlx5_99"}, present, "f");
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].path, "rdma_devices[1]");
  EXPECT_NE(problems[0].expected.find("mlx5_0, mlx5_1"), std::string::npos);
}

TEST(Preflight, AnRdmaDeviceNeedsAnActivePortWithAnAddress) {
  const Folder folder;
  const auto port = [&](const std::string& device, const std::string& state,
                        const std::string& gid) {
    const fs::path of = fs::path(device) / "ports" / "1";
    folder.write(of / "state", state + "\n");
    folder.write(of / "gids" / "0", "0000:0000:0000:0000:0000:0000:0000:0000\n");
    folder.write(of / "gids" / "1", gid + "\n");
  };
  const std::string free = "0000:0000:0000:0000:0000:0000:0000:0000";
  port("mlx5_0", "4: ACTIVE", "fe80:0000:0000:0000:b83f:d2ff:fe12:3456");
  port("mlx5_1", "1: DOWN", "fe80:0000:0000:0000:b83f:d2ff:fe12:3457");
  port("mlx5_2", "4: ACTIVE", free);
  fs::create_directory(folder.path() / "mlx5_3");  // tells of no port
  const std::string path = folder.path().string();
  const std::vector<std::string> all{"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"};
  const std::vector<RdmaPort> ports =
      detail::list_rdma_ports(path, detail::list_rdma_devices(path));
  ASSERT_EQ(ports.size(), 3u);
  EXPECT_TRUE(detail::check_rdma_ports({}, ports).empty()) << "one of them does";
  EXPECT_TRUE(detail::check_rdma_ports({"mlx5_0", "mlx5_3"}, ports).empty());
  std::vector<Problem> problems = detail::check_rdma_ports(all, ports);
  ASSERT_EQ(problems.size(), 2u);
  EXPECT_EQ(problems[0].path, "rdma_devices[1]");
  EXPECT_EQ(problems[0].value, "mlx5_1 port 1 is DOWN");
  EXPECT_EQ(problems[1].path, "rdma_devices[2]");
  EXPECT_EQ(problems[1].value, "mlx5_2 port 1 is ACTIVE without an address (GID)");
  problems = detail::check_rdma_ports({}, detail::list_rdma_ports(path, {"mlx5_1", "mlx5_2"}));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].path, "protocol");
  EXPECT_EQ(problems[0].value,
            "mlx5_1 port 1 is DOWN, mlx5_2 port 1 is ACTIVE without an address (GID)");
}

TEST(Preflight, AllThatIsRegisteredIsCountedForEveryDevice) {
  constexpr std::uint64_t kMiB = 1 << 20;
  const Folder folder;
  for (const char* device : {"mlx5_0", "mlx5_1"}) fs::create_directory(folder.path() / device);
  MooncakeOptions options = good_options();
  options.protocol = "rdma";
  options.rdma_device_folder = folder.path().string();
  options.global_segment_size = 32 * kMiB;
  options.local_buffer_size = 16 * kMiB;
  const detail::MemoryLock lock{100 * kMiB, false};
  EXPECT_TRUE(detail::check_locked_memory(options, {}, lock).empty());
  const std::uint64_t regions[] = {kMiB, 2 * kMiB};
  const auto problems = detail::check_locked_memory(options, regions, lock);
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].expected,
            "at least 53477376 bytes, which RDMA must lock for each of 2 devices");
  options.rdma_devices = {"mlx5_1"};
  EXPECT_TRUE(detail::check_locked_memory(options, regions, lock).empty());
}

TEST(Preflight, RdmaWithoutDevicesIsRefusedBeforeAnythingIsOpened) {
  const Folder folder;
  MooncakeOptions options = good_options();
  options.protocol = "rdma";
  options.rdma_device_folder = folder.path().string();
  options.library = "/nonexistent";
  try {
    mooncake_client_factory(options)();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_NE(std::string(error.what()).find(folder.path().string()), std::string::npos);
  }
}

TEST(Preflight, MemoryLockSaysNumbersAndCure) {
  const auto check = [](std::uint64_t limit, std::vector<std::uint64_t> lengths, bool privileged,
                        std::uint32_t devices) {
    return detail::check_registration(lengths, {limit, privileged, devices});
  };
  constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();
  EXPECT_TRUE(check(65536, {65536}, false, 1).empty());
  EXPECT_TRUE(check(65536, {32768, 32768}, false, 1).empty());
  EXPECT_TRUE(check(65536, {1 << 30}, true, 1).empty());
  EXPECT_TRUE(check(kUnlimited, {1 << 30}, false, 8).empty());
  const auto problems = check(65536, {1 << 29, 1 << 29}, false, 1);
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].path, "memory lock limit");
  EXPECT_EQ(problems[0].value, "65536 bytes");
  EXPECT_EQ(problems[0].expected, "at least 1073741824 bytes, which RDMA must lock");
  EXPECT_NE(problems[0].hint.find("ulimit -l"), std::string::npos);
  // Each device locks the same pages once more.
  EXPECT_TRUE(check(4 << 20, {1 << 20}, false, 4).empty());
  ASSERT_EQ(check(4 << 20, {(1 << 20) + 1}, false, 4).size(), 1u);
  EXPECT_EQ(check(4 << 20, {(1 << 20) + 1}, false, 4)[0].expected,
            "at least 1048577 bytes, which RDMA must lock for each of 4 devices");
}

TEST(Registration, PiecesCoverARegionAndNoPartOfASegmentCrossesThem) {
  std::array<std::byte, 4096> memory;
  const Region region{memory.data(), 1000, 3};
  EXPECT_EQ(detail::effective_region_bytes("rdma", 0), std::uint64_t{2} << 30);
  EXPECT_EQ(detail::effective_region_bytes("rdma", 400), 400u);
  EXPECT_EQ(detail::effective_region_bytes("tcp", 0), 0u) << "whole";
  EXPECT_EQ(detail::cut_region(region, 0), std::vector<Region>{region});
  EXPECT_EQ(detail::cut_region(region, 1000), std::vector<Region>{region});
  EXPECT_EQ(detail::cut_region(region, 400), (std::vector<Region>{{memory.data(), 400, 3},
                                                                  {memory.data() + 400, 400, 3},
                                                                  {memory.data() + 800, 200, 3}}));
  for (std::uint64_t most = 1; most <= 48; ++most) {
    for (std::uint64_t offset = 0; offset < 60; ++offset) {
      for (std::uint64_t length = 1; length <= 60; length += 7) {
        std::vector<Segment> parts;
        detail::append_cut(region, most, {memory.data() + offset, length}, parts);
        std::uint64_t at = offset;
        for (const Segment& part : parts) {
          ASSERT_EQ(part.base, memory.data() + at) << "in order, without a gap";
          ASSERT_GT(part.length, 0u);
          ASSERT_EQ(at / most, (at + part.length - 1) / most) << "in one piece";
          at += part.length;
        }
        ASSERT_EQ(at, offset + length);
        ASSERT_EQ(parts.size(), (offset + length - 1) / most - offset / most + 1)
            << "no more parts";
      }
    }
  }
  std::vector<Segment> whole;
  detail::append_cut(region, 0, {memory.data() + 1, 999}, whole);
  EXPECT_EQ(whole, (std::vector<Segment>{{memory.data() + 1, 999}}));
}

TEST(Preflight, UnreachableMasterIsNamed) {
  MooncakeOptions options = good_options();
  options.master = "127.0.0.1:1";
  const auto began = std::chrono::steady_clock::now();
  try {
    mooncake_client_factory(options)();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_NE(std::string(error.what()).find("127.0.0.1:1"), std::string::npos);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(10));
}

TEST(RegionTable, FindsOverlapsAndCoverage) {
  std::array<std::byte, 4096> memory;
  std::byte* const base = memory.data();
  detail::RegionTable table;
  table.insert({base + 1024, 1024, -1});
  table.insert({base + 2048, 512, -1});
  using Fit = detail::RegionTable::Fit;
  EXPECT_EQ(table.fit({base + 1024, 1024, -1}), Fit::kEqual);
  EXPECT_EQ(table.fit({base + 1024, 1023, -1}), Fit::kOverlap);
  EXPECT_EQ(table.fit({base, 1024, -1}), Fit::kNew);
  EXPECT_EQ(table.fit({base, 1025, -1}), Fit::kOverlap);
  EXPECT_EQ(table.fit({base + 2559, 1, -1}), Fit::kOverlap);
  EXPECT_EQ(table.fit({base + 2560, 1, -1}), Fit::kNew);
  EXPECT_TRUE(table.covers({base + 1024, 1024}));
  EXPECT_TRUE(table.covers({base + 2047, 1}));
  EXPECT_FALSE(table.covers({base + 1023, 1}));
  EXPECT_FALSE(table.covers({base + 2560, 1}));
  // Regions that touch are registered apart, so no segment may span them.
  EXPECT_FALSE(table.covers({base + 2047, 2}));
  EXPECT_FALSE(table.covers({base + 1024, std::numeric_limits<std::size_t>::max()}));
  EXPECT_FALSE(table.covers({nullptr, 1}));
  EXPECT_TRUE(table.erase({base + 2048, 512, -1}));
  EXPECT_FALSE(table.erase({base + 2048, 512, -1}));
}

TEST(LibraryFile, HashesAreThoseOfTheStandard) {
  const Folder folder;
  folder.write("empty", "");
  folder.write("abc", "abc");
  folder.write("long", std::string(1'000'000, 'a'));
  EXPECT_EQ(mooncake::hash_file((folder.path() / "empty").string()),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(mooncake::hash_file((folder.path() / "abc").string()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(mooncake::hash_file((folder.path() / "long").string()),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(mooncake::hash_file((folder.path() / "none").string()), "");
}

TEST(LibraryFile, BuildIdOfWhatIsNoLibraryIsEmpty) {
  const Folder folder;
  folder.write("text", "no library");
  folder.write("short",
               "\x7f"
               "ELF\x02");
  EXPECT_EQ(mooncake::read_build_id((folder.path() / "text").string()), "");
  EXPECT_EQ(mooncake::read_build_id((folder.path() / "short").string()), "");
  EXPECT_EQ(mooncake::read_build_id((folder.path() / "none").string()), "");
}

// What is read of a library: an ELF file of one note.
std::string library_with(std::string_view build_id) {
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_ident[EI_DATA] = ELFDATA2LSB;
  header.e_phoff = sizeof(header);
  header.e_phentsize = sizeof(Elf64_Phdr);
  header.e_phnum = 1;
  const Elf64_Nhdr note{4, static_cast<Elf64_Word>(build_id.size() / 2), NT_GNU_BUILD_ID};
  Elf64_Phdr notes{};
  notes.p_type = PT_NOTE;
  notes.p_offset = sizeof(header) + sizeof(notes);
  notes.p_filesz = sizeof(note) + 4 + note.n_descsz;
  std::string text;
  const auto append = [&](const auto& part) {
    text.append(reinterpret_cast<const char*>(&part), sizeof(part));
  };
  append(header);
  append(notes);
  append(note);
  text.append("GNU", 4);
  for (std::size_t i = 0; i < build_id.size(); i += 2)
    text += static_cast<char>(std::stoi(std::string(build_id.substr(i, 2)), nullptr, 16));
  return text;
}

// An installed distribution as pip leaves it, around a library that is none.
void install(const Folder& folder, const std::string& version, const std::string& library,
             const std::string& name = "mooncake-transfer-engine-test") {
  std::string stem = name;
  std::replace(stem.begin(), stem.end(), '-', '_');
  const std::string info = stem + "-" + version + ".dist-info";
  folder.write(info + "/METADATA", "Metadata-Version: 2.1\nName: " + name +
                                       "\nVersion: " + version + "\n\nName: not this one\n");
  folder.write(info + "/WHEEL", "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_28_x86_64\n");
  folder.write(info + "/RECORD",
               "mooncake/__init__.py,sha256=x,1\nmooncake/engine.so,sha256=x,1\n" + library +
                   ",sha256=x,1\n");
  folder.write(library, "no library");
}

TEST(Finder, ReadsTheFileListWhateverTheNameOfTheLibrary) {
  for (const std::string library :
       {"mooncake/store.so", "mooncake/_store.cpython-311-x86_64-linux-gnu.so"}) {
    const Folder folder;
    install(folder, "9.9", library);
    const auto found = mooncake::list_site_packages(folder.path().string());
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].distribution, "mooncake-transfer-engine-test");
    EXPECT_EQ(found[0].version, "9.9");
    EXPECT_EQ(found[0].python_tag, "cp311");
    EXPECT_TRUE(found[0].path.ends_with(library));
    EXPECT_EQ(mooncake::describe_file((folder.path() / library).string()).version, "9.9");
    MooncakeOptions options = good_options();
    options.site_packages = {"/nonexistent", folder.path().string()};
    EXPECT_EQ(find_mooncake_library(options), found[0].path);
  }
}

// pip lets two distributions bring the same file; the one that came last has written it. A folder's
// entries have any order, so each is the right one once.
TEST(Finder, OfTwoDistributionsThatListAFileTheOneThatItIsOfIsNamed) {
  for (const MooncakeAbiRow& row : known_mooncake_builds()) {
    for (const MooncakeAbiRow& other : known_mooncake_builds()) {
      if (row.distribution == other.distribution) continue;
      const Folder folder;
      for (const MooncakeAbiRow* each : {&row, &other}) {
        install(folder, std::string(each->version), "mooncake/store.so",
                std::string(each->distribution));
      }
      folder.write("mooncake/store.so", library_with(row.build_id));
      const std::string path = (folder.path() / "mooncake/store.so").string();
      const mooncake::LibraryFile file = mooncake::describe_file(path);
      EXPECT_EQ(file.build_id, row.build_id);
      EXPECT_EQ(file.distribution, row.distribution);
      EXPECT_EQ(file.version, row.version);
      EXPECT_EQ(mooncake::find_row(file), &row);
      // Of an unknown file the answer is at least always the same.
      folder.write("mooncake/store.so", library_with(std::string(40, '0')));
      EXPECT_EQ(mooncake::describe_file(path).distribution,
                std::min(row.distribution, other.distribution));
    }
  }
}

TEST(Finder, SaysWhereItLooked) {
  const Folder folder;
  MooncakeOptions options = good_options();
  options.site_packages = {folder.path().string()};
  try {
    find_mooncake_library(options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_NE(std::string(error.what()).find(folder.path().string()), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("pip install"), std::string::npos);
  }
}

TEST(Library, UnknownBuildIsRefusedWithTheKnownOnesAndTheWayToOptIn) {
  const Folder folder;
  install(folder, "9.9", "mooncake/store.so");
  try {
    mooncake::open_library({.path = (folder.path() / "mooncake/store.so").string(),
                            .python_library = {},
                            .accept_unknown = {},
                            .defaults = {},
                            .environment = {}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    const std::string text = error.what();
    for (const char* part : {"9.9", "mooncake-transfer-engine-test", "0.3.13.post1",
                             "kvprism-mooncake-probe", "unknown_build"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
    }
  }
}

TEST(Library, RowsAreUniqueAndComplete) {
  const auto rows = known_mooncake_builds();
  ASSERT_FALSE(rows.empty());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].build_id.size(), 40u);
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(rows[i].build_id, rows[j].build_id);
  }
  const MooncakeAbiRow& row = rows[0];
  EXPECT_EQ(mooncake::find_row({"p", "", "", "", std::string(row.build_id)}), &row);
  EXPECT_EQ(mooncake::find_row(
                {"p", std::string(row.distribution), "0.0", "", std::string(row.build_id)}),
            nullptr);
  EXPECT_EQ(
      mooncake::find_row({"p", std::string(row.distribution), std::string(row.version), "", ""}),
      nullptr);
}

TEST(Probe, VerdictsAreCachedByHash) {
  const Folder folder;
  ::setenv("XDG_CACHE_HOME", folder.path().c_str(), 1);
  EXPECT_EQ(mooncake::read_verdict("00ff"), "");
  const std::string line =
      "{\"verdict\": \"crash\", \"detail\": " + mooncake::json_quote("a \"b\"\n\x01\\") + "}";
  EXPECT_TRUE(mooncake::write_verdict("00ff", line));
  EXPECT_EQ(mooncake::read_verdict("00ff"), line);
  EXPECT_EQ(mooncake::verdict_word(line), "crash");
  EXPECT_EQ(mooncake::verdict_word("{}"), "");
  EXPECT_EQ(line.find('\n'), std::string::npos);
  ::unsetenv("XDG_CACHE_HOME");
}

TEST(MooncakeQueue, OnlyWhatCanBeReliedOnIsUsed) {
  const MooncakeAbiRow tried{"d", "0.3.13.post1", "cp311", "store.so", "ab", true};
  const MooncakeAbiRow other{"d", "0.3.14", "cp311", "store.so", "cd", false};
  EXPECT_EQ(mooncake::tcp_queue_of(&tried, false, nullptr), 1024U);
  EXPECT_EQ(mooncake::tcp_queue_of(&tried, false, "16384"), 16384U);
  EXPECT_EQ(mooncake::tcp_queue_of(&tried, false, "300"), 300U);
  EXPECT_EQ(mooncake::tcp_queue_of(&tried, true, "16384"), 1024U) << "it may be open with less";
  EXPECT_EQ(mooncake::tcp_queue_of(&tried, true, "300"), 300U);
  EXPECT_EQ(mooncake::tcp_queue_of(&other, false, "16384"), 1024U) << "it may not know the name";
  EXPECT_EQ(mooncake::tcp_queue_of(nullptr, false, "300"), 300U);
  for (const char* refused : {"0", "65536", "many", "12x", "", "-1"}) {
    EXPECT_EQ(mooncake::tcp_queue_of(&tried, false, refused), 1024U) << refused;
  }
}

}  // namespace
}  // namespace kvprism
