#include "kvprism/backend/memory_store.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backend/region_table.h"
#include "kvprism/base/error.h"

namespace kvprism {
namespace {

using Bytes = std::shared_ptr<const std::byte[]>;

struct Object {
  std::string key;
  std::uint64_t size = 0;
  std::uint64_t version = 0;  // 0: unfinished
  Instant unfinished_until{};
  Bytes bytes;
};

std::uint64_t item_bytes(const ObjectBatch& batch, std::size_t item) noexcept {
  std::uint64_t total = 0;
  for (std::uint32_t s = item == 0 ? 0 : batch.ends[item - 1]; s < batch.ends[item]; ++s) {
    total += batch.segments[s].length;
  }
  return total;
}

}  // namespace

struct MemoryPool::Impl {
  using Objects = std::list<Object>;  // front: used last

  MemoryPoolOptions options;
  mutable std::mutex mutex;
  Objects objects;
  std::unordered_map<std::string_view, Objects::iterator> by_key;
  std::map<std::uint64_t, Objects::iterator> by_version;
  std::uint64_t last_version = 0;
  MemoryPoolCounters counters;

  void drop(Objects::iterator at) {
    by_key.erase(at->key);
    if (at->version != 0) {
      by_version.erase(at->version);
      --counters.objects;
    } else {
      --counters.unfinished;
    }
    counters.bytes -= at->size;
    objects.erase(at);
  }

  bool make_room(std::uint64_t bytes) {
    if (options.capacity_bytes == 0) return true;
    if (bytes > options.capacity_bytes) return false;
    for (auto at = objects.end(); counters.bytes + bytes > options.capacity_bytes;) {
      if (!options.evict) return false;
      do {
        if (at == objects.begin()) return false;
        --at;
      } while (at->version == 0);
      const auto victim = at++;
      drop(victim);
      ++counters.evicted;
    }
    return true;
  }

  void touch(Objects::iterator at) { objects.splice(objects.begin(), objects, at); }

  // An unfinished object, or why there will be none.
  ItemStatus begin(const std::string& key, std::uint64_t bytes, Instant now) {
    const std::lock_guard lock(mutex);
    if (const auto found = by_key.find(key); found != by_key.end()) {
      const auto at = found->second;
      if (at->version != 0) {
        touch(at);
        return ItemStatus::kDuplicate;
      }
      if (now < at->unfinished_until) return ItemStatus::kDuplicate;
      drop(at);
    }
    if (!make_room(bytes)) {
      ++counters.refused;
      return ItemStatus::kNoSpace;
    }
    objects.push_front({key, bytes, 0, now + options.unfinished_for, nullptr});
    by_key.emplace(objects.front().key, objects.begin());
    counters.bytes += bytes;
    ++counters.unfinished;
    return ItemStatus::kOk;
  }

  // Publishes the bytes of an object that begin() made, unless another writer has replaced it
  // meanwhile.
  ItemStatus finish(const std::string& key, Bytes bytes, std::uint64_t size) {
    const std::lock_guard lock(mutex);
    const auto found = by_key.find(key);
    if (found == by_key.end()) return ItemStatus::kFailed;
    Object& object = *found->second;
    if (object.version != 0) return ItemStatus::kDuplicate;
    if (object.size != size) return ItemStatus::kFailed;
    object.bytes = std::move(bytes);
    object.version = ++last_version;
    by_version.emplace(object.version, found->second);
    --counters.unfinished;
    ++counters.objects;
    ++counters.stored;
    return ItemStatus::kOk;
  }

