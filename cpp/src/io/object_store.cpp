#include "kvprism/io/object_store.h"

namespace kvprism {

std::uint64_t OneUser::begin_use() noexcept {
  if (in_use_.exchange(true, std::memory_order_acq_rel)) return 0;
  return users_.fetch_add(1, std::memory_order_relaxed) + 1;
}
void OneUser::end_use() noexcept { in_use_.store(false, std::memory_order_release); }

ObjectIndex::~ObjectIndex() = default;
ObjectStore::~ObjectStore() = default;

bool ObjectIndex::start_remove(OpId, std::unique_ptr<ObjectBatch>&, const Removal&, Instant,
                               Instant) {
  return false;
}

std::string_view to_string(ItemStatus status) noexcept {
  switch (status) {
    case ItemStatus::kOk:
      return "ok";
    case ItemStatus::kDuplicate:
      return "duplicate";
    case ItemStatus::kMissing:
      return "missing";
    case ItemStatus::kNotReady:
      return "not_ready";
    case ItemStatus::kNoSpace:
      return "no_space";
    case ItemStatus::kLeaseLost:
      return "lease_lost";
    case ItemStatus::kSizeMismatch:
      return "size_mismatch";
    case ItemStatus::kChecksumMismatch:
      return "checksum_mismatch";
    case ItemStatus::kInvalid:
      return "invalid";
    case ItemStatus::kFailed:
      return "failed";
    case ItemStatus::kUnavailable:
      return "unavailable";
    case ItemStatus::kTimedOut:
      return "timed_out";
    case ItemStatus::kCancelled:
      return "cancelled";
    case ItemStatus::kInUse:
      return "in_use";
  }
  return "unknown";
}

}  // namespace kvprism
