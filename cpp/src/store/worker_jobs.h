// Jobs and calls as a worker holds them between a plan and its report.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvprism/run/ready_token.h"
#include "kvprism/wire/step_plan.h"
#include "kvprism/wire/worker_report.h"

namespace kvprism::detail {

// Where a job's next chunk is.
struct Cursor {
  std::uint32_t run = 0;
  std::uint32_t chunk = 0;  // within the run
};

// A job as this rank holds it, from submit to quiet. Recycled: its arrays keep their capacity.
struct Job {
  JobId id{};
  std::uint64_t epoch = 0;
  JobKind kind{};
  Duration timeout;
  Instant deadline;
  ReadyToken ready = ReadyToken::host();
  std::vector<RunRecord> runs;  // first_id and first_mark count from the job's own arrays
  std::vector<BlockId> ids;
  std::vector<std::uint8_t> hashes;  // hash_width bytes per mark
  std::uint32_t hash_width = 0;

  Cursor cursor;
  std::uint32_t unanswered = 0;  // items of calls without an outcome
  std::uint32_t calls = 0;       // calls that are not quiet
  bool told = false;             // its outcome is in a report
  bool told_quiet = false;
  std::vector<FailedChunk> failed;
  std::uint32_t objects = 0;
  std::uint32_t duplicates = 0;
  std::uint64_t bytes = 0;

  bool issued() const noexcept { return cursor.run >= runs.size(); }
  // Every chunk has arrived or is listed. Not so where an exception has come in between.
  bool adds_up() const noexcept {
    std::uint64_t planned = 0;
    for (const RunRecord& run : runs) planned += run.count;
    return objects + failed.size() == planned;
  }
  void reset() {
    ready = ReadyToken::host();
    runs.clear();
    ids.clear();
    hashes.clear();
    cursor = {};
    unanswered = 0;
    calls = 0;
    told = false;
    told_quiet = false;
    failed.clear();
    objects = 0;
    duplicates = 0;
    bytes = 0;
  }
};

struct Item {
  Job* job;
  StoreIndex group;
  std::uint32_t chunk;
};

// One call to the store.
struct Call {
  bool put = false;
  bool outcome = false;
  Instant began;
  std::uint64_t bytes = 0;
  std::vector<Item> items;
  std::vector<std::pair<Job*, Cursor>> jobs;  // each once, with the cursor from before the call

  void reset() {
    outcome = false;
    bytes = 0;
    items.clear();
    jobs.clear();
  }
};

template <class T>
class Pool {
 public:
  Pool() { idle_.reserve(kMost); }
  std::unique_ptr<T> take() {
    if (idle_.empty()) return std::make_unique<T>();
    std::unique_ptr<T> item = std::move(idle_.back());
    idle_.pop_back();
    return item;
  }
  // Beyond some, what a burst has grown goes back to the system.
  void give(std::unique_ptr<T> item) noexcept {
    if (!full()) idle_.push_back(std::move(item));
  }
  bool full() const noexcept { return idle_.size() >= kMost; }

 private:
  static constexpr std::size_t kMost = 256;
  std::vector<std::unique_ptr<T>> idle_;
};

}  // namespace kvprism::detail
