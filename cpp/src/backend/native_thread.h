// How the threads of this library are set up.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace kvprism::detail {

// Signals belong to the engine's threads: while this lives, the calling thread takes none, and a
// thread that it starts takes none ever. Those that a thread causes itself stay deliverable.
class BlockedSignals {
 public:
  BlockedSignals() noexcept;
  ~BlockedSignals();
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

// At most 15 characters.
void name_thread(const char* name) noexcept;

// Throws std::system_error when there can be no more threads.
template <class Run>
std::jthread start_thread(const char* name, Run run) {
  const BlockedSignals blocked;
  return std::jthread([name, run = std::move(run)]() mutable {
    name_thread(name);
    run();
  });
}

}  // namespace kvprism::detail
