#include "kvprism/store/store_scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "kvprism/base/log.h"
#include "kvprism/hit/hit_search.h"
#include "kvprism/store/validate_store.h"
#include "store/lookup_desk.h"
#include "store/plan_builder.h"
#include "store/saved_prefixes.h"

namespace kvprism {
namespace {

constexpr Duration kLongest{1'000'000'000'000'000'000};  // a sum with a time must not overflow
constexpr std::uint32_t kLookupTokensPerCall =
    1u << 20;  // of all questions of one call, but the first

enum class LookupState : std::uint8_t { kNone, kQueued, kInFlight, kDone };

struct Lookup {
  LookupState state = LookupState::kNone;
  std::uint64_t serial = 0;
  std::uint32_t asked_local = 0;   // where the question starts
  std::uint32_t engine_local = 0;  // what the engine said last; at least asked_local
  std::uint32_t max = 0;
  std::uint32_t hit = 0;
  Instant at;  // of the question, then of the answer
};

struct Request {
  std::uint64_t generation = 0;  // tells two requests of one id apart
  std::vector<std::uint8_t> hashes;
  std::vector<std::uint64_t> handed_off;  // states whose save is planned: sorted state_mark()s
  std::uint32_t accepted = 0;             // tokens
  std::uint32_t planned = 0;              // tokens whose save is planned or known: the watermark
  std::uint32_t retry_above = 0;  // a failed save is tried again only with progress beyond this
  bool bypass = false;            // a load failed: compute instead of asking again (R41)
  bool loading = false;
  Lookup lookup;
};

// A load that the engine waits for.
struct Load {
  RequestId request{};
  std::uint64_t generation = 0;
  std::uint32_t local = 0;
  std::uint32_t hit = 0;
  bool reported = false;
  std::vector<RunRecord> runs;  // first_id counts from the load's own ids
  std::vector<BlockId> ids;
};

struct Save {
  RequestId request{};
  std::uint64_t generation = 0;
  TokenRange range;  // empty for hand-offs
  // Of the prefixes that end in the range, one each S tokens; none when a chunk had no source. Of
  // hand-offs: the state marks.
  std::vector<std::uint64_t> tags;
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

void check_options(const StoreSchedulerOptions& options, const KeySchema* schema,
                   ProblemList& problems) {
  if (options.epoch == 0) problems.add("epoch", "0", "a random value other than 0");
  if (options.ranks > 64) {
    problems.add("ranks", std::to_string(options.ranks), "1 to 64 workers");
  } else if (schema != nullptr && options.ranks != schema->projection().parallel().world()) {
    problems.add("ranks", std::to_string(options.ranks),
                 std::to_string(schema->projection().parallel().world()) +
                     " workers, tp x pp x pcp of the cache config",
                 "a rank that is not counted would lose its blocks while it moves them");
  }
  const auto positive = [&](const char* name, Duration value) {
    if (value.ns <= 0 || value > kLongest)
      problems.add(name, std::to_string(value.ns) + " ns",
                   "a bound of more than 0 and at most " + std::to_string(kLongest.ns) + " ns");
  };
  positive("lookup_timeout", options.lookup_timeout);
  positive("lookup_fresh_for", options.lookup_fresh_for);
  positive("load_timeout", options.load_timeout);
  positive("save_timeout", options.save_timeout);
  positive("quarantine_after", options.quarantine_after);
  positive("backoff", options.backoff);
  positive("saved_fresh_for", options.saved_fresh_for);
  if (options.backoff_after == 0) problems.add("backoff_after", "0", "at least 1 save");
}

// One state of a request: its group and the tokens that it sums up.
constexpr std::uint64_t state_mark(StoreIndex group, std::uint32_t tokens) noexcept {
  return std::uint64_t{raw(group)} << 32 | tokens;
}

// `failed` is sorted by group and chunk (JobEvent).
bool is_failed(const std::vector<FailedChunk>& failed, StoreIndex group, std::uint32_t chunk) {
  const auto at = std::lower_bound(
      failed.begin(), failed.end(), std::pair(group, chunk),
      [](const FailedChunk& f, const std::pair<StoreIndex, std::uint32_t>& wanted) {
        return std::pair(f.group, f.chunk) < wanted;
      });
  return at != failed.end() && at->group == group && at->chunk == chunk;
}

// A worker's own bound comes first, so that its report, which names the chunks, is the one that
// counts.
Instant ledger_deadline(Instant now, Duration timeout) {
  return now + timeout + Duration{timeout.ns / 4};
}

}  // namespace

struct StoreScheduler::Impl {
  Impl(std::shared_ptr<const KeySchema> key_schema, std::shared_ptr<ObjectIndex> index,
       const StoreSchedulerOptions& wanted)
      : schema(std::move(key_schema)),
        options(wanted),
        groups(hit_groups(schema->projection())),
        step_tokens(schema->projection().scheduler_block_size()),
        hash_tokens(schema->projection().hash_block_size()),
        desk(schema, std::move(index)),
        ledger({wanted.ranks, wanted.quarantine_after}),
        builder(plan),
        saved_prefixes(wanted.saved_fresh_for) {
    for (const StoreIndex group : indices<StoreIndex>(groups.size())) {
      save_rules.push_back(schema->projection().group(group).traits.save);
    }
  }

