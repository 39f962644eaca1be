#include "store/lookup_desk.h"

#include <algorithm>
#include <utility>

#include "store/make_room.h"

namespace kvprism::detail {

LookupDesk::LookupDesk(std::shared_ptr<const KeySchema> schema, std::shared_ptr<ObjectIndex> index,
                       std::uint64_t first_op, bool tells_gone)
    : schema_(std::move(schema)),
      index_(std::move(index)),
      search_(schema_->projection()),
      groups_(search_.groups()),
      alignment_(search_.grid().alignment),
      fine_(alignment_ < search_.grid().step),
      thinned_(schema_->projection().retention_interval().has_value()),
      hash_tokens_(schema_->projection().hash_block_size()),
      next_op_(first_op),
      tells_gone_(tells_gone) {
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    const HitGroup& group = groups_[raw(index)];
    masks_.emplace_back(group, search_.grid());
    shards_.push_back(schema_->shards(index));
    drafts_ |= group.draft;
    if (group.fine()) span_ = std::max(span_, group.chunk_tokens);
  }
}

bool LookupDesk::asked_first(const Question& question, const HitGroup& group,
                             std::uint32_t tokens) const noexcept {
  if (!group.fine() || tokens % group.chunk_tokens == 0) return true;
  // A prompt that nobody has stored, and one that is stored to its end, need no second round.
  const std::uint32_t last = question.limit == 0 ? 0 : (question.limit - 1) / span_ * span_;
  return tokens <= question.local + span_ || tokens > last;
}

bool LookupDesk::left_open(const FirstRound& round, const HitGroup& group,
                           std::uint32_t tokens) const noexcept {
  // Inside whole chunks only a state ends a hit that could not end elsewhere.
  if (group.rule == HitRule::kLastState) return round.states < tokens && tokens <= round.high;
  // An object covers every shorter prefix that ends in its last chunk.
  const std::uint64_t end = (std::uint64_t{round.high} + group.chunk_tokens - 1) /
                            group.chunk_tokens * group.chunk_tokens;
  return std::max(round.low, round.whole) < tokens && tokens <= end;
}

template <class Wanted>
void LookupDesk::find_units(StoreIndex index, const Question& question, Wanted wanted) {
  units_.clear();
  const HitGroup& group = groups_[raw(index)];
  if (group.rule == HitRule::kLastState) {
    // Only a state where a hit may end can end one.
    for (std::uint32_t tokens = question.local - question.local % alignment_ + alignment_;
         tokens <= question.probed; tokens += alignment_) {
      if (wanted(group, tokens)) units_.push_back(tokens / group.unit_tokens - 1);
    }
  } else if (group.rule != HitRule::kNever) {
    const ReachableMask& mask = masks_[raw(index)];
    const std::uint32_t end = question.probed / group.unit_tokens;
    for (std::uint32_t unit = question.local / group.unit_tokens; unit < end; ++unit) {
      // The mask knows of hits that end on whole steps.
      if ((fine_ || mask.keeps(unit)) && wanted(group, (unit + 1) * group.unit_tokens))
        units_.push_back(unit);
    }
  }
}

void LookupDesk::find_units(StoreIndex index, const Question& question) {
  if (!fine_) {
    find_units(index, question, [](const HitGroup&, std::uint32_t) { return true; });
  } else if (question.first_round == nullptr) {
    find_units(index, question, [&](const HitGroup& group, std::uint32_t tokens) {
      return asked_first(question, group, tokens);
    });
  } else {
    find_second(index, question, *question.first_round);
  }
}

void LookupDesk::find_second(StoreIndex index, const Question& question, const FirstRound& round) {
  find_units(index, question, [&](const HitGroup& group, std::uint32_t tokens) {
    return !asked_first(question, group, tokens) && left_open(round, group, tokens);
  });
}

void LookupDesk::leave_out_avoided(const Asked& asked, std::size_t& place) {
  const std::size_t end = place + units_.size();
  auto avoided = std::lower_bound(asked.avoided.begin(), asked.avoided.end(), place);
  if (avoided != asked.avoided.end() && *avoided < end) {
    std::erase_if(units_, [&](std::uint32_t) {
      const bool out = avoided != asked.avoided.end() && *avoided == place;
      if (out) ++avoided;
      ++place;
      return out;
    });
  }
  place = end;
}

void LookupDesk::append_keys(KeySlots& keys, StoreIndex index, const HashList& hashes) const {
  const std::uint32_t step = groups_[raw(index)].unit_tokens / hash_tokens_;
  for (const RankPosition& shard : shards_[raw(index)]) {
    for (std::size_t from = 0, to = 0; from < units_.size(); from = to) {
      for (to = from + 1; to < units_.size() && units_[to] == units_[to - 1] + 1;) ++to;
      schema_->append_keys_later(keys, index, shard, hashes, (units_[from] + 1) * step - 1, step,
                                 static_cast<std::uint32_t>(to - from));
    }
  }
}

