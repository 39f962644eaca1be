#include "backend/preflight.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>
#include <utility>

#include "backend/registration.h"

namespace kvprism::detail {
namespace {

using Clock = std::chrono::steady_clock;

std::string connect_one(const addrinfo& at, Clock::time_point end) {
  const int socket = ::socket(at.ai_family, at.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket < 0) return std::strerror(errno);
  std::string reason;
  if (::connect(socket, at.ai_addr, at.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) {
      reason = std::strerror(errno);
    } else {
      for (;;) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
        pollfd wait{socket, POLLOUT, 0};
        const int ready = left <= 0 ? 0 : ::poll(&wait, 1, static_cast<int>(left));
        if (ready < 0 && errno == EINTR) continue;
        if (ready == 0) reason = "no answer in time";
        break;
      }
      int error = 0;
      socklen_t size = sizeof(error);
      if (reason.empty() && ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 &&
          error != 0) {
        reason = std::strerror(error);
      }
    }
  }
  ::close(socket);
  return reason;
}

}  // namespace

struct Knock::AddressList {
  addrinfo* first = nullptr;
  int error = 0;
  AddressList() = default;
  AddressList(const AddressList&) = delete;
  AddressList& operator=(const AddressList&) = delete;
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

Knock::Knock(HostPort address, LookUp look_up)
    : address_(std::move(address)), look_up_(std::move(look_up)) {}

Knock::Found Knock::look_up(const LookUp& how, const HostPort& address, int flags) {
  auto list = std::make_shared<AddressList>();
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  const std::string port = std::to_string(address.port.value_or(0));
  list->error = how(address.host.c_str(), port.c_str(), &hints, &list->first);
  return list;
}

// A numeric address needs no resolver.
Knock::Found Knock::resolve(Clock::time_point end) {
  if (auto numeric = look_up(::getaddrinfo, address_, AI_NUMERICHOST); numeric->error == 0)
    return numeric;
  std::shared_future<Found> pending;
  {
    const std::lock_guard lock(mutex_);
    if (!pending_.valid()) {
      const auto promise = std::make_shared<std::promise<Found>>();
      std::thread([promise, how = look_up_, address = address_] {
        promise->set_value(look_up(how, address, 0));
      }).detach();
      pending_ = promise->get_future().share();
    }
    pending = pending_;
  }
  if (pending.wait_until(end) != std::future_status::ready) return nullptr;
  const std::lock_guard lock(mutex_);
  // Another caller may have begun the next one.
  if (pending_.valid() && pending_.wait_for(Clock::duration::zero()) == std::future_status::ready)
    pending_ = {};
  return pending.get();
}

std::string Knock::failure(Duration limit) {
  // poll(2) counts in milliseconds.
  const Clock::time_point end =
      Clock::now() + std::chrono::nanoseconds(std::max(limit, milliseconds(1)).ns);
  const Found list = resolve(end);
  if (list == nullptr) return "the name did not resolve in time";
  if (list->error != 0) return gai_strerror(list->error);
  std::string reason = "the name has no address";
  int left = 0;
  for (const addrinfo* at = list->first; at != nullptr; at = at->ai_next) ++left;
  // Each has its share of the time: one that is silent leaves some for the others.
  for (const addrinfo* at = list->first; at != nullptr; at = at->ai_next, --left) {
    const Clock::time_point now = Clock::now();
    reason = connect_one(*at, now + (end - now) / left);
    if (reason.empty()) break;
  }
  return reason;
}

std::vector<std::string> list_rdma_devices(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<Problem> check_rdma_devices(const std::vector<std::string>& wanted,
                                        const std::vector<std::string>& present,
                                        const std::string& folder) {
  std::vector<Problem> problems;
  if (present.empty()) {
    problems.push_back(
        {"protocol", "rdma", "at least one RDMA device in " + folder,
         "the folder is empty or missing: load the driver, pass the devices into the "
         "container, or choose protocol tcp"});
    return problems;
  }
  std::string list;
  for (const std::string& name : present) list += list.empty() ? name : ", " + name;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (std::find(present.begin(), present.end(), wanted[i]) != present.end()) continue;
    problems.push_back({"rdma_devices[" + std::to_string(i) + "]",
                        wanted[i],
                        "one of the devices in " + folder + ": " + list,
                        {}});
  }
  return problems;
}

namespace {

// Zeros and colons alone: the entry is free.
bool is_address(const std::string& gid) {
  return gid.find_first_not_of("0:\n") != std::string::npos;
}

std::string first_line(const std::filesystem::path& file) {
  std::string line;
  std::ifstream stream(file);
  std::getline(stream, line);
  return line;
}

}  // namespace

std::vector<RdmaPort> list_rdma_ports(const std::string& folder,
                                      const std::vector<std::string>& devices) {
  std::vector<RdmaPort> ports;
  for (const std::string& device : devices) {
    const std::filesystem::path of_device = std::filesystem::path(folder) / device / "ports";
    for (const std::string& number : list_rdma_devices(of_device.string())) {
      RdmaPort port{device, number, first_line(of_device / number / "state"), false};
      if (port.state.empty()) continue;  // it does not tell: the device may do
      port.state = port.state.substr(std::min(port.state.size(), port.state.find(' ') + 1));
      const std::filesystem::path gids = of_device / number / "gids";
      for (const std::string& index : list_rdma_devices(gids.string())) {
        port.addressed |= is_address(first_line(gids / index));
      }
      ports.push_back(std::move(port));
    }
  }
  return ports;
}

std::vector<Problem> check_rdma_ports(const std::vector<std::string>& wanted,
                                      const std::vector<RdmaPort>& ports) {
  const auto usable = [](const RdmaPort& port) { return port.state == "ACTIVE" && port.addressed; };
  const auto describe = [](const RdmaPort& port) {
    return port.device + " port " + port.number + " is " +
           (port.state != "ACTIVE" ? port.state : "ACTIVE without an address (GID)");
  };
  std::vector<Problem> problems;
  // Of those for which `is_meant` holds one port must do.
  const auto check = [&](const std::string& path, const auto& is_meant) {
    std::string found;
    for (const RdmaPort& port : ports) {
      if (!is_meant(port)) continue;
      if (usable(port)) return;
      found += (found.empty() ? "" : ", ") + describe(port);
    }
    if (found.empty()) return;
    problems.push_back({path, found, "an active port with an address (GID)",
                        "`ibv_devinfo -v` shows them; bring its link up and give its network "
                        "interface an address, or choose other devices"});
  };
  if (wanted.empty()) check("protocol", [](const RdmaPort&) { return true; });
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    check("rdma_devices[" + std::to_string(i) + "]",
          [&](const RdmaPort& port) { return port.device == wanted[i]; });
  }
  return problems;
}