  std::shared_ptr<const KeySchema> schema;
  StoreSchedulerOptions options;
  std::vector<HitGroup> groups;
  std::vector<SaveRule> save_rules;
  std::uint32_t step_tokens;  // S
  std::uint32_t hash_tokens;  // h
  std::uint32_t hash_width = 0;
  detail::LookupDesk desk;
  JobLedger ledger;
  StepPlan plan;
  detail::PlanBuilder builder;
  detail::SavedPrefixes saved_prefixes;
  bool plan_taken = false;
  std::uint64_t step = 0;
  std::uint64_t next_serial = 1;
  std::uint64_t next_generation = 1;

  std::unordered_map<std::uint64_t, Request> requests;
  std::unordered_map<std::uint64_t, Load> loads;  // by job
  std::unordered_map<std::uint64_t, Save> saves;
  std::vector<RequestId> queued;  // requests with a question for this step
  std::vector<Offer> offers;
  std::vector<std::uint8_t> offer_hashes;
  std::vector<BlockId> acquired;
  std::vector<BlockId> released;
  std::vector<LoadEnd> load_ends;

  std::uint32_t refused_saves = 0;  // in a row
  Instant backoff_until{INT64_MIN};
  StoreSchedulerCounters counters;

  // Reused between calls.
  std::vector<detail::Question> questions;
  std::vector<detail::Answer> answers;
  std::vector<ChunkRange> ranges;
  JobEvent event;
  WorkerReport incoming;
  Presence loaded;
  std::vector<bool> unit_failed;

  const Projection& projection() const { return schema->projection(); }

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
    return detail::SavedPrefixes::tag_of(
        hashes_of(request)[(from + step_tokens) / hash_tokens - 1]);
  }

  // Takes what is new in `hashes`. False when they cannot belong to the request: another width than
  // the first that the engine used, or a gap behind those that are known.
  bool take_hashes(Request& request, const HashList& hashes) {
    if (hashes.count == 0) return true;
    if (hash_width == 0 && hashes.width >= kMinHashWidth && hashes.width <= kMaxHashWidth) {
      hash_width = hashes.width;
    }
    std::uint32_t known = hash_count(request);
    bool fits = hashes.width == hash_width && hashes.first <= known;
    const std::uint32_t overlap_end = std::min(known, hashes.end());
    if (fits && overlap_end > hashes.first) {
      // Hashes are chained: when the last common one is equal, all before it are.
      const auto theirs = hashes[overlap_end - 1];
      const auto ours = hashes_of(request)[overlap_end - 1];
      if (!std::equal(theirs.begin(), theirs.end(), ours.begin(), ours.end())) {
        // The id serves another request now.
        fits = hashes.first == 0;
        if (fits) {
          request = Request{};
          request.generation = next_generation++;
          known = 0;
          ++counters.requests_replaced;
        }
      }
    }
    if (!fits) {
      ++counters.hashes_refused;
      return false;
    }
    if (hashes.end() > known) {
      const auto fresh = hashes[known];
      request.hashes.insert(request.hashes.end(), fresh.data(),
                            hashes.data + static_cast<std::size_t>(hashes.count) * hashes.width);
    }
    return true;
  }

  // The plan that the engine took last is cleared when the next one begins.
  void begin_plan() {
    if (plan_taken) {
      plan.clear();
      plan_taken = false;
    }
    plan.hash_width = hash_width;
  }

  bool usable_block(const BlockRows& rows, GroupId group, std::uint32_t chunk) const {
    if (!rows.contains(group) || chunk >= rows[group].size()) return false;
    const BlockId block = rows[group][chunk];
    return raw(block) > 0 && static_cast<std::uint32_t>(raw(block)) < projection().num_blocks();
  }

