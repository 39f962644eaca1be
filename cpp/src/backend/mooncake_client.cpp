#include "kvprism/backend/mooncake_client.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string_view>
#include <system_error>
#include <unordered_set>

#include "backend/exit_guard.h"
#include "backend/limited_log.h"
#include "backend/mooncake_native.h"
#include "backend/mooncake_status.h"
#include "backend/preflight.h"
#include "backend/region_table.h"
#include "backend/registration.h"
#include "backend/slice_room.h"
#include "kvprism/base/host_port.h"
#include "kvprism/base/log.h"
#include "mooncake/elf.h"
#include "mooncake/library.h"
#include "mooncake/probe.h"

namespace kvprism {
namespace {

using detail::MooncakeCall;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kSubject = "Mooncake client";
constexpr std::int64_t kMinSegment = 16 << 20;
// A put and a get may run beside each other, so each has half of the queue to a peer.
constexpr std::uint32_t kMaxSlices = mooncake::kLargestTcpQueue / 2;
constexpr std::uint64_t kMinRegion = 1 << 20;
// Results are int: an object of 2 GiB or more could not be told from an error.
constexpr std::uint64_t kMaxObject = INT_MAX;
constexpr std::array<std::string_view, 2> kProtocols = {"tcp", "rdma"};
// Far below every wait inside Mooncake, and far above what an answer from the master takes.
constexpr std::chrono::seconds kShortCall{5};
// How long a call waits for one of the other kind where the queue has no room for both.
constexpr std::chrono::seconds kRoomWait{5};

std::string joined(const std::vector<std::string>& words, std::string_view separator) {
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += separator;
    text += word;
  }
  return text;
}

// Mooncake takes signals over when it thinks that no Python is there; whatever it does, this thread
// keeps its mask.
class KeepSignalMask {
 public:
  KeepSignalMask() noexcept { pthread_sigmask(SIG_SETMASK, nullptr, &mask_); }
  ~KeepSignalMask() { pthread_sigmask(SIG_SETMASK, &mask_, nullptr); }
  KeepSignalMask(const KeepSignalMask&) = delete;
  KeepSignalMask& operator=(const KeepSignalMask&) = delete;

 private:
  sigset_t mask_;
};

// Threads inherit the name of the one that makes them: Mooncake's are to be told from ours.
class NameNewThreads {
 public:
  explicit NameNewThreads(const char* name) noexcept {
    pthread_getname_np(pthread_self(), before_.data(), before_.size());
    pthread_setname_np(pthread_self(), name);
  }
  ~NameNewThreads() { pthread_setname_np(pthread_self(), before_.data()); }
  NameNewThreads(const NameNewThreads&) = delete;
  NameNewThreads& operator=(const NameNewThreads&) = delete;

 private:
  std::array<char, 16> before_{};
};

// Calls `native`; an exception of Mooncake's becomes an empty answer, because none may cross into
// our threads. Empty, too, once the process exits.
template <class Native>
auto guarded(const char* what, Native&& native) noexcept -> decltype(native()) {
  static detail::LimitedLog lines;
  const detail::NativeCall call;
  if (!call) return {};
  try {
    return native();
  } catch (const std::exception& error) {
    lines(LogLevel::kError, std::string("Mooncake threw in ") + what + ": " + error.what());
  } catch (...) {
    lines(LogLevel::kError, std::string("Mooncake threw in ") + what);
  }
  return {};
}

// Native argument lists of one call, kept so that their strings and vectors are allocated once.
struct Arguments {
  mooncake::Strings keys;
  mooncake::BufferLists buffers;
  mooncake::LengthLists lengths;
  std::vector<std::uint32_t> items;     // index in the batch
  std::vector<std::uint64_t> expected;  // bytes per item

  void clear() {
    items.clear();
    expected.clear();
  }

