// Runs a fuzz target without a fuzzer: every file below the given paths, then inputs generated from
// a fixed seed and mutations of the files. Two runs do the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr int kGenerated = 5000;
constexpr std::size_t kMaxGeneratedBytes = 512;

std::vector<Bytes> read_corpus(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    const std::filesystem::path path = argv[i];
    if (std::filesystem::is_directory(path)) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
        if (entry.is_regular_file()) {
          files.push_back(entry.path());
        }
      }
    } else if (std::filesystem::is_regular_file(path)) {
      files.push_back(path);
    }
  }
  std::sort(files.begin(), files.end());
  std::vector<Bytes> corpus;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  return corpus;
}

void run(const Bytes& input) { LLVMFuzzerTestOneInput(input.data(), input.size()); }

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Bytes> corpus = read_corpus(argc, argv);
  for (const Bytes& input : corpus) {
    run(input);
  }
  std::mt19937_64 random(20240229);
  for (int i = 0; i < kGenerated; ++i) {
    Bytes input;
    if (!corpus.empty() && i % 2 == 0) {
      input = corpus[random() % corpus.size()];
      for (std::uint64_t flips = random() % 8; flips > 0 && !input.empty(); --flips) {
        input[random() % input.size()] = static_cast<std::uint8_t>(random());
      }
      if (random() % 4 == 0) {
        input.resize(random() % (input.size() + 9));
      }
    } else {
      input.resize(random() % kMaxGeneratedBytes);
      for (std::uint8_t& byte : input) {
        byte = static_cast<std::uint8_t>(random());
      }
    }
    run(input);
  }
  std::printf("%zu corpus files, %d generated inputs\n", corpus.size(), kGenerated);
  return 0;
}
