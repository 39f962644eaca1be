// The opt-in for unknown builds, with the real library changed in one place each: its identity, a
// function, a name.
#include <elf.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/error.h"
#include "mooncake/elf.h"
#include "mooncake/probe.h"
#include "mooncake_fixture.h"

namespace kvprism::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCreate = "_ZN8mooncake10RealClient6createEv";

// The bytes of a shared library, to be changed and written elsewhere.
class Image {
 public:
  explicit Image(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
  }
  void write(const fs::path& path) const {
    std::ofstream(path, std::ios::binary)
        .write(bytes_.data(), static_cast<std::streamsize>(bytes_.size()));
  }
  char* at(std::size_t offset) { return bytes_.data() + offset; }

  std::size_t find(const std::string& what) const {
    return std::string_view(bytes_.data(), bytes_.size()).find(what);
  }

  // Offset in the file of a dynamic symbol's code.
  std::size_t code_of(const std::string& name) const {
    const auto header = read<Elf64_Ehdr>(0);
    for (unsigned i = 0; i < header.e_shnum; ++i) {
      const auto section = read<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr));
      if (section.sh_type != SHT_DYNSYM) continue;
      const auto strings = read<Elf64_Shdr>(header.e_shoff + section.sh_link * sizeof(Elf64_Shdr));
      for (std::size_t at = 0; at < section.sh_size; at += sizeof(Elf64_Sym)) {
        const auto symbol = read<Elf64_Sym>(section.sh_offset + at);
        if (symbol.st_value == 0 || name != bytes_.data() + strings.sh_offset + symbol.st_name)
          continue;
        for (unsigned j = 0; j < header.e_phnum; ++j) {
          const auto segment = read<Elf64_Phdr>(header.e_phoff + j * sizeof(Elf64_Phdr));
          if (segment.p_type == PT_LOAD && symbol.st_value >= segment.p_vaddr &&
              symbol.st_value < segment.p_vaddr + segment.p_filesz) {
            return segment.p_offset + (symbol.st_value - segment.p_vaddr);
          }
        }
      }
    }
    throw std::runtime_error("no symbol " + name);
  }

 private:
  template <class T>
  T read(std::size_t offset) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof(value));
    return value;
  }

  std::vector<char> bytes_;
};

std::vector<char> from_hex(const std::string& hex) {
  std::vector<char> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

class MooncakeProbe : public MooncakeTest {
 protected:
  void SetUp() override {
    MooncakeTest::SetUp();
    if (IsSkipped()) return;
    master_ = std::make_unique<MooncakeMaster>(site_packages_);
    original_ = site_packages_ + "/mooncake/store.so";
    const fs::path probe =
        fs::read_symlink("/proc/self/exe").parent_path() / "../lib/kvprism-mooncake-probe";
    ASSERT_TRUE(fs::exists(probe)) << probe;
    ::setenv("KVPRISM_MOONCAKE_PROBE", probe.c_str(), 1);
    ::setenv("XDG_CACHE_HOME", (master_->folder() / "cache").c_str(), 1);
    // The copies are in no distribution that could tell their tag.
    ::setenv("KVPRISM_LIBPYTHON", python_library().c_str(), 0);
  }

  // The libpython of the virtual environment's Python, or the system's.
  std::string python_library() const {
    const fs::path versioned = fs::path(site_packages_).parent_path();
    const std::string name = "lib" + versioned.filename().string() + ".so.1.0";
    std::ifstream config(versioned.parent_path().parent_path() / "pyvenv.cfg");
    for (std::string line; std::getline(config, line);) {
      if (!line.starts_with("home = ")) continue;
      const fs::path library = fs::path(line.substr(7)) / "../lib" / name;
      if (fs::exists(library)) return library.string();
    }
    return name;
  }

  // The library with another build-id, beside the libraries that it needs.
  fs::path copy(const std::function<void(Image&)>& change) {
    Image image(original_);
    const std::vector<char> id = from_hex(mooncake::read_build_id(original_));
    const std::size_t at = image.find(std::string(id.begin(), id.end()));
    image.at(at)[0] ^= 0x5A;
    image.at(at)[1] ^= static_cast<char>(++copies_);
    change(image);
    const fs::path folder = master_->folder() / ("copy" + std::to_string(copies_)) / "mooncake";
    fs::create_directories(folder);
    for (const auto& entry : fs::directory_iterator(site_packages_ + "/mooncake")) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("lib")) fs::create_symlink(entry.path(), folder / name);
    }
    for (const auto& entry : fs::directory_iterator(site_packages_)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("mooncake") && name.ends_with(".libs")) {
        fs::create_symlink(entry.path(), folder.parent_path() / name);
      }
    }
    image.write(folder / "store.so");
    return folder / "store.so";
  }

  MooncakeOptions options_of(const fs::path& library) const {
    MooncakeOptions result = options(*master_);
    result.library = library.string();
    return result;
  }

  std::unique_ptr<MooncakeMaster> master_;
  std::string original_;
  int copies_ = 0;
};

