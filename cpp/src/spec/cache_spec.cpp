#include "kvprism/spec/cache_spec.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

#include "kvprism/base/error.h"
#include "kvprism/spec/spec_registry.h"
#include "spec/checked_math.h"

namespace kvprism {
namespace {

using detail::saturating_add;
using detail::saturating_mul;

struct DTypeRow {
  DType dtype;
  std::string_view name;
  std::uint32_t bytes;
};

constexpr std::array<DTypeRow, 10> kDTypes{{
    {DType::kFloat32, "float32", 4},
    {DType::kFloat16, "float16", 2},
    {DType::kBFloat16, "bfloat16", 2},
    {DType::kFloat8E4M3, "float8_e4m3fn", 1},
    {DType::kFloat8E5M2, "float8_e5m2", 1},
    {DType::kInt64, "int64", 8},
    {DType::kInt32, "int32", 4},
    {DType::kInt8, "int8", 1},
    {DType::kUInt8, "uint8", 1},
    {DType::kOpaque, "opaque", 1},
}};

static_assert(
    [] {
      for (std::size_t i = 0; i < kDTypes.size(); ++i) {
        if (static_cast<std::size_t>(kDTypes[i].dtype) != i) return false;
      }
      return true;
    }(),
    "rows stand in the order of the enum");

const DTypeRow* row_of(DType dtype) noexcept {
  const auto at = static_cast<std::size_t>(dtype);
  return at < kDTypes.size() ? &kDTypes[at] : nullptr;
}

PageAxes attention_axes(const AttentionPayload& payload, std::uint32_t positions) {
  const std::uint64_t elements = std::uint64_t{payload.head_size} + payload.head_size_v;
  return {payload.num_head_slots.value_or(payload.num_kv_heads), positions,
          payload.state_content_bytes.value_or(saturating_mul(elements, size_of(payload.dtype)))};
}

std::uint64_t state_bytes(const StatePayload& payload) {
  std::uint64_t total = 0;
  const std::size_t count = std::min(payload.shapes.size(), payload.dtypes.size());
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bytes = size_of(payload.dtypes[i]);
    for (const std::uint32_t extent : payload.shapes[i]) bytes = saturating_mul(bytes, extent);
    total = saturating_add(total, bytes);
  }
  return total;
}

}  // namespace

std::uint32_t size_of(DType dtype) noexcept {
  const DTypeRow* const row = row_of(dtype);
  return row == nullptr ? 0 : row->bytes;
}

std::string_view to_string(DType dtype) noexcept {
  const DTypeRow* const row = row_of(dtype);
  return row == nullptr ? std::string_view("unknown") : row->name;
}

std::optional<DType> dtype_from_string(std::string_view name) noexcept {
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

std::vector<std::string_view> dtype_names() {
  std::vector<std::string_view> names;
  names.reserve(kDTypes.size());
  for (const DTypeRow& row : kDTypes) names.push_back(row.name);
  return names;
}

PageAxes page_axes(const CacheSpec& spec) {
  if (const auto* attention = std::get_if<AttentionPayload>(&spec.payload)) {
    return attention_axes(*attention, spec.block_size);
  }
  if (const auto* state = std::get_if<StatePayload>(&spec.payload)) {
    return {.content_bytes = state_bytes(*state)};
  }
  return {.content_bytes = std::get<RawPayload>(spec.payload).page_size_bytes};
}

std::uint64_t unpadded_page_bytes(const CacheSpec& spec) {
  const PageAxes axes = page_axes(spec);
  return saturating_mul(saturating_mul(axes.heads, axes.positions), axes.content_bytes);
}

std::uint64_t page_size_bytes(const CacheSpec& spec) {
  return spec.page_size_padded ? *spec.page_size_padded : unpadded_page_bytes(spec);
}

bool dcp_sharded(const CacheSpec& spec, const SpecRegistry& registry) {
  const bool of_kind = registry.at(spec.kind).dcp_sharded;
  return spec.dcp_sharded.value_or(of_kind);
}

std::uint32_t tokens_per_block(const CacheSpec& spec, const ParallelSizes& parallel,
                               const SpecRegistry& registry) {
  std::uint64_t tokens = spec.block_size;
  if (const auto* attention = std::get_if<AttentionPayload>(&spec.payload)) {
    const std::uint32_t states = attention->states_per_token;
    if (states == 0 || tokens % states != 0) {
      fail(ErrorCode::kInvalidConfig, "tokens per block",
           {"block_size",
            std::to_string(spec.block_size),
            "a multiple of states_per_token, " + std::to_string(states),
            {}});
    }
    tokens = saturating_mul(tokens / states, attention->compression);
  }
  if (dcp_sharded(spec, registry)) tokens = saturating_mul(tokens, parallel.dcp);
  if (tokens > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max())) {
    fail(ErrorCode::kInvalidConfig, "tokens per block",
         {"block_size",
          std::to_string(spec.block_size),
          "a product with compression and dcp of at most 2147483647 tokens",
          {}});
  }
  return static_cast<std::uint32_t>(tokens);
}

}  // namespace kvprism
