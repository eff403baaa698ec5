# The transport between hosts, built if both Open MPI (open_mpi.cmake) and PMIx are found: the
# library dscomm_mpi from csrc/mpi, for its tests and for the module that the extension loads; and
# dscomm-pmix, the helper that lets ranks call MPI_Init without an MPI launcher. Sets
# DSCOMM_HAVE_PMIX to 1 or 0.

set(DSCOMM_HAVE_PMIX 0)
if(DSCOMM_HAVE_MPI)
  pkg_check_modules(PMIX QUIET IMPORTED_TARGET pmix)
  if(PMIX_FOUND)
    set(DSCOMM_HAVE_PMIX 1)
    message(STATUS "PMIx ${PMIX_VERSION}: found")
  elseif(DSCOMM_MPI STREQUAL "ON")
    message(FATAL_ERROR "PMIx's headers were not found (pkg-config pmix): "
      "install libpmix-dev, or configure with -DDSCOMM_MPI=AUTO")
  else()
    message(STATUS "PMIx: not found, groups stay on one host; install libpmix-dev")
  endif()
endif()

configure_file(csrc/mpi/open_mpi/libdscomm_openmpi.txt package/libdscomm_openmpi.txt COPYONLY)
if(NOT DSCOMM_HAVE_PMIX)
  # Files of an earlier build.
  file(REMOVE ${CMAKE_BINARY_DIR}/package/libdscomm_openmpi.so ${CMAKE_BINARY_DIR}/package/dscomm-pmix)
endif()
if(DSCOMM_HAVE_PMIX)
  file(GLOB mpi_sources CONFIGURE_DEPENDS csrc/mpi/*.cc csrc/mpi/open_mpi/*.cc)
  list(FILTER mpi_sources EXCLUDE REGEX "/module\\.cc$")
  list(APPEND mpi_sources csrc/pmix/locked_directory.cc)
  make_units(mpi_units mpi ${mpi_sources})
  add_library(dscomm_mpi STATIC ${mpi_units})
  target_compile_options(dscomm_mpi PRIVATE -Wall -Wextra -Wshadow -ffp-contract=off
    -fvisibility=hidden)
  # mpi.h includes deprecated C++ bindings, which need another library.
  target_compile_definitions(dscomm_mpi PUBLIC OMPI_SKIP_MPICXX)
  target_link_libraries(dscomm_mpi PUBLIC dscomm_core PkgConfig::OPEN_MPI)
  # Functions that only Open MPI calls: see csrc/mpi/open_mpi/abort.cc and tcp_hooks.h.
  target_link_options(dscomm_mpi INTERFACE
    -Wl,-u,ompi_rte_abort -Wl,-u,mca_btl_tcp_set_socket_options)
  # Types only: the functions come from the PMIx that Open MPI has loaded.
  target_include_directories(dscomm_mpi PRIVATE ${PMIX_INCLUDE_DIRS})

  # Without dscomm_core, so that it starts in a few milliseconds; it runs once per host.
  file(GLOB pmix_sources CONFIGURE_DEPENDS csrc/pmix/*.cc)
  make_units(pmix_units pmix ${pmix_sources})
  add_executable(dscomm-pmix ${pmix_units} ${format_source} csrc/core/base/message_socket.cc
    csrc/core/base/packer.cc csrc/core/base/process_state.cc)
  target_include_directories(dscomm-pmix PRIVATE csrc)
  target_include_directories(dscomm-pmix SYSTEM PRIVATE ${fmt_headers})
  target_compile_options(dscomm-pmix PRIVATE -Wall -Wextra -Wshadow)
  target_link_libraries(dscomm-pmix PRIVATE PkgConfig::PMIX)
  # Debian's libpmix is outside the loader's path; nothing else is installed beside it.
  # pkg-config puts a sysroot in front of this folder, and into link options that say nothing else.
  string(REPLACE "${CMAKE_SYSROOT}/" "/" pmix_folders "${PMIX_LIBRARY_DIRS}")
  set_property(TARGET PkgConfig::PMIX PROPERTY INTERFACE_LINK_OPTIONS)
  set_target_properties(dscomm-pmix PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/package
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${pmix_folders}")

  add_mpi_module(dscomm_mpi openmpi)
  if(TARGET python_package)
    add_dependencies(python_package dscomm_mpi_module dscomm-pmix)
    # For an editable install; see mpi_module.cmake.
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import sys; print(sys.prefix)"
      OUTPUT_VARIABLE environment OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT DSCOMM_TORCHES)
      set_property(TARGET dscomm_mpi_module APPEND PROPERTY INSTALL_RPATH ${environment}/lib)
    endif()
  endif()

  if(DSCOMM_TESTS)
    add_executable(mpi_bring_up_rank tests/mpi/bring_up_rank.cc)
    target_include_directories(mpi_bring_up_rank PRIVATE tests/core)
    target_link_libraries(mpi_bring_up_rank PRIVATE dscomm_mpi)
    # Exports the functions that Open MPI must find here first (tcp_hooks.h), as the module does.
    set_target_properties(mpi_bring_up_rank PROPERTIES ENABLE_EXPORTS ON)
    add_dependencies(mpi_bring_up_rank dscomm-pmix)
    add_subdirectory(tests/mpi)
    add_custom_target(mpi_test_files DEPENDS mpi_bring_up_rank mpi_tests call_watch_tests
      exit_hook_tests mca_files_tests pmi_session_tests)
  endif()
endif()
