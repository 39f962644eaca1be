#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "areas.h"
#include "converters.h"
#include "gil_free.h"
#include "ids.h"
#include "kvprism/key/key_schema.h"
#include "text.h"
#include "whole.h"

namespace kvprism::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Width of a hash in flat bytes, which carry no shape.
constexpr std::uint32_t kFlatHashBytes = 32;

using Maker = std::shared_ptr<const KeySchema>(std::shared_ptr<const Projection>, const KeyFacts&);

template <Maker* kMake>
std::shared_ptr<const KeySchema> make_schema(std::shared_ptr<const Projection> projection,
                                             std::string model, std::string model_revision,
                                             std::string kv_quantization,
                                             std::string hash_algorithm, bool hash_is_stable,
                                             std::string pipeline_split) {
  return kMake(std::move(projection), {.model = std::move(model),
                                       .model_revision = std::move(model_revision),
                                       .kv_quantization = std::move(kv_quantization),
                                       .hash_algorithm = std::move(hash_algorithm),
                                       .pipeline_split = std::move(pipeline_split),
                                       .hash_is_stable = hash_is_stable});
}

std::vector<std::string> keys_of(const KeySchema& schema, const PyStoreIndex& group,
                                 nb::handle hashes, const RankPosition& shard) {
  const StoreIndex index = checked(group, schema.projection().num_store_groups(), "StoreIndex");
  HashListReader reader;
  const HashList list = reader.read(hashes, 0, kFlatHashBytes);
  const GilFree released;
  KeySlots slots;
  for (std::uint32_t i = 0; i < list.count; ++i) schema.append_key(slots, index, shard, list[i]);
  return slots.strings();
}

}  // namespace

