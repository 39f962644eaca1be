#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "areas.h"
#include "errors.h"
#include "gil_free.h"
#include "ids.h"
#include "kvprism/base/error.h"
#include "kvprism/group/cache_config.h"
#include "kvprism/group/projection.h"
#include "kvprism/peer/validate_peer.h"
#include "kvprism/store/validate_store.h"
#include "text.h"
#include "whole.h"

namespace kvprism::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ProjectionPtr = std::shared_ptr<const Projection>;

// One row of a projection: what a group is after resolution.
struct GroupRow {
  ProjectionPtr projection;
  GroupId id;
  const ResolvedGroup& group() const { return projection->group(id); }
};

template <class Id>
void bind_id(nb::module_& module, const char* name, const char* doc) {
  using Box = Boxed<Id>;
  nb::class_<Box>(module, name, doc)
      .def(
          "__init__",
          [](Box* self, const Whole<std::uint32_t>& value) { new (self) Box{Id{value("value")}}; },
          "value"_a, R"(Wraps a position.

Args:
    value: The position, from 0.

Raises:
    ArgumentError: It does not fit into 32 bits.)")
      .def_prop_ro(
          "value", [](const Box& box) { return raw(box.id); }, "The position as an int.")
      .def("__int__", [](const Box& box) { return raw(box.id); })
      .def("__hash__", [](const Box& box) { return static_cast<Py_ssize_t>(raw(box.id)); })
      .def(
          "__eq__", [](const Box& a, const Box& b) { return a.id == b.id; }, nb::is_operator(),
          "other"_a.none(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def(
          "__lt__", [](const Box& a, const Box& b) { return a.id < b.id; }, nb::is_operator(),
          "other"_a)
      .def("__repr__", [name](const Box& box) {
        return std::string(name) + "(" + std::to_string(raw(box.id)) + ")";
      });
}

SpecRegistry or_builtin(const std::optional<SpecRegistry>& registry) {
  return registry ? *registry : SpecRegistry::builtin();
}

CacheConfig config_from_json(std::string_view text, const std::optional<SpecRegistry>& registry) {
  const GilFree released;
  return cache_config_from_json(text, or_builtin(registry));
}

// The name in bytes: it need not be UTF-8.
CacheConfig config_from_file(nb::handle path, const std::optional<SpecRegistry>& registry) {
  const auto bytes = nb::cast<nb::bytes>(nb::module_::import_("os").attr("fsencode")(path));
  const std::string name(bytes.c_str(), bytes.size());
  if (name.find('\0') != std::string::npos) {
    fail(ErrorCode::kInvalidConfig, "cache config",
         {"path", nb::repr(path).c_str(), "a name without NUL bytes", {}});
  }
  const GilFree released;
  return cache_config_from_file(name, or_builtin(registry));
}

constexpr std::size_t kDeepestDict = 64;

// Where the first value lies that JSON cannot express; a dict that contains itself is too deep.
std::optional<Problem> find_foreign(nb::handle value, const std::string& path, std::size_t depth) {
  const auto problem = [&](std::string found, const char* expected) {
    if (found.size() > 60) found = found.substr(0, 57) + "...";
    return Problem{path.empty() ? "top level" : path, std::move(found), expected, {}};
  };
  if (depth > kDeepestDict) return problem({}, "at most 64 levels of dicts and lists");
  if (nb::isinstance<nb::dict>(value)) {
    for (const auto [key, item] : nb::borrow<nb::dict>(value)) {
      if (!nb::isinstance<nb::str>(key)) return problem(nb::repr(key).c_str(), "keys of type str");
      const std::string name = nb::repr(key).c_str();
      const std::string inner = (path.empty() ? "" : path + ".") + name.substr(1, name.size() - 2);
      if (auto found = find_foreign(item, inner, depth + 1)) return found;
    }
    return std::nullopt;
  }
  if (PyList_Check(value.ptr()) || PyTuple_Check(value.ptr())) {
    std::size_t index = 0;
    for (const nb::handle item : value) {
      if (auto found = find_foreign(item, path + "[" + std::to_string(index++) + "]", depth + 1))
        return found;
    }
    return std::nullopt;
  }
  if (PyFloat_Check(value.ptr())) {
    if (std::isfinite(nb::cast<double>(value))) return std::nullopt;
    return problem(nb::repr(value).c_str(), "a finite number");
  }
  if (value.is_none() || PyUnicode_Check(value.ptr()) || PyLong_Check(value.ptr()))
    return std::nullopt;
  return problem(nb::repr(value).c_str(), "str, int, float, bool, None, a list or a dict");
}

CacheConfig config_from_dict(nb::dict value, const std::optional<SpecRegistry>& registry) {
  nb::object text;
  try {
    text = nb::module_::import_("json").attr("dumps")(value, "allow_nan"_a = false);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError) &&
        !error.matches(PyExc_RecursionError))
      throw;
    std::optional<Problem> found = find_foreign(value, "", 0);
    if (!found) found = Problem{"top level", {}, "what JSON can express", error.what()};
    fail(ErrorCode::kInvalidConfig, "cache config", std::move(*found));
  }
  return config_from_json(nb::cast<std::string_view>(text), registry);
}