  void append(const std::string& key, std::span<const Segment> segments, std::uint32_t item,
              std::uint64_t bytes) {
    const std::size_t at = items.size();
    if (keys.size() <= at) {
      keys.emplace_back();
      buffers.emplace_back();
      lengths.emplace_back();
    }
    keys[at] = key;
    buffers[at].clear();
    lengths[at].clear();
    for (const Segment& segment : segments) {
      buffers[at].push_back(segment.base);
      lengths[at].push_back(segment.length);
    }
    items.push_back(item);
    expected.push_back(bytes);
  }

  // Mooncake refuses lists of unequal length, so surplus entries of an earlier call go.
  void trim() {
    keys.resize(items.size());
    buffers.resize(items.size());
    lengths.resize(items.size());
  }
};

class MooncakeClient final : public BlockingClient {
 public:
  MooncakeClient(const mooncake::Library& library, const MooncakeOptions& options,
                 std::shared_ptr<detail::Knock> master)
      : library_(library),
        native_functions_(library.store),
        master_(std::move(master)),
        connect_timeout_(options.connect_timeout),
        queue_(options.protocol == "tcp" ? library.tcp_queue : 2 * kMaxSlices),
        room_(queue_),
        max_slices_(std::min(options.max_slices_per_call, std::max(1U, queue_ / 2))),
        max_bytes_(options.max_bytes_per_call),
        max_region_bytes_(
            detail::effective_region_bytes(options.protocol, options.max_region_bytes)),
        options_(options),
        protocol_(options.protocol),
        pid_(::getpid()) {
    const KeepSignalMask keep;
    const NameNewThreads names("mooncake");
    std::string thrown;
    int code = 0;
    try {
      native_ = native_functions_.create();
      if (native_ != nullptr) {
        code = native_functions_.setup_real(
            native_.get(), options.local_hostname, options.metadata_server,
            static_cast<std::size_t>(options.global_segment_size),
            static_cast<std::size_t>(options.local_buffer_size), options.protocol,
            joined(options.rdma_devices, ","), kvprism::to_string(master_->address()), nullptr, "",
            false, "", "default", false, 0);
      }
    } catch (const std::exception& error) {
      thrown = error.what();
    } catch (...) {
      thrown = "unknown exception";
    }
    if (native_ != nullptr && code == 0 && thrown.empty()) return;
    tear_down();
    fail(ErrorCode::kUnavailable, kSubject,
         {"set-up", thrown.empty() ? detail::mooncake_code_text(code) : thrown,
          "0 from Mooncake with master " + kvprism::to_string(master_->address()) +
              " and metadata server " + options.metadata_server,
          "its log on standard error says more; is the segment size within free memory?"});
  }

  ~MooncakeClient() override {
    tear_down();
    // In a forked child, or while the process exits, its destructor must not run either.
    if (native_ != nullptr) new std::shared_ptr<mooncake::NativeClient>(std::move(native_));
  }

  StoreCapabilities capabilities() const override {
    const std::string& version = library_.file.version;
    const std::string& distribution = library_.file.distribution;
    // A build of which nobody knows may have no CUDA, and would crash.
    const bool devices =
        !distribution.empty() && distribution.find("non-cuda") == std::string::npos;
    return {"mooncake " + (version.empty() ? std::string("unknown") : version) + " " + protocol_,
            max_slices_, max_bytes_, devices};
  }

  CallEnd exists(const ObjectBatch& batch, std::span<ItemResult> results) noexcept override {
    CallEnd end;
    if (refuse_all(batch, results, end)) return end;
    const auto fill = [&](const mooncake::Strings& keys, std::span<const std::uint32_t> items) {
      const std::vector<int> codes = guarded(
          "batchIsExist", [&] { return native_functions_.batch_is_exist(native_.get(), keys); });
      for (std::size_t i = 0; i < items.size(); ++i) {
        const std::int64_t code = i < codes.size() ? codes[i] : mooncake::kInternalError;
        note(code, end);
        results[items[i]] = detail::mooncake_item(MooncakeCall::kExists, code, 0);
      }
    };
    return contained("exists", results, end, [&] {
      thread_local std::vector<std::uint32_t> items;
      items.clear();
      bool all = true;
      for (std::uint32_t i = 0; i < batch.keys.size(); ++i) {
        if (batch.keys[i].empty()) {
          results[i] = {ItemStatus::kInvalid, 0};
          all = false;
        } else {
          items.push_back(i);
        }
      }
      if (items.empty()) return;
      if (all) {
        fill(batch.keys.strings(), items);
        return;
      }
      mooncake::Strings keys;
      for (const std::uint32_t i : items) keys.push_back(batch.keys[i]);
      fill(keys, items);
    });
  }

