#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvprism/base/error.h"
#include "kvprism/layout/kernel_blocks.h"

namespace kvprism {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string message_of(std::uint32_t tokens_per_block, const KernelBlocks& kernel) {
  try {
    BlockRatio::make(tokens_per_block, kernel);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

// R28: 8960 tokens per block over kernel blocks of 64 states, 4 tokens each.
TEST(BlockRatio, ComesFromDeclaredTokensOfAKernelBlock) {
  const BlockRatio ratio =
      BlockRatio::make(8960, {.states_per_block = 64, .tokens_per_state = 4, .count = 17885});
  EXPECT_EQ(ratio.kernel_blocks_per_block(), 35U);
  EXPECT_EQ(ratio.num_blocks(), 511U);
  EXPECT_EQ(ratio.kernel_blocks(BlockId{3}), (KernelRange{105, 35}));
}

TEST(BlockRatio, RefusesAPoolThatIsNoWholeNumberOfBlocks) {
  EXPECT_THAT(message_of(8960, {.states_per_block = 64, .tokens_per_state = 1, .count = 17885}),
              AllOf(HasSubstr("17885"), HasSubstr("140")));
}

TEST(BlockRatio, RefusesABlockThatIsNoWholeNumberOfKernelBlocks) {
  EXPECT_THAT(message_of(100, {.states_per_block = 64, .count = 10}),
              AllOf(HasSubstr("100"), HasSubstr("64")));
}

TEST(BlockRatio, TellsEverySizeOfZeroAtOnce) {
  EXPECT_THAT(message_of(0, {.states_per_block = 0, .tokens_per_state = 0, .count = 0}),
              HasSubstr("4 problems"));
}

TEST(BlockRatio, OfOneIsTheIdentity) {
  const BlockRatio ratio = BlockRatio::make(16, {.states_per_block = 16, .count = 9});
  EXPECT_EQ(ratio.kernel_blocks(BlockId{8}), (KernelRange{8, 1}));
}

}  // namespace
}  // namespace kvprism
