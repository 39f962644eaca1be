// The library's log lines, kept until Python asks: native threads never call into it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "areas.h"
#include "kvprism/base/error.h"
#include "kvprism/base/log.h"
#include "text.h"

namespace kvprism::bindings {
namespace nb = nanobind;
using namespace nb::literals;
namespace {

constexpr std::pair<LogLevel, const char*> kLevels[] = {{LogLevel::kDebug, "debug"},
                                                        {LogLevel::kInfo, "info"},
                                                        {LogLevel::kWarning, "warning"},
                                                        {LogLevel::kError, "error"},
                                                        {LogLevel::kOff, "off"}};

using Line = std::pair<std::string, std::string>;  // level and text

// The newest lines: somebody who never asks costs no memory.
class LogRing {
 public:
  static void take(void* self, LogLevel level, std::string_view text) {
    static_cast<LogRing*>(self)->add(level, text);
  }

  std::vector<Line> drain() {
    const std::lock_guard lock(mutex_);
    std::vector<Line> out(std::make_move_iterator(lines_.begin()),
                          std::make_move_iterator(lines_.end()));
    lines_.clear();
    return out;
  }

 private:
  static constexpr std::size_t kLines = 1000;

  void add(LogLevel level, std::string_view text) {
    const auto row = std::find_if(std::begin(kLevels), std::end(kLevels),
                                  [&](const auto& known) { return known.first == level; });
    const std::lock_guard lock(mutex_);
    if (lines_.size() == kLines) lines_.pop_front();
    lines_.emplace_back(row->second, std::string(text));
  }

  std::mutex mutex_;
  std::deque<Line> lines_;
};

// Never destroyed: native threads may still log while the process exits.
LogRing& ring() {
  static LogRing* const instance = new LogRing;
  return *instance;
}

void set_level(std::string_view name) {
  for (const auto& [level, word] : kLevels) {
    if (word == name) return set_log_sink(&LogRing::take, &ring(), level);
  }
  fail(ErrorCode::kInvalidArgument, "log",
       {"level", std::string(name), "debug, info, warning, error or off", {}});
}

}  // namespace

void bind_log(nb::module_& module) {
  set_log_sink(&LogRing::take, &ring(), LogLevel::kWarning);
  module.def(
      "take_log_lines", [] { return ring().drain(); },
      R"(The library's own log lines since the last call, at most the newest 1,000.

They tell changes: a client that is replaced, saving that pauses, blocks in quarantine. The library prints nothing.

Returns:
    Pairs of level ("debug", "info", "warning", "error") and text.)");
  module.def(
      "set_log_level", [](const std::string& level) { set_level(level); }, "level"_a,
      R"(Which lines `take_log_lines` gives; "warning" by default.

Args:
    level: "debug", "info", "warning", "error" or "off".

Raises:
    Error: No such level.)");
}

}  // namespace kvprism::bindings
