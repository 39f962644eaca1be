#include "kvprism/base/error.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace kvprism {
namespace {

TEST(Error, OneProblemIsOneLine) {
  const Error error(ErrorCode::kInvalidConfig, "cache config",
                    {{"groups[1].block_size", "-8", "a positive integer", "tokens per block"}});
  EXPECT_STREQ(
      error.what(),
      "cache config: groups[1].block_size = -8: expected a positive integer (tokens per block)");
  EXPECT_EQ(to_string(error.code()), "invalid_config");
}

TEST(Error, AllProblemsComeAtOnce) {
  ProblemList problems;
  EXPECT_NO_THROW(problems.throw_if_any(ErrorCode::kInvalidConfig, "nothing"));
  problems.add("a", "1", "2");
  problems.add("b", "", "a value");
  try {
    problems.throw_if_any(ErrorCode::kMismatch, "two sides");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "two sides: 2 problems\n  a = 1: expected 2\n  b: expected a value");
    EXPECT_EQ(error.problems().size(), 2u);
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
  }
}

TEST(Error, ALongValueIsCutBetweenCharacters) {
  std::string value(199, 'a');
  for (int i = 0; i < 1000; ++i) value += "\u00fc";
  const Error error(
      ErrorCode::kInvalidConfig, "cache config",
      {{std::string(401, 'k'), value, "less", {}}, {std::string(400, 'k'), "1", "less", {}}});
  EXPECT_EQ(error.problems()[0].path, std::string(200, 'k') + "... (401 bytes)");
  EXPECT_EQ(error.problems()[0].value, std::string(199, 'a') + "... (2199 bytes)");
  EXPECT_EQ(error.problems()[1].path, std::string(400, 'k'));
}

TEST(Error, ControlBytesAreShownAndDoNothing) {
  const std::string value = std::string("A\0B", 3) + "\x1b[2J\n\x7f\u00fc";
  const Error error(ErrorCode::kInvalidConfig, "cache config", {{"a\tb", value, "less", {}}});
  EXPECT_STREQ(error.what(),
               "cache config: a\\x09b = A\\x00B\\x1b[2J\\x0a\\x7f\u00fc: expected less");
}

TEST(Error, EveryCodeHasAWord) {
  for (int code = 0; code <= static_cast<int>(ErrorCode::kClosed); ++code) {
    EXPECT_NE(to_string(static_cast<ErrorCode>(code)), "unknown");
  }
}

TEST(Suggest, FindsTheNearWordAndNoFarOne) {
  const std::array<std::string_view, 3> known{"block_size", "num_blocks", "kind"};
  EXPECT_EQ(suggest("blok_size", known), "did you mean 'block_size'?");
  EXPECT_EQ(suggest("knid", known), "did you mean 'kind'?");
  EXPECT_EQ(suggest("temperature", known), "");
  EXPECT_EQ(suggest("", known), "");
}

}  // namespace
}  // namespace kvprism
