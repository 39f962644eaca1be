// Opens Mooncake's store library and resolves every function we call, all at once.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kvprism/backend/mooncake_client.h"
#include "mooncake/abi.h"
#include "mooncake/finder.h"

namespace kvprism::mooncake {

// How many slices to one peer wait in Mooncake's TCP transport, and by default; more of them hang.
constexpr const char* kTcpQueueVariable = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER";
constexpr std::uint32_t kTcpQueue = 1024;
constexpr std::uint32_t kLargestTcpQueue = 16384;  // that was tried; 65536 is refused

// Lives as long as the process: the library starts threads of its own and is never closed.
struct Library {
  LibraryFile file;
  const MooncakeAbiRow* row = nullptr;  // null: accepted by a probe
  StoreFunctions store;
  std::uint32_t tcp_queue = 0;  // slices to one peer that its TCP transport takes at a time
};

struct OpenRequest {
  std::string path;
  std::string python_library;  // empty: KVPRISM_LIBPYTHON, then searched
  // Asked of a build that is in no row, unless it is open; empty: none is accepted. May throw.
  std::function<bool(const LibraryFile&)> accept_unknown;
  std::vector<std::pair<std::string, std::string>>
      defaults;  // set unless already in the environment
  std::vector<std::pair<std::string, std::string>> environment;  // set, or must be equal
};

// What of the queue can be relied on when the variable is `text` (null: unset). A build that was
// not tried may not know it, and one that others have opened may have read it before it was set.
std::uint32_t tcp_queue_of(const MooncakeAbiRow* row, bool loaded_by_others, const char* text);

// "mooncake-transfer-engine 0.3.13.post1 cp311 (build 3a02...)", for messages.
std::string describe(const LibraryFile& file);

// Opens the library, or returns the one that is open. Throws Error: kNotFound (file, system
// library, libpython, symbol), kUnsupported (unknown build, another Mooncake library or another
// environment in this process), and what accept_unknown throws. Threads: any; others wait while it
// is asked. The first call sets environment variables, which is not safe beside other threads'
// getenv.
const Library& open_library(const OpenRequest& request);

}  // namespace kvprism::mooncake
