// The engine's tables: which blocks a request has, gets and gives back.
#include <algorithm>

#include "sim/engine_impl.h"

namespace kvprism::sim {

void Engine::Impl::poison(BlockId block) {
  for (const EngineRank& rank : ranks) rank.memory->poison(block);
}

BlockId Engine::Impl::take_block() {
  if (pool.free() == 0) {
    const BlockId victim = pool.oldest_cached();
    if (victim == kNullBlock) return kNullBlock;
    cache.erase(victim);
    pool.drop_cached(victim);
    poison(victim);
  }
  return pool.take();
}

void Engine::Impl::drop(BlockId block) {
  const bool keep = cache.holds(block);
  // Poisoned in the event that frees it, so that whoever still reads it is caught.
  if (pool.release(block, keep) && !keep) poison(block);
}

void Engine::Impl::drop_tables(Sequence& sequence) {
  for (auto& table : sequence.tables) {
    for (auto block = table.rbegin(); block != table.rend(); ++block) {
      if (*block != kNullBlock) drop(*block);
    }
    table.clear();
  }
}

// Gives back everything beyond `tokens`, a multiple of the alignment.
void Engine::Impl::truncate(Sequence& sequence, std::uint32_t tokens) {
  for (const GroupModel& group : groups) {
    if (group.kind == GroupModel::Kind::kRing) continue;
    auto& table = sequence.tables[raw(group.id)];
    while (table.size() > group.chunks(tokens)) {
      if (table.back() != kNullBlock) drop(table.back());
      table.pop_back();
    }
  }
}

// Blocks that the next token no longer reads become null, in place.
void Engine::Impl::slide(Sequence& sequence) {
  for (const GroupModel& group : groups) {
    if (group.kind == GroupModel::Kind::kRing) continue;
    auto& table = sequence.tables[raw(group.id)];
    std::uint32_t first = 0;
    std::uint32_t last = group.first_needed(sequence.computed);
    if (group.gap_window != 0) {
      // The prompt stays, and what was generated lately.
      first = group.chunks(sequence.prompt_tokens);
      last = (sequence.computed - std::min(sequence.computed, group.gap_window)) / group.tokens;
    }
    const std::size_t end = std::min<std::size_t>(table.size(), last);
    for (std::size_t chunk = first; chunk < end; ++chunk) {
      if (table[chunk] == kNullBlock) continue;
      drop(table[chunk]);
      table[chunk] = kNullBlock;
    }
  }
}

// The blocks of a hit in the engine's own cache.
void Engine::Impl::adopt_local(Sequence& sequence, std::uint32_t tokens) {
  for (const GroupModel& group : groups) {
    auto& table = sequence.tables[raw(group.id)];
    table.clear();
    if (group.kind == GroupModel::Kind::kRing || tokens == 0) continue;
    table.assign(tokens / group.tokens, kNullBlock);
    for (std::uint32_t chunk = group.first_needed(tokens); chunk < table.size(); ++chunk) {
      table[chunk] = *cache.find(group.id, sequence.trail.hash_of((chunk + 1) * group.tokens));
      pool.reference(table[chunk]);
    }
  }
}

// Takes a block for every entry of `missing`, or none at all.
bool Engine::Impl::add_missing(Sequence& sequence, std::vector<Destination>* taken) {
  if (missing.size() > pool.available()) return false;
  for (Destination& wanted : missing) {
    auto& table = sequence.tables[raw(wanted.group)];
    if (table.size() <= wanted.chunk) table.resize(wanted.chunk + 1, kNullBlock);
    wanted.block = take_block();
    // A state that was handed off stays as it is: the request goes on in another block.
    if (table[wanted.chunk] != kNullBlock) drop(table[wanted.chunk]);
    table[wanted.chunk] = wanted.block;
    if (taken != nullptr) taken->push_back(wanted);
  }
  return true;
}

// What computing tokens [computed, to) and drafts behind them writes.
bool Engine::Impl::allocate(Sequence& sequence, std::uint32_t to) {
  missing.clear();
  const std::uint32_t written = to + proposals(sequence, to);
  for (const GroupModel& group : groups) {
    const auto& table = sequence.tables[raw(group.id)];
    const auto want = [&](std::uint32_t chunk, bool frozen = false) {
      if (chunk >= table.size() || table[chunk] == kNullBlock || frozen)
        missing.push_back({group.id, chunk, {}});
    };
    switch (group.kind) {
      case GroupModel::Kind::kFull:
      case GroupModel::Kind::kWindow:
      case GroupModel::Kind::kChunk:
        for (std::uint32_t chunk = sequence.computed / group.tokens; chunk * group.tokens < written;
             ++chunk)
          want(chunk);
        break;
      case GroupModel::Kind::kState:
        want((to - 1) / group.tokens, sequence.frozen && sequence.computed % group.tokens != 0);
        for (std::uint32_t i = 0; i < group.extra; ++i) want(group.chunks(to) + i);
        break;
      case GroupModel::Kind::kRing:
        want(0);
        break;
    }
  }
  if (!add_missing(sequence, nullptr)) return false;
  sequence.frozen = false;
  return true;
}

// What a load from `local` to `hit` tokens writes; `taken` has the destinations without the ring.
bool Engine::Impl::allocate_load(Sequence& sequence, std::uint32_t local, std::uint32_t hit,
                                 std::vector<Destination>& taken) {
  missing.clear();
  for (const GroupModel& group : groups) {
    if (group.kind == GroupModel::Kind::kRing) continue;
    const std::uint32_t first = std::max(group.first_needed(hit), local / group.tokens);
    for (std::uint32_t chunk = first; chunk < group.chunks(hit); ++chunk)
      missing.push_back({group.id, chunk, {}});
  }
  if (!add_missing(sequence, &taken)) return false;
  missing.clear();
  for (const GroupModel& group : groups) {
    for (std::uint32_t i = 0; i < group.extra; ++i)
      missing.push_back({group.id, group.chunks(hit) + i, {}});
  }
  return add_missing(sequence, nullptr);
}

// Full blocks of tokens [from, to) enter the engine's own cache.
void Engine::Impl::remember(Sequence& sequence, std::uint32_t from, std::uint32_t to) {
  if (!options.local_cache || sequence.uncached) return;
  for (const GroupModel& group : groups) {
    if (group.kind == GroupModel::Kind::kRing) continue;
    const auto& table = sequence.tables[raw(group.id)];
    const bool state = group.kind == GroupModel::Kind::kState;
    for (std::uint32_t chunk = from / group.tokens; chunk < to / group.tokens; ++chunk) {
      const std::uint32_t end = (chunk + 1) * group.tokens;
      if (chunk >= table.size() || table[chunk] == kNullBlock || cache.holds(table[chunk]))
        continue;
      if (state && end != to)
        continue;  // a column that a longer step has passed holds an earlier state
      const auto prefixes = sequence.trail.prefixes(state ? end - 1 : end - group.tokens, end);
      cache.insert(group.id, sequence.trail.hash_of(end), table[chunk],
                   {prefixes.begin(), prefixes.end()});
    }
  }
}

void Engine::Impl::apply_acquired() {
  block_list.clear();
  scheduler->take_acquired(block_list);
  if (block_list.empty()) return;
  observer->acquired(block_list);
  for (const BlockId block : block_list) {
    if (pool.state(block) != BlockPool::State::kUsed)
      fail("a job acquires block " + std::to_string(raw(block)) + ", which nobody uses");
    pool.reference(block);
    ++held[static_cast<std::size_t>(raw(block))];
  }
}

void Engine::Impl::apply_released() {
  block_list.clear();
  scheduler->take_released(block_list);
  if (block_list.empty()) return;
  observer->released(block_list);
  for (const BlockId block : block_list) {
    std::uint32_t& references = held[static_cast<std::size_t>(raw(block))];
    if (references == 0) {
      fail("block " + std::to_string(raw(block)) + " is released more often than it was acquired");
      continue;
    }
    --references;
    if (const auto ghost = ghosts.find(raw(block)); ghost != ghosts.end() && references == 0) {
      for (const EngineRank& rank : ranks) rank.memory->close(ghost->second, block);
      ghosts.erase(ghost);
    }
    drop(block);
  }
}

BlockRows Engine::Impl::rows(const Sequence& sequence) {
  row_list.assign(sequence.tables.begin(), sequence.tables.end());
  return BlockRows(std::span<const std::span<const BlockId>>(row_list));
}

}  // namespace kvprism::sim
