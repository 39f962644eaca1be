// Two pieces of work in one run, one beside the other: their ratio says more than two times of two
// runs.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace kvprism::bench {

// Does the work `iterations` times.
using Work = std::function<void(std::uint64_t iterations)>;

struct Comparison {
  std::string name;    // e.g. "keys/16384"
  std::string floor;   // what ours is compared with
  std::string item;    // what one item is
  double items = 1;    // of one iteration
  double ours_ns = 0;  // per item, the median
  double floor_ns = 0;
  double ratio = 0;  // ours / floor: the median of the pairs
  double low = 0;    // 95 % of resamplings are between these
  double high = 0;
  double control = 0;  // ours / ours in the same run: what noise alone makes
  int pairs = 0;

  // A run whose control is further off says nothing.
  bool void_run() const { return control < 0.97 || control > 1.03; }
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : (values[half - 1] + values[half]) / 2;
}

class Pairs {
 public:
  // Each sample takes about `sample_ms`; `pairs` of A B B A.
  Pairs(int pairs, double sample_ms) : pairs_(pairs), sample_ms_(sample_ms) {}

  // `fixed` iterations a sample, for work that must not be repeated at will; 0: as time asks for.
  void compare(std::string name, std::string item, double items, const Work& ours,
               std::string floor_name, const Work& floor, std::uint64_t fixed = 0) {
    const std::uint64_t of_ours = fixed != 0 ? fixed : calibrate(ours);
    const std::uint64_t of_floor = fixed != 0 ? fixed : calibrate(floor);
    std::vector<double> ratios, ours_times, floor_times, controls;
    for (int pair = 0; pair < pairs_; ++pair) {
      const double a1 = sample(ours, of_ours), b1 = sample(floor, of_floor);
      const double b2 = sample(floor, of_floor), a2 = sample(ours, of_ours);
      ratios.push_back((a1 + a2) / (b1 + b2));
      ours_times.push_back((a1 + a2) / 2);
      floor_times.push_back((b1 + b2) / 2);
      if (pair % 3 == 0) {
        const double c1 = sample(ours, of_ours), c2 = sample(ours, of_ours);
        controls.push_back(c1 / c2);
      }
    }
    Comparison result{std::move(name), std::move(floor_name), std::move(item), items};
    result.ours_ns = median(ours_times) / items;
    result.floor_ns = median(floor_times) / items;
    result.ratio = median(ratios);
    std::tie(result.low, result.high) = resample(ratios);
    result.control = median(controls);
    result.pairs = pairs_;
    print(result);
    results_.push_back(std::move(result));
  }

  // How often compare() takes a sample of `floor`.
  int floor_samples() const { return 2 * pairs_; }

  static void print_header() {
    std::printf("%-28s %-30s %10s %10s %7s %15s %8s\n", "ours", "floor", "ours ns", "floor ns",
                "ratio", "95 %", "control");
  }

  bool write_json(const char* path, const char* version, const char* commit) const {
    std::FILE* const file = std::fopen(path, "w");
    if (file == nullptr) return false;
    std::fprintf(file, "{\"version\": \"%s\", \"commit\": \"%s\", \"comparisons\": [", version,
                 commit);
    const char* separator = "\n";
    for (const Comparison& c : results_) {
      std::fprintf(file,
                   "%s  {\"name\": \"%s\", \"floor\": \"%s\", \"item\": \"%s\", \"items\": %.0f, "
                   "\"ours_ns_per_item\": %.4g, \"floor_ns_per_item\": %.4g, \"ratio\": %.4g, "
                   "\"ratio_low\": %.4g, \"ratio_high\": %.4g, \"control\": %.17g, \"void\": %s, "
                   "\"pairs\": %d}",
                   separator, c.name.c_str(), c.floor.c_str(), c.item.c_str(), c.items, c.ours_ns,
                   c.floor_ns, c.ratio, c.low, c.high, c.control, c.void_run() ? "true" : "false",
                   c.pairs);
      separator = ",\n";
    }
    std::fprintf(file, "\n]}\n");
    return std::fclose(file) == 0;
  }

 private:
  // Nanoseconds of one iteration.
  static double sample(const Work& work, std::uint64_t iterations) {
    const auto begin = std::chrono::steady_clock::now();
    work(iterations);
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
    return time.count() / static_cast<double>(iterations);
  }

  std::uint64_t calibrate(const Work& work) const {
    work(5);  // what the first times cost, such as pages that are not there yet
    for (std::uint64_t iterations = 1;; iterations *= 2) {
      const double ms = sample(work, iterations) * static_cast<double>(iterations) / 1e6;
      if (ms < sample_ms_ / 4 && iterations < (1ull << 40)) continue;
      return std::max<std::uint64_t>(
          1, static_cast<std::uint64_t>(static_cast<double>(iterations) * sample_ms_ / ms));
    }
  }

  // Medians of samples drawn from `values` with replacement: the 2.5th and the 97.5th in a hundred.
  static std::pair<double, double> resample(const std::vector<double>& values) {
    std::uint64_t state = 1;
    std::vector<double> medians, drawn(values.size());
    for (int round = 0; round < 1000; ++round) {
      for (double& value : drawn) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        value = values[(state >> 33) % values.size()];
      }
      medians.push_back(median(drawn));
    }
    std::sort(medians.begin(), medians.end());
    return {medians[25], medians[974]};
  }

  static void print(const Comparison& c) {
    std::printf("%-28s %-30s %10.2f %10.2f %7.2f %7.2f-%-7.2f %8.2f%s\n", c.name.c_str(),
                c.floor.c_str(), c.ours_ns, c.floor_ns, c.ratio, c.low, c.high, c.control,
                c.void_run() ? "  void" : "");
    std::fflush(stdout);
  }

  int pairs_;
  double sample_ms_;
  std::vector<Comparison> results_;
};

// The compiler must believe that somebody reads it.
template <class T>
void keep(T* pointer) {
  asm volatile("" : : "g"(pointer) : "memory");
}

}  // namespace kvprism::bench
