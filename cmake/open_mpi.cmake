# Looks for Open MPI's headers. They are optional: without them groups of one host still work.
# DSCOMM_HAVE_MPI is 1 or 0, for CMake and for the extension, which reports it when a group spans
# hosts.

set(DSCOMM_HAVE_MPI 0)
set(DSCOMM_MPI_VERSION "")
if(NOT DSCOMM_MPI STREQUAL "OFF")
  pkg_check_modules(OPEN_MPI QUIET IMPORTED_TARGET ompi-c)
  if(OPEN_MPI_FOUND)
    set(DSCOMM_HAVE_MPI 1)
    set(DSCOMM_MPI_VERSION ${OPEN_MPI_VERSION})
  elseif(DSCOMM_MPI STREQUAL "ON")
    message(FATAL_ERROR "Open MPI's headers were not found (pkg-config ompi-c): "
      "install libopenmpi-dev, or configure with -DDSCOMM_MPI=AUTO")
  endif()
endif()
if(DSCOMM_HAVE_MPI)
  message(STATUS "Open MPI ${DSCOMM_MPI_VERSION}: found")
else()
  message(STATUS "Open MPI: not used, groups stay on one host")
endif()
