// Converts an MPI error to a Status.
#pragma once

#include <mpi.h>

#include "core/base/status.h"
#include "mpi/guarded.h"

namespace dscomm {

// If MPI has given up in this process, adds the first death to the error, because the broken
// connection to a dead rank also ends groups to which that rank does not belong.
inline Status append_first_death(const Status& refused) {
  const Status death = first_death();
  if (!mpi_gave_up() || death.ok() || refused.message().ends_with(death.message())) return refused;
  return Status(refused.code(), refused.message() + "; " + death.message());
}

// kInternal with the failed call and MPI's message. `code` is not MPI_SUCCESS.
inline Status mpi_error(const char* call, int code) {
  if (mpi_gave_up()) {
    const std::string words = mpi_abort_message();
    return append_first_death(make_status(
        Code::kInternal,
        "{} failed: MPI no longer works in this process ({}); start the job again to use "
        "groups of several hosts",
        call, words.empty() ? "a call did not return" : words));
  }
  char text[MPI_MAX_ERROR_STRING] = "no reason given";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return make_status(Code::kInternal, "{} failed: {}; MPI may have said more on standard error",
                     call, text);
}

}  // namespace dscomm
