#include "kvprism/backend/run_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "kvprism/base/error.h"

namespace kvprism {

struct RunFile::Impl {
  std::FILE* file = nullptr;
  ~Impl() {
    if (file != nullptr) std::fclose(file);
  }
};

RunFile::RunFile(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->file = std::fopen(path.c_str(), "wb");
  if (impl_->file == nullptr) {
    fail(ErrorCode::kInvalidArgument, "recording",
         {"record_to", path, "a file that can be written", std::strerror(errno)});
  }
}
RunFile::~RunFile() = default;

RunSink RunFile::sink() noexcept {
  return {[](void* context, std::span<const std::byte> bytes) {
            std::FILE* const file = static_cast<Impl*>(context)->file;
            return std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() &&
                   std::fflush(file) == 0;
          },
          impl_.get()};
}

}  // namespace kvprism
