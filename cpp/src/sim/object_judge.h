// Knows from outside what every stored object must be, and what a hit could be made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvprism/base/ids.h"
#include "kvprism/sim/group_model.h"
#include "kvprism/sim/token_trail.h"

namespace kvprism::sim {

struct HashOfHash {
  std::size_t operator()(const BlockHash& hash) const noexcept {
    std::size_t word;
    std::memcpy(&word, hash.data(), sizeof(word));
    return word;
  }
};

// Which prefixes hashes stand for and which objects were ever stored: outlives engines, as the pool
// does. It reads keys by itself: the last part is the hash in hex, the one before it the number of
// the stored group, the one before that begins with the rank.
class ObjectJudge {
 public:
  // Hits end on multiples of `alignment`.
  ObjectJudge(std::vector<GroupModel> groups, std::uint32_t ranks, std::uint32_t alignment,
              std::string layout);

  void learn(std::span<const std::uint8_t> hash, std::span<const std::uint32_t> tokens);
  // "" when the object is what its key says, byte for byte.
  std::string check(std::string_view key, std::span<const std::byte> bytes);
  // The longest usable prefix of `trail` by what was ever stored; chunks below `local` count as
  // there.
  std::uint32_t longest(const TokenTrail& trail, std::uint32_t local, std::uint32_t most) const;
  // What of a prefix of `tokens` was never stored, as far as it lies beyond `local`; nullopt when
  // nothing is missing.
  struct Missing {
    GroupId group{};
    std::uint32_t chunk = 0;
  };
  // A chunk that is used in part may be in a longer object of the same block, up to `most` tokens.
  // A layer's content in an object of the group that begins at `object`.
  PageView page_in_object(const GroupModel& group, std::uint32_t layer, std::byte* object) const;
  std::optional<Missing> missing(const TokenTrail& trail, std::uint32_t local, std::uint32_t tokens,
                                 std::uint32_t most) const;

  // Whether every rank has ever stored the object.
  bool seen(StoreIndex group, std::span<const std::uint8_t> hash) const;

  // Nothing that was stored up to now may be offered again.
  void forget_stored();

  const std::vector<GroupModel>& groups() const noexcept { return groups_; }
  std::uint32_t alignment() const noexcept { return alignment_; }
  std::uint64_t checked() const noexcept { return checked_; }

 private:
  bool seen(std::size_t stored, const BlockHash& hash) const;
  bool has_chunk(std::size_t stored, const TokenTrail& trail, std::uint32_t chunk,
                 std::uint32_t tokens, std::uint32_t most) const;

  std::vector<GroupModel> groups_;
  std::uint32_t ranks_;
  std::uint32_t alignment_;
  std::string layout_;
  std::vector<const GroupModel*> stored_;  // in the order of the engine's groups
  std::unordered_map<BlockHash, std::vector<std::uint32_t>, HashOfHash> prefixes_;
  std::vector<std::unordered_set<BlockHash, HashOfHash>> seen_;  // by stored group and rank
  std::vector<std::byte> expected_;
  std::uint64_t checked_ = 0;
};

}  // namespace kvprism::sim
