// The outside world of the store path: asynchronous start and poll, nothing else. No call here
// waits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/key/key_slots.h"
#include "kvprism/layout/segment.h"
#include "kvprism/run/instant.h"

namespace kvprism {

// Chosen by the caller; unique among its operations that are not yet quiet.
enum class OpId : std::uint64_t {};

enum class ItemStatus : std::uint8_t {
  kOk,                // exists: present; put: stored; get: every byte arrived
  kDuplicate,         // put: an object of that key was there already; its bytes stay (R47)
  kMissing,           // exists, get: no such object (never stored, evicted, removed: R44)
  kNotReady,          // exists, get: its writer has not finished or died (R46); a miss
  kNoSpace,           // put: the pool is full (R50)
  kLeaseLost,         // get: the lease ran out before the bytes had arrived (R43)
  kSizeMismatch,      // get: the object is longer or shorter than the buffer
  kChecksumMismatch,  // get: the bytes are not those that were stored (R42)
  kInvalid,      // refused before any call: empty key, no segment, length 0, address outside every
                 // region
  kFailed,       // the transfer failed
  kUnavailable,  // the service cannot be reached, or its circuit is open
  kTimedOut,     // no answer within the bound
  kCancelled,    // closed before it was done
  kInUse,        // remove: somebody may be reading or writing it; it stays
};
constexpr ItemStatus kLastItemStatus = ItemStatus::kInUse;

KVPRISM_API std::string_view to_string(ItemStatus status) noexcept;

// True for put results after which the object is in the store.
constexpr bool stored(ItemStatus status) noexcept {
  return status == ItemStatus::kOk || status == ItemStatus::kDuplicate;
}

struct ItemResult {
  ItemStatus status = ItemStatus::kCancelled;
  std::uint64_t bytes = 0;  // moved for this item

  bool operator==(const ItemResult&) const = default;
};

// Keys, and for put and get the segments of each: item i owns segments [ends[i-1], ends[i]).
// Ownership: owns keys and lists, never the bytes. Threads: one owner at a time.
struct ObjectBatch {
  KeySlots keys;
  std::vector<Segment> segments;
  std::vector<std::uint32_t> ends;

  void clear() {
    keys.clear();
    segments.clear();
    ends.clear();
  }
};

// One of the ends of an operation, or both. `outcome`: `items` has a result per key. `quiet`: no
// native call can read the operation's sources or write its destinations any more, and `batch`
// comes back for reuse. Each is delivered exactly once per operation; quiet never precedes outcome,
// and may follow it much later (decision 5).
struct Completion {
  OpId op{};
  bool outcome = false;
  bool quiet = false;
  std::vector<ItemResult> items;
  std::unique_ptr<ObjectBatch> batch;
};

// What is still unfinished after close().
struct CloseReport {
  // Operations whose memory native code may still touch, and regions that a client may still have
  // registered: the memory must stay mapped.
  std::size_t unquiet = 0;
  std::vector<OpId> ops;  // those operations
};

// What start_remove takes away.
struct Removal {
  bool prefix = false;  // the batch's one key is a prefix: every object whose key begins with it
  // Also what is being read. Only for objects that no reader may believe: Mooncake gives the memory
  // to another object while the reader's lease still runs.
  bool leased = false;
};

// Completions go to whoever polls, so each side of a store has one user at a time: a StoreScheduler
// its index, a StoreWorker its store, for as long as they live. They refuse a side that is in use.
class KVPRISM_API OneUser {
 public:
  OneUser() noexcept = default;
  OneUser(const OneUser&) = delete;
  OneUser& operator=(const OneUser&) = delete;

  // The number of this user, from 1, or 0 while there is another one. Threads: any.
  std::uint64_t begin_use() noexcept;
  void end_use() noexcept;

 protected:
  ~OneUser() = default;

 private:
  std::atomic<bool> in_use_{false};
  std::atomic<std::uint64_t> users_{0};
};

// Asks which keys exist. The answer is a hint (R44). Removes objects.
// Threads: start and poll from one thread at a time.
class KVPRISM_API ObjectIndex : public OneUser {
 public:
  virtual ~ObjectIndex();

  // Takes the batch (keys only) and returns true, or leaves it alone and returns false (queue full,
  // closed).
  virtual bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                            Instant deadline) = 0;

  // Takes the batch (keys only) and returns true, or leaves it alone and returns false (queue full,
  // closed, or an index that cannot remove). Items: kOk (`bytes` is the number of objects removed),
  // kMissing, kInUse; with `prefix` what is in use is left out silently and the item is kOk.
  virtual bool start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal,
                            Instant now, Instant deadline);

  // Fills the next completion; false when there is none at `now`.
  virtual bool poll_index(Instant now, Completion& out) = 0;

  // Drains for at most `budget`; idempotent. Operations not done by then end as kCancelled.
  virtual CloseReport close_index(Duration budget) = 0;
};

// Called from any thread when a completion may be ready; must not block and must not call the
// store.
struct Wakeup {
  void (*call)(void* context) = nullptr;
  void* context = nullptr;
};

struct StoreCapabilities {
  std::string name;                     // e.g. "mooncake 0.3.13.post1 tcp"
  std::uint32_t max_segments_per_call;  // items times segments; 0 = no limit
  std::uint64_t max_bytes_per_call;     // 0 = no limit
  bool device_memory;                   // may move accelerator memory
};

// Stores and fetches objects. Memory must lie in a region; every descriptor is checked against them
// (R59, R61). Threads: start and poll from one thread at a time; add_region and remove_region
// before and after.
class KVPRISM_API ObjectStore : public OneUser {
 public:
  virtual ~ObjectStore();

  virtual StoreCapabilities capabilities() const = 0;

  // Registers memory for the life of this store, also with a client that replaces a broken one.
  // Idempotent for an equal region. Throws Error (kUnavailable, kInvalidArgument on a partial
  // overlap, kClosed after close_store).
  virtual void add_region(const Region& region) = 0;
  virtual void remove_region(const Region& region) = 0;

  // Take the batch and return true, or leave it alone and return false (queue full, closed). One
  // that throws has begun nothing if it leaves the batch alone; else its quiet is still to come.
  // Not started by `deadline`: ends as kTimedOut and quiet.
  virtual bool start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                         Instant deadline) = 0;
  virtual bool start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                         Instant deadline) = 0;

  // Set before the first start, for whoever would otherwise poll in a loop. A store that has no
  // threads ignores it.
  virtual void set_wakeup(Wakeup) {}

  // Fills the next completion; false when there is none at `now`.
  virtual bool poll_store(Instant now, Completion& out) = 0;

  // Drains for at most `budget`; idempotent.
  virtual CloseReport close_store(Duration budget) = 0;
};

}  // namespace kvprism
