// Any text: reading a configuration and building its projection either works or throws Error.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvprism/group/cache_config.h"
#include "kvprism/group/projection.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const kvprism::SpecRegistry registry = kvprism::SpecRegistry::builtin();
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    (void)kvprism::Projection::make(kvprism::cache_config_from_json(text, registry), registry);
  } catch (const kvprism::Error&) {
  }
  return 0;
}
