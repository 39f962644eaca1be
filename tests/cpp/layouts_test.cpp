// Every layout against bytes: an oracle that knows nothing but the layout's letters says where each
// element of each block lies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/layout/segment_map.h"

namespace kvprism {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::uint64_t kBase = 0x40000000;
std::byte* at(std::uint64_t address) {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

GroupConfig attention(std::vector<std::string> layers, std::uint32_t heads, std::uint32_t positions,
                      std::uint32_t content) {
  GroupConfig group;
  group.spec.kind = "full_attention";
  group.spec.block_size = positions;
  group.spec.payload = AttentionPayload{
      .num_kv_heads = heads, .head_size = content, .head_size_v = 0, .dtype = DType::kOpaque};
  group.layers = std::move(layers);
  return group;
}

GroupConfig state(std::vector<std::string> layers, std::uint32_t bytes) {
  GroupConfig group;
  group.spec.kind = "mamba";
  group.spec.block_size = 16;
  group.spec.payload = StatePayload{{{bytes}}, {DType::kInt8}, "align"};
  group.layers = std::move(layers);
  return group;
}

std::shared_ptr<const Projection> project(std::vector<GroupConfig> groups, std::uint32_t num_blocks,
                                          std::string layout) {
  CacheConfig config;
  config.num_blocks = num_blocks;
  config.kv_layout = std::move(layout);
  config.groups = std::move(groups);
  return Projection::make(config, SpecRegistry::builtin());
}

std::vector<Segment> segments(const SegmentMap& map, std::uint32_t group, std::int32_t block) {
  std::vector<Segment> out;
  map.append_segments(GroupId{group}, BlockId{block}, out);
  return out;
}

std::vector<std::uint64_t> bytes_of(const std::vector<Segment>& segments) {
  std::vector<std::uint64_t> bytes;
  for (const Segment& segment : segments) {
    for (std::size_t i = 0; i < segment.length; ++i)
      bytes.push_back(static_cast<std::uint64_t>(segment.base - at(kBase)) + i);
  }
  return bytes;
}

std::vector<std::string> paths_of(std::shared_ptr<const Projection> projection,
                                  std::vector<CacheTensor> tensors) {
  std::vector<std::string> paths;
  try {
    SegmentMap::make(std::move(projection), std::move(tensors));
  } catch (const Error& error) {
    for (const Problem& problem : error.problems()) paths.push_back(problem.path);
  }
  return paths;
}

CacheTensor tensor(std::vector<std::string> layers, std::uint64_t bytes, std::uint64_t layer_stride,
                   std::uint64_t block_stride, std::uint64_t offset = 0) {
  CacheTensor made;
  made.base = at(kBase);
  made.bytes = bytes;
  made.layers = std::move(layers);
  made.layer_stride = layer_stride;
  made.block_stride = block_stride;
  made.offset = offset;
  return made;
}

// An array in memory: extents and strides by letter. K is the kernel block inside a block; N then
// counts the positions inside a kernel block.
struct Oracle {
  std::map<char, std::uint64_t> extent;
  std::map<char, std::uint64_t> stride;

  // Innermost last. `padding` bytes follow what `after` and everything inside it hold.
  Oracle(const std::string& order, std::map<char, std::uint64_t> extents, char after,
         std::uint64_t padding)
      : extent(std::move(extents)) {
    std::uint64_t step = 1;
    for (auto letter = order.rbegin(); letter != order.rend(); ++letter) {
      stride[*letter] = step;
      step *= extent[*letter];
      if (*letter == after) step += padding;
    }
  }

  // The content of a block, byte by byte, as a name of four letters puts it.
  std::vector<std::uint64_t> content(const std::string& name, std::uint64_t block,
                                     std::uint64_t offset) const {
    std::vector<std::uint64_t> addresses{offset + block * stride.at('B')};
    for (const char letter : name) {
      std::vector<std::uint64_t> next;
      const std::uint64_t inner = extent.at(letter);
      const std::uint64_t outer = letter == 'N' ? extent.at('K') : 1;
      for (const std::uint64_t address : addresses) {
        for (std::uint64_t k = 0; k < outer; ++k) {
          for (std::uint64_t i = 0; i < inner; ++i)
            next.push_back(address + i * stride.at(letter) +
                           (letter == 'N' ? k * stride.at('K') : 0));
        }
      }
      addresses = std::move(next);
    }
    return addresses;
  }
};

std::string without_blocks(std::string layout) {
  layout.erase(layout.find('B'), 1);
  return layout;
}

struct Case {
  std::string layout;
  std::uint32_t heads;
  std::uint32_t positions;
  std::uint32_t content;
  std::uint32_t kernels;
  std::uint32_t num_blocks;
  std::uint64_t padding;  // bytes after a page, or after a row where blocks are outermost
  std::uint64_t tail;     // bytes after everything
  std::vector<std::uint32_t> layers;  // of each group
};

std::string text_of(const Case& c) {
  std::string text = c.layout + " heads " + std::to_string(c.heads) + " positions " +
                     std::to_string(c.positions) + " content " + std::to_string(c.content) +
                     " kernels " + std::to_string(c.kernels) + " padding " +
                     std::to_string(c.padding) + " layers";
  for (const std::uint32_t layers : c.layers) text += " " + std::to_string(layers);
  return text;
}

// Groups overlay one allocation from byte 0, each with tensors of its own.
void check(const Case& c) {
  SCOPED_TRACE(text_of(c));
  const bool rows = c.layout[0] == 'B';
  std::string order = c.layout;
  order.insert(order.find('B') + 1, "K");
  // Where a block holds several layers, its kernel blocks lie inside each page.
  if (rows && c.layout != "BHLNC") {
    order = c.layout;
    order.insert(order.find('L') + 1, "K");
  }
  const std::uint64_t page = std::uint64_t{c.heads} * c.positions * c.content;
  const std::uint32_t most = *std::max_element(c.layers.begin(), c.layers.end());
  std::vector<GroupConfig> groups;
  std::vector<CacheTensor> tensors;
  std::vector<Oracle> oracles;
  for (std::size_t g = 0; g < c.layers.size(); ++g) {
    std::vector<std::string> names;
    for (std::uint32_t l = 0; l < c.layers[g]; ++l)
      names.push_back(std::to_string(g) + "." + std::to_string(l));
    groups.push_back(attention(names, c.heads, c.positions, c.content));
    const std::uint64_t padding = rows ? (most - c.layers[g]) * page + c.padding : c.padding;
    oracles.emplace_back(order,
                         std::map<char, std::uint64_t>{{'L', c.layers[g]},
                                                       {'B', c.num_blocks},
                                                       {'H', c.heads},
                                                       {'N', c.positions / c.kernels},
                                                       {'K', c.kernels},
                                                       {'C', c.content}},
                         // What stands to the right of the blocks, or of the kernel blocks in them.
                         order[order.find(rows ? 'B' : 'K') + 1], padding);
    const Oracle& oracle = oracles.back();
    const std::uint64_t bytes = most * (page + c.padding) * c.num_blocks + c.tail;
    // A single layer needs no stride.
    const std::uint64_t layer_stride = c.layers[g] == 1 ? 0 : oracle.stride.at('L');
    tensors.push_back(tensor(names, bytes, layer_stride, oracle.stride.at('B')));
    tensors.back().kernel_block_size = c.kernels == 1 ? 0 : c.positions / c.kernels;
  }
  const auto map = SegmentMap::make(project(groups, c.num_blocks, c.layout), tensors);
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    std::set<std::uint64_t> seen;
    for (std::int32_t block = 1; block < static_cast<std::int32_t>(c.num_blocks); ++block) {
      const std::vector<Segment> found = segments(*map, g, block);
      const std::vector<std::uint64_t> expected =
          oracles[g].content(without_blocks(c.layout), static_cast<std::uint64_t>(block), 0);
      ASSERT_EQ(bytes_of(found), expected) << "group " << g << " block " << block;
      EXPECT_EQ(map->object_bytes(GroupId{g}), expected.size());
      EXPECT_EQ(map->segments_per_block(StoreIndex{g}), found.size());
      for (const std::uint64_t byte : expected) EXPECT_TRUE(seen.insert(byte).second);
      for (std::size_t i = 1; i < found.size(); ++i)
        EXPECT_NE(found[i - 1].base + found[i - 1].length, found[i].base) << "not merged";
    }
  }
}

constexpr const char* kLayouts[] = {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"};

TEST(Layouts, FollowTheirLettersByteByByte) {
  std::mt19937 random(20260101);
  const auto any = [&](std::uint32_t from, std::uint32_t to) {
    return from + static_cast<std::uint32_t>(random() % (to - from + 1));
  };
  int split = 0;
  for (int round = 0; round < 600; ++round) {
    Case c;
    c.layout = kLayouts[round % 6];
    const bool rows = c.layout[0] == 'B';
    c.heads = any(1, 4);
    c.positions = 2 * any(1, 4);
    c.content = any(1, 5);
    c.num_blocks = any(2, 6);
    c.kernels = any(0, 2) == 0 ? 2 : 1;
    for (std::uint32_t g = any(1, 3); g > 0; --g) c.layers.push_back(any(1, 3));
    if (c.layout == "BHLNC" && c.kernels > 1) c.layers = {1};
    c.padding = rows && any(0, 1) == 1 ? any(1, 9) : 0;
    c.tail = any(0, 1) == 1 ? any(1, 4096) : 0;
    split += c.kernels > 1;
    check(c);
  }
  EXPECT_GT(split, 100);
}

// Layers of three, heads of two: what a reference implementation got six times too long.
TEST(Layouts, BlocksHeadsLayersAreOneRunABlock) {
  const std::uint64_t row = 3 * 2 * 8 * 4;
  const auto map = SegmentMap::make(project({attention({"a", "b", "c"}, 2, 8, 4)}, 5, "BHLNC"),
                                    {tensor({"a", "b", "c"}, 5 * row, 32, row)});
  EXPECT_EQ(map->object_bytes(StoreIndex{0}), row);
  EXPECT_THAT(segments(*map, 0, 4), ElementsAre(Segment{at(kBase + 4 * row), row}));
  std::vector<Segment> out;
  const BlockId blocks[] = {BlockId{1}, BlockId{2}, BlockId{4}};
  map->append_blocks(GroupId{0}, blocks, out);
  EXPECT_THAT(out,
              ElementsAre(Segment{at(kBase + row), 2 * row}, Segment{at(kBase + 4 * row), row}));
}

// An allocation that is rounded up to 4 KiB says nothing about its blocks.
TEST(Layouts, AnAllocationsTailChangesNothing) {
  for (const char* const layout : {"BLHNC", "BLNHC"}) {
    const std::uint64_t row = 2 * 2 * 8 * 5;
    const std::uint64_t bytes = (7 * row + 4095) / 4096 * 4096;
    ASSERT_NE(bytes, 7 * row);
    const auto map = SegmentMap::make(project({attention({"a", "b"}, 2, 8, 5)}, 7, layout),
                                      {tensor({"a", "b"}, bytes, row / 2, row)});
    EXPECT_THAT(segments(*map, 0, 6), ElementsAre(Segment{at(kBase + 6 * row), row}));
    EXPECT_THAT(map->regions(), ElementsAre(Region{at(kBase), bytes, -1}));
  }
}

// Three groups over one pool of interleaved rows: a full one, a shorter one and a state.
TEST(Layouts, GroupsOfOnePoolShareRows) {
  const std::uint64_t row = 200;
  const auto map = SegmentMap::make(
      project({attention({"a", "b"}, 2, 4, 10), attention({"c"}, 2, 4, 10), state({"m", "n"}, 90)},
              6, "BLNHC"),
      {tensor({"a", "b"}, 6 * row, 80, row), tensor({"c"}, 6 * row, 80, row),
       tensor({"m", "n"}, 6 * row, 90, row)});
  EXPECT_THAT(segments(*map, 0, 2), ElementsAre(Segment{at(kBase + 2 * row), 160}));
  EXPECT_THAT(segments(*map, 1, 2), ElementsAre(Segment{at(kBase + 2 * row), 80}));
  EXPECT_THAT(segments(*map, 2, 2), ElementsAre(Segment{at(kBase + 2 * row), 180}));
}

// Pages of different sizes inside a wrapper: each layer's own, side by side in a row.
TEST(Layouts, AWrapperPlacesEachLayersOwnPage) {
  GroupConfig group;
  group.spec.kind = "uniform";
  group.members = {{attention({}, 2, 4, 10).spec, {"a", "c"}},
                   {attention({}, 1, 4, 6).spec, {"b"}}};
  group.layers = {"a", "b", "c"};
  const std::uint64_t row = 80 + 80 + 24 + 16;
  const auto map = SegmentMap::make(
      project({group}, 4, "BLHNC"),
      {tensor({"a", "c"}, 4 * row, 80, row), tensor({"b"}, 4 * row, 24, row, 160)});
  EXPECT_EQ(map->object_bytes(StoreIndex{0}), 184U);
  EXPECT_THAT(segments(*map, 0, 1),
              ElementsAre(Segment{at(kBase + row), 80}, Segment{at(kBase + row + 160), 24},
                          Segment{at(kBase + row + 80), 80}));
  EXPECT_THAT(paths_of(project({group}, 4, "BLHNC"), {tensor({"a", "c"}, 4 * row, 80, row),
                                                      tensor({"b"}, 4 * row, 24, row, 150)}),
              ElementsAre("tensors"));
}

// R28: what a kernel calls a block is a part of ours. Where the name puts heads first, a head is
// collected from all of them, so that an object's bytes do not depend on the kernel.
TEST(Layouts, KernelBlocksDoNotChangeAnObject) {
  CacheTensor split = tensor({"a"}, 4 * 48, 0, 48);
  split.kernel_block_size = 2;
  const auto map = SegmentMap::make(project({attention({"a"}, 2, 4, 6)}, 4, "LBHNC"), {split});
  EXPECT_THAT(segments(*map, 0, 1),
              ElementsAre(Segment{at(kBase + 48), 12}, Segment{at(kBase + 72), 12},
                          Segment{at(kBase + 60), 12}, Segment{at(kBase + 84), 12}));
  const auto whole = SegmentMap::make(project({attention({"a"}, 2, 4, 6)}, 4, "LBHNC"),
                                      {tensor({"a"}, 4 * 48, 0, 48)});
  EXPECT_EQ(map->object_bytes(StoreIndex{0}), whole->object_bytes(StoreIndex{0}));
  EXPECT_EQ(map->layout_fingerprint(), whole->layout_fingerprint());
  for (const char* const layout : {"LBNHC", "LHBNC", "BLNHC"}) {
    CacheTensor same = tensor({"a"}, 4 * 48, 0, std::string(layout) == "LHBNC" ? 24 : 48);
    same.kernel_block_size = 2;
    const auto one = SegmentMap::make(project({attention({"a"}, 2, 4, 6)}, 4, layout), {same});
    EXPECT_EQ(segments(*one, 0, 1).size(), std::string(layout) == "LHBNC" ? 2U : 1U) << layout;
  }
}

TEST(Layouts, KernelBlocksMustDivideADensePage) {
  const auto projection = project({attention({"a"}, 2, 4, 6)}, 4, "LBHNC");
  CacheTensor bad = tensor({"a"}, 4 * 48, 0, 48);
  bad.kernel_block_size = 3;
  EXPECT_THAT(paths_of(projection, {bad}), ElementsAre("tensors[0].kernel_block_size"));
  GroupConfig padded = attention({"a"}, 2, 4, 6);
  padded.spec.page_size_padded = 64;
  CacheTensor of_padded = tensor({"a"}, 4 * 64, 0, 64);
  of_padded.kernel_block_size = 2;
  EXPECT_THAT(paths_of(project({padded}, 4, "LBHNC"), {of_padded}),
              ElementsAre("tensors[0].kernel_block_size"));
  CacheTensor several = tensor({"a", "b"}, 4 * 96, 24, 96);
  several.kernel_block_size = 2;
  EXPECT_THAT(paths_of(project({attention({"a", "b"}, 2, 4, 6)}, 4, "BHLNC"), {several}),
              ElementsAre("tensors[0].kernel_block_size"));
}

// Padding lies behind a page's content; a layout that takes pages apart has no place for it.
TEST(Layouts, PaddedPagesNeedHeadsInside) {
  GroupConfig padded = attention({"a", "b"}, 2, 4, 6);
  padded.spec.page_size_padded = 64;
  for (const char* const layout : {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}) {
    const bool rows = layout[0] == 'B';
    const auto map =
        SegmentMap::make(project({padded}, 4, layout),
                         {tensor({"a", "b"}, 4 * 128, rows ? 64 : 256, rows ? 128 : 64)});
    EXPECT_EQ(map->object_bytes(StoreIndex{0}), 2U * 2 * 4 * 6) << layout;
  }
  EXPECT_THAT(paths_of(project({padded}, 4, "LHBNC"), {tensor({"a", "b"}, 4 * 128, 256, 32)}),
              ElementsAre("tensors[0].layers[0]"));
  GroupConfig one_head = attention({"a", "b"}, 1, 8, 6);
  one_head.spec.page_size_padded = 64;
  EXPECT_EQ(SegmentMap::make(project({one_head}, 4, "BHLNC"), {tensor({"a", "b"}, 512, 64, 128)})
                ->object_bytes(StoreIndex{0}),
            2U * 8 * 6);
}

// The name in the config is part of every key, so strides that mean another one are refused.
TEST(Layouts, StridesOfAnotherLayoutAreRefused) {
  const std::uint64_t page = 2 * 4 * 6;
  struct Strides {
    std::uint64_t layer;
    std::uint64_t block;
    std::uint64_t head;
  };
  const std::map<std::string, Strides> of{
      {"LBHNC", {4 * page, page, 24}}, {"LBNHC", {4 * page, page, 6}},
      {"LHBNC", {4 * page, 24, 96}},   {"BLHNC", {page, 3 * page, 24}},
      {"BLNHC", {page, 3 * page, 6}},  {"BHLNC", {24, 3 * page, 72}}};
  for (const auto& [name, strides] : of) {
    for (const char* const layout : kLayouts) {
      CacheTensor made = tensor({"a", "b", "c"}, 12 * page, strides.layer, strides.block);
      made.head_stride = strides.head;
      const auto projection = project({attention({"a", "b", "c"}, 2, 4, 6)}, 4, layout);
      EXPECT_EQ(paths_of(projection, {made}).empty(), name == layout) << name << " as " << layout;
    }
  }
}

TEST(Layouts, ALayoutThatSplitsHeadsStaysInsideItsAllocation) {
  const std::uint64_t page = 2 * 4 * 6;
  for (const char* const layout : {"LHBNC", "BHLNC"}) {
    const bool rows = layout[0] == 'B';
    const auto made = [&](std::uint64_t bytes, std::uint64_t head_stride) {
      CacheTensor t = tensor({"a"}, bytes, 24, rows ? page : 24);
      t.head_stride = head_stride;
      return paths_of(project({attention({"a"}, 2, 4, 6)}, 4, layout), {t});
    };
    EXPECT_THAT(made(4 * page, 0), ElementsAre());
    EXPECT_THAT(made(4 * page - 1, 0), ElementsAre("tensors[0].bytes")) << layout;
    EXPECT_FALSE(made(4 * page, ~std::uint64_t{0}).empty()) << layout;
    EXPECT_FALSE(made(4 * page, 23).empty()) << layout;
  }
}

// Rows of one stride are compared in pairs: the proof does not grow with the pool.
TEST(Layouts, AnInterleavedPoolOfAMillionBlocksIsProven) {
  const std::uint32_t blocks = 1000000;
  std::vector<std::string> layers;
  std::vector<std::string> states;
  for (int l = 0; l < 60; ++l) {
    layers.push_back("a" + std::to_string(l));
    states.push_back("m" + std::to_string(l));
  }
  const std::uint64_t row = 60 * 4096;
  const auto projection =
      project({attention(layers, 8, 16, 32), state(states, 4000)}, blocks, "BHLNC");
  const auto map = SegmentMap::make(projection, {tensor(layers, blocks * row, 512, row),
                                                 tensor(states, blocks * row, 4000, row)});
  EXPECT_EQ(map->segments_per_block(StoreIndex{0}), 1U);
  EXPECT_EQ(map->segments_per_block(StoreIndex{1}), 1U);
  EXPECT_THAT(paths_of(projection, {tensor(layers, blocks * row, 512, row),
                                    tensor(states, blocks * row, 4000, row, row - 60 * 4000 + 1)}),
              ElementsAre("tensors[1].bytes"));
  EXPECT_THAT(
      paths_of(projection, {tensor(layers, blocks * row + row, 512, row),
                            tensor(states, blocks * row + row, 4000, row, row - 60 * 4000 + 1)}),
      ElementsAre("tensors"));
}

}  // namespace
}  // namespace kvprism
