// What the parts of the store scheduler share: its records and its state. One part a file:
// scheduler_lookup, scheduler_load, scheduler_save; store_scheduler.cpp has the rest.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hit/fetched_chunks.h"
#include "kvprism/hit/hit_search.h"
#include "kvprism/hit/prompt_end.h"
#include "kvprism/hit/reachable_mask.h"
#include "kvprism/store/store_scheduler.h"
#include "run/rate_limit.h"
#include "store/lookup_desk.h"
#include "store/make_room.h"
#include "store/plan_builder.h"
#include "store/recent_prefixes.h"
#include "store/run_recorder.h"
#include "store/side_in_use.h"

namespace kvprism {
namespace detail {

enum class LookupState : std::uint8_t { kNone, kQueued, kInFlight, kDone };

struct Lookup {
  LookupState state = LookupState::kNone;
  std::uint64_t serial = 0;
  std::uint32_t asked_local = 0;   // where the question starts
  std::uint32_t engine_local = 0;  // what the engine said last; at least asked_local
  std::uint32_t probed = 0;
  std::uint32_t max = 0;
  std::uint32_t hit = 0;
  std::vector<std::uint32_t> tails;  // of the answer
  Instant at;                        // of the question, then of the answer
};

struct Request {
  std::uint64_t generation = 0;  // tells two requests of one id apart
  std::vector<std::uint8_t> hashes;
  std::vector<std::uint64_t> handed_off;  // states whose save is planned: sorted state_mark()s
  std::uint32_t prompt_tokens = 0;        // 0 while nobody has asked for it
  std::uint32_t junction = 0;             // where it leaves what others have stored; 0: unknown
  std::uint32_t accepted = 0;             // tokens
  std::uint32_t planned = 0;              // tokens whose save is planned or known: the watermark
  std::uint32_t end_planned = 0;          // proof of the prompt end that is planned or known
  std::uint32_t retry_above = 0;  // a failed save is tried again only with progress beyond this
  // Of the last load: below the first chunk that it brought, windows were neither loaded nor
  // computed from `load_from` on.
  std::uint32_t load_from = 0;
  std::uint32_t load_to = 0;
  bool bypass = false;  // a load failed: compute instead of asking again (R41)
  bool loading = false;
  bool purged = false;  // what it has computed is older than a purge: not to be saved
  RequestAccess access;
  Lookup lookup;

  // Nothing of it is in the store, or on its way there.
  void forget_saves() {
    planned = end_planned = retry_above = 0;
    handed_off.clear();
  }
};

// A load that the engine waits for.
struct Load {
  RequestId request{};
  std::uint64_t generation = 0;
  std::uint64_t heir = 0;  // generation of a request that came with other hashes meanwhile; or 0
  std::uint32_t local = 0;
  std::uint32_t hit = 0;
  bool reported = false;
  bool overtaken = false;  // by a purge: what arrives is void
  bool withheld = false;   // from all ranks: its tables were too short
  Instant planned_at;
  std::vector<std::uint32_t> tails;  // of the lookup: what its last chunks are named by
  std::vector<RunRecord> runs;       // first_id counts from the load's own ids
  std::vector<BlockId> ids;
  std::vector<FailedBlock> lost;  // none before its end, which has room for all
  // Objects that are not what was stored: in the order of told, from sort_mismatches() on by group
  // and chunk, damage first.
  std::vector<std::pair<Rank, FailedChunk>> mismatches;
  std::unique_ptr<Request> left{};  // its request, which has finished first: it names the objects
};

// Of the prefixes that a chunk belongs to, among those saved lately: the scheduler block's and the
// prompt's end. 0: none.
using SavedTags = std::array<std::uint64_t, 2>;

// One rank's object that is to go.
struct Condemned {
  OpId op{};              // of its removal
  std::uint64_t tag = 0;  // of its chunk: once it is gone, a new one may be believed
  SavedTags saved;        // and whoever computes it saves it: what was put meanwhile met this one
  std::string key;
  bool patient = false;  // stays while somebody has a lease on it, and is tried again
  std::uint32_t tries = 1;
  std::optional<Instant> again{};  // none while the removal runs
};

// A report may name any chunk.
inline bool moves(const Load& load, StoreIndex group, std::uint32_t chunk) {
  return std::any_of(load.runs.begin(), load.runs.end(), [&](const RunRecord& run) {
    return run.group == group && chunk >= run.first_chunk && chunk - run.first_chunk < run.count;
  });
}

struct Save {
  RequestId request{};
  std::uint64_t generation = 0;
  TokenRange range;  // empty for hand-offs and ends of prompts
  Instant planned_at;
  // Of the prefixes that end in the range, one each S tokens; none when a chunk had no source. Of
  // hand-offs: the state marks. Of the end of a prompt: its own.
  bool prompt_end = false;
  std::vector<std::uint64_t> tags;
  std::vector<StoreChange> chunks;  // only with tell_changes
};

// Its own removals end as the desk's others do; `op` tells them apart.
struct Purge {
  PurgeStatus status;
  Instant quiet_since;  // nothing of before can renew a lease or land any more
  Instant next_pass;
  Instant began;  // of the pass in flight
  OpId op{};
  bool away = false;               // the store did not answer: told once
  bool held_up = false;            // a job in quarantine keeps it from its begin: told once
  std::optional<Instant> drained;  // no job is left
  bool lookups_told = false;       // lookups keep it from its begin: told once
};

// A state that the engine handed off, until the step's plan is made.
struct Offer {
  RequestId request{};
  std::uint64_t generation = 0;
  StoreIndex group{};
  BlockId block{};
  std::uint32_t tokens = 0;
  std::size_t hash_at = 0;  // into offer_hashes
};

// One state of a request: its group and the tokens that it sums up.
constexpr std::uint64_t state_mark(StoreIndex group, std::uint32_t tokens) noexcept {
  return std::uint64_t{raw(group)} << 32 | tokens;
}
constexpr std::uint32_t tokens_of_mark(std::uint64_t mark) noexcept {
  return static_cast<std::uint32_t>(mark);
}

// A worker's own bound comes first, so that its report, which names the chunks, is the one that
// counts.
inline Instant ledger_deadline(Instant now, Duration timeout) {
  return now + timeout + Duration{timeout.ns / 4};
}

}  // namespace detail

struct StoreScheduler::Impl {
  using Request = detail::Request;
  using Load = detail::Load;
  using Save = detail::Save;