TEST_F(MooncakeProbe, UnknownBuildIsUsedAfterAProbeAndOnlyThen) {
  const fs::path library = copy([](Image&) {});
  MooncakeOptions options = options_of(library);
  try {
    mooncake_client_factory(options)();
    FAIL() << "an unknown build was used";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find(library.string()), std::string::npos);
  }
  options.unknown_build = UnknownBuild::kProbe;
  const std::string hash = mooncake::hash_file(library.string());
  EXPECT_EQ(mooncake::read_verdict(hash), "");
  const auto client = mooncake_client_factory(options)();
  EXPECT_EQ(mooncake::verdict_word(mooncake::read_verdict(hash)), "ok");
  const Memory memory(1 << 16);
  memory.fill(0, 1000, 1);
  client->register_region(memory.region());
  std::vector<ItemResult> results(1);
  EXPECT_TRUE(client->put(*batch_of({{"p", {{memory.at(0), 1000}}}}), results).quiet);
  EXPECT_TRUE(client->get(*batch_of({{"p", {{memory.at(4096), 1000}}}}), results).quiet);
  EXPECT_EQ(results[0], (ItemResult{ItemStatus::kOk, 1000}));
  EXPECT_TRUE(memory.holds(4096, 1000, 1));
  client->tear_down();

  // What is open needs no verdict, not even the cached one.
  ::setenv("KVPRISM_MOONCAKE_PROBE", "/nonexistent", 1);
  fs::remove(mooncake::verdict_path(hash));
  mooncake_client_factory(options)()->tear_down();
}

TEST_F(MooncakeProbe, ACachedVerdictIsEnough) {
  const fs::path library = copy([](Image&) {});
  ASSERT_TRUE(mooncake::write_verdict(mooncake::hash_file(library.string()),
                                      R"({"verdict": "ok", "detail": "tried before"})"));
  ::setenv("KVPRISM_MOONCAKE_PROBE", "/nonexistent", 1);
  MooncakeOptions options = options_of(library);
  options.unknown_build = UnknownBuild::kProbe;
  mooncake_client_factory(options)()->tear_down();
}

// In containers there is often no folder for verdicts, and a client may be replaced at any time.
TEST_F(MooncakeProbe, WithoutACacheOneProbeServesAllClientsOfAProcess) {
  const fs::path runs = master_->folder() / "runs";
  const fs::path counting = master_->folder() / "probe";
  std::ofstream(counting) << "#!/bin/sh\necho run >> " << runs.string() << "\nexec "
                          << std::getenv("KVPRISM_MOONCAKE_PROBE") << " \"$@\"\n";
  fs::permissions(counting, fs::perms::owner_all);
  ::setenv("KVPRISM_MOONCAKE_PROBE", counting.c_str(), 1);
  ::unsetenv("XDG_CACHE_HOME");
  ::unsetenv("HOME");
  MooncakeOptions options = options_of(copy([](Image&) {}));
  options.unknown_build = UnknownBuild::kProbe;
  const BlockingClientFactory make = mooncake_client_factory(options);
  for (int i = 0; i < 2; ++i) make()->tear_down();
  std::ifstream file(runs);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "run\n");
}

