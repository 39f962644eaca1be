#include "kvprism/backend/fault_injection.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "backend/seeded_random.h"
#include "kvprism/base/error.h"

namespace kvprism {
namespace {

using detail::SeededRandom;

enum class Kind : std::uint8_t { kExists, kRemove, kPut, kGet };

constexpr bool of_index(Kind kind) noexcept {
  return kind == Kind::kExists || kind == Kind::kRemove;
}

struct Befalls {
  bool exists;
  bool put;
  bool get;
  bool remove = false;
};

constexpr Befalls befalls(FaultKind kind) noexcept {
  switch (kind) {
    case FaultKind::kFailCall:
    case FaultKind::kFailItems:
    case FaultKind::kUnavailable:
    case FaultKind::kDelay:
    case FaultKind::kHang:
    case FaultKind::kLandLate:
    case FaultKind::kRefuse:
    case FaultKind::kClientLost:
      return {false, true, true};
    case FaultKind::kTruncate:
    case FaultKind::kCorrupt:
    case FaultKind::kSilentCorrupt:
    case FaultKind::kLateQuiet:
    case FaultKind::kVanished:
    case FaultKind::kNotReady:
    case FaultKind::kLeaseLost:
      return {false, false, true};
    case FaultKind::kNoSpace:
    case FaultKind::kDuplicate:
    case FaultKind::kLostAnswer:
    case FaultKind::kReadLate:
      return {false, true, false};
    case FaultKind::kLookupFailed:
    case FaultKind::kLookupLate:
    case FaultKind::kLookupRefused:
      return {true, false, false};
    case FaultKind::kRemoveFailed:
    case FaultKind::kRemoveLate:
      return {false, false, false, true};
  }
  return {false, false, false};
}

constexpr bool befalls(FaultKind fault, Kind kind) noexcept {
  const Befalls which = befalls(fault);
  switch (kind) {
    case Kind::kExists:
      return which.exists;
    case Kind::kRemove:
      return which.remove;
    case Kind::kPut:
      return which.put;
    case Kind::kGet:
      break;
  }
  return which.get;
}

// The status of items that are not passed on at all.
std::optional<ItemStatus> withheld_status(FaultKind fault) noexcept {
  switch (fault) {
    case FaultKind::kFailCall:
    case FaultKind::kFailItems:
      return ItemStatus::kFailed;
    case FaultKind::kUnavailable:
    case FaultKind::kLookupFailed:
    case FaultKind::kRemoveFailed:
    case FaultKind::kClientLost:
      return ItemStatus::kUnavailable;
    case FaultKind::kVanished:
      return ItemStatus::kMissing;
    case FaultKind::kNotReady:
      return ItemStatus::kNotReady;
    case FaultKind::kNoSpace:
      return ItemStatus::kNoSpace;
    default:
      return std::nullopt;
  }
}

constexpr bool whole_call(FaultKind fault) noexcept {
  return fault == FaultKind::kFailCall || fault == FaultKind::kUnavailable ||
         fault == FaultKind::kLookupFailed || fault == FaultKind::kRemoveFailed ||
         fault == FaultKind::kClientLost;
}

// Faults that change what arrived, after it has.
constexpr bool changes_result(FaultKind fault) noexcept {
  return fault == FaultKind::kTruncate || fault == FaultKind::kCorrupt ||
         fault == FaultKind::kSilentCorrupt || fault == FaultKind::kLeaseLost ||
         fault == FaultKind::kDuplicate || fault == FaultKind::kLostAnswer;
}

// Faults that touch the bytes once more between outcome and quiet.
constexpr bool touches_again(FaultKind fault) noexcept {
  return fault == FaultKind::kLateQuiet || fault == FaultKind::kReadLate;
}

}  // namespace

std::string_view to_string(FaultKind kind) noexcept {
  static constexpr std::array<std::string_view, kNumFaultKinds> kNames{
      "fail call",   "fail items",    "unavailable", "delay",          "hang",
      "land late",   "refuse",        "truncate",    "corrupt",        "silent corrupt",
      "late quiet",  "vanished",      "not ready",   "lease lost",     "no space",
      "duplicate",   "lookup failed", "lookup late", "lookup refused", "remove failed",
      "lost answer", "read late",     "remove late", "client lost"};
  const auto at = static_cast<std::size_t>(kind);
  return at < kNames.size() ? kNames[at] : "unknown";
}

struct FaultInjector::Impl {
  enum class Phase : std::uint8_t { kWaiting, kHung, kInner };

