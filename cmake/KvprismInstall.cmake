include(CMakePackageConfigHelpers)

set(kvprism_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvprism")

# Each in a set of its own: an archive of hash asks for OpenSSL, which users of the core need not have.
function(kvprism_install target set)
  install(
    TARGETS ${target}
    EXPORT ${set}
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  )
  install(EXPORT ${set} NAMESPACE kvprism:: DESTINATION "${kvprism_cmake_dir}")
endfunction()
kvprism_install(kvprism kvprismTargets)
if(TARGET kvprism_hash)
  kvprism_install(kvprism_hash kvprismHashTargets)
endif()
# The library looks for its probe in its own directory.
if(TARGET kvprism_mooncake_probe)
  install(TARGETS kvprism_mooncake_probe RUNTIME DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()

set(kvprism_hash_is_archive ON)
if(BUILD_SHARED_LIBS)
  set(kvprism_hash_is_archive OFF)
endif()
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/kvprismConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/kvprismConfig.cmake"
  INSTALL_DESTINATION "${kvprism_cmake_dir}"
)
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/kvprismConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion
)
install(
  FILES
    "${PROJECT_BINARY_DIR}/kvprismConfig.cmake"
    "${PROJECT_BINARY_DIR}/kvprismConfigVersion.cmake"
  DESTINATION "${kvprism_cmake_dir}"
)
