# The Python extension module _C: csrc/torch over dscomm_core and torch.
#
# It fits one torch, given by three values from setup.py, or else from Python_EXECUTABLE:
# DSCOMM_TORCH_VERSION, DSCOMM_TORCH_ROOT (the folder of torch/__init__.py) and
# DSCOMM_TORCH_CXX11_ABI. With DSCOMM_TORCHES, for a wheel, there is one _C per torch, over the same
# core. torch's own CMake package is not used: for a CUDA build of torch it fails without the CUDA
# toolkit, which nothing here needs.
#
# To compile for another machine, set Python_INCLUDE_DIR and DSCOMM_PYTHON_SOABI
# (cpython-311-aarch64-linux-gnu): Python_EXECUTABLE knows only its own.

find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
if(CMAKE_CROSSCOMPILING)
  set(Python_SOABI ${DSCOMM_PYTHON_SOABI})
endif()

file(GLOB torch_sources CONFIGURE_DEPENDS csrc/torch/*.cc)
if(NOT torch_sources)
  message(FATAL_ERROR "csrc/torch has no source: this tree cannot build the extension")
endif()
make_units(glue_units glue ${torch_sources})

# Everything that setup.py installs. The transports (mpi.cmake, mpich_transport.cmake) add theirs.
add_custom_target(python_package)

# add_extension(TARGET VERSION ROOT CXX11_ABI FOLDER): _C for the torch in ROOT. VERSION is the
# torch that it supports: 2.13.0+cpu only, or every 2.13. FOLDER is empty or, with several torches,
# such as /torch_2_13, which separates their files below package and the build directory.
function(add_extension target version root cxx11_abi folder)
  message(STATUS "torch ${version}: ${root}")
  set(torch_include ${root}/include)
  if(NOT EXISTS ${torch_include}/torch/csrc/distributed/c10d/Backend.hpp)
    message(FATAL_ERROR "torch's headers were not found in ${torch_include}; "
      "on Debian they come with: apt-get install libtorch-dev pybind11-dev")
  endif()
  # The same for a build of this torch alone and for a wheel, so that they share the compiler cache.
  string(REGEX REPLACE "^([0-9]+)\\.([0-9]+).*" "torch_\\1_\\2" links ${version})
  set(links ${CMAKE_BINARY_DIR}/${links})
  file(MAKE_DIRECTORY ${links})

  # Extension modules share types only if they were built with the same pybind11. So torch's copy
  # comes before any other, even before one from CXXFLAGS. If torch has none (Debian), the system's
  # is right, since torch was built with it.
  set(pybind_first ${links}/pybind11_of_torch)
  file(MAKE_DIRECTORY ${pybind_first})
  file(REMOVE ${pybind_first}/pybind11)
  if(EXISTS ${torch_include}/pybind11)
    file(CREATE_LINK ${torch_include}/pybind11 ${pybind_first}/pybind11 SYMBOLIC)
  endif()

  # torch's headers are included through a path in the build directory, so that the compiler cache
  # does not depend on torch's location.
  set(torch_headers ${links}/headers_of_torch)
  file(REMOVE ${torch_headers})
  file(CREATE_LINK ${torch_include} ${torch_headers} SYMBOLIC)

  Python_add_library(${target} MODULE WITH_SOABI ${glue_units})
  if(DSCOMM_COVERAGE)
    target_sources(${target} PRIVATE cmake/coverage.cc)
  endif()
  target_include_directories(${target} BEFORE PRIVATE ${pybind_first})
  target_include_directories(${target} SYSTEM PRIVATE
    ${torch_headers} ${torch_headers}/torch/csrc/api/include)
  # At -O3 the glue takes a third longer to compile, and no call is faster.
  target_compile_options(${target} PRIVATE -Wall -Wextra -fvisibility=hidden
    $<$<CONFIG:Release>:-O2>)
  target_compile_definitions(${target} PRIVATE
    TORCH_EXTENSION_NAME=_C TORCH_API_INCLUDE_EXTENSION_H FMT_HEADER_ONLY
    _GLIBCXX_USE_CXX11_ABI=${cxx11_abi} DSCOMM_HAVE_MPI=${DSCOMM_HAVE_MPI})
  target_link_libraries(${target} PRIVATE dscomm_core)
  if(DSCOMM_TORCHES)
    target_link_libraries(${target} PRIVATE -Wl,--no-as-needed) # the libraries may be empty
  endif()
  foreach(name torch_python torch torch_cpu c10)
    # Full paths: a cached find_library() result could belong to a torch that has been removed.
    set(library ${root}/lib/lib${name}.so)
    if(NOT EXISTS ${library})
      message(FATAL_ERROR "torch's library ${library} was not found")
    endif()
    target_link_libraries(${target} PRIVATE ${library})
  endforeach()
  if(DSCOMM_TORCHES)
    target_link_libraries(${target} PRIVATE -Wl,--as-needed)
  endif()
  # The package is installed beside torch, as site-packages/deepspeed_comm/_native/<torch>/_C.so. In
  # an editable install this path does not exist, which is harmless: torch is imported first and has
  # loaded its libraries by then.
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME _C
    DEFINE_SYMBOL "" # otherwise the target's name, which would miss the compiler cache
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/../../../torch/lib"
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/package${folder})

  set(DSCOMM_TORCH_VERSION ${version})
  configure_file(cmake/build_info.py.in package${folder}/_build_info.py @ONLY)
  add_dependencies(python_package ${target})
endfunction()

if(DSCOMM_TORCHES)
  foreach(torch IN LISTS DSCOMM_TORCHES)
    if(NOT torch MATCHES "^([0-9]+\\.[0-9]+)=(/.+)$")
      message(FATAL_ERROR "DSCOMM_TORCHES: got ${torch}, expected 2.13=/folder/of/torch")
    endif()
    set(minor ${CMAKE_MATCH_1})
    set(root ${CMAKE_MATCH_2})
    string(REPLACE "." "_" tag torch_${minor})
    # PyPI's torch uses the new ABI of std::string from 2.7 on.
    add_extension(_C_${tag} ${minor} ${root} 1 /${tag})
  endforeach()
else()
  if(NOT DSCOMM_TORCH_ROOT)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
        "import os, torch; print(torch.__version__, int(torch._C._GLIBCXX_USE_CXX11_ABI), os.path.dirname(os.path.realpath(torch.__file__)), sep=';')"
      OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_failed
      ERROR_VARIABLE torch_error)
    if(torch_failed)
      message(FATAL_ERROR "torch cannot be imported by ${Python_EXECUTABLE}; install it "
        "(pip install torch==2.13.0) or pass -DPython_EXECUTABLE=\n${torch_error}")
    endif()
    list(GET torch_facts 0 torch_version)
    list(GET torch_facts 1 torch_abi)
    list(GET torch_facts 2 torch_root)
    set(DSCOMM_TORCH_VERSION ${torch_version} CACHE STRING "torch.__version__ to build against")
    set(DSCOMM_TORCH_CXX11_ABI ${torch_abi} CACHE STRING "torch._C._GLIBCXX_USE_CXX11_ABI")
    set(DSCOMM_TORCH_ROOT ${torch_root} CACHE PATH "the folder of torch/__init__.py")
  endif()
  add_extension(_C ${DSCOMM_TORCH_VERSION} ${DSCOMM_TORCH_ROOT} ${DSCOMM_TORCH_CXX11_ABI} "")
endif()
