// Lets two threads use the two sides of a store that expects one thread.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "kvprism/io/object_store.h"

namespace kvprism::bindings {

// Ownership: shares both. Threads: any.
class LockedStore final : public ObjectStore, public ObjectIndex {
 public:
  LockedStore(std::shared_ptr<ObjectStore> store, std::shared_ptr<ObjectIndex> index)
      : store_(std::move(store)), index_(std::move(index)) {}

  std::unique_lock<std::mutex> lock() const { return std::unique_lock(mutex_); }

  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                    Instant deadline) override {
    const auto held = lock();
    return index_->start_exists(op, batch, now, deadline);
  }
  bool start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal,
                    Instant now, Instant deadline) override {
    const auto held = lock();
    return index_->start_remove(op, batch, removal, now, deadline);
  }
  bool poll_index(Instant now, Completion& out) override {
    const auto held = lock();
    return index_->poll_index(now, out);
  }
  CloseReport close_index(Duration budget) override {
    const auto held = lock();
    return index_->close_index(budget);
  }

  StoreCapabilities capabilities() const override {
    const auto held = lock();
    return store_->capabilities();
  }
  void add_region(const Region& region) override {
    const auto held = lock();
    store_->add_region(region);
  }
  void remove_region(const Region& region) override {
    const auto held = lock();
    store_->remove_region(region);
  }
  bool start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override {
    const auto held = lock();
    return store_->start_put(op, batch, now, deadline);
  }
  bool start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override {
    const auto held = lock();
    return store_->start_get(op, batch, now, deadline);
  }
  void set_wakeup(Wakeup wakeup) override {
    const auto held = lock();
    store_->set_wakeup(wakeup);
  }
  bool poll_store(Instant now, Completion& out) override {
    const auto held = lock();
    return store_->poll_store(now, out);
  }
  CloseReport close_store(Duration budget) override {
    const auto held = lock();
    return store_->close_store(budget);
  }

 private:
  mutable std::mutex mutex_;
  const std::shared_ptr<ObjectStore> store_;
  const std::shared_ptr<ObjectIndex> index_;
};

}  // namespace kvprism::bindings
