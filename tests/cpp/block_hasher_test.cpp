#include "kvprism/hash/block_hasher.h"

#include <gmock/gmock.h>

#include <numeric>
#include <string>
#include <vector>

#include "kvprism/base/error.h"

namespace kvprism {
namespace {

std::string hex(std::span<const std::uint8_t> bytes) {
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::vector<std::uint32_t> tokens_up_to(std::uint32_t count) {
  std::vector<std::uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0u);
  return tokens;
}

BlockHasher sha256(std::uint32_t unit) { return BlockHasher({.hash_block_size = unit}); }

// Digests of Python's hashlib and xxhash over cbor2.dumps(..., canonical=True).
TEST(BlockHasher, KnownDigests) {
  BlockHasher hasher = sha256(4);
  EXPECT_EQ(hex(hasher.none_hash()),
            "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
  std::vector<std::uint8_t> hashes;
  hasher.append(std::vector<std::uint32_t>{1, 200, 70000, 4294967295}, 0, {}, {}, hashes);
  EXPECT_EQ(hex(hashes), "6fe7f3de194eefbd8ba54777c4d944f75f0e81c1b6b5d832849dd0da12e3b018");

  BlockHasher fast({BlockHashAlgorithm::kXxhashCbor, 4, "0"});
  EXPECT_EQ(hex(fast.none_hash()), "1ebe36576dcb573f26b99533a20aaeca");
  hashes.clear();
  fast.append(std::vector<std::uint32_t>{1, 200, 70000, 4294967295}, 0, {}, {}, hashes);
  EXPECT_EQ(hex(hashes), "d25249cb0e8f4e960a3fbed36ed7edec");
}

TEST(BlockHasher, ExtrasChangeTheUnitsThatTheyTouchAndThoseBehind) {
  BlockHasher hasher = sha256(4);
  const std::vector<std::uint32_t> tokens = tokens_up_to(16);
  std::vector<std::uint8_t> plain;
  std::vector<std::uint8_t> with_item;
  hasher.append(tokens, 0, {}, {}, plain);
  HashExtras extras;
  extras.items = {{"image", 5, 2}};
  hasher.append(tokens, 0, {}, extras, with_item);
  ASSERT_EQ(plain.size(), 4 * 32u);
  EXPECT_TRUE(std::equal(plain.begin(), plain.begin() + 32, with_item.begin()));
  EXPECT_FALSE(std::equal(plain.begin() + 32, plain.begin() + 64, with_item.begin() + 32));
  EXPECT_FALSE(std::equal(plain.begin() + 96, plain.end(), with_item.begin() + 96));
}

TEST(BlockHasher, ExtendContinuesAChain) {
  BlockHasher hasher = sha256(4);
  const std::vector<std::uint32_t> tokens = tokens_up_to(23);
  HashExtras extras;
  extras.lora = LoraAdapter{"style", "/style"};
  extras.cache_salt = "salt";
  extras.items = {{"a", 1, 9}, {"b", 10, 1}};
  std::vector<std::uint8_t> at_once;
  hasher.extend(tokens, extras, at_once);
  EXPECT_EQ(at_once.size(), 5 * 32u);
  std::vector<std::uint8_t> step_by_step;
  for (std::size_t end = 1; end <= tokens.size(); ++end)
    hasher.extend(std::span(tokens).first(end), extras, step_by_step);
  EXPECT_EQ(step_by_step, at_once);
}

TEST(BlockHasher, NamesAllThatIsWrong) {
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message([] { BlockHasher({BlockHashAlgorithm::kXxhashCbor, 0, std::nullopt}); }),
            "block hasher: 2 problems\n"
            "  hash_block_size = 0: expected at least 1 token\n"
            "  seed = none: expected a seed, as xxhash_cbor has no own (give every process the "
            "same, e.g. that of PYTHONHASHSEED)");
  BlockHasher hasher = sha256(4);
  std::vector<std::uint8_t> hashes;
  HashExtras extras;
  extras.items = {{"a", 4, 0}, {"\xff", 3, 2}};
  EXPECT_EQ(message([&] { hasher.append(tokens_up_to(8), 2, {}, extras, hashes); }),
            "block hash: 5 problems\n"
            "  first = 2: expected a multiple of 4\n"
            "  parent = 0 bytes: expected 32 bytes, the hash of the unit before\n"
            "  items[0].length = 0: expected at least 1 token\n"
            "  items[1].identifier = byte 0 is wrong: expected text in UTF-8\n"
            "  items[1].offset = 3: expected at least 4, where the item before it ends");
  EXPECT_TRUE(hashes.empty());
  hashes.resize(31);
  EXPECT_EQ(message([&] { hasher.extend(tokens_up_to(8), {}, hashes); }),
            "block hash: hashes = 31 bytes: expected hashes of 32 bytes, at most 2 of them");
}

TEST(BlockHasher, NamesOfAlgorithms) {
  EXPECT_EQ(block_hash_algorithm_from_string("xxhash_cbor"), BlockHashAlgorithm::kXxhashCbor);
  EXPECT_EQ(block_hash_algorithm_from_string("sha256"), std::nullopt);
  EXPECT_EQ(to_string(BlockHashAlgorithm::kSha256Cbor), "sha256_cbor");
}

}  // namespace
}  // namespace kvprism
