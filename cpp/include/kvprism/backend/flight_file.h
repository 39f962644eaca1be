// A file that takes a scheduler's flight records.
#pragma once

#include <memory>
#include <string>

#include "kvprism/base/export.h"
#include "kvprism/run/instant.h"
#include "kvprism/store/store_scheduler.h"

namespace kvprism {

// A record goes to the end of the file: a line with the scheduler's epoch and what has happened,
// then some 300 KB. It is made with mode 0600; only a regular file is written to, and none beyond 8
// MiB. A step copies the events, which is 160 KB; a thread of its own, "kvp-flight", which the
// first incident starts, turns them into text and writes, and says in the log where they are. While
// it writes, one more is kept, and those behind that are dropped with a line; so is
// every one in a process that was forked after the first. Must outlive the scheduler. Ownership:
// owns the thread. Threads: any.
class KVPRISM_API FlightFile {
 public:
  explicit FlightFile(std::string path);
  // Waits for at most a second for what has not been written.
  ~FlightFile();
  FlightFile(const FlightFile&) = delete;
  FlightFile& operator=(const FlightFile&) = delete;

  FlightSink sink() noexcept;
  // Waits until everything taken has been written or given up, in a forked child not at all; false
  // when `longest` has passed.
  bool flush(Duration longest) const;

 private:
  struct State;
  struct Handle;
  std::shared_ptr<State> state_;
  std::unique_ptr<Handle> handle_;
};

}  // namespace kvprism
