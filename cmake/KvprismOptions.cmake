# User-visible options. Tests and tools default to ON only where kvprism is the top-level project.

# scikit-build-core sets SKBUILD, for whichever project it builds: only ours makes our wheel.
set(kvprism_in_wheel OFF)
if(DEFINED SKBUILD AND PROJECT_IS_TOP_LEVEL)
  set(kvprism_in_wheel ON)
endif()
set(kvprism_python_default OFF)
set(kvprism_extras_default ${PROJECT_IS_TOP_LEVEL})
if(kvprism_in_wheel)
  set(kvprism_python_default ON)
  set(kvprism_extras_default OFF)
endif()

option(BUILD_SHARED_LIBS "Build kvprism as a shared library" ON)
option(KVPRISM_BUILD_PYTHON "Build the Python extension kvprism._core" ${kvprism_python_default})
option(KVPRISM_BUILD_HASH "Build kvprism::hash, which needs OpenSSL" ${PROJECT_IS_TOP_LEVEL})
option(KVPRISM_INSTALL "Install kvprism with the project it is in" ${PROJECT_IS_TOP_LEVEL})
option(KVPRISM_BUILD_TESTS "Build the C++ tests" ${kvprism_extras_default})
option(KVPRISM_BUILD_BENCHMARKS "Build the C++ benchmarks" OFF)
option(KVPRISM_BUILD_FUZZ "Build the fuzz targets with libFuzzer (needs clang)" OFF)
option(KVPRISM_WERROR "Treat warnings as errors" OFF)
set(KVPRISM_SANITIZE "" CACHE STRING "Sanitizers: empty, address (with undefined) or thread")
set_property(CACHE KVPRISM_SANITIZE PROPERTY STRINGS "" address thread)

if(NOT KVPRISM_SANITIZE MATCHES "^(|address|thread)$")
  message(
    FATAL_ERROR
    "KVPRISM_SANITIZE is '${KVPRISM_SANITIZE}'; expected address, thread or empty"
  )
endif()

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  find_program(KVPRISM_CCACHE ccache)
  mark_as_advanced(KVPRISM_CCACHE)
  if(KVPRISM_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${KVPRISM_CCACHE}")
  endif()
endif()

# No C++ modules here; newer CMake would scan every source for them.
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)

# In a wheel everything lies inside the Python package.
if(kvprism_in_wheel)
  set(CMAKE_INSTALL_LIBDIR kvprism/lib)
  set(CMAKE_INSTALL_INCLUDEDIR kvprism/include)
endif()
