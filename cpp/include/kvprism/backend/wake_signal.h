// Ends the sleep of a thread that waits for a store.
#pragma once

#include "kvprism/base/export.h"
#include "kvprism/io/object_store.h"
#include "kvprism/run/instant.h"

namespace kvprism {

// A notice given while nobody waits is kept: the next wait returns at once.
// Ownership: value. Threads: notify from any, wait from one.
class KVPRISM_API WakeSignal {
 public:
  WakeSignal();
  ~WakeSignal();
  WakeSignal(const WakeSignal&) = delete;
  WakeSignal& operator=(const WakeSignal&) = delete;

  void notify() noexcept;
  // True when notified, false when `longest` has passed.
  bool wait(Duration longest) noexcept;

  // For ObjectStore::set_wakeup. May be called for as long as the process lives, also when this
  // signal is gone: a native call that hangs can outlive everything.
  Wakeup wakeup() const noexcept;

 private:
  struct Cell;
  Cell* cell_;
};

}  // namespace kvprism
