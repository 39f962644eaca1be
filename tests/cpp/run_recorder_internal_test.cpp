// A recorder whose sink takes no more.
#include "store/run_recorder.h"

#include <gtest/gtest.h>

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
    const detail::RecordedCall call(&recorder, detail::RunCall::kPurge, Instant{},
                                    [&](detail::RunWriter) { ++filled; });
    EXPECT_FALSE(call.wanted());
  }
  EXPECT_EQ(filled, 0);
}

}  // namespace
}  // namespace kvprism
