# Every third-party library, once, as an imported target. Debian 12 names are in ./run deps.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(GTest REQUIRED)
find_package(benchmark REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(hwy REQUIRED)
pkg_check_modules(grpcpp REQUIRED IMPORTED_TARGET grpc++)
pkg_check_modules(rocksdb REQUIRED IMPORTED_TARGET rocksdb)
pkg_check_modules(prometheus REQUIRED IMPORTED_TARGET prometheus-cpp-core)
find_package(Boost 1.81 REQUIRED)  # Beast, headers alone
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(sentencepiece REQUIRED IMPORTED_TARGET sentencepiece)
pkg_check_modules(utf8proc REQUIRED IMPORTED_TARGET libutf8proc)
pkg_check_modules(curl REQUIRED IMPORTED_TARGET libcurl)
pkg_check_modules(expat REQUIRED IMPORTED_TARGET expat)
pkg_check_modules(nats REQUIRED IMPORTED_TARGET libnats)
pkg_check_modules(openblas REQUIRED IMPORTED_TARGET openblas)
find_library(FAISS_LIBRARY_FILE faiss REQUIRED)
# Static: its own needs are stated so that they come after it on the link line.
add_library(faiss STATIC IMPORTED)
set_target_properties(faiss PROPERTIES IMPORTED_LOCATION ${FAISS_LIBRARY_FILE} INTERFACE_LINK_LIBRARIES PkgConfig::openblas)
set(FAISS_LIBRARY faiss)
find_program(GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)

find_program(CCACHE ccache)
if(CCACHE)
  # What is compiled with precompiled headers (carrel_build_fast), it keeps, too; and what two build folders compile alike
  # (release and gpu), it finds in either.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
    CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=true ${CCACHE})
endif()
