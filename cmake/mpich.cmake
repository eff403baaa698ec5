# Looks for MPICH's headers: below DSCOMM_MPICH_ROOT, in the environment of Python_EXECUTABLE (`pip
# install mpich`), or by pkg-config. They are optional: without them DSCOMM_MPICH_VERSION is empty.
# With them mpich is a target to link with, and mpich_root its folder, if that is not the system's.

# Reads the version, "5.0.2", from a folder with include/mpi.h and the library.
function(read_mpich root version)
  set(${version} "" PARENT_SCOPE)
  if(root AND EXISTS ${root}/include/mpi.h AND EXISTS ${root}/lib/libmpi.so.12)
    file(STRINGS ${root}/include/mpi.h line REGEX "^#define MPICH_VERSION +\"")
    if(line MATCHES "\"([^\"]+)\"")
      set(${version} ${CMAKE_MATCH_1} PARENT_SCOPE)
    endif()
  endif()
endfunction()

set(DSCOMM_MPICH_VERSION "")
set(mpich_root "")
if(NOT DSCOMM_MPICH STREQUAL "OFF")
  set(roots ${DSCOMM_MPICH_ROOT})
  if(Python_EXECUTABLE)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import sys; print(sys.prefix)"
      OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(APPEND roots ${root})
  endif()
  foreach(root ${roots})
    if(NOT DSCOMM_MPICH_VERSION)
      read_mpich(${root} DSCOMM_MPICH_VERSION)
      set(mpich_root ${root})
    endif()
  endforeach()
  if(DSCOMM_MPICH_VERSION)
    add_library(mpich INTERFACE IMPORTED)
    target_include_directories(mpich INTERFACE ${mpich_root}/include)
    target_link_libraries(mpich INTERFACE ${mpich_root}/lib/libmpi.so.12)
  elseif(NOT DSCOMM_MPICH_ROOT)
    pkg_check_modules(MPICH QUIET IMPORTED_TARGET mpich)
    if(MPICH_FOUND)
      set(DSCOMM_MPICH_VERSION ${MPICH_VERSION})
      set(mpich_root "")
      add_library(mpich ALIAS PkgConfig::MPICH)
    endif()
  endif()
  if(NOT DSCOMM_MPICH_VERSION AND DSCOMM_MPICH STREQUAL "ON")
    message(FATAL_ERROR "MPICH was not found: install it (pip install mpich, or apt-get install "
      "libmpich-dev), name its folder by -DDSCOMM_MPICH_ROOT=, or configure with "
      "-DDSCOMM_MPICH=AUTO")
  elseif(NOT DSCOMM_MPICH_VERSION AND DSCOMM_MPICH_ROOT)
    message(WARNING "DSCOMM_MPICH_ROOT=${DSCOMM_MPICH_ROOT} has no include/mpi.h and "
      "lib/libmpi.so.12 of MPICH: built without it")
  endif()
endif()

if(DSCOMM_MPICH_VERSION)
  message(STATUS "MPICH ${DSCOMM_MPICH_VERSION}: found")
else()
  message(STATUS "MPICH: not used")
endif()
