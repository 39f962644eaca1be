# kvprism_sources(<out> <directory> <suffix>): the files directly in <directory> (relative to the
# project) whose names end in <suffix>, as absolute paths.
#
# While cmake/sources.cmake exists, it is the list of all source files, and only files named there
# are built; scripts/freeze_sources.py writes and checks it. Without it the tree itself is the list.
file(GLOB KVPRISM_SOURCES_FILE CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/sources.cmake")
if(KVPRISM_SOURCES_FILE)
  include("${KVPRISM_SOURCES_FILE}")
endif()

function(kvprism_sources out directory suffix)
  if(KVPRISM_SOURCES_FILE)
    string(REGEX REPLACE "([.+])" "\\\\\\1" pattern "^${directory}/[^/]*${suffix}$")
    set(files ${KVPRISM_SOURCES})
    list(FILTER files INCLUDE REGEX "${pattern}")
    list(TRANSFORM files PREPEND "${PROJECT_SOURCE_DIR}/")
  else()
    file(GLOB files CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/${directory}/*${suffix}")
  endif()
  set(${out} ${files} PARENT_SCOPE)
endfunction()
