#include "sim/removal_watch.h"

namespace kvprism::sim {

bool RemovalWatch::start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch,
                                const Removal& removal, Instant now, Instant deadline) {
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < batch->keys.size() && !removal.prefix; ++i) {
    keys.push_back(batch->keys[i]);
    if (judge_ != nullptr) judge_->removing(keys.back());
  }
  if (!index_->start_remove(op, batch, removal, now, deadline)) return false;
  if (!keys.empty()) removals_.emplace(op, std::move(keys));
  return true;
}

bool RemovalWatch::poll_index(Instant now, Completion& out) {
  if (!index_->poll_index(now, out)) return false;
  const auto removal = removals_.find(out.op);
  if (removal == removals_.end() || !out.outcome) return true;
  for (std::size_t i = 0; i < removal->second.size() && judge_ != nullptr; ++i) {
    const ItemStatus status = i < out.items.size() ? out.items[i].status : ItemStatus::kFailed;
    if (status != ItemStatus::kOk && status != ItemStatus::kMissing) continue;
    judge_->removed(removal->second[i], pool_.contains(removal->second[i]));
    if (status == ItemStatus::kOk) gone_.insert(removal->second[i]);
  }
  removals_.erase(removal);
  return true;
}

}  // namespace kvprism::sim