  CallEnd remove(const ObjectBatch& batch, const Removal& removal,
                 std::span<ItemResult> results) noexcept override {
    CallEnd end;
    if (refuse_all(batch, results, end)) return end;
    return contained("remove", results, end, [&] {
      for (std::size_t i = 0; i < results.size(); ++i) {
        const std::string& key = batch.keys[i];
        results[i] = {ItemStatus::kInvalid, 0};
        // An empty prefix would be everybody's objects.
        if (key.empty()) continue;
        // After the first silence each call would wait for as long.
        if (master_silent_.load(std::memory_order_relaxed)) {
          results[i] = {ItemStatus::kUnavailable, 0};
          continue;
        }
        results[i] = removal.prefix ? remove_prefix(key, removal.leased, end)
                                    : remove_object(key, removal.leased, end);
      }
    });
  }

  CallEnd put(const ObjectBatch& batch, std::span<ItemResult> results) noexcept override {
    return transfer(MooncakeCall::kPut, batch, results);
  }

  CallEnd get(const ObjectBatch& batch, std::span<ItemResult> results) noexcept override {
    return transfer(MooncakeCall::kGet, batch, results);
  }

  void register_region(const Region& region) override {
    const auto refuse = [&](ErrorCode code, std::string expected, std::string hint) {
      fail(code, kSubject, {"region", describe(region), std::move(expected), std::move(hint)});
    };
    if (in_child()) refuse(ErrorCode::kClosed, "the process that made the client", {});
    if (region.base == nullptr || region.length == 0) {
      refuse(ErrorCode::kInvalidArgument, "an address and a positive length", {});
    }
    {
      const std::unique_lock lock(regions_mutex_);
      switch (regions_.fit(region)) {
        case detail::RegionTable::Fit::kEqual:
          return;
        case detail::RegionTable::Fit::kOverlap:
          refuse(ErrorCode::kInvalidArgument, "no overlap with another region", {});
          break;
        case detail::RegionTable::Fit::kNew:
          break;
      }
    }
    const std::vector<Region> pieces = detail::cut_region(region, max_region_bytes_);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const std::string why = register_piece(pieces[i]);
      if (why.empty()) continue;
      // All or nothing (R59).
      while (i-- > 0) unregister_piece(pieces[i]);
      refuse(ErrorCode::kUnavailable, "0 from Mooncake's register_buffer, not " + why,
             registration_hint(region));
    }
    const std::unique_lock lock(regions_mutex_);
    regions_.insert(region);
  }

  void unregister_region(const Region& region) noexcept override {
    if (in_child()) return;
    {
      const std::unique_lock lock(regions_mutex_);
      if (!regions_.erase(region)) return;
    }
    for (const Region& piece : detail::cut_region(region, max_region_bytes_)) {
      unregister_piece(piece);
    }
  }

  void tear_down() noexcept override {
    if (native_ == nullptr || in_child()) return;
    const int code =
        guarded("tearDownAll", [&] { return native_functions_.tear_down_all(native_.get()); });
    if (code != 0) {
      log(LogLevel::kWarning,
          "Mooncake's tearDownAll returned " + detail::mooncake_code_text(code));
    }
    guarded("the client's destructor", [&] {
      native_.reset();
      return 0;
    });
  }

