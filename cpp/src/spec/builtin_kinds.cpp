#include "spec/builtin_kinds.h"

#include <algorithm>
#include <cstdint>

#include "spec/checked_math.h"

namespace kvprism::detail {
namespace {

constexpr ParameterSet kNone{};

// Every block from 0 on belongs to the prefix, and a hit may end inside one.
SpecTraits whole_prefix(const CacheSpec&) {
  return {.prefix_cacheable = true,
          .hit = HitRule::kPrefix,
          .window = 0,
          .save = SaveRule::kPositional,
          .peer = PeerRule::kSuffix,
          .replay_tokens = 0,
          .fine_grained_lookup = true};
}

std::uint32_t window_of(const CacheSpec& spec) {
  const std::uint64_t tokens =
      std::uint64_t{spec.sliding_window.value_or(0)} + spec.extra_retained_tokens;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(tokens, kMaxTokens));
}

SpecTraits sliding_window(const CacheSpec& spec) {
  return {.prefix_cacheable = true,
          .hit = HitRule::kWindow,
          .window = window_of(spec),
          .save = SaveRule::kPositional,
          .peer = PeerRule::kWindow,
          .replay_tokens = 0,
          .fine_grained_lookup = false};
}

// A bounded replay computes the window again after a hit, so that no store has to keep it. An
// engine that goes back behind the hit's end for it, as vLLM does, says that nothing must be left.
SpecTraits sliding_window_mla(const CacheSpec& spec) {
  if (!spec.bounded_replay) return sliding_window(spec);
  return {.prefix_cacheable = false,
          .hit = HitRule::kNever,
          .window = 0,
          .save = SaveRule::kNever,
          .peer = PeerRule::kWindow,
          .replay_tokens = spec.replay_tokens.value_or(spec.sliding_window.value_or(0)),
          .fine_grained_lookup = false};
}

// Attention looks back to the start of its chunk and no further.
SpecTraits chunked_local(const CacheSpec& spec) {
  return {.prefix_cacheable = true,
          .hit = HitRule::kChunk,
          .window = spec.attention_chunk_size.value_or(0),
          .save = SaveRule::kPositional,
          .peer = PeerRule::kWindow,
          .replay_tokens = 0,
          .fine_grained_lookup = false};
}

// Cacheable in every mode; that a store needs "align" is a rule of the store
// (store/validate_store.h).
SpecTraits mamba(const CacheSpec&) {
  return {.prefix_cacheable = true,
          .hit = HitRule::kLastState,
          .window = 0,
          .save = SaveRule::kHandOff,
          .peer = PeerRule::kState,
          .replay_tokens = 0,
          .fine_grained_lookup = true};
}

// Bytes that no hash of tokens names: scratch of one request, or states of an encoder.
SpecTraits unhashed(PeerRule peer, std::uint32_t replay_tokens = 0) {
  return {.prefix_cacheable = false,
          .hit = HitRule::kNever,
          .window = 0,
          .save = SaveRule::kNever,
          .peer = peer,
          .replay_tokens = replay_tokens,
          .fine_grained_lookup = false};
}

// A ring travels to a decode instance whole and never enters a store (R01, R14).
SpecTraits circular_buffer(const CacheSpec& spec) {
  return unhashed(PeerRule::kWhole, spec.replay_tokens.value_or(0));
}
SpecTraits cross_attention(const CacheSpec&) { return unhashed(PeerRule::kWhole); }
SpecTraits nothing_to_move(const CacheSpec&) { return unhashed(PeerRule::kNone); }

}  // namespace

std::vector<SpecKind> builtin_kinds() {
  using P = SpecParameter;
  constexpr PayloadKind attention = PayloadKind::kAttention;
  constexpr PayloadKind raw_bytes = PayloadKind::kRaw;
  constexpr ParameterSet window{P::kSlidingWindow};
  constexpr ParameterSet chunk{P::kAttentionChunk};
  constexpr ParameterSet rswa{P::kRswaWindow};
  constexpr ParameterSet sink{P::kSinkLength};
  constexpr ParameterSet fixed_table{P::kBlocksPerRequest};
  constexpr ParameterSet retained{P::kExtraRetained};
  constexpr ParameterSet replayed{P::kExtraRetained, P::kBoundedReplay};
  // name, payload, needs, allows, dcp_sharded, latent, traits
  return {
      {"full_attention", attention, kNone, kNone, true, false, whole_prefix},
      {"mla_attention", attention, kNone, kNone, true, true, whole_prefix},
      {"hidden_state", attention, kNone, kNone, true, true, whole_prefix},
      {"rswa", attention, rswa, kNone, true, false, whole_prefix},
      {"sink_full_attention", attention, sink, kNone, true, false, whole_prefix},
      {"chunked_local_attention", attention, chunk, kNone, true, false, chunked_local},
      {"sliding_window", attention, window, retained, true, false, sliding_window},
      {"sliding_window_mla", attention, window, replayed, true, true, sliding_window_mla},
      {"circular_buffer", attention, kNone, kNone, false, false, circular_buffer},
      {"mamba", PayloadKind::kState, kNone, kNone, false, false, mamba},
      {"encoder_only_attention", attention, kNone, kNone, false, false, nothing_to_move},
      {"cross_attention", attention, kNone, kNone, false, false, cross_attention},
      {"hisparse_hot", raw_bytes, fixed_table, kNone, false, false, nothing_to_move},
      {"hisparse_resident", raw_bytes, kNone, kNone, false, false, nothing_to_move},
  };
}

}  // namespace kvprism::detail
