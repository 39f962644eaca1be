// Asks the index for the prefixes of many requests in one call and turns the answers into hit
// lengths (decision 9).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvprism/hit/hit_search.h"
#include "kvprism/hit/reachable_mask.h"
#include "kvprism/io/object_store.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/run/instant.h"
#include "store/make_room.h"
#include "store/recent_prefixes.h"

namespace kvprism::detail {

// Of all questions; a single one's first round may have more.
inline constexpr std::uint64_t kLookupKeysPerCall = 1u << 16;

// What the first round of a question has found where it does not tell the hit. Hits inside blocks
// have many places, and few of them matter: the first round asks for whole chunks, and for what
// lies inside the first and the last one; the second for what the first leaves open.
struct FirstRound {
  Presence presence;
  std::uint32_t low = 0;     // tokens: the hit that is proven
  std::uint32_t whole = 0;   // tokens: all that prefix groups need is there as whole chunks
  std::uint32_t high = 0;    // tokens: no longer hit is possible, what drafts need included
  std::uint32_t states = 0;  // tokens: states are asked for beyond
  std::uint64_t keys = 0;    // of the second round
};

// One question: which hit in (local, limit] does the store offer?
struct Question {
  RequestId request{};
  std::uint64_t serial = 0;  // tells a request's present question from its earlier ones
  std::uint32_t local = 0;   // tokens
  std::uint32_t probed = 0;  // tokens, a multiple of A: what drafts need lies beyond a hit
  std::uint32_t limit = 0;   // tokens, a multiple of A, at most probed
  HashList hashes;           // valid while ask() runs
  std::unique_ptr<const FirstRound> first_round = nullptr;  // present in the second
};

// A chunk of a group, by where the prefix ends that it is named by.
struct PrefixEnd {
  StoreIndex group{};
  std::uint32_t tokens = 0;
};

struct Answer {
  RequestId request{};
  std::uint64_t serial = 0;
  std::uint32_t hit = 0;     // tokens, at least local
  std::uint32_t shared = 0;  // tokens that others have stored of this prompt, windows aside
  bool failed = false;       // the index could not tell: counted as a miss
  // By group, where hits may end inside a block: tokens of the prefix whose object holds the last
  // chunk of the hit. Else empty.
  std::vector<std::uint32_t> tails;
  std::vector<PrefixEnd> gone{};  // what some rank's object is missing of, if the desk is to say so
  // Not null: the question must be asked again, with it; until then the rest is what is proven.
  std::unique_ptr<const FirstRound> first_round = nullptr;
  bool asked = true;  // false: all that could be asked for is avoided, so nobody was
};

// What has become of a removal.
struct Removed {
  OpId op{};
  std::vector<ItemResult> items;
};

struct LookupCounters {
  std::uint64_t calls = 0;
  std::uint64_t keys = 0;
  std::uint64_t avoided = 0;
};

// Ownership: shares schema and index. Threads: one.
class LookupDesk {
 public:
  // Operations are numbered from `first_op` on. With `tells_gone` answers say what is missing.
  LookupDesk(std::shared_ptr<const KeySchema> schema, std::shared_ptr<ObjectIndex> index,
             std::uint64_t first_op, bool tells_gone);

  // All questions as one call. Questions of a refused call are answered at once, as failed. Chunks
  // in `avoid` count as absent and are not asked for, which would renew their leases; a call for
  // nothing else is not made. Takes their first rounds.
  void ask(std::vector<Question>& questions, const Avoided& avoid, Instant now, Instant deadline,
           std::vector<Answer>& answers);

  // No first round from `local` to `probed` tokens has more keys.
  std::uint64_t most_keys(std::uint32_t local, std::uint32_t probed) const noexcept;

  // Appends the answers that have arrived.
  void poll(Instant now, std::vector<Answer>& answers);