  void ask(RequestId id, Request& request, std::uint32_t local, std::uint32_t max, Instant now);
  void take_answers(Instant now);
  void add_marks(const Request& request);
  void plan_load(RequestId id, Request& request, const BlockRows& rows, Instant now, JobId& job);
  std::uint32_t add_sources(const TokenRange& range, const BlockRows& rows);
  void plan_offers(Instant now);
  void drop_offers();
  static void forget_state(Request& request, StoreIndex group, std::uint32_t tokens) {
    std::erase(request.handed_off, state_mark(group, tokens));
  }
  Save& start_save(RequestId id, std::uint64_t generation, const TokenRange& range, Instant now,
                   bool references_held);
  void settle(Instant now);
  void remember_saved(const Save& save, const JobEvent& end, Instant now);
  void end_save(const JobEvent& end, Instant now);
  void end_load(JobId id, Load& load, const JobEvent& end, bool quiet);
};

void StoreScheduler::Impl::ask(RequestId id, Request& request, std::uint32_t local,
                               std::uint32_t max, Instant now) {
  Lookup& lookup = request.lookup;
  if (lookup.state != LookupState::kQueued) queued.push_back(id);
  lookup.state = LookupState::kQueued;
  lookup.serial = next_serial++;
  lookup.asked_local = local;
  lookup.max = max;
  lookup.hit = local;
  lookup.at = now;
}

void StoreScheduler::Impl::take_answers(Instant now) {
  desk.poll(now, answers);
  for (const detail::Answer& answer : answers) {
    Request* const request = find(answer.request);
    if (answer.failed) ++counters.lookups_failed;
    if (request == nullptr || request->lookup.serial != answer.serial) continue;
    if (request->lookup.state != LookupState::kInFlight) continue;
    request->lookup.state = LookupState::kDone;
    request->lookup.hit = answer.hit;
    request->lookup.at = now;
  }
  answers.clear();
}

// One sequence of marks for each chunk size that `ranges` uses, wide enough for every group of that
// size.
void StoreScheduler::Impl::add_marks(const Request& request) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::uint32_t chunk_tokens = groups[g].chunk_tokens;
    ChunkRange wide;
    bool earlier = false;
    for (std::size_t other = 0; other < groups.size(); ++other) {
      if (groups[other].chunk_tokens != chunk_tokens || ranges[other].empty()) continue;
      earlier |= other < g;
      wide = wide.empty() ? ranges[other]
                          : ChunkRange{std::min(wide.first, ranges[other].first),
                                       std::max(wide.end, ranges[other].end)};
    }
    if (!earlier && !ranges[g].empty())
      builder.add_marks(wide, chunk_tokens, hashes_of(request), hash_tokens);
  }
}

void StoreScheduler::Impl::plan_load(RequestId id, Request& request, const BlockRows& rows,
                                     Instant now, JobId& job) {
  const std::uint32_t local = request.lookup.engine_local;
  const std::uint32_t hit = request.lookup.hit;
  begin_plan();
  builder.begin();
  ranges.clear();
  for (const HitGroup& group : groups) ranges.push_back(load_chunks(group, hit, local));
  add_marks(request);
  bool complete_rows = rows.size() == projection().num_groups();
  for (const StoreIndex index : indices<StoreIndex>(groups.size())) {
    const GroupId group = projection().group_id(index);
    for (std::uint32_t chunk = ranges[raw(index)].first; chunk < ranges[raw(index)].end; ++chunk) {
      if (complete_rows && usable_block(rows, group, chunk)) {
        builder.add_chunk(index, chunk, groups[raw(index)].chunk_tokens, rows[group][chunk]);
      } else {
        complete_rows = false;
      }
    }
  }

  Load load{id, request.generation, local, hit, false, {}, {}};
  if (complete_rows) {
    const auto blocks = builder.blocks();
    job = ledger.start(JobKind::kLoad, id, blocks, ledger_deadline(now, options.load_timeout));
    acquired.insert(acquired.end(), blocks.begin(), blocks.end());
    load.ids.assign(blocks.begin(), blocks.end());
    load.runs.assign(builder.runs().begin(), builder.runs().end());
    if (!load.runs.empty()) {
      const std::uint32_t base = load.runs.front().first_id;
      for (RunRecord& run : load.runs) run.first_id -= base;
    }
    builder.finish(job, id, JobKind::kLoad, options.load_timeout);
  } else {
    // The engine waits for this load, so it ends like any other: as failed, through the ledger.
    builder.abandon();
    job = ledger.start(JobKind::kLoad, id, {}, ledger_deadline(now, options.load_timeout));
    JobReport refused;
    refused.job = job;
    refused.outcome = JobOutcome::kFailed;
    refused.quiet = 1;
    for (std::uint32_t rank = 0; rank < options.ranks; ++rank)
      ledger.notice(Rank{rank}, refused, {}, now);
  }
  loads.emplace(raw(job), std::move(load));
  request.loading = true;
  request.lookup.state = LookupState::kNone;
  ++counters.loads;
  counters.hit_tokens += hit - local;
}

