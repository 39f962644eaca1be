include(CMakePackageConfigHelpers)

set(kvprism_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvprism")

install(
  TARGETS ${kvprism_libraries}
  EXPORT kvprismTargets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
)
# The library looks for its probe in its own directory.
if(TARGET kvprism_mooncake_probe)
  install(TARGETS kvprism_mooncake_probe RUNTIME DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()

install(EXPORT kvprismTargets NAMESPACE kvprism:: DESTINATION "${kvprism_cmake_dir}")
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
