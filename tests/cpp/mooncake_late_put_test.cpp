// The late write into the pool: a put whose memory the master has given to others meanwhile. Nobody
// can hinder it; what has been written over is told by Mooncake's checksums, and by nothing else.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "mooncake_fixture.h"

namespace kvprism::test {
namespace {

constexpr std::size_t kObject = 1 << 20;
constexpr std::size_t kObjects = 64;

// A process that acts when it hears a word and answers with a number. It goes with this object.
class Actor {
 public:
  explicit Actor(const std::function<void(Actor&)>& act) {
    EXPECT_EQ(::pipe(down_), 0);
    EXPECT_EQ(::pipe(up_), 0);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ != 0) {
      ::close(up_[1]);  // its end is then an answer
      return;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    try {
      act(*this);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }
  ~Actor() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    for (const int end : {down_[0], down_[1], up_[0]}) ::close(end);
  }
  Actor(const Actor&) = delete;
  Actor& operator=(const Actor&) = delete;

  void tell() const { EXPECT_EQ(::write(down_[1], "x", 1), 1); }
  // -1: it has ended.
  std::int64_t answer() const {
    std::int64_t number = -1;
    return ::read(up_[0], &number, sizeof(number)) == sizeof(number) ? number : -1;
  }
  std::int64_t ask() const {
    tell();
    return answer();
  }
  void signal(int number) const { ::kill(pid_, number); }

  // In the process itself.
  void hear() const {
    char word;
    if (::read(down_[0], &word, 1) != 1) ::_exit(1);
  }
  void say(std::size_t number) const {
    const auto wide = static_cast<std::int64_t>(number);
    if (::write(up_[1], &wide, sizeof(wide)) != sizeof(wide)) ::_exit(1);
  }

 private:
  int down_[2]{};
  int up_[2]{};
  pid_t pid_ = 0;
};

std::vector<Item> items(const std::string& name, const Memory& memory) {
  std::vector<Item> all;
  for (std::size_t i = 0; i < kObjects; ++i)
    all.push_back({name + std::to_string(i), {{memory.at(i * kObject), kObject}}});
  return all;
}

class LatePut : public MooncakeTest, public testing::WithParamInterface<bool> {
 protected:
  MooncakeOptions wanted(const MooncakeMaster& master) const {
    MooncakeOptions result = options(master, 0);
    if (GetParam()) result.environment.emplace_back("MOONCAKE_STORE_CHECKSUM", "1");
    return result;
  }

  // Puts once, of bytes 0xAA.
  void write(const Actor& self, const MooncakeMaster& master) const {
    BlockingStore store(mooncake_client_factory(wanted(master)));
    const Memory memory(kObjects * kObject);
    std::memset(memory.at(0), 0xAA, memory.size());
    store.add_region(memory.region());
    Operations run(store);
    self.say(run.put({{"before", {{memory.at(0), 16}}}}) == std::vector{ItemStatus::kOk});
    self.hear();
    const OpId put = run.start_put(items("late-", memory));
    run.wait([&] { return run.has_outcome(put); }, std::chrono::minutes(2));
    self.say(1);
    self.hear();
  }

  // Waits until the storage has gone, then until it is back; puts bytes 0x22; reads them twice.
  void use(const Actor& self, const MooncakeMaster& master) const {
    BlockingStore store(mooncake_client_factory(wanted(master)));
    const Memory memory(kObjects * kObject);
    store.add_region(memory.region());
    Operations run(store);
    const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
    self.say(1);
    self.hear();
    while (run.exists({"before"}) == std::vector{ItemStatus::kOk}) pause();
    self.say(1);
    self.hear();
    while (run.put({{"probe", {{memory.at(0), 16}}}}) != std::vector{ItemStatus::kOk}) pause();
    std::memset(memory.at(0), 0x22, memory.size());
    const auto stored = run.put(items("own-", memory));
    self.say(static_cast<std::size_t>(std::count(stored.begin(), stored.end(), ItemStatus::kOk)));
    for (int round = 0; round < 2; ++round) {
      self.hear();
      std::memset(memory.at(0), 0, memory.size());
      const auto statuses = run.get(items("own-", memory));
      std::size_t right = 0;
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < kObjects; ++i) {
        if (statuses[i] != ItemStatus::kOk) continue;
        const std::byte* const at = memory.at(i * kObject);
        const bool whole = std::count(at, at + kObject, std::byte{0x22}) == kObject;
        ++(whole ? right : wrong);
      }
      self.say(right);
      self.say(wrong);
      self.say(static_cast<std::size_t>(
          std::count(statuses.begin(), statuses.end(), ItemStatus::kChecksumMismatch)));
    }
    self.hear();
  }
};

// The storage stops during a put for longer than the master waits for it, and goes on. The writer's
// bytes are held back until others have that memory: its process is stopped, in place of a network
// that stalls.
TEST_P(LatePut, LandsInObjectsOfOthersAndChecksumsTellIt) {
  MooncakeMaster master(site_packages_, {"-client_ttl=6"});
  Process& storage = master.add_storage(256 << 20);
  const Actor writer([&](Actor& self) { write(self, master); });
  const Actor user([&](Actor& self) { use(self, master); });
  ASSERT_EQ(writer.answer(), 1);
  ASSERT_EQ(user.answer(), 1);
  storage.signal(SIGSTOP);
  writer.tell();
  ASSERT_EQ(user.ask(), 1) << "the master has dropped the storage";
  writer.signal(SIGSTOP);
  storage.signal(SIGCONT);
  const auto all = static_cast<std::int64_t>(kObjects);
  ASSERT_EQ(user.ask(), all) << "the same memory is given out again";
  EXPECT_EQ(user.ask(), all);
  EXPECT_EQ(user.answer(), 0);
  EXPECT_EQ(user.answer(), 0);
  writer.signal(SIGCONT);
  ASSERT_EQ(writer.answer(), 1);
  const std::int64_t right = user.ask();
  const std::int64_t wrong = user.answer();
  const std::int64_t told = user.answer();
  EXPECT_LT(right, all) << "no late write was provoked";
  EXPECT_EQ(right + wrong + told, all);
  EXPECT_EQ(GetParam() ? wrong : told, 0) << "with checksums no wrong byte, without no word";
}

INSTANTIATE_TEST_SUITE_P(Checksums, LatePut, testing::Bool(), [](const auto& parameter) {
  return parameter.param ? std::string("With") : std::string("Without");
});

}  // namespace
}  // namespace kvprism::test

int main(int argc, char** argv) {
  kvprism::test::enter_private_network();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
