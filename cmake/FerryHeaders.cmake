# Headers that nearly every source reads, compiled once: reading them is a third of a source's time.  FERRY_HEADERS names
# the set that a folder's targets share; tests/CMakeLists.txt has its own.  A compiler takes a set only with the options it
# was compiled with (-fPIC, -pthread: FerryOptions.cmake; -m: SKIP_PRECOMPILE_HEADERS).  The presets
# debug and tsan do without: a source that lacks an #include is found, and GCC 12, which forgets that a header is the
# system's when it is compiled before, does not warn of what sanitizers make of the library's inline functions.
file(GENERATE OUTPUT "${CMAKE_BINARY_DIR}/headers.cc" CONTENT "")
set(FERRY_COMMON_HEADERS <algorithm> <functional> <memory> <mutex> <string> <thread> <vector>
  <absl/container/flat_hash_map.h> <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/time/time.h>)

# ferry_headers(NAME <target> HEADERS <headers> [DEPS <targets>])
function(ferry_headers)
  cmake_parse_arguments(ARG "" "NAME" "HEADERS;DEPS" ${ARGN})
  add_library(${ARG_NAME} OBJECT "${CMAKE_BINARY_DIR}/headers.cc")
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS})
  target_precompile_headers(${ARG_NAME} PRIVATE ${ARG_HEADERS})
endfunction()

ferry_headers(NAME ferry_library_headers HEADERS ${FERRY_COMMON_HEADERS} DEPS absl::statusor)
set(FERRY_HEADERS ferry_library_headers)
