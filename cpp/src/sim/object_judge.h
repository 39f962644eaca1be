// Knows from outside what every stored object must be, and what a hit could be made of.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
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

// What every rank has in common.
struct WorldShape {
  std::uint32_t tp = 1;
  std::uint32_t dcp = 1;
  std::uint32_t pcp = 1;
  std::uint32_t alignment = 0;  // hits end on multiples of it
  std::uint32_t step = 0;       // S
  std::string layout;
  bool vllm_keys = false;
};

// Where an object lies, read from the text of its key.
struct ObjectPlace {
  std::size_t stored = 0;  // index among the stored groups
  std::uint32_t stage = 0;
  std::uint32_t pcp = 0;    // rank
  std::uint32_t shard = 0;  // among the stage's tensor ranks; replicas may share one
  BlockHash hash{};
};

// Which prefixes hashes stand for and which objects were ever stored: outlives engines, as the pool
// does. It reads keys by itself: the last part is the hash in hex, the one before it the number of
// the stored group, and before that are the ranks.
class ObjectJudge {
 public:
  // `whole` has all layers, `stages` those of each pipeline stage.
  ObjectJudge(std::vector<GroupModel> whole, std::vector<std::vector<GroupModel>> stages,
              WorldShape shape);

  void learn(std::span<const std::uint8_t> hash, std::span<const std::uint32_t> tokens);
  // "" when the object is what its key says, byte for byte.
  std::string check(std::string_view key, std::span<const std::byte> bytes);
  // "" and the place, or what is wrong with the key.
  std::string read_key(std::string_view key, ObjectPlace& place) const;
  // Of the object that a rank loads.
  std::uint32_t shard_of(std::size_t stored, std::uint32_t tensor_rank) const noexcept {
    return tensor_rank / sharing(stored);
  }

  // The longest prefix of `trail` of which a lookup that may see `probed` tokens must find all, by
  // what was ever stored; chunks below `local` count as there.
  std::uint32_t longest(const TokenTrail& trail, std::uint32_t local, std::uint32_t most,
                        std::uint32_t probed) const;
  // The longest prefix, a multiple of S, that the groups which need all of a prefix have.
  std::uint32_t shared(const TokenTrail& trail, std::uint32_t local, std::uint32_t most) const;

  struct Missing {
    GroupId group{};
    std::uint32_t chunk = 0;
  };
  // What a usable prefix of `tokens` needs and was never stored, as far as it lies beyond `local`;
  // a chunk of each group at most. A chunk that is used in part may be in a longer object of the
  // same block, up to `most` tokens. With `behind` also what drafts need behind the prefix.
  enum class Behind : std::uint8_t {
    kNothing,
    kCertain,  // what every search must have seen
    kAll,      // with which any search is certain to find it
    kStored,   // the same, or longer objects of those blocks
  };
  std::vector<Missing> missing(const TokenTrail& trail, std::uint32_t local, std::uint32_t tokens,
                               std::uint32_t most, Behind behind) const;

  // Whether every rank has ever stored the object.
  bool seen(StoreIndex group, std::span<const std::uint8_t> hash) const;
  // The prefix that a hash stands for; empty when nobody made it.
  std::span<const std::uint32_t> tokens_of(const BlockHash& hash) const;

  // Nothing that was stored up to now may be offered again.
  void forget_stored();

  const std::vector<GroupModel>& groups() const noexcept { return groups_; }
  const GroupModel& stored_group(std::size_t stored) const noexcept { return *stored_[stored]; }
  std::size_t num_stored() const noexcept { return stored_.size(); }
  std::uint32_t alignment() const noexcept { return shape_.alignment; }
  // Whether anybody stores objects at that place. Schema `vllm` has one of every group everywhere.
  bool has_place(const ObjectPlace& place) const noexcept {
    return shape_.vllm_keys || holds(place.stage, place.stored);
  }
  // Whether a stage holds no layers of a stored group.
  bool bare_stages() const noexcept;
  std::uint64_t checked() const noexcept { return checked_; }
  // By kind: of those, what was compared with the oracle.
  const std::array<std::uint64_t, kStoredKinds>& checked_kinds() const noexcept {
    return checked_kinds_;
  }

 private:
  // Tensor ranks that share a key of the group.
  std::uint32_t sharing(std::size_t stored) const noexcept {
    return shape_.dcp > 1 ? 1 : stored_[stored]->replicas;
  }
  // As many prefill ranks as context ranks are the context ranks; else tensor ranks are.
  std::uint32_t context_rank(const ObjectPlace& place) const noexcept {
    const bool over_prefill = shape_.pcp > 1 && shape_.dcp == shape_.pcp;
    return (over_prefill ? place.pcp : place.shard) % shape_.dcp;
  }
  bool holds(std::uint32_t stage, std::size_t stored) const noexcept {
    return stages_[stage][raw(stored_[stored]->id)].layers() != 0;
  }
  std::string check_bare(std::uint32_t stage, std::span<const std::byte> bytes) const;
  bool seen(std::size_t stored, const BlockHash& hash) const;
  bool has_chunk(std::size_t stored, const TokenTrail& trail, std::uint32_t chunk,
                 std::uint32_t tokens, std::uint32_t most) const;
  bool lacks(std::size_t stored, const TokenTrail& trail, std::uint32_t local, std::uint32_t tokens,
             std::uint32_t most, Behind behind, std::uint32_t& chunk) const;
  bool lacks_behind(std::size_t stored, const TokenTrail& trail, std::uint32_t tokens,
                    std::uint32_t most, Behind behind, std::uint32_t& chunk) const;
  // A layer's content in an object of the group that begins at `object`.
  PageView page_in_object(const GroupModel& group, std::uint32_t layer, std::byte* object) const;

  std::vector<GroupModel> groups_;
  std::vector<std::vector<GroupModel>> stages_;
  WorldShape shape_;
  std::vector<const GroupModel*> stored_;  // in the order of the engine's groups
  std::size_t families_ = 0;
  std::size_t draft_families_ = 0;
  std::unordered_map<BlockHash, std::vector<std::uint32_t>, HashOfHash> prefixes_;
  // By stored group: which of its shards (bits) were ever stored.
  std::vector<std::unordered_map<BlockHash, std::uint32_t, HashOfHash>> seen_;
  std::vector<std::uint32_t> everywhere_;  // by stored group: all of them
  std::vector<std::byte> expected_;
  std::uint64_t checked_ = 0;
  std::array<std::uint64_t, kStoredKinds> checked_kinds_{};
};

}  // namespace kvprism::sim
