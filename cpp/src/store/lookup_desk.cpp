#include "store/lookup_desk.h"

#include <algorithm>
#include <utility>

namespace kvprism::detail {

LookupDesk::LookupDesk(std::shared_ptr<const KeySchema> schema, std::shared_ptr<ObjectIndex> index,
                       std::uint64_t first_op)
    : schema_(std::move(schema)),
      index_(std::move(index)),
      search_(schema_->projection()),
      groups_(search_.groups()),
      alignment_(search_.grid().alignment),
      fine_(alignment_ < search_.grid().step),
      thinned_(schema_->projection().retention_interval().has_value()),
      hash_tokens_(schema_->projection().hash_block_size()),
      next_op_(first_op) {
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    masks_.emplace_back(groups_[raw(index)], search_.grid());
    shards_.push_back(schema_->shards(index));
  }
}

void LookupDesk::find_units(StoreIndex index, std::uint32_t local, std::uint32_t probed) {
  units_.clear();
  const HitGroup& group = groups_[raw(index)];
  if (group.rule == HitRule::kLastState) {
    // Only a state where a hit may end can end one.
    for (std::uint32_t tokens = local - local % alignment_ + alignment_; tokens <= probed;
         tokens += alignment_) {
      units_.push_back(tokens / group.unit_tokens - 1);
    }
  } else if (group.rule != HitRule::kNever) {
    const ReachableMask& mask = masks_[raw(index)];
    const std::uint32_t end = probed / group.unit_tokens;
    for (std::uint32_t unit = local / group.unit_tokens; unit < end; ++unit) {
      // The mask knows of hits that end on whole steps.
      if (fine_ || mask.keeps(unit)) units_.push_back(unit);
    }
  }
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
    keys += std::uint64_t{(probed - local) / step + 1} * shards_[raw(index)].size();
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

void LookupDesk::ask(const std::vector<Question>& questions, const RecentPrefixes& avoid,
                     Instant now, Instant deadline, std::vector<Answer>& answers) {
  if (questions.empty()) return;
  std::unique_ptr<ObjectBatch> batch = take_batch();
  const bool watch = !avoid.stale(now);
  std::vector<Asked> asked;
  asked.reserve(questions.size());
  for (const Question& question : questions) {
    asked.push_back({question.request,
                     question.serial,
                     question.local,
                     question.probed,
                     question.limit,
                     batch->keys.size(),
                     {}});
    std::size_t place = 0;
    for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
      find_units(index, question.local, question.probed);
      append_keys(batch->keys, index, question.hashes);
      for (std::size_t i = 0; watch && i < units_.size(); ++i) {
        const std::uint32_t tokens = (units_[i] + 1) * groups_[raw(index)].unit_tokens;
        const auto hash = question.hashes[tokens / hash_tokens_ - 1];
        if (!avoid.contains(RecentPrefixes::tag_of(hash, index), now)) continue;
        asked.back().avoided.push_back(place + i);
        ++counters_.avoided;
      }
      place += units_.size();
    }
  }
  ++counters_.calls;
  counters_.keys += batch->keys.size();
  const OpId op{next_op_++};
  if (index_->start_exists(op, batch, now, deadline)) {
    calls_.emplace(static_cast<std::uint64_t>(op), std::move(asked));
    unquiet_lookups_.push_back(op);
    return;
  }
  idle_batches_.push_back(std::move(batch));
  for (const Asked& one : asked)
    answers.push_back({one.request, one.serial, one.local, 0, true, {}});
}

void LookupDesk::answer(const Asked& asked, const std::vector<ItemResult>& items, Answer& answer) {
  presence_.reset(groups_.size());
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    presence_.set_units(index, asked.probed / groups_[raw(index)].unit_tokens);
  }
  std::size_t key = asked.first_key;
  std::size_t place = 0;
  auto avoided = asked.avoided.begin();
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    find_units(index, asked.local, asked.probed);
    const std::size_t keys = units_.size() * shards_[raw(index)].size();
    for (std::size_t i = 0; i < units_.size(); ++i, ++place) {
      bool everywhere = true;
      for (std::size_t at = key + i; at < key + keys; at += units_.size()) {
        const ItemStatus status = at < items.size() ? items[at].status : ItemStatus::kFailed;
        everywhere &= status == ItemStatus::kOk;
        answer.failed |= status != ItemStatus::kOk && status != ItemStatus::kMissing &&
                         status != ItemStatus::kNotReady;
      }
      if (avoided != asked.avoided.end() && *avoided == place) {
        ++avoided;
        everywhere = false;
      }
      if (everywhere) presence_.mark(index, units_[i]);
    }
    key += keys;
  }
  answer.hit = search_.find_below(presence_, asked.local, asked.probed, asked.limit);
  if (thinned_) answer.shared = search_.shared_prefix(presence_, asked.local, asked.probed);
  if (!fine_ || answer.hit <= asked.local) return;
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    answer.tails.push_back(search_.tail_tokens(index, presence_, answer.hit));
  }
}

void LookupDesk::poll(Instant now, std::vector<Answer>& answers) {
  while (index_->poll_index(now, completion_)) {
    if (completion_.outcome) {
      const auto call = calls_.find(static_cast<std::uint64_t>(completion_.op));
      if (call != calls_.end()) {
        for (const Asked& asked : call->second) {
          Answer& one =
              answers.emplace_back(Answer{asked.request, asked.serial, asked.local, 0, false, {}});
          answer(asked, completion_.items, one);
        }
        calls_.erase(call);
      } else if (std::erase(removals_, completion_.op) != 0) {
        removed_.push_back({completion_.op, std::move(completion_.items)});
      }
    }
    if (completion_.quiet) std::erase(unquiet_lookups_, completion_.op);
    if (completion_.batch) idle_batches_.push_back(std::move(completion_.batch));
  }
}

}  // namespace kvprism::detail
