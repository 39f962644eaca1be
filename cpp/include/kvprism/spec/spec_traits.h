// How a spec behaves towards the store and towards a peer: a closed set of rules with parameters
// (decision 1).
#pragma once

#include <cstdint>
#include <string_view>

#include "kvprism/base/export.h"
#include "kvprism/spec/declared.h"

namespace kvprism {

// Which objects make a prefix usable.
enum class HitRule : std::uint8_t {
  kPrefix,     // every chunk from 0
  kWindow,     // the chunks of the last window-1 tokens
  kChunk,      // the chunks of the last attention chunk
  kLastState,  // the one object that ends the prefix
  kNever,      // no object at all
};

// Where the bytes of a save come from.
enum class SaveRule : std::uint8_t {
  kPositional,  // chunk i is entry i of the present table
  kHandOff,     // blocks that the engine names at a boundary, never read by position (R05)
  kNever,
};

// What travels from prefill to decode.
enum class PeerRule : std::uint8_t { kSuffix, kWindow, kState, kWhole, kNone };

KVPRISM_API std::string_view to_string(HitRule rule) noexcept;
KVPRISM_API std::string_view to_string(SaveRule rule) noexcept;
KVPRISM_API std::string_view to_string(PeerRule rule) noexcept;

// No member has a default: a new kind must say all of it (R64).
struct SpecTraits {
  Declared<bool> prefix_cacheable;  // may enter a hash-addressed store
  Declared<HitRule> hit;
  Declared<std::uint32_t> window;  // tokens; parameter of kWindow and kChunk, else 0
  Declared<SaveRule> save;
  Declared<PeerRule> peer;
  Declared<std::uint32_t> replay_tokens;  // recomputed until the cache is whole again (R14)
  Declared<bool> fine_grained_lookup;     // hits may end inside a block

  friend bool operator==(const SpecTraits&, const SpecTraits&) = default;
};

}  // namespace kvprism
