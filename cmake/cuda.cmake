# Finds nvcc and the static CUDA runtime, and says how .cu files are compiled. CMake's own CUDA
# language wants a whole toolkit; FlashKernel needs a compiler and one archive.
#
# Sets FK_HAVE_CUDA, FK_CUDA_ARCHITECTURES_BUILT (for people) and FK_CUDART_STATIC.
set(FK_HAVE_CUDA OFF)
set(FK_CUDA_ARCHITECTURES_BUILT "")
if(NOT FK_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FK_CUDA: expected AUTO, ON or OFF, got ${FK_CUDA}")
endif()

# "90a-real" -> code=sm_90a; "75-virtual" -> code=compute_75; "80" -> both.
function(fk_architecture_flags flags)
  set(all "")
  foreach(arch ${ARGN})
    string(REGEX REPLACE "-(real|virtual)$" "" number ${arch})
    if(NOT arch MATCHES "-virtual$")
      list(APPEND all -gencode=arch=compute_${number},code=sm_${number})
    endif()
    if(NOT arch MATCHES "-real$")
      list(APPEND all -gencode=arch=compute_${number},code=compute_${number})
    endif()
  endforeach()
  set(${flags} ${all} PARENT_SCOPE)
endfunction()
fk_architecture_flags(FK_NVCC_ARCH_FLAGS ${FK_CUDA_ARCHITECTURES})

# Why CUDA code cannot be built with what is here, or "". Compiling an empty kernel tells more than
# versions: the host compiler may be too new for nvcc, or an architecture too old or too new.
function(fk_find_cuda problem)
  find_program(FK_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
               PATH_SUFFIXES bin)
  if(NOT FK_NVCC)
    set(${problem} "nvcc was not found" PARENT_SCOPE)
    return()
  endif()
  if(NOT FK_CUDART_STATIC)
    # Where nvcc is a script that calls the real one, only nvcc itself knows its toolkit.
    execute_process(COMMAND ${FK_NVCC} --dryrun -c -o /dev/null -x cu /dev/null
                    ERROR_VARIABLE dryrun OUTPUT_QUIET)
    string(REGEX MATCH "TOP=([^\n]*)" _ "${dryrun}")
    find_library(FK_CUDART_STATIC libcudart_static.a
                 HINTS ${CMAKE_MATCH_1} /usr/local/cuda
                 PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib targets/sbsa-linux/lib)
  endif()
  if(NOT FK_CUDART_STATIC)
    set(${problem} "libcudart_static.a was not found beside ${FK_NVCC}" PARENT_SCOPE)
    return()
  endif()
  set(asked "${FK_NVCC} ${FK_NVCC_ARCH_FLAGS}")
  if(NOT FK_NVCC_WORKS STREQUAL asked)
    set(probe ${PROJECT_BINARY_DIR}/cuda/probe.cu)
    file(WRITE ${probe} "__global__ void probe() {}\n")
    execute_process(COMMAND ${FK_NVCC} -c ${probe} -o ${probe}.o -std=c++17 ${FK_NVCC_ARCH_FLAGS}
                    RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(failed)
      set(${problem} "${FK_NVCC} fails:\n${output}" PARENT_SCOPE)
      return()
    endif()
    set(FK_NVCC_WORKS "${asked}" CACHE INTERNAL "what was found to work")
  endif()
  set(${problem} "" PARENT_SCOPE)
endfunction()

if(FK_CUDA STREQUAL "OFF")
  message(STATUS "CUDA: not built (FK_CUDA=OFF)")
else()
  fk_find_cuda(problem)
  if(NOT problem)
    set(FK_HAVE_CUDA ON)
    string(REPLACE ";" " " FK_CUDA_ARCHITECTURES_BUILT "${FK_CUDA_ARCHITECTURES}")
    message(STATUS "CUDA: ${FK_NVCC}, architectures ${FK_CUDA_ARCHITECTURES_BUILT}")
  elseif(FK_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FK_CUDA=ON: ${problem}")
  elseif(FK_NVCC)
    message(WARNING "CUDA: not built: ${problem}")
  else()
    message(STATUS "CUDA: not built: ${problem}")
  endif()
endif()

if(FK_HAVE_CUDA)
  set(FK_NVCC_EXTRA_FLAGS "")
  if(FK_CUDA_LINEINFO)
    list(APPEND FK_NVCC_EXTRA_FLAGS -lineinfo)
  endif()
  if(FK_RACECHECK)
    list(APPEND FK_NVCC_EXTRA_FLAGS -DFK_RACECHECK)
  endif()
  # A seventh of the size on disk, for some milliseconds at a kernel's first launch.
  # --compress-mode=size would make it a tenth, for a twentieth of the build's time.
  list(APPEND FK_NVCC_EXTRA_FLAGS -Xfatbin=-compress-all)
endif()

# fk_compile_cuda(objects TARGET name FOLDER folder ARCH_FLAGS flags... EXTRA_FLAGS flags...
#                 SOURCES files...)
# Compiles .cu files into a folder of the build; `objects` becomes the list of results, which the
# target makes. -O1 is for the host's side, which only launches: kernels are optimised without it.
# ptxas reports registers and spills per kernel into <object>.ptxas, which tools/check_spills.py
# reads: a spill fails the tests.
function(fk_compile_cuda objects)
  cmake_parse_arguments(PARSE_ARGV 1 cuda "" "TARGET;FOLDER" "ARCH_FLAGS;EXTRA_FLAGS;SOURCES")
  set(folder ${PROJECT_BINARY_DIR}/${cuda_FOLDER})
  set(all "")
  set(host_flags -fPIC,-fvisibility=hidden,-Wall,-Wextra)
  if(FK_WERROR)
    string(APPEND host_flags ",-Werror")
  endif()
  # Kernels that are written for Hopper alone have no code for the others.
  set(hopper_flags ${cuda_ARCH_FLAGS})
  list(FILTER hopper_flags INCLUDE REGEX "compute_90a,")
  if(NOT hopper_flags)
    set(hopper_flags ${cuda_ARCH_FLAGS})
  endif()
  set(common_flags ${cuda_ARCH_FLAGS})
  if(cuda_ARCH_FLAGS MATCHES "compute_80,")
    list(TRANSFORM common_flags REPLACE "compute_90a,code=sm_90a" "compute_80,code=sm_90")
    list(FILTER common_flags EXCLUDE REGEX "code=compute_90a")  # as PTX, that of 80 serves
  endif()
  # The files of a unit (cmake/units.cmake) are compiled as one, its first, which includes the others.
  set(sources ${cuda_SOURCES})
  fk_units(units ${sources})
  foreach(unit ${units})
    fk_take_unit(others ${unit} sources)
    list(POP_FRONT others first)
    list(APPEND sources ${first})
    list(TRANSFORM others PREPEND "--pre-include=" OUTPUT_VARIABLE with_${first})
  endforeach()
  foreach(source ${sources})
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE name)
    fk_property(unit ${source} FK_UNIT)
    fk_property(options ${source} FK_UNIT_OPTIONS)
    set(code_flags ${cuda_ARCH_FLAGS})
    if("HOST" IN_LIST options)
      set(code_flags -x c++)
    elseif(name MATCHES "/sm90/|/cuda_sm90_")
      set(code_flags ${hopper_flags})
    elseif("LIKE_80" IN_LIST options)
      set(code_flags ${common_flags})
    endif()
    if(unit)
      set(name ${unit}.cu)
    endif()
    set(object ${folder}/${name}.o)
    if("FIRST" IN_LIST options)  # Ninja goes by the names.
      set(object ${folder}/first/${name}.o)
    elseif("NEXT" IN_LIST options)
      set(object ${folder}/next/${name}.o)
    endif()
    cmake_path(GET object PARENT_PATH directory)
    file(MAKE_DIRECTORY ${directory})
    add_custom_command(
      OUTPUT ${object}
      BYPRODUCTS ${object}.ptxas
      COMMAND sh ${PROJECT_SOURCE_DIR}/cmake/nvcc_logged.sh ${object}.ptxas
              ${FK_CCACHE} ${FK_NVCC} -c ${source} -o ${object} -MD -MF ${object}.d
              -std=c++17 -O1 -Xptxas=-v ${cuda_EXTRA_FLAGS} -Xcompiler=${host_flags}
              $<$<BOOL:${FK_WERROR}>:--Werror=all-warnings>
              -DFK_HAVE_CUDA=1 -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src
              ${code_flags} ${with_${source}}
      DEPENDS ${source} ${PROJECT_SOURCE_DIR}/cmake/nvcc_logged.sh
      DEPFILE ${object}.d
      COMMENT "nvcc ${cuda_FOLDER}: ${name}"
      VERBATIM COMMAND_EXPAND_LISTS)
    set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
    list(APPEND all ${object})
  endforeach()
  # What is no longer compiled must not fail the tests.
  file(GLOB_RECURSE logs ${folder}/*.ptxas)
  list(TRANSFORM all APPEND .ptxas OUTPUT_VARIABLE current_logs)
  list(REMOVE_ITEM logs ${current_logs})
  if(logs)
    file(REMOVE ${logs})
  endif()
  add_custom_target(${cuda_TARGET} DEPENDS ${all})
  set(${objects} ${all} PARENT_SCOPE)
endfunction()
