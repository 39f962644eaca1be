// What becomes of a store's clients while there can be no more threads.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>

#include "blocking_fixture.h"
#include "kvprism/kvprism.h"

// Sanitizers have a pthread_create of their own.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

namespace {

std::atomic<int> threads_to_refuse{0};

}  // namespace

// Takes the place of the C library's for this program.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*run)(void*), void* argument) noexcept {
  if (threads_to_refuse > 0 && threads_to_refuse-- > 0) return EAGAIN;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, run, argument);
}

namespace kvprism {
namespace {

using test::batch_of;
using test::Call;
using test::Ends;
using test::eventually;
using test::factory_of;
using test::LogLines;
using test::quick;
using test::Script;
using test::start_exists;
using test::start_get;

TEST(BlockingStoreThreads, AClientWithoutAGraveIsBuriedLater) {
  const auto script = std::make_shared<Script>();
  script->on_call = [](int client, Call call, const ObjectBatch&, CallEnd& end) {
    if (client != 0 || call != Call::kGet) return false;
    end.quiet = false;
    threads_to_refuse = 2;  // the lines about it and its tear-down
    return true;
  };
  LogLines lines;
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(1)) << "its client is torn down after all";
  EXPECT_EQ(threads_to_refuse, 0);
  EXPECT_TRUE(script->is_torn_down(0));
  ASSERT_TRUE(eventually([&] { return store.counters().retired_now == 0; }));
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  EXPECT_EQ(store.counters().unquiet_now, 0u);
  EXPECT_EQ(lines.awaited("no thread to tear a store client down, trying on: ").size(), 1u);
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
}

TEST(BlockingStoreThreads, ARegionThatCouldNotBeTakenBackIsNotForgotten) {
  const auto script = std::make_shared<Script>();
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 16> memory{};
  const Region region{memory.data(), memory.size(), -1};
  store.add_region(region);
  threads_to_refuse = 1;
  try {
    store.remove_region(region);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_EQ(error.problems()[0].path, "thread");
  }
  EXPECT_EQ(script->regions_of(0).size(), 1u);
  EXPECT_EQ(store.close_store(seconds(5)).unquiet, 0u);
  EXPECT_TRUE(script->regions_of(0).empty());
}

// A worker that cannot have its pump thread leaves no memory behind, registered and unknown.
TEST(CWorkerThreads, AWorkerWithoutAThreadGivesItsMemoryBack) {
  const std::string config = R"({"num_blocks": 8, "groups": [{"kind": "full_attention",
      "layers": ["l0"], "block_size": 16, "num_kv_heads": 1, "head_size": 8,
      "dtype": "float16"}]})";
  kvprism_projection* projection = nullptr;
  ASSERT_EQ(kvprism_projection_from_json(config.data(), config.size(), &projection, nullptr),
            KVPRISM_OK);
  kvprism_key_facts facts;
  ASSERT_EQ(kvprism_key_facts_init(&facts, sizeof facts, nullptr), KVPRISM_OK);
  facts.model = "m";
  facts.hash_algorithm = "sha256_cbor";
  kvprism_key_schema* schema = nullptr;
  ASSERT_EQ(kvprism_key_schema_new(projection, &facts, &schema, nullptr), KVPRISM_OK);
  kvprism_memory_pool* pool = nullptr;
  ASSERT_EQ(kvprism_memory_pool_new(nullptr, &pool, nullptr), KVPRISM_OK);
  kvprism_store* store = nullptr;
  ASSERT_EQ(kvprism_memory_store_new(pool, &store, nullptr), KVPRISM_OK);
  kvprism_worker_options options;
  ASSERT_EQ(kvprism_worker_options_init(&options, sizeof options, nullptr), KVPRISM_OK);

  static std::array<unsigned char, std::size_t{9} * 512> memory;
  const char* const layers[] = {"l0"};
  for (const bool refused : {true, false}) {
    kvprism_cache_tensor tensor;
    ASSERT_EQ(kvprism_cache_tensor_init(&tensor, sizeof tensor, nullptr), KVPRISM_OK);
    tensor.base = memory.data();
    // The second region overlaps the first.
    tensor.bytes = refused ? memory.size() - 512 : memory.size();
    tensor.block_stride = 512;
    tensor.layers = layers;
    tensor.num_layers = 1;
    kvprism_segment_map* map = nullptr;
    ASSERT_EQ(kvprism_segment_map_new(projection, &tensor, 1, &map, nullptr), KVPRISM_OK);
    threads_to_refuse = refused ? 1 : 0;
    kvprism_worker* worker = nullptr;
    kvprism_error* error = nullptr;
    EXPECT_EQ(kvprism_worker_new(schema, map, store, &options, &worker, &error) == KVPRISM_OK,
              !refused)
        << kvprism_error_message(error);
    kvprism_error_free(error);
    EXPECT_EQ(worker == nullptr, refused);
    EXPECT_EQ(threads_to_refuse, 0);
    kvprism_worker_free(worker);
    kvprism_segment_map_free(map);
  }
  kvprism_store_free(store);
  kvprism_memory_pool_free(pool);
  kvprism_key_schema_free(schema);
  kvprism_projection_free(projection);
}

}  // namespace
}  // namespace kvprism

#endif
