// Versions, errors, text and log of the C interface.
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>

#include "c_api/guard.h"
#include "c_api/handles.h"
#include "kvprism/backend/clock.h"
#include "kvprism/base/log.h"
#include "kvprism/base/version.h"

namespace kvprism::c_api {

kvprism_status status_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidConfig:
      return KVPRISM_INVALID_CONFIG;
    case ErrorCode::kInvalidArgument:
      return KVPRISM_INVALID_ARGUMENT;
    case ErrorCode::kNotFound:
      return KVPRISM_NOT_FOUND;
    case ErrorCode::kMismatch:
      return KVPRISM_MISMATCH;
    case ErrorCode::kUnsupported:
      return KVPRISM_UNSUPPORTED;
    case ErrorCode::kUnavailable:
      return KVPRISM_UNAVAILABLE;
    case ErrorCode::kTimedOut:
      return KVPRISM_TIMED_OUT;
    case ErrorCode::kClosed:
      return KVPRISM_CLOSED;
  }
  return KVPRISM_INTERNAL;
}

kvprism_status report(kvprism_error** error, kvprism_status status, const char* message,
                      const std::vector<Problem>& problems) noexcept {
  if (error == nullptr) return status;
  try {
    *error = new kvprism_error{status, message, problems};
  } catch (...) {
    *error = nullptr;
  }
  return status;
}

char* give(std::string_view value) {
  // Of malloc, as kvprism_string_free gives it to free.
  auto* const out = static_cast<char*>(std::malloc(value.size() + 1));
  if (out == nullptr) throw std::bad_alloc();
  std::memcpy(out, value.data(), value.size());
  out[value.size()] = '\0';
  return out;
}

std::span<const std::byte> aligned_bytes(const void* data, std::size_t count,
                                         std::vector<std::uint64_t>& aligned) {
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(std::uint64_t) == 0) {
    return {static_cast<const std::byte*>(data), count};
  }
  aligned.resize((count + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t));
  std::memcpy(aligned.data(), data, count);
  return std::as_bytes(std::span(aligned)).first(count);
}

namespace {

struct Sink {
  kvprism_log_sink call;
  void* context;
};

}  // namespace
}  // namespace kvprism::c_api

using namespace kvprism;         // NOLINT(google-build-using-namespace): functions outside of any
using namespace kvprism::c_api;  // NOLINT(google-build-using-namespace)

const char* kvprism_version(void) { return kVersionString; }
uint32_t kvprism_c_version(void) { return KVPRISM_C_VERSION; }

kvprism_status kvprism_check_version(uint32_t c_version, kvprism_error** error) {
  return guarded(error, [&] {
    if (c_version == KVPRISM_C_VERSION) return;
    fail(ErrorCode::kMismatch, "C interface",
         {"KVPRISM_C_VERSION", std::to_string(c_version),
          std::to_string(KVPRISM_C_VERSION) + ", which kvprism " + kVersionString + " speaks",
          "compile against the header of the library that is loaded"});
  });
}

const char* kvprism_status_name(kvprism_status status) {
  switch (status) {
    case KVPRISM_OK:
      return "ok";
    case KVPRISM_INVALID_CONFIG:
      return "invalid_config";
    case KVPRISM_INVALID_ARGUMENT:
      return "invalid_argument";
    case KVPRISM_NOT_FOUND:
      return "not_found";
    case KVPRISM_MISMATCH:
      return "mismatch";
    case KVPRISM_UNSUPPORTED:
      return "unsupported";
    case KVPRISM_UNAVAILABLE:
      return "unavailable";
    case KVPRISM_TIMED_OUT:
      return "timed_out";
    case KVPRISM_CLOSED:
      return "closed";
    case KVPRISM_OUT_OF_MEMORY:
      return "out_of_memory";
    case KVPRISM_INTERNAL:
      return "internal";
  }
  return "unknown";
}

kvprism_status kvprism_error_status(const kvprism_error* error) {
  return error == nullptr ? KVPRISM_OK : error->status;
}
const char* kvprism_error_message(const kvprism_error* error) {
  return error == nullptr ? "" : error->message.c_str();
}
size_t kvprism_error_num_problems(const kvprism_error* error) {
  return error == nullptr ? 0 : error->problems.size();
}
bool kvprism_error_problem(const kvprism_error* error, size_t index, kvprism_problem* problem) {
  if (problem == nullptr || index >= kvprism_error_num_problems(error)) return false;
  const Problem& found = error->problems[index];
  *problem = {found.path.c_str(), found.value.c_str(), found.expected.c_str(), found.hint.c_str()};
  return true;
}
void kvprism_error_free(kvprism_error* error) { delete error; }

void kvprism_string_free(char* text) { std::free(text); }

kvprism_status kvprism_set_log_sink(kvprism_log_sink sink, void* context, int32_t level,
                                    kvprism_error** error) {
  return guarded(error, [&] {
    if (level < static_cast<int>(LogLevel::kDebug) || level > static_cast<int>(LogLevel::kOff)) {
      Arguments arguments("kvprism_set_log_sink");
      arguments.wrong("level", std::to_string(level), "0 to 4");
      arguments.check();
    }
    if (sink == nullptr) return set_log_sink(nullptr, nullptr, LogLevel::kOff);
    // Kept for ever: another thread may be in the sink before this one.
    static std::mutex mutex;
    static auto* const sinks = new std::deque<Sink>;
    const std::lock_guard lock(mutex);
    Sink* const pair = &sinks->emplace_back(Sink{sink, context});
    set_log_sink(
        [](void* both, LogLevel at, std::string_view line) {
          const auto* const to = static_cast<const Sink*>(both);
          to->call(to->context, static_cast<int32_t>(at), line.data(), line.size());
        },
        pair, static_cast<LogLevel>(level));
  });
}

int64_t kvprism_now(void) { return monotonic_now().ns; }
