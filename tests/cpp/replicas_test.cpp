// Tensor ranks that hold the same bytes store them once between them, and each loads all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvprism/backend/memory_store.h"
#include "kvprism/store/store_scheduler.h"
#include "kvprism/store/store_worker.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Pair;

constexpr std::uint32_t kRanks = 4;
constexpr std::uint32_t kBlocks = 16;
constexpr std::uint32_t kPage = 128;
constexpr std::uint32_t kGroups = 3;
constexpr RequestId kRequest{5};

GroupConfig attention(const std::string& kind, const std::string& layer, std::uint32_t heads,
                      std::uint32_t of_model) {
  GroupConfig group = test::full_group(16, layer);
  group.spec.kind = kind;
  AttentionPayload payload;
  payload.num_kv_heads = heads;
  payload.total_num_kv_heads = of_model;
  payload.head_size = kPage / 16 / heads;
  payload.dtype = DType::kInt8;
  group.spec.payload = payload;
  return group;
}

// A latent group, one whose two heads are on two ranks each, and one whose heads are all apart.
CacheConfig config_of() {
  CacheConfig config;
  config.num_blocks = kBlocks;
  config.parallel.tp = kRanks;
  config.groups = {attention("mla_attention", "latent", 1, 1),
                   attention("full_attention", "pairs", 1, 2),
                   attention("full_attention", "apart", 1, 4)};
  return config;
}

// Ranks that hold the same bytes of a group.
constexpr std::uint32_t kAlike[kGroups] = {4, 2, 1};

struct Engine {
  Engine(const std::shared_ptr<MemoryPool>& pool, std::uint64_t epoch)
      : projection(Projection::make(config_of(), SpecRegistry::builtin())),
        schema(test::make_schema(projection)) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      std::vector<std::byte>& memory = memories.emplace_back(kGroups * kBlocks * kPage);
      std::vector<CacheTensor> tensors(kGroups);
      const char* const layers[] = {"latent", "pairs", "apart"};
      for (std::uint32_t group = 0; group < kGroups; ++group) {
        tensors[group].base = memory.data();
        tensors[group].bytes = memory.size();
        tensors[group].layers = {layers[group]};
        tensors[group].block_stride = kPage;
        tensors[group].offset = group * kBlocks * kPage;
      }
      StoreWorkerOptions options;
      options.rank = Rank{rank};
      const auto map = SegmentMap::make(projection, tensors);
      workers.push_back(
          std::make_unique<StoreWorker>(schema, map, std::make_shared<MemoryStore>(pool), options));
    }
    StoreSchedulerOptions options;
    options.epoch = epoch;
    scheduler =
        std::make_unique<StoreScheduler>(schema, std::make_shared<MemoryStore>(pool), options);
  }

  std::byte* block(std::uint32_t rank, std::uint32_t group, std::uint32_t id) {
    return memories[rank].data() + (group * kBlocks + id) * kPage;
  }
  // What replicas hold alike and no others do.
  static std::byte content(std::uint32_t rank, std::uint32_t group, std::uint32_t chunk) {
    return static_cast<std::byte>(1 + 64 * group + 16 * (rank / kAlike[group]) + chunk);
  }

  // A step, on every rank to its end.
  void step() {
    const StepPlan& plan = scheduler->end_step(now);
    for (const auto& worker : workers) {
      EXPECT_EQ(worker->submit(plan.view(), ReadyToken::host()).refusal, "");
      while (worker->pump(now)) {
      }
      WorkerReport report;
      while (worker->poll(report)) scheduler->report(report, now);
    }
    scheduler->end_step(now);
  }

  std::shared_ptr<const Projection> projection;
  std::shared_ptr<const KeySchema> schema;
  std::vector<std::vector<std::byte>> memories;
  std::vector<std::unique_ptr<StoreWorker>> workers;
  std::unique_ptr<StoreScheduler> scheduler;
  const test::Hashes hashes{4, 1};
  Instant now{seconds(1).ns};
};

