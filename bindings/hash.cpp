// Block hashes, for engines that have none of their own.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "areas.h"
#include "converters.h"
#include "gil_free.h"
#include "handles.h"
#include "kvprism/base/error.h"
#include "kvprism/hash/block_hasher.h"
#include "text.h"
#include "whole.h"

namespace kvprism::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using HashArray = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>>;
using Item = std::tuple<std::string, Whole<std::uint32_t>, Whole<std::uint32_t>>;

// Hashing runs without the GIL, in a buffer of the hasher's own.
struct BoundHasher {
  BlockHasher hasher;
  std::atomic<bool> in_use{false};
};

BlockHashAlgorithm algorithm_of(const std::string& name) {
  if (const auto found = block_hash_algorithm_from_string(name)) return *found;
  const std::string_view known[] = {to_string(BlockHashAlgorithm::kSha256Cbor),
                                    to_string(BlockHashAlgorithm::kXxhashCbor)};
  fail(ErrorCode::kInvalidConfig, "block hasher",
       {"algorithm", name, "\"sha256_cbor\" or \"xxhash_cbor\"", suggest(name, known)});
}

HashArray hashes_of(BoundHasher& bound, nb::handle tokens, const Whole<std::uint32_t>& first_token,
                    nb::handle parent, std::optional<std::pair<std::string, std::string>> lora,
                    std::vector<Item> items, std::string cache_salt, nb::handle prompt_embeds) {
  const std::uint32_t first = first_token("first");
  const ExclusiveUse exclusive(bound.in_use, "block hasher");
  BlockHasher& hasher = bound.hasher;
  std::vector<std::uint32_t> ids;
  append_tokens(tokens, "tokens", ids);
  HashExtras extras;
  if (lora) extras.lora = LoraAdapter{std::move(lora->first), std::move(lora->second)};
  for (std::size_t i = 0; i < items.size(); ++i) {
    auto& [identifier, offset, length] = items[i];
    const std::string path = "items[" + std::to_string(i) + "]";
    extras.items.push_back({std::move(identifier), offset((path + ".offset").c_str()),
                            length((path + ".length").c_str())});
  }
  extras.cache_salt = std::move(cache_salt);
  std::optional<BufferView> embeds;
  if (!prompt_embeds.is_none()) {
    embeds.emplace(prompt_embeds, "prompt_embeds");
    if (embeds->dimensions() != 2 || !embeds->contiguous() || embeds->bytes() == 0) {
      fail(ErrorCode::kInvalidArgument, "block hash",
           {"prompt_embeds", embeds->describe(), "a contiguous array, a row a token", {}});
    }
    extras.prompt_embeds = {embeds->data(), embeds->bytes()};
    extras.embed_bytes_per_token = embeds->bytes() / embeds->shape(0);
  }
  auto* const kept = new std::vector<std::uint8_t>();
  const nb::capsule owner(
      kept, [](void* p) noexcept { delete static_cast<std::vector<std::uint8_t>*>(p); });
  const BufferView before(parent, "parent");
  if (!before.contiguous()) {
    fail(ErrorCode::kInvalidArgument, "block hash",
         {"parent", before.describe(), "bytes or a contiguous array", {}});
  }
  {
    const GilFree released;
    hasher.append(ids, first,
                  {reinterpret_cast<const std::uint8_t*>(before.data()), before.bytes()}, extras,
                  *kept);
  }
  return HashArray(kept->data(), {kept->size() / hasher.width(), hasher.width()}, owner);
}

}  // namespace

void bind_hash(nb::module_& module) {
  nb::class_<BoundHasher>(module, "BlockHasher",
                          "Makes block hashes, digest for digest those of vLLM. One thread at a "
                          "time.")
      .def(
          "__init__",
          [](BoundHasher* self, const std::string& algorithm,
             const Whole<std::uint32_t>& hash_block_size, std::optional<std::string> seed) {
            ProblemList problems;
            const std::uint32_t size = hash_block_size("hash_block_size", problems);
            problems.throw_if_any(ErrorCode::kInvalidConfig, "block hasher");
            new (self) BoundHasher{BlockHasher({algorithm_of(algorithm), size, std::move(seed)})};
          },
          "algorithm"_a = "sha256_cbor", nb::kw_only(), "hash_block_size"_a, "seed"_a = nb::none(),
          R"(Prepares an algorithm.

Args:
    algorithm: ``sha256_cbor``, or ``xxhash_cbor``, which is fast but not collision-resistant.
    hash_block_size: Tokens per hash.
    seed: What the chain begins with; vLLM takes PYTHONHASHSEED. None is vLLM's own constant for
        SHA-256, and an error for XXH3.

Raises:
    ConfigError: With every problem at once.)")
      .def_prop_ro(
          "algorithm", [](const BoundHasher& h) { return to_string(h.hasher.algorithm()); },
          "What a key schema calls ``hash_algorithm``.")
      .def_prop_ro(
          "hash_block_size", [](const BoundHasher& h) { return h.hasher.hash_block_size(); },
          "Tokens per hash.")
      .def_prop_ro(
          "width", [](const BoundHasher& h) { return h.hasher.width(); }, "Bytes of a hash.")
      .def_prop_ro(
          "none_hash",
          [](const BoundHasher& h) {
            const auto hash = h.hasher.none_hash();
            return nb::bytes(hash.data(), hash.size());
          },
          "The hash of the empty prefix.")
      .def(
          "hashes", &hashes_of, "tokens"_a, nb::kw_only(), "first"_a = 0,
          "parent"_a = nb::bytes(""), "lora"_a = nb::none(), "items"_a = std::vector<Item>(),
          "cache_salt"_a = "", "prompt_embeds"_a = nb::none(),
          nb::sig(
              "def hashes(self, tokens: typing.Any, *, first: int = 0, parent: typing.Any = b\"\", "
              "lora: tuple[str, str] | None = None, "
              "items: collections.abc.Sequence[tuple[str, int, int]] = (), "
              "cache_salt: str = \"\", prompt_embeds: typing.Any = None) -> "
              "numpy.typing.NDArray[numpy.uint8]"),
          R"(The hashes of whole units, one after the other.

Args:
    tokens: Token ids: a list, a tuple, an array of integers, or bytes of native 32-bit integers.
    first: Where in the request the tokens begin, a multiple of ``hash_block_size``.
    parent: The hash of the unit before, as bytes or a row of what this returns; empty at token 0.
    lora: Name and path of the adapter.
    items: Multimodal items as (identifier, offset, length) in tokens of the request, by offset.
    cache_salt: Keeps this request's cache apart from that of others.
    prompt_embeds: Embeddings in place of token ids, a row a token from the request's first on. Units behind the last row
        still differ from those of a request without any.

Returns:
    Array of shape (units, ``width``).

Raises:
    ArgumentError: With every problem at once, or because another thread is in this call.)");
}

}  // namespace kvprism::bindings
