// Records what enters a scheduler and what it answers. The file is a header, a setup record and
// then, for every call: its inputs, what its index did meanwhile, its result. A RunFile that is
// closed ends with a record that says so.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvprism/store/store_scheduler.h"

namespace kvprism::detail {

enum class RunKind : std::uint32_t {
  kSetup = 1,
  kCall = 2,
  kIndexStart = 3,
  kIndexEnd = 4,
  kIndexIdle = 5,  // a poll that found nothing
  kReturn = 6,
  kEnd = 7,  // nothing follows
};

enum class RunCall : std::uint32_t {
  kSetMode = 1,
  kRestrict,
  kLookup,
  kAllocated,
  kAdvanced,
  kWantsSave,
  kSave,
  kBoundary,
  kPreempted,
  kFinished,
  kPurge,
  kEndStep,
  kReport,
  kTakeLoadEnds,
  kTakeAcquired,
  kTakeReleased,
  kPrompt,
  kRankGone,
};

constexpr std::uint32_t kRunMagic = 0x5250564b;  // "KVPR"
constexpr std::uint32_t kRunVersion = 3;

struct RunHeader {
  std::uint32_t magic = kRunMagic;
  std::uint32_t version = kRunVersion;
};
struct RunRecordHead {
  RunKind kind{};
  std::uint32_t bytes = 0;  // of the payload, without padding to 8
  std::int64_t at = 0;
};
static_assert(sizeof(RunHeader) == 8 && sizeof(RunRecordHead) == 16);

std::array<std::uint64_t, 2> hash_words(std::span<const std::byte> bytes);

// The program that records: its version, and what has built it.
std::string run_program();

// Appends to one payload.
class RunWriter {
 public:
  explicit RunWriter(std::vector<std::byte>& out) noexcept : out_(out) {}
  template <class T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    append(&value, sizeof(value));
  }
  void text(std::string_view text) {
    put(static_cast<std::uint32_t>(text.size()));
    append(text.data(), text.size());
  }
  void hashes(const HashList& hashes) {
    // What cannot be read is refused, as a list behind a gap is.
    const bool readable = hashes.readable();
    put(readable ? hashes.first : UINT32_MAX);
    put(readable ? hashes.count : 0);
    put(hashes.width);
    if (readable) append(hashes.data, static_cast<std::size_t>(hashes.count) * hashes.width);
  }
  void rows(const BlockRows& rows) {
    put(static_cast<std::uint32_t>(rows.size()));
    for (const GroupId group : indices<GroupId>(rows.size())) {
      put(static_cast<std::uint32_t>(rows[group].size()));
      append(rows[group].data(), rows[group].size_bytes());
    }
  }
  void append(const void* data, std::size_t bytes) {
    if (bytes == 0) return;
    const std::size_t at = out_.size();
    out_.resize(at + bytes);
    std::memcpy(out_.data() + at, data, bytes);
  }

 private:
  std::vector<std::byte>& out_;
};

// What an index start looks like in a recording.
struct RunStart {
  std::uint64_t op = 0;
  std::uint32_t removal = 0;  // 0: exists; 1 + bits of Removal otherwise
  std::uint32_t accepted = 0;
  std::array<std::uint64_t, 2> keys{};  // their hash

  bool operator==(const RunStart&) const = default;
};
static_assert(sizeof(RunStart) == 32);
RunStart describe_start(OpId op, const ObjectBatch& batch, const Removal* removal);

// Ownership: owns its buffer. Threads: one, the scheduler's.
class RunRecorder {
 public:
  RunRecorder(const RunSink& sink, const KeySchema& schema, const StoreSchedulerOptions& options);

  // Without memory for it the recording ends, and what is recorded goes on.
  template <class Fill>
  void record(RunKind kind, Instant at, Fill fill) noexcept {
    attempt([&] {
      const std::size_t head = buffer_.size();
      buffer_.resize(head + sizeof(RunRecordHead));
      fill(RunWriter(buffer_));
      RunRecordHead filled{kind, 0, at.ns};
      filled.bytes = static_cast<std::uint32_t>(buffer_.size() - head - sizeof(RunRecordHead));
      std::memcpy(buffer_.data() + head, &filled, sizeof(filled));
      buffer_.resize((buffer_.size() + 7) & ~std::size_t{7});
    });
  }
  // The same of what is to be recorded.
  template <class Part>
  void attempt(Part part) noexcept {
    if (!on()) return;
    try {
      part();
    } catch (...) {
      ran_out();
    }
  }
  // What an index start looks like; nothing where none is recorded.
  std::optional<RunStart> describe(OpId op, const ObjectBatch& batch,
                                   const Removal* removal) noexcept;
  // The call that runs, and all behind it, is not recorded: a repetition would not lack the memory,
  // or throw, and go on otherwise.
  void ran_out() noexcept;
  void call_threw() noexcept;
  // False once the recording has ended.
  bool on() const noexcept { return sink_.write != nullptr; }
  // One call at a time; calls inside of it are its own business.
  bool enter() noexcept { return depth_++ == 0; }
  void leave(bool outermost) noexcept {
    --depth_;
    if (outermost) flush();
  }