  ItemResult remove(const std::string& key, const Removal& removal) {
    const std::lock_guard lock(mutex);
    const auto may_go = [&](const Object& object) { return object.version != 0 || removal.leased; };
    if (!removal.prefix) {
      const auto found = by_key.find(key);
      if (found == by_key.end()) return {ItemStatus::kMissing, 0};
      if (!may_go(*found->second)) return {ItemStatus::kInUse, 0};
      drop(found->second);
      return {ItemStatus::kOk, 1};
    }
    std::uint64_t removed = 0;
    for (auto at = objects.begin(); at != objects.end();) {
      const auto object = at++;
      if (!object->key.starts_with(key) || !may_go(*object)) continue;
      drop(object);
      ++removed;
    }
    return {ItemStatus::kOk, removed};
  }

  ItemStatus find(const std::string& key, Bytes* bytes, std::uint64_t* size) {
    const std::lock_guard lock(mutex);
    const auto found = by_key.find(key);
    if (found == by_key.end()) return ItemStatus::kMissing;
    const auto at = found->second;
    if (at->version == 0) return ItemStatus::kNotReady;
    touch(at);
    if (bytes != nullptr) *bytes = at->bytes;
    if (size != nullptr) *size = at->size;
    return ItemStatus::kOk;
  }
};

MemoryPool::MemoryPool(const MemoryPoolOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
}
MemoryPool::~MemoryPool() = default;

const MemoryPoolOptions& MemoryPool::options() const noexcept { return impl_->options; }

MemoryPoolCounters MemoryPool::counters() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

bool MemoryPool::contains(std::string_view key) const {
  const std::lock_guard lock(impl_->mutex);
  const auto found = impl_->by_key.find(key);
  return found != impl_->by_key.end() && found->second->version != 0;
}

void MemoryPool::for_each_object(const ObjectVisitor& visit) const {
  for_each_new_object_since(0, visit);
}

std::uint64_t MemoryPool::for_each_new_object_since(std::uint64_t version,
                                                    const ObjectVisitor& visit) const {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->last_version == version) return version;
  for (auto at = impl_->by_version.upper_bound(version); at != impl_->by_version.end(); ++at) {
    const Object& object = *at->second;
    visit(object.key, {object.bytes.get(), static_cast<std::size_t>(object.size)});
  }
  return impl_->last_version;
}

bool MemoryPool::erase(std::string_view key) {
  const std::lock_guard lock(impl_->mutex);
  const auto found = impl_->by_key.find(key);
  if (found == impl_->by_key.end()) return false;
  impl_->drop(found->second);
  return true;
}

void MemoryPool::add_unfinished(std::string_view key, std::uint64_t bytes, Instant now) {
  (void)impl_->begin(std::string(key), bytes, now);
}

struct MemoryStore::Impl {
  enum class Kind { kExists, kRemove, kPut, kGet };
  static bool moves_bytes(Kind kind) { return kind == Kind::kPut || kind == Kind::kGet; }

  struct Operation {
    OpId id{};
    Kind kind{};
    Removal removal;
    std::unique_ptr<ObjectBatch> batch;
    std::vector<ItemResult> items;
    Instant started{};
    Instant due{};
    bool settled = false;  // nothing is left to do: the items say how it ended
  };
  // Exists and store operations may be used from two threads: each side has its own list.
  struct Side {
    std::deque<Operation> operations;  // in order of their start
    Instant latest{};                  // the last time that was told
    bool closed = false;
  };

  std::shared_ptr<MemoryPool> pool;
  MemoryStoreOptions options;
  detail::RegionTable regions;
  Side index;
  Side store;

  bool start(Side& side, Kind kind, OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
             Instant deadline, const Removal& removal = {}) {
    side.latest = std::max(side.latest, now);
    if (side.closed) return false;
    if (options.max_operations != 0 && side.operations.size() >= options.max_operations)
      return false;
    Operation operation{op, kind, removal, std::move(batch), {}, now, now + options.latency, false};
    operation.items.resize(operation.batch->keys.size(), {ItemStatus::kOk, 0});
    if (now >= deadline) {
      settle(operation, ItemStatus::kTimedOut);
    } else {
      admit(operation, now);
    }
    side.operations.push_back(std::move(operation));
    return true;
  }