 private:
  // Why it failed; empty: it did not.
  std::string register_piece(const Region& piece) {
    const detail::NativeCall call;
    if (!call) return "an end of the process";
    try {
      const int code = native_functions_.register_buffer(native_.get(), piece.base, piece.length);
      return code == 0 ? std::string() : detail::mooncake_code_text(code);
    } catch (const std::exception& error) {
      return error.what();
    } catch (...) {
      return "unknown exception";
    }
  }

  void unregister_piece(const Region& piece) noexcept {
    const int code = guarded("unregister_buffer", [&] {
      return native_functions_.unregister_buffer(native_.get(), piece.base);
    });
    if (code != 0) {
      log(LogLevel::kWarning, "Mooncake did not unregister " + describe(piece) + ": " +
                                  detail::mooncake_code_text(code));
    }
  }

  // What may have kept a device from taking a region beside those it has.
  std::string registration_hint(const Region& region) {
    if (protocol_ != "rdma") return {};
    std::vector<std::uint64_t> lengths{region.length};
    {
      const std::shared_lock lock(regions_mutex_);
      for (const Region& other : regions_.regions()) lengths.push_back(other.length);
    }
    const auto problems =
        detail::check_locked_memory(options_, lengths, detail::read_memory_lock());
    if (!problems.empty()) return problems[0].hint;
    return "is the region longer than the device takes? see max_region_bytes";
  }

  static std::string describe(const Region& region) {
    std::array<char, 64> text;
    std::snprintf(text.data(), text.size(), "%p, %zu bytes, device %d",
                  static_cast<const void*>(region.base), region.length, region.device);
    return text.data();
  }

  // Native threads do not exist in a forked child, so no call could ever return there (R71).
  bool in_child() const noexcept { return ::getpid() != pid_; }

  // Fills all results and returns true when no native call may or need be made.
  bool refuse_all(const ObjectBatch& batch, std::span<ItemResult> results, CallEnd& end) noexcept {
    if (batch.keys.empty()) return true;
    bool refuse = native_ == nullptr || in_child();
    // While the master is known to be silent, a cheap connection attempt spares the 4.4 s that each
    // native call takes.
    if (!refuse && master_silent_.load(std::memory_order_relaxed)) {
      refuse = !guarded("connect", [&] {
        return master_->failure(std::min(connect_timeout_, milliseconds(200))).empty();
      });
      if (!refuse) master_silent_.store(false, std::memory_order_relaxed);
      end.unreachable = refuse;
    }
    if (refuse) std::fill(results.begin(), results.end(), ItemResult{ItemStatus::kUnavailable, 0});
    return refuse;
  }

  void note(std::int64_t code, CallEnd& end) noexcept {
    if (detail::mooncake_client_is_lost(code)) end.broken = true;
    if (detail::mooncake_master_is_silent(code)) {
      master_silent_.store(true, std::memory_order_relaxed);
      end.unreachable = true;
    }
  }

  // Runs `body`; if our own code runs out of memory, the call counts as failed and what it started
  // as not quiet.
  template <class Body>
  CallEnd contained(const char* what, std::span<ItemResult> results, CallEnd& end,
                    Body&& body) noexcept {
    try {
      body();
    } catch (...) {
      static detail::LimitedLog lines;
      lines(LogLevel::kError, std::string("no memory in ") + what);
      std::fill(results.begin(), results.end(), ItemResult{ItemStatus::kFailed, 0});
      end.quiet = false;
    }
    return end;
  }

  // Fills `cut` with what is moved of a good item: no part crosses from one registration into
  // another.
  ItemStatus check(const std::string& key, std::span<const Segment> segments, std::uint64_t& bytes,
                   std::vector<Segment>& cut) const {
    cut.clear();
    if (key.empty() || segments.empty()) return ItemStatus::kInvalid;
    bytes = 0;
    for (const Segment& segment : segments) {
      const Region* const region = segment.length == 0 ? nullptr : regions_.find(segment);
      if (region == nullptr) return ItemStatus::kInvalid;
      bytes += segment.length;
      if (bytes > kMaxObject) return ItemStatus::kInvalid;
      detail::append_cut(*region, max_region_bytes_, segment, cut);
    }
    return cut.size() > queue_ ? ItemStatus::kInvalid : ItemStatus::kOk;
  }

