// What the parts of the store worker share: worker_calls talks to the store; store_worker.cpp has
// the rest.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvprism/hit/hit_group.h"
#include "kvprism/run/mailbox.h"
#include "kvprism/store/store_worker.h"
#include "store/side_in_use.h"
#include "store/vllm_objects.h"
#include "store/worker_jobs.h"

namespace kvprism {

struct StoreWorker::Impl {
  using Job = detail::Job;
  using Item = detail::Item;
  using Call = detail::Call;
  using StoreInUse = detail::SideInUse<ObjectStore>;

  Impl(std::shared_ptr<const KeySchema> key_schema, std::shared_ptr<const SegmentMap> segment_map,
       std::shared_ptr<ObjectStore> object_store, StoreInUse use, const StoreWorkerOptions& wanted)
      : in_use(std::move(use)),
        schema(std::move(key_schema)),
        map(std::move(segment_map)),
        store(std::move(object_store)),
        options(wanted),
        digest(schema->plan_digest()),
        groups(hit_groups(schema->projection())),
        inbox(wanted.max_queued_jobs) {
    const StoreCapabilities capabilities = store->capabilities();
    if (capabilities.max_segments_per_call != 0) {
      options.max_segments_per_call =
          std::min(options.max_segments_per_call, capabilities.max_segments_per_call);
    }
    if (capabilities.max_bytes_per_call != 0) {
      options.max_bytes_per_call =
          std::min(options.max_bytes_per_call, capabilities.max_bytes_per_call);
    }
    const Projection& projection = map->projection();
    position = rank_position(options.rank, projection.parallel());
    for (const StoreIndex group : indices<StoreIndex>(projection.num_store_groups())) {
      shards.push_back(schema->shard_of(group, position));
      places.push_back(place_of(group));
    }
    group_counters.resize(projection.num_groups());
    timed_by.resize(projection.num_groups());
  }

  StoreInUse in_use;
  std::shared_ptr<const KeySchema> schema;
  std::shared_ptr<const SegmentMap> map;
  std::shared_ptr<ObjectStore> store;
  StoreWorkerOptions options;
  Digest digest;  // of the plans that it takes
  RankPosition position;
  std::vector<RankPosition> shards;  // by store group
  // By store group: whose layers make its objects on this rank; absent: it holds none of them.
  std::vector<std::optional<StoreIndex>> places;
  std::vector<HitGroup> groups;  // by store group

  // Between the engine's threads and the one that pumps.
  Mailbox<std::unique_ptr<Job>> inbox;
  std::mutex submit_mutex;
  std::uint64_t bound_epoch = 0;  // 0: none yet
  std::uint64_t last_step = 0;    // of that epoch
  std::uint64_t first_job = 0;    // of a plan, 0: none yet; an earlier worker may have had others
  std::uint64_t last_job = 0;     // highest id taken; ids rise within an epoch
  std::vector<std::uint64_t> alive;                      // ids taken that are not over, sorted
  std::vector<std::pair<std::uint64_t, JobId>> refused;  // the last that refuse() told: epoch, id
  bool closed = false;
  detail::Pool<Job> idle_jobs;
  std::vector<std::unique_ptr<Job>> copied;  // of the plan that is submitted
  std::mutex outbox_mutex;
  std::vector<WorkerReport> outbox;  // one per epoch
  mutable std::mutex counters_mutex;
  StoreWorkerCounters counters;
  std::vector<StoreGroupCounters> group_counters;  // by GroupId

  // Of the thread that pumps.
  std::unique_ptr<Job> arriving;  // out of the inbox, not in `jobs` yet
  std::vector<std::unique_ptr<Job>> jobs;
  std::vector<std::unique_ptr<Job>> retired;  // in retire() only
  std::deque<Job*> loads;
  std::deque<Job*> saves;
  std::unordered_map<std::uint64_t, std::unique_ptr<Call>> calls;
  // What an earlier worker has left in flight ends under other numbers.
  std::uint64_t next_op = ((in_use.user() - 1) << 40) + 1;
  std::uint32_t gets_open = 0;
  std::uint32_t puts_open = 0;
  std::uint64_t bytes_in_flight = 0;
  bool held_up = false;                 // a put waits for max_bytes_in_flight
  std::vector<std::uint64_t> timed_by;  // the last call that a group's histogram has, by GroupId
  detail::Pool<Call> idle_calls;
  detail::Pool<ObjectBatch> idle_batches;
  Completion completion;

  std::optional<StoreIndex> place_of(StoreIndex group) const {
    if (map->segments_per_block(group) != 0) return group;
    // The reference stores the rows of a block under every group, also without layers of it.
    return schema->name() == "vllm" ? detail::first_placed(*map) : std::nullopt;
  }

  static void check_objects(const SegmentMap& map, const StoreCapabilities& store,
                            ProblemList& problems);

  template <class Change>
  void count(Change change) {
    const std::lock_guard lock(counters_mutex);
    change(counters);
  }

  void answer(const StepPlanView& plan);
  void tell(std::uint64_t epoch, const JobReport& entry, const std::vector<FailedChunk>& failed);
  SubmitResult refuse(std::uint64_t epoch, const std::vector<JobId>& ids, const Error& why);
  bool was_refused(std::uint64_t epoch, JobId id) const;
  std::optional<Error> why_refused(const StepPlanView& plan);
  // All of the plan's jobs, or none where it throws.
  void take(const StepPlanView& plan, const ReadyToken& ready);
  void copy_job(const StepPlanView& plan, const JobRecord& record, Job& job) const;
  void add_run(const RunRecord& run, JobKind kind, Job& job) const;

  void begin(const Call& call);
  void finish_items(OpId op, Call& call, const std::vector<ItemResult>& results, Instant now);
  void count_item(OpId op, const Call& call, const Item& item, const ItemResult& result,
                  Duration took);
  void tell_outcome(Job& job, JobOutcome outcome);
  bool tell_ends(Job& job);
  void list_unfetched(Job& job, ItemStatus status);
  bool take_completions(Instant now);
  bool take_inbox(Instant now);
  bool expire(Instant now);
  bool issue(std::deque<Job*>& queue, bool put, Instant now);
  bool add_next(Job& job, Call& call, ObjectBatch& batch, std::uint64_t most_bytes);
  std::uint64_t room_for_puts() const;
  bool must_wait(const Job& job, std::uint64_t room);
  bool retire();
  CloseReport close(Instant now, Duration budget);
  template <class Step>
  auto counting_errors(Step&& step);
};

}  // namespace kvprism
