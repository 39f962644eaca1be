// Opens Mooncake's store library and resolves every function we call, all at once.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kvprism/backend/mooncake_client.h"
#include "mooncake/abi.h"
#include "mooncake/finder.h"

namespace kvprism::mooncake {

// Lives as long as the process: the library starts threads of its own and is never closed.
struct Library {
  LibraryFile file;
  const MooncakeAbiRow* row = nullptr;  // null: accepted by a probe
  StoreFunctions store;
};

struct OpenRequest {
  std::string path;
  std::string python_library;  // empty: KVPRISM_LIBPYTHON, then searched
  bool accept_unknown = false;
  std::vector<std::pair<std::string, std::string>>
      defaults;  // set unless already in the environment
  std::vector<std::pair<std::string, std::string>> environment;  // set, or must be equal
};

// The row of a file's build, or null.
const MooncakeAbiRow* find_row(const LibraryFile& file);

// "mooncake-transfer-engine 0.3.13.post1 cp311 (build 3a02...)", for messages.
std::string describe(const LibraryFile& file);

// Opens the library, or returns the one that is open. Throws Error: kNotFound (file, system
// library, libpython, symbol), kUnsupported (unknown build, another Mooncake library or another
// environment in this process). Threads: any; the first call sets environment variables, which is
// not safe beside other threads' getenv.
const Library& open_library(const OpenRequest& request);

}  // namespace kvprism::mooncake
