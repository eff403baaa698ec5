// Replaces Open MPI's function that ends the process: see guarded.h.
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "mpi/guarded.h"

// The dynamic linker finds this function before libmpi's: a program linked with this file has it
// before libmpi, and the module is loaded with RTLD_GLOBAL. If MPI was loaded globally before (by
// mpi4py, say), libmpi's own is found and nothing changes.
extern "C" __attribute__((visibility("default"), noreturn)) void ompi_rte_abort(int code,
                                                                                char* format, ...) {
  char text[1024] = "";
  if (format != nullptr) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
  }
  if (dscomm::guard::calls_of_thread().depth > 0) dscomm::guard::give_up(text);
  using Abort = void (*)(int, const char*, ...);
  const auto own = reinterpret_cast<Abort>(dlsym(RTLD_NEXT, "ompi_rte_abort"));
  if (own != nullptr) own(code, format == nullptr ? nullptr : "%s", text);
  std::abort();
}
