#include "kvprism/base/log.h"

#include <mutex>
#include <shared_mutex>

namespace kvprism {
namespace {

struct Target {
  // Shared while the sink runs: lines come at once from several threads, and none waits for a sink
  // that another one is in.
  std::shared_mutex mutex;
  LogSink sink = nullptr;
  void* context = nullptr;
  LogLevel level = LogLevel::kWarning;
};

// Never destroyed: native threads may still log while the process exits.
Target& target() {
  static Target* const instance = new Target;
  return *instance;
}

}  // namespace

void set_log_sink(LogSink sink, void* context, LogLevel level) noexcept {
  Target& to = target();
  const std::lock_guard lock(to.mutex);
  to.sink = sink;
  to.context = context;
  to.level = level;
}

void log(LogLevel level, std::string_view line) noexcept {
  Target& to = target();
  const std::shared_lock lock(to.mutex);
  if (to.sink != nullptr && level >= to.level && to.level != LogLevel::kOff)
    to.sink(to.context, level, line);
}

}  // namespace kvprism
