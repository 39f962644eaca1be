#include "kvprism/sim/group_model.h"

#include <algorithm>
#include <numeric>
#include <variant>

#include "kvprism/base/error.h"

namespace kvprism::sim {
namespace {

GroupModel::Kind kind_of(const ResolvedGroup& group) {
  if (group.spec.kind == "full_attention") return GroupModel::Kind::kFull;
  if (group.spec.kind == "sliding_window") return GroupModel::Kind::kWindow;
  if (group.spec.kind == "mamba") return GroupModel::Kind::kState;
  if (group.spec.kind == "circular_buffer") return GroupModel::Kind::kRing;
  fail(ErrorCode::kUnsupported, "simulated engine",
       {"groups[" + std::to_string(raw(group.id)) + "].kind",
        group.spec.kind,
        "full_attention, sliding_window, mamba or circular_buffer",
        {}});
}

PageShape shape_of(const ResolvedGroup& group, GroupModel::Kind kind) {
  PageShape shape;
  shape.group = raw(group.id);
  if (const auto* attention = std::get_if<AttentionPayload>(&group.spec.payload)) {
    shape.kind = kind == GroupModel::Kind::kRing ? PageKind::kRing : PageKind::kPositions;
    shape.heads = attention->num_kv_heads;
    shape.positions = group.spec.block_size;
    shape.content = (attention->head_size + attention->head_size_v) * size_of(attention->dtype);
  } else {
    shape.kind = PageKind::kState;
    shape.content = static_cast<std::uint32_t>(group.page_size_bytes);
  }
  return shape;
}

}  // namespace

std::vector<GroupModel> model_groups(const Projection& projection) {
  std::vector<GroupModel> groups;
  for (const GroupId id : indices<GroupId>(projection.num_groups())) {
    const ResolvedGroup& group = projection.group(id);
    if (group.specs.size() > 1 || group.tokens_per_block != group.spec.block_size) {
      fail(ErrorCode::kUnsupported, "simulated engine",
           {"groups[" + std::to_string(raw(id)) + "]",
            std::to_string(group.specs.size()) + " specs, " +
                std::to_string(group.tokens_per_block) + " tokens in " +
                std::to_string(group.spec.block_size) + " positions",
            "one spec without compression, on one decode context rank",
            {}});
    }
    GroupModel model;
    model.id = id;
    model.kind = kind_of(group);
    model.stored = model.kind != GroupModel::Kind::kRing && group.enable_kv_transfer;
    model.tokens = group.spec.block_size;
    if (group.spec.sliding_window)
      model.window = *group.spec.sliding_window + group.spec.extra_retained_tokens;
    model.replay = group.spec.replay_tokens.value_or(0);
    model.fine =
        (model.kind == GroupModel::Kind::kFull || model.kind == GroupModel::Kind::kState) &&
        projection.hit_alignment() < model.tokens;
    model.layers = static_cast<std::uint32_t>(group.layers.size());
    model.shape = shape_of(group, model.kind);
    if (model.shape.bytes() != group.page_size_bytes) {
      fail(ErrorCode::kUnsupported, "simulated engine",
           {"groups[" + std::to_string(raw(id)) + "].page_size_bytes",
            std::to_string(group.page_size_bytes),
            "an unpadded page of " + std::to_string(model.shape.bytes()) + " bytes",
            {}});
    }
    groups.push_back(model);
  }
  return groups;
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
