#include "kvprism/spec/spec_traits.h"

namespace kvprism {

std::string_view to_string(HitRule rule) noexcept {
  switch (rule) {
    case HitRule::kPrefix:
      return "prefix";
    case HitRule::kWindow:
      return "window";
    case HitRule::kChunk:
      return "chunk";
    case HitRule::kLastState:
      return "last_state";
    case HitRule::kNever:
      return "never";
  }
  return "unknown";
}

std::string_view to_string(SaveRule rule) noexcept {
  switch (rule) {
    case SaveRule::kPositional:
      return "positional";
    case SaveRule::kHandOff:
      return "hand_off";
    case SaveRule::kNever:
      return "never";
  }
  return "unknown";
}

std::string_view to_string(PeerRule rule) noexcept {
  switch (rule) {
    case PeerRule::kSuffix:
      return "suffix";
    case PeerRule::kWindow:
      return "window";
    case PeerRule::kState:
      return "state";
    case PeerRule::kWhole:
      return "whole";
    case PeerRule::kNone:
      return "none";
  }
  return "unknown";
}

}  // namespace kvprism
