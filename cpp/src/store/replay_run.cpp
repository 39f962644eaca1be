#include "kvprism/store/replay_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/spec/spec_registry.h"
#include "store/run_recorder.h"

namespace kvprism {
namespace {

using detail::RunCall;
using detail::RunHeader;
using detail::RunKind;
using detail::RunRecordHead;
using detail::RunStart;

constexpr std::string_view kSubject = "recording";
constexpr std::int64_t kFarthest = std::int64_t{1} << 61;  // a sum with a bound must not overflow

constexpr std::array<std::string_view, 19> kCallNames{
    "?",          "set_mode", "restrict",       "lookup",        "allocated",     "advanced",
    "wants_save", "save",     "boundary",       "preempted",     "finished",      "purge",
    "end_step",   "report",   "take_load_ends", "take_acquired", "take_released", "prompt",
    "rank_gone"};

[[noreturn]] void refuse(std::string path, std::string value, std::string expected) {
  fail(ErrorCode::kInvalidArgument, kSubject,
       {std::move(path), std::move(value), std::move(expected), {}});
}

// Takes values off the front of a payload; every read is checked.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, std::size_t offset) : bytes_(bytes), offset_(offset) {}

  template <class T>
  T take() {
    T value{};
    std::memcpy(&value, raw_bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string text() {
    const auto bytes = raw_bytes(take<std::uint32_t>());
    std::string out(bytes.size(), '\0');
    if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
  HashList hashes() {
    HashList list;
    list.first = take<std::uint32_t>();
    list.count = take<std::uint32_t>();
    list.width = take<std::uint32_t>();
    if (list.width != 0 && list.count > bytes_.size() / list.width) truncated(list.count);
    if (list.first > UINT32_MAX - list.count) truncated(list.first);
    const auto bytes = raw_bytes(static_cast<std::size_t>(list.count) * list.width);
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): bytes of another type of byte
    list.data = reinterpret_cast<const std::uint8_t*>(bytes.data());
    return list;
  }
  // Block ids are copied: a payload is aligned for bytes only.
  void rows(std::vector<std::vector<BlockId>>& out) {
    const auto count = take<std::uint32_t>();
    if (count > bytes_.size() / sizeof(std::uint32_t)) truncated(count);
    out.resize(count);
    for (std::vector<BlockId>& row : out) {
      const auto ids = take<std::uint32_t>();
      if (ids > bytes_.size() / sizeof(BlockId)) truncated(ids);
      const auto bytes = raw_bytes(ids * sizeof(BlockId));
      row.resize(ids);
      if (ids != 0) std::memcpy(row.data(), bytes.data(), bytes.size());
    }
  }
  std::span<const std::byte> raw_bytes(std::size_t count) {
    if (count > bytes_.size()) truncated(count);
    const auto front = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    offset_ += count;
    return front;
  }
  std::span<const std::byte> rest() { return raw_bytes(bytes_.size()); }

 private:
  [[noreturn]] void truncated(std::uint64_t wanted) const {
    refuse(fmt::format("byte {}", offset_), std::to_string(wanted),
           fmt::format("at most the {} bytes that are left of the record", bytes_.size()));
  }
  std::span<const std::byte> bytes_;
  std::size_t offset_;
};

struct Record {
  RunKind kind{};
  Instant at;
  std::span<const std::byte> payload;
  std::size_t offset = 0;

  Reader reader() const { return {payload, offset + sizeof(RunRecordHead)}; }
};

// Answers as recorded. What differs is noted, not thrown: it happens inside of the scheduler.
class ReplayIndex final : public ObjectIndex {
 public:
  void begin_call(std::span<const Record> records) {
    records_ = records;
    next_ = 0;
  }
  // "" or the first thing that the index was not asked as recorded.
  std::string end_call() {
    if (difference_.empty() && next_ < records_.size())
      difference_ = "the index is not asked for everything that was recorded";
    return std::exchange(difference_, {});
  }

  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant, Instant) override {
    return start(detail::describe_start(op, *batch, nullptr), batch);
  }
  bool start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal, Instant,
                    Instant) override {
    return start(detail::describe_start(op, *batch, &removal), batch);
  }
  bool poll_index(Instant, Completion& out) override {
    if (next_ < records_.size() && records_[next_].kind == RunKind::kIndexIdle) {
      ++next_;
      return false;
    }
    if (next_ >= records_.size() || records_[next_].kind != RunKind::kIndexEnd) {
      if (difference_.empty()) difference_ = "the index is polled where it was not";
      return false;
    }
    Reader reader = records_[next_++].reader();
    out = Completion();
    out.op = OpId{reader.take<std::uint64_t>()};
    const auto flags = reader.take<std::uint32_t>();
    out.outcome = (flags & 1) != 0;
    out.quiet = (flags & 2) != 0;
    const auto count = reader.take<std::uint32_t>();
    const bool has_bytes = reader.take<std::uint32_t>() != 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      ItemResult item;
      item.status = static_cast<ItemStatus>(reader.take<std::uint8_t>());
      if (has_bytes) item.bytes = reader.take<std::uint64_t>();
      out.items.push_back(item);
    }
    if (out.quiet) out.batch = std::make_unique<ObjectBatch>();
    return true;
  }
  CloseReport close_index(Duration) override { return {}; }

