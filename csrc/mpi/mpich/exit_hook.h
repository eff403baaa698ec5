// Keeps MPICH from ending the process in a call of dscomm.
//
// Some errors are fatal to MPICH whatever the error handler, among them a connection that is reset
// while a message is under way, as when a rank of another host dies. It then prints "Abort(...)"
// and calls exit().
#pragma once

namespace dscomm {

// From now on, if the library that has `function` calls exit() inside guarded(), the call is left
// with MPI_ERR_OTHER, and MPI has given up (guarded.h). Elsewhere exit() ends the process as ever.
// Any thread. False if the library's table of functions has no exit(), so nothing changes.
bool hook_exit(const void* function);

}  // namespace dscomm
