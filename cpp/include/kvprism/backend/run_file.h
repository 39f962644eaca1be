// A file that takes the recording of a scheduler's run.
#pragma once

#include <memory>
#include <string>

#include "kvprism/base/export.h"
#include "kvprism/store/store_scheduler.h"

namespace kvprism {

// Must outlive the scheduler that writes to it; when it is closed, it says in the file that nothing
// follows, unless the recording has ended before the run, and takes a file away that no scheduler
// has written to. Each call of the scheduler is in
// the file when it returns, so that a crash of the process loses none; a call waits for as long as
// the file system takes for that. A forked child writes nothing. A tool for tests and incidents.
// Ownership: owns the file. Threads: the scheduler's.
class KVPRISM_API RunFile {
 public:
  // Makes the file, with mode 0600. Throws Error (kInvalidArgument) when there is one of that name,
  // which may be what explains a crash, or when it cannot be made.
  explicit RunFile(const std::string& path);
  ~RunFile();
  RunFile(const RunFile&) = delete;
  RunFile& operator=(const RunFile&) = delete;

  RunSink sink() noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvprism
