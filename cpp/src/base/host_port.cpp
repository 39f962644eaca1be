#include "kvprism/base/host_port.h"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>

#include "kvprism/base/error.h"

namespace kvprism {
namespace {

// An IPv6 literal, with or without a zone ("fe80::1%eth0").
bool is_ipv6(std::string_view text) {
  const std::size_t percent = text.find('%');
  if (percent != std::string_view::npos && percent + 1 == text.size()) return false;
  const std::string address(text.substr(0, percent));
  in6_addr parsed;
  return inet_pton(AF_INET6, address.c_str(), &parsed) == 1;
}

bool is_host(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return c > ' ' && c < 127 && c != '[' && c != ']' && c != ':' && c != '/' && c != '%';
  });
}

}  // namespace

HostPort parse_host_port(std::string_view text, std::string_view path) {
  const auto refuse = [&](std::string expected, std::string hint = {}) {
    fail(ErrorCode::kInvalidConfig, "address",
         {std::string(path), std::string(text), std::move(expected), std::move(hint)});
  };
  const auto parse_port = [&](std::string_view digits) {
    std::uint32_t port = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    if (digits.empty() || error != std::errc{} || end != digits.data() + digits.size() ||
        port > 65535) {
      refuse("a port between 0 and 65535 after the host");
    }
    return static_cast<std::uint16_t>(port);
  };

  HostPort result;
  if (text.empty()) refuse("host or host:port");
  if (text.front() == '[') {
    const std::size_t close = text.find(']');
    if (close == std::string_view::npos) refuse("a closing ']'");
    const std::string_view inside = text.substr(1, close - 1);
    if (!is_ipv6(inside)) refuse("an IPv6 address inside the brackets");
    result.host = std::string(inside);
    const std::string_view rest = text.substr(close + 1);
    if (rest.empty()) return result;
    if (rest.front() != ':') refuse("nothing or ':port' after ']'");
    result.port = parse_port(rest.substr(1));
    return result;
  }
  const auto colons = std::count(text.begin(), text.end(), ':');
  if (colons > 1) {
    if (!is_ipv6(text))
      refuse("an IPv6 address", "write an IPv6 address with a port as [address]:port");
    result.host = std::string(text);
    return result;
  }
  const std::size_t colon = text.find(':');
  const std::string_view host = text.substr(0, colon);
  if (!is_host(host)) refuse("a host name or address before the port");
  result.host = std::string(host);
  if (colon != std::string_view::npos) result.port = parse_port(text.substr(colon + 1));
  return result;
}

std::string to_string(const HostPort& address) {
  const bool brackets = address.port && address.host.find(':') != std::string::npos;
  std::string text;
  if (brackets) text += '[';
  text += address.host;
  if (brackets) text += ']';
  if (address.port) text.append(":").append(std::to_string(*address.port));
  return text;
}

}  // namespace kvprism
