// What happens outside the scheduling pass: bytes are written, loads end, requests leave.
#include <algorithm>
#include <cstring>
#include <utility>

#include "sim/engine_impl.h"

namespace kvprism::sim {

// Writes the contents of tokens [from, to) into the blocks of every rank.
void Engine::Impl::execute(const Scheduled& work) {
  const Sequence& sequence = *work.sequence;
  for (std::uint32_t r = 0; r < ranks.size(); ++r) {
    SimMemory& memory = *ranks[r].memory;
    for (const GroupModel& group : groups) {
      const auto& table = sequence.tables[raw(group.id)];
      const std::vector<PageShape>& layers = shapes[r][raw(group.id)];
      for (std::uint32_t layer = 0; layer < layers.size(); ++layer) {
        const PageShape& shape = layers[layer];
        const auto both = [&](BlockId block, auto write) {
          write(memory.page(group.id, layer, block));
          const PageView shadow = memory.shadow_page(group.id, layer, block);
          if (shadow.base != nullptr) write(shadow);
        };
        switch (group.kind) {
          case GroupModel::Kind::kFull:
          case GroupModel::Kind::kWindow:
          case GroupModel::Kind::kChunk:
            for (std::uint32_t at = work.from; at < work.to;) {
              const std::uint32_t chunk = at / group.tokens;
              const std::uint32_t end = std::min(work.to, (chunk + 1) * group.tokens);
              both(table[chunk], [&](const PageView& page) {
                write_tokens(shape, layer, at % group.tokens, sequence.trail.prefixes(at, end),
                             page);
              });
              at = end;
            }
            break;
          case GroupModel::Kind::kState:
            both(table[(work.to - 1) / group.tokens], [&](const PageView& page) {
              write_state(shape, layer, sequence.trail.prefix_at(work.to - 1), page.base);
            });
            // Of drafts and checkpoints: states of nobody's prefix.
            for (std::uint32_t i = 0; i < group.extra; ++i) {
              const Prefix other =
                  extend(sequence.trail.prefix_at(work.to - 1), work.to, kVocabulary + i);
              both(table[group.chunks(work.to) + i],
                   [&](const PageView& page) { write_state(shape, layer, other, page.base); });
            }
            break;
          case GroupModel::Kind::kRing: {
            const std::uint32_t first =
                work.to - work.from > group.tokens ? work.to - group.tokens : work.from;
            both(table[0], [&](const PageView& page) {
              for (std::uint32_t at = first; at < work.to; ++at) {
                write_position(shape, layer, at % group.tokens, sequence.trail.prefix_at(at), page);
              }
            });
            break;
          }
        }
      }
    }
  }
  stats.computed_tokens += work.to - work.from;
}

// A draft model has written its proposals behind the step's tokens: of the accepted ones what is
// right, of the others what another token would have. Rings and states are written once it is
// known.
void Engine::Impl::draft(const Scheduled& work) {
  if (work.rejected == 0) return;
  stats.rejected_tokens += work.rejected;
  const Sequence& sequence = *work.sequence;
  const std::uint32_t first = work.to + work.accepted;
  std::vector<Prefix> wrong;
  Prefix last = sequence.trail.prefix_at(first - 1);
  for (std::uint32_t i = 0; i < work.rejected; ++i) {
    last = extend(last, first + i, kVocabulary + i);
    wrong.push_back(last);
  }
  for (std::uint32_t r = 0; r < ranks.size(); ++r) {
    SimMemory& memory = *ranks[r].memory;
    for (const GroupModel& group : groups) {
      if (group.kind == GroupModel::Kind::kState || group.kind == GroupModel::Kind::kRing) continue;
      const auto& table = sequence.tables[raw(group.id)];
      const std::vector<PageShape>& layers = shapes[r][raw(group.id)];
      for (std::uint32_t at = first; at < first + work.rejected;) {
        const std::uint32_t chunk = at / group.tokens;
        const std::uint32_t end = std::min(first + work.rejected, (chunk + 1) * group.tokens);
        const auto bytes = std::span(wrong).subspan(at - first, end - at);
        for (std::uint32_t layer = 0; layer < layers.size(); ++layer) {
          const PageView shadow = memory.shadow_page(group.id, layer, table[chunk]);
          write_tokens(layers[layer], layer, at % group.tokens, bytes,
                       memory.page(group.id, layer, table[chunk]));
          if (shadow.base != nullptr)
            write_tokens(layers[layer], layer, at % group.tokens, bytes, shadow);
        }
        at = end;
      }
    }
  }
}

void Engine::Impl::finish(Sequence& sequence, bool aborted) {
  drop_tables(sequence);
  ++(aborted ? stats.aborted : stats.finished);
  FinishedRequest& result = sequence.result;
  result.aborted = aborted;
  result.prompt_tokens = sequence.prompt_tokens;
  const auto tokens = sequence.trail.tokens().subspan(sequence.prompt_tokens);
  result.output.assign(tokens.begin(), tokens.end());
  finished.push_back(std::move(result));
}

void Engine::Impl::abort_now(RequestId request) {
  const auto found = sequences.find(raw(request));
  if (found == sequences.end()) return;
  std::unique_ptr<Sequence> sequence = std::move(found->second);
  sequences.erase(found);
  scheduler->finished(request, FinishReason::kAborted);
  observer->left(request);
  std::erase(running, sequence.get());
  std::erase(waiting, sequence.get());
  if (sequence->phase != Sequence::Phase::kLoading) {
    finish(*sequence, true);
    return;
  }
  if (options.keep_blocks_of_aborted_loads) {
    sequence->phase = Sequence::Phase::kDraining;
    draining.push_back(std::move(sequence));
    return;
  }
  for (auto& [job, load] : loads) {
    if (load.sequence == sequence.get()) load.sequence = nullptr;
  }
  finish(*sequence, true);
}

void Engine::Impl::settle() {
  apply_acquired();
  load_ends.clear();
  scheduler->take_load_ends(load_ends);
  for (const LoadEnd& end : load_ends) end_load(end);
  apply_released();
}

void Engine::Impl::end_load(const LoadEnd& end) {
  observer->load_ended(end);
  const auto found = loads.find(raw(end.job));
  if (found == loads.end()) {
    fail("load job " + std::to_string(raw(end.job)) +
         " ends, but was not promised or has ended before");
    return;
  }
  const LoadRecord load = std::move(found->second);
  loads.erase(found);
  // From here on nobody may write these blocks, unless the job keeps them as its own.
  for (const Destination& destination : load.destinations) {
    if (end.blocks_quiet) {
      for (const EngineRank& rank : ranks) rank.memory->close(destination.group, destination.block);
    } else {
      ghosts.emplace(raw(destination.block), destination.group);
    }
  }
  if (!end.blocks_quiet) {
    ++stats.loads_detached;
  } else {
    ++(end.complete ? stats.loads_complete : stats.loads_partial);
  }
  Sequence* const sequence = load.sequence;
  if (sequence == nullptr) return;
  if (sequence->id != end.request)
    fail("load job " + std::to_string(raw(end.job)) + " ends for another request");
  if (sequence->phase == Sequence::Phase::kDraining) {
    finish(*sequence, true);
    std::erase_if(draining, [&](const auto& owned) { return owned.get() == sequence; });
    return;
  }
  const std::uint32_t valid = end.blocks_quiet ? end.valid_tokens : load.local;
  if (valid < load.local || valid > load.hit || valid % alignment != 0 ||
      (end.complete && valid != load.hit)) {
    fail("load job " + std::to_string(raw(end.job)) + " from " + std::to_string(load.local) +
         " to " + std::to_string(load.hit) + " tokens ends with " + std::to_string(valid) +
         " valid ones");
    return;
  }
  if (load.again) {
    drop_tables(*sequence);
    sequence->phase = Sequence::Phase::kWaiting;
    return;
  }
  accept_load(*sequence, load, valid);
}

// The engine now believes the first `valid` tokens, and compares what has arrived for them.
void Engine::Impl::accept_load(Sequence& sequence, const LoadRecord& load, std::uint32_t valid) {
  for (const GroupModel& group : groups) {
    if (group.kind == GroupModel::Kind::kRing || valid == load.local) continue;
    const auto& table = sequence.tables[raw(group.id)];
    for (std::uint32_t chunk = group.first_needed(valid); chunk < group.chunks(valid); ++chunk) {
      if (chunk >= table.size() || table[chunk] == kNullBlock) {
        fail("a load is valid up to " + std::to_string(valid) + ", but group " +
             std::to_string(raw(group.id)) + " was never to have chunk " + std::to_string(chunk));
        return;
      }
    }
  }
  for (const Destination& destination : load.destinations) {
    const GroupModel& group = groups[raw(destination.group)];
    const std::uint32_t from = destination.chunk * group.tokens;
    const std::uint32_t to = std::min(from + group.tokens, valid);
    if (destination.chunk < group.first_needed(valid) || to <= from) continue;
    std::uint64_t bytes = 0;
    const std::uint64_t wrong =
        compare(group, destination.chunk, destination.block, sequence.trail, from, to, &bytes);
    stats.bytes_verified += bytes;
    stats.bytes_mismatched += wrong;
    stats.groups[raw(group.id)].bytes_loaded += bytes;
    stats.groups[raw(group.id)].bytes_mismatched += wrong;
    if (wrong != 0) {
      fail("a load brings " + std::to_string(wrong) + " wrong bytes of " + std::to_string(bytes) +
           " into block " + std::to_string(raw(destination.block)) + ", group " +
           std::to_string(raw(group.id)) + ", chunk " + std::to_string(destination.chunk));
    }
  }
  truncate(sequence, valid);
  sequence.computed = valid;
  sequence.phase = valid > 0 ? Sequence::Phase::kReady : Sequence::Phase::kWaiting;
  if (valid == 0) drop_tables(sequence);
  stats.external_hit_tokens += valid - load.local;
  if (!sequence.started) sequence.result.external_hit_tokens = valid - load.local;
  sequence.result.found_tokens = std::max(sequence.result.found_tokens, valid);
  // Of a load that brought nothing, ended with its rank perhaps, another one may be the start.
  sequence.started = sequence.started || valid > 0;
  remember(sequence, load.local, valid);
}

}  // namespace kvprism::sim
