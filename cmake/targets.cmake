# carrel_library(NAME SOURCES... DEPS...), carrel_test(NAME SOURCES... DEPS...): one set of flags for all of ours.
include(GoogleTest)

add_library(carrel_flags INTERFACE)
target_include_directories(carrel_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(carrel_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-missing-field-initializers -fno-semantic-interposition>)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # clang builds fuzzers alone; it warns of other things
  target_compile_options(carrel_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# What a fault in ours is worth to an attacker: less. Of libraries and the program, not of tests. hardening_test reads it
# from the built program; what it costs is in decision 042. Sanitizers replace it, and _FORTIFY_SOURCE needs an
# optimising build.
add_library(carrel_hardening INTERFACE)
if(CARREL_HARDEN AND NOT CARREL_SANITIZE AND NOT CMAKE_BUILD_TYPE STREQUAL Debug)
  target_compile_options(carrel_hardening INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fstack-protector-strong -fstack-clash-protection -fcf-protection=full -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3 -D_GLIBCXX_ASSERTIONS>)
endif()
target_link_options(carrel_hardening INTERFACE -Wl,-z,relro,-z,now,-z,noexecstack)
if(CARREL_DEBUG_INFO)
  target_compile_options(carrel_flags INTERFACE -g1)
endif()
if(CARREL_SANITIZE)
  # Instrumentation hides from the compiler what it needs for this warning; the release build has it.
  target_compile_options(carrel_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-error=maybe-uninitialized>)
  target_compile_options(carrel_flags INTERFACE -fsanitize=${CARREL_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(carrel_flags INTERFACE -fsanitize=${CARREL_SANITIZE})
  target_compile_definitions(carrel_flags INTERFACE CARREL_SANITIZED=1)
endif()

if(CARREL_FUZZ)
  # What libFuzzer steers by, in every library; its main is in the fuzzers alone (tests/fuzz).
  target_compile_options(carrel_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

if(CARREL_SANITIZE STREQUAL thread)
  # ThreadSanitizer does not know fences; what they order here, Asio's locks order, too.
  target_compile_definitions(carrel_flags INTERFACE BOOST_ASIO_DISABLE_FENCED_BLOCK=1)
  # An object, not an archive: it must be in the program whether or not something there refers to it.
  add_library(carrel_tsan_absl OBJECT ${CMAKE_SOURCE_DIR}/common/tsan_absl.cc)
  target_compile_options(carrel_tsan_absl PRIVATE -g1 -fsanitize=thread)
  target_link_libraries(carrel_tsan_absl PUBLIC absl::synchronization)
  target_link_libraries(carrel_flags INTERFACE $<TARGET_OBJECTS:carrel_tsan_absl> absl::synchronization)
endif()

# -O1, for a target whose own code is not what has to be fast, and what many of its files begin with is parsed once.
function(carrel_build_fast name)
  target_compile_options(${name} PRIVATE "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<NOT:$<CONFIG:Debug>>>:-O1>")
  get_target_property(sources ${name} SOURCES)
  list(LENGTH sources files)
  if(files GREATER 3)
    target_precompile_headers(${name} PRIVATE ${ARGN})
    if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
      target_compile_options(${name} PRIVATE -fpch-preprocess)  # without it ccache keeps nothing of such files
    endif()
  endif()
endfunction()

function(carrel_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  target_link_libraries(${name} PUBLIC carrel_flags ${arg_DEPS} PRIVATE carrel_hardening)
endfunction()

# Where clang builds (CARREL_FUZZ), a library whose lines and branches are counted: ./run fuzz and ./run coverage print them.
function(carrel_counted name)
  if(CARREL_FUZZ)
    target_compile_options(${name} PRIVATE -fprofile-instr-generate -fcoverage-mapping)
    target_link_options(${name} INTERFACE -fprofile-instr-generate)
  endif()
endfunction()

# One test program per folder; every TEST is its own ctest entry, so that `ctest -j` spreads them.
# LABELS slow: over 5 s. Tests find the repository through SourceFolder() (common/test_folders.h), or CARREL_SOURCE_DIR if they never
# leave the machine; they may write only under testing::TempDir().
function(carrel_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  set(cost 1)
  if("slow" IN_LIST arg_LABELS)
    set(cost 100)  # first, so that the cores are busy to the end
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE carrel_flags ${arg_DEPS} GTest::gmock GTest::gtest_main)
  carrel_build_fast(${name} <gmock/gmock.h> <gtest/gtest.h>)
  target_compile_definitions(${name} PRIVATE CARREL_SOURCE_DIR="${CMAKE_SOURCE_DIR}" CARREL_BINARY_DIR="${CMAKE_BINARY_DIR}")
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${arg_TIMEOUT} COST ${cost} LABELS "${arg_LABELS}")
endfunction()

# Not built with the tests; `./run bench` builds the one it runs, CI all of them.
add_custom_target(benches)
function(carrel_bench name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} EXCLUDE_FROM_ALL ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE carrel_flags ${arg_DEPS} benchmark::benchmark)
  add_dependencies(benches ${name})
endfunction()