  using IndexInUse = detail::SideInUse<ObjectIndex>;

  Impl(std::shared_ptr<const KeySchema> key_schema, std::shared_ptr<ObjectIndex> index,
       IndexInUse use, const StoreSchedulerOptions& wanted)
      : in_use(std::move(use)),
        schema(std::move(key_schema)),
        options(wanted),
        recorder(recorder_of(*schema, wanted)),
        search(schema->projection()),
        groups(search.groups()),
        step_tokens(schema->projection().scheduler_block_size()),
        hash_tokens(schema->projection().hash_block_size()),
        fine(search.grid().alignment < step_tokens),
        // Answers to another scheduler's questions may still come: numbers tell them apart, also
        // where epochs are neighbours.
        desk(schema,
             recorder ? std::make_shared<detail::RecordingIndex>(std::move(index), recorder)
                      : std::move(index),
             wanted.epoch * 0x9e3779b97f4a7c15, wanted.tell_changes),
        // Twice or more before the blocks go to quarantine.
        ledger({wanted.ranks, wanted.quarantine_after, {wanted.quarantine_after.ns / 4 + 1}}),
        builder(plan),
        saved_prefixes(wanted.saved_fresh_for, 1 << 16),
        unloadable(wanted.avoid_failed_for, 1 << 12),
        unreached(wanted.avoid_failed_for, 1 << 12),
        announced({INT64_MAX}, wanted.tell_changes ? 1 << 18 : 1) {
    for (const StoreIndex group : indices<StoreIndex>(groups.size())) {
      save_rules.push_back(schema->projection().group(group).traits.save);
      has_drafts |= groups[raw(group)].draft;
    }
    masks.reserve(groups.size());  // wants_save must not fail
  }

  static std::shared_ptr<detail::RunRecorder> recorder_of(const KeySchema& schema,
                                                          const StoreSchedulerOptions& options) {
    if (options.record.write == nullptr) return nullptr;
    return std::make_shared<detail::RunRecorder>(options.record, schema, options);
  }

