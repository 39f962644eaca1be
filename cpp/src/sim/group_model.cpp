#include "kvprism/sim/group_model.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <string_view>
#include <variant>

#include "kvprism/base/error.h"

namespace kvprism::sim {
namespace {

// What each kind's attention looks back to, in the order of kModelKinds.
constexpr std::array<GroupModel::Kind, kModelKinds.size()> kLooksBack{
    GroupModel::Kind::kFull,   GroupModel::Kind::kFull,   GroupModel::Kind::kFull,
    GroupModel::Kind::kFull,   GroupModel::Kind::kFull,   GroupModel::Kind::kChunk,
    GroupModel::Kind::kWindow, GroupModel::Kind::kWindow, GroupModel::Kind::kState,
    GroupModel::Kind::kFull,   GroupModel::Kind::kRing};

std::size_t name_of(const ResolvedGroup& group) {
  const auto found = std::find(kModelKinds.begin(), kModelKinds.end(), group.spec.kind);
  if (found != kModelKinds.end()) return static_cast<std::size_t>(found - kModelKinds.begin());
  std::string known;
  for (const std::string_view name : kModelKinds) {
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  fail(ErrorCode::kUnsupported, "simulated engine",
       {"groups[" + std::to_string(raw(group.id)) + "].kind", group.spec.kind, known, {}});
}

PageShape shape_of(const ResolvedGroup& group, const CacheSpec& spec, GroupModel::Kind kind,
                   std::uint32_t context_ranks) {
  PageShape shape;
  shape.group = raw(group.id);
  if (const auto* attention = std::get_if<AttentionPayload>(&spec.payload)) {
    const bool ring = kind == GroupModel::Kind::kRing;
    shape.kind = ring ? PageKind::kRing : PageKind::kPositions;
    shape.heads = attention->num_head_slots.value_or(attention->num_kv_heads);
    shape.positions = spec.block_size;
    const std::uint32_t elements = attention->head_size + attention->head_size_v;
    shape.content = static_cast<std::uint32_t>(
        attention->state_content_bytes.value_or(elements * size_of(attention->dtype)));
    shape.compression = attention->compression;
    shape.states_per_token = attention->states_per_token;
    // Unless a spec says otherwise, all kinds but rings share.
    shape.context_ranks = ring || !spec.dcp_sharded.value_or(true) ? 1 : context_ranks;
  } else if (const auto* opaque = std::get_if<RawPayload>(&spec.payload)) {
    shape.positions = spec.block_size;
    shape.content = static_cast<std::uint32_t>(opaque->page_size_bytes / spec.block_size);
  } else {
    shape.kind = PageKind::kState;
    shape.content = static_cast<std::uint32_t>(page_size_bytes(spec));
  }
  return shape;
}

}  // namespace

std::vector<GroupModel> model_groups(const Projection& projection) {
  std::vector<GroupModel> groups;
  for (const GroupId id : indices<GroupId>(projection.num_groups())) {
    const ResolvedGroup& group = projection.group(id);
    GroupModel model;
    model.id = id;
    model.name = name_of(group);
    model.kind = kLooksBack[model.name];
    model.stored = model.kind != GroupModel::Kind::kRing && group.enable_kv_transfer;
    for (std::size_t layer = 0; layer < group.layers.size(); ++layer) {
      const CacheSpec& spec = group.layer_spec(layer);
      model.shapes.push_back(shape_of(group, spec, model.kind, projection.parallel().dcp));
      model.page_bytes.push_back(page_size_bytes(spec));
      model.moved_bytes.push_back(projection.key_schema() == "vllm" ? page_size_bytes(spec)
                                                                    : unpadded_page_bytes(spec));
    }
    const bool state = model.kind == GroupModel::Kind::kState;
    // Also of a group that this stage holds no layers of.
    model.tokens =
        state ? group.spec.block_size
              : shape_of(group, group.spec, model.kind, projection.parallel().dcp).tokens();
    if (group.spec.sliding_window)
      model.window = *group.spec.sliding_window + group.spec.extra_retained_tokens;
    if (group.spec.attention_chunk_size) model.window = *group.spec.attention_chunk_size;
    model.gap_window = group.spec.rswa_window.value_or(0);
    model.prefill_ranks = projection.parallel().pcp;
    model.replay = group.spec.replay_tokens.value_or(0);
    if (const auto* attention = std::get_if<AttentionPayload>(&group.spec.payload)) {
      const std::uint32_t held = attention->num_kv_heads * projection.parallel().tp;
      model.replicas = std::max(1u, held / attention->total_num_kv_heads);
    } else if (const auto* alike = std::get_if<StatePayload>(&group.spec.payload)) {
      if (alike->tp_replicated) model.replicas = projection.parallel().tp;
      model.extra = alike->num_speculative_blocks + alike->num_prefill_checkpoint_blocks;
    } else {
      model.replicas = projection.parallel().tp;
    }
    model.family = groups.size();
    for (std::size_t other = 0; other < groups.size() && model.stored; ++other) {
      if (!groups[other].stored || projection.group(groups[other].id).spec != group.spec) continue;
      model.family = other;
      break;
    }
    model.draft = model.stored && group.is_eagle_group;
    model.fine = (model.kind == GroupModel::Kind::kFull || state) &&
                 projection.hit_alignment() < model.tokens;
    groups.push_back(std::move(model));
  }
  for (GroupModel& group : groups) {
    group.draft = std::any_of(groups.begin(), groups.end(), [&](const GroupModel& other) {
      return other.draft && other.family == group.family;
    });
  }
  return groups;
}

bool model_drafts(const std::vector<GroupModel>& groups) noexcept {
  return std::any_of(groups.begin(), groups.end(),
                     [](const GroupModel& group) { return group.draft; });
}

std::uint32_t model_step(const std::vector<GroupModel>& groups) noexcept {
  std::uint32_t step = 1;
  for (const GroupModel& group : groups) {
    if (group.stored) step = std::lcm(step, group.tokens);
  }
  return step;
}

std::uint32_t model_replay(const std::vector<GroupModel>& groups) noexcept {
  std::uint32_t replay = 1;
  for (const GroupModel& group : groups) replay = std::max(replay, group.replay);
  return replay;
}

}  // namespace kvprism::sim
