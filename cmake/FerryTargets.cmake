# One function each for a library, a binary and a test, so that a folder's CMakeLists.txt reads as a list.

# ferry_library(NAME <target> SRCS <files> DEPS <targets>): DEPS are the design's arrows.
function(ferry_library)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  if(ARG_SRCS)
    add_library(${ARG_NAME} STATIC ${ARG_SRCS})
    target_include_directories(${ARG_NAME} PUBLIC "${CMAKE_SOURCE_DIR}")
    target_link_libraries(${ARG_NAME} PUBLIC ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
  else()
    add_library(${ARG_NAME} INTERFACE)
    target_include_directories(${ARG_NAME} INTERFACE "${CMAKE_SOURCE_DIR}")
    target_link_libraries(${ARG_NAME} INTERFACE ${ARG_DEPS})
  endif()
endfunction()

# ferry_binary(NAME <executable> SRCS <files> DEPS <targets>)
function(ferry_binary)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SRCS})
  target_include_directories(${ARG_NAME} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS})
endfunction()

# ferry_test(NAME <test> SRCS <files> DEPS <targets> [LABELS <labels>] [TIMEOUT <seconds>] [ENV <NAME=value>...])
# No label: fast, run by tools/test.sh.  Tests find committed data under FERRY_GOLDEN_DIR (tests/golden, unpacked).
function(ferry_test)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "SRCS;DEPS;LABELS;ENV" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${ARG_NAME} ${ARG_SRCS})
  target_include_directories(${ARG_NAME} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest GTest::gtest_main)
  add_test(NAME ${ARG_NAME} COMMAND ${ARG_NAME})
  # UCX's memory hooks and ThreadSanitizer's interceptors do not go together.
  set(tsan_environment "")
  if(FERRY_SANITIZE STREQUAL "thread")
    set(tsan_environment "UCX_MEM_EVENTS=no;UCX_MEM_MMAP_HOOK_MODE=none")
  endif()
  # Only what links gRPC runs with ThreadSanitizer suppressions (tests/tsan.supp says why).
  set(tsan_options "")
  if("${ARG_DEPS}" MATCHES "ferry_(client|cli|decode|grpc|integration|prefill|proto|router|service|worker)")
    set(tsan_options "TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/tsan.supp ignore_noninstrumented_modules=1")
  endif()
  set_tests_properties(${ARG_NAME} PROPERTIES
    TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
    ENVIRONMENT "FERRY_GOLDEN_DIR=${CMAKE_BINARY_DIR}/golden;FERRY_BIN_DIR=${CMAKE_BINARY_DIR}/bin;${tsan_options};${tsan_environment};${ARG_ENV}")
endfunction()