  struct Operation {
    OpId id{};
    Kind kind{};
    Removal removal;
    Phase phase = Phase::kWaiting;
    std::optional<FaultKind> fault;
    std::unique_ptr<ObjectBatch> batch;  // the caller's, while the inner store has not got it
    bool partial = false;                // some items are withheld; the inner store gets `part`
    std::unique_ptr<ObjectBatch> part;
    std::vector<std::uint32_t> passed;  // positions of the items in `part`
    std::vector<ItemResult> items;
    Instant due{};
    Instant deadline{};
    bool told = false;             // the outcome
    bool once_more = false;        // before it is quiet
    std::vector<std::byte> again;  // what a late quiet writes
  };
  using Operations = std::list<Operation>;

  struct Side {
    Operations operations;
    std::deque<Completion> ready;
    bool closed = false;
  };

  std::shared_ptr<ObjectStore> store;
  std::shared_ptr<ObjectIndex> index;
  FaultPlan plan;
  SeededRandom random{1};
  std::array<std::uint64_t, kNumFaultKinds> raised{};
  Side stores;
  Side lookups;
  Instant away_until{INT64_MIN};  // no client for puts and gets
  LateRead late_read;
  std::vector<OpId> never_quiet;  // puts and gets that a close has left behind
  std::uint64_t next_inner = 1;
  std::unordered_map<std::uint64_t, Operations::iterator> by_inner;  // of both sides

  void raise(FaultKind kind) { ++raised[static_cast<std::size_t>(kind)]; }