MemoryLock read_memory_lock() noexcept {
  MemoryLock result;
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    result.limit = limit.rlim_cur == RLIM_INFINITY ? std::numeric_limits<std::uint64_t>::max()
                                                   : limit.rlim_cur;
  }
  try {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (!line.starts_with("CapEff:")) continue;
      constexpr unsigned kIpcLock = 14;  // bit of CAP_IPC_LOCK
      result.privileged = (std::stoull(line.substr(7), nullptr, 16) >> kIpcLock & 1) != 0;
    }
  } catch (...) {
    result.privileged = false;
  }
  return result;
}

namespace {

std::vector<Problem> check_locked(const MooncakeOptions& options,
                                  std::span<const std::uint64_t> regions, const MemoryLock& lock,
                                  std::size_t present) {
  std::vector<std::uint64_t> lengths(regions.begin(), regions.end());
  lengths.push_back(static_cast<std::uint64_t>(options.global_segment_size));
  lengths.push_back(static_cast<std::uint64_t>(options.local_buffer_size));
  // Where Mooncake chooses it takes all that it finds.
  const std::size_t devices = options.rdma_devices.empty() ? present : options.rdma_devices.size();
  return check_registration(lengths,
                            {lock.limit, lock.privileged, static_cast<std::uint32_t>(devices)});
}

}  // namespace

std::vector<Problem> check_locked_memory(const MooncakeOptions& options,
                                         std::span<const std::uint64_t> regions,
                                         const MemoryLock& lock) {
  return check_locked(options, regions, lock, list_rdma_devices(options.rdma_device_folder).size());
}

}  // namespace kvprism::detail

namespace kvprism {

RdmaFacts read_rdma_facts(std::string folder) {
  RdmaFacts facts;
  facts.devices = detail::list_rdma_devices(folder);
  facts.ports = detail::list_rdma_ports(folder, facts.devices);
  facts.folder = std::move(folder);
  const detail::MemoryLock lock = detail::read_memory_lock();
  facts.lock_limit = lock.limit;
  facts.may_lock = lock.privileged;
  if (const char* forced = std::getenv("MC_FORCE_TCP")) facts.forced_tcp = forced;
  return facts;
}

std::vector<Problem> check_rdma(const MooncakeOptions& options,
                                std::span<const std::uint64_t> regions, const RdmaFacts& facts) {
  ProblemList problems;
  problems.append(detail::check_rdma_devices(options.rdma_devices, facts.devices, facts.folder));
  problems.append(detail::check_rdma_ports(options.rdma_devices, facts.ports));
  problems.append(detail::check_locked(options, regions, {facts.lock_limit, facts.may_lock},
                                       facts.devices.size()));
  // Mooncake obeys this variable before the protocol it was given.
  if (facts.forced_tcp) {
    problems.add("environment.MC_FORCE_TCP", *facts.forced_tcp, "unset with protocol rdma",
                 "unset it; a process that made a tcp client cannot make an rdma client");
  }
  return problems.problems();
}

}  // namespace kvprism
