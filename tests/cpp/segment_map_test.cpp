#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>

#include "kvprism/base/error.h"
#include "kvprism/layout/segment_map.h"

namespace kvprism {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// Addresses are only computed with, never read.
std::byte* at(std::uint64_t address) {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}
constexpr std::uint64_t kBase = 0x10000000;

GroupConfig blob(std::string kind, std::uint64_t page, std::vector<std::string> layers) {
  GroupConfig group;
  group.spec.kind = std::move(kind);
  group.spec.block_size = 16;
  group.spec.payload = RawPayload{page};
  group.layers = std::move(layers);
  return group;
}

SpecRegistry registry() {
  return SpecRegistry::builtin()
      .with({"blob", PayloadKind::kRaw, ParameterSet{}, ParameterSet{}, false, false,
             [](const CacheSpec&) {
               return SpecTraits{
                   true, HitRule::kPrefix, 0, SaveRule::kPositional, PeerRule::kSuffix, 0, false};
             }})
      .with({"scratch", PayloadKind::kRaw, ParameterSet{}, ParameterSet{}, false, false,
             [](const CacheSpec&) {
               return SpecTraits{false, HitRule::kNever, 0, SaveRule::kNever, PeerRule::kWhole, 0,
                                 false};
             }});
}

std::shared_ptr<const Projection> project(std::vector<GroupConfig> groups,
                                          std::uint32_t num_blocks = 8,
                                          std::string layout = "LBHNC") {
  CacheConfig config;
  config.num_blocks = num_blocks;
  config.kv_layout = std::move(layout);
  config.groups = std::move(groups);
  return Projection::make(config, registry());
}

CacheTensor tensor(std::vector<std::string> layers, std::uint64_t bytes, std::uint64_t layer_stride,
                   std::uint64_t block_stride, std::uint64_t offset = 0,
                   std::uint64_t base = kBase) {
  return {at(base), bytes, std::move(layers), layer_stride, block_stride, offset, -1};
}

Error error_of(std::shared_ptr<const Projection> projection, std::vector<CacheTensor> tensors) {
  try {
    SegmentMap::make(std::move(projection), std::move(tensors));
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "accepted";
  return Error(ErrorCode::kClosed, "", {});
}

std::vector<std::string> paths_of(const Error& error) {
  std::vector<std::string> paths;
  for (const Problem& problem : error.problems()) paths.push_back(problem.path);
  return paths;
}

std::vector<Segment> segments(const SegmentMap& map, std::uint32_t group, std::int32_t block) {
  std::vector<Segment> out;
  map.append_segments(GroupId{group}, BlockId{block}, out);
  return out;
}

TEST(SegmentMap, FollowsTheStridesInLayerOrder) {
  // The tensor lists the layers in another order than the group does.
  const auto map = SegmentMap::make(project({blob("blob", 100, {"a", "b"})}),
                                    {tensor({"b", "a"}, 10000, 2000, 128, 64)});
  EXPECT_THAT(segments(*map, 0, 3), ElementsAre(Segment{at(kBase + 64 + 2000 + 3 * 128), 100},
                                                Segment{at(kBase + 64 + 3 * 128), 100}));
  EXPECT_EQ(map->object_bytes(StoreIndex{0}), 200U);
  EXPECT_EQ(map->segments_per_block(StoreIndex{0}), 2U);
}

// R29: pitch 6144, length 4096.
TEST(SegmentMap, APitchLongerThanAPageLeavesTheGapAlone) {
  const auto map =
      SegmentMap::make(project({blob("blob", 4096, {"a"})}), {tensor({"a"}, 8 * 6144, 0, 6144)});
  std::vector<Segment> out;
  const BlockId blocks[] = {BlockId{2}, BlockId{3}};
  map->append_blocks(GroupId{0}, blocks, out);
  EXPECT_THAT(out, ElementsAre(Segment{at(kBase + 12288), 4096}, Segment{at(kBase + 18432), 4096}));
  EXPECT_EQ(map->object_bytes(GroupId{0}), 4096U);
}

TEST(SegmentMap, ConsecutiveBlocksMergeWherePitchIsThePage) {
  const auto map =
      SegmentMap::make(project({blob("blob", 4096, {"a"})}), {tensor({"a"}, 8 * 4096, 0, 4096)});
  std::vector<Segment> out;
  const BlockId blocks[] = {BlockId{2}, BlockId{3}, BlockId{5}, BlockId{4}};
  map->append_blocks(GroupId{0}, blocks, out);
  EXPECT_THAT(out, ElementsAre(Segment{at(kBase + 8192), 8192}, Segment{at(kBase + 20480), 4096},
                               Segment{at(kBase + 16384), 4096}));
}

TEST(SegmentMap, APitchShorterThanAPageIsRefused) {
  EXPECT_THAT(
      paths_of(error_of(project({blob("blob", 4096, {"a"})}), {tensor({"a"}, 100000, 0, 4095)})),
      ElementsAre("tensors[0].block_stride"));
}

// What pads a page is its former owner's: the rows of a ring, or another tenant's.
TEST(SegmentMap, PaddingIsNeverMoved) {
  GroupConfig group = blob("blob", 100, {"a", "b"});
  group.spec.page_size_padded = 128;
  const auto map = SegmentMap::make(project({group}), {tensor({"a", "b"}, 2048, 1024, 128)});
  EXPECT_EQ(map->object_bytes(GroupId{0}), 200U);
  EXPECT_EQ(map->projection().group(GroupId{0}).object_bytes(), 200U);
  EXPECT_EQ(map->projection().group(GroupId{0}).page_size_bytes, 128U);
  EXPECT_THAT(segments(*map, 0, 3),
              ElementsAre(Segment{at(kBase + 384), 100}, Segment{at(kBase + 1024 + 384), 100}));
}

TEST(SegmentMap, ObjectsOfTheReferenceHoldWholePages) {
  GroupConfig group = blob("blob", 100, {"a"});
  group.spec.page_size_padded = 128;
  CacheConfig config = project({group})->config();
  config.key_schema = "vllm";
  const auto map =
      SegmentMap::make(Projection::make(config, registry()), {tensor({"a"}, 8 * 128, 0, 128)});
  EXPECT_EQ(map->object_bytes(GroupId{0}), 128U);
  EXPECT_EQ(map->projection().group(GroupId{0}).object_bytes(), 128U);
  EXPECT_THAT(segments(*map, 0, 3), ElementsAre(Segment{at(kBase + 3 * 128), 128}));
  const auto own = SegmentMap::make(project({group}), {tensor({"a"}, 8 * 128, 0, 128)});
  EXPECT_NE(own->layout_fingerprint(), map->layout_fingerprint());
}

TEST(SegmentMap, BlocksAreAsFarApartAsPages) {
  GroupConfig group = blob("blob", 100, {"a"});
  group.spec.page_size_padded = 128;
  EXPECT_THAT(paths_of(error_of(project({group}), {tensor({"a"}, 8 * 128, 0, 127)})),
              ElementsAre("tensors[0].block_stride"));
}

TEST(SegmentMap, AdjacentLayersOfOneAllocationMerge) {
  // Rows of two pages: each tensor holds one layer, beside the other.
  const auto map = SegmentMap::make(project({blob("blob", 100, {"a", "b", "c"})}),
                                    {tensor({"a"}, 4000, 0, 200), tensor({"b"}, 4000, 0, 200, 100),
                                     tensor({"c"}, 4000, 0, 200, 1600)});
  EXPECT_THAT(segments(*map, 0, 2),
              ElementsAre(Segment{at(kBase + 400), 200}, Segment{at(kBase + 2000), 100}));
  EXPECT_EQ(map->segments_per_block(StoreIndex{0}), 2U);
  EXPECT_EQ(map->object_bytes(StoreIndex{0}), 300U);
}

TEST(SegmentMap, NeverMergesAcrossAllocations) {
  const auto map =
      SegmentMap::make(project({blob("blob", 100, {"a", "b"})}, 2),
                       {tensor({"a"}, 200, 0, 100), tensor({"b"}, 200, 0, 100, 0, kBase + 200)});
  std::vector<Segment> out;
  map->append_segments(StoreIndex{0}, BlockId{1}, out);
  EXPECT_EQ(out.size(), 2U);
  EXPECT_THAT(map->regions(),
              ElementsAre(Region{at(kBase), 200, -1}, Region{at(kBase + 200), 200, -1}));
}

// Groups overlay the same bytes, as engines lay hybrid models out.
TEST(SegmentMap, GroupsOfOnePoolOverlayEachOther) {
  const auto map =
      SegmentMap::make(project({blob("blob", 100, {"a", "b"}), blob("scratch", 100, {"r"}),
                                blob("blob", 100, {"m", "n"})}),
                       {tensor({"a", "b"}, 1600, 800, 100), tensor({"r"}, 1600, 800, 100),
                        tensor({"m", "n"}, 1600, 800, 100)});
  EXPECT_EQ(segments(*map, 0, 5), segments(*map, 2, 5));
  EXPECT_THAT(segments(*map, 1, 5), ElementsAre(Segment{at(kBase + 500), 100}));
  EXPECT_THAT(map->regions(), ElementsAre(Region{at(kBase), 1600, -1})) << "each allocation once";
  EXPECT_EQ(map->object_bytes(StoreIndex{1}), 200U);
}

TEST(SegmentMap, BlocksOfDifferentIdsNeverShareBytes) {
  const auto projection = project({blob("blob", 100, {"a"}), blob("blob", 150, {"b"})});
  const Error error =
      error_of(projection, {tensor({"a"}, 1600, 0, 100), tensor({"b"}, 1600, 0, 150)});
  EXPECT_THAT(error.what(), AllOf(HasSubstr("block 1 of layer a (group 0)"),
                                  HasSubstr("block 0 of layer b (group 1)")));
  // The same pitch makes them one row of blocks.
  SegmentMap::make(projection, {tensor({"a"}, 1600, 0, 150), tensor({"b"}, 1600, 0, 150)});
  // Shifted by less than a pitch, the longer page of block 0 runs into block 1 of the other group.
  EXPECT_THAT(
      error_of(projection, {tensor({"a"}, 1600, 0, 150), tensor({"b"}, 1600, 0, 150, 60)}).what(),
      AllOf(HasSubstr("block 0 of layer b"), HasSubstr("block 1 of layer a")));
  SegmentMap::make(projection, {tensor({"a"}, 1600, 0, 160, 40), tensor({"b"}, 1600, 0, 160)});
}

TEST(SegmentMap, LayersOfOneGroupNeverShareBytes) {
  const auto projection = project({blob("blob", 100, {"a", "b"})});
  EXPECT_THAT(
      error_of(projection, {tensor({"a"}, 1600, 0, 100), tensor({"b"}, 1600, 0, 100)}).what(),
      AllOf(HasSubstr("block 0 of layer a"), HasSubstr("block 0 of layer b")));
  EXPECT_THAT(
      error_of(projection, {tensor({"a"}, 1600, 0, 100), tensor({"b"}, 1600, 0, 100, 50)}).what(),
      HasSubstr("blocks that share no byte"));
}

// R61, and never by storage size: the last block must end inside the allocation.
TEST(SegmentMap, EveryBlockLiesInsideItsAllocation) {
  const auto projection = project({blob("blob", 49152, {"a"})});
  SegmentMap::make(projection, {tensor({"a"}, 8 * 49152, 0, 49152)});
  EXPECT_THAT(paths_of(error_of(projection, {tensor({"a"}, 8 * 49152 - 1, 0, 49152)})),
              ElementsAre("tensors[0].bytes"));
  EXPECT_THAT(paths_of(error_of(projection, {tensor({"a"}, 8 * 49152, 0, 65536)})),
              ElementsAre("tensors[0].bytes"));
  EXPECT_THAT(paths_of(error_of(projection, {tensor({"a"}, 8 * 49152, 0, 49152, 1)})),
              ElementsAre("tensors[0].bytes"));
  EXPECT_THAT(paths_of(error_of(projection, {tensor({"a"}, 1000, 0, ~std::uint64_t{0})})),
              ElementsAre("tensors[0].bytes"));
  EXPECT_THAT(
      paths_of(error_of(projection, {tensor({"a"}, 1000, 0, 49152, ~std::uint64_t{0} - 5)})),
      ElementsAre("tensors[0].bytes"));
}

TEST(SegmentMap, AnAllocationEndsWithinTheAddressSpace) {
  const auto projection = project({blob("blob", 100, {"a"})});
  const std::uint64_t half = std::uint64_t{1} << 63;
  EXPECT_THAT(paths_of(error_of(projection, {tensor({"a"}, half - kBase + 1, 0, 100)})),
              ElementsAre("tensors[0].bytes"));
  EXPECT_THAT(paths_of(error_of(projection, {tensor({"a"}, 800, 0, 100, 0, half + 1)})),
              ElementsAre("tensors[0].bytes"));
  EXPECT_NO_THROW(SegmentMap::make(projection, {tensor({"a"}, half - kBase, 0, 100)}));
}

TEST(SegmentMap, OnlyRealBlocksAreBlocks) {
  const auto map =
      SegmentMap::make(project({blob("blob", 100, {"a"})}), {tensor({"a"}, 800, 0, 100)});
  EXPECT_FALSE(map->is_block(kNullBlock));
  EXPECT_FALSE(map->is_block(BlockId{-1}));
  EXPECT_FALSE(map->is_block(BlockId{8}));
  EXPECT_TRUE(map->is_block(BlockId{1}));
  EXPECT_TRUE(map->is_block(BlockId{7}));
}

TEST(SegmentMap, EveryLayerLiesInExactlyOneTensor) {
  const auto projection = project({blob("blob", 100, {"a", "b"})});
  const Error error =
      error_of(projection, {tensor({"a"}, 800, 0, 100), tensor({"a", "bb"}, 800, 0, 100)});
  EXPECT_THAT(paths_of(error),
              ElementsAre("tensors[1].layers[0]", "tensors[1].layers[1]", "groups[0].layers[1]"));
  EXPECT_THAT(error.what(),
              AllOf(HasSubstr("also at tensors[0].layers[0]"), HasSubstr("did you mean 'b'?")));
}

TEST(SegmentMap, AGroupThatNeverMovesNeedsNoTensor) {
  GroupConfig fixed = blob("blob", 100, {"f"});
  fixed.enable_kv_transfer = false;
  const auto map =
      SegmentMap::make(project({fixed, blob("blob", 100, {"a"})}), {tensor({"a"}, 800, 0, 100)});
  EXPECT_EQ(map->object_bytes(GroupId{0}), 0U);
  EXPECT_EQ(map->object_bytes(StoreIndex{0}), 100U);
}

TEST(SegmentMap, AllocationsThatOverlapInPartAreRefused) {
  const auto projection = project({blob("blob", 100, {"a"}), blob("blob", 100, {"b"})});
  const auto first = tensor({"a"}, 1600, 0, 100);
  for (const CacheTensor& second :
       {tensor({"b"}, 1600, 0, 100, 0, kBase + 800), tensor({"b"}, 1700, 0, 100),
        tensor({"b"}, 800, 0, 100, 0, kBase + 200), tensor({"b"}, 1600, 0, 100, 0, kBase - 1)}) {
    EXPECT_THAT(paths_of(error_of(projection, {first, second})), ElementsAre("tensors[1].base"));
  }
  CacheTensor elsewhere = tensor({"b"}, 1600, 0, 100);
  elsewhere.device = 1;
  EXPECT_THAT(paths_of(error_of(projection, {first, elsewhere})), ElementsAre("tensors[1].base"));
  SegmentMap::make(projection, {first, tensor({"b"}, 1600, 0, 100, 800)});
}

TEST(SegmentMap, StridesOfAnotherLayoutAreRefused) {
  // Blocks outermost: layers lie side by side within a row.
  const Error error =
      error_of(project({blob("blob", 100, {"a", "b"})}), {tensor({"a", "b"}, 1600, 100, 200)});
  EXPECT_THAT(paths_of(error), ElementsAre("tensors[0].layer_stride"));
}

TEST(SegmentMap, TellsEveryProblemAtOnce) {
  CacheTensor bad;
  bad.layers = {"x"};
  bad.device = -2;
  EXPECT_THAT(
      paths_of(error_of(project({blob("blob", 100, {"a"})}), {bad, CacheTensor{}})),
      testing::IsSupersetOf({"tensors[0].base", "tensors[0].bytes", "tensors[0].device",
                             "tensors[0].layers[0]", "tensors[1].layers", "groups[0].layers[0]"}));
}

TEST(SegmentMap, TheFingerprintIsOfTheGeometryAlone) {
  const auto make = [](std::uint64_t page, std::uint32_t blocks, std::uint64_t stride,
                       std::uint64_t base) {
    return SegmentMap::make(project({blob("blob", page, {"a"})}, blocks),
                            {tensor({"a"}, 100000, 0, stride, 0, base)})
        ->layout_fingerprint();
  };
  EXPECT_EQ(make(100, 8, 100, kBase), make(100, 20, 128, 2 * kBase));
  EXPECT_NE(make(100, 8, 100, kBase), make(101, 8, 101, kBase));
}

// Against bytes: every block's segments together are exactly its pages, for any map that is
// accepted.
TEST(SegmentMap, HoldsForAnyAcceptedGeometry) {
  std::mt19937 random(7);
  const auto any = [&](std::uint64_t below) {
    return static_cast<std::uint64_t>(random()) % below;
  };
  int accepted = 0;
  for (int round = 0; round < 2000; ++round) {
    const auto num_blocks = static_cast<std::uint32_t>(2 + any(3));
    std::vector<GroupConfig> groups;
    std::vector<CacheTensor> tensors;
    const std::uint64_t bytes = 200;
    for (std::uint64_t g = 0; g < 1 + any(2); ++g) {
      const std::uint64_t page = 4 + any(5);
      std::vector<std::string> layers;
      for (std::uint64_t l = 0; l < 1 + any(2); ++l)
        layers.push_back(std::to_string(g) + "." + std::to_string(l));
      for (const std::string& layer : layers)
        tensors.push_back(tensor({layer}, bytes, 0, 4 + any(12), any(60)));
      groups.push_back(blob("blob", page, layers));
    }
    // The truth, byte by byte: who owns it.
    struct Owner {
      std::size_t group;
      std::size_t tensor;
      std::uint32_t block;
    };
    std::vector<std::vector<Owner>> owners(bytes);
    bool sound = true;
    std::size_t t = 0;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const std::uint64_t page = std::get<RawPayload>(groups[g].spec.payload).page_size_bytes;
      for (std::size_t l = 0; l < groups[g].layers.size(); ++l, ++t) {
        if (tensors[t].block_stride < page) sound = false;
        for (std::uint32_t b = 0; b < num_blocks; ++b) {
          for (std::uint64_t i = 0; i < page; ++i) {
            const std::uint64_t byte = tensors[t].offset + b * tensors[t].block_stride + i;
            if (byte >= bytes) {
              sound = false;
              continue;
            }
            for (const Owner& other : owners[byte]) {
              if (other.block != b || (other.group == g && other.tensor != t)) sound = false;
            }
            owners[byte].push_back({g, t, b});
          }
        }
      }
    }
    std::shared_ptr<const SegmentMap> map;
    try {
      map = SegmentMap::make(project(groups, num_blocks), tensors);
    } catch (const Error&) {
    }
    ASSERT_EQ(map != nullptr, sound) << "round " << round;
    if (map == nullptr) continue;
    ++accepted;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (std::uint32_t b = 1; b < num_blocks; ++b) {
        std::uint64_t total = 0;
        for (const Segment& segment :
             segments(*map, static_cast<std::uint32_t>(g), static_cast<std::int32_t>(b))) {
          total += segment.length;
          for (std::size_t i = 0; i < segment.length; ++i) {
            const auto byte = static_cast<std::size_t>(segment.base + i - at(kBase));
            EXPECT_TRUE(std::any_of(
                owners[byte].begin(), owners[byte].end(),
                [&](const Owner& owner) { return owner.group == g && owner.block == b; }));
          }
        }
        EXPECT_EQ(total, map->object_bytes(GroupId{static_cast<std::uint32_t>(g)}));
      }
    }
  }
  EXPECT_GT(accepted, 20);
}

