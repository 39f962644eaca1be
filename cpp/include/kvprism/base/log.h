// Where the library's own log lines go. Nothing is printed unless a sink is set and the level
// allows it.
#pragma once

#include <string_view>

#include "kvprism/base/export.h"

namespace kvprism {

enum class LogLevel : int { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kOff = 4 };

using LogSink = void (*)(void* context, LogLevel level, std::string_view line);

// Replaces the sink for the process; null drops every line. Returns when no call of the sink before
// runs any more, so that its `context` may go then. Threads: any; the sink is called from any
// thread, also from several at once. One that blocks holds up its own callers, the engine's step
// perhaps among them, and nobody else; it must not set a sink.
KVPRISM_API void set_log_sink(LogSink sink, void* context, LogLevel level) noexcept;

// Hands one line to the sink if its level is enabled.
KVPRISM_API void log(LogLevel level, std::string_view line) noexcept;

}  // namespace kvprism
