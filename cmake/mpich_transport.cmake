# The transport between hosts over MPICH, built if mpich.cmake has found it: the sources of csrc/mpi,
# compiled with MPICH's mpi.h. Needs no PMIx.

configure_file(csrc/mpi/mpich/libdscomm_mpich.txt package/libdscomm_mpich.txt COPYONLY)
if(NOT DSCOMM_MPICH_VERSION)
  file(REMOVE ${CMAKE_BINARY_DIR}/package/libdscomm_mpich.so) # of an earlier build
else()
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
  if(TARGET python_package)
    add_dependencies(python_package dscomm_mpich_module)
  endif()
  if(mpich_root AND NOT DSCOMM_TORCHES)
    set_property(TARGET dscomm_mpich_module APPEND PROPERTY INSTALL_RPATH ${mpich_root}/lib)
  endif()
endif()