ProjectionPtr make_projection(const CacheConfig& config,
                              const std::optional<SpecRegistry>& registry) {
  const GilFree released;
  return Projection::make(config, or_builtin(registry));
}

std::vector<std::pair<std::string, std::string>> to_pairs(const std::vector<DigestFact>& facts) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const DigestFact& fact : facts) pairs.emplace_back(fact.name, fact.value);
  return pairs;
}

std::vector<DigestFact> to_facts(const std::vector<std::pair<std::string, std::string>>& pairs) {
  std::vector<DigestFact> facts;
  for (const auto& [name, value] : pairs) facts.push_back({name, value});
  return facts;
}

template <class Id>
nb::object box_or_none(const std::optional<Id>& id) {
  return id ? nb::cast(box(*id)) : nb::none();
}

template <class Index>
std::vector<PyGroupId> ids_of(const Projection& projection, std::size_t count) {
  std::vector<PyGroupId> ids;
  for (const Index index : indices<Index>(count)) ids.push_back(box(projection.group_id(index)));
  return ids;
}

void bind_ids(nb::module_& module) {
  bind_id<GroupId>(module, "GroupId",
                   "Position of a group in the engine's list of all KV cache groups.");
  bind_id<TransferIndex>(module, "TransferIndex",
                         "Position of a group in the transfer projection.");
  bind_id<StoreIndex>(module, "StoreIndex", "Position of a group in the store projection.");
}

