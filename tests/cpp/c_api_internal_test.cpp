// Bounds of the C interface that only a store which takes its time can show.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "c_api/handles.h"
#include "kvprism/backend/clock.h"

namespace kvprism {
namespace {

// Needs all the time that it is given for lookups, and notes what is left for transfers.
class SlowToClose final : public ObjectStore, public ObjectIndex {
 public:
  CloseReport close_index(Duration budget) override {
    lookups = budget;
    const Instant begin = monotonic_now();
    while (use_all && monotonic_now() - begin < budget) {
    }
    return {1, {OpId{1}}};
  }
  CloseReport close_store(Duration budget) override {
    transfers = budget;
    return {2, {OpId{2}, OpId{3}}};
  }

  StoreCapabilities capabilities() const override { return {"slow", 0, 0, false}; }
  void add_region(const Region&) override {}
  void remove_region(const Region&) override {}
  bool start_exists(OpId, std::unique_ptr<ObjectBatch>&, Instant, Instant) override {
    return false;
  }
  bool start_put(OpId, std::unique_ptr<ObjectBatch>&, Instant, Instant) override { return false; }
  bool start_get(OpId, std::unique_ptr<ObjectBatch>&, Instant, Instant) override { return false; }
  bool poll_index(Instant, Completion&) override { return false; }
  bool poll_store(Instant, Completion&) override { return false; }

  bool use_all = true;
  std::optional<Duration> lookups, transfers;
};

struct Closed {
  std::uint64_t unquiet = 0;
  Duration lookups, transfers;
};

Closed close(std::int64_t budget_ns, bool use_all) {
  const auto slow = std::make_shared<SlowToClose>();
  slow->use_all = use_all;
  kvprism_store store;
  store.store = slow;
  store.index = slow;
  Closed closed;
  EXPECT_EQ(kvprism_store_close(&store, budget_ns, &closed.unquiet, nullptr), KVPRISM_OK);
  closed.lookups = slow->lookups.value();
  closed.transfers = slow->transfers.value();
  return closed;
}

TEST(StoreClose, BothSidesShareOneBudget) {
  const Closed closed = close(milliseconds(5).ns, true);
  EXPECT_EQ(closed.unquiet, 3u);
  EXPECT_EQ(closed.lookups, milliseconds(5));
  EXPECT_EQ(closed.transfers, Duration{}) << "the lookups have used it up";
}

TEST(StoreClose, AnyBudgetIsTaken) {
  const Closed none = close(std::numeric_limits<std::int64_t>::min(), false);
  EXPECT_EQ(none.lookups, Duration{});
  EXPECT_EQ(none.transfers, Duration{});
  const Closed longest = close(std::numeric_limits<std::int64_t>::max(), false);
  EXPECT_GT(longest.transfers, seconds(1'000'000));
}

}  // namespace
}  // namespace kvprism
