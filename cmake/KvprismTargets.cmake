# Flags every target of ours is compiled with. Never exported, never global.
add_library(kvprism_flags INTERFACE)
target_compile_features(kvprism_flags INTERFACE cxx_std_20)
target_compile_options(kvprism_flags INTERFACE -Wall -Wextra $<$<BOOL:${KVPRISM_WERROR}>:-Werror>)
# g++ 12 takes sums of strings for overlapping copies (its bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(kvprism_flags INTERFACE -Wno-restrict)
endif()
target_compile_definitions(kvprism_flags INTERFACE $<$<CONFIG:Debug>:_GLIBCXX_ASSERTIONS>)

if(KVPRISM_SANITIZE STREQUAL "address")
  set(kvprism_sanitize -fsanitize=address,undefined)
  target_compile_options(kvprism_flags INTERFACE -fno-sanitize-recover=undefined)
elseif(KVPRISM_SANITIZE STREQUAL "thread")
  set(kvprism_sanitize -fsanitize=thread)
  # ThreadSanitizer does not model fences; g++ says so at every use.
  target_compile_options(kvprism_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
else()
  set(kvprism_sanitize "")
endif()
if(kvprism_sanitize)
  target_compile_options(kvprism_flags INTERFACE ${kvprism_sanitize} -fno-omit-frame-pointer)
  target_link_options(kvprism_flags INTERFACE ${kvprism_sanitize})
  # Under sanitizers g++ takes moves inside <regex> and <functional> for reads of nothing.
  target_compile_options(kvprism_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()
if(KVPRISM_BUILD_FUZZ)
  target_compile_options(kvprism_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# Settings common to all targets that a user never links by name.
function(kvprism_target_defaults target)
  set_target_properties(
    ${target}
    PROPERTIES
      CXX_EXTENSIONS OFF
      CXX_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON
      POSITION_INDEPENDENT_CODE ON
  )
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:kvprism_flags>)
endfunction()

# Settings of the libraries that users link by name.
function(kvprism_library_defaults target)
  kvprism_target_defaults(${target})
  set_target_properties(
    ${target}
    PROPERTIES
      LINKER_LANGUAGE CXX
      LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib"
      ARCHIVE_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib"
  )
  if(BUILD_SHARED_LIBS)
    target_link_options(
      ${target}
      PRIVATE
        "LINKER:--version-script,${PROJECT_SOURCE_DIR}/cmake/kvprism.map"
        $<$<STREQUAL:${KVPRISM_SANITIZE},>:LINKER:-z,defs>
    )
    set_target_properties(
      ${target}
      PROPERTIES LINK_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/kvprism.map"
    )
  endif()
  # A wheel cannot hold the symbolic links of a versioned library.
  if(NOT kvprism_in_wheel)
    set_target_properties(
      ${target}
      PROPERTIES
        VERSION ${PROJECT_VERSION}
        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    )
  endif()
endfunction()
