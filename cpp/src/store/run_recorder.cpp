#include "store/run_recorder.h"

#include <string>

#include "group/hash128.h"
#include "kvprism/base/log.h"
#include "kvprism/base/version.h"

namespace kvprism::detail {

std::array<std::uint64_t, 2> hash_words(std::span<const std::byte> bytes) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): bytes as characters
  const Digest digest = hash128({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  std::array<std::uint64_t, 2> words{};
  static_assert(sizeof(digest.bytes) == sizeof(words));
  std::memcpy(words.data(), digest.bytes.data(), sizeof(words));
  return words;
}

std::string run_program() {
#if defined(__clang__)
  constexpr const char* compiler = "clang ";
#else
  constexpr const char* compiler = "gcc ";
#endif
  return std::string("kvprism ") + kVersionString + ", " + compiler + __VERSION__;
}

RunRecorder::RunRecorder(const RunSink& sink, const KeySchema& schema,
                         const StoreSchedulerOptions& options)
    : sink_(sink) {
  const RunHeader header;
  RunWriter(buffer_).append(&header, sizeof(header));
  record(RunKind::kSetup, Instant{}, [&](RunWriter writer) {
    writer.text(run_program());
    writer.text(to_json(schema.projection().config()));
    const KeyFacts& facts = schema.key_facts();
    writer.text(facts.model);
    writer.text(facts.model_revision);
    writer.text(facts.kv_quantization);
    writer.text(facts.hash_algorithm);
    writer.text(facts.pipeline_split);
    visit_run_options(options,
                      [&](const auto& value) { writer.put(static_cast<std::int64_t>(value)); });
  });
  flush();
}

void RunRecorder::flush() noexcept {
  try {
    if (on() && !sink_.write(sink_.context, buffer_)) {
      sink_.write = nullptr;
      log(LogLevel::kWarning, "the recording has ended: its sink takes no more");
    }
  } catch (...) {  // of the engine's own: a step must not end the process
    sink_.write = nullptr;
    log(LogLevel::kWarning, "the recording has ended: its sink has thrown");
  }
  buffer_.clear();
}

void RunRecorder::ran_out() noexcept {
  if (cut()) log(LogLevel::kWarning, "the recording has ended: no memory for it");
}

void RunRecorder::call_threw() noexcept {
  if (cut()) log(LogLevel::kWarning, "the recording has ended: a call has thrown");
}

bool RunRecorder::cut() noexcept {
  if (!on()) return false;
  buffer_.clear();
  sink_.write = nullptr;
  if (sink_.cut != nullptr) sink_.cut(sink_.context);
  return true;
}

RunStart describe_start(OpId op, const ObjectBatch& batch, const Removal* removal) {
  RunStart start;
  start.op = static_cast<std::uint64_t>(op);
  if (removal != nullptr) {
    start.removal = 1u + (removal->prefix ? 2u : 0u) + (removal->leased ? 4u : 0u);
  }
  std::string keys;
  for (const std::string& key : batch.keys.strings()) {
    keys += key;
    keys += '\n';
  }
  start.keys = hash_words(std::as_bytes(std::span(keys)));
  return start;
}

std::optional<RunStart> RunRecorder::describe(OpId op, const ObjectBatch& batch,
                                              const Removal* removal) noexcept {
  std::optional<RunStart> start;
  attempt([&] { start = describe_start(op, batch, removal); });
  return start;
}

bool RecordingIndex::start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                                  Instant deadline) {
  const auto start = recorder_->describe(op, *batch, nullptr);
  return started(start, deadline, index_->start_exists(op, batch, now, deadline));
}

bool RecordingIndex::start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch,
                                  const Removal& removal, Instant now, Instant deadline) {
  const auto start = recorder_->describe(op, *batch, &removal);
  return started(start, deadline, index_->start_remove(op, batch, removal, now, deadline));
}

bool RecordingIndex::started(std::optional<RunStart> start, Instant deadline,
                             bool accepted) noexcept {
  if (start) {
    start->accepted = accepted ? 1 : 0;
    recorder_->record(RunKind::kIndexStart, deadline,
                      [&](RunWriter writer) { writer.append(&*start, sizeof(*start)); });
  }
  return accepted;
}

bool RecordingIndex::poll_index(Instant now, Completion& out) {
  if (!index_->poll_index(now, out)) {
    recorder_->record(RunKind::kIndexIdle, now, [](RunWriter) {});
    return false;
  }
  recorder_->record(RunKind::kIndexEnd, now, [&](RunWriter writer) {
    writer.put(static_cast<std::uint64_t>(out.op));
    writer.put(static_cast<std::uint32_t>((out.outcome ? 1u : 0u) | (out.quiet ? 2u : 0u)));
    writer.put(static_cast<std::uint32_t>(out.items.size()));
    bool has_bytes = false;
    for (const ItemResult& item : out.items) has_bytes |= item.bytes != 0;
    writer.put(static_cast<std::uint32_t>(has_bytes ? 1 : 0));
    for (const ItemResult& item : out.items) {
      writer.put(static_cast<std::uint8_t>(item.status));
      if (has_bytes) writer.put(item.bytes);
    }
  });
  return true;
}

void write_load_ends(std::span<const LoadEnd> ends, std::vector<std::byte>& out) {
  RunWriter writer(out);
  for (const LoadEnd& end : ends) {
    writer.put(raw(end.request));
    writer.put(raw(end.job));
    writer.put(end.valid_tokens);
    writer.put(static_cast<std::uint32_t>((end.complete ? 1u : 0u) | (end.blocks_quiet ? 2u : 0u)));
    for (const FailedBlock& block : end.failed) {
      writer.put(raw(block.group));
      writer.put(block.chunk);
      writer.put(raw(block.block));
    }
  }
}

}  // namespace kvprism::detail