  IndexInUse in_use;
  std::shared_ptr<const KeySchema> schema;
  StoreSchedulerOptions options;
  std::shared_ptr<detail::RunRecorder> recorder;  // mostly none
  HitSearch search;
  const std::vector<HitGroup>& groups;  // of the search
  std::vector<SaveRule> save_rules;
  bool has_drafts = false;
  std::uint32_t step_tokens;  // S
  std::uint32_t hash_tokens;  // h
  bool fine;                  // hits may end inside a block
  std::uint32_t hash_width = 0;
  detail::LookupDesk desk;
  JobLedger ledger;
  RateLimit quarantine_lines{seconds(60)};  // a storage process that hangs holds many jobs
  StepPlan plan;                            // of this step
  StepPlan sent;                            // of the last one: the engine still reads it
  detail::PlanBuilder builder;
  detail::RecentPrefixes saved_prefixes;
  detail::RecentPrefixes unloadable;  // chunks of groups
  detail::RecentPrefixes unreached;   // the same, where the store or the worker did not answer
  detail::RecentPrefixes announced;   // the same, told as stored and not as gone
  std::uint64_t step = 0;
  Instant last_step_at;  // for events of calls that are not told the time
  std::uint64_t next_serial = 1;
  std::uint64_t next_generation = 1;

  std::unordered_map<std::uint64_t, Request> requests;
  std::unordered_map<std::uint64_t, Load> loads;  // by job
  std::unordered_map<std::uint64_t, Save> saves;
  std::vector<RequestId> queued;  // requests with a question for this step
  std::vector<detail::Offer> offers;
  std::vector<std::uint8_t> offer_hashes;
  std::vector<BlockId> acquired;
  std::vector<BlockId> released;
  std::vector<LoadEnd> load_ends;
  std::vector<StoreChange> changes;

  std::uint32_t refused_saves = 0;    // in a row
  std::uint32_t unreached_loads = 0;  // a score: what they asked for could not be reached
  Instant offers_again{INT64_MIN};    // nothing is offered before
  std::uint64_t fruitless_saves = 0;  // before the first object
  Instant backoff_until{INT64_MIN};
  StoreSchedulerCounters counters;

  // Reused between calls.
  std::vector<detail::Question> questions;
  std::vector<detail::Answer> answers;
  std::vector<detail::Answer> second_rounds;  // that answers ask for
  std::vector<ChunkRange> ranges;
  std::vector<ReachableMask> masks;  // of a save, by group
  JobEvent event;
  WorkerReport incoming;
  Presence loaded;
  std::vector<bool> unit_failed;
  std::vector<std::uint64_t> failed_places;

  StoreMode mode = StoreMode::kReadWrite;
  detail::Purge purge;
  detail::Removed removed;
  std::vector<detail::Condemned> condemned;

  FlightRecorder flight;
  std::vector<std::byte> recorded;  // scratch of the recorder
  StoreHealth health;
  bool lookups_fail = false;
  bool loads_fail = false;
  bool worker_silent = false;
  std::array<Instant, 7> reason_seen = never();  // by the reason's bit
  Instant recorded_at{INT64_MIN / 2};            // the flight, at an incident

  const Projection& projection() const { return schema->projection(); }

  bool holds_too_much() const {
    return options.max_held_percent < 100 &&
           ledger.blocks_held() * 100 >
               std::uint64_t{projection().num_blocks()} * options.max_held_percent;
  }

  bool mode_loads() const {
    return options.loads && (mode == StoreMode::kReadWrite || mode == StoreMode::kReadOnly);
  }
  bool may_load() const { return mode_loads() && !purge.status.active(); }
  bool may_save() const {
    return options.saves && !purge.status.active() &&
           (mode == StoreMode::kReadWrite || mode == StoreMode::kWriteOnly);
  }

  Request* find(RequestId id) {
    const auto it = requests.find(raw(id));
    return it == requests.end() ? nullptr : &it->second;
  }
  Request* find(RequestId id, std::uint64_t generation) {
    Request* const request = find(id);
    return request != nullptr && request->generation == generation ? request : nullptr;
  }
  Request& remember(RequestId id) {
    const auto [it, fresh] = requests.try_emplace(raw(id));
    if (fresh) it->second.generation = next_generation++;
    return it->second;
  }

  std::uint32_t aligned(std::uint32_t tokens) const { return tokens - tokens % step_tokens; }
  std::uint32_t hash_count(const Request& request) const {
    return hash_width == 0 ? 0 : static_cast<std::uint32_t>(request.hashes.size() / hash_width);
  }
  HashList hashes_of(const Request& request) const {
    return {request.hashes.data(), hash_count(request), hash_width};
  }
  // Of the prefix that ends S tokens after `from`.
  std::uint64_t tag_at(const Request& request, std::uint32_t from) const {
    return detail::RecentPrefixes::tag_of(
        hashes_of(request)[(from + step_tokens) / hash_tokens - 1]);
  }

