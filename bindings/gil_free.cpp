#include "gil_free.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "areas.h"
#include "kvprism/base/error.h"

namespace kvprism::bindings {

namespace nb = nanobind;

namespace {

constexpr std::chrono::seconds kLongestFarewell{2};
constexpr std::chrono::milliseconds kLook{1};

// Written by the thread that ends the interpreter, with the GIL, before `exiting`.
std::thread::id exiting_thread;
std::atomic<bool> exiting{false};
// No scope that is still open may take the GIL again.
std::atomic<bool> abandoned{false};
std::atomic<int> inside{0};
std::atomic<int> returning{0};
thread_local int open_scopes = 0;

bool ends_elsewhere() noexcept {
  return exiting.load() && std::this_thread::get_id() != exiting_thread;
}

void leave() {
  exiting_thread = std::this_thread::get_id();
  exiting = true;
  // What these threads hold is never freed; a warning of leaks would tell nobody anything.
  if (inside > 0) nb::set_leak_warnings(false);
  PyThreadState* const state = PyEval_SaveThread();
  const auto until = std::chrono::steady_clock::now() + kLongestFarewell;
  while (inside > 0 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(kLook);
  abandoned = true;
  // These have seen that they may, and get the GIL that is free here.
  while (returning > 0) std::this_thread::sleep_for(kLook);
  PyEval_RestoreThread(state);
}

// The other threads do not exist in a forked child.
void forget_threads() {
  inside = 0;
  returning = 0;
}

}  // namespace

GilFree::GilFree(WhenExiting choice) {
  if (ends_elsewhere()) {
    if (choice == WhenExiting::kKeepGil) return;
    fail(ErrorCode::kClosed, "interpreter", {"state", "exiting", "a running interpreter", {}});
  }
  // With the GIL, as leave() sets `exiting`: either it waits for this scope, or this one is
  // refused.
  counted_ = !exiting;
  if (counted_) ++inside;
  ++open_scopes;
  state_ = PyEval_SaveThread();
}

bool GilFree::has_gil() noexcept {
  return open_scopes == 0 && Py_IsInitialized() != 0 && PyGILState_GetThisThreadState() != nullptr;
}

GilFree::~GilFree() {
  if (state_ == nullptr) return;
  --open_scopes;
  if (!counted_) {
    PyEval_RestoreThread(state_);
    return;
  }
  ++returning;
  if (abandoned && ends_elsewhere()) {
    --returning;
    while (true) pause();
  }
  PyEval_RestoreThread(state_);
  --inside;
  --returning;
}

void bind_exit(nb::module_&) {
  pthread_atfork(nullptr, nullptr, &forget_threads);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&leave));
}

}  // namespace kvprism::bindings