void bind_config(nb::module_& module) {
  nb::class_<ParallelSizes>(module, "ParallelSizes",
                            "Sizes of the parallel arrangement, 1 where it is absent.")
      .def_ro("tp", &ParallelSizes::tp, "Tensor parallel size.")
      .def_ro("pp", &ParallelSizes::pp, "Pipeline parallel size.")
      .def_ro("pcp", &ParallelSizes::pcp, "Prefill context parallel size.")
      .def_ro("dcp", &ParallelSizes::dcp, "Decode context parallel size.")
      .def_prop_ro("world", &ParallelSizes::world, "Number of ranks: tp x pp x pcp.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](const ParallelSizes& p) {
        return "ParallelSizes(tp=" + std::to_string(p.tp) + ", pp=" + std::to_string(p.pp) +
               ", pcp=" + std::to_string(p.pcp) + ", dcp=" + std::to_string(p.dcp) + ")";
      });

  nb::class_<CacheConfig>(
      module, "CacheConfig",
      "What an engine tells of its cache: groups, sizes and layout. Its JSON form is described in "
      "docs/configuration.md.")
      .def_static("from_json", &config_from_json, "text"_a, "registry"_a = nb::none(),
                  R"(Reads the JSON form.

Args:
    text: A JSON object.
    registry: Known kinds; None for the built-in ones.

Raises:
    ConfigError: With every problem at once.)")
      .def_static("from_file", &config_from_file, "path"_a, "registry"_a = nb::none(),
                  nb::sig("def from_file(path: str | os.PathLike[str], registry: SpecRegistry | "
                          "None = None) -> CacheConfig"),
                  R"(Reads a file in the JSON form.

Args:
    path: A file; every error names it.
    registry: Known kinds; None for the built-in ones.

Raises:
    NotFoundError: There is no such file, or it cannot be read.
    ConfigError: With every problem at once.)")
      .def_static("from_dict", &config_from_dict, "value"_a, "registry"_a = nb::none(),
                  nb::sig("def from_dict(value: dict[str, typing.Any], registry: SpecRegistry | "
                          "None = None) -> CacheConfig"),
                  R"(Reads a dict of the same shape as the JSON form.

Args:
    value: What ``json.loads`` of the JSON form would give.
    registry: Known kinds; None for the built-in ones.

Raises:
    ConfigError: With every problem at once.)")
      .def("to_json", &to_json, "The JSON form, with every key written out.")
      .def(
          "to_dict",
          [](const CacheConfig& config) {
            return nb::module_::import_("json").attr("loads")(to_json(config));
          },
          nb::sig("def to_dict(self) -> dict[str, typing.Any]"), "The JSON form as a dict.")
      .def_ro("num_blocks", &CacheConfig::num_blocks, "Blocks of the pool, with the null block.")
      .def_ro("kv_layout", &CacheConfig::kv_layout,
              "Physical order of layer, block, head, token and content.")
      .def_ro("parallel", &CacheConfig::parallel, "Sizes of the parallel arrangement.")
      .def_ro("scheduler_block_size", &CacheConfig::scheduler_block_size,
              "The engine's own value in tokens, or None.")
      .def_ro("hash_block_size", &CacheConfig::hash_block_size,
              "The engine's own value in tokens, or None.")
      .def_ro("cache_hit_alignment_tokens", &CacheConfig::cache_hit_alignment_tokens,
              "The engine's own value in tokens, or None.")
      .def_ro("prefix_cache_retention_interval", &CacheConfig::prefix_cache_retention_interval,
              "Tokens between prefixes that stay cached, or None.")
      .def_ro("use_eagle", &CacheConfig::use_eagle,
              "Whether a draft model drops the last block of a hit, or None.")
      .def_ro("model_total_kv_heads", &CacheConfig::model_total_kv_heads,
              "KV heads of the model as the engine counts them, or None.")
      .def_ro("key_schema", &CacheConfig::key_schema, "Name of the key schema.")
      .def_ro("namespace", &CacheConfig::key_namespace, "Tenant; part of every key.")
      .def_prop_ro(
          "num_groups", [](const CacheConfig& config) { return config.groups.size(); },
          "Number of groups.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](const CacheConfig& config) {
        return "CacheConfig(num_blocks=" + std::to_string(config.num_blocks) +
               ", groups=" + std::to_string(config.groups.size()) + ")";
      });
}

