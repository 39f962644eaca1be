#include "kvprism/hit/reachable_mask.h"

#include <gtest/gtest.h>

#include <string>

namespace kvprism {
namespace {

constexpr HitGrid kGrid{.step = 64, .unit = 16, .alignment = 64};

HitGroup window_group(std::uint32_t window, bool draft = false) {
  return {.rule = HitRule::kWindow,
          .chunk_tokens = 16,
          .window = window,
          .draft = draft,
          .unit_tokens = 16,
          .family = 0};
}

std::string picture(const ReachableMask& mask, std::uint32_t chunks) {
  std::string text;
  for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) text += mask.keeps(chunk) ? '#' : '.';
  return text;
}

TEST(ReachableMask, AWindowKeepsItsTailBeforeEveryStep) {
  // 20 tokens reach 19 back: two chunks of 16.
  EXPECT_EQ(picture({window_group(20), kGrid}, 12), "..##..##..##");
  EXPECT_EQ(picture({window_group(20, true), kGrid}, 12), "..###.###.##")
      << "a draft reads one chunk beyond the hit";
  EXPECT_TRUE((ReachableMask{window_group(60), kGrid}.all())) << "the tails touch each other";
}

TEST(ReachableMask, RetentionThinsTheTailsOut) {
  const ReplayBoundaries none;
  EXPECT_EQ(picture({window_group(20), kGrid, 128, none}, 16), "......##......##");
  EXPECT_EQ(picture({window_group(20), kGrid, 0, none}, 16), "................");
  EXPECT_EQ(picture({window_group(20), kGrid, 0, replay_boundaries(150, 64, false)}, 16),
            "......##........")
      << "a prompt of 150 tokens is replayed from 128";
  EXPECT_EQ(picture({window_group(20), kGrid, 128, replay_boundaries(250, 64, false)}, 16),
            "......##..##..##");
}

TEST(ReachableMask, OtherRulesKeepEverything) {
  HitGroup group = window_group(20);
  for (const HitRule rule : {HitRule::kPrefix, HitRule::kChunk, HitRule::kLastState}) {
    group.rule = rule;
    EXPECT_TRUE((ReachableMask{group, kGrid, 0, replay_boundaries(150, 64, false)}.all()));
  }
}

TEST(ReachableMask, ReplayStartsBeforeTheLastToken) {
  EXPECT_EQ(replay_boundaries(150, 64, false), (ReplayBoundaries{{128, 0}, 1}));
  EXPECT_EQ(replay_boundaries(128, 64, false), (ReplayBoundaries{{64, 0}, 1}))
      << "its last token is computed again";
  EXPECT_EQ(replay_boundaries(150, 64, true), (ReplayBoundaries{{64, 0}, 1}));
  EXPECT_EQ(replay_boundaries(192, 64, true), (ReplayBoundaries{{64, 128}, 2}))
      << "the same prompt, and a longer one";
  EXPECT_EQ(replay_boundaries(64, 64, true), (ReplayBoundaries{{0, 0}, 1}));
}

}  // namespace
}  // namespace kvprism