  // Removes the objects of the keys that `fill` appends; nothing when it appends none. The op that
  // take_removed() names, or nothing when the index refuses.
  template <class Fill>
  std::optional<OpId> remove(const Removal& removal, Instant now, Instant deadline, Fill fill) {
    std::unique_ptr<ObjectBatch> batch = take_batch();
    fill(batch->keys);
    const OpId op{next_op_++};
    make_room(removals_, 1);
    make_room(removed_, removals_.size() + 1);
    if (batch->keys.size() != 0 && index_->start_remove(op, batch, removal, now, deadline)) {
      removals_.push_back(op);
      return op;
    }
    idle_batches_.push_back(std::move(batch));
    return std::nullopt;
  }
  bool take_removed(Removed& out);

  // Calls without an outcome.
  std::size_t in_flight() const noexcept { return calls_.size() + removals_.size(); }
  // Questions that the store may still be looking at, also after their outcome.
  std::size_t unquiet_lookups() const noexcept { return unquiet_lookups_.size(); }
  const LookupCounters& counters() const noexcept { return counters_; }

 private:
  struct Asked {
    Question question;  // without its hashes
    std::size_t first_key = 0;
    std::vector<std::size_t>
        avoided;  // units by their place among those of all groups; mostly none
  };

  // The objects of a group that the question asks for, ascending, in units_.
  void find_units(StoreIndex index, const Question& question);
  // Those of a group that a hit in (local, probed] could need and that are wanted(group, tokens of
  // the prefix).
  template <class Wanted>
  void find_units(StoreIndex index, const Question& question, Wanted wanted);
  // Whether the first round asks for the object of a prefix of `tokens`.
  bool asked_first(const Question& question, const HitGroup& group,
                   std::uint32_t tokens) const noexcept;
  bool left_open(const FirstRound& round, const HitGroup& group,
                 std::uint32_t tokens) const noexcept;
  // Takes those out of units_ that `asked` avoids; `place` is that of the first one among those of
  // all groups, and moves behind the last one.
  void leave_out_avoided(const Asked& asked, std::size_t& place);
  // Keys of units_ for each shard, one shard behind the other; the store's thread makes them.
  void append_keys(KeySlots& keys, StoreIndex index, const HashList& hashes) const;

  std::unique_ptr<ObjectBatch> take_batch();
  void answer(Asked& asked, const std::vector<ItemResult>& items, Answer& answer);
  // The objects of a group that the second round asks for, ascending, in units_.
  void find_second(StoreIndex index, const Question& question, const FirstRound& round);
  // Sets from where on states are asked for: the longest hits, when there are too many places.
  void bound_states(const Question& question, FirstRound& round);
  // What a first round that has found `presence_` and a hit of `proven` tokens leaves open; null
  // when nothing that matters.
  std::unique_ptr<const FirstRound> open_after(const Question& question, std::uint32_t proven);
  // The answer that `presence_` gives.
  void settle(const Question& question, Answer& answer);

  std::shared_ptr<const KeySchema> schema_;
  std::shared_ptr<ObjectIndex> index_;
  HitSearch search_;
  const std::vector<HitGroup>& groups_;
  std::vector<ReachableMask> masks_;                   // by group: the chunks that can serve a hit
  std::vector<std::span<const RankPosition>> shards_;  // by group: of the schema, which is kept
  std::uint32_t alignment_;
  bool fine_;  // hits may end inside a block
  bool drafts_ = false;
  std::uint32_t span_ = 1;  // tokens of the largest chunk that hits may end in
  bool thinned_;            // windows are not kept at every step
  std::uint32_t hash_tokens_;
  std::uint64_t next_op_;
  bool tells_gone_;
  std::unordered_map<std::uint64_t, std::vector<Asked>> calls_;
  std::vector<OpId> unquiet_lookups_;  // few, as is each list here
  std::vector<OpId> removals_;         // in flight
  std::vector<Removed> removed_;
  std::vector<std::unique_ptr<ObjectBatch>> idle_batches_;
  std::vector<std::uint32_t> units_;  // of the group in hand
  Presence presence_;
  Presence assumed_;  // with everything that has not been asked for
  Completion completion_;
  LookupCounters counters_;
};

}  // namespace kvprism::detail
