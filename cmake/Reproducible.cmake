# The same commit gives the same bytes, wherever it is built.

# What the compilers write of a path (__FILE__, debug information) starts with `name` instead of this machine's folder.
# For every target that is made after the call. nvcc splits -Xcompiler at commas and the host compiler splits at "=":
# a folder with such a name keeps it, and the audit of the wheel says so.
function(prequal_hide_path path name)
  cmake_path(NORMAL_PATH path)
  if(path MATCHES "[,= ]")
    return()
  endif()
  set(map "-ffile-prefix-map=${path}=${name}")
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${map}>" "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${map}>")
endfunction()

# nvcc names what lies in an anonymous namespace, so every kernel, after a hash of the file's absolute path. Its front
# end takes that path from an option, of which the last one counts. --frandom-seed does not reach that hash (13.0.88).
function(prequal_name_after_relative_path)
  foreach(file IN LISTS ARGN)
    cmake_path(RELATIVE_PATH file BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" OUTPUT_VARIABLE relative)
    set_property(SOURCE "${file}" APPEND PROPERTY COMPILE_OPTIONS
                 "-Xcudafe=--orig_src_path_name=${relative}" "-Xcompiler=-frandom-seed=${relative}")
  endforeach()
endfunction()
