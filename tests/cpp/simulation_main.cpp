// Runs many seeds of the simulated world. Usage:
//   kvprism_simulation [--seeds N] [--events N] [--first-seed N] [--trace] [--soak] [--seconds N]
//                      [--mutant K] [--without KIND]
#include <fmt/core.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kvprism/sim/world.h"

// Chosen by tests/mutants: which deliberate mistake is switched on in a build that has them.
extern "C" {
__attribute__((weak)) int kvprism_mutant = 0;
}

namespace {

// So many seeds raise every kind of fault; a hundred may miss a rare one.
constexpr std::uint64_t kSeedsForAll = 1000;

using kvprism::sim::WorldOptions;
using kvprism::sim::WorldResult;
using kvprism::sim::WorldTotals;

struct Arguments {
  std::uint64_t seeds = 1000;
  std::uint32_t events = 1000;
  std::uint64_t first_seed = 1;
  std::uint64_t seconds = 0;  // stops beginning seeds after this; 0: when all are done
  std::string_view without;   // a kind of fault
  bool trace = false;
  bool keep_going = true;
};

[[noreturn]] void usage(std::string_view what) {
  fmt::print(
      stderr,
      "kvprism_simulation: {}\nusage: kvprism_simulation [--seeds N] [--events N] [--first-seed N] "
      "[--trace] [--stop-at-first] [--soak] [--seconds N] [--mutant K] [--without KIND]\n",
      what);
  std::exit(2);
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const auto number = [&](int& i) -> std::uint64_t {
    if (i + 1 >= argc) usage(std::string(argv[i]) + " needs a number");
    char* end = nullptr;
    const std::uint64_t value = std::strtoull(argv[++i], &end, 10);
    if (end == argv[i] || *end != '\0') usage(std::string("not a number: ") + argv[i]);
    return value;
  };
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--seeds") {
      arguments.seeds = number(i);
    } else if (name == "--events") {
      arguments.events = static_cast<std::uint32_t>(number(i));
    } else if (name == "--first-seed") {
      arguments.first_seed = number(i);
    } else if (name == "--mutant") {
      kvprism_mutant = static_cast<int>(number(i));
    } else if (name == "--without") {
      if (i + 1 >= argc) usage("--without needs a kind of fault");
      arguments.without = argv[++i];
    } else if (name == "--trace") {
      arguments.trace = true;
    } else if (name == "--stop-at-first") {
      arguments.keep_going = false;
    } else if (name == "--soak") {
      arguments.seeds = UINT32_MAX;
      arguments.events = 5'000;
      arguments.seconds = 600;
    } else if (name == "--seconds") {
      arguments.seconds = number(i);
    } else {
      usage("unknown argument " + std::string(name));
    }
  }
  return arguments;
}

void print_failure(const WorldResult& result, std::uint64_t seed, const Arguments& arguments) {
  fmt::print("FAILED seed {} event {} [{}] {}\n  world: {}\n", seed, result.failed_at,
             result.invariant, result.failure, result.config);
  WorldOptions again;
  again.seed = seed;
  again.events = arguments.events;
  again.without = arguments.without;
  again.trace_from = arguments.trace || result.failed_at < 50 ? 0 : result.failed_at - 50;
  for (const std::string& line : kvprism::sim::run_world(again).trace) fmt::print("  {}\n", line);
  fmt::print("  rerun: kvprism_simulation --first-seed {} --seeds 1 --events {} --trace{}\n", seed,
             arguments.events,
             arguments.without.empty() ? "" : fmt::format(" --without \"{}\"", arguments.without));
}

// One row per kind. False when a kind never fired.
bool print_faults(const WorldTotals& totals) {
  bool all = true;
  const auto row = [&](std::string_view name, std::uint64_t raised) {
    fmt::print("  {:<20}{:>12}{}\n", name, raised, raised == 0 ? "  never fired" : "");
    all = all && raised > 0;
  };
  fmt::print("faults raised by the store\n");
  for (std::size_t i = 0; i < kvprism::kNumFaultKinds; ++i) {
    const auto kind = static_cast<kvprism::FaultKind>(i);
    if (kind != kvprism::FaultKind::kSilentCorrupt) row(to_string(kind), totals.faults[i]);
  }
  fmt::print("faults raised by the world\n");
  for (std::size_t i = 0; i < kvprism::sim::kNumWorldFaults; ++i) {
    row(to_string(static_cast<kvprism::sim::WorldFault>(i)), totals.world_faults[i]);
  }
  return all;
}

