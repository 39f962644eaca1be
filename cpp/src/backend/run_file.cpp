#include "kvprism/backend/run_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "kvprism/base/error.h"
#include "kvprism/base/log.h"
#include "store/run_recorder.h"

namespace kvprism {

struct RunFile::Impl {
  int file = -1;
  bool whole = true;   // nothing of it has been refused or cut
  bool begun = false;  // something is in it
  const pid_t owner = ::getpid();
  std::string path;

  // A forked child has the same file, and what it does is not the parent's run.
  bool is_ours() const noexcept { return owner == ::getpid(); }

  bool write(std::span<const std::byte> bytes) noexcept {
    if (!is_ours()) return false;
    while (whole && !bytes.empty()) {
      const ssize_t written = ::write(file, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      whole = written > 0;
      begun |= whole;
      if (whole) bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
    return whole;
  }
};

RunFile::RunFile(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  // What is made here is a regular file: whatever else has the name is an error.
  impl_->file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (impl_->file < 0) {
    fail(ErrorCode::kInvalidArgument, "recording",
         {"record_to", path, "the name of a new file that can be written", std::strerror(errno)});
  }
}

RunFile::~RunFile() {
  if (impl_->begun) {
    const detail::RunRecordHead end{detail::RunKind::kEnd, 0, 0};
    impl_->write(std::as_bytes(std::span(&end, 1)));
  } else if (impl_->is_ours()) {
    // Its scheduler was refused; the next one may have the name.
    ::unlink(impl_->path.c_str());
  }
  // Some file systems tell only now that they have no space.
  if (::close(impl_->file) != 0) {
    log(LogLevel::kWarning,
        "the recording " + impl_->path + " may lack its end: " + std::strerror(errno));
  }
}

RunSink RunFile::sink() noexcept {
  return {[](void* context, std::span<const std::byte> bytes) {
            return static_cast<Impl*>(context)->write(bytes);
          },
          impl_.get(), [](void* context) { static_cast<Impl*>(context)->whole = false; }};
}

}  // namespace kvprism
