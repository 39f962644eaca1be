#include "kvprism/base/error.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

namespace kvprism {
namespace {

std::string describe(const std::string& subject, const std::vector<Problem>& problems) {
  std::string text = subject;
  if (problems.size() > 1)
    text.append(": ").append(std::to_string(problems.size())).append(" problems");
  for (const Problem& problem : problems) {
    text.append(problems.size() > 1 ? "\n  " : ": ").append(problem.path);
    if (!problem.value.empty()) text.append(" = ").append(problem.value);
    text.append(": expected ").append(problem.expected);
    if (!problem.hint.empty()) text.append(" (").append(problem.hint).append(")");
  }
  return text;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      const std::size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// What was given may have any size; a message is for a reader.
constexpr std::size_t kLongestQuote = 400;

void shorten(std::string& text) {
  if (text.size() <= kLongestQuote) return;
  std::size_t cut = kLongestQuote / 2;
  while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
  const std::string size = std::to_string(text.size());
  text.resize(cut);
  text.append("... (").append(size).append(" bytes)");
}

// What others wrote must neither end a message nor steer a terminal.
void escape_controls(std::string& text) {
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (std::none_of(text.begin(), text.end(), control)) return;
  std::string escaped;
  for (const char c : text) {
    if (!control(c)) {
      escaped += c;
      continue;
    }
    constexpr std::string_view kDigits = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(c);
    escaped += "\\x";
    escaped += kDigits[byte >> 4];
    escaped += kDigits[byte & 15];
  }
  text = std::move(escaped);
}

std::vector<Problem> printable(std::vector<Problem> problems) {
  for (Problem& problem : problems) {
    for (std::string* const text : {&problem.path, &problem.value}) {
      shorten(*text);
      escape_controls(*text);
    }
  }
  return problems;
}

}  // namespace

std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidConfig:
      return "invalid_config";
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kNotFound:
      return "not_found";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kUnavailable:
      return "unavailable";
    case ErrorCode::kTimedOut:
      return "timed_out";
    case ErrorCode::kClosed:
      return "closed";
  }
  return "unknown";
}

Error::Error(ErrorCode code, std::string subject, std::vector<Problem> problems)
    : code_(code),
      subject_(std::move(subject)),
      problems_(printable(std::move(problems))),
      what_(describe(subject_, problems_)) {}
Error::~Error() = default;
Error::Error(const Error&) = default;
Error& Error::operator=(const Error&) = default;

void ProblemList::add(std::string path, std::string value, std::string expected, std::string hint) {
  problems_.push_back({std::move(path), std::move(value), std::move(expected), std::move(hint)});
}

void ProblemList::append(const std::vector<Problem>& problems) {
  problems_.insert(problems_.end(), problems.begin(), problems.end());
}

void ProblemList::throw_if_any(ErrorCode code, std::string_view subject) const {
  if (!problems_.empty()) throw Error(code, std::string(subject), problems_);
}

void fail(ErrorCode code, std::string_view subject, Problem problem) {
  throw Error(code, std::string(subject), {std::move(problem)});
}

std::string suggest(std::string_view word, std::span<const std::string_view> known) {
  // Two slips, or a third of a long word, are still the same word to a reader.
  std::size_t best = std::max<std::size_t>(2, word.size() / 3) + 1;
  std::string_view found;
  for (const std::string_view candidate : known) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best) {
      best = distance;
      found = candidate;
    }
  }
  if (found.empty()) return {};
  std::string text("did you mean '");
  text.append(found).append("'?");
  return text;
}

}  // namespace kvprism
