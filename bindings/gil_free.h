// Work without the GIL that ends well when the interpreter ends meanwhile.
#pragma once

#include <nanobind/nanobind.h>

namespace kvprism::bindings {

// Releases the GIL for a scope. A thread that asks for the GIL of an interpreter that has ended is
// unwound through C++ frames, which ends the process; so the interpreter waits, for a bounded time,
// for all these scopes before it ends, and a thread that comes back later than that stays where it
// is. Once the interpreter is ending, only the thread that ends it gets a new scope.
// Ownership: none. Threads: the one that made it.
class GilFree {
 public:
  enum class WhenExiting { kRefuse, kKeepGil };

  // Throws Error (kClosed) when the interpreter is ending, unless told to keep the GIL then.
  GilFree() : GilFree(WhenExiting::kRefuse) {}
  explicit GilFree(WhenExiting choice);
  ~GilFree();
  GilFree(const GilFree&) = delete;
  GilFree& operator=(const GilFree&) = delete;

  // Whether this thread has the GIL: false on native threads and inside such a scope.
  static bool has_gil() noexcept;

 private:
  PyThreadState* state_ = nullptr;
  bool counted_ = false;
};

// Ends an object whose threads may take seconds to end: whoever drops its last reference does so
// without the GIL, wherever that happens.
struct DeleteWithoutGil {
  template <class Object>
  void operator()(Object* object) const noexcept {
    if (!GilFree::has_gil()) {
      delete object;
      return;
    }
    const GilFree released(GilFree::WhenExiting::kKeepGil);
    delete object;
  }
};

}  // namespace kvprism::bindings