  // Positions are counted in 32 bits, and steps beyond one must not wrap.
  static constexpr std::uint32_t kMostTokens = INT32_MAX;
  // Tokens that have a name.
  std::uint32_t named(std::uint32_t hashes) const {
    return static_cast<std::uint32_t>(
        std::min(std::uint64_t{hashes} * hash_tokens, std::uint64_t{kMostTokens}));
  }
  std::uint32_t named(const Request& request) const { return named(hash_count(request)); }
  // Tokens that are computed after this step, and named.
  std::uint32_t computed(const Request& request) const {
    return std::min(request.accepted, named(request));
  }
  // The end of the request's prompt; nothing when only whole blocks are kept, or when the prompt's
  // length is not known.
  PromptEnd end_of(const Request& request) const {
    return prompt_end(request.prompt_tokens, search.grid(), has_drafts,
                      projection().replay_tokens());
  }
  // Of the end of a prompt, which is other objects than the whole step that may end there too.
  std::uint64_t end_tag(const Request& request, const PromptEnd& end) const {
    return ~detail::RecentPrefixes::tag_of(hashes_of(request)[end.proof / hash_tokens - 1]);
  }
  // What a chunk of a hit is named by: its own end, or where the object ends that a lookup matched.
  std::uint32_t mark_of(StoreIndex group, std::uint32_t chunk, std::uint32_t hit,
                        const std::vector<std::uint32_t>& tails) const {
    const std::uint32_t chunk_end = (chunk + 1) * groups[raw(group)].chunk_tokens;
    return chunk_end > hit ? tails[raw(group)] : chunk_end;
  }

  // Takes what is new in `hashes`. False when they cannot belong to the request: another width than
  // the first that the engine used, or a gap behind those that are known.
  bool take_hashes(Request& request, const HashList& hashes);
  // A load of `request` that runs goes on in blocks that are the other request's now.
  void inherit_load(Request& request, Request& heir);

  // Whether a load or the request itself has left the chunk's bytes in its block: an engine may
  // give a window blocks for what no load brings.
  bool is_written(const Request& request, const HitGroup& group, std::uint32_t chunk) const {
    if (request.load_to == 0 || group.rule == HitRule::kPrefix) return true;
    const std::uint32_t loaded =
        detail::fetched_chunks(group, request.load_to, request.load_from).first;
    return chunk < request.load_from / group.chunk_tokens || chunk >= loaded;
  }

  void begin_plan() { plan.hash_width = hash_width; }

  bool usable_block(const BlockRows& rows, GroupId group, std::uint32_t chunk) const {
    if (!rows.contains(group) || chunk >= rows[group].size()) return false;
    const BlockId block = rows[group][chunk];
    return raw(block) > 0 && static_cast<std::uint32_t>(raw(block)) < projection().num_blocks();
  }

  bool name_change(StoreChange& change, std::uint64_t generation, std::uint32_t chunk_tokens);
  void note_chunks(detail::Save& save);
  void tell(const StoreChange& change);
  void take_back_stored();
  void tell_stored(const detail::Save& save, const JobEvent& end, Instant now);
  void tell_missing(const detail::Load& load, const JobEvent& end);
  void tell_gone(const Request& request, const detail::Answer& answer);