  std::optional<FaultKind> draw(Kind kind) {
    std::uint64_t roll = random.below(10'000);
    for (std::size_t i = 0; i < kNumFaultKinds; ++i) {
      const auto fault = static_cast<FaultKind>(i);
      if (!befalls(fault, kind)) continue;
      if (roll < plan.chance[i]) return fault;
      roll -= plan.chance[i];
    }
    return std::nullopt;
  }

  Duration up_to(Duration most) {
    return {static_cast<std::int64_t>(
        1 + random.below(static_cast<std::uint64_t>(std::max<std::int64_t>(most.ns, 1))))};
  }

  bool start(Kind kind, OpId id, std::unique_ptr<ObjectBatch>& batch, Instant now, Instant deadline,
             const Removal& removal = {}) {
    Side& side = of_index(kind) ? lookups : stores;
    if (side.closed) return false;
    std::optional<FaultKind> fault = draw(kind);
    if (fault == FaultKind::kClientLost) lose_client(now);
    if (!of_index(kind) && now < away_until) fault = FaultKind::kClientLost;
    if (fault == FaultKind::kRefuse || fault == FaultKind::kLookupRefused) {
      raise(*fault);
      return false;
    }
    if (!fault) {
      // Nothing to add: the inner store's own refusal is the caller's.
      return pass_on(side, kind, id, batch, now, deadline, removal);
    }
    Operation& op = side.operations.emplace_back();
    op.id = id;
    op.kind = kind;
    op.removal = removal;
    op.fault = fault;
    op.batch = std::move(batch);
    op.items.resize(op.batch->keys.size());
    op.due = now;
    op.deadline = deadline;
    if (const auto status = withheld_status(*fault)) {
      if (fault != FaultKind::kClientLost) raise(*fault);  // counts once for each client
      withhold(op, *status, whole_call(*fault));
    } else if (*fault == FaultKind::kDelay) {
      raise(*fault);
      op.due = now + up_to(plan.delay);
    } else if (*fault == FaultKind::kLookupLate) {
      raise(*fault);
      op.due = now + up_to(plan.lookup_late);
    } else if (*fault == FaultKind::kHang) {
      raise(*fault);
      op.phase = Phase::kHung;
    } else if (*fault == FaultKind::kLandLate) {
      raise(*fault);
      for (ItemResult& item : op.items) item = {ItemStatus::kTimedOut, 0};
      tell(side, op, false);
      op.due = now + up_to(plan.late);
    } else if (*fault == FaultKind::kRemoveLate) {
      raise(*fault);
      for (ItemResult& item : op.items) item = {ItemStatus::kUnavailable, 0};
      tell(side, op, false);
      op.due = now + up_to(plan.late);
    }
    return true;
  }

  // Whoever waits for its calls is told; what native code has begun goes on.
  void lose_client(Instant now) {
    raise(FaultKind::kClientLost);
    away_until = now + up_to(plan.late);
    for (Operation& op : stores.operations) tell_unquiet(op, ItemStatus::kTimedOut);
  }

  void tell_unquiet(Operation& op, ItemStatus status) {
    if (op.told) return;
    for (ItemResult& item : op.items) item = {status, 0};
    tell(stores, op, false);
  }

  bool pass_on(Side& side, Kind kind, OpId id, std::unique_ptr<ObjectBatch>& batch, Instant now,
               Instant deadline, const Removal& removal) {
    const std::uint64_t inner = next_inner++;
    const std::size_t items = batch->keys.size();
    if (!start_inner(kind, inner, batch, now, deadline, removal)) return false;
    Operation& op = side.operations.emplace_back();
    op.id = id;
    op.kind = kind;
    op.phase = Phase::kInner;
    op.items.resize(items);
    op.deadline = deadline;
    by_inner.emplace(inner, std::prev(side.operations.end()));
    return true;
  }

  bool start_inner(Kind kind, std::uint64_t inner, std::unique_ptr<ObjectBatch>& batch, Instant now,
                   Instant deadline, const Removal& removal) {
    switch (kind) {
      case Kind::kRemove:
        return index->start_remove(OpId{inner}, batch, removal, now, deadline);
      case Kind::kExists:
        return index->start_exists(OpId{inner}, batch, now, deadline);
      case Kind::kPut:
        return store->start_put(OpId{inner}, batch, now, deadline);
      case Kind::kGet:
        return store->start_get(OpId{inner}, batch, now, deadline);
    }
    return false;
  }

  // Gives some items their status now and leaves the others for the inner store.
  void withhold(Operation& op, ItemStatus status, bool all) {
    const std::size_t count = op.items.size();
    const std::size_t certain = random.below(count);
    op.partial = true;
    op.part = std::make_unique<ObjectBatch>();
    for (std::size_t i = 0; i < count; ++i) {
      if (all || i == certain || random.chance(1, 3)) {
        op.items[i] = {status, 0};
        continue;
      }
      op.passed.push_back(static_cast<std::uint32_t>(i));
      op.part->keys.append() = op.batch->keys[i];
      if (of_index(op.kind)) continue;
      const std::uint32_t first = i == 0 ? 0 : op.batch->ends[i - 1];
      op.part->segments.insert(op.part->segments.end(), op.batch->segments.begin() + first,
                               op.batch->segments.begin() + op.batch->ends[i]);
      op.part->ends.push_back(static_cast<std::uint32_t>(op.part->segments.size()));
    }
  }

  // The outcome, and quiet unless more is to come.
  void tell(Side& side, Operation& op, bool quiet) {
    Completion& out = side.ready.emplace_back();
    out.op = op.id;
    out.outcome = !op.told;
    out.quiet = quiet;
    if (!op.told) out.items = op.items;
    if (quiet) out.batch = std::move(op.batch);
    op.told = true;
  }

  void advance(Side& side, Instant now) {
    for (auto at = side.operations.begin(); at != side.operations.end();) {
      Operation& op = *at;
      if (op.phase != Phase::kWaiting || op.due > now) {
        ++at;
        continue;
      }
      if (op.once_more) touch_again(op);
      if (op.once_more || (op.partial && op.passed.empty())) {
        tell(side, op, true);
        at = side.operations.erase(at);
        continue;
      }
      const std::uint64_t inner = next_inner++;
      // A get that lands late has missed every deadline already.
      const Instant deadline = op.told ? Instant{INT64_MAX} : op.deadline;
      if (start_inner(op.kind, inner, op.partial ? op.part : op.batch, now, deadline, op.removal)) {
        op.phase = Phase::kInner;
        by_inner.emplace(inner, at);
      } else if (now >= deadline) {
        for (ItemResult& item : op.items) item = {ItemStatus::kTimedOut, 0};
        tell(side, op, true);
        at = side.operations.erase(at);
        continue;
      }
      ++at;
    }
    Completion done;
    const bool is_index = &side == &lookups;
    while (is_index ? index && index->poll_index(now, done)
                    : store && store->poll_store(now, done)) {
      inner_end(side, done, now);
      done = Completion();
    }
  }

  void touch_again(const Operation& op) const {
    if (op.kind == Kind::kPut) {
      read_again(op);
      return;
    }
    auto at = op.again.begin();
    for_each_good_segment(op, [&](const Segment& segment) {
      std::copy_n(at, segment.length, segment.base);
      at += static_cast<std::ptrdiff_t>(segment.length);
    });
  }

  void read_again(const Operation& op) const {
    std::vector<std::byte> bytes;
    for (std::size_t i = 0; i < op.items.size() && late_read; ++i) {
      if (op.items[i].status != ItemStatus::kOk) continue;
      bytes.clear();
      for (std::uint32_t s = i == 0 ? 0 : op.batch->ends[i - 1]; s < op.batch->ends[i]; ++s) {
        const Segment& segment = op.batch->segments[s];
        bytes.insert(bytes.end(), segment.base, segment.base + segment.length);
      }
      late_read(op.batch->keys[i], bytes);
    }
  }

  void inner_end(Side& side, Completion& done, Instant now) {
    const auto found = by_inner.find(static_cast<std::uint64_t>(done.op));
    if (found == by_inner.end()) return;
    const auto at = found->second;
    Operation& op = *at;
    if (done.outcome && !op.told) {
      if (!op.partial) {
        op.items = std::move(done.items);
      } else {
        for (std::size_t i = 0; i < op.passed.size(); ++i) op.items[op.passed[i]] = done.items[i];
      }
    }
    if (!done.quiet) {
      // What changes the bytes waits until nobody else writes them.
      const bool later = op.fault && (changes_result(*op.fault) || touches_again(*op.fault));
      if (!op.told && !later) tell(side, op, false);
      return;
    }
    by_inner.erase(found);
    if (op.partial) {
      op.part = std::move(done.batch);
    } else {
      op.batch = std::move(done.batch);
    }
    if (op.fault && !op.told && changes_result(*op.fault)) change_result(op);
    if (op.fault && touches_again(*op.fault) && !side.closed && any_ok(op)) {
      raise(*op.fault);
      op.once_more = true;
      for_each_good_segment(op, [&](const Segment& segment) {
        op.again.insert(op.again.end(), segment.base, segment.base + segment.length);
      });
      tell(side, op, false);
      op.phase = Phase::kWaiting;
      op.due = now + up_to(plan.late);
      return;
    }
    tell(side, op, true);
    side.operations.erase(at);
  }

  template <class Visit>
  static void for_each_good_segment(const Operation& op, Visit visit) {
    for (std::size_t i = 0; i < op.items.size(); ++i) {
      if (op.items[i].status != ItemStatus::kOk) continue;
      for (std::uint32_t s = i == 0 ? 0 : op.batch->ends[i - 1]; s < op.batch->ends[i]; ++s) {
        visit(op.batch->segments[s]);
      }
    }
  }

  static bool any_ok(const Operation& op) noexcept {
    return std::any_of(op.items.begin(), op.items.end(),
                       [](const ItemResult& item) { return item.status == ItemStatus::kOk; });
  }

  void change_result(Operation& op) {
    std::vector<std::uint32_t> good;
    for (std::size_t i = 0; i < op.items.size(); ++i) {
      if (op.items[i].status == ItemStatus::kOk) good.push_back(static_cast<std::uint32_t>(i));
    }
    if (good.empty()) return;
    raise(*op.fault);
    if (*op.fault == FaultKind::kDuplicate || *op.fault == FaultKind::kLostAnswer) {
      const bool lost = *op.fault == FaultKind::kLostAnswer;
      for (const std::uint32_t i : good)
        op.items[i] = {lost ? ItemStatus::kFailed : ItemStatus::kDuplicate, 0};
      return;
    }
    const std::uint32_t item = good[random.below(good.size())];
    const std::uint32_t first = item == 0 ? 0 : op.batch->ends[item - 1];
    const std::uint32_t end = op.batch->ends[item];
    switch (*op.fault) {
      case FaultKind::kTruncate: {
        const Segment& last = op.batch->segments[first + (end - first) / 2];
        std::fill(last.base + last.length / 2, last.base + last.length, std::byte{0xdd});
        for (std::uint32_t s = first + (end - first) / 2 + 1; s < end; ++s)
          spoil(op.batch->segments[s], 0xdd);
        op.items[item] = {ItemStatus::kFailed, 0};
        break;
      }
      case FaultKind::kLeaseLost:
        for (std::uint32_t s = first; s < end; ++s) spoil(op.batch->segments[s], 0x5e);
        op.items[item] = {ItemStatus::kLeaseLost, 0};
        break;
      default: {
        const Segment& segment = op.batch->segments[first + random.below(end - first)];
        segment.base[random.below(segment.length)] ^= std::byte{0x40};
        if (*op.fault == FaultKind::kCorrupt) op.items[item] = {ItemStatus::kChecksumMismatch, 0};
        break;
      }
    }
  }

  static void spoil(const Segment& segment, unsigned value) noexcept {
    std::fill(segment.base, segment.base + segment.length, static_cast<std::byte>(value));
  }

  bool poll(Side& side, Instant now, Completion& out) {
    if (side.ready.empty()) advance(side, now);
    if (side.ready.empty()) return false;
    out = std::move(side.ready.front());
    side.ready.pop_front();
    return true;
  }

  // What the inner store has not begun: cancelled, and quiet unless it pretends that native code
  // still has it.
  void cancel_waiting(Side& side, CloseReport& report) {
    for (auto at = side.operations.begin(); at != side.operations.end();) {
      Operation& op = *at;
      if (op.phase == Phase::kInner) {
        ++at;
        continue;
      }
      const bool pretends = op.phase == Phase::kHung || op.told;
      if (!op.told) {
        for (ItemResult& item : op.items) item = {ItemStatus::kCancelled, 0};
        tell(side, op, !pretends);
      }
      if (pretends && plan.lands_after_close && &side == &stores) {
        report_unquiet(op, report);
        op.phase = Phase::kWaiting;
        ++at;
        continue;
      }
      if (pretends && &side == &stores) never_quiet.push_back(op.id);
      at = side.operations.erase(at);
    }
  }

  static void report_unquiet(const Operation& op, CloseReport& report) {
    ++report.unquiet;
    report.ops.push_back(op.id);
  }

  // What the inner store has begun goes on there.
  void leave_inner(CloseReport& report) {
    for (Operation& op : stores.operations) {
      if (op.phase != Phase::kInner) continue;
      tell_unquiet(op, ItemStatus::kCancelled);
      report_unquiet(op, report);
    }
  }
};

FaultInjector::FaultInjector(std::shared_ptr<ObjectStore> store, std::shared_ptr<ObjectIndex> index,
                             const FaultPlan& plan)
    : impl_(std::make_unique<Impl>()) {
  impl_->store = std::move(store);
  impl_->index = std::move(index);
  impl_->plan = plan;
  impl_->random = SeededRandom(plan.seed);
}
FaultInjector::~FaultInjector() = default;

std::vector<FaultCount> FaultInjector::table() const {
  std::vector<FaultCount> rows;
  for (std::size_t i = 0; i < kNumFaultKinds; ++i)
    rows.push_back({static_cast<FaultKind>(i), impl_->raised[i]});
  return rows;
}

void FaultInjector::set_plan(const FaultPlan& plan) { impl_->plan = plan; }

std::size_t FaultInjector::hung() const noexcept {
  return static_cast<std::size_t>(
      std::count_if(impl_->stores.operations.begin(), impl_->stores.operations.end(),
                    [](const Impl::Operation& op) { return op.phase == Impl::Phase::kHung; }));
}

std::size_t FaultInjector::unquiet() const noexcept { return impl_->stores.operations.size(); }
void FaultInjector::set_late_read(LateRead read) { impl_->late_read = std::move(read); }

void FaultInjector::release_hung() {
  for (Impl::Operation& op : impl_->stores.operations) {
    if (op.phase != Impl::Phase::kHung) continue;
    op.phase = Impl::Phase::kWaiting;
    op.due = Instant{INT64_MIN};
    op.deadline = Instant{INT64_MAX};  // native code does not look at ours
  }
}

bool FaultInjector::start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                                 Instant deadline) {
  return impl_->start(Kind::kExists, op, batch, now, deadline);
}
bool FaultInjector::start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch,
                                 const Removal& removal, Instant now, Instant deadline) {
  return impl_->start(Kind::kRemove, op, batch, now, deadline, removal);
}
bool FaultInjector::poll_index(Instant now, Completion& out) {
  return impl_->poll(impl_->lookups, now, out);
}

