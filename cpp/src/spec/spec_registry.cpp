#include "kvprism/spec/spec_registry.h"

#include <string>
#include <utility>

#include "base/utf8.h"
#include "spec/builtin_kinds.h"
#include "spec/spec_check.h"

namespace kvprism {

struct SpecRegistry::Table {
  std::vector<SpecKind> kinds;
};

namespace {

std::string join(const std::vector<std::string_view>& words) {
  std::string text;
  for (const std::string_view word : words) {
    if (!text.empty()) text += ", ";
    text += word;
  }
  return text;
}

Problem unknown_kind(const SpecRegistry& registry, std::string_view kind, std::string path) {
  const std::vector<std::string_view> names = registry.names();
  return {std::move(path), std::string(kind), "one of the known kinds: " + join(names),
          suggest(kind, names)};
}

}  // namespace

SpecRegistry::SpecRegistry(std::shared_ptr<const Table> table) : table_(std::move(table)) {}

SpecRegistry SpecRegistry::builtin() {
  static const auto table = std::make_shared<const Table>(Table{detail::builtin_kinds()});
  return SpecRegistry(table);
}

SpecRegistry SpecRegistry::with(SpecKind kind) const {
  ProblemList problems;
  if (kind.name.empty()) {
    problems.add("name", "''", "a name that is not empty");
  } else if (const auto at = detail::invalid_utf8(kind.name)) {
    problems.add("name", "byte " + std::to_string(*at), "UTF-8 text");
  } else if (kind.name == kUniformKind) {
    problems.add("name", kind.name, "a name that is not taken", "it is the wrapper's");
  } else if (find(kind.name) != nullptr) {
    problems.add("name", kind.name, "a name that is not taken", "taken: " + join(names()));
  }
  if (kind.payload.get() > PayloadKind::kRaw) {
    problems.add("payload", std::to_string(static_cast<unsigned>(kind.payload.get())),
                 "one of attention, state, raw");
  }
  if (!kind.traits) problems.add("traits", "empty", "a function from a spec to its traits");
  problems.throw_if_any(ErrorCode::kInvalidArgument, "spec kind");
  auto table = std::make_shared<Table>(*table_);
  table->kinds.push_back(std::move(kind));
  return SpecRegistry(std::move(table));
}

const SpecKind* SpecRegistry::find(std::string_view name) const noexcept {
  for (const SpecKind& kind : table_->kinds) {
    if (kind.name == name) return &kind;
  }
  return nullptr;
}

const SpecKind& SpecRegistry::at(std::string_view name) const {
  const SpecKind* const kind = find(name);
  if (kind == nullptr) fail(ErrorCode::kInvalidConfig, "spec", unknown_kind(*this, name, "kind"));
  return *kind;
}

std::vector<std::string_view> SpecRegistry::names() const {
  std::vector<std::string_view> names;
  names.reserve(table_->kinds.size());
  for (const SpecKind& kind : table_->kinds) names.push_back(kind.name);
  return names;
}

void SpecRegistry::check(const CacheSpec& spec, std::string_view path,
                         ProblemList& problems) const {
  const SpecKind* const kind = find(spec.kind);
  if (kind == nullptr) {
    problems.append(
        {unknown_kind(*this, spec.kind, path.empty() ? "kind" : std::string(path) + ".kind")});
    return;
  }
  detail::check_spec(spec, *kind, path, problems);
}

SpecTraits SpecRegistry::traits_of(const CacheSpec& spec) const {
  return at(spec.kind).traits(spec);
}

}  // namespace kvprism
