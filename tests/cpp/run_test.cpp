#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvprism/run/instant.h"
#include "kvprism/run/mailbox.h"
#include "kvprism/run/ready_token.h"

namespace kvprism {
namespace {

static_assert(!std::is_default_constructible_v<ReadyToken>,
              "a save must say when its bytes are there (R12)");

struct FakeEvent {
  int answer = 600;
  int destroyed = 0;
};

TEST(ReadyToken, AsksTheDeviceAndOwnsItsEvent) {
  FakeEvent event;
  {
    const DeviceEventApi api{[](void* e) { return static_cast<FakeEvent*>(e)->answer; }, 600,
                             [](void* e) { ++static_cast<FakeEvent*>(e)->destroyed; }};
    const ReadyToken token = ReadyToken::device_event(&event, api);
    const ReadyToken copy = token;
    EXPECT_EQ(token.query(), ReadyState::kPending);
    event.answer = 0;
    EXPECT_EQ(copy.query(), ReadyState::kReady);
    event.answer = 700;
    EXPECT_EQ(copy.query(), ReadyState::kFailed);
  }
  EXPECT_EQ(event.destroyed, 1) << "once, by the last copy";
  EXPECT_EQ(ReadyToken::host().query(), ReadyState::kReady);
}

struct BoundCalls {
  static inline int device = -1;  // the calling thread's, as a runtime keeps it
  static inline int asked_on = -1;
  static inline int destroyed_on = -1;
  static inline int answer = 0;
};

TEST(ReadyToken, IsAskedAndDestroyedOnItsDevice) {
  const DeviceEventApi api{.query =
                               [](void*) {
                                 BoundCalls::asked_on = BoundCalls::device;
                                 return 0;
                               },
                           .not_ready = 600,
                           .destroy = [](void*) { BoundCalls::destroyed_on = BoundCalls::device; },
                           .bind =
                               [](int device) {
                                 BoundCalls::device = device;
                                 return BoundCalls::answer;
                               },
                           .device = 3};
  {
    const ReadyToken token = ReadyToken::device_event(nullptr, api);
    EXPECT_EQ(token.query(), ReadyState::kReady);
    EXPECT_EQ(BoundCalls::asked_on, 3);
    BoundCalls::answer = 101;
    EXPECT_EQ(token.query(), ReadyState::kFailed) << "a device that cannot be bound";
    BoundCalls::device = -1;
  }
  EXPECT_EQ(BoundCalls::destroyed_on, 3) << "another thread may destroy it";
}

TEST(ReadyToken, RefusesADeviceThatCannotBeAsked) {
  FakeEvent event;
  const DeviceEventApi api{nullptr, 600, [](void* e) { ++static_cast<FakeEvent*>(e)->destroyed; }};
  try {
    ReadyToken::device_event(&event, api);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(error.what(), "ready token: query = null: expected the address of a function");
  }
  EXPECT_EQ(event.destroyed, 0) << "it is still the caller's";
}

TEST(Mailbox, IsBoundedAndKeepsOrder) {
  Mailbox<std::unique_ptr<int>> box(2);
  EXPECT_TRUE(box.try_push(std::make_unique<int>(1)));
  EXPECT_TRUE(box.try_push(std::make_unique<int>(2)));
  auto third = std::make_unique<int>(3);
  EXPECT_FALSE(box.try_push(std::move(third)));
  ASSERT_NE(third, nullptr) << "a refused item stays with its owner";
  std::unique_ptr<int> item;
  ASSERT_TRUE(box.try_pop(item));
  EXPECT_EQ(*item, 1);
  ASSERT_TRUE(box.try_pop(item));
  EXPECT_EQ(*item, 2);
  EXPECT_FALSE(box.try_pop(item));
}

TEST(Mailbox, TakesAllOrNone) {
  struct Throwing {
    int value = 0;
    bool throws = false;
    Throwing(int v, bool t) : value(v), throws(t) {}
    Throwing(Throwing&& other) : value(other.value), throws(other.throws) {
      if (throws) throw 1;
      other.value = 0;
    }
    Throwing& operator=(Throwing&& other) noexcept {
      value = std::exchange(other.value, 0);
      return *this;
    }
  };
  Mailbox<Throwing> box(3);
  std::vector<Throwing> items;
  items.reserve(2);
  items.emplace_back(1, false);
  items.emplace_back(2, true);
  EXPECT_THROW(box.try_push_all(items), int);
  EXPECT_EQ(box.size(), 0u);
  EXPECT_EQ(items[0].value, 1);
  items[1].throws = false;
  EXPECT_TRUE(box.try_push_all(items));
  items[0].value = 3;
  items[1].value = 4;
  EXPECT_FALSE(box.try_push_all(items)) << "there is room for one";
  EXPECT_EQ(items[0].value, 3);
  Throwing out(0, false);
  for (const int expected : {1, 2}) {
    ASSERT_TRUE(box.try_pop(out));
    EXPECT_EQ(out.value, expected);
  }
  EXPECT_FALSE(box.try_pop(out));
}

TEST(Mailbox, LosesNothingBetweenThreads) {
  Mailbox<int> box(64);
  long sum = 0;
  std::jthread reader([&] {
    for (int taken = 0, item = 0; taken < 20000;) {
      if (box.try_pop(item)) {
        sum += item;
        ++taken;
      } else {
        std::this_thread::yield();
      }
    }
  });
  for (int i = 1; i <= 20000;) {
    if (box.try_push(int{i})) {
      ++i;
    } else {
      std::this_thread::yield();
    }
  }
  reader.join();
  EXPECT_EQ(sum, 20000l * 20001 / 2);
}

}  // namespace
}  // namespace kvprism
