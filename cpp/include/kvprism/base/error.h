// Errors of construction and configuration. Transfers never throw: they report records
// (wire/worker_report.h).
#pragma once

#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"

namespace kvprism {

enum class ErrorCode {
  kInvalidConfig,    // a configuration value is malformed or contradicts another
  kInvalidArgument,  // a call's argument is outside its contract
  kNotFound,         // a file, library, device or symbol is missing
  kMismatch,         // two sides disagree (digest, epoch, layout, version)
  kUnsupported,      // valid, but this build or backend cannot do it
  kUnavailable,      // a service does not answer
  kTimedOut,         // a bound was reached
  kClosed,           // used after close(), or in a forked child
};

// Stable lower-case word of a code, e.g. "invalid_config".
KVPRISM_API std::string_view to_string(ErrorCode code) noexcept;

// One thing that is wrong: where, what was found, what was expected, and what to do.
struct Problem {
  std::string path;      // e.g. "groups[1].block_size"
  std::string value;     // the value as given, e.g. "-8"
  std::string expected;  // e.g. "a positive integer"
  std::string hint;      // may be empty

  bool operator==(const Problem&) const = default;
};

// Carries every problem of one input at once; paths and values beyond 400 bytes are cut.
// Ownership: value. Threads: immutable.
class KVPRISM_API Error : public std::exception {
 public:
  // `subject` names the whole input in one phrase, e.g. "cache config".
  Error(ErrorCode code, std::string subject, std::vector<Problem> problems);
  ~Error() override;
  Error(const Error&);
  Error& operator=(const Error&);

  ErrorCode code() const noexcept { return code_; }
  const std::string& subject() const noexcept { return subject_; }
  const std::vector<Problem>& problems() const noexcept { return problems_; }
  // "<subject>: 2 problems\n  groups[1].block_size = -8: expected a positive integer\n  ..."
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  ErrorCode code_;
  std::string subject_;
  std::vector<Problem> problems_;
  std::string what_;
};

// Collects problems, then throws once.
class KVPRISM_API ProblemList {
 public:
  void add(std::string path, std::string value, std::string expected, std::string hint = {});
  void append(const std::vector<Problem>& problems);
  bool empty() const noexcept { return problems_.empty(); }
  const std::vector<Problem>& problems() const noexcept { return problems_; }
  // Throws Error(code, subject, all problems) unless empty.
  void throw_if_any(ErrorCode code, std::string_view subject) const;

 private:
  std::vector<Problem> problems_;
};

// Throws an Error with a single problem.
[[noreturn]] KVPRISM_API void fail(ErrorCode code, std::string_view subject, Problem problem);

// "did you mean 'block_size'?" for the nearest known word, or "" when none is near.
KVPRISM_API std::string suggest(std::string_view word, std::span<const std::string_view> known);

}  // namespace kvprism