  void ask(RequestId id, Request& request, std::uint32_t local, std::uint32_t probed,
           std::uint32_t max, Instant now);
  void send_questions(Instant now);
  // Those of this step.
  void forget_questions();
  void drop_question(RequestId id) noexcept;
  void take_answers(Instant now);
  void ask_again(Instant now);
  void add_marks(const Request& request);
  void add_last_chunk(const Request& request, StoreIndex group, BlockId block);
  void mark_loaded(StoreIndex index, std::uint32_t chunk, std::uint32_t hit);
  // The same of a whole load, in `loaded`.
  void mark_arrived(const Load& load, const JobEvent& end);
  void plan_load(RequestId id, Request& request, const BlockRows& rows, Instant now, JobId& job);
  // Which chunks a save of the request keeps. True when the engine's retention makes them fewer
  // than a hit at any multiple of S needs.
  bool choose_chunks(const Request& request);
  bool is_known(const Request& request, std::uint32_t from, bool thinned, Instant now) const;
  std::uint32_t add_sources(const Request& request, const TokenRange& range, const BlockRows& rows);
  // What of a request is ready to be saved.
  struct SaveDue {
    Request* request = nullptr;
    TokenRange steps;  // multiples of S
    PromptEnd end;     // both 0: not due
  };
  SaveDue due(RequestId id, Instant now);
  void plan_steps(RequestId id, Request& request, const TokenRange& wanted, const BlockRows& rows,
                  Instant now);
  bool state_failed(std::uint64_t mark, const JobEvent& end) const;
  // The end of the request's prompt, when it is computed and not planned yet and `planned` tokens
  // before it are; else both 0.
  PromptEnd end_due(Request& request, std::uint32_t planned, Instant now);
  void plan_end(RequestId id, Request& request, const PromptEnd& end, const BlockRows& rows,
                Instant now);
  void plan_offers(Instant now);
  std::size_t plan_offers_of(std::size_t first, Instant now);
  void drop_offers();
  void drop_offers(RequestId id, std::uint64_t generation);
  void drop(const detail::Offer& offer);
  // The blocks of a job, or an offer, that is about to begin: what comes of it finds room.
  void make_room_for_ends(std::size_t blocks) {
    detail::make_room(released, ledger.blocks_held() + offers.size() + blocks);
    detail::make_room(load_ends, loads.size() + 1);
  }
  // A job and its entry, or neither.
  template <class Entry>
  JobId start_job(JobKind kind, RequestId id, std::span<const BlockId> blocks, Instant deadline,
                  std::unordered_map<std::uint64_t, Entry>& entries, Entry entry) {
    const auto at = entries.emplace(raw(ledger.next()), std::move(entry)).first;
    try {
      return ledger.start(kind, id, blocks, deadline);
    } catch (...) {
      entries.erase(at);
      throw;
    }
  }
  void start_save(Save save, bool references_held);
  // For what is only remembered, told or logged: without memory it is left out. False: it was.
  template <class Part>
  bool if_memory(Part part) {
    try {
      part();
      return true;
    } catch (const std::bad_alloc&) {
      if (recorder) recorder->ran_out();  // a repetition would not leave it out
      return false;
    }
  }
  // Whether a rank may name these chunks: groups and statuses that there are, and of a load what it
  // moves.
  bool could_fail(JobId job, std::span<const FailedChunk> failed) const;
  void settle(Instant now);
  void warn_of_quarantine(Instant now);  // of `event`
  static std::array<Instant, 7> never() {
    std::array<Instant, 7> all;
    all.fill(Instant{INT64_MIN / 2});
    return all;
  }
  void update_health(Instant now);
  // Something that should not happen: the flight record is told.
  void incident(std::string_view what, Instant now);
  void begin_purge(Instant now);
  void advance_purge(Instant now);
  void start_purge_pass(Instant now);
  void take_removed(Instant now);
  void end_removal(Instant now);
  // Objects that were leased are tried again, and count as absent meanwhile.
  void remove_again(Instant now);
  void leave_to_load(RequestId id, Request& request);
  static void note_mismatches(Load& load, Rank rank, std::span<const FailedChunk> failed);
  // Once all ranks have told theirs.
  static void sort_mismatches(Load& load);
  // Whoever computes the chunk that begins at `from` tokens saves it, whoever has saved it before.
  void forget_saved(const detail::SavedTags& tags);
  detail::SavedTags saved_tags(const Request& request, std::uint32_t from);
  // Objects that no save could replace are taken away.
  void remove_mismatched(const Request& request, const Load& load, Instant now);
  void remember_saved(const Save& save, const JobEvent& end, Instant now);
  void end_save(const JobEvent& end, Instant now);
  void warn_of_silence(const JobEvent& end);
  void end_load(JobId id, Load& load, const JobEvent& end, bool quiet, Instant now);
  void count_unreached(const Load& load, const JobEvent& end, Instant now);
  void remember_unloadable(const Load& load, const JobEvent& end, Instant now);
  // What is wrong with a chunk that a load did not bring.
  static ItemStatus finding(const Load& load, const FailedChunk& chunk);
  // Whether the store has the chunk no longer, or will not have it soon.
  static bool is_gone(const Load& load, const FailedChunk& chunk);
  void save_anew(Request& request, const Load& load, const JobEvent& end) const;
  // A request that begins again has been looked up: the same for what the store has no longer.
  void save_anew(RequestId id, Request& request, const detail::Answer& answer);
};

}  // namespace kvprism