TEST(Replicas, AreStoredOnceAndLoadedByAll) {
  const auto pool = std::make_shared<MemoryPool>();
  Engine first(pool, 11);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    for (std::uint32_t group = 0; group < kGroups; ++group) {
      for (std::uint32_t chunk = 0; chunk < 3; ++chunk)
        std::fill_n(first.block(rank, group, 1 + chunk), kPage,
                    Engine::content(rank, group, chunk));
    }
  }
  first.scheduler->advanced(kRequest, 48, first.hashes.list());
  const TokenRange range = first.scheduler->wants_save(kRequest, first.now);
  const test::Rows saved({{1, 2, 3}, {1, 2, 3}, {1, 2, 3}});
  first.scheduler->save(kRequest, range, saved.get(), first.now);
  first.step();

  std::map<std::byte, int> objects;  // by content
  pool->for_each_object([&](std::string_view, std::span<const std::byte> bytes) {
    EXPECT_THAT(bytes, Each(bytes[0]));
    ++objects[bytes[0]];
  });
  EXPECT_EQ(objects.size(), 3u * (1 + 2 + 4));
  EXPECT_THAT(objects, Each(Pair(testing::_, 1)));
  std::vector<std::uint64_t> puts;
  for (const auto& worker : first.workers) puts.push_back(worker->counters().bytes_stored / kPage);
  // Of seven objects of each of three chunks; the work goes round.
  EXPECT_THAT(puts, ElementsAre(5, 6, 5, 5));

  Engine second(pool, 12);
  LookupResult found = second.scheduler->lookup(kRequest, 60, second.hashes.list(), 0, second.now);
  second.scheduler->end_step(second.now);
  found = second.scheduler->lookup(kRequest, 60, second.hashes.list(), 0, second.now);
  EXPECT_EQ(found.external_tokens, 48u);
  EXPECT_EQ(second.scheduler->counters().lookup_keys, 3u * (1 + 2 + 4));
  const test::Rows loaded({{9, 10, 11}, {9, 10, 11}, {9, 10, 11}});
  ASSERT_TRUE(second.scheduler->allocated(kRequest, 48, loaded.get(), second.now).has_value());
  second.step();
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    for (std::uint32_t group = 0; group < kGroups; ++group) {
      for (std::uint32_t chunk = 0; chunk < 3; ++chunk) {
        const std::span bytes(second.block(rank, group, 9 + chunk), kPage);
        EXPECT_THAT(bytes, Each(Engine::content(rank, group, chunk)))
            << "rank " << rank << " group " << group << " chunk " << chunk;
      }
    }
  }
}

// All ranks hold the first layer of a wrapper alike, and each its own heads of the second.
TEST(Replicas, KeysOfTheFirstLayerDoNotShareWhatOthersHoldApart) {
  CacheConfig whole = config_of();
  whole.groups = {attention("full_attention", "a", 1, 1)};
  LayerSpec apart{whole.groups[0].spec, {"b"}};
  std::get<AttentionPayload>(apart.spec.payload).total_num_kv_heads = kRanks;
  CacheConfig first = whole;
  whole.groups[0].members = {{whole.groups[0].spec, {"a"}}, apart};
  whole.groups[0].spec = CacheSpec{};
  whole.groups[0].spec.kind = kUniformKind;
  whole.groups[0].layers.clear();
  first.groups[0].layers = {"a", "b"};

  const auto projection = Projection::make(whole, SpecRegistry::builtin());
  std::vector<std::byte> memory(2 * kBlocks * kPage);
  std::vector<CacheTensor> tensors(2);
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    tensors[layer].base = memory.data();
    tensors[layer].bytes = memory.size();
    tensors[layer].layers = {layer == 0 ? "a" : "b"};
    tensors[layer].block_stride = kPage;
    tensors[layer].offset = layer * kBlocks * kPage;
  }
  const auto map = SegmentMap::make(projection, tensors);
  const auto store = std::make_shared<MemoryStore>(std::make_shared<MemoryPool>());
  const auto of_first = test::make_schema(Projection::make(first, SpecRegistry::builtin()));
  EXPECT_EQ(of_first->replicas(StoreIndex{0}), 4u);
  const auto of_all = test::make_schema(projection);
  EXPECT_EQ(of_all->replicas(StoreIndex{0}), 1u);
  EXPECT_NE(of_first->fingerprint(), of_all->fingerprint());
  try {
    const StoreWorker worker(of_first, map, store, {});
    ADD_FAILURE() << "rank 1 would load the heads of rank 0";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                testing::HasSubstr("schema.store_groups[0].replicas = 4: expected a divisor of 1"));
  }
  EXPECT_NO_THROW(StoreWorker(of_all, map, store, {}));
}

TEST(Replicas, AKindOfAnEnginesOwnIsSharedWhereItIsLatent) {
  for (const bool latent : {true, false}) {
    const SpecRegistry registry = SpecRegistry::builtin().with(
        SpecKind{.name = "pooled",
                 .payload = PayloadKind::kRaw,
                 .needs = ParameterSet{},
                 .allows = ParameterSet{},
                 .dcp_sharded = false,
                 .latent = latent,
                 .traits = SpecRegistry::builtin().at("full_attention").traits});
    CacheConfig config = config_of();
    config.groups = {test::full_group(16, "p")};
    config.groups[0].spec.kind = "pooled";
    config.groups[0].spec.payload = RawPayload{kPage};
    const auto schema = test::make_schema(Projection::make(config, registry));
    EXPECT_EQ(schema->replicas(StoreIndex{0}), latent ? kRanks : 1u);
  }
}

}  // namespace
}  // namespace kvprism
