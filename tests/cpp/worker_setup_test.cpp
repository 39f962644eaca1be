// What a worker refuses when it is made, or warns of.
#include "kvprism/backend/memory_store.h"
#include "kvprism/base/log.h"
#include "worker_fixture.h"

namespace kvprism {
namespace {

using test::kPage;
using test::ScriptedStore;
using test::vllm_facts;
using test::WorkerTest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Its digest is the same: stages may differ in what a block holds.
TEST_F(WorkerTest, AMapOfOtherBytesThanTheKeysTellIsRefused) {
  std::vector<GroupConfig> groups = {test::full_group(16), test::ring_group(8),
                                     test::full_group(16, "second")};
  std::get<AttentionPayload>(groups[0].spec.payload).dtype = DType::kBFloat16;
  const auto keys = test::make_schema(test::make_projection(std::move(groups)));
  ASSERT_EQ(keys->projection().digest(), projection->digest());
  worker.reset();
  try {
    const StoreWorker refused(keys, map, store, {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    ASSERT_EQ(error.problems().size(), 1u);
    EXPECT_EQ(error.problems()[0].path, "schema.projection");
    EXPECT_THAT(error.problems()[0].hint, HasSubstr("store_groups[0].dtype"));
    EXPECT_THAT(error.problems()[0].hint, HasSubstr("bfloat16"));
  }
}

TEST_F(WorkerTest, ARankOutsideTheArrangementIsRefused) {
  StoreWorkerOptions options;
  options.rank = Rank{1};
  try {
    build(options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank = 1: expected below 1, tp x pp x pcp"));
  }
}

TEST_F(WorkerTest, RegistrationIsAllOrNothing) {
  // R59
  auto failing = std::make_shared<ScriptedStore>();
  failing->fail_region_at = 0;
  EXPECT_THROW(StoreWorker(schema, map, failing, {}), Error);
  EXPECT_THAT(failing->regions, IsEmpty());

  // The second of two allocations cannot be registered: the first goes back.
  std::vector<std::byte> second(64 * kPage);
  std::vector<CacheTensor> tensors(3);
  const char* layers[] = {"full", "ring", "second"};
  for (std::size_t t = 0; t < 3; ++t) {
    std::vector<std::byte>& home = t == 2 ? second : memory;
    tensors[t].base = home.data();
    tensors[t].bytes = home.size();
    tensors[t].layers = {layers[t]};
    tensors[t].layer_stride = 64 * kPage;
    tensors[t].block_stride = kPage;
    tensors[t].offset = t == 2 ? 0 : t * 64 * kPage;
  }
  const auto two = SegmentMap::make(projection, tensors);
  ASSERT_EQ(two->regions().size(), 2u);
  failing = std::make_shared<ScriptedStore>();
  failing->fail_region_at = 1;
  EXPECT_THROW(StoreWorker(schema, two, failing, {}), Error);
  EXPECT_THAT(failing->regions, IsEmpty());

  // Whoever is told of a timeout keeps the memory: it may still be registered, whatever the reason.
  failing = std::make_shared<ScriptedStore>();
  failing->fail_region_at = 1;
  failing->keeps_regions = true;
  try {
    StoreWorker(schema, two, failing, {});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimedOut);
    ASSERT_EQ(error.problems().size(), 2u);
    EXPECT_EQ(error.problems()[1].path, "thread");
  }
  EXPECT_EQ(failing->regions.size(), 1u);
}

// A store without accelerators would copy from addresses that are none of the host's.
TEST_F(WorkerTest, MemoryOfADeviceNeedsAStoreThatMovesIt) {
  std::vector<CacheTensor> tensors(3);
  const char* layers[] = {"full", "ring", "second"};
  for (std::size_t t = 0; t < 3; ++t) {
    tensors[t].base = memory.data();
    tensors[t].bytes = memory.size();
    tensors[t].layers = {layers[t]};
    tensors[t].layer_stride = 64 * kPage;
    tensors[t].block_stride = kPage;
    tensors[t].offset = t * 64 * kPage;
    tensors[t].device = 0;
  }
  const auto on_device = SegmentMap::make(projection, tensors);
  auto host_only = std::make_shared<ScriptedStore>();
  host_only->device_memory = false;
  try {
    StoreWorker(schema, on_device, host_only, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_STREQ(error.what(),
                 "store worker: regions[0].device = 0: expected host memory, as store scripted "
                 "moves no other (of Mooncake a build for accelerators is needed: uninstall "
                 "mooncake-transfer-engine-non-cuda, then install mooncake-transfer-engine)");
  }
  EXPECT_THAT(host_only->regions, IsEmpty());
  EXPECT_THROW(StoreWorker(schema, on_device, host_only, {.max_gets_in_flight = 0}), Error);
  const auto any = std::make_shared<ScriptedStore>();
  const StoreWorker accepted(schema, on_device, any, {});
  EXPECT_EQ(any->regions, on_device->regions());
}

// What a store throws that is no Error of ours undoes as much.
TEST_F(WorkerTest, RegistrationWithoutMemoryIsAllOrNothing) {
  std::vector<std::byte> second(64 * kPage);
  std::vector<CacheTensor> tensors(3);
  const char* layers[] = {"full", "ring", "second"};
  for (std::size_t t = 0; t < 3; ++t) {
    std::vector<std::byte>& home = t == 2 ? second : memory;
    tensors[t].base = home.data();
    tensors[t].bytes = home.size();
    tensors[t].layers = {layers[t]};
    tensors[t].layer_stride = 64 * kPage;
    tensors[t].block_stride = kPage;
    tensors[t].offset = t == 2 ? 0 : t * 64 * kPage;
  }
  const auto two = SegmentMap::make(projection, tensors);
  const auto failing = std::make_shared<ScriptedStore>();
  failing->throw_region_at = 1;
  EXPECT_THROW(StoreWorker(schema, two, failing, {}), std::bad_alloc);
  EXPECT_THAT(failing->regions, IsEmpty());
}

TEST_F(WorkerTest, SchemaVllmIsRefusedWhereObjectsWouldDiffer) {
  CacheConfig config;
  config.num_blocks = 64;
  config.key_schema = "vllm";
  config.groups = {test::full_group(16), test::full_group(16, "second")};
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = KeySchema::vllm(projection, vllm_facts());
  CacheTensor tensor;
  tensor.base = memory.data();
  tensor.bytes = 2 * 64 * kPage;
  tensor.layers = {"full"};
  tensor.layer_stride = 64 * kPage;
  tensor.block_stride = 2 * kPage;
  CacheTensor other = tensor;
  other.layers = {"second"};
  other.offset = kPage;
  map = SegmentMap::make(projection, {tensor, other});
  worker.reset();
  try {
    StoreWorker refused(schema, map, store, {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("groups[1] = layers at other places"));
    EXPECT_THAT(error.what(), HasSubstr("block_stride = more than a page"));
  }
}

// W-C1: it is the strides that are wrong, not the name.
TEST_F(WorkerTest, SchemaVllmIsRefusedWhereTheReferenceStoresWrongBytes) {
  worker.reset();
  CacheConfig config;
  config.num_blocks = 64;
  config.key_schema = "vllm";
  config.kv_layout = "BHLNC";
  const auto refusal = [&](std::uint32_t heads, std::uint32_t layers) -> std::string {
    config.groups = {test::full_group(16)};
    std::get<AttentionPayload>(config.groups[0].spec.payload).num_kv_heads = heads;
    CacheTensor tensor;
    config.groups[0].layers.clear();
    for (std::uint32_t l = 0; l < layers; ++l)
      config.groups[0].layers.push_back("l" + std::to_string(l));
    tensor.layers = config.groups[0].layers;
    tensor.layer_stride = kPage;
    tensor.head_stride = layers * kPage;
    tensor.block_stride = std::uint64_t{heads} * layers * kPage;
    memory.resize(config.num_blocks * tensor.block_stride);
    tensor.base = memory.data();
    tensor.bytes = memory.size();
    projection = Projection::make(config, SpecRegistry::builtin());
    map = SegmentMap::make(projection, {tensor});
    try {
      StoreWorker accepted(KeySchema::vllm(projection, vllm_facts()), map,
                           std::make_shared<ScriptedStore>(), {});
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(refusal(2, 2), HasSubstr("groups[0] = several layers and heads in layout BHLNC"));
  EXPECT_EQ(refusal(2, 1), "");
  EXPECT_EQ(refusal(1, 2), "");
  config.num_blocks = 2;
  EXPECT_THAT(refusal(1, 1), HasSubstr("num_blocks = 2: expected at least 3"));
  config.num_blocks = 3;
  EXPECT_EQ(refusal(1, 1), "");
}

TEST_F(WorkerTest, SchemaVllmIsRefusedWhereTheReferenceDoesNotStart) {
  worker.reset();
  CacheConfig config;
  config.num_blocks = 64;
  config.key_schema = "vllm";
  config.kv_layout = "LHBNC";
  const auto refusal = [&](std::uint32_t heads, std::uint32_t kernel) -> std::string {
    config.groups = {test::full_group(16)};
    std::get<AttentionPayload>(config.groups[0].spec.payload).num_kv_heads = heads;
    CacheTensor tensor;
    tensor.layers = config.groups[0].layers;
    tensor.block_stride = kPage;
    tensor.head_stride = 64 * kPage;
    tensor.kernel_block_size = kernel;
    memory.resize(heads * tensor.head_stride);
    tensor.base = memory.data();
    tensor.bytes = memory.size();
    projection = Projection::make(config, SpecRegistry::builtin());
    map = SegmentMap::make(projection, {tensor});
    try {
      StoreWorker accepted(KeySchema::vllm(projection, vllm_facts()), map,
                           std::make_shared<ScriptedStore>(), {});
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(refusal(2, 8),
              HasSubstr("groups[0] = several heads in blocks of several kernel blocks in layout "
                        "LHBNC: expected one head, or kernel_block_size as large as the block "
                        "(the reference does not start with them"));
  EXPECT_EQ(refusal(2, 16), "");
  EXPECT_EQ(refusal(2, 0), "");
  EXPECT_EQ(refusal(1, 8), "");
}

TEST_F(WorkerTest, SchemaVllmTakesGroupsThatOverlayEachOther) {
  CacheConfig config;
  config.num_blocks = 64;
  config.key_schema = "vllm";
  config.groups = {test::full_group(16), test::window_group(16, 20)};
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = KeySchema::vllm(projection, vllm_facts());
  CacheTensor tensor;
  tensor.base = memory.data();
  tensor.bytes = 64 * kPage;
  tensor.layers = {"full"};
  tensor.layer_stride = 64 * kPage;
  tensor.block_stride = kPage;
  CacheTensor other = tensor;
  other.layers = {"window"};
  map = SegmentMap::make(projection, {tensor, other});
  worker.reset();
  EXPECT_NO_THROW(StoreWorker(schema, map, store, {}));
}

TEST_F(WorkerTest, AStoreHasOneWorkerAtATime) {
  build();
  try {
    StoreWorker second(schema, map, store, {});
    FAIL() << "two workers would take each other's completions";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "store worker: store = in use: expected an object store of its own (completions "
                 "go to whoever polls; destroy its user first, or connect again)");
  }
  const StepPlan plan = simple(JobKind::kSave, 1, 1);
  worker->submit(plan.view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 1u);
  const OpId left = store->puts[0].op;
  worker.reset();
  worker = std::make_unique<StoreWorker>(schema, map, store, StoreWorkerOptions{});
  worker->submit(plan.view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 2u);
  EXPECT_NE(store->puts[1].op, left) << "its end would be taken for the new one's";
}

TEST_F(WorkerTest, ALimitThatLoadsAloneFillIsWarnedOf) {
  std::vector<std::string> lines;
  set_log_sink(
      [](void* context, LogLevel, std::string_view line) {
        static_cast<std::vector<std::string>*>(context)->emplace_back(line);
      },
      &lines, LogLevel::kWarning);
  StoreWorkerOptions options;
  options.max_bytes_per_call = 2 * kPage;
  options.max_bytes_in_flight = 8 * kPage + 4;
  build(options);
  EXPECT_THAT(lines, IsEmpty()) << "room for a put, if a small one";
  options.max_bytes_in_flight = 8 * kPage;
  build(options);
  EXPECT_THAT(lines, ElementsAre("max_bytes_in_flight 1024 is no more than 4 loads of 256 bytes: "
                                 "while loads keep coming, saves wait and expire"));
  options.max_bytes_in_flight = 0;
  build(options);
  EXPECT_EQ(lines.size(), 1u);
  set_log_sink(nullptr, nullptr, LogLevel::kOff);
}

TEST_F(WorkerTest, ObjectsThatNoCallOfTheStoreTakesAreRefused) {
  GroupConfig three = test::full_group(16);
  three.layers = {"a", "b", "c"};
  const auto wide = test::make_projection({test::full_group(16), three});
  std::vector<CacheTensor> tensors(4);
  const char* layers[] = {"full", "a", "b", "c"};
  std::vector<std::byte> bytes(4 * 64 * kPage);
  for (std::size_t t = 0; t < 4; ++t) {
    tensors[t].base = bytes.data();
    tensors[t].bytes = bytes.size();
    tensors[t].layers = {layers[t]};
    tensors[t].block_stride = kPage;
    tensors[t].offset = t * 64 * kPage;
  }
  const auto places = SegmentMap::make(wide, tensors);
  const auto with_limit = [&](std::uint32_t segments) {
    MemoryStoreOptions limits;
    limits.max_segments_per_call = segments;
    return std::make_shared<MemoryStore>(std::make_shared<MemoryPool>(), limits);
  };
  StoreWorker(test::make_schema(wide), places, with_limit(3), {});
  try {
    StoreWorker(test::make_schema(wide), places, with_limit(2), {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    ASSERT_EQ(error.problems().size(), 1u);
    EXPECT_EQ(error.problems()[0].path, "groups[1]");
    EXPECT_EQ(error.problems()[0].value, "3 segments in a block");
    EXPECT_EQ(error.problems()[0].expected, "at most 2, what the store takes in a call");
  }
}

}  // namespace
}  // namespace kvprism
