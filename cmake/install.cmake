# What `cmake --install` and the wheel put down.
if(SKBUILD)
  install(TARGETS flashkernel LIBRARY DESTINATION flashkernel/lib)
  install(TARGETS fk RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR})
  return()
endif()

include(CMakePackageConfigHelpers)
if(FK_HAVE_CUDA)
  cmake_path(GET FK_CUDART_STATIC PARENT_PATH FK_CUDART_DIRECTORY)
endif()
set(package_directory ${CMAKE_INSTALL_LIBDIR}/cmake/flashkernel)
install(TARGETS flashkernel flashkernel_static EXPORT flashkernel
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS fk RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/flashkernel DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${FK_GENERATED_HEADER_FILES} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/flashkernel)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(EXPORT flashkernel NAMESPACE flashkernel:: DESTINATION ${package_directory}
        FILE flashkernel-targets.cmake)
configure_package_config_file(cmake/flashkernel-config.cmake.in
                              ${PROJECT_BINARY_DIR}/flashkernel-config.cmake
                              INSTALL_DESTINATION ${package_directory})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flashkernel-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashkernel-config.cmake
              ${PROJECT_BINARY_DIR}/flashkernel-config-version.cmake
        DESTINATION ${package_directory})

set(FK_PKGCONFIG_PRIVATE "-lpcre2-8 -lstdc++ -lm -lpthread -ldl")
if(FK_HAVE_CUDA)
  string(PREPEND FK_PKGCONFIG_PRIVATE "-L${FK_CUDART_DIRECTORY} -lcudart_static -lrt ")
endif()
# Paths from the file's own place, so that an install prefix can be moved.
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX
           BASE_DIRECTORY ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig OUTPUT_VARIABLE FK_PKGCONFIG_PREFIX)
configure_file(cmake/flashkernel.pc.in ${PROJECT_BINARY_DIR}/flashkernel.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flashkernel.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
