// A side of a store, or a worker, for as long as its one user lives.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "kvprism/base/error.h"
#include "kvprism/io/object_store.h"

namespace kvprism::detail {

// Ownership: shares the side. Threads: one.
template <class Side>
class SideInUse {
 public:
  // Adds a problem when there is no side, or when it has a user.
  SideInUse(std::shared_ptr<Side> side, const char* path, const char* what, ProblemList& problems,
            const char* hint =
                "completions go to whoever polls; destroy its user first, or connect again")
      : side_(std::move(side)) {
    if (!side_) {
      problems.add(path, "null", what);
    } else if (user_ = side_->begin_use(); user_ == 0) {
      problems.add(path, "in use", std::string(what) + " of its own", hint);
    }
  }
  ~SideInUse() {
    if (user_ != 0) side_->end_use();
  }
  SideInUse(SideInUse&& other) noexcept
      : side_(std::move(other.side_)), user_(std::exchange(other.user_, 0)) {}
  SideInUse& operator=(SideInUse&&) = delete;

  std::uint64_t user() const noexcept { return user_; }

 private:
  std::shared_ptr<Side> side_;
  std::uint64_t user_ = 0;
};

}  // namespace kvprism::detail