  CallEnd transfer(MooncakeCall call, const ObjectBatch& batch,
                   std::span<ItemResult> results) noexcept {
    CallEnd end;
    if (refuse_all(batch, results, end)) return end;
    return contained("transfer", results, end, [&] {
      thread_local Arguments arguments;
      thread_local std::vector<Segment> cut;
      thread_local std::pmr::unsynchronized_pool_resource pool;
      thread_local std::pmr::unordered_set<std::string_view> names(&pool);
      arguments.clear();
      names.clear();
      std::size_t slices = 0;
      bool room = true;
      const auto flush = [&] {
        room = call_native(call, arguments, slices, results, end);
        arguments.clear();
        slices = 0;
        names.clear();
      };
      std::uint32_t begin = 0;
      for (std::uint32_t i = 0; i < batch.keys.size(); ++i) {
        const std::uint32_t stop = i < batch.ends.size() ? batch.ends[i] : begin;
        const bool sane = begin <= stop && stop <= batch.segments.size();
        const auto segments = sane ? std::span(batch.segments).subspan(begin, stop - begin)
                                   : std::span<const Segment>();
        if (sane) begin = stop;
        std::uint64_t bytes = 0;
        {
          const std::shared_lock lock(regions_mutex_);
          results[i] = {check(batch.keys[i], segments, bytes, cut), 0};
        }
        if (results[i].status != ItemStatus::kOk) continue;
        // Mooncake keeps a call's items by key: of two with one key a get would fill only one, and
        // say that it has filled both.
        const bool again = !names.insert(batch.keys[i]).second;
        // Borders of registrations may make an item larger than a call: it goes alone.
        if (slices != 0 && (again || slices + cut.size() > max_slices_)) {
          flush();
          names.insert(batch.keys[i]);
        }
        // After a doubtful call nothing more is started on this client, and one that found no room
        // has waited enough.
        if (!end.quiet || end.broken || !room) {
          results[i] = {ItemStatus::kUnavailable, 0};
          continue;
        }
        arguments.append(batch.keys[i], cut, i, bytes);
        slices += cut.size();
      }
      if (slices != 0) flush();
    });
  }

  // False when calls of the other kind left no room in the queue: nothing was started.
  bool call_native(MooncakeCall call, Arguments& arguments, std::size_t slices,
                   std::span<ItemResult> results, CallEnd& end) {
    const detail::SliceRoom::Taken room(room_, slices, kRoomWait);
    if (!room) {
      for (const std::uint32_t item : arguments.items)
        results[item] = {ItemStatus::kUnavailable, 0};
      return false;
    }
    arguments.trim();
    static constexpr mooncake::ReplicateConfig kDefault;
    bool threw = true;
    const Clock::time_point began = Clock::now();
    const std::vector<int> codes = guarded("a batch transfer", [&] {
      std::vector<int> answer =
          call == MooncakeCall::kPut
              ? native_functions_.batch_put_from_multi_buffers(
                    native_.get(), arguments.keys, arguments.buffers, arguments.lengths, kDefault)
              : native_functions_.batch_get_into_multi_buffers(
                    native_.get(), arguments.keys, arguments.buffers, arguments.lengths, false);
      threw = false;
      return answer;
    });
    const auto took = Clock::now() - began;
    if (threw || codes.size() != arguments.items.size()) end.quiet = false;
    for (std::size_t i = 0; i < arguments.items.size(); ++i) {
      const std::int64_t code = i < codes.size() ? codes[i] : mooncake::kInternalError;
      note(code, end);
      ItemResult result = detail::mooncake_item(call, code, arguments.expected[i]);
      if (detail::mooncake_may_have_given_up(code, took)) {
        // Of a call that is not quiet nothing else matters, and each question may take seconds.
        if (end.quiet && call == MooncakeCall::kGet && code == mooncake::kTransferFailed &&
            took < kShortCall && has_other_size(arguments.keys[i], arguments.expected[i], end)) {
          result.status = ItemStatus::kSizeMismatch;
        } else {
          end.quiet = false;
        }
      }
      results[arguments.items[i]] = result;
    }
    return true;
  }

