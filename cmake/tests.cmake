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
                                    tests/ops/*_test.cc tests/api/*_test.cc
                                    tests/model/*_test.cc tests/engine/*_test.cc)
# The pool's tests stand alone: ThreadSanitizer needs nothing else compiled.
set(pool_test ${PROJECT_SOURCE_DIR}/tests/core/thread_pool_test.cc)
list(REMOVE_ITEM sources ${pool_test})
fk_add_tests(fk_pool_tests SOURCES ${pool_test} src/core/thread_pool.cc)
add_library(test_model_files OBJECT tests/model/files.cc)
target_link_libraries(test_model_files PRIVATE flashkernel_inside GTest::gtest)
target_compile_options(test_model_files PRIVATE -O0)
fk_add_tests(fk_tests LIBRARIES flashkernel_static test_model_files SOURCES ${sources})
add_dependencies(fk_tests headers)
target_compile_options(fk_tests PRIVATE -O0)  # what takes long is in the library
# Compiled together, as the library's files are. tokenizer_test.cc has names of its neighbours.
foreach(folder core engine model)
  set(together ${sources})
  list(FILTER together INCLUDE REGEX "/tests/${folder}/")
  list(FILTER together EXCLUDE REGEX "/tokenizer_test.cc$")
  set_source_files_properties(${together} PROPERTIES UNITY_GROUP tests_${folder})
endforeach()
set_target_properties(fk_tests PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)

# Every reader of model files on mutated ones: a moment here, hours by hand.
add_executable(fk_fuzz tests/model/fuzz.cc)
target_link_libraries(fk_fuzz PRIVATE flashkernel_inside flashkernel_static test_model_files
                      GTest::gtest)
target_compile_options(fk_fuzz PRIVATE -O0)
add_test(NAME fk_fuzz COMMAND fk_fuzz all 2)

add_test(NAME fk_check COMMAND fk check --device cpu)
set_tests_properties(fk_fuzz fk_check PROPERTIES COST 100)  # they take longest, and start first
