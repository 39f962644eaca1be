// Any text: parse_host_port either throws Error or gives what prints as the same address.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "kvprism/base/error.h"
#include "kvprism/base/host_port.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const kvprism::HostPort address = kvprism::parse_host_port(text, "address");
    const kvprism::HostPort again = kvprism::parse_host_port(to_string(address), "address");
    if (again.host != address.host || again.port != address.port) std::abort();
  } catch (const kvprism::Error&) {
  }
  return 0;
}
