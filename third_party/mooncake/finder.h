// Finds the installed store library through the file lists of installed distributions; loads
// nothing.
#pragma once

#include <string>
#include <vector>

#include "kvprism/backend/mooncake_client.h"

namespace kvprism::mooncake {

// What is known of a library file without loading it. Empty strings: not known.
struct LibraryFile {
  std::string path;          // canonical
  std::string distribution;  // that lists the file
  std::string version;
  std::string python_tag;  // e.g. "cp311"
  std::string build_id;
};

// The store libraries that distributions in `site_packages` list.
std::vector<LibraryFile> list_site_packages(const std::string& site_packages);

// The row of a file's build, or null.
const MooncakeAbiRow* find_row(const LibraryFile& file);

// Facts of one file, with its distribution if one beside it lists it: of several the one that has a
// row.
LibraryFile describe_file(const std::string& path);

// Folders of the active virtual environment and of the python3 on PATH that hold installed
// distributions.
std::vector<std::string> default_site_packages();

}  // namespace kvprism::mooncake