  static void settle(Operation& operation, ItemStatus status) {
    for (ItemResult& item : operation.items) item = {status, 0};
    operation.settled = true;
  }

  // Refuses items that must not be touched; begins the objects of a put.
  void admit(Operation& operation, Instant now) {
    const ObjectBatch& batch = *operation.batch;
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < operation.items.size(); ++i) {
      ItemResult& item = operation.items[i];
      if (batch.keys[i].empty() || (moves_bytes(operation.kind) && !valid(batch, i, bytes))) {
        item.status = ItemStatus::kInvalid;
        continue;
      }
      if (!moves_bytes(operation.kind)) continue;
      const std::uint64_t size = item_bytes(batch, i);
      bytes += size;
      if (operation.kind == Kind::kPut) item.status = pool->impl_->begin(batch.keys[i], size, now);
    }
    operation.due =
        operation.due + options.latency_per_kib * static_cast<std::int64_t>(bytes / 1024);
  }

  bool valid(const ObjectBatch& batch, std::size_t item, std::uint64_t bytes_before) const {
    if (item >= batch.ends.size()) return false;
    const std::uint32_t first = item == 0 ? 0 : batch.ends[item - 1];
    const std::uint32_t end = batch.ends[item];
    if (first >= end || end > batch.segments.size()) return false;
    for (std::uint32_t s = first; s < end; ++s) {
      if (batch.segments[s].length == 0 || !regions.covers(batch.segments[s])) return false;
    }
    if (options.max_segments_per_call != 0 && end > options.max_segments_per_call) return false;
    return options.max_bytes_per_call == 0 ||
           bytes_before + item_bytes(batch, item) <= options.max_bytes_per_call;
  }

  void run(Operation& operation, Instant now) {
    if (operation.settled) return;
    const ObjectBatch& batch = *operation.batch;
    for (std::size_t i = 0; i < operation.items.size(); ++i) {
      ItemResult& item = operation.items[i];
      if (item.status != ItemStatus::kOk) continue;
      switch (operation.kind) {
        case Kind::kExists:
          item.status = pool->impl_->find(batch.keys[i], nullptr, nullptr);
          break;
        case Kind::kRemove:
          item = pool->impl_->remove(batch.keys[i], operation.removal);
          break;
        case Kind::kPut:
          item = put(batch, i);
          break;
        case Kind::kGet:
          item = get(batch, i, now - operation.started);
          break;
      }
    }
  }

  ItemResult put(const ObjectBatch& batch, std::size_t item) const {
    const std::uint64_t size = item_bytes(batch, item);
    std::shared_ptr<std::byte[]> bytes(new std::byte[size]);
    std::byte* to = bytes.get();
    for (std::uint32_t s = item == 0 ? 0 : batch.ends[item - 1]; s < batch.ends[item]; ++s) {
      std::memcpy(to, batch.segments[s].base, batch.segments[s].length);
      to += batch.segments[s].length;
    }
    const ItemStatus status = pool->impl_->finish(batch.keys[item], std::move(bytes), size);
    return {status, status == ItemStatus::kOk ? size : 0};
  }

  ItemResult get(const ObjectBatch& batch, std::size_t item, Duration took) const {
    Bytes bytes;
    std::uint64_t size = 0;
    const ItemStatus status = pool->impl_->find(batch.keys[item], &bytes, &size);
    if (status != ItemStatus::kOk) return {status, 0};
    if (size != item_bytes(batch, item)) return {ItemStatus::kSizeMismatch, 0};
    const bool lease_lost = options.lease.ns > 0 && took > options.lease;
    const std::byte* from = bytes.get();
    for (std::uint32_t s = item == 0 ? 0 : batch.ends[item - 1]; s < batch.ends[item]; ++s) {
      const Segment& segment = batch.segments[s];
      if (lease_lost) {
        std::memset(segment.base, 0x5e,
                    segment.length);  // the memory belongs to another object by now
      } else {
        std::memcpy(segment.base, from, segment.length);
      }
      from += segment.length;
    }
    if (lease_lost) return {ItemStatus::kLeaseLost, 0};
    return {ItemStatus::kOk, size};
  }

  bool poll(Side& side, Instant now, Completion& out) {
    side.latest = std::max(side.latest, now);
    auto done = side.operations.end();
    for (auto at = side.operations.begin(); at != side.operations.end(); ++at) {
      if (at->due <= now && (done == side.operations.end() || at->due < done->due)) done = at;
    }
    if (done == side.operations.end()) return false;
    run(*done, now);
    out.op = done->id;
    out.outcome = true;
    out.quiet = true;
    out.items = std::move(done->items);
    out.batch = std::move(done->batch);
    side.operations.erase(done);
    return true;
  }

  CloseReport close(Side& side, Duration budget) {
    if (side.closed) return {};
    side.closed = true;
    for (Operation& operation : side.operations) {
      if (operation.due - side.latest > budget) settle(operation, ItemStatus::kCancelled);
      operation.due = operation.started;  // told at the next poll
    }
    return {};
  }
};

