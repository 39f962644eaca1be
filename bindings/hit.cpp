#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "areas.h"
#include "converters.h"
#include "gil_free.h"
#include "handles.h"
#include "kvprism/base/error.h"
#include "kvprism/hit/hit_search.h"
#include "kvprism/hit/prompt_end.h"
#include "kvprism/hit/reachable_mask.h"
#include "text.h"
#include "whole.h"

namespace kvprism::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr const char* kSearch = "hit search";

[[noreturn]] void refuse(std::string path, std::string value, std::string expected) {
  fail(ErrorCode::kInvalidArgument, kSearch,
       {std::move(path), std::move(value), std::move(expected), {}});
}

HitRule rule_of(std::string_view name) {
  for (const HitRule rule : {HitRule::kPrefix, HitRule::kWindow, HitRule::kChunk,
                             HitRule::kLastState, HitRule::kNever}) {
    if (to_string(rule) == name) return rule;
  }
  refuse("rule", std::string(name), "one of prefix, window, chunk, last_state, never");
}

HitGroup make_group(std::string_view rule, std::uint32_t chunk_tokens, std::uint32_t window,
                    bool draft, std::uint32_t unit_tokens, std::uint32_t family) {
  const HitRule hit = rule_of(rule);
  const bool windowed = hit == HitRule::kWindow || hit == HitRule::kChunk;
  if (chunk_tokens == 0) refuse("chunk_tokens", "0", "at least 1 token");
  if (windowed && window == 0) refuse("window", "0", "at least 1 token");
  if (unit_tokens == 0) unit_tokens = chunk_tokens;
  if (chunk_tokens % unit_tokens != 0) {
    refuse("unit_tokens", std::to_string(unit_tokens),
           "a divisor of chunk_tokens, " + std::to_string(chunk_tokens));
  }
  return {hit, chunk_tokens, window, draft, unit_tokens, family};
}

// Prefixes at hash granularity, as one search of one group sees them.
class Finder {
 public:
  Finder(std::vector<HitGroup> groups, std::uint32_t step, std::uint32_t unit,
         std::uint32_t alignment)
      : search_(checked(std::move(groups), step, unit, alignment), {step, unit, alignment}) {}
  explicit Finder(const Projection& projection)
      : search_(projection), replay_(projection.replay_tokens()) {}

  HitSearch& search() noexcept { return search_; }
  const HitSearch& search() const noexcept { return search_; }
  std::size_t groups() const noexcept { return search_.groups().size(); }
  std::uint32_t replay_tokens() const noexcept { return replay_; }
  const Presence& presence() const noexcept { return presence_; }
  // For one search: another one meanwhile would use the same memory.
  std::atomic<bool>& in_use() noexcept { return *in_use_; }

  // One map: a byte per hash, the groups one after another.
  void read(const std::byte* map, std::uint32_t hashes) {
    presence_.reset(groups());
    for (const StoreIndex group : indices<StoreIndex>(groups())) {
      const std::byte* const row = map + static_cast<std::size_t>(raw(group)) * hashes;
      const std::uint32_t scale = search_.groups()[raw(group)].unit_tokens / search_.grid().unit;
      const std::uint32_t units = hashes / scale;
      presence_.set_units(group, units);
      for (std::uint32_t unit = 0; unit < units; ++unit) {
        if (row[(unit + 1) * scale - 1] != std::byte{0}) presence_.mark(group, unit);
      }
    }
  }

 private:
  static std::vector<HitGroup> checked(std::vector<HitGroup> groups, std::uint32_t step,
                                       std::uint32_t unit, std::uint32_t alignment) {
    if (groups.empty()) refuse("groups", "none", "at least one group");
    if (unit == 0) refuse("unit", "0", "at least 1 token");
    if (alignment == 0 || alignment % unit != 0) {
      refuse("alignment", std::to_string(alignment), "a multiple of unit");
    }
    if (step == 0 || step % alignment != 0) {
      refuse("step", std::to_string(step), "a multiple of alignment");
    }
    for (const HitGroup& group : groups) {
      if (group.unit_tokens % unit != 0) {
        refuse("unit_tokens", std::to_string(group.unit_tokens), "a multiple of unit");
      }
    }
    return groups;
  }

