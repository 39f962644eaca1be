# Finds the header of xxHash (used inline) and defines xxHash::xxHash_inline.
find_path(xxHash_INCLUDE_DIR NAMES xxhash.h)
mark_as_advanced(xxHash_INCLUDE_DIR)

if(xxHash_INCLUDE_DIR)
  file(
    STRINGS "${xxHash_INCLUDE_DIR}/xxhash.h"
    xxHash_lines
    REGEX "#[ ]*define XXH_VERSION_(MAJOR|MINOR|RELEASE) "
  )
  string(REGEX REPLACE ".*XXH_VERSION_MAJOR +([0-9]+).*" "\\1" xxHash_major "${xxHash_lines}")
  string(REGEX REPLACE ".*XXH_VERSION_MINOR +([0-9]+).*" "\\1" xxHash_minor "${xxHash_lines}")
  string(REGEX REPLACE ".*XXH_VERSION_RELEASE +([0-9]+).*" "\\1" xxHash_release "${xxHash_lines}")
  set(xxHash_VERSION "${xxHash_major}.${xxHash_minor}.${xxHash_release}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  xxHash
  REQUIRED_VARS xxHash_INCLUDE_DIR
  VERSION_VAR xxHash_VERSION
)

if(xxHash_FOUND AND NOT TARGET xxHash::xxHash_inline)
  add_library(xxHash::xxHash_inline INTERFACE IMPORTED)
  set_target_properties(
    xxHash::xxHash_inline
    PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${xxHash_INCLUDE_DIR}"
      # Empty, as sources that say `#define XXH_INLINE_ALL` define it.
      INTERFACE_COMPILE_DEFINITIONS "XXH_INLINE_ALL="
  )
endif()
