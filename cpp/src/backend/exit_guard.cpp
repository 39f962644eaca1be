#include "backend/exit_guard.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

namespace kvprism::detail {
namespace {

std::atomic<int> under_way = 0;
std::atomic<bool> leaving = false;
std::atomic<bool> flushed = false;
std::atomic<pid_t> process = 0;  // whose calls these are

constexpr std::chrono::seconds kCallLimit{2};
constexpr std::chrono::seconds kFlushLimit{1};

template <class Done>
bool within(std::chrono::seconds limit, Done done) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void end_calls(int status, void*) {
  leaving = true;
  if (within(kCallLimit, [] { return under_way == 0; })) return;
  // A thread that reads a stream has its lock, perhaps for ever.
  try {
    std::thread([] {
      std::fflush(nullptr);
      flushed = true;
    }).detach();
    within(kFlushLimit, [] { return flushed.load(); });
  } catch (const std::exception&) {
    // No thread: what was not flushed is lost.
  }
  ::_exit(status);
}

// The objects of a thread go before all static ones, also those that were made after them; a
// handler that is set then is the first to run, and has the status.
struct MainThreadEnd {
  pid_t process = 0;
  ~MainThreadEnd() {
    if (::gettid() == process) ::on_exit(&end_calls, nullptr);
  }
};

}  // namespace

NativeCall::NativeCall() noexcept {
  ++under_way;
  allowed_ = !leaving;
}

NativeCall::~NativeCall() { --under_way; }

void end_native_calls_at_exit() noexcept {
  thread_local MainThreadEnd end;
  const pid_t here = ::getpid();
  // A forked child has copies of the counts, and no threads that could lower them.
  if (process.exchange(here) != here) under_way = 0;
  end.process = here;
}

}  // namespace kvprism::detail
