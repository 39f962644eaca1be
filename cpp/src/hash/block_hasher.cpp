#include "kvprism/hash/block_hasher.h"

// clang-format off
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>
// clang-format on

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/utf8.h"
#include "hash/cbor.h"
#include "hash/sha256.h"
#include "kvprism/base/error.h"

namespace kvprism {
namespace {

namespace cbor = detail::cbor;

constexpr std::pair<BlockHashAlgorithm, std::string_view> kNames[] = {
    {BlockHashAlgorithm::kSha256Cbor, "sha256_cbor"},
    {BlockHashAlgorithm::kXxhashCbor, "xxhash_cbor"},
};

// What vLLM's chain begins with when nothing else is set.
constexpr std::string_view kDefaultSeed = "vllm-none-hash";

std::uint32_t width_of(BlockHashAlgorithm algorithm) {
  return algorithm == BlockHashAlgorithm::kSha256Cbor ? detail::kSha256Bytes
                                                      : sizeof(XXH128_canonical_t);
}

void need_utf8(ProblemList& problems, std::string path, std::string_view text) {
  if (const auto at = detail::invalid_utf8(text)) {
    problems.add(std::move(path), "byte " + std::to_string(*at) + " is wrong", "text in UTF-8");
  }
}

}  // namespace

std::string_view to_string(BlockHashAlgorithm algorithm) noexcept {
  for (const auto& [value, name] : kNames)
    if (value == algorithm) return name;
  return "unknown";
}

std::optional<BlockHashAlgorithm> block_hash_algorithm_from_string(std::string_view name) noexcept {
  for (const auto& [value, known] : kNames)
    if (known == name) return value;
  return std::nullopt;
}

BlockHasher::BlockHasher(const BlockHasherOptions& options)
    : algorithm_(options.algorithm),
      unit_(options.hash_block_size),
      width_(width_of(options.algorithm)) {
  ProblemList problems;
  if (unit_ == 0) problems.add("hash_block_size", "0", "at least 1 token");
  if (!options.seed && algorithm_ != BlockHashAlgorithm::kSha256Cbor) {
    problems.add("seed", "none", "a seed, as " + std::string(to_string(algorithm_)) + " has no own",
                 "give every process the same, e.g. that of PYTHONHASHSEED");
  }
  if (options.seed) need_utf8(problems, "seed", *options.seed);
  problems.throw_if_any(ErrorCode::kInvalidConfig, "block hasher");
  cbor::text(message_, options.seed ? std::string_view(*options.seed) : kDefaultSeed);
  digest(none_hash_.data());
}

void BlockHasher::digest(std::uint8_t* out) const noexcept {
  if (algorithm_ == BlockHashAlgorithm::kSha256Cbor) {
    detail::sha256(message_.data(), message_.size(), out);
    return;
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(message_.data(), message_.size()));
  std::memcpy(out, canonical.digest, sizeof canonical.digest);
}

void BlockHasher::check(std::uint32_t first, std::span<const std::uint8_t> parent,
                        const HashExtras& extras) const {
  ProblemList problems;
  if (first % unit_ != 0) {
    problems.add("first", std::to_string(first), "a multiple of " + std::to_string(unit_));
  }
  if (parent.size() != (first == 0 ? 0 : width_)) {
    problems.add("parent", std::to_string(parent.size()) + " bytes",
                 first == 0 ? std::string("nothing, as token 0 has no unit before it")
                            : std::to_string(width_) + " bytes, the hash of the unit before");
  }
  if (extras.lora) {
    need_utf8(problems, "lora.name", extras.lora->name);
    need_utf8(problems, "lora.path", extras.lora->path);
  }
  need_utf8(problems, "cache_salt", extras.cache_salt);
  if (extras.embed_bytes_per_token != 0 &&
      extras.prompt_embeds.size() % extras.embed_bytes_per_token != 0) {
    problems.add("prompt_embeds", std::to_string(extras.prompt_embeds.size()) + " bytes",
                 "rows of " + std::to_string(extras.embed_bytes_per_token) + " bytes");
  }
  std::uint64_t free_from = 0;
  for (std::size_t i = 0; i < extras.items.size(); ++i) {
    const MultimodalItem& item = extras.items[i];
    const auto path = [i](const char* member) {
      return "items[" + std::to_string(i) + "]." + member;
    };
    need_utf8(problems, path("identifier"), item.identifier);
    if (item.length == 0) problems.add(path("length"), "0", "at least 1 token");
    if (item.offset < free_from) {
      problems.add(path("offset"), std::to_string(item.offset),
                   "at least " + std::to_string(free_from) + ", where the item before it ends");
    }
    free_from = std::uint64_t{item.offset} + item.length;
  }
  problems.throw_if_any(ErrorCode::kInvalidArgument, "block hash");
}

// Order and shape are vLLM's: the adapter, the items that touch the unit, the salt in the first
// unit, the embeddings.
void BlockHasher::write_extras(std::uint32_t begin, const HashExtras& extras) {
  const std::uint64_t end = std::uint64_t{begin} + unit_;
  const auto first = std::lower_bound(extras.items.begin(), extras.items.end(), begin,
                                      [](const MultimodalItem& item, auto at) {
                                        return std::uint64_t{item.offset} + item.length <= at;
                                      });
  auto last = first;
  while (last != extras.items.end() && last->offset < end) ++last;
  const bool salted = begin == 0 && !extras.cache_salt.empty();
  const bool embedded = extras.embed_bytes_per_token != 0;
  const auto count = static_cast<std::uint64_t>(last - first) + (extras.lora ? 1 : 0) +
                     (salted ? 1 : 0) + (embedded ? 1 : 0);
  if (count == 0) return cbor::null(message_);
  cbor::array(message_, count);
  if (extras.lora) {
    cbor::array(message_, 3);
    cbor::text(message_, "lora");
    cbor::text(message_, extras.lora->name);
    cbor::text(message_, extras.lora->path);
  }
  for (auto item = first; item != last; ++item) {
    cbor::array(message_, 3);
    cbor::text(message_, "mm");
    cbor::text(message_, item->identifier);
    cbor::integer(message_, static_cast<std::int64_t>(item->offset) - begin);
  }
  if (salted) {
    cbor::array(message_, 2);
    cbor::text(message_, "cache_salt");
    cbor::text(message_, extras.cache_salt);
  }
  if (embedded) {
    const std::size_t from =
        std::min(begin * extras.embed_bytes_per_token, extras.prompt_embeds.size());
    const std::size_t bytes =
        std::min(unit_ * extras.embed_bytes_per_token, extras.prompt_embeds.size() - from);
    std::array<std::uint8_t, detail::kSha256Bytes> rows;
    detail::sha256(extras.prompt_embeds.data() + from, bytes, rows.data());
    cbor::array(message_, 2);
    cbor::text(message_, "prompt_embeds");
    cbor::bytes(message_, rows);
  }
}

void BlockHasher::append(std::span<const std::uint32_t> tokens, std::uint32_t first,
                         std::span<const std::uint8_t> parent, const HashExtras& extras,
                         std::vector<std::uint8_t>& hashes) {
  check(first, parent, extras);
  const std::size_t units = tokens.size() / unit_;
  // The parent may lie in `hashes`, which is about to move.
  std::array<std::uint8_t, 32> before = none_hash_;
  std::copy(parent.begin(), parent.end(), before.begin());
  const std::size_t known = hashes.size();
  hashes.resize(known + units * width_);
  std::size_t at = known;
  try {
    for (std::size_t unit = 0; unit < units; ++unit) {
      message_.clear();
      cbor::array(message_, 3);
      cbor::bytes(message_, std::span(before).first(width_));
      cbor::array(message_, unit_);
      for (const std::uint32_t token : tokens.subspan(unit * unit_, unit_))
        cbor::head(message_, cbor::Major::kUnsigned, token);
      write_extras(static_cast<std::uint32_t>(first + unit * unit_), extras);
      digest(before.data());
      std::copy_n(before.begin(), width_, hashes.begin() + static_cast<std::ptrdiff_t>(at));
      at += width_;
    }
  } catch (...) {
    hashes.resize(known);  // zeros would be names of other tokens
    throw;
  }
}

void BlockHasher::extend(std::span<const std::uint32_t> tokens, const HashExtras& extras,
                         std::vector<std::uint8_t>& hashes) {
  const std::size_t known = hashes.size() / width_;
  if (hashes.size() % width_ != 0 || known * unit_ > tokens.size()) {
    fail(ErrorCode::kInvalidArgument, "block hash",
         {"hashes",
          std::to_string(hashes.size()) + " bytes",
          "hashes of " + std::to_string(width_) + " bytes, at most " +
              std::to_string(tokens.size() / unit_) + " of them",
          {}});
  }
  const std::size_t first = known * unit_;
  const std::span<const std::uint8_t> all(hashes);
  append(tokens.subspan(first), static_cast<std::uint32_t>(first),
         known == 0 ? std::span<const std::uint8_t>() : all.last(width_), extras, hashes);
}

}  // namespace kvprism
