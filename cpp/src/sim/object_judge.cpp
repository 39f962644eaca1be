#include "sim/object_judge.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

namespace kvprism::sim {
namespace {

bool parse_hash(std::string_view text, BlockHash& out) {
  if (text.size() != out.size() * 2) return false;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const char* const at = text.data() + 2 * i;
    if (std::from_chars(at, at + 2, out[i], 16).ptr != at + 2) return false;
  }
  return true;
}

std::string number(std::uint64_t value) { return std::to_string(value); }

// The first chunk that must be stored for a hit of `length` tokens: a window of one token needs
// none, and an object proves the hit all the same, as of a window of a few (D1).
std::uint32_t first_proving(const GroupModel& group, std::uint32_t length) noexcept {
  if (group.kind != GroupModel::Kind::kWindow || group.window != 1)
    return group.first_needed(length);
  return length == 0 ? 0 : (length - 1) / group.tokens;
}

}  // namespace

ObjectJudge::ObjectJudge(std::vector<GroupModel> whole, std::vector<std::vector<GroupModel>> stages,
                         WorldShape shape)
    : groups_(std::move(whole)), stages_(std::move(stages)), shape_(std::move(shape)) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const GroupModel& group = groups_[g];
    if (!group.stored) continue;
    stored_.push_back(&group);
    if (group.family != g) continue;
    ++families_;
    if (group.draft) ++draft_families_;
  }
  seen_.resize(stored_.size());
  for (std::size_t stored = 0; stored < stored_.size(); ++stored) {
    std::uint32_t& all = everywhere_.emplace_back(0);
    const std::uint32_t tensor_ranks = shape_.tp / sharing(stored);
    for (std::uint32_t stage = 0; stage < stages_.size(); ++stage) {
      const std::uint32_t ranks = tensor_ranks * shape_.pcp;
      const std::uint32_t of_stage = ((1u << ranks) - 1) << (stage * ranks);
      if (has_place({.stored = stored, .stage = stage})) all |= of_stage;
    }
  }
}

bool ObjectJudge::bare_stages() const noexcept {
  for (std::uint32_t stage = 0; stage < stages_.size(); ++stage) {
    for (std::size_t stored = 0; stored < stored_.size(); ++stored) {
      if (!holds(stage, stored)) return true;
    }
  }
  return false;
}

void ObjectJudge::learn(std::span<const std::uint8_t> hash, std::span<const std::uint32_t> tokens) {
  BlockHash key;
  if (hash.size() != key.size()) return;
  std::memcpy(key.data(), hash.data(), key.size());
  std::vector<std::uint32_t>& prefix = prefixes_[key];
  if (prefix.empty()) prefix.assign(tokens.begin(), tokens.end());
}

std::string ObjectJudge::read_key(std::string_view key, ObjectPlace& place) const {
  const char mark = shape_.vllm_keys ? '@' : '/';
  std::string_view rest = key;
  const auto take = [&]() {
    const std::size_t at = rest.rfind(mark);
    const std::string_view part = at == std::string_view::npos ? rest : rest.substr(at + 1);
    rest = rest.substr(0, at == std::string_view::npos ? 0 : at);
    return part;
  };
  const auto number_in = [&](std::string_view part, std::string_view name, std::uint32_t& out) {
    if (!part.starts_with(name)) return false;
    part.remove_prefix(name.size());
    const auto end = std::from_chars(part.data(), part.data() + part.size(), out);
    return end.ec == std::errc() && end.ptr == part.data() + part.size();
  };
  const std::string shown(key);
  if (!parse_hash(take(), place.hash)) return "a key without a hash: " + shown;
  std::uint32_t index = UINT32_MAX;
  if (!number_in(take(), shape_.vllm_keys ? "group:" : "", index) || index >= stored_.size())
    return "a key of no stored group: " + shown;
  place.stored = index;
  std::uint32_t dcp = 0;
  if (shape_.vllm_keys) {
    if (!number_in(take(), "pp_rank:", place.stage) || !number_in(take(), "dcp", dcp) ||
        !number_in(take(), "pcp", place.pcp) || !number_in(take(), "tp_rank:", place.shard)) {
      return "a key of no rank: " + shown;
    }
  } else {
    std::array<std::uint32_t*, 4> parts{&place.shard, &place.stage, &place.pcp, &dcp};
    const std::string_view ranks = take();
    const char* at = ranks.data();
    for (std::uint32_t* part : parts) {
      at = std::from_chars(at, ranks.data() + ranks.size(), *part).ptr;
      if (at != ranks.data() + ranks.size()) ++at;
    }
  }
  if (place.stage >= stages_.size() || place.shard >= shape_.tp / sharing(index) ||
      place.pcp >= shape_.pcp || dcp != context_rank(place)) {
    return "a key of no rank: " + shown;
  }
  return "";
}

std::string ObjectJudge::check(std::string_view key, std::span<const std::byte> bytes) {
  ++checked_;
  ObjectPlace place;
  std::string wrong_key = read_key(key, place);
  if (!wrong_key.empty()) return wrong_key;
  const auto prefix = prefixes_.find(place.hash);
  if (prefix == prefixes_.end()) return "a key whose hash nobody made: " + std::string(key);
  const std::uint32_t tensor_ranks = shape_.tp / sharing(place.stored);
  seen_[place.stored][place.hash] |=
      1u << ((place.stage * shape_.pcp + place.pcp) * tensor_ranks + place.shard);

  const GroupModel& group = stages_[place.stage][raw(stored_[place.stored]->id)];
  const std::vector<std::uint32_t>& tokens = prefix->second;
  const std::string what =
      "group " + number(raw(group.id)) + " at " + number(tokens.size()) + " tokens";
  if (tokens.size() % (group.fine ? shape_.alignment : group.tokens) != 0)
    return "an object of " + what + ", which ends no block: " + std::string(key);
  if (!has_place(place)) return "an object of " + what + ", of which its stage holds no layers";
  if (group.layers() == 0) return check_bare(place.stage, bytes);
  std::uint64_t size = 0;
  for (const std::uint64_t part : group.moved_bytes) size += part;
  if (bytes.size() != size) {
    return "an object of " + what + " has " + number(bytes.size()) + " bytes instead of " +
           number(size);
  }
  Prefix state = kEmptyPrefix;
  std::vector<Prefix> states;
  for (std::uint32_t at = 0; at < tokens.size(); ++at) {
    state = extend(state, at, tokens[at]);
    if (at >= (tokens.size() - 1) / group.tokens * group.tokens) states.push_back(state);
  }
  ++checked_kinds_[group.name];
  // What lies behind the last token of the prefix, or with schema vllm pads a page, may be
  // anything.
  expected_.assign(bytes.begin(), bytes.end());
  for (std::uint32_t layer = 0; layer < group.layers(); ++layer) {
    const PageShape shape = group.shape(layer, place.shard * sharing(place.stored), place.pcp);
    const PageView page = page_in_object(group, layer, expected_.data());
    if (group.kind == GroupModel::Kind::kState) {
      write_state(shape, layer, state, page.base);
    } else {
      write_tokens(shape, layer, 0, states, page);
    }
  }
  const auto wrong = std::mismatch(expected_.begin(), expected_.end(), bytes.begin()).first;
  if (wrong == expected_.end()) return "";
  return "an object of " + what + " is wrong from byte " +
         number(static_cast<std::uint64_t>(wrong - expected_.begin()));
}

// The rows of a block that no layer of its group is in: other groups' layers are, and none of them
// has written to it.
std::string ObjectJudge::check_bare(std::uint32_t stage, std::span<const std::byte> bytes) const {
  std::uint64_t size = 0;
  for (std::size_t stored = 0; stored < stored_.size() && size == 0; ++stored) {
    for (const std::uint64_t part : stages_[stage][raw(stored_[stored]->id)].moved_bytes)
      size += part;
  }
  if (bytes.size() != size) {
    return "an object without layers has " + number(bytes.size()) + " bytes instead of the " +
           number(size) + " of other groups' layers";
  }
  const auto written =
      std::find_if(bytes.begin(), bytes.end(), [](std::byte byte) { return byte != kPoison; });
  if (written == bytes.end()) return "";
  return "an object without layers is of a block that somebody has written to";
}

// In the order of the layout's name, without the blocks.
PageView ObjectJudge::page_in_object(const GroupModel& group, std::uint32_t layer,
                                     std::byte* object) const {
  const PageShape& shape = group.shapes[layer];
  std::uint64_t before = 0;
  for (std::uint32_t l = 0; l < layer; ++l) before += group.moved_bytes[l];
  PageView page = dense_view(shape, object + before);
  if (shape_.layout.find('N') < shape_.layout.find('H')) {
    page.head_stride = shape.content;
    page.slot_stride = std::uint64_t{shape.content} * shape.heads;
  }
  if (shape_.layout.find('H') < shape_.layout.find('L')) {
    // Every layer of one head, and then of the next; all layers have as many heads.
    page.head_stride = 0;
    for (const PageShape& other : group.shapes)
      page.head_stride += std::uint64_t{other.positions} * other.content;
    page.base = object + before / shape.heads;
  }
  return page;
}

void ObjectJudge::forget_stored() {
  for (auto& hashes : seen_) hashes.clear();
}

bool ObjectJudge::seen(StoreIndex group, std::span<const std::uint8_t> hash) const {
  BlockHash key;
  if (hash.size() != key.size()) return false;
  std::memcpy(key.data(), hash.data(), key.size());
  return seen(raw(group), key);
}

bool ObjectJudge::seen(std::size_t stored, const BlockHash& hash) const {
  const auto found = seen_[stored].find(hash);
  return found != seen_[stored].end() && found->second == everywhere_[stored];
}

