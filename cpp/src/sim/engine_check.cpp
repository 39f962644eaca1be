// The engine's judgement of itself: bytes against the oracle, references against the tables.
#include <algorithm>
#include <cstring>

#include "sim/engine_impl.h"

namespace kvprism::sim {

// Bytes of a page that differ from `expected`, which has none of its gaps.
std::uint64_t Engine::Impl::difference(const PageShape& shape, const PageView& page) {
  scratch.resize(shape.bytes());
  copy_page(shape, page, dense_view(shape, scratch.data()));
  if (std::memcmp(scratch.data(), expected.data(), scratch.size()) == 0) return 0;
  std::uint64_t wrong = 0;
  for (std::size_t i = 0; i < scratch.size(); ++i) wrong += scratch[i] != expected[i];
  return wrong;
}

// Bytes of tokens [from, to) in one block that differ from the oracle, over all layers and ranks.
std::uint64_t Engine::Impl::compare(const GroupModel& group, std::uint32_t chunk, BlockId block,
                                    const TokenTrail& trail, std::uint32_t from, std::uint32_t to,
                                    std::uint64_t* bytes) {
  std::uint64_t wrong = 0;
  for (std::uint32_t r = 0; r < ranks.size(); ++r) {
    const std::vector<PageShape>& layers = shapes[r][raw(group.id)];
    for (std::uint32_t layer = 0; layer < layers.size(); ++layer) {
      const PageShape& shape = layers[layer];
      const PageView page = ranks[r].memory->page(group.id, layer, block);
      expected.resize(shape.bytes());
      const PageView wanted = dense_view(shape, expected.data());
      // What the oracle says nothing about counts as right.
      copy_page(shape, page, wanted);
      if (group.kind == GroupModel::Kind::kState) {
        write_state(shape, layer, trail.prefix_at(to - 1), expected.data());
        *bytes += shape.bytes();
      } else if (group.kind == GroupModel::Kind::kRing) {
        for (std::uint32_t at = from; at < to; ++at)
          write_position(shape, layer, at % group.tokens, trail.prefix_at(at), wanted);
        *bytes += std::uint64_t{shape.heads} * (to - from) * shape.content;
      } else {
        write_tokens(shape, layer, from - chunk * group.tokens, trail.prefixes(from, to), wanted);
        *bytes += shape.bytes() * (to - from) / group.tokens;
      }
      wrong += difference(shape, page);
    }
  }
  return wrong;
}

void Engine::Impl::verify(const Sequence& sequence, VerifyResult& result) {
  const std::uint32_t computed = sequence.computed;
  if (computed == 0) return;
  for (const GroupModel& group : groups) {
    const auto& table = sequence.tables[raw(group.id)];
    const auto check = [&](std::uint32_t chunk, std::uint32_t from, std::uint32_t to) {
      if (chunk >= table.size() || table[chunk] == kNullBlock || from >= to) return;
      const std::uint64_t wrong =
          compare(group, chunk, table[chunk], sequence.trail, from, to, &result.bytes);
      if (wrong != 0 && result.mismatched == 0) {
        result.first = "request " + std::to_string(raw(sequence.id)) + ", group " +
                       std::to_string(raw(group.id)) + ", tokens " + std::to_string(from) + ".." +
                       std::to_string(to) + " of " + std::to_string(computed) + ", block " +
                       std::to_string(raw(table[chunk]));
      }
      result.mismatched += wrong;
    };
    switch (group.kind) {
      case GroupModel::Kind::kFull:
      case GroupModel::Kind::kWindow:
      case GroupModel::Kind::kChunk:
        for (std::uint32_t chunk = 0; chunk * group.tokens < computed; ++chunk) {
          check(chunk, chunk * group.tokens, std::min(computed, (chunk + 1) * group.tokens));
        }
        break;
      case GroupModel::Kind::kState:
        // While a step runs, the request may have left a state that was handed off to its job.
        if (in_flight && group.fine && computed % group.tokens != 0) break;
        check((computed - 1) / group.tokens, computed - 1, computed);
        break;
      case GroupModel::Kind::kRing: {
        const std::uint32_t oldest = computed > group.tokens ? computed - group.tokens : 0;
        check(0, std::max(sequence.ring_from, oldest), computed);
        break;
      }
    }
  }
}

std::string Engine::Impl::check_references() const {
  std::vector<std::uint32_t> expected = held;
  const auto add = [&](const Sequence& sequence) {
    for (const auto& table : sequence.tables) {
      for (const BlockId block : table) {
        if (block != kNullBlock) ++expected[static_cast<std::size_t>(raw(block))];
      }
    }
  };
  for (const auto& [id, sequence] : sequences) add(*sequence);
  for (const auto& sequence : draining) add(*sequence);
  for (std::uint32_t b = 1; b < pool.size(); ++b) {
    const BlockId block{static_cast<std::int32_t>(b)};
    const std::uint32_t actual = pool.references(block);
    if (actual != expected[b]) {
      return "block " + std::to_string(b) + " has " + std::to_string(actual) +
             " references, its owners count " + std::to_string(expected[b]);
    }
    const bool used = pool.state(block) == BlockPool::State::kUsed;
    if (pool.state(block) == BlockPool::State::kFree) {
      for (const EngineRank& rank : ranks) {
        if (!rank.memory->is_poisoned(block))
          return "block " + std::to_string(b) + " is free and not poisoned";
      }
    }
    if (used != (actual != 0))
      return "block " + std::to_string(b) + " is in the wrong list of the pool";
  }
  return "";
}

VerifyResult Engine::verify_all() const {
  VerifyResult result;
  Impl& e = *impl_;
  for (const auto& [id, sequence] : e.sequences) {
    if (sequence->phase != Sequence::Phase::kLoading) e.verify(*sequence, result);
  }
  e.cache.for_each([&](BlockId block, const PrefixCache::Entry& entry) {
    const GroupModel& group = e.groups[raw(entry.group)];
    for (std::uint32_t r = 0; r < e.ranks.size(); ++r) {
      const std::vector<PageShape>& layers = e.shapes[r][raw(entry.group)];
      for (std::uint32_t layer = 0; layer < layers.size(); ++layer) {
        const PageShape& shape = layers[layer];
        const PageView page = e.ranks[r].memory->page(entry.group, layer, block);
        e.expected.resize(shape.bytes());
        if (group.kind == GroupModel::Kind::kState) {
          write_state(shape, layer, entry.prefixes[0], e.expected.data());
        } else {
          write_tokens(shape, layer, 0, entry.prefixes, dense_view(shape, e.expected.data()));
        }
        result.bytes += shape.bytes();
        const std::uint64_t wrong = e.difference(shape, page);
        if (wrong != 0 && result.mismatched == 0) {
          result.first = "cached block " + std::to_string(raw(block)) + ", group " +
                         std::to_string(raw(entry.group));
        }
        result.mismatched += wrong;
      }
    }
  });
  return result;
}

std::string Engine::check() const {
  const Impl& e = *impl_;
  if (!e.broken.empty()) return "engine: " + e.broken;
  for (const EngineRank& rank : e.ranks) {
    const std::string difference = rank.memory->first_difference();
    if (!difference.empty()) return "memory: " + difference;
  }
  const std::string references = e.check_references();
  return references.empty() ? "" : "references: " + references;
}

}  // namespace kvprism::sim