CloseReport FaultInjector::close_index(Duration budget) {
  CloseReport report;
  impl_->lookups.closed = true;
  impl_->cancel_waiting(impl_->lookups, report);
  if (impl_->index) impl_->index->close_index(budget);
  return {};
}

StoreCapabilities FaultInjector::capabilities() const {
  StoreCapabilities capabilities = impl_->store->capabilities();
  capabilities.name += " with faults";
  return capabilities;
}
void FaultInjector::add_region(const Region& region) {
  if (impl_->stores.closed) {
    fail(ErrorCode::kClosed, "fault injector",
         {"region", std::to_string(region.length) + " bytes", "an open store", {}});
  }
  if (impl_->plan.region_delay.ns > 0)
    std::this_thread::sleep_for(std::chrono::nanoseconds(impl_->plan.region_delay.ns));
  impl_->store->add_region(region);
}
void FaultInjector::remove_region(const Region& region) { impl_->store->remove_region(region); }
void FaultInjector::set_wakeup(Wakeup wakeup) { impl_->store->set_wakeup(wakeup); }

bool FaultInjector::start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                              Instant deadline) {
  return impl_->start(Kind::kPut, op, batch, now, deadline);
}
bool FaultInjector::start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                              Instant deadline) {
  return impl_->start(Kind::kGet, op, batch, now, deadline);
}
bool FaultInjector::poll_store(Instant now, Completion& out) {
  return impl_->poll(impl_->stores, now, out);
}

CloseReport FaultInjector::close_store(Duration budget) {
  CloseReport report;
  if (impl_->plan.lands_after_close) {
    impl_->leave_inner(report);
    impl_->stores.closed = true;
    impl_->cancel_waiting(impl_->stores, report);
    return report;
  }
  impl_->stores.closed = true;
  impl_->cancel_waiting(impl_->stores, report);
  report.ops = impl_->never_quiet;
  report.unquiet = report.ops.size();
  if (impl_->store) {
    const CloseReport inner = impl_->store->close_store(budget);
    for (const OpId op : inner.ops) {
      const auto found = impl_->by_inner.find(static_cast<std::uint64_t>(op));
      if (found != impl_->by_inner.end()) report.ops.push_back(found->second->id);
    }
    report.unquiet += inner.unquiet;
  }
  return report;
}

}  // namespace kvprism
