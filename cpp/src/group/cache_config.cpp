#include "kvprism/group/cache_config.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/utf8.h"
#include "group/config_check.h"
#include "group/json_object.h"
#include "group/spec_json.h"

namespace kvprism {
namespace {

using detail::indexed;
using detail::JsonObject;
using detail::or_null;
using detail::spell;
using nlohmann::json;
using nlohmann::ordered_json;

// A config of a thousand layers takes a tenth of a megabyte; this only stops endless devices.
constexpr std::size_t kMaxFileBytes = std::size_t{64} << 20;

constexpr std::array<std::string_view, 12> kTopKeys{"num_blocks",
                                                    "kv_layout",
                                                    "parallel",
                                                    "scheduler_block_size",
                                                    "hash_block_size",
                                                    "cache_hit_alignment_tokens",
                                                    "prefix_cache_retention_interval",
                                                    "use_eagle",
                                                    "model_total_kv_heads",
                                                    "key_schema",
                                                    "namespace",
                                                    "groups"};
constexpr std::array<std::string_view, 4> kParallelKeys{"tp", "pp", "pcp", "dcp"};
constexpr std::array<std::string_view, 6> kGroupKeys{
    "layers", "enable_kv_transfer", "is_eagle_group", "host_resident", "role", "pipeline_stages"};
constexpr std::array<std::string_view, 8> kUniformKeys{
    "kind",           "members",       "layers", "enable_kv_transfer",
    "is_eagle_group", "host_resident", "role",   "pipeline_stages"};
constexpr std::array<std::string_view, 1> kMemberKeys{"layers"};

class Reader {
 public:
  explicit Reader(const SpecRegistry& registry) : registry_(registry) {}

