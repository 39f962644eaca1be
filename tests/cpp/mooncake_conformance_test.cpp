// The conformance suite of object stores, on real Mooncake.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "mooncake_fixture.h"
#include "store_conformance.h"

namespace kvprism::test {
namespace {

// One master and one storage process for all tests of this program.
MooncakeMaster& shared_master() {
  static MooncakeMaster master(mooncake_site_packages());
  static const bool storage = (master.add_storage(64 << 20), true);
  static_cast<void>(storage);
  return master;
}

StoreUnderTest mooncake() {
  static int number = 0;
  StoreUnderTest test;
  MooncakeOptions options;
  options.site_packages = {mooncake_site_packages()};
  options.master = shared_master().address();
  options.environment = {{"MC_STORE_MEMCPY", "0"}};
  BlockingStoreOptions store_options;
  store_options.queue_limit = 64;
  const auto store =
      std::make_shared<BlockingStore>(mooncake_client_factory(options), store_options);
  test.store = store;
  test.index = store;
  test.queue_limit = store_options.queue_limit;
  test.tells_duplicates = false;
  test.now = &Operations::now;
  test.rest = [store] { store->wait_for_completion(milliseconds(5)); };
  test.key_prefix = std::to_string(::getpid()) + "-" + std::to_string(number++) + "-";
  return test;
}

INSTANTIATE_TEST_SUITE_P(Mooncake, StoreConformance,
                         testing::Values(StoreFactory{"mooncake", [] { return mooncake(); }}),
                         factory_name);
INSTANTIATE_TEST_SUITE_P(Mooncake, BoundedStoreConformance,
                         testing::Values(StoreFactory{"mooncake", [] { return mooncake(); }}),
                         factory_name);

}  // namespace
}  // namespace kvprism::test

int main(int argc, char** argv) {
  kvprism::test::enter_private_network();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