// Adds the positional sources of `range` and returns up to where they are without a hole.
std::uint32_t StoreScheduler::Impl::add_sources(const TokenRange& range, const BlockRows& rows) {
  std::uint32_t reached = range.to;
  for (const StoreIndex index : indices<StoreIndex>(groups.size())) {
    const HitGroup& group = groups[raw(index)];
    const GroupId id = projection().group_id(index);
    for (std::uint32_t chunk = ranges[raw(index)].first; chunk < ranges[raw(index)].end; ++chunk) {
      if (usable_block(rows, id, chunk)) {
        builder.add_chunk(index, chunk, group.chunk_tokens, rows[id][chunk]);
        continue;
      }
      // A window's table loses its oldest blocks in place (R05); of a prefix every chunk is needed.
      ++counters.sources_skipped;
      if (group.rule == HitRule::kPrefix)
        reached = std::min(reached, aligned(chunk * group.chunk_tokens));
    }
  }
  return reached;
}

Save& StoreScheduler::Impl::start_save(RequestId id, std::uint64_t generation,
                                       const TokenRange& range, Instant now, bool references_held) {
  const auto blocks = builder.blocks();
  const JobId job =
      ledger.start(JobKind::kSave, id, blocks, ledger_deadline(now, options.save_timeout));
  if (!references_held) acquired.insert(acquired.end(), blocks.begin(), blocks.end());
  builder.finish(job, id, JobKind::kSave, options.save_timeout);
  ++counters.saves;
  return saves.emplace(raw(job), Save{id, generation, range, {}}).first->second;
}

void StoreScheduler::Impl::plan_offers(Instant now) {
  if (offers.empty()) return;
  if (now < backoff_until) {
    drop_offers();
    return;
  }
  begin_plan();
  std::stable_sort(offers.begin(), offers.end(),
                   [](const Offer& a, const Offer& b) { return a.generation < b.generation; });
  for (std::size_t first = 0; first < offers.size();) {
    std::size_t end = first;
    builder.begin();
    for (; end < offers.size() && offers[end].generation == offers[first].generation; ++end) {
      const Offer& offer = offers[end];
      builder.add_handed_off(offer.group, offer.tokens, groups[raw(offer.group)].chunk_tokens,
                             offer.block,
                             std::span(offer_hashes).subspan(offer.hash_at, hash_width));
    }
    Save& save = start_save(offers[first].request, offers[first].generation, {}, now, true);
    for (std::size_t i = first; i < end; ++i) {
      save.tags.push_back(state_mark(offers[i].group, offers[i].tokens));
    }
    first = end;
  }
  offers.clear();
  offer_hashes.clear();
}

// A full pool takes no states either (R50).
void StoreScheduler::Impl::drop_offers() {
  counters.saves_dropped += offers.size();
  for (const Offer& offer : offers) {
    released.push_back(offer.block);
    if (Request* const request = find(offer.request, offer.generation)) {
      forget_state(*request, offer.group, offer.tokens);
    }
  }
  offers.clear();
  offer_hashes.clear();
}

// What every rank has stored whole needs no second save for a while.
void StoreScheduler::Impl::remember_saved(const Save& save, const JobEvent& end, Instant now) {
  if (end.whole || save.range.empty()) return;
  unit_failed.assign(save.tags.size(), false);
  for (const FailedChunk& chunk : end.failed) {
    const std::uint32_t tokens = chunk.chunk * groups[raw(chunk.group)].chunk_tokens;
    const std::size_t unit = (tokens - save.range.from) / step_tokens;
    if (tokens >= save.range.from && unit < unit_failed.size()) unit_failed[unit] = true;
  }
  for (std::size_t unit = 0; unit < save.tags.size(); ++unit) {
    if (!unit_failed[unit]) saved_prefixes.add(save.tags[unit], now);
  }
}

