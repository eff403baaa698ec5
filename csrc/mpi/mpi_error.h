// A refusal by MPI as a status.
#pragma once

#include <mpi.h>

#include "core/base/status.h"
#include "mpi/guarded.h"

namespace dscomm {

// kInternal with the call that failed and MPI's own words. `code` is not MPI_SUCCESS.
inline Status mpi_error(const char* call, int code) {
  if (mpi_gave_up()) {
    const std::string words = mpi_last_words();
    return make_status(Code::kInternal,
                       "%s failed: Open MPI has given up in this process (%s); start the process "
                       "again to use groups of several hosts",
                       call, words.empty() ? "a connection to another one broke" : words.c_str());
  }
  char text[MPI_MAX_ERROR_STRING] = "no reason given";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return make_status(Code::kInternal, "%s failed: %s; MPI may have said more on standard error",
                     call, text);
}

}  // namespace dscomm
