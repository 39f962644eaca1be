#include "kvprism/base/host_port.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvprism/base/error.h"

namespace kvprism {
namespace {

HostPort make(std::string host, int port = -1) {
  HostPort result{std::move(host), std::nullopt};
  if (port >= 0) result.port = static_cast<std::uint16_t>(port);
  return result;
}

// The table of R69.
TEST(HostPort, AcceptsEveryForm) {
  EXPECT_EQ(parse_host_port("host"), make("host"));
  EXPECT_EQ(parse_host_port("host:12345"), make("host", 12345));
  EXPECT_EQ(parse_host_port("1.2.3.4:0"), make("1.2.3.4", 0));
  EXPECT_EQ(parse_host_port("2001:db8::1"), make("2001:db8::1"));
  EXPECT_EQ(parse_host_port("[2001:db8::1]:9000"), make("2001:db8::1", 9000));
  EXPECT_EQ(parse_host_port("::1"), make("::1"));
  EXPECT_EQ(parse_host_port("[::1]"), make("::1"));
  EXPECT_EQ(parse_host_port("fe80::1%eth0"), make("fe80::1%eth0"));
  EXPECT_EQ(parse_host_port("[fe80::1%eth0]:1"), make("fe80::1%eth0", 1));
}

TEST(HostPort, RefusesAndNamesThePath) {
  for (const std::string text :
       {"", "host:", ":80", "host:70000", "[::1", "[::1]80", "[::1]:", "[host]:80", "a:b:c",
        "host:8 0", "host:-1", "host:+1", "ho st:80", "host]:80", "fe80::1%", "http://host:80"}) {
    try {
      parse_host_port(text, "master");
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidConfig);
      ASSERT_EQ(error.problems().size(), 1u);
      EXPECT_EQ(error.problems()[0].path, "master");
      EXPECT_EQ(error.problems()[0].value, text);
    }
  }
}

TEST(HostPort, PrintsWhatItParses) {
  for (const std::string host :
       {"h", "a-b.example", "10.0.0.1", "::", "2001:db8::1", "fe80::1%e0"}) {
    for (const int port : {-1, 0, 1, 80, 32767, 65535}) {
      const HostPort address = make(host, port);
      EXPECT_EQ(parse_host_port(to_string(address)), address) << to_string(address);
    }
  }
  EXPECT_EQ(to_string(make("::1", 80)), "[::1]:80");
}

}  // namespace
}  // namespace kvprism