void StoreScheduler::Impl::end_save(const JobEvent& end, Instant now) {
  const auto it = saves.find(raw(end.job));
  if (it == saves.end()) return;
  const Save save = std::move(it->second);
  saves.erase(it);
  counters.saved_objects += end.objects;
  counters.duplicate_objects += end.duplicates;
  counters.saved_bytes += end.bytes;
  counters.save_chunks_failed += end.failed.size();

  const bool refused =
      end.outcome == JobOutcome::kExpired ||
      std::any_of(end.failed.begin(), end.failed.end(), [](const FailedChunk& chunk) {
        const auto status = static_cast<ItemStatus>(chunk.status);
        return status == ItemStatus::kNoSpace || status == ItemStatus::kUnavailable ||
               status == ItemStatus::kTimedOut;
      });
  if (!refused) {
    if (end.objects > 0) refused_saves = 0;
  } else if (++refused_saves >= options.backoff_after) {
    refused_saves = 0;
    backoff_until = now + options.backoff;
  }

  remember_saved(save, end, now);
  Request* const request = find(save.request, save.generation);
  if (request == nullptr) return;
  if (save.range.empty()) {
    // A state that was not stored may be offered again.
    for (std::size_t i = 0; i < save.tags.size() && end.whole; ++i) {
      std::erase(request->handed_off, save.tags[i]);
    }
    for (const FailedChunk& chunk : end.failed) {
      const std::uint32_t tokens = (chunk.chunk + 1) * groups[raw(chunk.group)].chunk_tokens;
      forget_state(*request, chunk.group, tokens);
    }
    return;
  }
  // The watermark stops at the first hole: what lies behind one is of no use to a prefix (R50).
  std::uint32_t hole = end.whole ? save.range.from : save.range.to;
  for (const FailedChunk& chunk : end.failed) {
    hole = std::min(hole, aligned(chunk.chunk * groups[raw(chunk.group)].chunk_tokens));
  }
  hole = std::max(hole, save.range.from);
  if (hole < save.range.to && hole < request->planned) {
    // Twice as far each time: a store that stays away must not be sent the whole context at each
    // step.
    request->retry_above =
        std::max(request->retry_above, request->planned + (request->planned - hole));
    request->planned = hole;
  }
}

void StoreScheduler::Impl::end_load(JobId id, Load& load, const JobEvent& end, bool quiet) {
  LoadEnd result;
  result.request = load.request;
  result.job = id;
  result.blocks_quiet = quiet;
  if (end.whole) {
    result.valid_tokens = load.local;
  } else if (end.failed.empty()) {
    result.valid_tokens = load.hit;
  } else {
    // A shorter hit may need chunks that this load never asked for: only what was fetched counts as
    // present.
    loaded.reset(groups.size());
    for (const StoreIndex index : indices<StoreIndex>(groups.size())) {
      loaded.set_chunks(index, load.hit / groups[raw(index)].chunk_tokens);
    }
    for (const RunRecord& run : load.runs) {
      for (std::uint32_t i = 0; i < run.count; ++i) {
        const std::uint32_t chunk = run.first_chunk + i;
        if (!is_failed(end.failed, run.group, chunk)) loaded.mark(run.group, chunk);
      }
    }
    result.valid_tokens = find_hit(groups, loaded, load.local, load.hit, step_tokens);
  }
  result.complete = !end.whole && end.failed.empty();

  for (const RunRecord& run : load.runs) {
    for (std::uint32_t i = 0; i < run.count && !result.complete; ++i) {
      const std::uint32_t chunk = run.first_chunk + i;
      if (!end.whole && !is_failed(end.failed, run.group, chunk)) continue;
      result.failed.push_back(
          {projection().group_id(run.group), chunk, load.ids[run.first_id + i]});
    }
  }
  for (const FailedChunk& chunk : end.failed) {
    const auto status = static_cast<ItemStatus>(chunk.status);
    if (status == ItemStatus::kMissing || status == ItemStatus::kNotReady) ++counters.load_races;
  }

  counters.loaded_tokens += result.valid_tokens - load.local;
  counters.loaded_objects += end.objects;
  counters.loaded_bytes += end.bytes;
  if (!result.complete) ++counters.loads_failed;
  if (Request* const request = find(load.request, load.generation)) {
    request->loading = false;
    // What came from the store is in the store; what was local may not be.
    if (load.local <= request->planned) {
      request->planned = std::max(request->planned, result.valid_tokens);
    }
    if (!result.complete && !request->bypass) {
      request->bypass = true;
      ++counters.bypasses;
    }
  }
  load.reported = true;
  load_ends.push_back(std::move(result));
}

