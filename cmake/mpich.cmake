# The transport between hosts over MPICH: the sources of csrc/mpi, compiled with MPICH's mpi.h.
# Built if that is found: below DSCOMM_MPICH_ROOT, in the environment of Python_EXECUTABLE (`pip
# install mpich`), or by pkg-config. Needs no PMIx. Without it DSCOMM_MPICH_VERSION is empty.

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

configure_file(csrc/mpi/mpich/libdscomm_mpich.txt package/libdscomm_mpich.txt COPYONLY)
if(NOT DSCOMM_MPICH_VERSION)
  message(STATUS "MPICH: not used")
  file(REMOVE ${CMAKE_BINARY_DIR}/package/libdscomm_mpich.so) # of an earlier build
else()
  message(STATUS "MPICH ${DSCOMM_MPICH_VERSION}: found")
  file(GLOB mpich_sources CONFIGURE_DEPENDS csrc/mpi/*.cc csrc/mpi/mpich/*.cc)
  list(FILTER mpich_sources EXCLUDE REGEX "/module\\.cc$")
  make_units(mpich_units mpich ${mpich_sources})
  add_library(dscomm_mpich STATIC ${mpich_units})
  target_compile_options(dscomm_mpich PRIVATE -Wall -Wextra -Wshadow -ffp-contract=off
    -fvisibility=hidden)
  # mpi.h includes deprecated C++ bindings, which need another library.
  target_compile_definitions(dscomm_mpich PUBLIC MPICH_SKIP_MPICXX)
  target_link_libraries(dscomm_mpich PUBLIC dscomm_core mpich)

  add_mpi_module(dscomm_mpich mpich)
  if(mpich_root AND NOT DSCOMM_TORCHES)
    set_property(TARGET dscomm_mpich_module APPEND PROPERTY INSTALL_RPATH ${mpich_root}/lib)
  endif()
endif()
