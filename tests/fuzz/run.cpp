// Any bytes: replay_run either throws Error or tells how far the recording goes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "kvprism/base/error.h"
#include "kvprism/store/replay_run.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const kvprism::ReplayRunResult result =
        kvprism::replay_run({reinterpret_cast<const std::byte*>(data), size});
    if (result.ignored_bytes > size || result.same != result.difference.empty()) std::abort();
  } catch (const kvprism::Error&) {
  }
  return 0;
}