  ItemResult remove_object(const std::string& key, bool force, CallEnd& end) {
    bool threw = true;
    const int code = guarded("remove", [&] {
      const int answer = native_functions_.remove(native_.get(), key, force);
      threw = false;
      return answer;
    });
    return removed(threw ? mooncake::kInternalError : code, end);
  }

  ItemResult remove_prefix(const std::string& prefix, bool force, CallEnd& end) {
    const std::string pattern = detail::mooncake_prefix_pattern(prefix);
    bool threw = true;
    const long count = guarded("removeByRegex", [&] {
      const long answer = native_functions_.remove_by_regex(native_.get(), pattern, force);
      threw = false;
      return answer;
    });
    ItemResult result = removed(threw ? std::int64_t{mooncake::kInternalError} : count, end);
    if (result.status == ItemStatus::kOk) result.bytes = static_cast<std::uint64_t>(count);
    return result;
  }

  ItemResult removed(std::int64_t code, CallEnd& end) noexcept {
    note(code, end);
    return detail::mooncake_item(MooncakeCall::kRemove, code, 0);
  }

  // A buffer larger than the object is answered with "transfer failed" before anything is
  // transferred; the size tells that case from a transfer that went wrong.
  bool has_other_size(const std::string& key, std::uint64_t expected, CallEnd& end) noexcept {
    const std::int64_t size =
        guarded("getSize", [&] { return native_functions_.get_size(native_.get(), key); });
    note(size, end);
    return size > 0 && static_cast<std::uint64_t>(size) != expected;
  }

  const mooncake::Library& library_;
  const mooncake::StoreFunctions& native_functions_;
  const std::shared_ptr<detail::Knock> master_;
  const Duration connect_timeout_;
  const std::uint32_t queue_;
  detail::SliceRoom room_;  // of the queue, for a put and a get together
  const std::uint32_t max_slices_;
  const std::uint64_t max_bytes_;
  const std::uint64_t max_region_bytes_;
  const MooncakeOptions options_;
  const std::string protocol_;
  const pid_t pid_;
  std::shared_ptr<mooncake::NativeClient> native_;
  std::atomic<bool> master_silent_ = false;
  mutable std::shared_mutex regions_mutex_;
  detail::RegionTable regions_;
};

// The first process that has made a client: its children have copies of Mooncake without its
// threads, and a set-up there would wait for them for ever (R71).
std::atomic<pid_t> first_user = 0;

void check_not_forked() {
  const pid_t user = first_user;
  const pid_t here = ::getpid();
  if (user == 0 || user == here) return;
  fail(ErrorCode::kUnsupported, kSubject,
       {"process", std::to_string(here),
        "one that was not forked after Mooncake was used (by process " + std::to_string(user) + ")",
        "start it with spawn, or fork before the first store is opened"});
}

void check_master(detail::Knock& master, Duration limit) {
  const std::string reason = master.failure(limit);
  if (reason.empty()) return;
  const HostPort& address = master.address();
  fail(ErrorCode::kUnavailable, kSubject,
       {"master", kvprism::to_string(address),
        "a mooncake_master that accepts connections, but: " + reason,
        "start one with `mooncake_master -rpc_port=" + std::to_string(address.port.value_or(0)) +
            "`, or correct the address"});
}

bool accepted_by_probe(const std::string& path, const HostPort& master) {
  const std::string hash = mooncake::hash_file(path);
  if (hash.empty()) return false;
  std::string line = mooncake::read_verdict(hash);
  const bool cached = !line.empty();
  if (!cached) {
    constexpr std::chrono::seconds kLimit{180};
    line = mooncake::run_probe(path, kvprism::to_string(master), kLimit);
  }
  if (mooncake::verdict_word(line) == mooncake::kVerdictOk) {
    log(LogLevel::kWarning, "using a Mooncake build that only a probe accepted: " + line);
    return true;
  }
  fail(ErrorCode::kUnsupported, kSubject,
       {"library", path, "a build that passes the probe",
        "the probe said: " + line +
            (cached ? "; to ask it again remove " + mooncake::verdict_path(hash) : "")});
}

