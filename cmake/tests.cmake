# GoogleTest over the library's insides, one file per part of it.
find_package(GTest REQUIRED)
include(GoogleTest)

# fk_add_tests(name [LIBRARIES ...] SOURCES ...)
function(fk_add_tests name)
  cmake_parse_arguments(PARSE_ARGV 1 tests "" "" "LIBRARIES;SOURCES")
  add_executable(${name} ${tests_SOURCES})
  target_link_libraries(${name} PRIVATE flashkernel_inside ${tests_LIBRARIES} GTest::gtest_main
                        Threads::Threads)
  # At test time, so that building never runs anything.
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST)
endfunction()

file(GLOB sources CONFIGURE_DEPENDS tests/core/*_test.cc tests/cpu/*_test.cc tests/cuda/*_test.cc
                                    tests/ops/*_test.cc tests/api/*_test.cc)
# The pool's tests stand alone: ThreadSanitizer needs nothing else compiled.
set(pool_test ${PROJECT_SOURCE_DIR}/tests/core/thread_pool_test.cc)
list(REMOVE_ITEM sources ${pool_test})
fk_add_tests(fk_pool_tests SOURCES ${pool_test} src/core/thread_pool.cc)
if(sources)
  fk_add_tests(fk_tests LIBRARIES flashkernel_static SOURCES ${sources})
  add_dependencies(fk_tests headers)
endif()

add_test(NAME fk_check COMMAND fk check --device cpu)