std::uint64_t LookupDesk::most_keys(std::uint32_t local, std::uint32_t probed) const noexcept {
  std::uint64_t keys = 0;
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    const HitGroup& group = groups_[raw(index)];
    const std::uint32_t step = group.rule == HitRule::kLastState ? alignment_ : group.unit_tokens;
    std::uint64_t places = std::uint64_t{(probed - local) / step} + 1;
    if (group.fine()) {
      const std::uint64_t inside = 3 * std::uint64_t{span_} / group.unit_tokens;
      places = std::min(places, (probed - local) / group.chunk_tokens + 1 + inside);
    }
    keys += places * shards_[raw(index)].size();
  }
  return keys;
}

std::unique_ptr<ObjectBatch> LookupDesk::take_batch() {
  if (idle_batches_.empty()) return std::make_unique<ObjectBatch>();
  std::unique_ptr<ObjectBatch> batch = std::move(idle_batches_.back());
  idle_batches_.pop_back();
  batch->clear();
  return batch;
}

bool LookupDesk::take_removed(Removed& out) {
  if (removed_.empty()) return false;
  out = std::move(removed_.front());
  removed_.erase(removed_.begin());
  return true;
}

void LookupDesk::ask(std::vector<Question>& questions, const Avoided& avoid, Instant now,
                     Instant deadline, std::vector<Answer>& answers) {
  if (questions.empty()) return;
  std::unique_ptr<ObjectBatch> batch = take_batch();
  const bool watch = !avoid.stale(now);
  std::vector<Asked> asked;
  asked.reserve(questions.size());
  for (Question& question : questions) {
    asked.push_back({std::move(question), batch->keys.size(), {}});
    const HashList hashes = std::exchange(asked.back().question.hashes, {});
    std::size_t place = 0;
    for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
      find_units(index, asked.back().question);
      for (std::size_t i = 0; watch && i < units_.size(); ++i) {
        const std::uint32_t tokens = (units_[i] + 1) * groups_[raw(index)].unit_tokens;
        const auto hash = hashes[tokens / hash_tokens_ - 1];
        if (!avoid.contains(RecentPrefixes::tag_of(hash, index), now)) continue;
        asked.back().avoided.push_back(place + i);
        ++counters_.avoided;
      }
      leave_out_avoided(asked.back(), place);
      append_keys(batch->keys, index, hashes);
    }
  }
  if (batch->keys.empty()) {
    idle_batches_.push_back(std::move(batch));
    for (Asked& one : asked) {
      const Question& question = one.question;
      Answer& mine = answers.emplace_back(
          Answer{question.request, question.serial, question.local, 0, false, {}});
      mine.asked = false;
      answer(one, {}, mine);
    }
    return;
  }
  ++counters_.calls;
  counters_.keys += batch->keys.size();
  const OpId op{next_op_++};
  // Known before it starts, so that its end is.
  make_room(unquiet_lookups_, 1);
  const auto call = calls_.emplace(static_cast<std::uint64_t>(op), std::move(asked)).first;
  bool started = false;
  try {
    started = index_->start_exists(op, batch, now, deadline);
  } catch (...) {
    // One that has taken the batch may be asking: only it can say when that is quiet.
    if (batch == nullptr) unquiet_lookups_.push_back(op);
    calls_.erase(call);
    throw;
  }
  if (started) {
    unquiet_lookups_.push_back(op);
    return;
  }
  asked = std::move(call->second);
  calls_.erase(call);
  idle_batches_.push_back(std::move(batch));
  for (const Asked& one : asked) {
    const Question& question = one.question;
    Answer& answer = answers.emplace_back(
        Answer{question.request, question.serial, question.local, 0, true, {}});
    if (question.first_round == nullptr) continue;
    presence_ = question.first_round->presence;
    settle(question, answer);
  }
}

void LookupDesk::settle(const Question& question, Answer& answer) {
  if (fine_) answer.tails.reserve(groups_.size());  // no hit without them
  answer.hit = search_.find_below(presence_, question.local, question.probed, question.limit);
  if (thinned_) answer.shared = search_.shared_prefix(presence_, question.local, question.probed);
  if (!fine_ || answer.hit <= question.local) return;
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    answer.tails.push_back(search_.tail_tokens(index, presence_, answer.hit));
  }
}

