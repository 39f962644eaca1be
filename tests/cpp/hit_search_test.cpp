#include "kvprism/hit/hit_search.h"

#include <gtest/gtest.h>

#include <random>

#include "store_fixtures.h"

namespace kvprism {
namespace {

constexpr StoreIndex kFirst{0};
constexpr StoreIndex kSecond{1};

std::uint32_t next_family = 0;

HitGroup rule_group(HitRule rule, std::uint32_t chunk_tokens, std::uint32_t window = 0) {
  return {.rule = rule,
          .chunk_tokens = chunk_tokens,
          .window = window,
          .draft = false,
          .unit_tokens = chunk_tokens,
          .family = next_family++};
}
HitGroup prefix(std::uint32_t chunk_tokens) { return rule_group(HitRule::kPrefix, chunk_tokens); }
HitGroup window(std::uint32_t chunk_tokens, std::uint32_t tokens) {
  return rule_group(HitRule::kWindow, chunk_tokens, tokens);
}
HitGroup chunked(std::uint32_t chunk_tokens, std::uint32_t tokens) {
  return rule_group(HitRule::kChunk, chunk_tokens, tokens);
}
HitGroup state(std::uint32_t chunk_tokens) { return rule_group(HitRule::kLastState, chunk_tokens); }
HitGroup draft(HitGroup group) {
  group.draft = true;
  return group;
}
HitGroup fine(HitGroup group, std::uint32_t unit) {
  group.unit_tokens = unit;
  return group;
}

HitSearch coarse(std::vector<HitGroup> groups, std::uint32_t step) {
  return {std::move(groups), {.step = step, .unit = 1, .alignment = step}};
}

Presence presence(const std::vector<HitGroup>& groups, std::uint32_t tokens, bool all) {
  Presence present;
  present.reset(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const StoreIndex index{static_cast<std::uint32_t>(g)};
    present.set_units(index, tokens / groups[g].unit_tokens);
    for (std::uint32_t c = 0; all && c < present.units(index); ++c) present.mark(index, c);
  }
  return present;
}
Presence presence(const HitSearch& search, std::uint32_t tokens, bool all) {
  return presence(search.groups(), tokens, all);
}

TEST(HitSearch, PrefixStopsAtTheFirstHole) {
  HitSearch search = coarse({prefix(16)}, 16);
  Presence present = presence(search, 160, false);
  for (const std::uint32_t chunk : {0u, 1u, 2u, 4u, 5u}) present.mark(kFirst, chunk);
  EXPECT_EQ(search.find(present, 0, 160), 48u);
  EXPECT_EQ(search.find(present, 64, 160), 96u) << "what is local needs no object";
}

TEST(HitSearch, WindowNeedsOnlyItsReach) {
  // A window of 33 tokens reaches 32 back: two chunks of 16.
  HitSearch search = coarse({window(16, 33)}, 16);
  EXPECT_EQ(needed_chunks(search.groups()[0], 160), (ChunkRange{8, 10}));
  EXPECT_EQ(needed_chunks(window(16, 34), 160), (ChunkRange{7, 10}));
  EXPECT_EQ(needed_chunks(window(16, 1), 160), (ChunkRange{9, 10}))
      << "one object proves that the prefix was computed";
  EXPECT_EQ(needed_chunks(search.groups()[0], 16), (ChunkRange{0, 1})) << "shorter than the window";
  Presence present = presence(search, 160, false);
  present.mark(kFirst, 5);
  present.mark(kFirst, 6);
  present.mark(kFirst, 9);
  EXPECT_EQ(search.find(present, 0, 160), 112u);
}

TEST(HitSearch, AttentionChunkNeedsNothingBelowItsStart) {
  // Attention chunks of 64 tokens, blocks of 16: at 80 only block 4 is looked at, at 128 none.
  HitSearch search = coarse({chunked(16, 64)}, 16);
  EXPECT_EQ(needed_chunks(search.groups()[0], 80), (ChunkRange{4, 5}));
  EXPECT_TRUE(needed_chunks(search.groups()[0], 128).empty());
  Presence present = presence(search, 160, false);
  EXPECT_EQ(search.find(present, 0, 112), 64u) << "64 tokens need no block at all";
  EXPECT_EQ(search.tail_tokens(kFirst, present, 64), 0u) << "and no object ends there";
  present.mark(kFirst, 4);
  EXPECT_EQ(search.find(present, 0, 112), 80u);
  EXPECT_EQ(search.tail_tokens(kFirst, present, 80), 80u);
}

TEST(HitSearch, AttentionChunkThatIsNoMultipleOfABlockIsCheckedAgain) {
  // Attention chunks of 24 tokens, blocks of 16: 32 tokens need block 1, 16 tokens need block 0.
  HitSearch search = coarse({chunked(16, 24)}, 16);
  Presence present = presence(search, 32, false);
  EXPECT_EQ(search.find(present, 0, 32), 0u);
  present.mark(kFirst, 0);
  EXPECT_EQ(search.find(present, 0, 32), 16u);
}

TEST(HitSearch, LastStateIsOneObjectAtTheEnd) {
  HitSearch search = coarse({prefix(16), state(16)}, 16);
  Presence present = presence(search, 160, false);
  for (std::uint32_t chunk = 0; chunk < 10; ++chunk) present.mark(kFirst, chunk);
  EXPECT_EQ(search.find(present, 0, 160), 0u) << "no state, no hit";
  present.mark(kSecond, 3);
  EXPECT_EQ(search.find(present, 0, 160), 64u);
  EXPECT_EQ(load_chunks(search.groups()[1], 64, 0), (ChunkRange{3, 4}));
}

TEST(HitSearch, SharedPrefixIsWhatWholePrefixesHave) {
  // W-C19: whatever is left of windows and states, and without what a draft keeps back.
  HitSearch search = coarse({draft(prefix(16)), prefix(32), window(16, 17), state(32)}, 32);
  Presence present = presence(search, 160, false);
  EXPECT_EQ(search.shared_prefix(present, 0, 160), 0u);
  for (const std::uint32_t chunk : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 8u}) present.mark(kFirst, chunk);
  for (const std::uint32_t chunk : {0u, 1u, 2u, 3u}) present.mark(kSecond, chunk);
  EXPECT_EQ(search.shared_prefix(present, 0, 160), 96u) << "112 of one, 128 of the other";
  EXPECT_EQ(search.shared_prefix(present, 128, 160), 128u) << "what is local counts";
  EXPECT_EQ(search.shared_prefix(present, 0, 64), 64u);
  EXPECT_EQ(search.find(present, 0, 160), 0u);
  HitSearch windows = coarse({window(16, 17)}, 16);
  Presence all = presence(windows, 160, true);
  EXPECT_EQ(windows.shared_prefix(all, 0, 160), 0u) << "windows say nothing of what lies before";
}

TEST(HitSearch, LoadsNothingBelowTheLocalHit) {
  const HitGroup full = prefix(16);
  EXPECT_EQ(load_chunks(full, 160, 48), (ChunkRange{3, 10}));
  EXPECT_TRUE(load_chunks(full, 48, 48).empty());
  EXPECT_EQ(load_chunks(full, 52, 48), (ChunkRange{3, 4})) << "part of a chunk is a chunk";
  EXPECT_EQ(load_chunks(window(16, 49), 160, 144), (ChunkRange{9, 10}))
      << "the rest of the window is local";
  EXPECT_EQ(load_chunks(window(16, 49), 160, 48), (ChunkRange{7, 10}));
}

TEST(HitSearch, UnequalChunksMeetOnTheCommonGrid) {
  // R08: chunks of 16 and 32; one missing chunk of 16 at tokens 32..47 leaves 32.
  HitSearch search = coarse({prefix(16), prefix(32)}, 32);
  Presence present = presence(search, 64, false);
  present.mark(kFirst, 0);
  present.mark(kFirst, 1);
  present.mark(kFirst, 3);
  present.mark(kSecond, 0);
  present.mark(kSecond, 1);
  EXPECT_EQ(search.find(present, 0, 64), 32u);
}

TEST(HitSearch, HitsEndInsideABlockWhereThatIsAllowed) {
  // R22: blocks of 64 tokens, hashes of 16. Whole blocks 0 and 1, then 32 tokens of block 2.
  HitSearch search({fine(prefix(64), 16), fine(state(64), 16)},
                   {.step = 64, .unit = 16, .alignment = 16});
  Presence present = presence(search, 320, false);
  for (const std::uint32_t tokens : {64u, 128u, 160u}) present.mark(kFirst, tokens / 16 - 1);
  present.mark(kSecond, 160 / 16 - 1);
  EXPECT_EQ(search.find(present, 0, 320), 160u);
  EXPECT_EQ(search.tail_tokens(kFirst, present, 160), 160u);
  EXPECT_EQ(load_chunks(search.groups()[0], 160, 0), (ChunkRange{0, 3}));
  EXPECT_EQ(load_chunks(search.groups()[1], 160, 0), (ChunkRange{2, 3}));

  // A state at 144 tokens: the object of 160 holds those of 144.
  Presence shorter = presence(search, 320, false);
  for (const std::uint32_t tokens : {64u, 128u, 160u}) shorter.mark(kFirst, tokens / 16 - 1);
  shorter.mark(kSecond, 144 / 16 - 1);
  EXPECT_EQ(search.find(shorter, 0, 320), 144u);
  EXPECT_EQ(search.tail_tokens(kFirst, shorter, 144), 160u);
  EXPECT_EQ(search.tail_tokens(kSecond, shorter, 144), 144u);
}

TEST(HitSearch, ADraftNeedsOneMoreObject) {
  HitSearch search = coarse({draft(prefix(16)), state(16)}, 16);
  Presence present = presence(search, 160, true);
  EXPECT_EQ(search.find(present, 0, 128), 128u) << "the object of 144 tokens stands behind it";
  EXPECT_EQ(search.find(present, 0, 160), 144u);
  EXPECT_EQ(search.find_loaded(present, 0, 160), 160u) << "a load took it off already";
  HitSearch windows = coarse({draft(window(16, 33)), prefix(16)}, 16);
  Presence gap = presence(windows, 160, true);
  gap.set_units(kFirst, 10);
  for (const std::uint32_t chunk : {2u, 3u, 4u, 7u, 8u}) gap.mark(kFirst, chunk);
  EXPECT_EQ(windows.find(gap, 0, 160), 64u) << "two chunks and one more behind";
}

TEST(HitSearch, DraftsThatEndOnAHashUnitStillHit) {
  // R23: pages of 1072 tokens in units of 67; objects at whole pages and at the last unit.
  HitSearch search({draft(fine(prefix(1072), 67)), fine(state(1072), 67)},
                   {.step = 1072, .unit = 67, .alignment = 67});
  for (const std::uint32_t prompt : {2144u, 1072u}) {
    Presence present = presence(search, prompt, false);
    for (std::uint32_t tokens = 1072; tokens <= prompt; tokens += 1072) {
      present.mark(kFirst, tokens / 67 - 1);
    }
    present.mark(kFirst, (prompt - 67) / 67 - 1);
    present.mark(kSecond, (prompt - 67) / 67 - 1);
    const std::uint32_t hit = search.find_below(present, 0, prompt, prompt - 1);
    EXPECT_EQ(hit, prompt - 67) << prompt;
  }
}

TEST(HitSearch, GroupsOfOneFamilyAreSearchedAsOne) {
  HitGroup first = window(16, 33);
  HitGroup second = first;
  second.draft = true;
  HitSearch search = coarse({first, second, prefix(16)}, 16);
  Presence present = presence(search, 160, true);
  EXPECT_EQ(search.find(present, 0, 160), 144u) << "one draft makes the family one";
}

TEST(HitSearch, AnAttentionChunkStandsBesideOtherBlocksAndMayBeADraft) {
  // Chunks of 32 tokens in blocks of 16, beside blocks of 32.
  HitGroup chunked = rule_group(HitRule::kChunk, 16, 32);
  const auto search_of = [&](bool drafted) {
    chunked.draft = drafted;
    return coarse({prefix(32), chunked}, 32);
  };
  HitSearch search = search_of(false);
  Presence present = presence(search, 160, true);
  present.set_units(kSecond, 10);
  for (const std::uint32_t chunk : {4u, 6u, 8u, 9u}) present.mark(kSecond, chunk);
  EXPECT_EQ(search.find(present, 0, 160), 160u) << "a hit at its end needs nothing of a chunk";
  EXPECT_EQ(search.find(present, 0, 144), 128u);

  HitSearch drafts = search_of(true);
  EXPECT_EQ(drafts.find(present, 0, 160), 128u) << "block 8 proves what lies before it";
  present.set_units(kSecond, 10);
  for (const std::uint32_t chunk : {4u, 6u}) present.mark(kSecond, chunk);
  EXPECT_EQ(drafts.find(present, 0, 128), 96u) << "behind 128 tokens there is no proof";
}

// The definition, word for word: the largest grid point at which every group has everything it
// needs.
std::uint32_t by_definition(const std::vector<HitGroup>& groups, const Presence& present,
                            std::uint32_t local, std::uint32_t max, std::uint32_t alignment) {
  for (std::uint32_t tokens = max / alignment * alignment; tokens > local; tokens -= alignment) {
    bool usable = true;
    for (std::size_t g = 0; g < groups.size() && usable; ++g) {
      const HitGroup& group = groups[g];
      const std::uint32_t size = group.chunk_tokens;
      for (std::uint32_t position = 0; position < tokens && usable; ++position) {
        bool wanted = true;
        if (group.rule == HitRule::kWindow) {
          wanted = position + group.window > tokens || position == tokens - 1;
        }
        if (group.rule == HitRule::kChunk) {
          wanted = position / size >= tokens / group.window * group.window / size;
        }
        if (group.rule == HitRule::kLastState) wanted = position / size == tokens / size - 1;
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
      const HitRule rules[] = {HitRule::kPrefix, HitRule::kWindow, HitRule::kLastState,
                               HitRule::kChunk};
      groups.push_back(rule_group(rules[random() % 4], 2u << (random() % 3),
                                  1 + static_cast<std::uint32_t>(random() % 30)));
    }
    const std::uint32_t max = static_cast<std::uint32_t>(random() % 100);
    const std::uint32_t local = static_cast<std::uint32_t>(random() % 4) * alignment;
    Presence present = presence(groups, 104, false);
    const std::uint32_t density = 50 + static_cast<std::uint32_t>(random() % 50);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const StoreIndex index{static_cast<std::uint32_t>(g)};
      for (std::uint32_t c = 0; c < present.units(index); ++c) {
        if (random() % 100 < density) present.mark(index, c);
      }
    }
    HitSearch search = coarse(groups, alignment);
    const std::uint32_t hit = search.find(present, local, max);
    ASSERT_EQ(hit, std::max(local, by_definition(groups, present, local, max, alignment)))
        << "round " << round;
    if (hit > local) ++hits;
  }
  EXPECT_GT(hits, 4000u) << "the comparison must see hits";
}

// Random groups on a grid of 8 with hashes of 4, and a random store.
struct Drawn {
  HitSearch search;
  Presence present;
  std::uint32_t local;
  std::uint32_t max;
};
Drawn draw(std::mt19937& random, bool drafts) {
  const bool partial = random() % 3 == 0;
  std::vector<HitGroup> groups;
  for (std::uint32_t g = 0, n = 1 + random() % 3; g < n; ++g) {
    const HitRule rules[] = {HitRule::kPrefix, HitRule::kLastState, HitRule::kWindow,
                             HitRule::kChunk};
    const HitRule rule = rules[random() % 4];
    // Hits end inside blocks only where every group can do that, or has blocks of one hash.
    const bool whole = rule == HitRule::kWindow || rule == HitRule::kChunk;
    const std::uint32_t size = partial ? (whole ? 4u : 8u) : 4u << (random() % 2);
    HitGroup group = rule_group(rule, size, 1 + static_cast<std::uint32_t>(random() % 30));
    if (partial) group.unit_tokens = 4;
    // Groups of equal specs are searched as one.
    if (g > 0 && random() % 4 == 0) group = groups[0];
    group.draft = drafts && random() % 2 == 0;
    groups.push_back(group);
  }
  Drawn drawn{HitSearch(groups, {.step = 8, .unit = 4, .alignment = partial ? 4u : 8u}),
              presence(groups, 104, false), static_cast<std::uint32_t>(random() % 4) * 8,
              static_cast<std::uint32_t>(random() % 105)};
  const std::uint32_t density = 50 + static_cast<std::uint32_t>(random() % 50);
  for (const StoreIndex index : indices<StoreIndex>(groups.size())) {
    for (std::uint32_t unit = 0; unit < drawn.present.units(index); ++unit) {
      if (random() % 100 < density) drawn.present.mark(index, unit);
    }
  }
  return drawn;
}

TEST(HitSearch, WhatIsPlannedExistsCoversTheHitAndStaysValid) {
  std::mt19937 random(11);
  std::uint32_t hits = 0;
  for (int round = 0; round < 20000; ++round) {
    Drawn drawn = draw(random, true);
    const std::uint32_t hit = drawn.search.find(drawn.present, drawn.local, drawn.max);
    ASSERT_GE(hit, drawn.local);
    if (hit == drawn.local) continue;
    ++hits;
    // Only what the load fetches.
    Presence fetched = presence(drawn.search, 104, false);
    for (const StoreIndex index : indices<StoreIndex>(drawn.search.groups().size())) {
      const HitGroup& group = drawn.search.groups()[raw(index)];
      const std::uint32_t units = group.chunk_tokens / group.unit_tokens;
      const ChunkRange range = load_chunks(group, hit, drawn.local);
      for (std::uint32_t chunk = range.first; chunk < range.end; ++chunk) {
        const std::uint32_t tokens = (chunk + 1) * group.chunk_tokens <= hit
                                         ? (chunk + 1) * group.chunk_tokens
                                         : drawn.search.tail_tokens(index, drawn.present, hit);
        ASSERT_TRUE(drawn.present.has(index, tokens / group.unit_tokens - 1))
            << "round " << round << ": a planned object is not there";
        ASSERT_LE(tokens, (chunk + 1) * group.chunk_tokens);
        ASSERT_GE(tokens, std::min(hit, (chunk + 1) * group.chunk_tokens))
            << "an object covers less than the hit needs";
        // An object holds every shorter prefix of its chunk too.
        if (group.rule == HitRule::kPrefix) {
          for (std::uint32_t unit = chunk * units; unit < tokens / group.unit_tokens; ++unit) {
            fetched.mark(index, unit);
          }
        } else {
          fetched.mark(index, tokens / group.unit_tokens - 1);
        }
      }
    }
    ASSERT_EQ(drawn.search.find_loaded(fetched, drawn.local, hit), hit) << "round " << round;
  }
  EXPECT_GT(hits, 4000u);
}

TEST(HitSearch, MoreObjectsNeverShortenAHit) {
  std::mt19937 random(13);
  for (const bool drafts : {false, true}) {
    std::uint32_t longer = 0;
    for (int round = 0; round < 20000; ++round) {
      Drawn drawn = draw(random, drafts);
      const std::uint32_t before = drawn.search.find(drawn.present, drawn.local, drawn.max);
      const StoreIndex index{static_cast<std::uint32_t>(random() % drawn.search.groups().size())};
      drawn.present.mark(index, static_cast<std::uint32_t>(random() % drawn.present.units(index)));
      const std::uint32_t after = drawn.search.find(drawn.present, drawn.local, drawn.max);
      ASSERT_GE(after, before) << "round " << round << ", drafts " << drafts;
      if (after > before) ++longer;
      ASSERT_GE(drawn.search.find(drawn.present, drawn.local + 8, drawn.max), after)
          << "round " << round << ": a longer local hit";
    }
    EXPECT_GT(longer, 200u);
  }
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
  EXPECT_EQ(groups[2].unit_tokens, 16u);
  EXPECT_NE(groups[0].family, groups[2].family);
}

}  // namespace
}  // namespace kvprism
