#include "kvprism/io/object_store.h"

namespace kvprism {

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
