// kvprism-mooncake-probe: exercises a Mooncake library in a process of its own, so that a crash is
// a verdict.
//
//   kvprism-mooncake-probe LIBRARY [--master HOST:PORT] [--python LIBPYTHON]   one verdict line as
//   JSON kvprism-mooncake-probe --list-json                                        the known builds
//   as JSON
//
// Exit status: 0 verdict "ok", 1 any other verdict, 2 wrong use.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvprism/base/error.h"
#include "mooncake/elf.h"
#include "mooncake/library.h"
#include "mooncake/probe.h"

namespace {

namespace mc = kvprism::mooncake;

constexpr std::chrono::seconds kLimit{150};
constexpr int kNotStarted = 126;  // exit status of a child that is not the probe
constexpr std::size_t kSegmentBytes = std::size_t{64} << 20;

struct Verdict {
  std::string word;
  std::string detail;
};

struct Arguments {
  std::string library;
  std::string master;
  std::string python;
};

// Bytes between two pages that nobody may touch, against the upper or the lower one.
class Guarded {
 public:
  Guarded(std::size_t bytes, bool against_end) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    inner_ = (bytes + page - 1) / page * page;
    mapped_ = inner_ + 2 * page;
    map_ = static_cast<unsigned char*>(
        ::mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (map_ == MAP_FAILED || ::mprotect(map_ + page, inner_, PROT_READ | PROT_WRITE) != 0) {
      throw std::bad_alloc();
    }
    pages_ = map_ + page;
    data_ = against_end ? pages_ + inner_ - bytes : pages_;
    std::memset(pages_, kUntouched, inner_);
  }

  unsigned char* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  unsigned char* pages() const { return pages_; }
  std::size_t page_bytes() const { return inner_; }

  void fill(std::uint32_t seed) {
    for (std::size_t i = 0; i < bytes_; ++i) {
      seed = seed * 1664525u + 1013904223u;
      data_[i] = static_cast<unsigned char>(seed >> 24);
    }
  }

