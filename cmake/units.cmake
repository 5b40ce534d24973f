# Units: files that are compiled together as one, because their time goes into headers they share. A
# folder says what its files are part of in a build.cmake of its own, which names files relative to
# that folder; CMakeLists.txt and cmake/cuda.cmake know no folder under src/ops by name.

# fk_unit(name [VECTOR] [FIRST | NEXT] [LIKE_80] [HOST] FILES patterns...)
# The files become part of the unit `name`, to which files of other folders may belong too. VECTOR says
# that they are vector code, as those under src/ops are whose names or folders are `cpu`. A unit of CUDA
# code may say besides:
#   FIRST, NEXT  It takes longest, or long, and is begun before all others, so that no core waits for
#                it at the end.
#   LIKE_80      It has nothing for Hopper in it: what the compiler makes of it for sm_80 serves sm_90
#                too, where only the assembler runs once more.
#   HOST         It has no kernels: the host's compiler is enough.
function(fk_unit name)
  cmake_parse_arguments(PARSE_ARGV 1 unit "VECTOR;FIRST;NEXT;LIKE_80;HOST" "" "FILES")
  list(TRANSFORM unit_FILES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
  file(GLOB files CONFIGURE_DEPENDS ${unit_FILES})
  set_property(SOURCE ${files} PROPERTY FK_UNIT ${name})
  if(unit_VECTOR)
    set_property(GLOBAL APPEND PROPERTY FK_VECTOR_CODE ${files})
  endif()
  foreach(option FIRST NEXT LIKE_80 HOST)
    if(unit_${option})
      set_property(SOURCE ${files} APPEND PROPERTY FK_UNIT_OPTIONS ${option})
    endif()
  endforeach()
endfunction()

# fk_property(value file property): the property of a file as the top folder has set it.
function(fk_property value file property)
  get_property(read SOURCE ${file} DIRECTORY ${PROJECT_SOURCE_DIR} PROPERTY ${property})
  set(${value} ${read} PARENT_SCOPE)
endfunction()

# fk_units(names files...): the units of these files, each once.
function(fk_units names)
  set(all "")
  foreach(file ${ARGN})
    fk_property(unit ${file} FK_UNIT)
    list(APPEND all ${unit})
  endforeach()
  list(REMOVE_DUPLICATES all)
  set(${names} ${all} PARENT_SCOPE)
endfunction()

# fk_take_unit(taken name list): moves the files of a unit from a list to `taken`.
function(fk_take_unit taken name list)
  set(left "")
  set(found "")
  foreach(file ${${list}})
    fk_property(unit ${file} FK_UNIT)
    if(unit STREQUAL name)
      list(APPEND found ${file})
    else()
      list(APPEND left ${file})
    endif()
  endforeach()
  set(${taken} ${found} PARENT_SCOPE)
  set(${list} ${left} PARENT_SCOPE)
endfunction()
