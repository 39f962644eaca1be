// The example engine, a program without Python, stores in a real Mooncake and reads it back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "mooncake_server.h"

namespace kvprism::test {
namespace {

TEST(MooncakeEngine, StoresWithoutPython) {
  const std::string packages = mooncake_site_packages();
  MooncakeMaster master(packages);
  master.add_storage(64u << 20);
  // The library is looked for beside the python3 in PATH.
  const auto programs = std::filesystem::path(packages).parent_path().parent_path().parent_path();
  const std::string path = (programs / "bin").string() + ":" + std::getenv("PATH");
  const auto engine = std::filesystem::canonical("/proc/self/exe").parent_path() / "kvprism_engine";
  Process process(
      {"/usr/bin/env", "PATH=" + path, "MC_LOG_LEVEL=ERROR", engine.string(), master.address()},
      (master.folder() / "engine.log").string());
  ASSERT_TRUE(within(std::chrono::seconds(90), [&] { return !process.running(); }))
      << process.log_text();
  // How much the first engine found depends on how fast its saves were.
  EXPECT_THAT(process.log_text(), testing::HasSubstr(" 192 192 192\n0 bytes wrong\n"));
}

}  // namespace
}  // namespace kvprism::test

int main(int argc, char** argv) {
  kvprism::test::enter_private_network();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
