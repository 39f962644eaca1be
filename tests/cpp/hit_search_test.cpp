#include "kvprism/hit/hit_search.h"

#include <gtest/gtest.h>

#include <random>

#include "store_fixtures.h"

namespace kvprism {
namespace {

constexpr StoreIndex kFirst{0};
constexpr StoreIndex kSecond{1};

Presence presence(const std::vector<HitGroup>& groups, std::uint32_t tokens, bool all) {
  Presence present;
  present.reset(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const StoreIndex index{static_cast<std::uint32_t>(g)};
    present.set_chunks(index, tokens / groups[g].chunk_tokens);
    for (std::uint32_t c = 0; all && c < present.chunks(index); ++c) present.mark(index, c);
  }
  return present;
}

TEST(HitSearch, PrefixStopsAtTheFirstHole) {
  const std::vector<HitGroup> groups{{HitRule::kPrefix, 16, 0, false}};
  Presence present = presence(groups, 160, false);
  for (const std::uint32_t chunk : {0u, 1u, 2u, 4u, 5u}) present.mark(kFirst, chunk);
  EXPECT_EQ(find_hit(groups, present, 0, 160, 16), 48u);
  EXPECT_EQ(find_hit(groups, present, 64, 160, 16), 96u) << "what is local needs no object";
}

TEST(HitSearch, WindowNeedsOnlyItsReach) {
  // A window of 33 tokens reaches 32 back: two chunks of 16.
  const std::vector<HitGroup> groups{{HitRule::kWindow, 16, 33, false}};
  EXPECT_EQ(needed_chunks(groups[0], 160), (ChunkRange{8, 10}));
  EXPECT_EQ(needed_chunks({HitRule::kWindow, 16, 34, false}, 160), (ChunkRange{7, 10}));
  EXPECT_EQ(needed_chunks({HitRule::kWindow, 16, 1, false}, 160).size(), 0u);
  EXPECT_EQ(needed_chunks(groups[0], 16), (ChunkRange{0, 1})) << "shorter than the window";
  Presence present = presence(groups, 160, false);
  present.mark(kFirst, 5);
  present.mark(kFirst, 6);
  present.mark(kFirst, 9);
  EXPECT_EQ(find_hit(groups, present, 0, 160, 16), 112u);
}

TEST(HitSearch, LastStateIsOneObjectAtTheEnd) {
  const std::vector<HitGroup> groups{{HitRule::kPrefix, 16, 0, false},
                                     {HitRule::kLastState, 16, 0, false}};
  Presence present = presence(groups, 160, false);
  for (std::uint32_t chunk = 0; chunk < 10; ++chunk) present.mark(kFirst, chunk);
  EXPECT_EQ(find_hit(groups, present, 0, 160, 16), 0u) << "no state, no hit";
  present.mark(kSecond, 3);
  EXPECT_EQ(find_hit(groups, present, 0, 160, 16), 64u);
  EXPECT_EQ(load_chunks(groups[1], 64, 0), (ChunkRange{3, 4}));
}

TEST(HitSearch, LoadsNothingBelowTheLocalHit) {
  const HitGroup full{HitRule::kPrefix, 16, 0, false};
  EXPECT_EQ(load_chunks(full, 160, 48), (ChunkRange{3, 10}));
  EXPECT_TRUE(load_chunks(full, 48, 48).empty());
  const HitGroup window{HitRule::kWindow, 16, 49, false};
  EXPECT_EQ(load_chunks(window, 160, 144), (ChunkRange{9, 10}))
      << "the rest of the window is local";
  EXPECT_EQ(load_chunks(window, 160, 48), (ChunkRange{7, 10}));
}

TEST(HitSearch, UnequalChunksMeetOnTheCommonGrid) {
  // R08: chunks of 16 and 32; one missing chunk of 16 at tokens 32..47 leaves 32.
  const std::vector<HitGroup> groups{{HitRule::kPrefix, 16, 0, false},
                                     {HitRule::kPrefix, 32, 0, false}};
  Presence present = presence(groups, 64, false);
  present.mark(kFirst, 0);
  present.mark(kFirst, 1);
  present.mark(kFirst, 3);
  present.mark(kSecond, 0);
  present.mark(kSecond, 1);
  EXPECT_EQ(find_hit(groups, present, 0, 64, 32), 32u);
}

// The definition, word for word: the largest grid point at which every group has everything it
// needs.
std::uint32_t by_definition(const std::vector<HitGroup>& groups, const Presence& present,
                            std::uint32_t local, std::uint32_t max, std::uint32_t alignment) {
  for (std::uint32_t tokens = max / alignment * alignment; tokens > local; tokens -= alignment) {
    bool usable = true;
    for (std::size_t g = 0; g < groups.size() && usable; ++g) {
      const std::uint32_t size = groups[g].chunk_tokens;
      for (std::uint32_t position = 0; position < tokens && usable; ++position) {
        bool wanted = true;
        if (groups[g].rule == HitRule::kWindow) wanted = position + groups[g].window > tokens;
        if (groups[g].rule == HitRule::kLastState) wanted = position / size == tokens / size - 1;
        const std::uint32_t chunk = position / size;
        const bool here = (chunk + 1) * size <= local ||
                          present.has(StoreIndex{static_cast<std::uint32_t>(g)}, chunk);
        usable = !wanted || here;
      }
    }
    if (usable) return tokens;
  }
  return local;
}

TEST(HitSearch, AgreesWithItsDefinition) {
  std::mt19937 random(7);
  std::uint32_t hits = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<HitGroup> groups;
    const std::uint32_t alignment = 8;
    for (std::uint32_t g = 0, n = 1 + random() % 3; g < n; ++g) {
      const HitRule rules[] = {HitRule::kPrefix, HitRule::kWindow, HitRule::kLastState};
      groups.push_back({rules[random() % 3], 2u << (random() % 3),
                        1 + static_cast<std::uint32_t>(random() % 30), false});
    }
    const std::uint32_t max = static_cast<std::uint32_t>(random() % 100);
    const std::uint32_t local = static_cast<std::uint32_t>(random() % 4) * alignment;
    Presence present = presence(groups, 104, false);
    const std::uint32_t density = 50 + static_cast<std::uint32_t>(random() % 50);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const StoreIndex index{static_cast<std::uint32_t>(g)};
      for (std::uint32_t c = 0; c < present.chunks(index); ++c) {
        if (random() % 100 < density) present.mark(index, c);
      }
    }
    const std::uint32_t hit = find_hit(groups, present, local, max, alignment);
    ASSERT_EQ(hit, std::max(local, by_definition(groups, present, local, max, alignment)))
        << "round " << round;
    if (hit > local) ++hits;
  }
  EXPECT_GT(hits, 4000u) << "the comparison must see hits";
}

TEST(HitSearch, GroupsOfAProjectionComeInStoreOrder) {
  const auto projection =
      test::make_projection({test::ring_group(8), test::full_group(16), test::mamba_group(32),
                             test::window_group(16, 20)});
  const std::vector<HitGroup> groups = hit_groups(*projection);
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].rule, HitRule::kPrefix);
  EXPECT_EQ(groups[1].rule, HitRule::kLastState);
  EXPECT_EQ(groups[1].chunk_tokens, 32u);
  EXPECT_EQ(groups[2].window, 20u);
}

}  // namespace
}  // namespace kvprism
