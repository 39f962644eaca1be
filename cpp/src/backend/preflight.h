// Checks made before Mooncake is asked, because its own failures are silent or slow (R54, R67,
// R68).
#pragma once

#include <netdb.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvprism/backend/mooncake_client.h"
#include "kvprism/backend/rdma_facts.h"
#include "kvprism/base/error.h"
#include "kvprism/base/host_port.h"
#include "kvprism/run/instant.h"

namespace kvprism::detail {

// Tries TCP connections to an address. Threads: any. A name is looked up anew each time, in one
// thread at a time, which may be left behind: what it finds too late serves the next question.
class Knock {
 public:
  // As getaddrinfo(3).
  using LookUp = std::function<int(const char*, const char*, const addrinfo*, addrinfo**)>;
  explicit Knock(HostPort address, LookUp look_up = ::getaddrinfo);

  const HostPort& address() const noexcept { return address_; }

  // Empty when a connection was accepted within `limit`, of a millisecond at least, otherwise the
  // reason. Never waits longer.
  std::string failure(Duration limit);

 private:
  struct AddressList;
  using Found = std::shared_ptr<AddressList>;

  static Found look_up(const LookUp& how, const HostPort& address, int flags);
  Found resolve(std::chrono::steady_clock::time_point end);

  const HostPort address_;
  const LookUp look_up_;
  std::mutex mutex_;
  std::shared_future<Found> pending_;  // guarded by the mutex
};

// Names in `folder`, sorted; empty when there is none or no such folder.
std::vector<std::string> list_rdma_devices(const std::string& folder);

// What is wrong with the wish for these devices when `present` exist. Pure.
std::vector<Problem> check_rdma_devices(const std::vector<std::string>& wanted,
                                        const std::vector<std::string>& present,
                                        const std::string& folder);

// Of each device in `folder`, sorted; none of a device that does not tell.
std::vector<RdmaPort> list_rdma_ports(const std::string& folder,
                                      const std::vector<std::string>& devices);

// What is wrong with the ports of these devices, none named: of all. One that tells of no port may
// do. Pure.
std::vector<Problem> check_rdma_ports(const std::vector<std::string>& wanted,
                                      const std::vector<RdmaPort>& ports);

struct MemoryLock {
  std::uint64_t limit = 0;  // bytes; the largest value means unlimited
  bool privileged = false;  // the process may lock memory beyond the limit
};
MemoryLock read_memory_lock() noexcept;

// What is wrong with locking all that RDMA registers with these options: Mooncake's segment and
// staging buffer, and `regions` (bytes of each) beside them, on every device.
std::vector<Problem> check_locked_memory(const MooncakeOptions& options,
                                         std::span<const std::uint64_t> regions,
                                         const MemoryLock& lock);

}  // namespace kvprism::detail
