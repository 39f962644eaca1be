// Objects in this process's memory: the store of tests and simulations, and a pool that outlives an
// engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "kvprism/base/export.h"
#include "kvprism/io/object_store.h"
#include "kvprism/run/instant.h"

namespace kvprism {

struct MemoryPoolOptions {
  std::uint64_t capacity_bytes = 0;  // 0: no limit
  bool evict = true;  // makes room by dropping the least recently used; false: kNoSpace
  Duration unfinished_for =
      seconds(30);  // an object whose writer died may be written again after this (R46)
};

struct MemoryPoolCounters {
  std::uint64_t objects = 0;     // finished ones, now
  std::uint64_t unfinished = 0;  // now
  std::uint64_t bytes = 0;       // of both
  std::uint64_t stored = 0;      // finished ones, ever
  std::uint64_t evicted = 0;
  std::uint64_t refused = 0;  // kNoSpace
};

// What the clients share. Ownership: owns the objects. Threads: any.
class KVPRISM_API MemoryPool {
 public:
  explicit MemoryPool(const MemoryPoolOptions& options = {});
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  const MemoryPoolOptions& options() const noexcept;
  MemoryPoolCounters counters() const;

  // A look from outside: does not count as a use.
  bool contains(std::string_view key) const;
  // Must not call the pool, whose lock is held.
  using ObjectVisitor = std::function<void(std::string_view key, std::span<const std::byte> bytes)>;
  void for_each_object(const ObjectVisitor& visit) const;
  // Objects finished after the `version` that an earlier call returned (0 at first), oldest first;
  // those dropped meanwhile are left out.
  std::uint64_t for_each_new_object_since(std::uint64_t version, const ObjectVisitor& visit) const;

  // The test's own hand in the pool.
  bool erase(std::string_view key);
  void add_unfinished(std::string_view key, std::uint64_t bytes, Instant now);

 private:
  friend class MemoryStore;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct MemoryStoreOptions {
  Duration latency{};          // of every operation; none: done at the next poll
  Duration latency_per_kib{};  // more, for the bytes of puts and gets
  Duration
      lease{};  // a get that takes longer ends as kLeaseLost with spoilt bytes (R43); 0: endless
  std::uint32_t max_segments_per_call = 0;  // 0: no limit; items beyond it are kInvalid
  std::uint64_t max_bytes_per_call = 0;
  std::uint32_t max_operations = 0;  // in flight, of each interface; 0: no limit
};

// A client of a pool, in the caller's time: an operation started at `now` is done at the first poll
// whose `now` is late enough. Sources are read and destinations written then, at once. Ownership:
// shares the pool.
class KVPRISM_API MemoryStore final : public ObjectStore, public ObjectIndex {
 public:
  explicit MemoryStore(std::shared_ptr<MemoryPool> pool, const MemoryStoreOptions& options = {});
  ~MemoryStore() override;

  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                    Instant deadline) override;
  // An object whose writer has not finished is in use.
  bool start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal,
                    Instant now, Instant deadline) override;
  bool poll_index(Instant now, Completion& out) override;
  CloseReport close_index(Duration budget) override;

  StoreCapabilities capabilities() const override;
  void add_region(const Region& region) override;
  void remove_region(const Region& region) override;
  bool start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override;
  bool start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override;
  bool poll_store(Instant now, Completion& out) override;
  CloseReport close_store(Duration budget) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvprism
