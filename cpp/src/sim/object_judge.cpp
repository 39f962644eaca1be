#include "sim/object_judge.h"

#include <algorithm>
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

}  // namespace

ObjectJudge::ObjectJudge(std::vector<GroupModel> groups, std::uint32_t ranks,
                         std::uint32_t alignment, std::string layout)
    : groups_(std::move(groups)), ranks_(ranks), alignment_(alignment), layout_(std::move(layout)) {
  for (const GroupModel& group : groups_) {
    if (group.stored) stored_.push_back(&group);
  }
  seen_.resize(stored_.size() * ranks_);
}

void ObjectJudge::learn(std::span<const std::uint8_t> hash, std::span<const std::uint32_t> tokens) {
  BlockHash key;
  if (hash.size() != key.size()) return;
  std::memcpy(key.data(), hash.data(), key.size());
  std::vector<std::uint32_t>& prefix = prefixes_[key];
  if (prefix.empty()) prefix.assign(tokens.begin(), tokens.end());
}

std::string ObjectJudge::check(std::string_view key, std::span<const std::byte> bytes) {
  ++checked_;
  const std::size_t last = key.rfind('/');
  const std::size_t before = last == std::string_view::npos ? last : key.rfind('/', last - 1);
  if (before == std::string_view::npos) return "a key without group and hash: " + std::string(key);
  BlockHash hash;
  if (!parse_hash(key.substr(last + 1), hash)) return "a key without a hash: " + std::string(key);
  std::uint32_t index = UINT32_MAX;
  std::from_chars(key.data() + before + 1, key.data() + last, index);
  if (index >= stored_.size()) return "a key of no stored group: " + std::string(key);
  std::uint32_t rank = UINT32_MAX;
  const std::size_t ahead = key.rfind('/', before - 1);
  std::from_chars(key.data() + ahead + 1, key.data() + before, rank);
  if (ahead == std::string_view::npos || rank >= ranks_)
    return "a key of no rank: " + std::string(key);
  const auto prefix = prefixes_.find(hash);
  if (prefix == prefixes_.end()) return "a key whose hash nobody made: " + std::string(key);
  seen_[index * ranks_ + rank].insert(hash);

  const GroupModel& group = *stored_[index];
  const std::vector<std::uint32_t>& tokens = prefix->second;
  const std::string what =
      "group " + number(raw(group.id)) + " at " + number(tokens.size()) + " tokens";
  if (tokens.size() % (group.fine ? alignment_ : group.tokens) != 0)
    return "an object of " + what + ", which ends no block: " + std::string(key);
  std::uint64_t size = 0;
  for (const std::uint64_t page : group.page_bytes) size += page;
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
  // What lies behind the last token of the prefix, or pads a page, may be anything.
  expected_.assign(bytes.begin(), bytes.end());
  for (std::uint32_t layer = 0; layer < group.layers(); ++layer) {
    const PageShape shape = group.shape(layer, rank);
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

// In the order of the layout's name, without the blocks.
PageView ObjectJudge::page_in_object(const GroupModel& group, std::uint32_t layer,
                                     std::byte* object) const {
  const PageShape& shape = group.shapes[layer];
  std::uint64_t before = 0;
  for (std::uint32_t l = 0; l < layer; ++l) before += group.page_bytes[l];
  PageView page = dense_view(shape, object + before);
  if (layout_.find('N') < layout_.find('H')) {
    page.head_stride = shape.content;
    page.slot_stride = std::uint64_t{shape.content} * shape.heads;
  }
  if (layout_.find('H') < layout_.find('L')) {
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
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    if (!seen_[stored * ranks_ + rank].contains(hash)) return false;
  }
  return true;
}

bool ObjectJudge::has_chunk(std::size_t stored, const TokenTrail& trail, std::uint32_t chunk,
                            std::uint32_t tokens, std::uint32_t most) const {
  const GroupModel& group = *stored_[stored];
  const std::uint32_t end = (chunk + 1) * group.tokens;
  if (end <= tokens) return seen(stored, trail.hash_of(end));
  const bool state = group.kind == GroupModel::Kind::kState;
  const std::uint32_t last = state ? tokens : std::max(tokens, std::min(end, most));
  for (std::uint32_t mark = tokens; mark <= last; mark += alignment_) {
    if (seen(stored, trail.hash_of(mark))) return true;
  }
  return false;
}

std::optional<ObjectJudge::Missing> ObjectJudge::missing(const TokenTrail& trail,
                                                         std::uint32_t local, std::uint32_t tokens,
                                                         std::uint32_t most) const {
  for (std::size_t s = 0; s < stored_.size(); ++s) {
    const GroupModel& group = *stored_[s];
    for (std::uint32_t chunk = group.first_needed(tokens); chunk < group.chunks(tokens); ++chunk) {
      if ((chunk + 1) * group.tokens <= local) continue;
      if (!has_chunk(s, trail, chunk, tokens, most)) return Missing{group.id, chunk};
    }
  }
  return std::nullopt;
}

std::uint32_t ObjectJudge::longest(const TokenTrail& trail, std::uint32_t local,
                                   std::uint32_t most) const {
  for (std::uint32_t tokens = most - most % alignment_; tokens > local; tokens -= alignment_) {
    // Groups of equal specs are searched as one: what only some have of longer objects is no use.
    if (!missing(trail, local, tokens, tokens)) return tokens;
  }
  return local;
}

}  // namespace kvprism::sim
