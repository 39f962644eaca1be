#include "kvprism/hit/reachable_mask.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "kvprism/hit/hit_search.h"

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
  EXPECT_EQ(picture({window_group(20), kGrid, 0, replay_boundaries(150, 64, false, 1)}, 16),
            "......##........")
      << "a prompt of 150 tokens is replayed from 128";
  EXPECT_EQ(picture({window_group(20), kGrid, 128, replay_boundaries(250, 64, false, 1)}, 16),
            "......##..##..##");
}

TEST(ReachableMask, OtherRulesKeepEverything) {
  HitGroup group = window_group(20);
  for (const HitRule rule : {HitRule::kPrefix, HitRule::kChunk, HitRule::kLastState}) {
    group.rule = rule;
    EXPECT_TRUE((ReachableMask{group, kGrid, 0, replay_boundaries(150, 64, false, 1)}.all()));
  }
}

TEST(ReachableMask, ReplayStartsBeforeTheLastToken) {
  EXPECT_EQ(replay_boundaries(150, 64, false, 1), (ReplayBoundaries{{128, 0}, 1}));
  EXPECT_EQ(replay_boundaries(128, 64, false, 1), (ReplayBoundaries{{64, 0}, 1}))
      << "its last token is computed again";
  EXPECT_EQ(replay_boundaries(150, 64, true, 1), (ReplayBoundaries{{64, 0}, 1}));
  EXPECT_EQ(replay_boundaries(192, 64, true, 1), (ReplayBoundaries{{64, 128}, 2}))
      << "the same prompt, and a longer one";
  EXPECT_EQ(replay_boundaries(64, 64, true, 1), (ReplayBoundaries{{0, 0}, 1}));
  EXPECT_EQ(replay_boundaries(0, 64, false, 1), (ReplayBoundaries{{0, 0}, 1}));
}

TEST(ReachableMask, ReplayMayStartSeveralTokensBeforeTheEnd) {
  EXPECT_EQ(replay_boundaries(130, 64, false, 8), (ReplayBoundaries{{64, 128}, 2}))
      << "the same prompt, and one that goes on";
  EXPECT_EQ(replay_boundaries(150, 64, false, 8), (ReplayBoundaries{{128}, 1}));
  EXPECT_EQ(replay_boundaries(6, 64, false, 8), (ReplayBoundaries{{0}, 1}));
  EXPECT_EQ(replay_boundaries(192, 64, true, 8), (ReplayBoundaries{{64, 128}, 2}));
  EXPECT_EQ(replay_boundaries(320, 64, true, 130), (ReplayBoundaries{{128, 192, 256}, 3}));
}

// What a retention keeps serves a hit at its multiples, at every replay and where a prompt left
// others; and of nothing else is anything promised.
TEST(ReachableMask, WhatIsKeptServesWhatItIsKeptFor) {
  std::mt19937 random(3);
  std::uint32_t thinned = 0;
  for (int round = 0; round < 2000; ++round) {
    const bool drafts = random() % 2 == 0;
    std::vector<HitGroup> groups{
        window_group(1 + static_cast<std::uint32_t>(random() % 100), drafts)};
    groups.push_back(groups[0]);
    groups[1].rule = HitRule::kPrefix;
    groups[1].draft = drafts && random() % 2 == 0;
    groups[1].family = 1;
    const std::uint32_t retention = 64 * static_cast<std::uint32_t>(random() % 4);
    const std::uint32_t prompt = 1 + static_cast<std::uint32_t>(random() % 900);
    const std::uint32_t replay = 1 + static_cast<std::uint32_t>(random() % 100);
    ReplayBoundaries boundaries = replay_boundaries(prompt, 64, drafts, replay);
    boundaries.add(64 * static_cast<std::uint32_t>(random() % 12));
    const ReachableMask mask(groups[0], kGrid, retention, boundaries);
    thinned += mask.all() ? 0 : 1;
    Presence present;
    present.reset(2);
    for (const StoreIndex index : {StoreIndex{0}, StoreIndex{1}}) {
      present.set_units(index, 1024 / 16);
      for (std::uint32_t chunk = 0; chunk < 1024 / 16; ++chunk) {
        if (raw(index) == 1 || mask.keeps(chunk)) present.mark(index, chunk);
      }
    }
    HitSearch search(groups, kGrid);
    const auto serves = [&](std::uint32_t tokens) {
      // Of a draft's window that reaches the first token the search aligns before it takes a block
      // off, and finds a step less.
      if (drafts && needed_chunks(groups[0], tokens + 16).first == 0) return;
      // A lookup sees one object more than a draft's hit needs.
      ASSERT_EQ(search.find_below(present, 0, tokens + (drafts ? 64 : 0), tokens), tokens)
          << "round " << round << ", retention " << retention << ", prompt " << prompt;
    };
    for (std::uint32_t i = 0; i < boundaries.count; ++i) serves(boundaries.tokens[i]);
    for (std::uint32_t at = retention; retention != 0 && at + 64 <= 1024; at += retention)
      serves(at);
  }
  EXPECT_GT(thinned, 500u);
}

}  // namespace
}  // namespace kvprism
