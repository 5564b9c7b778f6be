# One function each for a library, a binary and a test, so that a folder's CMakeLists.txt reads as a list.

# ferry_library(NAME <target> SRCS <files> DEPS <targets>): DEPS are the design's arrows.
function(ferry_library)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  if(ARG_SRCS)
    add_library(${ARG_NAME} STATIC ${ARG_SRCS})
    target_include_directories(${ARG_NAME} PUBLIC "$<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>")
    target_link_libraries(${ARG_NAME} PUBLIC ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
    target_precompile_headers(${ARG_NAME} REUSE_FROM ${FERRY_HEADERS})
  else()
    add_library(${ARG_NAME} INTERFACE)
    target_include_directories(${ARG_NAME} INTERFACE "$<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>")
    target_link_libraries(${ARG_NAME} INTERFACE ${ARG_DEPS})
  endif()
endfunction()

# ferry_binary(NAME <executable> SRCS <files> DEPS <targets>)
function(ferry_binary)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SRCS})
  target_include_directories(${ARG_NAME} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS})
  target_precompile_headers(${ARG_NAME} REUSE_FROM ${FERRY_HEADERS})
endfunction()

# ferry_test(NAME <test> SRCS <files> DEPS <targets> [LABELS <labels>] [TIMEOUT <seconds>] [ENV <NAME=value>...])
# No label: fast, run by tools/test.sh.  Tests find committed data under FERRY_GOLDEN_DIR (tests/golden, unpacked).
function(ferry_test)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "SRCS;DEPS;LABELS;ENV" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SRCS})
  target_include_directories(${ARG_NAME} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest GTest::gtest_main)
  target_precompile_headers(${ARG_NAME} REUSE_FROM ${FERRY_HEADERS})
  add_test(NAME ${ARG_NAME} COMMAND ${ARG_NAME})
  ferry_test_settings(${ARG_NAME} DEPS ${ARG_DEPS} LABELS ${ARG_LABELS} TIMEOUT ${ARG_TIMEOUT} ENV ${ARG_ENV})
endfunction()

# ferry_test_settings(<test> DEPS <targets> [LABELS <labels>] [TIMEOUT <seconds>] [ENV <NAME=value>...])
# What ferry_test gives its tests, for those added by add_test.  TIMEOUT is that of a release build.
function(ferry_test_settings name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "DEPS;LABELS;ENV" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  set(sanitizer_env "")
  if(FERRY_SANITIZE)
    list(APPEND ARG_LABELS sanitizer)  # every test of such a build, beside its own labels
    math(EXPR ARG_TIMEOUT "5 * ${ARG_TIMEOUT}")
    # UCX's memory hooks call a sanitizer's interceptors in exiting threads, where its state is gone.
    set(sanitizer_env "UCX_MEM_EVENTS=no" "UCX_MEM_MMAP_HOOK_MODE=none" "UBSAN_OPTIONS=print_stacktrace=1"
      "LSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/lsan.supp:print_suppressions=0")
    # Also from a process that the test started and killed: its exit code does not tell.
    set_tests_properties(${name} PROPERTIES FAIL_REGULAR_EXPRESSION "Sanitizer: |: runtime error: ")
  endif()
  if(FERRY_SANITIZE STREQUAL "thread")
    # Only what links gRPC runs with suppressions (tests/tsan.supp says why).
    if("${ARG_DEPS}" MATCHES "ferry_(client|cli|decode|grpc|integration|prefill|proto|router|service|worker)")
      list(APPEND sanitizer_env
        "TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/tsan.supp ignore_noninstrumented_modules=1")
    endif()
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}" ENVIRONMENT
    "FERRY_GOLDEN_DIR=${CMAKE_BINARY_DIR}/golden;FERRY_BIN_DIR=${CMAKE_BINARY_DIR}/bin;${sanitizer_env};${ARG_ENV}")
endfunction()
