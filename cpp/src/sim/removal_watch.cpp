#include "sim/removal_watch.h"

namespace kvprism::sim {

bool RemovalWatch::start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                                Instant deadline) {
  if (judge_ != nullptr) judge_->asking();
  for (std::size_t i = 0; i < batch->keys.size() && judge_ != nullptr && lookups_.keys; ++i)
    judge_->asking(batch->keys[i]);
  std::vector<std::string> keys;
  if (lookups_.answers) keys = batch->keys.strings();
  if (!index_->start_exists(op, batch, now, deadline)) return false;
  if (lookups_.answers) asked_.emplace(op, std::move(keys));
  return true;
}

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
  if (const auto lookup = asked_.find(out.op); lookup != asked_.end() && out.outcome) {
    for (std::size_t i = 0; i < out.items.size() && judge_ != nullptr; ++i) {
      if (out.items[i].status == ItemStatus::kMissing) judge_->missed(lookup->second[i]);
    }
    asked_.erase(lookup);
  }
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
