// A file that takes the recording of a scheduler's run.
#pragma once

#include <memory>
#include <string>

#include "kvprism/base/export.h"
#include "kvprism/store/store_scheduler.h"

namespace kvprism {

// Must outlive the scheduler that writes to it. Each call of the scheduler is in the file when it
// returns, so that a crash loses none.
// Ownership: owns the file. Threads: the scheduler's.
class KVPRISM_API RunFile {
 public:
  // Replaces a file of that name. Throws Error (kInvalidArgument) when it cannot be written.
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