  HitSearch search_;
  std::uint32_t replay_ = 1;  // tokens that a request computes anew after a hit
  Presence presence_;
  std::unique_ptr<std::atomic<bool>> in_use_ = std::make_unique<std::atomic<bool>>(false);
};

// Arguments of a batch: maps of one shape, and a number for each.
class Batch {
 public:
  Batch(const Finder& finder, nb::handle maps, std::uint32_t hashes)
      : view_(maps, "maps"),
        map_bytes_(finder.groups() * std::size_t{hashes}),
        count_(map_bytes_ == 0 ? 0 : view_.bytes() / map_bytes_) {
    if (map_bytes_ == 0 || !view_.contiguous() || view_.item_bytes() != 1 ||
        view_.bytes() % map_bytes_ != 0) {
      refuse("maps", view_.describe(),
             "contiguous bytes, " + std::to_string(map_bytes_) + " for each map of " +
                 std::to_string(finder.groups()) + " groups and " + std::to_string(hashes) +
                 " hashes");
    }
  }
  std::size_t size() const noexcept { return count_; }
  const std::byte* map(std::size_t at) const noexcept { return view_.data() + at * map_bytes_; }

  std::vector<std::uint32_t> numbers(nb::handle values, const char* path) const {
    std::vector<std::uint32_t> out;
    append_tokens(values, path, out);
    if (out.size() != count_) {
      refuse(path, std::to_string(out.size()) + " numbers",
             "one for each of " + std::to_string(count_) + " maps");
    }
    return out;
  }

 private:
  BufferView view_;
  std::size_t map_bytes_;
  std::size_t count_;
};

std::vector<std::uint32_t> find_hits(Finder& finder, nb::handle maps, std::uint32_t hashes,
                                     nb::handle locals, nb::handle probed, nb::handle limits) {
  const Batch batch(finder, maps, hashes);
  const auto local = batch.numbers(locals, "locals");
  const auto max = batch.numbers(probed, "probed");
  const auto limit = limits.is_none() ? max : batch.numbers(limits, "limits");
  const ExclusiveUse exclusive(finder.in_use(), kSearch);
  const GilFree released;
  std::vector<std::uint32_t> hits(batch.size());
  for (std::size_t i = 0; i < hits.size(); ++i) {
    finder.read(batch.map(i), hashes);
    hits[i] = finder.search().find_below(finder.presence(), local[i], max[i], limit[i]);
  }
  return hits;
}

std::vector<std::uint32_t> find_loaded(Finder& finder, nb::handle maps, std::uint32_t hashes,
                                       nb::handle locals, nb::handle hits) {
  const Batch batch(finder, maps, hashes);
  const auto local = batch.numbers(locals, "locals");
  const auto hit = batch.numbers(hits, "hits");
  const ExclusiveUse exclusive(finder.in_use(), kSearch);
  const GilFree released;
  std::vector<std::uint32_t> valid(batch.size());
  for (std::size_t i = 0; i < valid.size(); ++i) {
    finder.read(batch.map(i), hashes);
    valid[i] = finder.search().find_loaded(finder.presence(), local[i], hit[i]);
  }
  return valid;
}

std::vector<std::uint32_t> shared_prefixes(Finder& finder, nb::handle maps, std::uint32_t hashes,
                                           nb::handle locals, nb::handle probed) {
  const Batch batch(finder, maps, hashes);
  const auto local = batch.numbers(locals, "locals");
  const auto max = batch.numbers(probed, "probed");
  const ExclusiveUse exclusive(finder.in_use(), kSearch);
  const GilFree released;
  std::vector<std::uint32_t> shared(batch.size());
  for (std::size_t i = 0; i < shared.size(); ++i) {
    finder.read(batch.map(i), hashes);
    shared[i] = finder.search().shared_prefix(finder.presence(), local[i], max[i]);
  }
  return shared;
}