void bind_key(nb::module_& module) {
  nb::class_<RankPosition>(module, "RankPosition", "A rank's place in the parallel arrangement.")
      .def(
          "__init__",
          [](RankPosition* self, const Whole<std::uint32_t>& tp, const Whole<std::uint32_t>& pp,
             const Whole<std::uint32_t>& pcp, const Whole<std::uint32_t>& dcp) {
            new (self) RankPosition{tp("tp"), pp("pp"), pcp("pcp"), dcp("dcp")};
          },
          nb::kw_only(), "tp"_a = 0, "pp"_a = 0, "pcp"_a = 0, "dcp"_a = 0, R"(Names a place.

Args:
    tp: Tensor rank, from 0.
    pp: Pipeline rank, from 0.
    pcp: Prefill context rank, from 0.
    dcp: Decode context rank, from 0.

Raises:
    ArgumentError: A number does not fit into 32 bits.)")
      .def_ro("tp", &RankPosition::tp, "Tensor rank.")
      .def_ro("pp", &RankPosition::pp, "Pipeline rank.")
      .def_ro("pcp", &RankPosition::pcp, "Prefill context rank.")
      .def_ro("dcp", &RankPosition::dcp, "Decode context rank.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const RankPosition& p) { return nb::hash(nb::make_tuple(p.tp, p.pp, p.pcp, p.dcp)); })
      .def("__repr__", [](const RankPosition& p) {
        return "RankPosition(tp=" + std::to_string(p.tp) + ", pp=" + std::to_string(p.pp) +
               ", pcp=" + std::to_string(p.pcp) + ", dcp=" + std::to_string(p.dcp) + ")";
      });

  nb::class_<KeySchema>(module, "KeySchema",
                        "Makes the names of objects for save, lookup and load alike. Immutable; "
                        "any thread may use it.")
      .def_static(
          "kvprism", &make_schema<&KeySchema::kvprism>, "projection"_a, nb::kw_only(), "model"_a,
          "model_revision"_a = "", "kv_quantization"_a = "none", "hash_algorithm"_a,
          "hash_is_stable"_a, "pipeline_split"_a = "",
          R"(The schema ``kvp1/<namespace>/<fingerprint>/<tp>.<pp>.<pcp>.<dcp>/<store index>/<hash>``.

Args:
    projection: The groups.
    model: Name or path of the model; not empty.
    model_revision: Version of the weights.
    kv_quantization: How cached values are quantised, e.g. ``fp8_per_tensor``.
    hash_algorithm: The engine's block hash, e.g. ``sha256_cbor``; not empty.
    hash_is_stable: Whether every process hashes alike; False is refused.
    pipeline_split: Which layers each pipeline stage holds, e.g. ``0-15,15-31``, alike on all ranks; needed by
        schema ``kvprism`` with several stages.

Raises:
    ConfigError: With every problem at once.)")
      .def_static("vllm", &make_schema<&KeySchema::vllm>, "projection"_a, nb::kw_only(), "model"_a,
                  "model_revision"_a = "", "kv_quantization"_a = "none", "hash_algorithm"_a,
                  "hash_is_stable"_a, "pipeline_split"_a = "",
                  R"(The keys of vLLM's built-in connector, byte for byte.

They say nothing of revision, quantisation, layout or sizes: all users of the pool must agree.

Args:
    projection: The groups.
    model: Name or path of the model; not empty.
    model_revision: Version of the weights.
    kv_quantization: How cached values are quantised.
    hash_algorithm: The engine's block hash; not empty.
    hash_is_stable: Whether every process hashes alike; False is refused.
    pipeline_split: Which layers each pipeline stage holds, e.g. ``0-15,15-31``, alike on all ranks; needed by
        schema ``kvprism`` with several stages.

Raises:
    ConfigError: With every problem at once; also where the reference's own objects are wrong.)")
      .def_static("make", &make_schema<&KeySchema::make>, "projection"_a, nb::kw_only(), "model"_a,
                  "model_revision"_a = "", "kv_quantization"_a = "none", "hash_algorithm"_a,
                  "hash_is_stable"_a, "pipeline_split"_a = "",
                  R"(The schema that the projection names.

Args:
    projection: The groups.
    model: Name or path of the model; not empty.
    model_revision: Version of the weights.
    kv_quantization: How cached values are quantised.
    hash_algorithm: The engine's block hash; not empty.
    hash_is_stable: Whether every process hashes alike; False is refused.
    pipeline_split: Which layers each pipeline stage holds, e.g. ``0-15,15-31``, alike on all ranks; needed by
        schema ``kvprism`` with several stages.

Raises:
    ConfigError: With every problem at once.)")
      .def_prop_ro(
          "projection",
          [](const KeySchema& schema) { return schema.projection().shared_from_this(); },
          "The groups that keys are made for.")
      .def_prop_ro("name", &KeySchema::name, "Name of the schema.")
      .def_prop_ro("fingerprint", &KeySchema::fingerprint,
                   "32 hex digits over what gives bytes their meaning; empty for schema vllm.")
      .def_prop_ro(
          "facts",
          [](const KeySchema& schema) {
            std::vector<std::pair<std::string, std::string>> pairs;
            for (const DigestFact& fact : schema.facts()) pairs.emplace_back(fact.name, fact.value);
            return pairs;
          },
          "What keys depend on beside ranks, group and hash, as (name, value).")
      .def(
          "shards",
          [](const KeySchema& schema, const PyStoreIndex& group) {
            const auto shards =
                schema.shards(checked(group, schema.projection().num_store_groups(), "StoreIndex"));
            return std::vector<RankPosition>(shards.begin(), shards.end());
          },
          "group"_a, R"(Positions whose shards must all exist for a chunk to count as present.

Args:
    group: Which one.

Raises:
    IndexError: There is no such group.)")
      .def(
          "shard_of",
          [](const KeySchema& schema, const PyStoreIndex& group, const RankPosition& rank) {
            return schema.shard_of(
                checked(group, schema.projection().num_store_groups(), "StoreIndex"), rank);
          },
          "group"_a, "rank"_a, R"(The position under which a rank stores and loads a group.

Args:
    group: Which one.
    rank: The rank's own position.

Returns:
    Its own, or the one that it shares with ranks of equal bytes.

Raises:
    IndexError: There is no such group.)")
      .def(
          "stores",
          [](const KeySchema& schema, const PyStoreIndex& group, const RankPosition& rank,
             std::uint32_t chunk) {
            return schema.stores(
                checked(group, schema.projection().num_store_groups(), "StoreIndex"), rank, chunk);
          },
          "group"_a, "rank"_a, "chunk"_a,
          R"(Whether this rank is the one of those with equal bytes that stores a chunk.

Args:
    group: Which one.
    rank: The rank's own position.
    chunk: Number of the chunk.

Returns:
    True for one of the ranks.

Raises:
    IndexError: There is no such group.)")
      .def("keys", &keys_of, "group"_a, "hashes"_a, "shard"_a = RankPosition{},
           nb::sig("def keys(self, group: StoreIndex, hashes: typing.Any, shard: RankPosition = "
                   "...) -> list[str]"),
           R"(Keys of one shard, one for each hash.

Args:
    group: The group.
    hashes: A list of bytes, an array of shape (count, width), or flat bytes of 32 a hash.
    shard: A rank's position.

Raises:
    ArgumentError: A hash is not 16 to 64 bytes wide, or no rank has the position.)")
      .def("__repr__", [](const KeySchema& schema) {
        return "KeySchema(name='" + std::string(schema.name()) + "', fingerprint='" +
               schema.fingerprint() + "')";
      });

  module.def(
      "rank_position",
      [](const Whole<std::uint32_t>& given, const Projection& projection) {
        const std::uint32_t rank = given("rank");
        const ParallelSizes& parallel = projection.parallel();
        if (rank >= parallel.world()) {
          fail(ErrorCode::kInvalidArgument, "rank",
               {"rank",
                std::to_string(rank),
                "below " + std::to_string(parallel.world()) + " ranks",
                {}});
        }
        return rank_position(Rank{rank}, parallel);
      },
      "rank"_a, "projection"_a,
      nb::sig("def rank_position(rank: int, projection: Projection) -> RankPosition"),
      R"(The place of a rank: tensor ranks next to each other, then prefill context, then pipeline.

Args:
    rank: Below tp x pp x pcp.
    projection: Of which the parallel sizes are taken.

Returns:
    Its position; decode context ranks reuse the tensor ranks, or prefill context and tensor ranks.

Raises:
    ArgumentError: There is no such rank.)");
  module.def(
      "pipeline_split_of",
      [](const std::vector<std::shared_ptr<const Projection>>& stages) {
        return pipeline_split_of(stages);
      },
      "stages"_a, R"(A ``pipeline_split`` for engines that know the layers of every stage.

Equal texts mean the same layers of stored groups on each stage: names, order and specs, those of every member of
a wrapper included.

Args:
    stages: The projection of each stage, in the order of pipeline ranks.

Returns:
    The text, alike on all ranks that give the same.

Raises:
    ArgumentError: There are not as many as ``parallel.pp`` says.)");
}

}  // namespace kvprism::bindings
