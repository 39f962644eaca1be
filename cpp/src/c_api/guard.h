// What every function of the C interface goes through: arguments are checked, and no exception
// leaves.
#pragma once

#include <unistd.h>

#include <concepts>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/kvprism.h"

struct kvprism_error {
  kvprism_status status;
  std::string message;
  std::vector<kvprism::Problem> problems;
};

namespace kvprism::c_api {

kvprism_status status_of(ErrorCode code) noexcept;

// Fills `*error`, if there is one to fill; without memory for it, it stays null.
kvprism_status report(kvprism_error** error, kvprism_status status, const char* message,
                      const std::vector<Problem>& problems) noexcept;

template <class Body>
kvprism_status guarded(kvprism_error** error, Body&& body) noexcept {
  if (error != nullptr) *error = nullptr;
  try {
    body();
    return KVPRISM_OK;
  } catch (const Error& problem) {
    return report(error, status_of(problem.code()), problem.what(), problem.problems());
  } catch (const std::bad_alloc&) {
    return report(error, KVPRISM_OUT_OF_MEMORY, "out of memory", {});
  } catch (const std::exception& problem) {
    return report(error, KVPRISM_INTERNAL, problem.what(), {});
  } catch (...) {
    return report(error, KVPRISM_INTERNAL, "an unknown exception", {});
  }
}

// The arguments of one call; what is wrong is told at once.
class Arguments {
 public:
  explicit Arguments(const char* function) : function_(function) {}

  void need(const void* pointer, const char* name) {
    if (pointer == nullptr) problems_.add(name, "null", "a pointer");
  }
  // Of a handle that belongs to one process.
  template <class Handle>
    requires requires(const Handle& handle) { handle.owner; }
  void need(const Handle* handle, const char* name) {
    if (handle == nullptr || handle->owner == getpid())
      return need(static_cast<const void*>(handle), name);
    code_ = ErrorCode::kClosed;
    problems_.add(name, "of another process", "one that this process has made",
                  "a forked child has none of its threads and connections");
  }
  // An array may be null when it is empty. `count_name` of more than `most` is no count: nothing of
  // the array is read.
  void need_array(const void* pointer, std::size_t count, const char* name, const char* count_name,
                  std::size_t most) {
    if (count != 0) need(pointer, name);
    need_at_most(count, count_name, most);
  }
  void need_at_most(std::size_t count, const std::string& path, std::size_t most) {
    if (count > most) wrong(path, std::to_string(count), "at most " + std::to_string(most));
  }
  template <class Struct>
  void need_struct(const Struct* pointer, const char* name) {
    if (pointer == nullptr) return need(pointer, name);
    if (pointer->struct_size != sizeof(Struct))
      need_size<Struct>(pointer->struct_size, std::string(name) + ".struct_size");
  }
  template <class Struct>
  void need_size(std::size_t size, std::string path) {
    if (size == sizeof(Struct)) return;
    problems_.add(std::move(path), std::to_string(size),
                  std::to_string(sizeof(Struct)) + ", the struct's size to this library",
                  "header and library are of one version, and an _init function sets it");
  }
  void wrong(std::string path, std::string value, std::string expected) {
    problems_.add(std::move(path), std::move(value), std::move(expected));
  }
  // Throws Error: kInvalidArgument, or kClosed in a forked child.
  void check() const { problems_.throw_if_any(code_, function_); }

 private:
  const char* function_;
  ErrorCode code_ = ErrorCode::kInvalidArgument;
  ProblemList problems_;
};

// An _init function: the caller's struct gets the defaults of this library.
template <class Struct>
kvprism_status init(const char* function, Struct* out, std::size_t size, const Struct& defaults,
                    kvprism_error** error) noexcept {
  return guarded(error, [&] {
    Arguments arguments(function);
    arguments.need(out, "struct");
    arguments.need_size<Struct>(size, "struct_size");
    arguments.check();
    *out = defaults;
    out->struct_size = sizeof(Struct);
  });
}

// Counts that no engine can mean are mistakes of a caller: nothing is read for them.
inline constexpr std::size_t kMostElements = std::size_t{1} << 16;  // tensors, layers, kinds
inline constexpr std::size_t kMostHashes = std::size_t{1} << 26;
inline constexpr std::size_t kMostBlocks = (std::size_t{1} << 31) - 1;  // of a table
inline constexpr std::size_t kMostJson = std::size_t{64} << 20;         // bytes
inline constexpr std::size_t kMostMessage = std::size_t{1} << 30;       // bytes of a plan or report

inline std::string text(const char* value) {
  return value == nullptr ? std::string() : std::string(value);
}

inline std::string hash_widths() {
  return std::to_string(kMinHashWidth) + " to " + std::to_string(kMaxHashWidth) + " bytes";
}

// For kvprism_string_free.
char* give(std::string_view value);

}  // namespace kvprism::c_api