// Objects that were compared with the oracle, and worlds by ranks and stages. False when there were
// none of a sort.
bool print_coverage(const WorldTotals& totals) {
  using namespace kvprism::sim;
  bool all = true;
  fmt::print("objects compared\n  {:<26}", "");
  for (const std::string_view layout : kLayouts) fmt::print("{:>10}", layout);
  for (std::size_t kind = 0; kind < kStoredKinds; ++kind) {
    fmt::print("\n  {:<26}", kModelKinds[kind]);
    for (const std::uint64_t objects : totals.checked[kind]) {
      fmt::print("{:>10}", objects);
      all = all && objects > 0;
    }
  }
  fmt::print("\nworlds, by ranks and stages:");
  for (std::size_t i = 0; i < kArrangements.size(); ++i) {
    fmt::print("  {} x {}: {}", kArrangements[i].ranks, kArrangements[i].stages,
               totals.arrangements[i]);
    all = all && totals.arrangements[i] > 0;
  }
  fmt::print("\n");
  return all;
}

// A store that lies about its bytes must not go unnoticed: otherwise nothing here is worth
// anything. Some lies touch nobody, in a load that was aborted or cut short.
bool lies_are_noticed() {
  std::uint32_t lied = 0;
  std::uint32_t noticed = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    WorldOptions options;
    options.seed = seed;
    options.silent_corrupt = true;
    const WorldResult result = kvprism::sim::run_world(options);
    const bool told =
        result.totals.faults[static_cast<std::size_t>(kvprism::FaultKind::kSilentCorrupt)] > 0;
    lied += told || !result.passed ? 1 : 0;
    noticed += result.passed ? 0 : 1;
  }
  fmt::print("{} of {} worlds with a store that lies were noticed\n", noticed, lied);
  return lied >= 5 && noticed * 2 > lied;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  WorldTotals totals;
  std::uint64_t passed = 0;
  std::uint64_t failed = 0;
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds_gone = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  for (std::uint64_t seed = arguments.first_seed; seed < arguments.first_seed + arguments.seeds;
       ++seed) {
    WorldOptions options;
    options.seed = seed;
    options.events = arguments.events;
    options.without = arguments.without;
    const WorldResult result = kvprism::sim::run_world(options);
    totals.add(result.totals);
    if (result.passed) {
      ++passed;
      if (arguments.seconds == 0 || seconds_gone() < static_cast<double>(arguments.seconds))
        continue;
      break;
    }
    ++failed;
    if (failed <= 3) print_failure(result, seed, arguments);
    if (!arguments.keep_going) break;
    if (failed >= 20) break;  // more of them tell nothing new
  }
  fmt::print(
      "{} events, {} requests ({} finished, {} aborted), {} jobs, {} loads, {} objects checked, {} "
      "clean worlds\n",
      totals.events, totals.requests, totals.finished, totals.aborted, totals.jobs, totals.loads,
      totals.objects_checked, totals.clean_worlds);
  fmt::print("{} tokens computed, {} hit locally, {} hit in the store\n", totals.computed_tokens,
             totals.local_hit_tokens, totals.external_hit_tokens);
  if (arguments.seconds != 0) {
    const double minutes = seconds_gone() / 60;
    fmt::print("{} seeds in {:.1f} minutes, {:.0f} events a minute\n", passed + failed, minutes,
               static_cast<double>(totals.events) / minutes);
  }
  const bool all_kinds = print_faults(totals);
  const bool all_covered = print_coverage(totals);
  // Fewer seeds say nothing about what never happened.
  if (arguments.seeds >= 100 && failed == 0 && arguments.without.empty()) {
    if (!all_kinds && arguments.seeds >= kSeedsForAll) {
      fmt::print("FAILED: a kind of fault never fired\n");
      ++failed;
    }
    if (!all_covered && arguments.seeds >= kSeedsForAll) {
      fmt::print("FAILED: a kind was never met in a layout, or ranks never so\n");
      ++failed;
    }
    if (totals.external_hit_tokens == 0) {
      fmt::print("FAILED: no external hit in {} seeds\n", arguments.seeds);
      ++failed;
    }
    if (!lies_are_noticed()) {
      fmt::print("FAILED: a store that lies is not noticed\n");
      ++failed;
    }
  }
  fmt::print("{} passed, {} failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