 private:
  bool start(RunStart asked, std::unique_ptr<ObjectBatch>& batch) {
    if (next_ >= records_.size() || records_[next_].kind != RunKind::kIndexStart) {
      if (difference_.empty()) difference_ = "the index is asked for something that was not";
      return false;
    }
    Reader reader = records_[next_++].reader();
    const auto recorded = reader.take<RunStart>();
    asked.accepted = recorded.accepted;
    if (!(asked == recorded) && difference_.empty()) {
      difference_ = fmt::format("call {} of the index has other keys than the recorded call {}",
                                asked.op, recorded.op);
    }
    if (recorded.accepted != 0) batch.reset();
    return recorded.accepted != 0;
  }

  std::span<const Record> records_;
  std::size_t next_ = 0;
  std::string difference_;
};

// The next record; false at the end, or where the last one was cut off.
bool next_record(std::span<const std::byte> all, std::size_t& at, Record& out) {
  if (all.size() - at < sizeof(RunRecordHead)) return false;
  RunRecordHead head;
  std::memcpy(&head, all.data() + at, sizeof(head));
  const std::size_t padded = (std::size_t{head.bytes} + 7) & ~std::size_t{7};
  if (head.kind < RunKind::kSetup || head.kind > RunKind::kEnd) {
    refuse(fmt::format("byte {}: kind", at), std::to_string(static_cast<std::uint32_t>(head.kind)),
           "1 to 7");
  }
  if (head.at < -kFarthest || head.at > kFarthest) {
    refuse(fmt::format("byte {}: time", at), std::to_string(head.at),
           fmt::format("within {} ns", kFarthest));
  }
  if (all.size() - at - sizeof(head) < padded) return false;
  out = {head.kind, Instant{head.at}, all.subspan(at + sizeof(head), head.bytes), at};
  at += sizeof(head) + padded;
  return true;
}

struct Replay {
  std::shared_ptr<ReplayIndex> index = std::make_shared<ReplayIndex>();
  std::unique_ptr<StoreScheduler> scheduler;
  ReplayRunResult result;
  // Reused between calls.
  std::vector<std::vector<BlockId>> rows;
  std::vector<std::span<const BlockId>> views;
  std::vector<LoadEnd> ends;
  std::vector<BlockId> ids;
  std::vector<std::byte> bytes;