std::vector<std::uint32_t> tails(Finder& finder, nb::handle maps, std::uint32_t hashes,
                                 nb::handle hits) {
  const Batch batch(finder, maps, hashes);
  const auto hit = batch.numbers(hits, "hits");
  const ExclusiveUse exclusive(finder.in_use(), kSearch);
  const GilFree released;
  std::vector<std::uint32_t> tokens;
  tokens.reserve(batch.size() * finder.groups());
  for (std::size_t i = 0; i < batch.size(); ++i) {
    finder.read(batch.map(i), hashes);
    for (const StoreIndex group : indices<StoreIndex>(finder.groups())) {
      tokens.push_back(finder.search().tail_tokens(group, finder.presence(), hit[i]));
    }
  }
  return tokens;
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> load_ranges(const Finder& finder,
                                                                 std::uint32_t hit,
                                                                 std::uint32_t local) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges;
  for (const HitGroup& group : finder.search().groups()) {
    const ChunkRange range = load_chunks(group, hit, local);
    ranges.emplace_back(range.empty() ? 0 : range.first, range.empty() ? 0 : range.end);
  }
  return ranges;
}

std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> prompt_end_chunks(
    const Finder& finder, std::uint32_t prompt_tokens) {
  const HitSearch& search = finder.search();
  bool drafts = false;
  for (const HitGroup& group : search.groups()) drafts |= group.draft;
  const PromptEnd end = prompt_end(prompt_tokens, search.grid(), drafts, finder.replay_tokens());
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> chunks;
  for (std::uint32_t g = 0; g < search.groups().size() && end.proof != 0; ++g) {
    const HitGroup& group = search.groups()[g];
    const ChunkRange range = end_chunks(group, search.grid(), end);
    for (std::uint32_t chunk = range.first; chunk < range.end; ++chunk) {
      chunks.emplace_back(g, chunk, end_mark(group, end, chunk));
    }
  }
  return chunks;
}

nb::list mask_rows(const Finder& finder, std::uint32_t from, std::uint32_t to,
                   std::optional<std::uint32_t> retention, const ReplayBoundaries& boundaries) {
  const HitSearch& search = finder.search();
  nb::list rows;
  std::string row;
  for (const HitGroup& group : search.groups()) {
    const ReachableMask mask(group, search.grid(), retention, boundaries);
    const std::uint32_t end = to / group.chunk_tokens;
    row.clear();
    for (std::uint32_t chunk = (from + group.chunk_tokens - 1) / group.chunk_tokens; chunk < end;
         ++chunk) {
      row.push_back(mask.keeps(chunk) ? 1 : 0);
    }
    rows.append(nb::bytes(row.data(), row.size()));
  }
  return rows;
}

}  // namespace

