// The one parser of "host", "host:port" and "[v6]:port" (R69).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kvprism/base/export.h"

namespace kvprism {

// A host name or address without brackets, and a port when one was given (0..65535; 0 means "any").
struct HostPort {
  std::string host;
  std::optional<std::uint16_t> port;

  bool operator==(const HostPort&) const = default;
};

// Accepts "host", "host:80", "1.2.3.4:80", "::1", "fe80::1%eth0", "[::1]" and "[::1]:80". A bare
// IPv6 address never carries a port. Throws Error (kInvalidConfig) whose problem has path `path`.
KVPRISM_API HostPort parse_host_port(std::string_view text, std::string_view path = "address");

// Inverse of parse_host_port; puts the brackets back around an IPv6 address that has a port.
KVPRISM_API std::string to_string(const HostPort& address);

}  // namespace kvprism