// Turns what has become final in the ledger into load ends, watermarks and released references.
void StoreScheduler::Impl::settle(Instant now) {
  ledger.advance(now);
  while (ledger.take_outcome(event)) {
    if (event.kind == JobKind::kSave) end_save(event, now);
  }
  while (ledger.take_quarantined(event)) {
    log(LogLevel::kWarning,
        fmt::format("job {} of request {} is not quiet after {} s: its blocks are held until the "
                    "client that moves them is gone",
                    raw(event.job), raw(event.request),
                    options.quarantine_after.ns / 1'000'000'000));
    const auto load = loads.find(raw(event.job));
    if (load != loads.end() && options.detach_quarantined_loads && !load->second.reported) {
      event.whole = true;  // the bytes may still change, also those that seem to have arrived
      end_load(event.job, load->second, event, false);
    }
  }
  while (ledger.take_quiet(event)) {
    released.insert(released.end(), event.blocks.begin(), event.blocks.end());
    const auto load = loads.find(raw(event.job));
    if (load == loads.end()) continue;
    if (!load->second.reported) end_load(event.job, load->second, event, true);
    loads.erase(load);
  }
}

StoreScheduler::StoreScheduler(std::shared_ptr<const KeySchema> schema,
                               std::shared_ptr<ObjectIndex> index,
                               const StoreSchedulerOptions& wanted) {
  ProblemList problems;
  StoreSchedulerOptions options = wanted;
  if (options.ranks == 0 && schema) options.ranks = schema->projection().parallel().world();
  if (!schema) problems.add("schema", "null", "a key schema");
  if (!index) problems.add("index", "null", "an object index");
  check_options(options, schema.get(), problems);
  if (schema) problems.append(validate_store(schema->projection()));
  problems.throw_if_any(ErrorCode::kInvalidConfig, "store scheduler");
  impl_ = std::make_unique<Impl>(std::move(schema), std::move(index), options);
  impl_->plan.digest = impl_->projection().digest();
  impl_->plan.epoch = options.epoch;
}
StoreScheduler::~StoreScheduler() = default;

const Projection& StoreScheduler::projection() const noexcept { return impl_->projection(); }
const StoreSchedulerOptions& StoreScheduler::options() const noexcept { return impl_->options; }

LookupResult StoreScheduler::lookup(RequestId id, std::uint32_t prompt_tokens,
                                    const HashList& hashes, std::uint32_t local_tokens,
                                    Instant now) {
  Impl& s = *impl_;
  if (!s.options.loads) return {};
  if (local_tokens % s.step_tokens != 0) {
    // An answer beyond a rounded hit would be misread as one beyond the engine's.
    ++s.counters.lookups_refused;
    return {};
  }
  const std::uint32_t hashed = s.aligned(std::min(prompt_tokens, hashes.end() * s.hash_tokens));
  const std::uint32_t max = std::min(s.projection().max_hit(prompt_tokens), hashed);
  const std::uint32_t local = local_tokens;
  // The engine's own cache covers all that may be used: no call (R79).
  if (max <= local) return {};

  Request& request = s.remember(id);
  if (!s.take_hashes(request, hashes) || request.bypass || request.loading) return {};

  s.take_answers(now);
  Lookup& lookup = request.lookup;
  const bool stale =
      lookup.state == LookupState::kDone && now - lookup.at > s.options.lookup_fresh_for;
  if (lookup.state == LookupState::kNone || stale || local < lookup.asked_local ||
      max != lookup.max) {
    if (lookup.state == LookupState::kNone) ++s.counters.lookups;
    s.ask(id, request, local, max, now);
  } else if (lookup.state == LookupState::kInFlight &&
             now - lookup.at >= s.options.lookup_timeout) {
    lookup.state = LookupState::kDone;  // late is a miss
    lookup.hit = lookup.asked_local;
    lookup.at = now;
    ++s.counters.lookups_late;
  }
  lookup.engine_local = local;
  if (lookup.state != LookupState::kDone) return {true, 0};
  return {false, lookup.hit > local ? lookup.hit - local : 0};
}

std::optional<JobId> StoreScheduler::allocated(RequestId id, std::uint32_t external_tokens,
                                               const BlockRows& rows, Instant now) {
  Impl& s = *impl_;
  Request* const request = s.find(id);
  if (request == nullptr || request->loading) return std::nullopt;
  Lookup& lookup = request->lookup;
  const bool offered = lookup.state == LookupState::kDone && lookup.hit > lookup.engine_local &&
                       lookup.hit - lookup.engine_local == external_tokens;
  if (external_tokens == 0 || !offered) {
    if (lookup.state != LookupState::kQueued) lookup.state = LookupState::kNone;
    return std::nullopt;
  }
  JobId job{};
  s.plan_load(id, *request, rows, now, job);
  return job;
}

void StoreScheduler::advanced(RequestId id, std::uint32_t accepted_tokens, const HashList& hashes) {
  Impl& s = *impl_;
  Request& request = s.remember(id);
  s.take_hashes(request, hashes);
  request.accepted = accepted_tokens;
}

std::uint32_t StoreScheduler::known_hashes(RequestId id) const noexcept {
  Request* const request = impl_->find(id);
  return request == nullptr ? 0 : impl_->hash_count(*request);
}

TokenRange StoreScheduler::wants_save(RequestId id, Instant now) noexcept {
  Impl& s = *impl_;
  Request* const request = s.find(id);
  if (request == nullptr || !s.options.saves || now < s.backoff_until) return {};
  const std::uint32_t hashed = s.hash_count(*request) * s.hash_tokens;
  const std::uint32_t to = s.aligned(std::min(request->accepted, hashed));
  if (to <= request->planned || to <= request->retry_above) return {};
  while (request->planned < to &&
         s.saved_prefixes.contains(s.tag_at(*request, request->planned), now)) {
    request->planned += s.step_tokens;
    ++s.counters.saves_known;
  }
  return {request->planned, to};
}

void StoreScheduler::save(RequestId id, const TokenRange& range, const BlockRows& rows,
                          Instant now) {
  Impl& s = *impl_;
  TokenRange wanted = wants_save(id, now);
  wanted.to = std::min(wanted.to, s.aligned(range.to));
  if (wanted.empty()) return;
  if (rows.size() != s.projection().num_groups()) {
    // Rows of a projection would name other groups' blocks.
    ++s.counters.tables_refused;
    return;
  }
  Request& request = *s.find(id);
  s.begin_plan();
  s.builder.begin();
  s.ranges.clear();
  for (std::size_t g = 0; g < s.groups.size(); ++g) {
    const std::uint32_t chunk_tokens = s.groups[g].chunk_tokens;
    s.ranges.push_back(s.save_rules[g] == SaveRule::kPositional
                           ? ChunkRange{wanted.from / chunk_tokens, wanted.to / chunk_tokens}
                           : ChunkRange{});
  }
  s.add_marks(request);
  const std::uint64_t skipped_before = s.counters.sources_skipped;
  const std::uint32_t reached = s.add_sources(wanted, rows);
  request.planned = reached;
  if (reached < wanted.to) request.retry_above = wanted.to;
  if (s.builder.runs().empty()) {
    s.builder.abandon();
    return;
  }
  Save& save = s.start_save(id, request.generation, wanted, now, false);
  if (s.counters.sources_skipped != skipped_before) return;
  save.tags.reserve((wanted.to - wanted.from) / s.step_tokens);
  for (std::uint32_t from = wanted.from; from < wanted.to; from += s.step_tokens) {
    save.tags.push_back(s.tag_at(request, from));
  }
}

void StoreScheduler::boundary(RequestId id, GroupId group, BlockId block, std::uint32_t tokens) {
  Impl& s = *impl_;
  Request* const request = s.find(id);
  const std::optional<StoreIndex> index = s.projection().store_index(group);
  if (!s.options.saves || !index) return;
  const std::uint32_t chunk_tokens = s.groups[raw(*index)].chunk_tokens;
  const bool known =
      request != nullptr && tokens > 0 && tokens <= s.hash_count(*request) * s.hash_tokens;
  const bool block_ok =
      raw(block) > 0 && static_cast<std::uint32_t>(raw(block)) < s.projection().num_blocks();
  // A state off the grid of S can end no hit.
  if (!known || !block_ok || s.save_rules[raw(*index)] != SaveRule::kHandOff ||
      tokens % s.step_tokens != 0 || tokens % chunk_tokens != 0) {
    ++s.counters.offers_refused;
    return;
  }
  // An engine offers a state again when it computes it again, e.g. after a preemption.
  const std::uint64_t mark = state_mark(*index, tokens);
  auto& handed_off = request->handed_off;
  const auto place = std::lower_bound(handed_off.begin(), handed_off.end(), mark);
  if (place != handed_off.end() && *place == mark) return;
  handed_off.insert(place, mark);
  const auto hash = s.hashes_of(*request)[tokens / s.hash_tokens - 1];
  s.offers.push_back({id, request->generation, *index, block, tokens, s.offer_hashes.size()});
  s.offer_hashes.insert(s.offer_hashes.end(), hash.begin(), hash.end());
  s.acquired.push_back(block);
}

void StoreScheduler::preempted(RequestId id) {
  Request* const request = impl_->find(id);
  if (request == nullptr) return;
  request->accepted = 0;
  request->lookup.state = LookupState::kNone;
}

void StoreScheduler::finished(RequestId id, FinishReason) {
  Request* const request = impl_->find(id);
  if (request == nullptr) return;
  const std::uint32_t hashed = impl_->hash_count(*request) * impl_->hash_tokens;
  if (impl_->options.saves &&
      impl_->aligned(std::min(request->accepted, hashed)) > request->planned) {
    ++impl_->counters.saves_dropped;
  }
  impl_->requests.erase(raw(id));
}

const StepPlan& StoreScheduler::end_step(Instant now) {
  Impl& s = *impl_;
  s.take_answers(now);
  s.questions.clear();
  std::size_t taken = 0;
  std::uint64_t tokens = 0;
  for (; taken < s.queued.size(); ++taken) {
    const RequestId id = s.queued[taken];
    Request* const request = s.find(id);
    if (request == nullptr || request->lookup.state != LookupState::kQueued) continue;
    Lookup& lookup = request->lookup;
    tokens += lookup.max - lookup.asked_local;
    // The others ask in the next step: a call as large as all of them would be late for all.
    if (tokens > kLookupTokensPerCall && !s.questions.empty()) break;
    lookup.state = LookupState::kInFlight;
    lookup.at = now;
    s.questions.push_back(
        {id, lookup.serial, lookup.asked_local, lookup.max, s.hashes_of(*request)});
  }
  s.queued.erase(s.queued.begin(), s.queued.begin() + static_cast<std::ptrdiff_t>(taken));
  s.desk.ask(s.questions, now, now + s.options.lookup_timeout, s.answers);
  s.take_answers(now);
  s.settle(now);
  s.begin_plan();
  s.plan_offers(now);
  s.plan_taken = true;
  s.plan.step = ++s.step;
  return s.plan;
}

void StoreScheduler::report(const WorkerReport& report, Instant now) {
  Impl& s = *impl_;
  if (report.epoch != s.options.epoch) {
    ++s.counters.reports_foreign;
    return;
  }
  for (const JobReport& job : report.jobs) {
    const auto failed = report.failed_of(job);
    const bool known = std::all_of(failed.begin(), failed.end(), [&](const FailedChunk& chunk) {
      return raw(chunk.group) < s.groups.size();
    });
    if (!known) {
      ++s.counters.reports_malformed;
      continue;
    }
    s.ledger.notice(report.rank, job, failed, now);
  }
  s.settle(now);
}

void StoreScheduler::report(std::span<const std::byte> bytes, Instant now) {
  while (!bytes.empty()) {
    try {
      decode_report(bytes, impl_->incoming);
    } catch (const Error&) {
      ++impl_->counters.reports_malformed;
      return;
    }
    report(impl_->incoming, now);
  }
}

void StoreScheduler::take_load_ends(std::vector<LoadEnd>& out) {
  std::move(impl_->load_ends.begin(), impl_->load_ends.end(), std::back_inserter(out));
  impl_->load_ends.clear();
}
void StoreScheduler::take_acquired(std::vector<BlockId>& out) {
  out.insert(out.end(), impl_->acquired.begin(), impl_->acquired.end());
  impl_->acquired.clear();
}
void StoreScheduler::take_released(std::vector<BlockId>& out) {
  out.insert(out.end(), impl_->released.begin(), impl_->released.end());
  impl_->released.clear();
}

bool StoreScheduler::has_pending_work() const noexcept {
  return impl_->ledger.size() > impl_->ledger.in_quarantine() || !impl_->offers.empty() ||
         !impl_->load_ends.empty() || !impl_->released.empty();
}
std::size_t StoreScheduler::tracked() const noexcept {
  return impl_->requests.size() + impl_->ledger.size() + impl_->loads.size() + impl_->saves.size() +
         impl_->offers.size() + impl_->desk.in_flight();
}
StoreSchedulerCounters StoreScheduler::counters() const noexcept {
  StoreSchedulerCounters counters = impl_->counters;
  counters.lookup_calls = impl_->desk.counters().calls;
  counters.lookup_keys = impl_->desk.counters().keys;
  counters.ledger = impl_->ledger.counters();
  return counters;
}

}  // namespace kvprism