void bind_row(nb::module_& module) {
  const auto word = [](std::string_view text) { return nb::str(text.data(), text.size()); };
  nb::class_<GroupRow>(module, "Group", "One group after resolution; a row of a projection.")
      .def_prop_ro(
          "id", [](const GroupRow& row) { return box(row.id); }, "Position among all groups.")
      .def_prop_ro(
          "transfer_index",
          [](const GroupRow& row) { return box_or_none(row.projection->transfer_index(row.id)); },
          nb::sig("def transfer_index(self) -> TransferIndex | None"),
          "Position in the transfer projection, or None.")
      .def_prop_ro(
          "store_index",
          [](const GroupRow& row) { return box_or_none(row.projection->store_index(row.id)); },
          nb::sig("def store_index(self) -> StoreIndex | None"),
          "Position in the store projection, or None.")
      .def_prop_ro(
          "why_not_stored",
          [](const GroupRow& row) { return row.projection->why_not_stored(row.id); },
          "Why the group is not storable; empty when it is.")
      .def_prop_ro(
          "kind", [](const GroupRow& row) { return row.group().spec.kind; },
          "Name of the kind of cache.")
      .def_prop_ro(
          "layers", [](const GroupRow& row) { return row.group().layers; },
          "Names of the layers on this rank.")
      .def_prop_ro(
          "block_size", [](const GroupRow& row) { return row.group().spec.block_size; },
          "Stored positions per block and rank.")
      .def_prop_ro(
          "tokens_per_block", [](const GroupRow& row) { return row.group().tokens_per_block; },
          "Tokens that one block id stands for.")
      .def_prop_ro(
          "page_size_bytes", [](const GroupRow& row) { return row.group().page_size_bytes; },
          "Bytes of one block of the first layer on this rank.")
      .def_prop_ro(
          "layer_kinds",
          [](const GroupRow& row) {
            const ResolvedGroup& group = row.group();
            std::vector<std::string> kinds;
            for (std::size_t layer = 0; layer < group.layers.size(); ++layer)
              kinds.push_back(group.layer_spec(layer).kind);
            return kinds;
          },
          "Kind of each layer; one and the same unless a uniform wrapper held them.")
      .def_prop_ro(
          "layer_page_bytes",
          [](const GroupRow& row) {
            const ResolvedGroup& group = row.group();
            std::vector<std::uint64_t> bytes;
            for (std::size_t layer = 0; layer < group.layers.size(); ++layer)
              bytes.push_back(page_size_bytes(group.layer_spec(layer)));
            return bytes;
          },
          "Bytes of one block of each layer on this rank.")
      .def_prop_ro(
          "object_bytes", [](const GroupRow& row) { return row.group().object_bytes(); },
          "Bytes of one block of all layers of this rank: one object in a store.")
      .def_prop_ro(
          "tp_replicated", [](const GroupRow& row) { return row.group().tp_replicated; },
          "Whether every tensor rank holds the same bytes.")
      .def_prop_ro(
          "prefix_cacheable",
          [](const GroupRow& row) { return row.group().traits.prefix_cacheable.get(); },
          "Whether its kind may enter a hash-addressed store.")
      .def_prop_ro(
          "hit", [word](const GroupRow& row) { return word(to_string(row.group().traits.hit)); },
          "Hit rule.")
      .def_prop_ro(
          "window", [](const GroupRow& row) { return row.group().traits.window.get(); },
          "Tokens of the hit rule's window, or 0.")
      .def_prop_ro(
          "save", [word](const GroupRow& row) { return word(to_string(row.group().traits.save)); },
          "Save rule.")
      .def_prop_ro(
          "peer", [word](const GroupRow& row) { return word(to_string(row.group().traits.peer)); },
          "Peer rule.")
      .def_prop_ro(
          "replay_tokens",
          [](const GroupRow& row) { return row.group().traits.replay_tokens.get(); },
          "Tokens recomputed after a hit before the cache is whole again.")
      .def_prop_ro(
          "fine_grained_lookup",
          [](const GroupRow& row) { return row.group().traits.fine_grained_lookup.get(); },
          "Whether hits may end inside a block.")
      .def_prop_ro(
          "enable_kv_transfer", [](const GroupRow& row) { return row.group().enable_kv_transfer; },
          "Whether the engine lets it be transferred.")
      .def_prop_ro(
          "is_eagle_group", [](const GroupRow& row) { return row.group().is_eagle_group; },
          "Whether the draft model makes a hit drop its last block.")
      .def_prop_ro(
          "host_resident", [](const GroupRow& row) { return row.group().host_resident; },
          "Whether it lives in host memory.")
      .def_prop_ro(
          "role", [](const GroupRow& row) { return row.group().role; },
          "The engine's word for its role.")
      .def_prop_ro(
          "stages", [](const GroupRow& row) { return row.group().stages; },
          "Pipeline stages that hold layers of it, ascending.")
      .def("__repr__", [](const GroupRow& row) {
        return "Group(id=" + std::to_string(raw(row.id)) + ", kind='" + row.group().spec.kind +
               "')";
      });
}

