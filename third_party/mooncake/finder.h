// Finds the installed store library through the file lists of installed distributions; loads
// nothing.
#pragma once

#include <string>
#include <vector>

namespace kvprism::mooncake {

// What is known of a library file without loading it. Empty strings: not known.
struct LibraryFile {
  std::string path;          // canonical
  std::string distribution;  // of the distribution that lists the file
  std::string version;
  std::string python_tag;  // e.g. "cp311"
  std::string build_id;
};

// The store libraries that distributions in `site_packages` list.
std::vector<LibraryFile> list_site_packages(const std::string& site_packages);

// Facts of one file, with its distribution if one beside it lists it.
LibraryFile describe_file(const std::string& path);

// Folders of the active virtual environment and of the python3 on PATH that hold installed
// distributions.
std::vector<std::string> default_site_packages();

}  // namespace kvprism::mooncake