std::unique_ptr<BlockingClient> make_client(const MooncakeOptions& options,
                                            const std::shared_ptr<detail::Knock>& master) {
  check_not_forked();
  if (options.protocol == "rdma") {
    ProblemList problems;
    problems.append(check_rdma(options, {}, read_rdma_facts(options.rdma_device_folder)));
    problems.throw_if_any(ErrorCode::kNotFound, kSubject);
  }
  check_master(*master, options.connect_timeout);

  mooncake::OpenRequest request;
  request.path = find_mooncake_library(options);
  request.python_library = options.python_library;
  request.environment = options.environment;
  // Otherwise every client writes a dozen lines to standard error.
  request.defaults = {{"MC_LOG_LEVEL", "WARNING"}};
  if (options.protocol == "tcp") {
    request.defaults.emplace_back("MC_FORCE_TCP", "1");
    request.defaults.emplace_back("MC_TCP_ENABLE_CONNECTION_POOL", "true");
    request.defaults.emplace_back(mooncake::kTcpQueueVariable,
                                  std::to_string(mooncake::kLargestTcpQueue));
  }
  if (options.unknown_build == UnknownBuild::kProbe) {
    request.accept_unknown = [&](const mooncake::LibraryFile& file) {
      return accepted_by_probe(file.path, master->address());
    };
  }
  const mooncake::Library& library = mooncake::open_library(request);
  pid_t none = 0;
  first_user.compare_exchange_strong(none, ::getpid());
  const detail::NativeCall call;
  if (!call) fail(ErrorCode::kClosed, kSubject, {"process", "exiting", "a running one", {}});
  return detail::make_mooncake_client(library, options, master);
}

}  // namespace

namespace detail {

std::unique_ptr<BlockingClient> make_mooncake_client(const mooncake::Library& library,
                                                     const MooncakeOptions& options,
                                                     std::shared_ptr<Knock> master) {
  return std::make_unique<MooncakeClient>(library, options, std::move(master));
}

BlockingClientFactory mooncake_client_factory(MooncakeOptions options, Knock::LookUp look_up) {
  ProblemList problems;
  problems.append(validate_mooncake_options(options));
  problems.throw_if_any(ErrorCode::kInvalidConfig, "Mooncake options");
  // One for all clients: a name that resolves late serves the next attempt.
  auto master =
      std::make_shared<Knock>(parse_host_port(options.master, "master"), std::move(look_up));
  return [options = std::move(options), master = std::move(master)] {
    return make_client(options, master);
  };
}

}  // namespace detail

