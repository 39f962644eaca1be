// A recorder whose sink takes no more.
#include "store/run_recorder.h"

#include <gtest/gtest.h>

#include <new>

#include "store_fixtures.h"

namespace kvprism {
namespace {

TEST(RunRecord, NothingIsBuiltForARecordingThatHasEnded) {
  const auto schema = test::make_schema(test::make_projection({test::full_group(16)}));
  StoreSchedulerOptions options;
  options.epoch = 1;
  detail::RunRecorder recorder({[](void*, std::span<const std::byte>) { return false; }, nullptr},
                               *schema, options);
  EXPECT_FALSE(recorder.on());
  int filled = 0;
  {
    detail::RecordedCall call(&recorder, detail::RunCall::kPurge, Instant{},
                              [&](detail::RunWriter) { ++filled; });
    call.result_of([&] {
      ++filled;
      return std::span<const std::byte>();
    });
  }
  EXPECT_EQ(filled, 0);
}

// A step goes on where its recording cannot.
TEST(RunRecord, ARecordingWithoutMemoryEndsWithItsLastWholeCall) {
  const auto schema = test::make_schema(test::make_projection({test::full_group(16)}));
  StoreSchedulerOptions options;
  options.epoch = 1;
  std::size_t written = 0;
  detail::RunRecorder recorder({[](void* to, std::span<const std::byte> more) {
                                  *static_cast<std::size_t*>(to) += more.size();
                                  return true;
                                },
                                &written},
                               *schema, options);
  const auto call = [&](bool fails) {
    const detail::RecordedCall recorded(&recorder, detail::RunCall::kPurge, Instant{},
                                        [&](detail::RunWriter) {
                                          if (fails) throw std::bad_alloc();
                                        });
  };
  call(false);
  EXPECT_TRUE(recorder.on());
  const std::size_t before = written;
  call(true);
  EXPECT_FALSE(recorder.on());
  call(false);
  EXPECT_EQ(written, before);
}

}  // namespace
}  // namespace kvprism