 private:
  void flush() noexcept;
  bool cut() noexcept;

  RunSink sink_;
  std::vector<std::byte> buffer_;
  std::uint32_t depth_ = 0;
};

// Records a call from its beginning to the end of its scope. The result is 0 where none is told. A
// call that throws ends the recording: it has done a part of what a repetition would.
class RecordedCall {
 public:
  template <class Fill>
  RecordedCall(RunRecorder* recorder, RunCall call, Instant now, Fill fill)
      : recorder_(recorder != nullptr && recorder->on() ? recorder : nullptr), now_(now) {
    if (recorder_ == nullptr) return;
    outermost_ = recorder_->enter();
    if (!outermost_) return;
    recorder_->record(RunKind::kCall, now, [&](RunWriter writer) {
      writer.put(static_cast<std::uint32_t>(call));
      fill(writer);
    });
  }
  ~RecordedCall() {
    if (recorder_ == nullptr) return;
    if (std::uncaught_exceptions() > exceptions_) recorder_->call_threw();
    if (outermost_) {
      recorder_->record(RunKind::kReturn, now_, [&](RunWriter writer) {
        for (const std::uint64_t word : result_) writer.put(word);
      });
    }
    recorder_->leave(outermost_);
  }
  RecordedCall(const RecordedCall&) = delete;
  RecordedCall& operator=(const RecordedCall&) = delete;

  void result(std::uint64_t first, std::uint64_t second = 0) noexcept { result_ = {first, second}; }
  // Of more than two words: the hash of the bytes that `make` returns, which is not called where
  // none is recorded.
  template <class Make>
  void result_of(Make make) noexcept {
    if (recorder_ != nullptr && outermost_)
      recorder_->attempt([&] { result_ = hash_words(make()); });
  }

 private:
  RunRecorder* recorder_;
  Instant now_;
  int exceptions_ = std::uncaught_exceptions();
  bool outermost_ = false;
  std::array<std::uint64_t, 2> result_{};
};

// Passes everything on and records it. One that throws leaves no record, and its call none either.
class RecordingIndex final : public ObjectIndex {
 public:
  RecordingIndex(std::shared_ptr<ObjectIndex> index, std::shared_ptr<RunRecorder> recorder)
      : index_(std::move(index)), recorder_(std::move(recorder)) {}

  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                    Instant deadline) override;
  bool start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal,
                    Instant now, Instant deadline) override;
  bool poll_index(Instant now, Completion& out) override;
  CloseReport close_index(Duration budget) override { return index_->close_index(budget); }

 private:
  // Records it, and returns `accepted`.
  bool started(std::optional<RunStart> start, Instant deadline, bool accepted) noexcept;

  std::shared_ptr<ObjectIndex> index_;
  std::shared_ptr<RunRecorder> recorder_;
};

void write_load_ends(std::span<const LoadEnd> ends, std::vector<std::byte>& out);

// The options in a recording, in this order; `each` is called with a reference to every integer.
template <class Options, class Each>
void visit_run_options(Options& options, Each each) {
  each(options.epoch);
  each(options.ranks);
  each(options.loads);
  each(options.saves);
  each(options.lookup_timeout.ns);
  each(options.lookup_fresh_for.ns);
  each(options.load_timeout.ns);
  each(options.save_timeout.ns);
  each(options.quarantine_after.ns);
  each(options.detach_quarantined_loads);
  each(options.backoff_after);
  each(options.backoff.ns);
  each(options.max_held_percent);
  each(options.saved_fresh_for.ns);
  each(options.avoid_failed_for.ns);
  each(options.purge_settle.ns);
  each(options.healthy_after.ns);
}

}  // namespace kvprism::detail