std::vector<Problem> validate_mooncake_options(const MooncakeOptions& options) {
  ProblemList problems;
  const auto check_address = [&](const std::string& text, const char* path, bool needs_port) {
    try {
      const HostPort address = parse_host_port(text, path);
      if (needs_port && address.port.value_or(0) == 0) {
        problems.add(path, text, "a port between 1 and 65535 after the host",
                     "e.g. 127.0.0.1:50051");
      }
    } catch (const Error& error) {
      problems.append(error.problems());
    }
  };
  const auto check_size = [&](std::int64_t size, const char* path) {
    if (size != 0 && size < kMinSegment) {
      problems.add(path, std::to_string(size), "0 or at least 16777216 bytes", {});
    }
  };

  if (options.master.empty()) {
    problems.add("master", "", "host:port of mooncake_master", "e.g. 127.0.0.1:50051");
  } else {
    check_address(options.master, "master", true);
  }
  check_address(options.local_hostname, "local_hostname", false);
  if (options.metadata_server != "P2PHANDSHAKE" &&
      options.metadata_server.find("://") == std::string::npos) {
    problems.add("metadata_server", options.metadata_server,
                 "P2PHANDSHAKE or a URL with a scheme such as http:// or etcd://", {});
  }
  const bool known =
      std::find(kProtocols.begin(), kProtocols.end(), options.protocol) != kProtocols.end();
  if (!known) {
    problems.add("protocol", options.protocol, "tcp or rdma",
                 suggest(options.protocol, kProtocols));
  }
  if (options.protocol == "tcp" && !options.rdma_devices.empty()) {
    problems.add("rdma_devices", joined(options.rdma_devices, ","), "nothing with protocol tcp",
                 {});
  }
  for (std::size_t i = 0; i < options.rdma_devices.size(); ++i) {
    const std::string& name = options.rdma_devices[i];
    const std::string path = "rdma_devices[" + std::to_string(i) + "]";
    if (name.empty() || name.find_first_of(" \t,") != std::string::npos) {
      problems.add(path, name, "one device name without blanks or commas", {});
    } else if (std::find(options.rdma_devices.begin(),
                         options.rdma_devices.begin() + static_cast<std::ptrdiff_t>(i),
                         name) != options.rdma_devices.begin() + static_cast<std::ptrdiff_t>(i)) {
      problems.add(path, name, "each device once", {});
    }
  }
  check_size(options.global_segment_size, "global_segment_size");
  check_size(options.local_buffer_size, "local_buffer_size");
  if (options.max_slices_per_call < 1 || options.max_slices_per_call > kMaxSlices) {
    problems.add("max_slices_per_call", std::to_string(options.max_slices_per_call),
                 "between 1 and " + std::to_string(kMaxSlices),
                 "more of them clog Mooncake's TCP queue for a minute");
  }
  if (options.max_region_bytes != 0 && options.max_region_bytes < kMinRegion) {
    problems.add("max_region_bytes", std::to_string(options.max_region_bytes),
                 "0 or at least 1048576 bytes");
  }
  if (options.connect_timeout.ns <= 0 || options.connect_timeout > seconds(1'000'000)) {
    problems.add("connect_timeout", std::to_string(options.connect_timeout.ns),
                 "1 to 1000000000000000 nanoseconds (eleven days)", {});
  }
  for (const auto& [name, value] : options.environment) {
    if (name.empty() || name.find('=') != std::string::npos) {
      problems.add("environment", name, "a variable name without '='", {});
    }
    if (value.find('\0') != std::string::npos)
      problems.add("environment." + name, value, "a value without a byte 0", {});
  }
  return problems.problems();
}

std::string find_mooncake_library(const MooncakeOptions& options) {
  const auto there = [](const char* name, std::string path) {
    std::error_code error;
    if (std::filesystem::exists(path, error)) return path;
    fail(ErrorCode::kNotFound, "Mooncake library",
         {name, path, "a file", "leave it out to search for an installed distribution"});
  };
  if (!options.library.empty()) return there("library", options.library);
  constexpr const char* kVariable = "KVPRISM_MOONCAKE_LIBRARY";
  if (const char* path = std::getenv(kVariable); path != nullptr && *path != 0)
    return there(kVariable, path);
  const std::vector<std::string> folders =
      options.site_packages.empty() ? mooncake::default_site_packages() : options.site_packages;
  for (const std::string& folder : folders) {
    const std::vector<mooncake::LibraryFile> found = mooncake::list_site_packages(folder);
    if (!found.empty()) return found.front().path;
  }
  fail(
      ErrorCode::kNotFound, "Mooncake library",
      {"library", folders.empty() ? "no folder to search" : "searched " + joined(folders, ", "),
       "an installed distribution that lists mooncake/store.so",
       "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1, or give the path as `library` "
       "or in KVPRISM_MOONCAKE_LIBRARY"});
}

BlockingClientFactory mooncake_client_factory(MooncakeOptions options) {
  detail::end_native_calls_at_exit();
  return detail::mooncake_client_factory(std::move(options), ::getaddrinfo);
}

}  // namespace kvprism
