#include "mooncake/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <string_view>

#include "kvprism/base/error.h"
#include "kvprism/base/log.h"

namespace kvprism::mooncake {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSubject = "Mooncake library";

#define KVPRISM_STRING "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#define KVPRISM_STRINGS "RKSt6vectorI" KVPRISM_STRING "SaIS7_EE"
#define KVPRISM_LISTS "RKS1_IS1_IPvSaISC_EESaISE_EERKS1_IS1_ImSaImEESaISK_EE"

struct Symbol {
  const char* name;
  std::size_t slot;  // offset in StoreFunctions
};

constexpr std::array kSymbols = {
    Symbol{"_ZN8mooncake10RealClient6createEv", offsetof(StoreFunctions, create)},
    Symbol{"_ZN8mooncake10RealClient10setup_realERK" KVPRISM_STRING
           "S8_mmS8_S8_S8_RKSt10shared_ptrINS_14TransferEngineEES8_bS8_S8_bi",
           offsetof(StoreFunctions, setup_real)},
    Symbol{"_ZN8mooncake10RealClient15register_bufferEPvm",
           offsetof(StoreFunctions, register_buffer)},
    Symbol{"_ZN8mooncake10RealClient17unregister_bufferEPv",
           offsetof(StoreFunctions, unregister_buffer)},
    Symbol{"_ZN8mooncake10RealClient28batch_put_from_multi_buffersE" KVPRISM_STRINGS KVPRISM_LISTS
           "RKNS_15ReplicateConfigE",
           offsetof(StoreFunctions, batch_put_from_multi_buffers)},
    Symbol{"_ZN8mooncake10RealClient28batch_get_into_multi_buffersE" KVPRISM_STRINGS KVPRISM_LISTS
           "b",
           offsetof(StoreFunctions, batch_get_into_multi_buffers)},
    Symbol{"_ZN8mooncake10RealClient12batchIsExistE" KVPRISM_STRINGS,
           offsetof(StoreFunctions, batch_is_exist)},
    Symbol{"_ZN8mooncake10RealClient7getSizeERK" KVPRISM_STRING,
           offsetof(StoreFunctions, get_size)},
    Symbol{"_ZN8mooncake10RealClient6removeERK" KVPRISM_STRING "b",
           offsetof(StoreFunctions, remove)},
    Symbol{"_ZN8mooncake10RealClient13removeByRegexERK" KVPRISM_STRING "b",
           offsetof(StoreFunctions, remove_by_regex)},
    Symbol{"_ZN8mooncake10RealClient12health_checkEv", offsetof(StoreFunctions, health_check)},
    Symbol{"_ZN8mooncake10RealClient11tearDownAllEv", offsetof(StoreFunctions, tear_down_all)},
};
static_assert(kSymbols.size() * sizeof(void*) == sizeof(StoreFunctions));

#undef KVPRISM_STRING
#undef KVPRISM_STRINGS
#undef KVPRISM_LISTS

// Which package brings a system library that the wheel leaves to the machine.
std::string hint_for_loader(std::string_view message) {
  struct Hint {
    std::string_view library;
    std::string_view text;
  };
  static constexpr std::array kHints = {
      Hint{"libibverbs.so", "install libibverbs1"},
      Hint{"libnuma.so", "install libnuma1"},
      Hint{"libcurl.so", "install libcurl4"},
      Hint{"libmlx5.so", "install ibverbs-providers"},
      Hint{"libcuda.so", "install the NVIDIA driver, or mooncake-transfer-engine-non-cuda instead"},
      Hint{
          "libcudart.so",
          "install the CUDA runtime of that version, or mooncake-transfer-engine-non-cuda instead"},
  };
  for (const Hint& hint : kHints) {
    if (message.find(hint.library) != std::string_view::npos) return std::string(hint.text);
  }
  return {};
}

// "3.11" of "cp311"; empty when it is no such tag.
std::string python_version(const std::string& tag) {
  if (tag.size() < 4 || !tag.starts_with("cp3")) return {};
  return "3." + tag.substr(3);
}

std::string home_of_virtual_environment(const fs::path& prefix) {
  std::ifstream config(prefix / "pyvenv.cfg");
  for (std::string line; std::getline(config, line);) {
    constexpr std::string_view kKey = "home = ";
    if (line.starts_with(kKey)) return line.substr(kKey.size());
  }
  return {};
}

std::vector<std::string> python_candidates(const OpenRequest& request, const LibraryFile& file) {
  if (!request.python_library.empty()) return {request.python_library};
  const char* environment = std::getenv("KVPRISM_LIBPYTHON");
  if (environment != nullptr && *environment != 0) return {environment};
  const std::string version = python_version(file.python_tag);
  if (version.empty()) return {};
  const std::string name = "libpython" + version + ".so.1.0";
  // <prefix>/lib/python3.11/site-packages/mooncake/store.so
  const fs::path prefix = fs::path(file.path).parent_path() / "../../../..";
  std::vector<std::string> paths;
  if (const std::string home = home_of_virtual_environment(prefix); !home.empty()) {
    paths.push_back((fs::path(home) / ".." / "lib" / name).lexically_normal().string());
  }
  paths.push_back((prefix / "lib" / name).lexically_normal().string());
  paths.push_back(name);
  return paths;
}

// The library is also a Python extension with undefined data symbols of CPython. Opening libpython
// globally also keeps Mooncake from taking over the process's signals, which it does when it sees
// no Python.
void provide_python(const OpenRequest& request, const LibraryFile& file) {
  if (dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr) return;
  const std::vector<std::string> candidates = python_candidates(request, file);
  std::string tried;
  for (const std::string& path : candidates) {
    if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr &&
        dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr) {
      return;
    }
    tried += tried.empty() ? path : ", " + path;
  }
  fail(ErrorCode::kNotFound, kSubject,
       {"python_library", tried, "a libpython for tag '" + file.python_tag + "'",
        "give its path as python_library or in KVPRISM_LIBPYTHON; on Debian install libpython3.x"});
}

