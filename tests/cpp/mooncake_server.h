// Real Mooncake processes for tests: started here, ended here, on loopback only.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kvprism::test {

// Mooncake listens on all addresses whatever it is told, so tests run in a network of their own
// where they may.
inline bool enter_private_network() {
  if (::unshare(CLONE_NEWNET) != 0) return false;
  const int socket = ::socket(AF_INET, SOCK_DGRAM, 0);
  ifreq request{};
  std::strncpy(request.ifr_name, "lo", IFNAMSIZ - 1);
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  const bool up = ::ioctl(socket, SIOCSIFFLAGS, &request) == 0;
  ::close(socket);
  return up;
}

// Site-packages of the test installation: KVPRISM_TEST_MOONCAKE_DIR, or the .venv of this folder or
// one above it.
inline std::string mooncake_site_packages() {
  namespace fs = std::filesystem;
  if (const char* folder = std::getenv("KVPRISM_TEST_MOONCAKE_DIR")) return folder;
  std::error_code error;
  for (fs::path at = fs::current_path(); !at.empty() && at != at.root_path();
       at = at.parent_path()) {
    for (const auto& entry : fs::directory_iterator(at / ".venv" / "lib", error)) {
      const fs::path folder = entry.path() / "site-packages";
      if (fs::exists(folder / "mooncake", error)) return folder.string();
    }
  }
  return {};
}

inline bool port_accepts(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool yes = ::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  ::close(socket);
  return yes;
}

// A port below the range from which the kernel gives out ports of its own.
inline int free_port() {
  static int next = 20000 + static_cast<int>(::getpid() * 7 % 10000);
  for (int tries = 0; tries < 2000; ++tries) {
    const int port = next++;
    if (next >= 32000) next = 20000;
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    const bool free = ::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    ::close(socket);
    if (free) return port;
  }
  throw std::runtime_error("no free port");
}

// One child process that goes with this object, or with the test if that ends first.
class Process {
 public:
  Process() = default;
  Process(const std::vector<std::string>& words, std::string log) : log_(std::move(log)) {
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(127);
      if (std::freopen(log_.c_str(), "a", stdout) == nullptr) ::_exit(127);
      ::dup2(STDOUT_FILENO, STDERR_FILENO);
      ::execv(arguments[0], arguments.data());
      ::_exit(127);
    }
  }
  ~Process() { kill(); }
  Process(Process&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), log_(std::move(other.log_)) {}
  Process& operator=(Process&& other) noexcept {
    std::swap(pid_, other.pid_);
    std::swap(log_, other.log_);
    return *this;
  }

  void signal(int number) const {
    if (pid_ > 0) ::kill(pid_, number);
  }
  bool running() {
    if (pid_ <= 0) return false;
    if (::waitpid(pid_, nullptr, WNOHANG) == 0) return true;
    pid_ = -1;
    return false;
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  std::string log_text() const {
    std::ifstream file(log_);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

 private:
  pid_t pid_ = -1;
  std::string log_;
};

template <class Condition>
bool within(std::chrono::milliseconds limit, Condition condition) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// mooncake_master on a free port; the port stays the same over restarts.
class MooncakeMaster {
 public:
  explicit MooncakeMaster(std::string site_packages, std::vector<std::string> flags = {})
      : site_packages_(std::move(site_packages)), flags_(std::move(flags)) {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvprism-mc-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    for (int tries = 0; tries < 5; ++tries) {
      port_ = free_port();
      metrics_port_ = free_port();
      if (start()) return;
    }
    throw std::runtime_error("mooncake_master did not start:\n" + process_.log_text());
  }
  ~MooncakeMaster() {
    for (Process& process : storage_) process.kill();
    process_.kill();
    std::filesystem::remove_all(folder_);
  }
  MooncakeMaster(const MooncakeMaster&) = delete;
  MooncakeMaster& operator=(const MooncakeMaster&) = delete;

  bool start() {
    const std::string program = site_packages_ + "/mooncake/mooncake_master";
    std::filesystem::permissions(program, std::filesystem::perms::owner_exec,
                                 std::filesystem::perm_options::add);
    std::vector<std::string> words = {program,
                                      "-rpc_address=127.0.0.1",
                                      "-rpc_port=" + std::to_string(port_),
                                      "-metrics_host=127.0.0.1",
                                      "-metrics_port=" + std::to_string(metrics_port_),
                                      "-enable_metric_reporting=false"};
    words.insert(words.end(), flags_.begin(), flags_.end());
    process_ = Process(words, (folder_ / "master.log").string());
    within(std::chrono::seconds(10), [&] { return port_accepts(port_) || !process_.running(); });
    return process_.running() && port_accepts(port_);
  }
  void kill() { process_.kill(); }
  Process& process() { return process_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  const std::string& site_packages() const { return site_packages_; }
  const std::filesystem::path& folder() const { return folder_; }

  // A storage process of its own that gives `bytes` to the pool.
  Process& add_storage(std::size_t bytes) {
    const std::string program = site_packages_ + "/mooncake/mooncake_client";
    std::filesystem::permissions(program, std::filesystem::perms::owner_exec,
                                 std::filesystem::perm_options::add);
    const int port = free_port();
    storage_.push_back(Process(
        {program, "-host=127.0.0.1", "-port=" + std::to_string(port),
         "-metadata_server=P2PHANDSHAKE", "-protocol=tcp", "-master_server_address=" + address(),
         "-global_segment_size=" + std::to_string(bytes)},
        (folder_ / ("storage" + std::to_string(port) + ".log")).string()));
    if (!within(std::chrono::seconds(10), [&] { return port_accepts(port); })) {
      throw std::runtime_error("mooncake_client did not start:\n" + storage_.back().log_text());
    }
    return storage_.back();
  }

 private:
  std::string site_packages_;
  std::vector<std::string> flags_;
  std::filesystem::path folder_;
  int port_ = 0;
  int metrics_port_ = 0;
  Process process_;
  std::vector<Process> storage_;
};

}  // namespace kvprism::test