void LookupDesk::bound_states(const Question& question, FirstRound& round) {
  std::uint64_t others = 0;
  std::uint64_t of_a_place = 0;
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    const HitGroup& group = groups_[raw(index)];
    const std::size_t shards = shards_[raw(index)].size();
    if (group.rule == HitRule::kLastState) {
      if (group.fine()) of_a_place += shards;
      continue;
    }
    find_second(index, question, round);
    others += units_.size() * shards;
  }
  if (of_a_place == 0) return;
  const std::uint64_t places =
      (kLookupKeysPerCall - std::min(others, kLookupKeysPerCall)) / of_a_place;
  const std::uint64_t tokens = std::min<std::uint64_t>(round.high, places * alignment_);
  round.states = std::max(round.low, round.high - static_cast<std::uint32_t>(tokens));
}

std::unique_ptr<const FirstRound> LookupDesk::open_after(const Question& question,
                                                         std::uint32_t proven) {
  assumed_ = presence_;
  bool all = true;
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    find_units(index, question, [&](const HitGroup& group, std::uint32_t tokens) {
      return !asked_first(question, group, tokens);
    });
    for (const std::uint32_t unit : units_) assumed_.mark(index, unit);
    all = all && units_.empty();
  }
  if (all) return nullptr;
  const std::uint32_t most =
      search_.find_below(assumed_, question.local, question.probed, question.limit);
  if (most <= proven) return nullptr;
  auto round = std::make_unique<FirstRound>();
  round->low = proven;
  round->high = most + (drafts_ ? alignment_ : 0);
  round->whole = question.probed;
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    const HitGroup& group = groups_[raw(index)];
    if (group.rule != HitRule::kPrefix) continue;
    const std::uint32_t units = group.chunk_tokens / group.unit_tokens;
    std::uint32_t chunk = question.local / group.chunk_tokens;
    while (presence_.has(index, (chunk + 1) * units - 1)) ++chunk;
    const std::uint32_t reached = chunk * group.chunk_tokens;
    // What a draft keeps back may lie inside another group's chunk.
    round->whole = std::min(round->whole, reached - std::min(reached, drafts_ ? alignment_ : 0));
  }
  // Of unequal chunks one may end inside another, and a hit inside both.
  round->whole -= round->whole % span_;
  bound_states(question, *round);
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    find_second(index, question, *round);
    round->keys += units_.size() * shards_[raw(index)].size();
  }
  if (round->keys == 0) return nullptr;
  round->presence = presence_;
  return round;
}

void LookupDesk::answer(Asked& asked, const std::vector<ItemResult>& items, Answer& answer) {
  const Question& question = asked.question;
  if (question.first_round != nullptr) {
    presence_ = question.first_round->presence;
  } else {
    presence_.reset(groups_.size());
    for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
      presence_.set_units(index, question.probed / groups_[raw(index)].unit_tokens);
    }
  }
  std::size_t key = asked.first_key;
  std::size_t place = 0;
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    find_units(index, question);
    leave_out_avoided(asked, place);
    const std::size_t keys = units_.size() * shards_[raw(index)].size();
    for (std::size_t i = 0; i < units_.size(); ++i) {
      bool everywhere = true;
      bool missing = false;
      for (std::size_t at = key + i; at < key + keys; at += units_.size()) {
        const ItemStatus status = at < items.size() ? items[at].status : ItemStatus::kFailed;
        everywhere &= status == ItemStatus::kOk;
        missing |= status == ItemStatus::kMissing;
        answer.failed |= status != ItemStatus::kOk && status != ItemStatus::kMissing &&
                         status != ItemStatus::kNotReady;
      }
      if (everywhere) presence_.mark(index, units_[i]);
      if (missing && tells_gone_) {
        answer.gone.push_back({index, (units_[i] + 1) * groups_[raw(index)].unit_tokens});
      }
    }
    key += keys;
  }
  settle(question, answer);
  if (fine_ && question.first_round == nullptr && !answer.failed)
    answer.first_round = open_after(question, answer.hit);
}

void LookupDesk::poll(Instant now, std::vector<Answer>& answers) {
  while (index_->poll_index(now, completion_)) {
    if (completion_.quiet) std::erase(unquiet_lookups_, completion_.op);
    if (completion_.outcome) {
      const auto call = calls_.find(static_cast<std::uint64_t>(completion_.op));
      if (call != calls_.end()) {
        // Without memory for an answer it is late, which is a miss.
        std::vector<Asked> over = std::move(call->second);
        calls_.erase(call);
        for (Asked& asked : over) {
          const Question& question = asked.question;
          Answer& one = answers.emplace_back(
              Answer{question.request, question.serial, question.local, 0, false, {}});
          answer(asked, completion_.items, one);
        }
      } else if (std::erase(removals_, completion_.op) != 0) {
        removed_.push_back({completion_.op, std::move(completion_.items)});
      }
    }
    if (completion_.batch) idle_batches_.push_back(std::move(completion_.batch));
  }
}

}  // namespace kvprism::detail
