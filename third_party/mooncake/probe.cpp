#include "mooncake/probe.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "kvprism/base/error.h"

extern char** environ;

namespace kvprism::mooncake {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kProgram = "kvprism-mooncake-probe";
// Part of every cached verdict's name: raised when what the probe exercises changes.
constexpr std::string_view kRevision = "1";

bool is_program(const fs::path& path) { return ::access(path.c_str(), X_OK) == 0; }

}  // namespace

std::string json_quote(std::string_view text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20) {
      out += "\\u00";
      out += kDigits[c >> 4];
      out += kDigits[c & 15];
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

std::string verdict_word(std::string_view line) {
  constexpr std::string_view kKey = "\"verdict\": \"";
  const std::size_t at = line.find(kKey);
  if (at == std::string_view::npos) return {};
  const std::string_view rest = line.substr(at + kKey.size());
  return std::string(rest.substr(0, rest.find('"')));
}

std::string verdict_path(std::string_view sha256) {
  fs::path folder;
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != 0) {
    folder = cache;
  } else if (const char* home = std::getenv("HOME"); home != nullptr && *home != 0) {
    folder = fs::path(home) / ".cache";
  } else {
    return {};
  }
  std::string name = "mooncake-probe-";
  name.append(kRevision).append("-").append(sha256).append(".json");
  return (folder / "kvprism" / name).string();
}

std::string read_verdict(std::string_view sha256) {
  const std::string path = verdict_path(sha256);
  std::ifstream file(path);
  std::string line;
  if (path.empty() || !std::getline(file, line)) return {};
  return line;
}

bool write_verdict(std::string_view sha256, std::string_view line) {
  const std::string path = verdict_path(sha256);
  if (path.empty()) return false;
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  const std::string partial = path + "." + std::to_string(::getpid());
  {
    std::ofstream file(partial);
    file << line << '\n';
    if (!file.flush()) return false;
  }
  fs::rename(partial, path, error);
  return !error;
}

std::string find_probe() {
  const char* named = std::getenv("KVPRISM_MOONCAKE_PROBE");
  if (named != nullptr && *named != 0) return named;
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&find_probe), &info) != 0 && info.dli_fname != nullptr) {
    const fs::path beside = fs::path(info.dli_fname).parent_path() / kProgram;
    if (is_program(beside)) return beside.string();
  }
  const char* path = std::getenv("PATH");
  std::string_view rest = path == nullptr ? std::string_view{} : path;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(':'), rest.size());
    const fs::path candidate = fs::path(rest.substr(0, end)) / kProgram;
    if (end != 0 && is_program(candidate)) return candidate.string();
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return {};
}

std::string run_probe(const std::string& library, const std::string& master,
                      std::chrono::seconds limit) {
  constexpr std::string_view kSubject = "Mooncake probe";
  const std::string program = find_probe();
  if (program.empty()) {
    fail(ErrorCode::kNotFound, kSubject,
         {"probe", std::string(kProgram), "installed beside libkvprism or on PATH",
          "its path can be given in KVPRISM_MOONCAKE_PROBE"});
  }
  std::array<int, 2> ends;
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    fail(ErrorCode::kUnavailable, kSubject, {"pipe", std::strerror(errno), "a pipe", {}});
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  // Of the caller's signals all may be blocked: the probe ends by those that end its group.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  std::array<std::string, 4> words = {program, library, "--master", master};
  std::array<char*, 5> arguments = {words[0].data(), words[1].data(), words[2].data(),
                                    words[3].data(), nullptr};
  pid_t child = -1;
  const int error =
      posix_spawn(&child, program.c_str(), &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  if (error != 0) {
    ::close(ends[0]);
    fail(ErrorCode::kNotFound, kSubject, {"probe", program, std::strerror(error), {}});
  }

  std::string output;
  bool in_time = true;
  const auto end = std::chrono::steady_clock::now() + limit;
  for (std::array<char, 4096> buffer;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd wait{ends[0], POLLIN, 0};
    const int ready = left.count() <= 0 ? 0 : ::poll(&wait, 1, static_cast<int>(left.count()));
    if (ready == 0) {
      in_time = false;
      break;
    }
    if (ready < 0 && errno == EINTR) continue;
    const ssize_t got = ::read(ends[0], buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    output.append(buffer.data(), static_cast<std::size_t>(got));
  }
  ::close(ends[0]);
  if (!in_time) ::kill(child, SIGKILL);
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (!in_time) {
    fail(ErrorCode::kTimedOut, kSubject,
         {"probe",
          program + " " + library,
          "a verdict within " + std::to_string(limit.count()) + " s",
          {}});
  }
  return output.substr(0, output.find('\n'));
}

}  // namespace kvprism::mooncake