void bind_hit(nb::module_& module) {
  nb::class_<HitGroup>(module, "HitGroup", "What a hit search knows of a group.")
      .def(
          "__init__",
          [](HitGroup* self, std::string_view rule, const Whole<std::uint32_t>& chunk_tokens,
             const Whole<std::uint32_t>& window, bool draft,
             const Whole<std::uint32_t>& unit_tokens, const Whole<std::uint32_t>& family) {
            new (self) HitGroup(make_group(rule, chunk_tokens("chunk_tokens"), window("window"),
                                           draft, unit_tokens("unit_tokens"), family("family")));
          },
          nb::kw_only(), "rule"_a, "chunk_tokens"_a, "window"_a = 0, "draft"_a = false,
          "unit_tokens"_a = 0, "family"_a, R"(Describes a group by what its hits depend on.

Args:
    rule: "prefix", "window", "chunk", "last_state" or "never".
    chunk_tokens: Tokens per block.
    window: Tokens of the window or attention chunk; without meaning for other rules.
    draft: Whether a hit needs one more object behind it.
    unit_tokens: Tokens between prefixes that may have an object, a divisor of `chunk_tokens`, which 0 means.
    family: Any number, equal for groups with equal specs.

Raises:
    ArgumentError: No such rule, or a number is out of range.)")
      .def_prop_ro(
          "rule", [](const HitGroup& group) { return to_string(group.rule); },
          "prefix, window, chunk, last_state or never.")
      .def_ro("chunk_tokens", &HitGroup::chunk_tokens, "Tokens per block.")
      .def_ro("window", &HitGroup::window, "Tokens of the window or attention chunk.")
      .def_ro("draft", &HitGroup::draft, "Whether a hit needs one more object behind it.")
      .def_ro("unit_tokens", &HitGroup::unit_tokens,
              "Tokens between prefixes that may have an object.")
      .def_ro("family", &HitGroup::family, "Equal for groups with equal specs.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](const HitGroup& group) {
        return "HitGroup(rule='" + std::string(to_string(group.rule)) +
               "', chunk_tokens=" + std::to_string(group.chunk_tokens) +
               ", window=" + std::to_string(group.window) +
               ", draft=" + (group.draft ? "True" : "False") +
               ", unit_tokens=" + std::to_string(group.unit_tokens) +
               ", family=" + std::to_string(group.family) + ")";
      });

  nb::class_<Finder>(
      module, "HitSearch",
      "The longest usable prefix over several groups, for many existence maps a call. A map has a "
      "byte for each hash of a group, the groups one after another. One call at a time: a second "
      "thread gets an ArgumentError.")
      .def(nb::init<const Projection&>(), "projection"_a, R"(Searches over the stored groups.

Args:
    projection: Its groups, step, tokens per hash and hit alignment; not kept.)")
      .def_static(
          "of_groups",
          [](std::vector<HitGroup> groups, const Whole<std::uint32_t>& step,
             const Whole<std::uint32_t>& unit, const Whole<std::uint32_t>& alignment) {
            return Finder(std::move(groups), step("step"), unit("unit"), alignment("alignment"));
          },
          "groups"_a, nb::kw_only(), "step"_a, "unit"_a, "alignment"_a,
          R"(From rules and sizes instead of a projection.

Args:
    groups: What each group needs, in store order.
    step: Granularity of saves in tokens.
    unit: Tokens per hash.
    alignment: Tokens that hits are multiples of.

Raises:
    ArgumentError: There is no group, or the sizes do not fit each other.)")
      .def_prop_ro(
          "groups", [](Finder& finder) { return finder.search().groups(); },
          "The groups in store order.")
      .def_prop_ro(
          "step", [](Finder& finder) { return finder.search().grid().step; }, "Tokens.")
      .def_prop_ro(
          "unit", [](Finder& finder) { return finder.search().grid().unit; }, "Tokens per hash.")
      .def_prop_ro(
          "alignment", [](Finder& finder) { return finder.search().grid().alignment; },
          "Tokens; hits are multiples.")
      .def("find_hits", &find_hits, "maps"_a, "hashes"_a, nb::kw_only(), "locals"_a, "probed"_a,
           "limits"_a = nb::none(),
           nb::sig("def find_hits(self, maps: typing.Any, hashes: int, *, locals: typing.Any, "
                   "probed: typing.Any, limits: typing.Any = None) -> list[int]"),
           R"(The hit of each map in tokens.

Args:
    maps: Bytes, one for each map, group and hash.
    hashes: Hashes of a map.
    locals: Tokens of the engine's own hit, for each map.
    probed: Tokens up to which the store was asked, for each map.
    limits: The longest hit allowed, for each map; ``probed`` when left out.

Raises:
    ArgumentError: Sizes do not fit each other.)")
      .def("find_loaded", &find_loaded, "maps"_a, "hashes"_a, nb::kw_only(), "locals"_a, "hits"_a,
           nb::sig("def find_loaded(self, maps: typing.Any, hashes: int, *, locals: typing.Any, "
                   "hits: typing.Any) -> list[int]"),
           R"(The valid tokens of each hit when the map tells what arrived.

Args:
    maps: Bytes, one for each map, group and hash.
    hashes: Hashes of a map.
    locals: Tokens of the engine's own hit, for each map.
    hits: Tokens of the hit that was loaded, for each map.

Returns:
    Tokens for each map.

Raises:
    ArgumentError: Sizes do not fit each other.)")
      .def("shared_prefixes", &shared_prefixes, "maps"_a, "hashes"_a, nb::kw_only(), "locals"_a,
           "probed"_a,
           nb::sig("def shared_prefixes(self, maps: typing.Any, hashes: int, *, locals: "
                   "typing.Any, probed: typing.Any) -> list[int]"),
           R"(Up to where others have stored a prompt, whatever windows and states are left of it.

Args:
    maps: Bytes, one for each map, group and hash.
    hashes: Hashes of a map.
    locals: Tokens of the engine's own hit, for each map.
    probed: Tokens up to which the store was asked, for each map.

Returns:
    Tokens for each map, a multiple of ``step``; 0 without a group that needs all of a prefix.

Raises:
    ArgumentError: Sizes do not fit each other.)")
      .def("tails", &tails, "maps"_a, "hashes"_a, nb::kw_only(), "hits"_a,
           nb::sig("def tails(self, maps: typing.Any, hashes: int, *, hits: typing.Any) -> "
                   "list[int]"),
           R"(Tokens of the prefix whose object ends a hit, for each map and group; 0 for none.

Args:
    maps: Bytes, one for each map, group and hash.
    hashes: Hashes of a map.
    hits: Tokens of the hit, for each map.

Returns:
    Tokens for each map and group.

Raises:
    ArgumentError: Sizes do not fit each other.)")
      .def("load_ranges", &load_ranges, "hit"_a, "local"_a = 0,
           R"(Chunks of each group that a load fetches.

Args:
    hit: Tokens of the hit.
    local: Tokens that the engine has itself.

Returns:
    (first, end) for each group.)")
      .def("prompt_end_chunks", &prompt_end_chunks, "prompt_tokens"_a,
           "What is stored for the end of a prompt beside whole steps, as (group, chunk, tokens of "
           "the prefix that names it).")
      .def(
          "lookup_masks",
          [](const Finder& finder, const Whole<std::uint32_t>& tokens) {
            return mask_rows(finder, 0, tokens("tokens"), std::nullopt, {});
          },
          "tokens"_a, nb::sig("def lookup_masks(self, tokens: int) -> list[bytes]"),
          "A byte for each chunk of each group: may it serve a hit of up to `tokens`?")
      .def(
          "store_masks",
          [](const Finder& finder, const Whole<std::uint32_t>& tokens,
             const Whole<std::uint32_t>& start,
             const std::optional<Whole<std::uint32_t>>& retention,
             const std::optional<Whole<std::uint32_t>>& prompt_tokens) {
            const HitSearch& search = finder.search();
            bool drafts = false;
            for (const HitGroup& group : search.groups()) drafts |= group.draft;
            const std::optional<std::uint32_t> interval =
                retention ? std::optional((*retention)("retention")) : std::nullopt;
            return mask_rows(finder, start("start"), tokens("tokens"), interval,
                             prompt_tokens ? replay_boundaries((*prompt_tokens)("prompt_tokens"),
                                                               search.grid().step, drafts,
                                                               finder.replay_tokens())
                                           : ReplayBoundaries{});
          },
          "tokens"_a, "start"_a = 0, nb::kw_only(), "retention"_a.none(),
          "prompt_tokens"_a.none() = nb::none(),
          nb::sig("def store_masks(self, tokens: int, start: int = 0, *, retention: int | None, "
                  "prompt_tokens: int | None = None) -> list[bytes]"),
          R"(A byte for each chunk of each group from `start` on: is it worth an object?

Args:
    tokens: Where the chunks end.
    start: Where they begin, in tokens.
    retention: The engine's retention interval in tokens; None for every prefix.
    prompt_tokens: Length of the prompt, from whose end it may be replayed.

Returns:
    Bytes for each group.

Raises:
    ArgumentError: A number does not fit.)");
}

}  // namespace kvprism::bindings
