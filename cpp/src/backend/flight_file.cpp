#include "kvprism/backend/flight_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "backend/bounded_wait.h"
#include "backend/native_thread.h"
#include "kvprism/base/log.h"

namespace kvprism {
namespace {

constexpr std::size_t kMostBytes = 8 << 20;  // in the file, all records together
constexpr Duration kGrace = seconds(1);

// What prevented it; empty: nothing.
std::string append(const std::string& path, const std::string& text) {
  // Another kind of file could hold up a step for ever; a FIFO does so when it is opened.
  const int file =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600);
  if (file < 0) return std::strerror(errno);
  std::string problem;
  struct stat found{};
  if (::fstat(file, &found) != 0) {
    problem = std::strerror(errno);
  } else if (!S_ISREG(found.st_mode)) {
    problem = "it is no regular file";
  } else if (static_cast<std::size_t>(found.st_size) + text.size() > kMostBytes) {
    problem = fmt::format("it has {} bytes, and at most {} are kept", found.st_size, kMostBytes);
  } else {
    errno = 0;
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written != static_cast<ssize_t>(text.size())) {
      problem = errno != 0 ? std::strerror(errno) : "only a part of it has been written";
    }
  }
  if (::close(file) != 0 && problem.empty()) problem = std::strerror(errno);
  return problem;
}

}  // namespace

// Shared with the thread, which may have to be left behind where the file system hangs.
struct FlightFile::State {
  struct Record {
    std::uint64_t epoch = 0;
    std::string what;
    FlightRecorder events;
  };

  explicit State(std::string wanted) : path(std::move(wanted)) {}

  const std::string path;
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  std::optional<Record> waiting;
  bool writing = false;
  bool stopping = false;
  bool ended = false;

  void write(const Record& record) const {
    const std::string text =
        fmt::format("epoch {}: {}\n", record.epoch, record.what) + record.events.text();
    const std::string problem = append(path, text);
    log(LogLevel::kWarning,
        problem.empty() ? fmt::format("{}: the flight record is in {}", record.what, path)
                        : fmt::format("{}: the flight record could not be written to {}: {}",
                                      record.what, path, problem));
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return waiting || stopping; });
      if (!waiting) break;
      const Record record = *std::exchange(waiting, std::nullopt);
      writing = true;
      lock.unlock();
      try {
        write(record);
      } catch (const std::exception& error) {
        log(LogLevel::kError, std::string("the flight record is lost: ") + error.what());
      }
      lock.lock();
      writing = false;
      changed.notify_all();
    }
    ended = true;
    changed.notify_all();
  }
};

struct FlightFile::Handle {
  std::jthread thread;
  std::atomic<pid_t> owner = 0;  // the process that has the thread

  // A forked child has no such thread, and its copy of the mutex may be locked for ever.
  bool in_child() const noexcept {
    const pid_t process = owner.load(std::memory_order_relaxed);
    return process != 0 && process != ::getpid();
  }
};

FlightFile::FlightFile(std::string path)
    : state_(std::make_shared<State>(std::move(path))), handle_(std::make_unique<Handle>()) {}

FlightFile::~FlightFile() {
  if (!handle_->thread.joinable()) return;
  if (handle_->in_child()) {
    // Joining it would wait for ever.
    handle_->thread.detach();
    return;
  }
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.stopping = true;
  state.changed.notify_all();
  if (state.changed.wait_for(lock, detail::bounded(kGrace), [&] { return state.ended; })) return;
  handle_->thread.detach();
}

FlightSink FlightFile::sink() noexcept {
  return {
      [](void* context, std::uint64_t epoch, std::string_view what, const FlightRecorder& events) {
        FlightFile& file = *static_cast<FlightFile*>(context);
        State& state = *file.state_;
        try {
          if (file.handle_->in_child()) {
            log(LogLevel::kWarning,
                fmt::format("{}: the flight record is dropped in a forked child", what));
            return;
          }
          const std::lock_guard lock(state.mutex);
          if (state.waiting) {
            log(LogLevel::kWarning,
                fmt::format("{}: the flight record is dropped, as {} is still being written", what,
                            state.path));
            return;
          }
          if (!file.handle_->thread.joinable()) {
            file.handle_->thread =
                detail::start_thread("kvp-flight", [shared = file.state_] { shared->run(); });
            file.handle_->owner = ::getpid();
          }
          state.waiting = State::Record{epoch, std::string(what), events};
          state.changed.notify_all();
        } catch (const std::exception& error) {
          log(LogLevel::kError, std::string("the flight record is lost: ") + error.what());
        }
      },
      this};
}

bool FlightFile::flush(Duration longest) const {
  if (handle_->in_child()) return true;
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, detail::bounded(longest),
                                  [&] { return !state_->waiting && !state_->writing; });
}

}  // namespace kvprism