MemoryStore::MemoryStore(std::shared_ptr<MemoryPool> pool, const MemoryStoreOptions& options)
    : impl_(std::make_unique<Impl>()) {
  if (!pool) fail(ErrorCode::kInvalidArgument, "memory store", {"pool", "null", "a pool", {}});
  impl_->pool = std::move(pool);
  impl_->options = options;
}
MemoryStore::~MemoryStore() = default;

bool MemoryStore::start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                               Instant deadline) {
  return impl_->start(impl_->index, Impl::Kind::kExists, op, batch, now, deadline);
}
bool MemoryStore::start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal,
                               Instant now, Instant deadline) {
  return impl_->start(impl_->index, Impl::Kind::kRemove, op, batch, now, deadline, removal);
}
bool MemoryStore::poll_index(Instant now, Completion& out) {
  return impl_->poll(impl_->index, now, out);
}
CloseReport MemoryStore::close_index(Duration budget) { return impl_->close(impl_->index, budget); }

StoreCapabilities MemoryStore::capabilities() const {
  return {"memory", impl_->options.max_segments_per_call, impl_->options.max_bytes_per_call, false};
}

void MemoryStore::add_region(const Region& region) {
  if (region.base == nullptr || region.length == 0 || region.device >= 0) {
    fail(ErrorCode::kInvalidArgument, "memory store",
         {"region",
          std::to_string(region.length) + " bytes on device " + std::to_string(region.device),
          "host memory of at least 1 byte",
          {}});
  }
  if (impl_->store.closed) {
    fail(ErrorCode::kClosed, "memory store",
         {"region", std::to_string(region.length) + " bytes", "an open store", {}});
  }
  switch (impl_->regions.fit(region)) {
    case detail::RegionTable::Fit::kNew:
      impl_->regions.insert(region);
      return;
    case detail::RegionTable::Fit::kEqual:
      return;
    case detail::RegionTable::Fit::kOverlap:
      fail(ErrorCode::kInvalidArgument, "memory store",
           {"region",
            std::to_string(region.length) + " bytes",
            "no overlap with a registered region",
            {}});
  }
}
void MemoryStore::remove_region(const Region& region) { impl_->regions.erase(region); }

bool MemoryStore::start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                            Instant deadline) {
  return impl_->start(impl_->store, Impl::Kind::kPut, op, batch, now, deadline);
}
bool MemoryStore::start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                            Instant deadline) {
  return impl_->start(impl_->store, Impl::Kind::kGet, op, batch, now, deadline);
}
bool MemoryStore::poll_store(Instant now, Completion& out) {
  return impl_->poll(impl_->store, now, out);
}
CloseReport MemoryStore::close_store(Duration budget) { return impl_->close(impl_->store, budget); }

}  // namespace kvprism
