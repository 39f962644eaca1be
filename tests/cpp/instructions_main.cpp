// Fixed work for `valgrind --tool=callgrind`: what its functions cost in instructions is the same
// on every run.
#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

#include "kvprism/hit/hit_search.h"
#include "store_fixtures.h"

namespace {

using namespace kvprism;  // NOLINT(google-build-using-namespace): a program of the whole namespace

constexpr std::uint32_t kItems = 20000;

// Named, so that callgrind can count what happens inside each.
[[gnu::noinline]] void make_keys(const KeySchema& schema, KeySlots& slots,
                                 std::span<const std::uint8_t> hashes) {
  slots.clear();
  for (std::uint32_t i = 0; i < kItems; ++i)
    schema.append_key(slots, StoreIndex{0}, {}, hashes.subspan(i % 64, 32));
}
[[gnu::noinline]] std::uint32_t search_hit(HitSearch& search, const Presence& presence) {
  return search.find(presence, 0, kItems * 16);
}

}  // namespace

int main() {
  const auto projection = test::make_projection({test::full_group(16), test::mamba_group(16)});
  const auto schema = test::make_schema(projection);
  const std::vector<std::uint8_t> hashes(96, 0x5a);
  KeySlots slots;
  // Outside the counted function: the slots get their capacity.
  for (std::uint32_t i = 0; i < kItems; ++i) {
    schema->append_key(slots, StoreIndex{0}, {}, std::span(hashes).first(32));
  }

  HitSearch search(*projection);
  Presence presence;
  presence.reset(search.groups().size());
  for (const StoreIndex index : indices<StoreIndex>(search.groups().size())) {
    presence.set_units(index, kItems);
    for (std::uint32_t chunk = 0; chunk < kItems; ++chunk) presence.mark(index, chunk);
  }
  std::printf("%u items\n", kItems);
  make_keys(*schema, slots, hashes);
  const std::uint32_t hit = search_hit(search, presence);
  return hit == kItems * 16 && slots.size() == kItems ? 0 : 1;
}
