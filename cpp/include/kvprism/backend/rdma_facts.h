// What there is for RDMA on this machine, and what of it would end the set-up of a Mooncake client
// with protocol rdma (R67, R68).
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvprism/backend/mooncake_client.h"
#include "kvprism/base/error.h"
#include "kvprism/base/export.h"

namespace kvprism {

// A port of a device, as the kernel tells of it.
struct RdmaPort {
  std::string device;
  std::string number;
  std::string state;       // "ACTIVE", "DOWN", ...
  bool addressed = false;  // it has a GID, by which others can reach it

  bool operator==(const RdmaPort&) const = default;
};

struct RdmaFacts {
  std::string folder = MooncakeOptions{}.rdma_device_folder;  // where devices are listed
  std::vector<std::string> devices{};                         // sorted
  std::vector<RdmaPort> ports{};                              // none of a device that does not tell
  std::uint64_t lock_limit = std::numeric_limits<std::uint64_t>::max();  // bytes; that: no limit
  bool may_lock = false;                    // the process may lock memory beyond the limit
  std::optional<std::string> forced_tcp{};  // environment variable MC_FORCE_TCP, where it is set
};

// Threads: any, while nobody changes the environment.
KVPRISM_API RdmaFacts read_rdma_facts(std::string folder);

// What a client with these options finds wrong before it asks Mooncake. `regions` are the bytes of
// each piece of memory to be registered beside Mooncake's own. Pure.
KVPRISM_API std::vector<Problem> check_rdma(const MooncakeOptions& options,
                                            std::span<const std::uint64_t> regions,
                                            const RdmaFacts& facts);

}  // namespace kvprism
