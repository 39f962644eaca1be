// What becomes of a store's clients while there can be no more threads.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <memory>

#include "blocking_fixture.h"

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

}  // namespace
}  // namespace kvprism

#endif