std::span<const std::uint32_t> ObjectJudge::tokens_of(const BlockHash& hash) const {
  const auto found = prefixes_.find(hash);
  return found == prefixes_.end() ? std::span<const std::uint32_t>() : found->second;
}

bool ObjectJudge::has_chunk(std::size_t stored, const TokenTrail& trail, std::uint32_t chunk,
                            std::uint32_t tokens, std::uint32_t most) const {
  const GroupModel& group = *stored_[stored];
  const std::uint32_t end = (chunk + 1) * group.tokens;
  if (end <= tokens) return seen(stored, trail.hash_of(end));
  const bool state = group.kind == GroupModel::Kind::kState;
  const std::uint32_t last = state ? tokens : std::max(tokens, std::min(end, most));
  for (std::uint32_t mark = tokens; mark <= last; mark += shape_.alignment) {
    if (seen(stored, trail.hash_of(mark))) return true;
  }
  return false;
}

// A draft's hit is followed by the object of the next unit, up to a block.
bool ObjectJudge::lacks_behind(std::size_t stored, const TokenTrail& trail, std::uint32_t tokens,
                               std::uint32_t most, Behind behind, std::uint32_t& chunk) const {
  const GroupModel& group = *stored_[stored];
  if (behind == Behind::kNothing || !group.draft || group.kind == GroupModel::Kind::kState)
    return false;
  const bool prefix = group.kind == GroupModel::Kind::kFull;
  // With several of them, states among them, one may have shown its object behind a longer prefix;
  // and behind the end of an attention chunk there is nothing to show.
  const bool chunked = group.kind == GroupModel::Kind::kChunk;
  if (behind == Behind::kCertain && !prefix && (chunked || draft_families_ > 1)) return false;
  const std::uint32_t end = tokens + (group.fine ? shape_.alignment : group.tokens);
  chunk = tokens / group.tokens;
  // No search is certain of what it cannot look at.
  if (behind == Behind::kAll && end > most) return true;
  // Of a window that reaches the first token the search aligns before it takes the block off.
  if (behind == Behind::kAll && group.kind == GroupModel::Kind::kWindow &&
      group.tokens < shape_.step && first_proving(group, end) == 0) {
    return true;
  }
  if (chunked && group.first_needed(end) > chunk) return false;
  if (end > most) return true;
  return !has_chunk(stored, trail, chunk, end, behind == Behind::kAll ? end : most);
}

bool ObjectJudge::lacks(std::size_t stored, const TokenTrail& trail, std::uint32_t local,
                        std::uint32_t tokens, std::uint32_t most, Behind behind,
                        std::uint32_t& chunk) const {
  const GroupModel& group = *stored_[stored];
  for (chunk = first_proving(group, tokens); chunk < group.chunks(tokens); ++chunk) {
    if ((chunk + 1) * group.tokens <= local) continue;
    if (!has_chunk(stored, trail, chunk, tokens, most)) return true;
  }
  return lacks_behind(stored, trail, tokens, most, behind, chunk);
}

std::vector<ObjectJudge::Missing> ObjectJudge::missing(const TokenTrail& trail, std::uint32_t local,
                                                       std::uint32_t tokens, std::uint32_t most,
                                                       Behind behind) const {
  std::vector<Missing> all;
  for (std::size_t s = 0; s < stored_.size(); ++s) {
    std::uint32_t chunk = 0;
    if (lacks(s, trail, local, tokens, most, behind, chunk)) all.push_back({stored_[s]->id, chunk});
  }
  return all;
}

std::uint32_t ObjectJudge::longest(const TokenTrail& trail, std::uint32_t local, std::uint32_t most,
                                   std::uint32_t probed) const {
  // A single family keeps to the bound with its object behind a hit.
  if (families_ == 1) probed = most;
  for (std::uint32_t tokens = most - most % shape_.alignment; tokens > local;
       tokens -= shape_.alignment) {
    bool all = true;
    for (std::size_t s = 0; s < stored_.size() && all; ++s) {
      std::uint32_t chunk = 0;
      // Groups of equal specs are searched as one: what only some have of longer objects is no use.
      all = !lacks(s, trail, local, tokens, tokens, Behind::kNothing, chunk) &&
            !lacks_behind(s, trail, tokens, probed, Behind::kAll, chunk);
    }
    if (all) return tokens;
  }
  return local;
}

std::uint32_t ObjectJudge::shared(const TokenTrail& trail, std::uint32_t local,
                                  std::uint32_t most) const {
  std::uint32_t shared = most - most % shape_.step;
  bool any = false;
  for (std::size_t s = 0; s < stored_.size(); ++s) {
    const GroupModel& group = *stored_[s];
    if (group.kind != GroupModel::Kind::kFull) continue;
    any = true;
    for (std::uint32_t chunk = local / group.tokens; chunk < shared / group.tokens; ++chunk) {
      if (!seen(s, trail.hash_of((chunk + 1) * group.tokens)))
        shared = chunk * group.tokens / shape_.step * shape_.step;
    }
  }
  return any ? shared : 0;
}

}  // namespace kvprism::sim
