# What is installed: libcarrel.so and libcarrel.a with their headers, how CMake and pkg-config find them, and the program.
# `cmake --install build/release --prefix DIR`, or the packages of ./run package.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# All that the public library is made of: one archive, of which the shared library shows the API alone.
function(carrel_parts target out)  # every static library of ours behind a target
  set(seen ${${out}})
  if(${target} IN_LIST seen)
    return()
  endif()
  get_target_property(type ${target} TYPE)
  get_target_property(imported ${target} IMPORTED)
  if(imported)
    return()
  endif()
  if(type STREQUAL STATIC_LIBRARY)
    list(APPEND seen ${target})
  endif()
  get_target_property(links ${target} INTERFACE_LINK_LIBRARIES)
  foreach(link IN LISTS links)
    if(TARGET ${link})
      set(${out} ${seen})
      carrel_parts(${link} ${out})
      set(seen ${${out}})
    endif()
  endforeach()
  set(${out} ${seen} PARENT_SCOPE)
endfunction()

set(parts)
carrel_parts(carrel_api parts)
set(objects ${parts})
list(TRANSFORM objects REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>")

add_library(carrel_shared SHARED ${objects})
target_link_libraries(carrel_shared PRIVATE carrel_api)
set_target_properties(carrel_shared PROPERTIES OUTPUT_NAME carrel
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/libcarrel.map LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
target_link_options(carrel_shared PRIVATE
  -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/libcarrel.map -Wl,--gc-sections -Wl,--no-undefined)

add_library(carrel_archive STATIC ${objects})
set_target_properties(carrel_archive PROPERTIES OUTPUT_NAME carrel ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

set_target_properties(carrel_shared PROPERTIES EXPORT_NAME carrel INSTALL_RPATH "$ORIGIN")
target_include_directories(carrel_shared INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(carrel_shared INTERFACE cxx_std_20)

install(TARGETS carrel_shared EXPORT carrelTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT development)
# Loaded when a tokenizer needs it (model/tokenizer/sentencepiece_library.h), from where libraries are.
install(TARGETS carrel_sentencepiece LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(TARGETS carrel_archive ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/carrel DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)

set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/carrel)
install(EXPORT carrelTargets NAMESPACE carrel:: DESTINATION ${config_folder} COMPONENT development)
configure_package_config_file(carrelConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/carrelConfig.cmake PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR
  INSTALL_DESTINATION ${config_folder})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/carrelConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/carrelConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/carrelConfigVersion.cmake
  DESTINATION ${config_folder} COMPONENT development)
# Two files: what the archive is made of is asked for even by pkg-config --cflags where it stands in Requires.private.
configure_file(carrel.pc.in carrel.pc @ONLY)
configure_file(carrel-static.pc.in carrel-static.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/carrel.pc ${CMAKE_CURRENT_BINARY_DIR}/carrel-static.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
