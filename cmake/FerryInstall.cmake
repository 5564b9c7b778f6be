# What `cmake --install` puts under a prefix: component `programs`, and component `sdk`, the C++ SDK as a CMake package:
# find_package(Ferry), target Ferry::client, header "ferry/ferry_client.h".  tests/client/install_test.sh is a user of it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS ferry ferry-router ferry-prefill ferry-decode
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT programs)

set(sdk ferry_client ferry_grpc_status ferry_input_file ferry_proto ferry_status ferry_steady_time)
foreach(target ${sdk})
  get_target_property(type ${target} TYPE)
  if(NOT type STREQUAL "INTERFACE_LIBRARY")
    # An installed file does not tell where it was built, its debug information included.
    target_compile_options(${target} PRIVATE "-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=")
  endif()
endforeach()
set_target_properties(ferry_client PROPERTIES EXPORT_NAME client)
target_compile_features(ferry_client PUBLIC cxx_std_17)
install(TARGETS ${sdk} EXPORT FerryTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT sdk
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES client/ferry_client.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ferry COMPONENT sdk)
install(FILES "${CMAKE_BINARY_DIR}/generated/ferry/v1/inference.pb.h"
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ferry/v1 COMPONENT sdk)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/Ferry)
install(EXPORT FerryTargets NAMESPACE Ferry:: DESTINATION ${package} COMPONENT sdk)
configure_package_config_file(cmake/FerryConfig.cmake.in "${CMAKE_BINARY_DIR}/FerryConfig.cmake"
  INSTALL_DESTINATION ${package} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the API.
write_basic_package_version_file("${CMAKE_BINARY_DIR}/FerryConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/FerryConfig.cmake" "${CMAKE_BINARY_DIR}/FerryConfigVersion.cmake"
  DESTINATION ${package} COMPONENT sdk)