void set_environment(const OpenRequest& request, bool loaded_by_others) {
  for (const auto& [name, value] : request.defaults) {
    if (std::getenv(name.c_str()) != nullptr) continue;
    if (loaded_by_others) {
      log(LogLevel::kWarning, "Mooncake is in this process already, so " + name + "=" + value +
                                  " was not set; set it before the process starts");
    } else {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
  }
  if (loaded_by_others) return;
  for (const auto& [name, value] : request.environment) ::setenv(name.c_str(), value.c_str(), 1);
}

void require_environment(const OpenRequest& request) {
  ProblemList problems;
  for (const auto& [name, value] : request.environment) {
    const char* present = std::getenv(name.c_str());
    if (present != nullptr && value == present) continue;
    problems.add("environment." + name, present == nullptr ? "unset" : present, value,
                 "Mooncake is open in this process and read its environment then; set the variable "
                 "before");
  }
  problems.throw_if_any(ErrorCode::kUnsupported, kSubject);
}

std::string known_rows() {
  std::string text;
  for (const MooncakeAbiRow& row : known_mooncake_builds()) {
    text += "\n    " + std::string(row.distribution) + " " + std::string(row.version) + " " +
            std::string(row.python_tag) + " build " + std::string(row.build_id);
  }
  return text;
}

void resolve(void* handle, const LibraryFile& file, StoreFunctions& functions) {
  ProblemList problems;
  for (const Symbol& symbol : kSymbols) {
    void* address = dlsym(handle, symbol.name);
    if (address == nullptr) {
      problems.add("symbol", symbol.name, "present in " + file.path,
                   describe(file) + " has another interface");
      continue;
    }
    std::memcpy(reinterpret_cast<char*>(&functions) + symbol.slot, &address, sizeof(address));
  }
  problems.throw_if_any(ErrorCode::kNotFound, kSubject);
}

}  // namespace

std::string describe(const LibraryFile& file) {
  const auto or_unknown = [](const std::string& text, const char* what) {
    return text.empty() ? std::string(what) : text;
  };
  return or_unknown(file.distribution, "unknown distribution") + " " +
         or_unknown(file.version, "unknown version") + " " +
         or_unknown(file.python_tag, "unknown tag") + " (build " +
         or_unknown(file.build_id, "without id") + ")";
}

std::uint32_t tcp_queue_of(const MooncakeAbiRow* row, bool loaded_by_others, const char* text) {
  std::uint32_t queue = 0;
  if (text != nullptr) {
    const char* const end = text + std::strlen(text);
    const auto read = std::from_chars(text, end, queue);
    if (read.ec != std::errc() || read.ptr != end) queue = 0;
  }
  if (queue == 0 || queue > kLargestTcpQueue) return kTcpQueue;
  const bool tried = row != nullptr && row->version == "0.3.13.post1" && !loaded_by_others;
  return tried ? queue : std::min(queue, kTcpQueue);
}

const Library& open_library(const OpenRequest& request) {
  static std::mutex mutex;
  static const Library* open = nullptr;

  const std::lock_guard lock(mutex);
  LibraryFile file = describe_file(request.path);
  if (open != nullptr) {
    if (open->file.path != file.path) {
      fail(ErrorCode::kUnsupported, kSubject,
           {"library", file.path, open->file.path + ", which is open in this process",
            "one process can hold one Mooncake library"});
    }
    require_environment(request);
    return *open;
  }

  std::error_code error;
  if (!fs::is_regular_file(file.path, error)) {
    fail(ErrorCode::kNotFound, kSubject, {"library", request.path, "a file", {}});
  }
  const MooncakeAbiRow* row = find_row(file);
  if (row == nullptr && !(request.accept_unknown && request.accept_unknown(file))) {
    fail(ErrorCode::kUnsupported, kSubject,
         {"library", file.path + ", " + describe(file), "one of the known builds:" + known_rows(),
          "\n  to use it all the same, run: kvprism-mooncake-probe " + file.path +
              " --master HOST:PORT, and set unknown_build to probe"});
  }

  if (row != nullptr && file.distribution.empty()) {  // a copy that no list of files has
    file.distribution = row->distribution;
    file.version = row->version;
    file.python_tag = row->python_tag;
  }

  provide_python(request, file);
  const bool loaded_by_others =
      dlopen(file.path.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD) != nullptr;
  set_environment(request, loaded_by_others);
  if (loaded_by_others) require_environment(request);
  void* handle = dlopen(file.path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* message = dlerror();
    const std::string text = message == nullptr ? "unknown reason" : message;
    fail(ErrorCode::kNotFound, kSubject,
         {"library", file.path + ", " + describe(file), "a loadable library, but: " + text,
          hint_for_loader(text)});
  }
  auto library = std::make_unique<Library>();
  resolve(handle, file, library->store);
  library->file = std::move(file);
  library->row = row;
  library->tcp_queue = tcp_queue_of(row, loaded_by_others, std::getenv(kTcpQueueVariable));
  open = library.release();
  return *open;
}

}  // namespace kvprism::mooncake
