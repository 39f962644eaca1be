// A store that knows what a worker has in flight, and whether it keeps to its limit.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kvprism/io/object_store.h"

namespace kvprism::sim {

// Ownership: shares the store. Threads: one.
class FlightWatch final : public ObjectStore {
 public:
  // `limit`: bytes of calls that are not quiet which a put may not exceed; 0: none.
  FlightWatch(std::shared_ptr<ObjectStore> store, std::uint64_t limit)
      : store_(std::move(store)), limit_(limit) {}

  // The first put that went beyond the limit, or "".
  const std::string& broken() const noexcept { return broken_; }

  StoreCapabilities capabilities() const override { return store_->capabilities(); }
  void add_region(const Region& region) override { store_->add_region(region); }
  void remove_region(const Region& region) override { store_->remove_region(region); }
  void set_wakeup(Wakeup wakeup) override { store_->set_wakeup(wakeup); }
  CloseReport close_store(Duration budget) override { return store_->close_store(budget); }

  bool start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override;
  bool start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override;
  bool poll_store(Instant now, Completion& out) override;

 private:
  std::shared_ptr<ObjectStore> store_;
  std::uint64_t limit_;
  std::string broken_;
  std::map<OpId, std::uint64_t> bytes_;  // of calls that are not quiet
  std::uint64_t in_flight_ = 0;          // their sum
  std::size_t open_ = 0;                 // calls without an outcome
};

}  // namespace kvprism::sim
