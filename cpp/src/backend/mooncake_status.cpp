#include "mooncake_status.h"

#include <array>
#include <string_view>

#include "mooncake/abi.h"

namespace kvprism::detail {
namespace {

namespace mc = mooncake;

// Any failure after so long may be the end of a wait.
constexpr std::chrono::seconds kLongCall{20};

ItemStatus failure_of(MooncakeCall call, std::int64_t code) noexcept {
  const bool put = call == MooncakeCall::kPut;
  switch (code) {
    case mc::kObjectHasLease:
      return ItemStatus::kInUse;
    case mc::kReplicaNotReady:
    case mc::kReplicaBusy:
      if (call == MooncakeCall::kRemove) return ItemStatus::kInUse;
      return put ? ItemStatus::kFailed : ItemStatus::kNotReady;
    case mc::kObjectNotFound:
    case mc::kReplicaNotFound:
    case mc::kReplicaGone:
      return put ? ItemStatus::kFailed : ItemStatus::kMissing;
    case mc::kObjectExists:
      return put ? ItemStatus::kDuplicate : ItemStatus::kFailed;
    case mc::kNoAvailableHandle:
    case mc::kTenantQuota:
      return put ? ItemStatus::kNoSpace : ItemStatus::kFailed;
    case mc::kLeaseExpired:
      return ItemStatus::kLeaseLost;
    case mc::kChecksumMismatch:
      return ItemStatus::kChecksumMismatch;
    case mc::kInvalidKey:
      return ItemStatus::kInvalid;
    case mc::kBufferOverflow:
    case mc::kInvalidParameters:
      return call == MooncakeCall::kGet ? ItemStatus::kSizeMismatch : ItemStatus::kFailed;
    case mc::kIllegalClient:
    case mc::kRpcFailed:
      return ItemStatus::kUnavailable;
    case mc::kRpcTimedOut:
      return ItemStatus::kTimedOut;
    default:
      return ItemStatus::kFailed;
  }
}

}  // namespace

ItemResult mooncake_item(MooncakeCall call, std::int64_t code, std::uint64_t expected) noexcept {
  if (code < 0) return {failure_of(call, code), 0};
  switch (call) {
    case MooncakeCall::kExists:
      return {code == 0 ? ItemStatus::kMissing : ItemStatus::kOk, 0};
    case MooncakeCall::kPut:
      return {ItemStatus::kOk, expected};
    case MooncakeCall::kRemove:
      return {ItemStatus::kOk, 1};
    case MooncakeCall::kGet:
      break;
  }
  const auto bytes = static_cast<std::uint64_t>(code);
  return {bytes == expected ? ItemStatus::kOk : ItemStatus::kSizeMismatch, bytes};
}

std::string mooncake_prefix_pattern(std::string_view prefix) {
  std::string pattern = "^";
  for (const char c : prefix) {
    if (std::string_view("\\^$.|?*+()[]{}").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

bool mooncake_may_have_given_up(std::int64_t code, std::chrono::nanoseconds took) noexcept {
  if (code >= 0) return false;
  return code == mc::kTransferFailed || code == mc::kRpcFailed || code == mc::kRpcTimedOut ||
         took >= kLongCall;
}

bool mooncake_client_is_lost(std::int64_t code) noexcept { return code == mc::kIllegalClient; }

bool mooncake_master_is_silent(std::int64_t code) noexcept {
  return code == mc::kRpcFailed || code == mc::kRpcTimedOut;
}

std::string mooncake_code_text(std::int64_t code) {
  struct Word {
    int code;
    std::string_view text;
  };
  static constexpr std::array kWords = {
      Word{mc::kInternalError, "internal error"},
      Word{mc::kBufferOverflow, "buffer overflow"},
      Word{mc::kSegmentNotFound, "segment not found"},
      Word{mc::kClientNotFound, "client not found"},
      Word{mc::kNoAvailableHandle, "no space"},
      Word{mc::kInvalidKey, "invalid key"},
      Word{mc::kWriteFail, "write failed"},
      Word{mc::kInvalidParameters, "invalid parameters"},
      Word{mc::kIllegalClient, "client expired"},
      Word{mc::kReplicaNotReady, "replica not ready"},
      Word{mc::kObjectNotFound, "object not found"},
      Word{mc::kObjectExists, "object exists"},
      Word{mc::kObjectHasLease, "object has a lease"},
      Word{mc::kLeaseExpired, "lease expired"},
      Word{mc::kTransferFailed, "transfer failed"},
      Word{mc::kChecksumMismatch, "checksum mismatch"},
      Word{mc::kRpcFailed, "RPC failed"},
      Word{mc::kRpcTimedOut, "RPC timed out"},
      Word{mc::kNotSupported, "not supported"},
      Word{mc::kTenantQuota, "tenant quota"},
  };
  std::string text = std::to_string(code);
  for (const Word& word : kWords) {
    if (word.code == code) return text + " (" + std::string(word.text) + ")";
  }
  return text;
}

}  // namespace kvprism::detail
