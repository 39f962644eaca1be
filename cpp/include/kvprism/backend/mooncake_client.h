// Clients of a Mooncake store, bound at run time to the installed library (decision 10).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvprism/backend/blocking_client.h"
#include "kvprism/base/error.h"
#include "kvprism/base/export.h"
#include "kvprism/run/instant.h"

namespace kvprism {

// A build of Mooncake's store library whose binary interface we know. A library is used only when
// one of these rows has its build-id: equal symbols do not mean equal structs.
struct MooncakeAbiRow {
  std::string_view distribution;  // as in its metadata, e.g. "mooncake-transfer-engine-non-cuda"
  std::string_view version;       // e.g. "0.3.13.post1"
  std::string_view python_tag;    // e.g. "cp311"
  std::string_view library;       // path in site-packages, e.g. "mooncake/store.so"
  std::string_view build_id;      // GNU build-id, lower-case hex
  bool exercised;  // true: moved bytes in our tests; false: symbols and machine code compared only
};

// Every known build. Threads: any; the span is constant.
KVPRISM_API std::span<const MooncakeAbiRow> known_mooncake_builds() noexcept;

enum class UnknownBuild : std::uint8_t {
  kRefuse,  // Error (kUnsupported) that lists the known builds and how to opt in
  kProbe,   // exercised first in a process of its own; the verdict is cached by the file's hash
};

struct MooncakeOptions {
  // Path of the store library. Empty: environment variable KVPRISM_MOONCAKE_LIBRARY, then the
  // distributions installed in `site_packages`, then those of the active virtual environment and of
  // the python3 on PATH.
  std::string library{};
  std::vector<std::string> site_packages{};
  // Path of libpython, used only when no Python is in the process. Empty: KVPRISM_LIBPYTHON, then
  // searched.
  std::string python_library{};
  UnknownBuild unknown_build = UnknownBuild::kRefuse;

  std::string master{};                          // "host:port" of mooncake_master
  std::string local_hostname = "127.0.0.1";      // under which other clients reach this one
  std::string metadata_server = "P2PHANDSHAKE";  // or a URL with a scheme
  std::string protocol = "tcp";                  // "tcp" or "rdma"
  std::vector<std::string> rdma_devices{};       // rdma only; empty: Mooncake chooses
  // Bytes given to the pool; 0 or at least 16 MiB. They go with the client, also when it is
  // replaced: lend with a store that nothing else uses.
  std::int64_t global_segment_size = 0;
  std::int64_t local_buffer_size = 0;  // bytes of Mooncake's staging buffer; 0 or at least 16 MiB
  // 1..8192, and at most half of Mooncake's TCP queue to a peer, beyond which a call hangs for a
  // minute: 512 where it is as large as by default, 8192 where it could be raised (environment
  // variable MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER, which is set to 16384 unless it is set). An
  // object that borders of registrations cut into more goes alone, up to the whole queue; beyond
  // that it is refused.
  std::uint32_t max_slices_per_call = 8192;
  std::uint64_t max_bytes_per_call = 256u
                                     << 20;  // offered to the worker as a capability; 0: no limit
  // Memory is registered in pieces of at most so many bytes, for devices that take no more at once
  // (R67); what is moved is cut where they meet. 0: 2 GiB with rdma, each region whole with tcp;
  // else at least 1 MiB.
  std::uint64_t max_region_bytes = 0;
  Duration connect_timeout = seconds(2);  // for the master's port
  // Set before the library is opened for the first time in the process, never after.
  std::vector<std::pair<std::string, std::string>> environment{};
  std::string rdma_device_folder = "/sys/class/infiniband";
};

// Everything that is wrong with the options, found without network and without loading anything.
KVPRISM_API std::vector<Problem> validate_mooncake_options(const MooncakeOptions& options);

// The store library that the options select. Throws Error (kNotFound) that says where it looked.
KVPRISM_API std::string find_mooncake_library(const MooncakeOptions& options);

// A factory of connected clients. Throws Error (kInvalidConfig) with all problems. The factory
// itself throws Error: kNotFound (library, symbol, libpython, RDMA device), kUnsupported (unknown
// build, another library open already), kUnavailable (master does not accept within
// `connect_timeout`, or set-up fails). The clients cut calls at max_slices_per_call, refuse items
// per key, and check every segment against their regions. Threads: the factory may be called from
// any thread. In a forked child every call of a client ends as kUnavailable. When the main thread
// has made a factory, an exit of the process waits up to two seconds for calls of Mooncake under
// way, and with one that has not returned leaves the exit handlers out: they would destroy what it
// uses.
KVPRISM_API BlockingClientFactory mooncake_client_factory(MooncakeOptions options);

}  // namespace kvprism
