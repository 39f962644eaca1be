// A store that misbehaves on purpose, from a seed and in the caller's time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/io/object_store.h"
#include "kvprism/run/instant.h"

namespace kvprism {

enum class FaultKind : std::uint8_t {
  // Of puts and gets.
  kFailCall,     // nothing is done, every item failed
  kFailItems,    // some items failed
  kUnavailable,  // nothing is done, the service is away
  kDelay,        // done later than expected
  kHang,         // no outcome until release_hung() or close
  kLandLate,     // told as failed and not quiet; the bytes move afterwards, then it is quiet
  kRefuse,       // start returns false
  // Of gets.
  kTruncate,       // a part of an item's bytes arrives, then it fails
  kCorrupt,        // other bytes arrive and are told as kChecksumMismatch
  kSilentCorrupt,  // other bytes arrive and are told as kOk: only for tests of tests
  kLateQuiet,      // outcome ok; the same bytes are written once more before it is quiet
  kVanished,       // some items are kMissing although a lookup saw them (R44)
  kNotReady,       // some items are kNotReady (R46)
  kLeaseLost,      // some items are spoilt and told as kLeaseLost (R43)
  // Of puts.
  kNoSpace,    // some items find the pool full (R50)
  kDuplicate,  // another writer was faster (R47)
  // Of lookups.
  kLookupFailed,   // every key kUnavailable
  kLookupLate,     // answered after a long time
  kLookupRefused,  // start returns false
  // Of removals.
  kRemoveFailed,  // nothing is removed, every key kUnavailable
  // More of puts.
  kLostAnswer,  // everything is stored, and told as failed (R53)
  kReadLate,    // outcome ok; the sources are read once more before it is quiet
  // More of removals.
  kRemoveLate,  // told as unavailable and not quiet; done afterwards, then it is quiet
  // More of puts and gets.
  kClientLost,  // all calls in flight are told as timed out and not quiet, and land afterwards;
                // until a new client is there, everything is kUnavailable
};
inline constexpr std::size_t kNumFaultKinds = 24;

KVPRISM_API std::string_view to_string(FaultKind kind) noexcept;

struct FaultPlan {
  std::uint64_t seed = 1;
  // Chance of each kind per operation it can befall, in 1/10,000. An operation meets at most one
  // fault.
  std::array<std::uint16_t, kNumFaultKinds> chance{};
  Duration delay = milliseconds(20);  // kDelay: up to this
  // kLandLate, kLateQuiet, kReadLate, kRemoveLate: up to this, from the outcome; kClientLost: up to
  // this without a client.
  Duration late = milliseconds(100);
  Duration lookup_late = milliseconds(1000);  // kLookupLate: up to this
  Duration region_delay{};                    // add_region takes so much longer, in real time
  // What is not quiet when the store is closed still lands for whoever goes on polling.
  bool lands_after_close = false;

  std::uint16_t& operator[](FaultKind kind) noexcept {
    return chance[static_cast<std::size_t>(kind)];
  }
  std::uint16_t operator[](FaultKind kind) const noexcept {
    return chance[static_cast<std::size_t>(kind)];
  }
};

struct FaultCount {
  FaultKind kind{};
  std::uint64_t raised = 0;
};

// Wraps a store and an index, which may be one object, or null where it is not used.
// Ownership: shares both. Threads: one, for both interfaces.
class KVPRISM_API FaultInjector final : public ObjectStore, public ObjectIndex {
 public:
  FaultInjector(std::shared_ptr<ObjectStore> store, std::shared_ptr<ObjectIndex> index,
                const FaultPlan& plan);
  ~FaultInjector() override;

  // One row per kind.
  std::vector<FaultCount> table() const;
  // A new plan for operations that start from now on.
  void set_plan(const FaultPlan& plan);
  // Operations without an outcome for ever, until this lets them run.
  std::size_t hung() const noexcept;
  void release_hung();
  // Puts and gets that are not quiet.
  std::size_t unquiet() const noexcept;
  // What kReadLate reads: a key, and the bytes of its sources just before they are quiet.
  using LateRead = std::function<void(std::string_view key, std::span<const std::byte> bytes)>;
  void set_late_read(LateRead read);

  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                    Instant deadline) override;
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
  void set_wakeup(Wakeup wakeup) override;
  bool poll_store(Instant now, Completion& out) override;
  // What hangs or lands late ends as kCancelled and stays unquiet: its memory must stay mapped.
  // With lands_after_close so does what the inner store has begun.
  CloseReport close_store(Duration budget) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvprism
