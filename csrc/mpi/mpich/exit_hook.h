// Keeps MPICH from ending the process in a call of dscomm.
//
// Some errors are fatal to MPICH whatever the error handler: for example, a connection is reset
// while a message is in transit. MPICH then prints "Abort(...)" and calls exit().
#pragma once

namespace dscomm {

// From now on, if the library that contains `function` calls exit() inside guarded(), the call
// returns MPI_ERR_OTHER and MPI has given up (guarded.h). Elsewhere exit() works as usual.
// Thread-safe. False, with no effect, if the library's function table has no exit().
bool hook_exit(const void* function);

}  // namespace dscomm