  void set_up(const Record& record, const SpecRegistry& registry) {
    Reader reader = record.reader();
    result.recorded_by = reader.text();
    result.repeated_by = detail::run_program();
    const auto projection =
        Projection::make(cache_config_from_json(reader.text(), registry), registry);
    KeyFacts facts;
    facts.model = reader.text();
    facts.model_revision = reader.text();
    facts.kv_quantization = reader.text();
    facts.hash_algorithm = reader.text();
    facts.pipeline_split = reader.text();
    StoreSchedulerOptions options;
    detail::visit_run_options(options, [&](auto& value) {
      using Value = std::remove_reference_t<decltype(value)>;
      value = static_cast<Value>(reader.take<std::int64_t>());
    });
    scheduler =
        std::make_unique<StoreScheduler>(KeySchema::make(projection, facts), index, options);
  }

  BlockRows read_rows(Reader& reader) {
    reader.rows(rows);
    views.assign(rows.begin(), rows.end());
    return BlockRows(std::span<const std::span<const BlockId>>(views));
  }

  std::array<std::uint64_t, 2> call(RunCall what, Reader& reader, Instant now) {
    StoreScheduler& s = *scheduler;
    const auto request = [&] { return RequestId{reader.take<std::uint64_t>()}; };
    switch (what) {
      case RunCall::kSetMode:
        s.set_mode(static_cast<StoreMode>(reader.take<std::uint8_t>() & 3));
        return {};
      case RunCall::kRestrict: {
        const RequestId id = request();
        const auto bits = reader.take<std::uint8_t>();
        s.restrict(id, {(bits & 1) != 0, (bits & 2) != 0});
        return {};
      }
      case RunCall::kLookup: {
        const RequestId id = request();
        const auto prompt = reader.take<std::uint32_t>();
        const auto local = reader.take<std::uint32_t>();
        const LookupResult found = s.lookup(id, prompt, reader.hashes(), local, now);
        return {found.pending ? 1u : 0u, found.external_tokens};
      }
      case RunCall::kAllocated: {
        const RequestId id = request();
        const auto external = reader.take<std::uint32_t>();
        const auto job = s.allocated(id, external, read_rows(reader), now);
        return {job ? raw(*job) : 0, 0};
      }
      case RunCall::kAdvanced: {
        const RequestId id = request();
        const auto accepted = reader.take<std::uint32_t>();
        s.advanced(id, accepted, reader.hashes());
        return {};
      }
      case RunCall::kWantsSave: {
        const TokenRange range = s.wants_save(request(), now);
        return {range.from, range.to};
      }
      case RunCall::kSave: {
        const RequestId id = request();
        const auto from = reader.take<std::uint32_t>();
        const auto to = reader.take<std::uint32_t>();
        s.save(id, {from, to}, read_rows(reader), now);
        return {};
      }
      case RunCall::kBoundary: {
        const RequestId id = request();
        const GroupId group{reader.take<std::uint32_t>()};
        const BlockId block{reader.take<std::int32_t>()};
        const auto tokens = reader.take<std::uint32_t>();
        s.boundary(id, group, block, tokens);
        return {};
      }
      case RunCall::kPreempted:
        s.preempted(request());
        return {};
      case RunCall::kFinished: {
        const RequestId id = request();
        s.finished(id, reader.take<std::uint8_t>() != 0 ? FinishReason::kAborted
                                                        : FinishReason::kCompleted);
        return {};
      }
      case RunCall::kPurge:
        s.purge(now);
        return {};
      case RunCall::kEndStep: {
        const StepPlan& plan = s.end_step(now);
        ++result.steps;
        if (!plan.empty()) ++result.plans;
        encode(plan.view(), bytes);
        return detail::hash_words(bytes);
      }
      case RunCall::kReport: {
        s.report(reader.rest(), now);
        return {};
      }
      case RunCall::kRankGone:
        s.rank_gone(Rank{reader.take<std::uint32_t>()}, now);
        return {};
      case RunCall::kPrompt: {
        const RequestId id = request();
        s.prompt(id, reader.take<std::uint32_t>());
        return {};
      }
      case RunCall::kTakeLoadEnds:
        ends.clear();
        s.take_load_ends(ends);
        bytes.clear();
        detail::write_load_ends(ends, bytes);
        return detail::hash_words(bytes);
      case RunCall::kTakeAcquired:
      case RunCall::kTakeReleased:
        ids.clear();
        if (what == RunCall::kTakeAcquired) {
          s.take_acquired(ids);
        } else {
          s.take_released(ids);
        }
        return detail::hash_words(std::as_bytes(std::span(ids)));
    }
    refuse("call", std::to_string(static_cast<std::uint32_t>(what)), "1 to 18");
  }
};

}  // namespace