void bind_projection(nb::module_& module) {
  nb::class_<Projection>(module, "Projection",
                         "Splits groups once: all >= transfer >= store, each in the engine's "
                         "order. Immutable; any thread "
                         "may use it.")
      .def(nb::new_(&make_projection), "config"_a, "registry"_a = nb::none(),
           R"(Resolves a config.

Args:
    config: The engine's groups.
    registry: Known kinds; None for the built-in ones.

Raises:
    ConfigError: With every problem at once.)")
      .def_static(
          "check",
          [](const CacheConfig& config, const std::optional<SpecRegistry>& registry) {
            return to_python(Projection::check(config, or_builtin(registry)));
          },
          "config"_a, "registry"_a = nb::none(),
          nb::sig("def check(config: CacheConfig, registry: SpecRegistry | None = None) -> "
                  "list[Problem]"),
          R"(What is wrong with a config, without raising.

Args:
    config: What the engine told.
    registry: The kinds of cache; None for the built-in ones.

Returns:
    Every problem; an empty list when there is none.)")
      .def_prop_ro("num_groups", &Projection::num_groups, "Number of all groups.")
      .def_prop_ro("num_transfer_groups", &Projection::num_transfer_groups,
                   "Number of transferable groups.")
      .def_prop_ro("num_store_groups", &Projection::num_store_groups, "Number of storable groups.")
      .def_prop_ro("num_blocks", &Projection::num_blocks,
                   "Blocks of the pool, with the null block.")
      .def_prop_ro("kv_layout", &Projection::kv_layout, "Name of the layout.")
      .def_prop_ro("key_schema", &Projection::key_schema, "Name of the key schema.")
      .def_prop_ro("namespace", &Projection::key_namespace, "Tenant; part of every key.")
      .def_prop_ro("parallel", &Projection::parallel, nb::rv_policy::copy,
                   "Sizes of the parallel arrangement.")
      .def_prop_ro("scheduler_block_size", &Projection::scheduler_block_size,
                   "S: requests are saved in steps of so many tokens.")
      .def_prop_ro("hash_block_size", &Projection::hash_block_size, "Tokens per block hash.")
      .def_prop_ro("hit_alignment", &Projection::hit_alignment,
                   "Hits end on multiples of it, in tokens.")
      .def_prop_ro("retention_interval", &Projection::retention_interval,
                   "The engine's retention interval in tokens, or None.")
      .def_prop_ro("model_total_kv_heads", &Projection::model_total_kv_heads,
                   "KV heads of the model as the engine counts them, or None.")
      .def_prop_ro("replay_tokens", &Projection::replay_tokens,
                   "Tokens that stay to be computed after a hit, at least 1.")
      .def("max_hit", &Projection::max_hit, "prompt_tokens"_a,
           "The longest hit that a prompt may have, in tokens.")
      .def_prop_ro(
          "transfer_group_ids",
          [](const Projection& p) { return ids_of<TransferIndex>(p, p.num_transfer_groups()); },
          "Ids of the transferable groups, in TransferIndex order.")
      .def_prop_ro(
          "store_group_ids",
          [](const Projection& p) { return ids_of<StoreIndex>(p, p.num_store_groups()); },
          "Ids of the storable groups, in StoreIndex order.")
      .def(
          "groups",
          [](const ProjectionPtr& projection) {
            std::vector<GroupRow> rows;
            for (const GroupId id : indices<GroupId>(projection->num_groups()))
              rows.push_back({projection, id});
            return rows;
          },
          "A row for each group, in GroupId order.")
      .def(
          "group",
          [](const ProjectionPtr& p, const PyGroupId& id) {
            return GroupRow{p, checked(id, p->num_groups(), "GroupId")};
          },
          "index"_a, R"(The row of a group, found by any of its three indices.

Args:
    index: One of them.

Raises:
    IndexError: There is no such group.)")
      .def(
          "group",
          [](const ProjectionPtr& p, const PyTransferIndex& index) {
            return GroupRow{p,
                            p->group_id(checked(index, p->num_transfer_groups(), "TransferIndex"))};
          },
          "index"_a)
      .def(
          "group",
          [](const ProjectionPtr& p, const PyStoreIndex& index) {
            return GroupRow{p, p->group_id(checked(index, p->num_store_groups(), "StoreIndex"))};
          },
          "index"_a)
      .def(
          "group_id",
          [](const Projection& p, const PyTransferIndex& index) {
            return box(p.group_id(checked(index, p.num_transfer_groups(), "TransferIndex")));
          },
          "index"_a, R"(The engine's id of a group in a projection.

Args:
    index: Its position there.

Raises:
    IndexError: There is no such group.)")
      .def(
          "group_id",
          [](const Projection& p, const PyStoreIndex& index) {
            return box(p.group_id(checked(index, p.num_store_groups(), "StoreIndex")));
          },
          "index"_a)
      .def(
          "transfer_index",
          [](const Projection& p, const PyGroupId& id) {
            return box_or_none(p.transfer_index(checked(id, p.num_groups(), "GroupId")));
          },
          "id"_a, nb::sig("def transfer_index(self, id: GroupId) -> TransferIndex | None"),
          R"(Position in the transfer projection; None means: skip the group, never shift.

Args:
    id: The engine's id.

Raises:
    IndexError: There is no such group.)")
      .def(
          "store_index",
          [](const Projection& p, const PyGroupId& id) {
            return box_or_none(p.store_index(checked(id, p.num_groups(), "GroupId")));
          },
          "id"_a, nb::sig("def store_index(self, id: GroupId) -> StoreIndex | None"),
          R"(Position in the store projection; None means: skip the group, never shift.

Args:
    id: The engine's id.

Raises:
    IndexError: There is no such group.)")
      .def(
          "why_not_stored",
          [](const Projection& p, const PyGroupId& id) {
            return p.why_not_stored(checked(id, p.num_groups(), "GroupId"));
          },
          "id"_a, R"(Why a group is not storable; empty when it is.

Args:
    id: The engine's id.

Raises:
    IndexError: There is no such group.)")
      .def_prop_ro(
          "digest", [](const Projection& p) { return to_hex(p.digest()); },
          "32 hex digits over what every rank must see alike.")
      .def_prop_ro(
          "digest_facts", [](const Projection& p) { return to_pairs(p.digest_facts()); },
          "What the digest covers, as (name, value).")
      .def_static(
          "describe_mismatch",
          [](const std::vector<std::pair<std::string, std::string>>& ours,
             const std::vector<std::pair<std::string, std::string>>& theirs) {
            return Projection::describe_mismatch(to_facts(ours), to_facts(theirs));
          },
          "ours"_a, "theirs"_a, R"(A table of both sides' facts with the differing rows marked.

Args:
    ours: ``digest_facts`` of this side.
    theirs: ``digest_facts`` of the other.

Returns:
    Text of several lines.)")
      .def("__repr__", [](const Projection& p) {
        return "Projection(groups=" + std::to_string(p.num_groups()) +
               ", transfer=" + std::to_string(p.num_transfer_groups()) +
               ", store=" + std::to_string(p.num_store_groups()) + ", digest='" +
               to_hex(p.digest()) + "')";
      });

  module.def(
      "validate_store",
      [](const Projection& projection) { return to_python(validate_store(projection)); },
      "projection"_a, nb::sig("def validate_store(projection: Projection) -> list[Problem]"),
      "Every reason why a projection cannot be used with a store; an empty list when it can.");
  module.def(
      "validate_peer",
      [](const Projection& projection) { return to_python(validate_peer(projection)); },
      "projection"_a, nb::sig("def validate_peer(projection: Projection) -> list[Problem]"),
      "Every reason why a projection cannot be used with a peer; an empty list when it can.");
}

}  // namespace

void bind_group(nb::module_& module) {
  bind_ids(module);
  bind_config(module);
  bind_row(module);
  bind_projection(module);
}

}  // namespace kvprism::bindings
