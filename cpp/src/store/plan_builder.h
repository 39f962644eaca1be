// Appends jobs to a step plan: runs of consecutive chunks, ids, and marks that the runs of a job
// share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvprism/hit/hit_search.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/wire/step_plan.h"
#include "store/make_room.h"

namespace kvprism::detail {

// One job at a time: begin(), then marks and runs, then make_room() and finish().
// Ownership: refers to the plan. Threads: one.
class PlanBuilder {
 public:
  explicit PlanBuilder(StepPlan& plan) noexcept : plan_(plan) {}

  // At its end what is not finished goes: half a mark would have the whole plan refused.
  class Building {
   public:
    explicit Building(PlanBuilder& builder) noexcept : builder_(builder) {}
    ~Building() {
      if (!builder_.finished_) builder_.abandon();
    }
    Building(const Building&) = delete;
    Building& operator=(const Building&) = delete;

   private:
    PlanBuilder& builder_;
  };

  [[nodiscard]] Building begin() noexcept {
    first_run_ = size(plan_.runs);
    first_id_ = size(plan_.ids);
    first_mark_ = size(plan_.mark_tokens);
    sequences_.clear();
    finished_ = false;
    return Building(*this);
  }

  // Marks for the chunks `range` of `chunk_tokens` tokens each, out of hashes at granularity
  // `hash_tokens`. Later runs of the same chunk size use them.
  void add_marks(const ChunkRange& range, std::uint32_t chunk_tokens, const HashList& hashes,
                 std::uint32_t hash_tokens) {
    sequences_.push_back({chunk_tokens, range, size(plan_.mark_tokens)});
    for (std::uint32_t chunk = range.first; chunk < range.end; ++chunk) {
      const std::uint32_t tokens = (chunk + 1) * chunk_tokens;
      append_mark(tokens, hashes[tokens / hash_tokens - 1]);
    }
  }

  // The chunk that holds the end of a prefix of `tokens`, under a mark of its own; the first
  // `valid` tokens of it count.
  void add_marked(StoreIndex group, std::uint32_t tokens, std::uint32_t chunk_tokens,
                  std::uint32_t valid, BlockId block, std::span<const std::uint8_t> hash) {
    append_mark(tokens, hash);
    append_chunk(group, (tokens - 1) / chunk_tokens, chunk_tokens, valid, block,
                 size(plan_.mark_tokens) - 1);
  }

  // Appends one chunk, extending the last run when it follows on. A sequence of its chunk size must
  // cover it.
  void add_chunk(StoreIndex group, std::uint32_t chunk, std::uint32_t chunk_tokens, BlockId block) {
    append_chunk(group, chunk, chunk_tokens, chunk_tokens, block, mark_of(chunk, chunk_tokens));
  }

  // The blocks of the job under construction.
  std::span<const BlockId> blocks() const noexcept {
    return std::span<const BlockId>(plan_.ids).subspan(first_id_);
  }
  std::span<const RunRecord> runs() const noexcept {
    return std::span<const RunRecord>(plan_.runs).subspan(first_run_);
  }

  // Behind it finish() does not fail.
  void make_room() { detail::make_room(plan_.jobs, 1); }
  void finish(JobId id, RequestId request, JobKind kind, Duration timeout) noexcept {
    plan_.jobs.push_back(
        {id, request, kind, first_run_, size(plan_.runs) - first_run_, 0, timeout});
    finished_ = true;
  }

 private:
  void abandon() noexcept {
    plan_.runs.resize(first_run_);
    plan_.ids.resize(first_id_);
    plan_.mark_tokens.resize(first_mark_);
    plan_.mark_hashes.resize(static_cast<std::size_t>(first_mark_) * plan_.hash_width);
  }

  struct Sequence {
    std::uint32_t chunk_tokens;
    ChunkRange range;
    std::uint32_t first_mark;
  };

  template <class T>
  static std::uint32_t size(const std::vector<T>& items) noexcept {
    return static_cast<std::uint32_t>(items.size());
  }

  // Only the last chunk of a run may be a part of one.
  void append_chunk(StoreIndex group, std::uint32_t chunk, std::uint32_t chunk_tokens,
                    std::uint32_t valid, BlockId block, std::uint32_t mark) {
    plan_.ids.push_back(block);
    if (plan_.runs.size() > first_run_) {
      RunRecord& last = plan_.runs.back();
      if (last.group == group && last.first_chunk + last.count == chunk &&
          last.first_mark + last.count == mark && last.valid_tokens_last == chunk_tokens) {
        ++last.count;
        last.valid_tokens_last = valid;
        return;
      }
    }
    plan_.runs.push_back({group, chunk, 1, size(plan_.ids) - 1, mark, valid});
  }

  void append_mark(std::uint32_t tokens, std::span<const std::uint8_t> hash) {
    plan_.mark_tokens.push_back(tokens);
    plan_.mark_hashes.insert(plan_.mark_hashes.end(), hash.begin(), hash.end());
  }

  std::uint32_t mark_of(std::uint32_t chunk, std::uint32_t chunk_tokens) const noexcept {
    for (const Sequence& sequence : sequences_) {
      if (sequence.chunk_tokens == chunk_tokens && chunk >= sequence.range.first &&
          chunk < sequence.range.end) {
        return sequence.first_mark + (chunk - sequence.range.first);
      }
    }
    return 0;  // not reached: the scheduler adds the marks of every chunk first
  }

  StepPlan& plan_;
  std::vector<Sequence> sequences_;
  std::uint32_t first_run_ = 0;
  std::uint32_t first_id_ = 0;
  std::uint32_t first_mark_ = 0;
  bool finished_ = true;
};

}  // namespace kvprism::detail
