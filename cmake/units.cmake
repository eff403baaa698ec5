# Parsing headers is more than half of compiling a file, so the files of a folder share a compilation.
# Functions are then inlined across them: linking with -flto takes 30 s more and no call is faster.
#
# make_units(UNITS NAME SOURCE...): sets UNITS to one file for each folder of the sources, which
# includes them all; units/NAME of the build directory has them. They name the sources below csrc, not
# in full as CMake's unity builds do, so that the compiler cache serves any clone. Names in the unnamed
# namespaces of a folder must differ.
function(make_units units name)
  set(folders)
  foreach(source IN LISTS ARGN)
    string(REGEX REPLACE "^(.*/)?csrc/" "" source ${source})
    get_filename_component(folder ${source} DIRECTORY)
    string(REPLACE "/" "_" folder ${folder})
    list(APPEND folders ${folder})
    string(APPEND text_${folder} "#include \"${source}\"\n")
  endforeach()
  list(REMOVE_DUPLICATES folders)
  set(files)
  foreach(folder IN LISTS folders)
    set(unit ${CMAKE_BINARY_DIR}/units/${name}/${folder}.cc)
    file(CONFIGURE OUTPUT ${unit} CONTENT "${text_${folder}}" @ONLY)
    list(APPEND files ${unit})
  endforeach()
  set(${units} ${files} PARENT_SCOPE)
endfunction()