ReplayRunResult replay_run(std::span<const std::byte> recording, const SpecRegistry& registry) {
  RunHeader header;
  if (recording.size() < sizeof(header)) {
    refuse("bytes", std::to_string(recording.size()), "a recording, which begins with 8 bytes");
  }
  std::memcpy(&header, recording.data(), sizeof(header));
  if (header.magic != detail::kRunMagic)
    refuse("magic", std::to_string(header.magic), std::to_string(detail::kRunMagic));
  if (header.version != detail::kRunVersion) {
    fail(ErrorCode::kMismatch, kSubject,
         {"version", std::to_string(header.version), std::to_string(detail::kRunVersion), {}});
  }
  std::size_t at = sizeof(header);
  Record record;
  if (!next_record(recording, at, record) || record.kind != RunKind::kSetup)
    refuse("byte 8", "no setup", "a setup record");
  Replay replay;
  replay.set_up(record, registry);
  ReplayRunResult& result = replay.result;

  std::vector<Record> of_index;
  for (std::size_t begin = at;; begin = at) {
    Record call;
    bool whole = next_record(recording, at, call);
    if (whole && call.kind == RunKind::kEnd) {
      if (at != recording.size()) {
        refuse(fmt::format("byte {}", at), fmt::format("{} more bytes", recording.size() - at),
               fmt::format("nothing behind the end, which byte {} tells", call.offset));
      }
      result.ended = true;
      return result;
    }
    if (whole && call.kind != RunKind::kCall) {
      refuse(fmt::format("byte {}: kind", call.offset),
             std::to_string(static_cast<std::uint32_t>(call.kind)), "2, the beginning of a call");
    }
    of_index.clear();
    while (whole) {
      whole = next_record(recording, at, record);
      if (!whole || record.kind == RunKind::kReturn) break;
      if (record.kind < RunKind::kIndexStart || record.kind == RunKind::kEnd) {
        refuse(fmt::format("byte {}: kind", record.offset),
               std::to_string(static_cast<std::uint32_t>(record.kind)), "3 to 6 inside a call");
      }
      of_index.push_back(record);
    }
    if (!whole) {
      result.ignored_bytes = recording.size() - begin;
      return result;
    }
    Reader returned = record.reader();
    const auto expected = returned.take<std::array<std::uint64_t, 2>>();
    Reader reader = call.reader();
    const auto what = reader.take<RunCall>();
    replay.index->begin_call(of_index);
    const auto actual = replay.call(what, reader, call.at);
    std::string difference = replay.index->end_call();
    if (difference.empty() && actual != expected) {
      difference = fmt::format("it returned {:x} {:x}, and now {:x} {:x}", expected[0], expected[1],
                               actual[0], actual[1]);
    }
    ++result.calls;
    if (!difference.empty()) {
      const auto name = static_cast<std::uint32_t>(what);
      result.same = false;
      result.difference =
          fmt::format("call {}, {} in step {}: {}", result.calls,
                      name < kCallNames.size() ? kCallNames[name] : "?", result.steps, difference);
      if (result.recorded_by != result.repeated_by) {
        result.difference += fmt::format(" (recorded by {}, repeated by {})", result.recorded_by,
                                         result.repeated_by);
      }
      return result;
    }
  }
}

}  // namespace kvprism