  // True when the bytes of the pages outside the segment are as they were.
  bool margins_untouched() const {
    for (const unsigned char* at = pages_; at != pages_ + inner_; ++at) {
      if ((at < data_ || at >= data_ + bytes_) && *at != kUntouched) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kUntouched = 0xA5;
  std::size_t bytes_;
  std::size_t inner_ = 0;
  std::size_t mapped_ = 0;
  unsigned char* map_ = nullptr;
  unsigned char* pages_ = nullptr;
  unsigned char* data_ = nullptr;
};

struct Object {
  std::string key;
  std::vector<std::unique_ptr<Guarded>> source;
  std::vector<std::unique_ptr<Guarded>> target;
  std::size_t bytes = 0;
};

std::vector<Object> make_objects() {
  const std::vector<std::vector<std::size_t>> shapes = {
      {1},          {3, 4097}, {65537, 1, 4095}, {(1 << 20) + 13, 31}, {17, 17, 17, 17, 17, 17, 17},
      {4096, 8192}, {999999},
  };
  std::vector<Object> objects;
  std::uint32_t seed = 1;
  for (const auto& shape : shapes) {
    Object object;
    object.key = "kvprism-probe-" + std::to_string(::getpid()) + "-" + std::to_string(seed);
    for (const std::size_t bytes : shape) {
      object.source.push_back(std::make_unique<Guarded>(bytes, seed % 2 == 0));
      object.target.push_back(std::make_unique<Guarded>(bytes, seed % 3 == 0));
      object.source.back()->fill(seed++);
      object.bytes += bytes;
    }
    objects.push_back(std::move(object));
  }
  return objects;
}

std::string at(const Object& object, std::string_view what) {
  return object.key + " of " + std::to_string(object.bytes) + " bytes: " + std::string(what);
}

Verdict exercise(const mc::Library& library, const std::string& master) {
  const mc::StoreFunctions& store = library.store;
  const std::shared_ptr<mc::NativeClient> client = store.create();
  if (client == nullptr) return {"wrong_result", "create returned null"};
  if (const int code =
          store.setup_real(client.get(), "127.0.0.1", "P2PHANDSHAKE", kSegmentBytes, 0, "tcp", "",
                           master, nullptr, "", false, "", "default", false, 0);
      code != 0) {
    return {"no_master", "set-up with " + master + " returned " + std::to_string(code)};
  }

  std::vector<Object> objects = make_objects();
  mc::Strings keys;
  mc::BufferLists sources, targets;
  mc::LengthLists lengths;
  for (const Object& object : objects) {
    keys.push_back(object.key);
    sources.emplace_back();
    targets.emplace_back();
    lengths.emplace_back();
    for (std::size_t i = 0; i < object.source.size(); ++i) {
      sources.back().push_back(object.source[i]->data());
      targets.back().push_back(object.target[i]->data());
      lengths.back().push_back(object.source[i]->size());
      for (const Guarded* memory : {object.source[i].get(), object.target[i].get()}) {
        const int code = store.register_buffer(client.get(), memory->pages(), memory->page_bytes());
        if (code != 0) return {"wrong_result", "register_buffer returned " + std::to_string(code)};
      }
    }
  }

  const mc::ReplicateConfig config;
  const std::vector<int> put =
      store.batch_put_from_multi_buffers(client.get(), keys, sources, lengths, config);
  if (put.size() != keys.size()) return {"wrong_result", "put returned another number of results"};
  for (std::size_t i = 0; i < put.size(); ++i) {
    if (put[i] != 0) {
      return {"wrong_result", at(objects[i], "put returned " + std::to_string(put[i]))};
    }
  }

  mc::Strings asked = keys;
  asked.push_back(keys.front() + "-absent");
  const std::vector<int> exist = store.batch_is_exist(client.get(), asked);
  if (exist.size() != asked.size())
    return {"wrong_result", "exists returned another number of results"};
  for (std::size_t i = 0; i < exist.size(); ++i) {
    if (exist[i] != (i < keys.size() ? 1 : 0)) {
      return {"wrong_result", "exists of " + asked[i] + " returned " + std::to_string(exist[i])};
    }
  }

  const std::vector<int> got =
      store.batch_get_into_multi_buffers(client.get(), keys, targets, lengths, false);
  if (got.size() != keys.size()) return {"wrong_result", "get returned another number of results"};
  for (std::size_t i = 0; i < objects.size(); ++i) {
    const Object& object = objects[i];
    if (got[i] != static_cast<int>(object.bytes)) {
      return {"wrong_result", at(object, "get returned " + std::to_string(got[i]))};
    }
    if (store.get_size(client.get(), object.key) != static_cast<std::int64_t>(object.bytes)) {
      return {"wrong_result", at(object, "getSize differs")};
    }
    for (std::size_t j = 0; j < object.source.size(); ++j) {
      const Guarded& source = *object.source[j];
      const Guarded& target = *object.target[j];
      if (std::memcmp(source.data(), target.data(), source.size()) != 0) {
        return {"wrong_bytes", at(object, "segment " + std::to_string(j) + " differs")};
      }
      if (!source.margins_untouched() || !target.margins_untouched()) {
        return {"wrong_bytes",
                at(object, "bytes beside segment " + std::to_string(j) + " changed")};
      }
    }
  }

  const std::vector<int> absent = store.batch_get_into_multi_buffers(
      client.get(), {asked.back()}, {targets.front()}, {lengths.front()}, false);
  if (absent.size() != 1 || absent[0] >= 0)
    return {"wrong_result", "get of an absent key succeeded"};
  for (const std::string& key : keys) store.remove(client.get(), key, true);
  if (const int code = store.health_check(client.get()); code != 0) {
    return {"wrong_result", "health_check returned " + std::to_string(code)};
  }
  if (const int code = store.tear_down_all(client.get()); code != 0) {
    return {"wrong_result", "tearDownAll returned " + std::to_string(code)};
  }
  return {std::string(mc::kVerdictOk),
          std::to_string(objects.size()) + " objects put, found and read back"};
}

Verdict examine(const Arguments& arguments) {
  try {
    mc::OpenRequest request;
    request.path = arguments.library;
    request.python_library = arguments.python;
    request.accept_unknown = [](const mc::LibraryFile&) { return true; };
    // Without the shortcut by memcpy, the bytes take the way that they take between machines.
    request.environment = {{"MC_FORCE_TCP", "1"}, {"MC_STORE_MEMCPY", "0"}};
    const mc::Library& library = mc::open_library(request);
    if (arguments.master.empty()) return {"not_exercised", "every symbol is there; give --master"};
    return exercise(library, arguments.master);
  } catch (const kvprism::Error& error) {
    return {"refused", error.what()};
  } catch (const std::exception& error) {
    return {"crash", std::string("exception: ") + error.what()};
  } catch (...) {
    return {"crash", "unknown exception"};
  }
}

// Everything else may be this machine's fault, or its network's, and another time it may go well.
bool tells_of_library(std::string_view word) {
  return word == mc::kVerdictOk || word == "crash" || word == "wrong_bytes";
}

// Runs examine() in a child made by exec and reads "word\ndetail" from it.
Verdict supervise(const char* self, const Arguments& arguments) {
  std::array<int, 2> ends;
  if (::pipe(ends.data()) != 0) return {"refused", std::strerror(errno)};
  const pid_t child = ::fork();
  if (child < 0) return {"refused", std::strerror(errno)};
  if (child == 0) {
    // Whoever gives up on the supervisor gives up on this one too.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(ends[0]);
    const std::string out = std::to_string(ends[1]);
    ::execl("/proc/self/exe", self, "--child", out.c_str(), arguments.library.c_str(),
            arguments.master.c_str(), arguments.python.c_str(), static_cast<char*>(nullptr));
    ::_exit(kNotStarted);
  }
  ::close(ends[1]);

  std::string text;
  bool in_time = true;
  const auto end = std::chrono::steady_clock::now() + kLimit;
  for (std::array<char, 4096> buffer;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd wait{ends[0], POLLIN, 0};
    const int ready = left.count() <= 0 ? 0 : ::poll(&wait, 1, static_cast<int>(left.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) {
      in_time = false;
      break;
    }
    const ssize_t got = ::read(ends[0], buffer.data(), buffer.size());
    if (got <= 0) break;
    text.append(buffer.data(), static_cast<std::size_t>(got));
    // The verdict stands; what the library does while its process ends is no part of it.
    if (text.ends_with('\0')) break;
  }
  ::close(ends[0]);
  const bool complete = text.ends_with('\0');
  if (complete || !in_time) ::kill(child, SIGKILL);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!in_time) return {"timeout", "no verdict within " + std::to_string(kLimit.count()) + " s"};
  if (!complete) {
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNotStarted)
      return {"refused", "the probe cannot start itself"};
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
      return {"refused", "killed, for its memory perhaps"};
    if (WIFSIGNALED(status)) {
      return {"crash", std::string("signal ") + ::strsignal(WTERMSIG(status))};
    }
    return {"crash", "exit status " + std::to_string(WEXITSTATUS(status))};
  }
  text.pop_back();
  const std::size_t line = text.find('\n');
  return {text.substr(0, line), text.substr(line + 1)};
}

int child_main(char** argv) {
  const Verdict verdict = examine({argv[3], argv[4], argv[5]});
  const std::string text = verdict.word + "\n" + verdict.detail + std::string(1, '\0');
  const int out = std::atoi(argv[2]);
  return ::write(out, text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1;
}

std::string to_line(const Verdict& verdict, const mc::LibraryFile& file, const std::string& hash) {
  using mc::json_quote;
  return "{\"verdict\": " + json_quote(verdict.word) +
         ", \"detail\": " + json_quote(verdict.detail) + ", \"library\": " + json_quote(file.path) +
         ", \"distribution\": " + json_quote(file.distribution) +
         ", \"version\": " + json_quote(file.version) +
         ", \"python_tag\": " + json_quote(file.python_tag) +
         ", \"build_id\": " + json_quote(file.build_id) + ", \"sha256\": " + json_quote(hash) +
         ", \"known\": " + (mc::find_row(file) != nullptr ? "true" : "false") + "}";
}

void list_json() {
  const char* separator = "[\n";
  for (const kvprism::MooncakeAbiRow& row : kvprism::known_mooncake_builds()) {
    std::cout << separator << "  {\"distribution\": " << mc::json_quote(row.distribution)
              << ", \"version\": " << mc::json_quote(row.version)
              << ", \"python_tag\": " << mc::json_quote(row.python_tag)
              << ", \"library\": " << mc::json_quote(row.library)
              << ", \"build_id\": " << mc::json_quote(row.build_id)
              << ", \"exercised\": " << (row.exercised ? "true" : "false") << "}";
    separator = ",\n";
  }
  std::cout << "\n]\n";
}

int usage() {
  std::cerr << "usage: kvprism-mooncake-probe LIBRARY [--master HOST:PORT] [--python LIBPYTHON]\n"
               "       kvprism-mooncake-probe --list-json\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 6 && std::string_view(argv[1]) == "--child") return child_main(argv);
  if (argc == 2 && std::string_view(argv[1]) == "--list-json") {
    list_json();
    return 0;
  }
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if ((word == "--master" || word == "--python") && i + 1 < argc) {
      (word == "--master" ? arguments.master : arguments.python) = argv[++i];
    } else if (arguments.library.empty() && !word.starts_with("-")) {
      arguments.library = word;
    } else {
      return usage();
    }
  }
  if (arguments.library.empty()) return usage();

  const mc::LibraryFile file = mc::describe_file(arguments.library);
  const std::string hash = mc::hash_file(file.path);
  const Verdict verdict =
      hash.empty() ? Verdict{"refused", "the file cannot be read"} : supervise(argv[0], arguments);
  const std::string line = to_line(verdict, file, hash);
  std::cout << line << std::endl;
  if (!hash.empty() && tells_of_library(verdict.word)) mc::write_verdict(hash, line);
  return verdict.word == mc::kVerdictOk ? 0 : 1;
}
