#include "mooncake/finder.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>
#include <tuple>

#include "mooncake/elf.h"

namespace kvprism::mooncake {
namespace {

namespace fs = std::filesystem;

std::string canonical_text(const fs::path& path) {
  std::error_code error;
  const fs::path result = fs::weakly_canonical(path, error);
  return error ? path.string() : result.string();
}

// "mooncake/store.so" and, in later versions, "mooncake/_store.cpython-311-x86_64-linux-gnu.so".
bool is_store_library(std::string_view file) {
  constexpr std::string_view kFolder = "mooncake/";
  if (!file.starts_with(kFolder) || !file.ends_with(".so")) return false;
  const std::string_view name = file.substr(kFolder.size());
  return name == "store.so" || name.starts_with("_store.cpython-");
}

std::string header_value(const fs::path& file, std::string_view key) {
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line) && !line.empty();) {
    if (line.starts_with(key)) return line.substr(key.size());
  }
  return {};
}

// "cp311" out of "Tag: cp311-cp311-manylinux_2_28_x86_64".
std::string wheel_tag(const fs::path& dist_info) {
  const std::string tag = header_value(dist_info / "WHEEL", "Tag: ");
  return tag.substr(0, tag.find('-'));
}

std::string tag_of_name(const std::string& path) {
  constexpr std::string_view kMark = ".cpython-";
  const std::size_t at = path.rfind(kMark);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + kMark.size();
  return "cp" + path.substr(begin, path.find('-', begin) - begin);
}

}  // namespace

std::vector<LibraryFile> list_site_packages(const std::string& site_packages) {
  std::vector<LibraryFile> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(site_packages, error)) {
    const std::string name = entry.path().filename().string();
    if (name.find("mooncake") == std::string::npos || !name.ends_with(".dist-info")) continue;
    std::ifstream record(entry.path() / "RECORD");
    for (std::string line; std::getline(record, line);) {
      const std::string file = line.substr(0, line.find(','));
      if (!is_store_library(file)) continue;
      LibraryFile library;
      library.path = canonical_text(fs::path(site_packages) / file);
      library.distribution = header_value(entry.path() / "METADATA", "Name: ");
      library.version = header_value(entry.path() / "METADATA", "Version: ");
      library.python_tag = wheel_tag(entry.path());
      library.build_id = read_build_id(library.path);
      found.push_back(std::move(library));
    }
  }
  std::sort(found.begin(), found.end(), [](const LibraryFile& a, const LibraryFile& b) {
    return std::tie(a.path, a.distribution) < std::tie(b.path, b.distribution);
  });
  return found;
}

const MooncakeAbiRow* find_row(const LibraryFile& file) {
  const auto rows = known_mooncake_builds();
  const auto at = std::find_if(rows.begin(), rows.end(), [&](const MooncakeAbiRow& row) {
    return row.build_id == file.build_id &&
           (file.distribution.empty() || row.distribution == file.distribution) &&
           (file.version.empty() || row.version == file.version);
  });
  return at == rows.end() ? nullptr : &*at;
}

LibraryFile describe_file(const std::string& path) {
  const std::string file = canonical_text(path);
  const fs::path folder = fs::path(file).parent_path();
  std::vector<LibraryFile> listed = list_site_packages(folder.parent_path().string());
  std::erase_if(listed, [&](const LibraryFile& library) { return library.path != file; });
  if (listed.empty()) return {file, {}, {}, tag_of_name(file), read_build_id(file)};
  // pip lets a second distribution overwrite the file of another.
  const auto known = std::find_if(listed.begin(), listed.end(), [](const LibraryFile& library) {
    return find_row(library) != nullptr;
  });
  return known == listed.end() ? listed.front() : *known;
}

std::vector<std::string> default_site_packages() {
  std::vector<std::string> folders;
  const auto add_under = [&](const fs::path& prefix) {
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(prefix / "lib", error)) {
      if (!entry.path().filename().string().starts_with("python3")) continue;
      for (const char* leaf : {"site-packages", "dist-packages"}) {
        const std::string folder = (entry.path() / leaf).string();
        if (fs::is_directory(folder, error) &&
            std::find(folders.begin(), folders.end(), folder) == folders.end()) {
          folders.push_back(folder);
        }
      }
    }
  };
  const char* environment = std::getenv("VIRTUAL_ENV");
  if (environment != nullptr && *environment != 0) add_under(environment);
  if (const char* path = std::getenv("PATH")) {
    std::string_view rest = path;
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find(':'), rest.size());
      const fs::path folder(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
      std::error_code error;
      if (folder.empty() || !fs::exists(folder / "python3", error)) continue;
      add_under(folder.parent_path());
      const fs::path real = fs::canonical(folder / "python3", error);
      if (!error) add_under(real.parent_path().parent_path());
      if (real.string().starts_with("/usr/bin/")) add_under("/usr/local");
      break;
    }
  }
  return folders;
}

}  // namespace kvprism::mooncake
