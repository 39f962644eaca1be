// Typed reads of one JSON object, every problem told with its path.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvprism/base/error.h"

namespace kvprism::detail {

using nlohmann::json;

inline constexpr std::uint64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
inline constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 40;

// A short spelling of a value; lists and objects are only counted, however deep they are.
inline std::string spell(const json& value) {
  if (value.is_array()) return "a list of " + std::to_string(value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 60) {
    std::size_t cut = 57;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
    text.resize(cut);
    text += "...";
  }
  return text;
}

inline std::string indexed(const std::string& path, std::size_t at) {
  return path + "[" + std::to_string(at) + "]";
}

inline std::string at_most(std::uint64_t max) { return "at most " + std::to_string(max); }

// One JSON object of the schema: typed reads, then the keys that nobody knows.
class JsonObject {
 public:
  JsonObject(const json& value, std::string path, ProblemList& problems)
      : value_(value), path_(std::move(path)), problems_(problems) {}

  std::string at(std::string_view key) const {
    return path_.empty() ? std::string(key) : path_ + "." + std::string(key);
  }

  // Null when absent; null in JSON counts as absent for an optional key.
  const json* get(std::string_view key, std::string_view expected, bool required) {
    const auto found = value_.find(key);
    if (found == value_.end()) {
      if (required) problems_.add(at(key), {}, std::string(expected), "missing");
      return nullptr;
    }
    if (found->is_null() && !required) return nullptr;
    return &*found;
  }

  template <class T>
  void integer(std::string_view key, T& out, bool required, std::uint64_t min = 1,
               std::uint64_t max = kMaxInt) {
    const std::string expected = min == 0 ? "an integer of at least 0" : "a positive integer";
    const json* const found = get(key, expected, required);
    if (found == nullptr) return;
    if (const auto value = count(*found, at(key), expected, min, max)) out = static_cast<T>(*value);
  }

  template <class T>
  void integer(std::string_view key, std::optional<T>& out, bool required, std::uint64_t min = 1,
               std::uint64_t max = kMaxInt) {
    const json* const found = get(key, "", false);
    if (found == nullptr) {
      if (required) problems_.add(at(key), {}, "a positive integer", "missing");
      return;
    }
    T value{};
    integer(key, value, true, min, max);
    out = value;
  }

  void text(std::string_view key, std::string& out, bool required, std::string_view expected) {
    const json* const found = get(key, expected, required);
    if (found == nullptr) return;
    if (!found->is_string()) {
      problems_.add(at(key), spell(*found), std::string(expected));
      return;
    }
    out = found->get<std::string>();
  }

  void flag(std::string_view key, bool& out) {
    std::optional<bool> found;
    flag(key, found);
    out = found.value_or(out);
  }

  void flag(std::string_view key, std::optional<bool>& out) {
    const json* const found = get(key, "true or false", false);
    if (found == nullptr) return;
    if (!found->is_boolean()) {
      problems_.add(at(key), spell(*found), "true or false");
      return;
    }
    out = found->get<bool>();
  }

  const json* list(std::string_view key, std::string_view expected, bool required) {
    const json* const found = get(key, expected, required);
    if (found == nullptr || found->is_array()) return found;
    problems_.add(at(key), spell(*found), std::string(expected));
    return nullptr;
  }

  void texts(std::string_view key, std::vector<std::string>& out, bool required,
             std::string_view expected) {
    const json* const items = list(key, expected, required);
    if (items == nullptr) return;
    for (std::size_t i = 0; i < items->size(); ++i) {
      const json& item = (*items)[i];
      if (item.is_string()) {
        out.push_back(item.get<std::string>());
      } else {
        problems_.add(indexed(at(key), i), spell(item), "a string");
      }
    }
  }

  // Integers of 0 and more.
  template <class T>
  void integers(std::string_view key, std::optional<std::vector<T>>& out,
                std::string_view expected) {
    const json* const items = list(key, expected, false);
    if (items == nullptr) return;
    out.emplace();
    for (std::size_t i = 0; i < items->size(); ++i) {
      const auto value =
          count((*items)[i], indexed(at(key), i), "an integer of at least 0", 0, kMaxInt);
      if (value) out->push_back(static_cast<T>(*value));
    }
  }

  std::optional<std::uint64_t> count(const json& value, const std::string& path,
                                     const std::string& expected, std::uint64_t min,
                                     std::uint64_t max) {
    if (value.is_number_unsigned()) {
      const auto number = value.get<std::uint64_t>();
      if (number >= min && number <= max) return number;
      problems_.add(path, spell(value), number < min ? expected : at_most(max));
    } else {
      problems_.add(path, spell(value), expected,
                    value.is_number_float() ? "write it without a point or an exponent" : "");
    }
    return std::nullopt;
  }

  void refuse_others(std::span<const std::string_view> known) {
    for (const auto& [key, value] : value_.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      problems_.add(at(key), spell(value), "a known key", suggest(key, known));
    }
  }

  // Keys that belong to another payload than `kind` has.
  void refuse_foreign(const std::string& kind, std::span<const std::string_view> known,
                      std::span<const std::string_view> everywhere) {
    for (const auto& [key, value] : value_.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      if (std::find(everywhere.begin(), everywhere.end(), key) != everywhere.end()) {
        problems_.add(at(key), spell(value), "no such key for kind '" + kind + "'");
      } else {
        problems_.add(at(key), spell(value), "a known key", suggest(key, known));
      }
    }
  }

 private:
  const json& value_;
  std::string path_;
  ProblemList& problems_;
};

}  // namespace kvprism::detail
