#include "kvprism/group/cache_config.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "group/config_check.h"
#include "group/utf8.h"

namespace kvprism {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::uint64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 40;
// A config of a thousand layers takes a tenth of a megabyte; this only stops endless devices.
constexpr std::size_t kMaxFileBytes = std::size_t{64} << 20;

constexpr std::array<std::string_view, 8> kTopKeys{
    "num_blocks",      "kv_layout",  "parallel",  "scheduler_block_size",
    "hash_block_size", "key_schema", "namespace", "groups"};
constexpr std::array<std::string_view, 4> kParallelKeys{"tp", "pp", "pcp", "dcp"};
constexpr std::array<std::string_view, 10> kGroupKeys{"kind",
                                                      "layers",
                                                      "block_size",
                                                      "sliding_window",
                                                      "page_size_padded",
                                                      "replay_tokens",
                                                      "enable_kv_transfer",
                                                      "is_eagle_group",
                                                      "host_resident",
                                                      "role"};
constexpr std::array<std::string_view, 6> kAttentionKeys{
    "num_kv_heads", "total_num_kv_heads", "head_size", "head_size_v", "dtype", "compression"};
constexpr std::array<std::string_view, 3> kStateKeys{"shapes", "dtypes", "mamba_cache_mode"};
constexpr std::array<std::string_view, 1> kRawKeys{"page_size_bytes"};

// A short spelling of a value; lists and objects are only counted, however deep they are.
std::string spell(const json& value) {
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

std::string indexed(const std::string& path, std::size_t at) {
  return path + "[" + std::to_string(at) + "]";
}

std::string at_most(std::uint64_t max) { return "at most " + std::to_string(max); }

// One JSON object of the schema: typed reads, then the keys that nobody knows.
class Object {
 public:
  Object(const json& value, std::string path, ProblemList& problems)
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

  void texts(std::string_view key, std::vector<std::string>& out, std::string_view expected) {
    const json* const items = list(key, expected, true);
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

class Reader {
 public:
  explicit Reader(const SpecRegistry& registry) : registry_(registry) {}

  CacheConfig read(const json& root) {
    CacheConfig config;
    Object top(root, "", problems_);
    top.integer("num_blocks", config.num_blocks, true);
    top.text("kv_layout", config.kv_layout, false, "a layout name");
    top.integer("scheduler_block_size", config.scheduler_block_size, false);
    top.integer("hash_block_size", config.hash_block_size, false);
    top.text("key_schema", config.key_schema, false, "a schema name");
    top.text("namespace", config.key_namespace, false, "a string");
    if (const json* const parallel = top.get("parallel", "an object", false))
      read_parallel(*parallel, config.parallel);
    if (const json* const groups = top.list("groups", "a list of groups", true)) {
      for (std::size_t g = 0; g < groups->size(); ++g)
        config.groups.push_back(read_group((*groups)[g], g));
    }
    top.refuse_others(kTopKeys);
    return config;
  }

  ProblemList& problems() { return problems_; }

 private:
  void read_parallel(const json& value, ParallelSizes& parallel) {
    if (!value.is_object()) {
      problems_.add("parallel", spell(value), "an object with tp, pp, pcp, dcp");
      return;
    }
    Object object(value, "parallel", problems_);
    object.integer("tp", parallel.tp, false);
    object.integer("pp", parallel.pp, false);
    object.integer("pcp", parallel.pcp, false);
    object.integer("dcp", parallel.dcp, false);
    object.refuse_others(kParallelKeys);
  }

  GroupConfig read_group(const json& value, std::size_t at) {
    GroupConfig group;
    const std::string path = detail::group_path(at);
    if (!value.is_object()) {
      problems_.add(path, spell(value), "an object that describes a group");
      return group;
    }
    Object object(value, path, problems_);
    object.text("kind", group.spec.kind, true, detail::one_of(registry_.names()));
    object.texts("layers", group.layers, "a list of layer names");
    object.integer("block_size", group.spec.block_size, true);
    object.integer("sliding_window", group.spec.sliding_window, false);
    object.integer("page_size_padded", group.spec.page_size_padded, false, 1, kMaxBytes);
    object.integer("replay_tokens", group.spec.replay_tokens, false, 0);
    object.flag("enable_kv_transfer", group.enable_kv_transfer);
    object.flag("is_eagle_group", group.is_eagle_group);
    object.flag("host_resident", group.host_resident);
    object.text("role", group.role, false, "a string");
    read_payload(object, group.spec);
    return group;
  }

  void read_payload(Object& object, CacheSpec& spec) {
    static const std::vector<std::string_view> everywhere = [] {
      std::vector<std::string_view> keys(kGroupKeys.begin(), kGroupKeys.end());
      keys.insert(keys.end(), kAttentionKeys.begin(), kAttentionKeys.end());
      keys.insert(keys.end(), kStateKeys.begin(), kStateKeys.end());
      keys.insert(keys.end(), kRawKeys.begin(), kRawKeys.end());
      return keys;
    }();
    const SpecKind* const kind = registry_.find(spec.kind);
    if (kind == nullptr) {
      object.refuse_others(everywhere);
      return;
    }
    std::vector<std::string_view> known(kGroupKeys.begin(), kGroupKeys.end());
    switch (kind->payload.get()) {
      case PayloadKind::kAttention:
        known.insert(known.end(), kAttentionKeys.begin(), kAttentionKeys.end());
        spec.payload = read_attention(object);
        break;
      case PayloadKind::kState:
        known.insert(known.end(), kStateKeys.begin(), kStateKeys.end());
        spec.payload = read_state(object);
        break;
      case PayloadKind::kRaw: {
        known.insert(known.end(), kRawKeys.begin(), kRawKeys.end());
        RawPayload raw_bytes;
        object.integer("page_size_bytes", raw_bytes.page_size_bytes, true, 1, kMaxBytes);
        spec.payload = raw_bytes;
        break;
      }
    }
    object.refuse_foreign(spec.kind, known, everywhere);
  }

  std::optional<DType> dtype(const std::string& name, const std::string& path) {
    const std::optional<DType> found = dtype_from_string(name);
    if (!found) {
      const std::vector<std::string_view> names = dtype_names();
      problems_.add(path, "\"" + name + "\"", detail::one_of(names), suggest(name, names));
    }
    return found;
  }

  AttentionPayload read_attention(Object& object) {
    AttentionPayload payload;
    object.integer("num_kv_heads", payload.num_kv_heads, true);
    object.integer("total_num_kv_heads", payload.total_num_kv_heads, false, 0);
    object.integer("head_size", payload.head_size, true);
    payload.head_size_v = payload.head_size;
    object.integer("head_size_v", payload.head_size_v, false, 0);
    object.integer("compression", payload.compression, false);
    std::string name;
    const std::size_t before = problems_.problems().size();
    object.text("dtype", name, true, detail::one_of(dtype_names()));
    payload.dtype =
        DType::kInt8;  // the smallest: no later rule complains about a size that is not known
    if (problems_.problems().size() == before)
      payload.dtype = dtype(name, object.at("dtype")).value_or(payload.dtype);
    return payload;
  }

  StatePayload read_state(Object& object) {
    StatePayload payload;
    object.text("mamba_cache_mode", payload.cache_mode, true, "one of none, align, all");
    const json* const shapes = object.list("shapes", "a list of shapes", true);
    if (shapes != nullptr) {
      for (std::size_t i = 0; i < shapes->size(); ++i) {
        payload.shapes.push_back(read_shape(object, (*shapes)[i], indexed(object.at("shapes"), i)));
      }
    }
    std::vector<std::string> names;
    object.texts("dtypes", names, "a list of dtype names");
    for (std::size_t i = 0; i < names.size(); ++i) {
      payload.dtypes.push_back(
          dtype(names[i], indexed(object.at("dtypes"), i)).value_or(DType::kInt8));
    }
    if (shapes == nullptr) payload.dtypes.clear();  // their number is no second problem
    return payload;
  }

  std::vector<std::uint32_t> read_shape(Object& object, const json& value,
                                        const std::string& path) {
    std::vector<std::uint32_t> shape;
    if (!value.is_array()) {
      problems_.add(path, spell(value), "a list of positive integers");
      return shape;
    }
    for (std::size_t i = 0; i < value.size(); ++i) {
      const auto extent =
          object.count(value[i], indexed(path, i), "a positive integer", 1, kMaxInt);
      shape.push_back(static_cast<std::uint32_t>(extent.value_or(1)));
    }
    return shape;
  }

  const SpecRegistry& registry_;
  ProblemList problems_;
};

// JSON lets a key stand twice, and the parser would keep the last one silently.
class DuplicateKeys {
 public:
  explicit DuplicateKeys(ProblemList& problems) : problems_(problems) {}

  void operator()(json::parse_event_t event, const json& value) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        next_item();
        frames_.push_back({event == json::parse_event_t::array_start, 0, {}, {}});
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        frames_.pop_back();
        break;
      case json::parse_event_t::key: {
        Frame& frame = frames_.back();
        frame.key = value.get<std::string>();
        if (!frame.keys.insert(frame.key).second) problems_.add(path(), "given twice", "one value");
        break;
      }
      case json::parse_event_t::value:
        next_item();
        break;
    }
  }

 private:
  struct Frame {
    bool is_array;
    std::size_t next;
    std::string key;
    std::set<std::string> keys;
  };

  void next_item() {
    if (!frames_.empty() && frames_.back().is_array) ++frames_.back().next;
  }

  std::string path() const {
    std::string text;
    for (const Frame& frame : frames_) {
      if (frame.is_array) {
        text += '[';
        text += std::to_string(frame.next - 1);
        text += ']';
      } else {
        if (!text.empty()) text += '.';
        text += frame.key;
      }
    }
    return text;
  }

  ProblemList& problems_;
  std::vector<Frame> frames_;
};

std::string line_and_column(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const std::size_t start =
      before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  return "line " + std::to_string(line) + ", column " + std::to_string(before.size() - start + 1);
}

// The part of the parser's message that says what it met.
std::string parse_reason(const char* what) {
  std::string text(what);
  if (const std::size_t colon = text.find(": "); colon != std::string::npos)
    text.erase(0, colon + 2);
  if (detail::invalid_utf8(text)) text.erase(std::min(text.size(), text.find("; last read")));
  return text;
}

json parse(std::string_view text, const std::string& subject, ProblemList& duplicates) {
  if (const auto at = detail::invalid_utf8(text)) {
    fail(ErrorCode::kInvalidConfig, subject,
         {line_and_column(text, *at), "byte " + std::to_string(*at), "UTF-8 text",
          "save the file as UTF-8"});
  }
  // The parser takes it for the end of the text.
  if (const std::size_t at = text.find('\0'); at != std::string_view::npos) {
    fail(ErrorCode::kInvalidConfig, subject,
         {line_and_column(text, at), "a NUL byte", "JSON text", {}});
  }
  DuplicateKeys seen(duplicates);
  const auto watch = [&seen](int, json::parse_event_t event, json& value) {
    seen(event, value);
    return true;
  };
  json root;
  try {
    root = json::parse(text, watch);
  } catch (const json::parse_error& error) {
    fail(ErrorCode::kInvalidConfig, subject,
         {line_and_column(text, error.byte == 0 ? 0 : error.byte - 1),
          {},
          "JSON text",
          parse_reason(error.what())});
  } catch (const json::exception& error) {
    // A number beyond the range of a double.
    fail(ErrorCode::kInvalidConfig, subject,
         {"top level", {}, "JSON text", parse_reason(error.what())});
  }
  if (!root.is_object()) {
    fail(ErrorCode::kInvalidConfig, subject,
         {"top level", spell(root), "an object with num_blocks and groups", {}});
  }
  return root;
}

// True when a problem of `path`, of something inside it or of something around it is known already.
bool covered(const std::string& path, const std::vector<Problem>& known) {
  const auto inside = [](const std::string& inner, const std::string& outer) {
    return inner.size() >= outer.size() && inner.compare(0, outer.size(), outer) == 0 &&
           (inner.size() == outer.size() || inner[outer.size()] == '.' ||
            inner[outer.size()] == '[');
  };
  return std::any_of(known.begin(), known.end(), [&](const Problem& each) {
    return inside(path, each.path) || inside(each.path, path);
  });
}

CacheConfig config_from(std::string_view text, const SpecRegistry& registry,
                        const std::string& subject) {
  Reader reader(registry);
  const json root = parse(text, subject, reader.problems());
  CacheConfig config = reader.read(root);
  ProblemList rules;
  detail::check_config(config, registry, rules);
  ProblemList all;
  all.append(reader.problems().problems());
  for (const Problem& problem : rules.problems()) {
    if (!covered(problem.path, reader.problems().problems())) all.append({problem});
  }
  all.throw_if_any(ErrorCode::kInvalidConfig, subject);
  return config;
}

std::string read_file(const std::string& path, const std::string& subject) {
  std::error_code status_error;
  if (std::filesystem::is_directory(path, status_error)) {
    fail(ErrorCode::kInvalidConfig, subject, {path, "a directory", "a JSON file", {}});
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) {
    const int reason = errno;
    fail(ErrorCode::kNotFound, subject,
         {path.empty() ? "''" : path,
          {},
          "a file that can be read",
          std::error_code(reason, std::generic_category()).message()});
  }
  std::string text;
  std::array<char, 65536> chunk;
  while (const std::size_t got = std::fread(chunk.data(), 1, chunk.size(), file.get())) {
    text.append(chunk.data(), got);
    if (text.size() > kMaxFileBytes) {
      fail(ErrorCode::kInvalidConfig, subject,
           {path, "more than 64 MiB", "a JSON file of at most 64 MiB", {}});
    }
  }
  if (std::ferror(file.get()) != 0) {
    fail(ErrorCode::kNotFound, subject,
         {path, {}, "a file that can be read", "reading stopped with an error"});
  }
  return text;
}

ordered_json payload_json(const AttentionPayload& payload) {
  return {
      {"num_kv_heads", payload.num_kv_heads}, {"total_num_kv_heads", payload.total_num_kv_heads},
      {"head_size", payload.head_size},       {"head_size_v", payload.head_size_v},
      {"dtype", to_string(payload.dtype)},    {"compression", payload.compression}};
}

ordered_json payload_json(const StatePayload& payload) {
  ordered_json dtypes = ordered_json::array();
  for (const DType dtype : payload.dtypes) dtypes.push_back(to_string(dtype));
  return {{"mamba_cache_mode", payload.cache_mode},
          {"shapes", payload.shapes},
          {"dtypes", std::move(dtypes)}};
}

ordered_json payload_json(const RawPayload& payload) {
  return {{"page_size_bytes", payload.page_size_bytes}};
}

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json group_json(const GroupConfig& group) {
  ordered_json object{
      {"kind", group.spec.kind}, {"layers", group.layers}, {"block_size", group.spec.block_size}};
  object.update(
      std::visit([](const auto& payload) { return payload_json(payload); }, group.spec.payload));
  object["sliding_window"] = or_null(group.spec.sliding_window);
  object["page_size_padded"] = or_null(group.spec.page_size_padded);
  object["replay_tokens"] = or_null(group.spec.replay_tokens);
  object["enable_kv_transfer"] = group.enable_kv_transfer;
  object["is_eagle_group"] = group.is_eagle_group;
  object["host_resident"] = group.host_resident;
  object["role"] = group.role;
  return object;
}

}  // namespace

CacheConfig cache_config_from_json(std::string_view text, const SpecRegistry& registry) {
  return config_from(text, registry, "cache config");
}

CacheConfig cache_config_from_file(const std::string& path, const SpecRegistry& registry) {
  const std::string subject = "cache config " + (path.empty() ? std::string("''") : path);
  return config_from(read_file(path, subject), registry, subject);
}

std::string to_json(const CacheConfig& config) {
  ordered_json groups = ordered_json::array();
  for (const GroupConfig& group : config.groups) groups.push_back(group_json(group));
  const ordered_json root{{"num_blocks", config.num_blocks},
                          {"kv_layout", config.kv_layout},
                          {"parallel",
                           {{"tp", config.parallel.tp},
                            {"pp", config.parallel.pp},
                            {"pcp", config.parallel.pcp},
                            {"dcp", config.parallel.dcp}}},
                          {"scheduler_block_size", or_null(config.scheduler_block_size)},
                          {"hash_block_size", or_null(config.hash_block_size)},
                          {"key_schema", config.key_schema},
                          {"namespace", config.key_namespace},
                          {"groups", std::move(groups)}};
  return root.dump(2, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace kvprism