  CacheConfig read(const json& root) {
    CacheConfig config;
    JsonObject top(root, "", problems_);
    top.integer("num_blocks", config.num_blocks, true);
    top.text("kv_layout", config.kv_layout, false, "a layout name");
    top.integer("scheduler_block_size", config.scheduler_block_size, false);
    top.integer("hash_block_size", config.hash_block_size, false);
    top.integer("cache_hit_alignment_tokens", config.cache_hit_alignment_tokens, false);
    top.integer("prefix_cache_retention_interval", config.prefix_cache_retention_interval, false,
                0);
    top.flag("use_eagle", config.use_eagle);
    top.integer("model_total_kv_heads", config.model_total_kv_heads, false);
    top.text("key_schema", config.key_schema, false, "a schema name");
    top.text("namespace", config.key_namespace, false, "a string");
    if (const json* const parallel = top.get("parallel", "an object", false))
      read_parallel(*parallel, config.parallel);
    if (const json* const groups = top.list("groups", "a list of groups", true)) {
      for (std::size_t g = 0; g < groups->size(); ++g)
        config.groups.push_back(read_group((*groups)[g], detail::group_path(g)));
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
    JsonObject object(value, "parallel", problems_);
    object.integer("tp", parallel.tp, false);
    object.integer("pp", parallel.pp, false);
    object.integer("pcp", parallel.pcp, false);
    object.integer("dcp", parallel.dcp, false);
    object.refuse_others(kParallelKeys);
  }

  GroupConfig read_group(const json& value, const std::string& path) {
    GroupConfig group;
    if (!value.is_object()) {
      problems_.add(path, spell(value), "an object that describes a group");
      return group;
    }
    JsonObject object(value, path, problems_);
    object.text("kind", group.spec.kind, true, detail::one_of(registry_.names()));
    object.flag("enable_kv_transfer", group.enable_kv_transfer);
    object.flag("is_eagle_group", group.is_eagle_group);
    object.flag("host_resident", group.host_resident);
    object.text("role", group.role, false, "a string");
    object.integers("pipeline_stages", group.pipeline_stages, "a list of pipeline ranks");
    if (group.spec.kind == kUniformKind) {
      read_members(object, group);
      object.refuse_others(kUniformKeys);
    } else {
      object.texts("layers", group.layers, true, "a list of layer names");
      detail::read_spec(object, registry_, kGroupKeys, problems_, group.spec);
    }
    return group;
  }

  void read_members(JsonObject& object, GroupConfig& group) {
    object.texts("layers", group.layers, false, "a list of layer names");
    const json* const members = object.list("members", "a list of specs with layers", true);
    if (members == nullptr) return;
    for (std::size_t m = 0; m < members->size(); ++m) {
      LayerSpec& member = group.members.emplace_back();
      const json& value = (*members)[m];
      const std::string path = indexed(object.at("members"), m);
      if (!value.is_object()) {
        problems_.add(path, spell(value), "an object that describes layers of one spec");
        continue;
      }
      JsonObject of_member(value, path, problems_);
      of_member.text("kind", member.spec.kind, true, detail::one_of(registry_.names()));
      of_member.texts("layers", member.layers, true, "a list of layer names");
      detail::read_spec(of_member, registry_, kMemberKeys, problems_, member.spec);
    }
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

constexpr std::size_t kLongestReason = 300;

// The part of the parser's message that says what it met.
std::string parse_reason(const char* what) {
  std::string text(what);
  if (const std::size_t colon = text.find(": "); colon != std::string::npos)
    text.erase(0, colon + 2);
  if (detail::invalid_utf8(text)) text.erase(std::min(text.size(), text.find("; last read")));
  // It quotes what it has read, of any length.
  if (text.size() > kLongestReason) {
    std::size_t cut = kLongestReason;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
    text.resize(cut);
    text += "...";
  }
  return text;
}

// A config of every layer of a large model has some hundred KiB.
constexpr std::size_t kLongestJson = std::size_t{64} << 20;

json parse(std::string_view text, const std::string& subject, ProblemList& duplicates) {
  if (text.size() > kLongestJson) {
    fail(ErrorCode::kInvalidConfig, subject,
         {"top level", std::to_string(text.size()) + " bytes", "at most 64 MiB of JSON text", {}});
  }
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

ordered_json group_json(const GroupConfig& group) {
  ordered_json object;
  if (group.members.empty()) {
    object = detail::spec_json(group.spec);
    object["layers"] = group.layers;
  } else {
    object["kind"] = group.spec.kind;
    if (!group.layers.empty()) object["layers"] = group.layers;
    ordered_json members = ordered_json::array();
    for (const LayerSpec& member : group.members) {
      members.push_back(detail::spec_json(member.spec));
      members.back()["layers"] = member.layers;
    }
    object["members"] = std::move(members);
  }
  object["enable_kv_transfer"] = group.enable_kv_transfer;
  object["is_eagle_group"] = group.is_eagle_group;
  object["host_resident"] = group.host_resident;
  object["role"] = group.role;
  object["pipeline_stages"] =
      group.pipeline_stages ? ordered_json(*group.pipeline_stages) : nullptr;
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
  const ordered_json root{
      {"num_blocks", config.num_blocks},
      {"kv_layout", config.kv_layout},
      {"parallel",
       {{"tp", config.parallel.tp},
        {"pp", config.parallel.pp},
        {"pcp", config.parallel.pcp},
        {"dcp", config.parallel.dcp}}},
      {"scheduler_block_size", or_null(config.scheduler_block_size)},
      {"hash_block_size", or_null(config.hash_block_size)},
      {"cache_hit_alignment_tokens", or_null(config.cache_hit_alignment_tokens)},
      {"prefix_cache_retention_interval", or_null(config.prefix_cache_retention_interval)},
      {"use_eagle", or_null(config.use_eagle)},
      {"model_total_kv_heads", or_null(config.model_total_kv_heads)},
      {"key_schema", config.key_schema},
      {"namespace", config.key_namespace},
      {"groups", std::move(groups)}};
  return root.dump(2, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace kvprism
