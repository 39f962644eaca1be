// An index that tells a judge what the scheduler asks for, and which objects it has removed.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kvprism/backend/memory_store.h"
#include "kvprism/io/object_store.h"
#include "sim/job_judge.h"

namespace kvprism::sim {

// Ownership: shares the index. Threads: one.
class RemovalWatch final : public ObjectIndex {
 public:
  // What the judge sees of lookups.
  struct Lookups {
    bool keys = false;
    bool answers = false;  // which objects were not there
  };
  RemovalWatch(std::shared_ptr<ObjectIndex> index, const MemoryPool& pool, const Lookups& lookups)
      : index_(std::move(index)), pool_(pool), lookups_(lookups) {}

  // Null while there is none.
  void set_judge(JobJudge* judge) noexcept { judge_ = judge; }

  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                    Instant deadline) override;
  bool start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal,
                    Instant now, Instant deadline) override;
  bool poll_index(Instant now, Completion& out) override;
  // Whether an object of this name was removed; says so once.
  bool took_away(std::string_view key) { return gone_.erase(std::string(key)) != 0; }
  CloseReport close_index(Duration budget) override { return index_->close_index(budget); }

 private:
  std::shared_ptr<ObjectIndex> index_;
  const MemoryPool& pool_;
  Lookups lookups_;
  JobJudge* judge_ = nullptr;
  std::map<OpId, std::vector<std::string>> removals_;  // single objects, by operation
  std::map<OpId, std::vector<std::string>> asked_;     // keys of lookups, with lookups_.answers
  std::unordered_set<std::string> gone_;
};

}  // namespace kvprism::sim