TEST(SegmentMap, ProvesALargePool) {
  const std::uint32_t blocks = 20000;
  std::vector<std::string> layers;
  std::vector<std::string> others;
  for (int l = 0; l < 40; ++l) {
    layers.push_back("a" + std::to_string(l));
    others.push_back("b" + std::to_string(l));
  }
  const auto projection = project({blob("blob", 4096, layers), blob("blob", 2048, others)}, blocks);
  const std::uint64_t row = std::uint64_t{blocks} * 4096;
  EXPECT_NO_THROW(SegmentMap::make(
      projection, {tensor(layers, 40 * row, row, 4096), tensor(others, 40 * row, row, 4096)}));
  EXPECT_NO_THROW(SegmentMap::make(projection, {tensor(layers, 40 * row, row, 4096),
                                                tensor(others, 40 * row, row, 4096, 2048)}));
  // One byte further, the last block of the second group leaves the allocation.
  EXPECT_THROW(SegmentMap::make(projection, {tensor(layers, 40 * row, row, 4096),
                                             tensor(others, 40 * row, row, 4096, 2049)}),
               Error);
}

TEST(SegmentMap, NeedsAProjection) {
  try {
    SegmentMap::make(nullptr, {});
    FAIL() << "null was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("projection = null: expected a projection"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace kvprism