// The thread that makes a client has all signals blocked; Ctrl-C must end the probe all the same.
TEST_F(MooncakeProbe, ItsProcessBlocksNoSignals) {
  const fs::path program = master_->folder() / "probe";
  std::ofstream(program) << "#!/bin/sh\nexec grep SigBlk /proc/self/status\n";
  fs::permissions(program, fs::perms::owner_all);
  ::setenv("KVPRISM_MOONCAKE_PROBE", program.c_str(), 1);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const std::string line = mooncake::run_probe(original_, "127.0.0.1:1", std::chrono::seconds(30));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(line, "SigBlk:\t0000000000000000");
}

TEST_F(MooncakeProbe, CrashIsAVerdict) {
  const fs::path library = copy([](Image& image) {
    const std::array<char, 2> kUndefined = {'\x0f', '\x0b'};
    std::memcpy(image.at(image.code_of(kCreate)), kUndefined.data(), kUndefined.size());
  });
  MooncakeOptions options = options_of(library);
  options.unknown_build = UnknownBuild::kProbe;
  for (int i = 0; i < 2; ++i) {
    try {
      mooncake_client_factory(options)();
      FAIL() << "a crashing library was used";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      const std::string text = error.what();
      EXPECT_NE(text.find("Illegal instruction"), std::string::npos) << text;
      const std::string file = mooncake::verdict_path(mooncake::hash_file(library.string()));
      EXPECT_EQ(text.find("to ask it again remove " + file) != std::string::npos, i == 1) << text;
    }
    ::setenv("KVPRISM_MOONCAKE_PROBE", "/nonexistent", 1);
  }
}

TEST_F(MooncakeProbe, MissingSymbolIsNamed) {
  const fs::path library = copy([](Image& image) {
    // In the table of names: the function goes by another name.
    for (std::size_t at = image.find(kCreate); at != std::string::npos; at = image.find(kCreate)) {
      image.at(at)[std::strlen(kCreate) - 1] = 'x';
    }
  });
  MooncakeOptions options = options_of(library);
  options.unknown_build = UnknownBuild::kProbe;
  try {
    mooncake_client_factory(options)();
    FAIL() << "an incomplete library was used";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("refused"), std::string::npos) << text;
    EXPECT_NE(text.find(kCreate), std::string::npos) << text;
    EXPECT_NE(text.find(library.string()), std::string::npos) << text;
  }
  // A refusal may be this machine's: it is made anew each time.
  EXPECT_EQ(mooncake::read_verdict(mooncake::hash_file(library.string())), "");
}

TEST_F(MooncakeProbe, NoMasterIsNoVerdictOnTheLibrary) {
  const fs::path library = copy([](Image&) {});
  master_->process().signal(SIGSTOP);
  EXPECT_THROW(mooncake::run_probe(library.string(), master_->address(), std::chrono::seconds(2)),
               Error);
  master_->process().signal(SIGCONT);
  EXPECT_EQ(mooncake::read_verdict(mooncake::hash_file(library.string())), "");
}

TEST_F(MooncakeProbe, ListsTheKnownBuilds) {
  const std::string command = std::string(std::getenv("KVPRISM_MOONCAKE_PROBE")) + " --list-json";
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), &::pclose);
  std::string text;
  for (std::array<char, 4096> buffer;
       const std::size_t got = std::fread(buffer.data(), 1, buffer.size(), pipe.get());) {
    text.append(buffer.data(), got);
  }
  for (const MooncakeAbiRow& row : known_mooncake_builds()) {
    EXPECT_NE(text.find(row.build_id), std::string::npos);
  }
}

}  // namespace
}  // namespace kvprism::test

int main(int argc, char** argv) {
  kvprism::test::enter_private_network();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
