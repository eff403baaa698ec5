// Calls MPI so that a broken connection cannot end or block the process: guarded([&] { return
// MPI_Isend(...); }).
//
// When a connection breaks with data still to be sent, as when a rank of another host dies, Open
// MPI does one of two things, which would end or block this process before dscomm reports the
// death:
//
//   It ends the process ("pml_ob1_sendreq.c:190 FATAL", Open MPI 4 and 5), by ompi_rte_abort().
//   dscomm replaces that function: inside guarded() it throws through MPI's frames, and guarded()
//   returns an error code.
//
//   Its TCP code hangs in the call, waiting for a lock or looping. The call watch (call_watch.h)
//   takes the thread out of the call, and guarded() returns an error code.
//
// When a connection breaks, MPICH calls exit() (mpich/exit_hook.h) or hangs.
//
// After a call has been left, MPI's state is inconsistent and its locks may be held. So MPI has
// "given up" for all threads of the process, and dscomm does not call MPI again.
//
// The program's own calls of MPI do not change: Open MPI's own function still ends the process.
#pragma once

#include <mpi.h>

#include <string>

#include "core/base/status.h"
#include "mpi/call_watch.h"

namespace dscomm {

// Whether MPI has given up in this process. Thread-safe.
bool mpi_gave_up();
// The message with which MPI gave up; empty if there was none, as when a call hangs.
std::string mpi_abort_message();

// The first death reported by the failure detector; OK if none. Thread-safe.
Status first_death();
void note_first_death(const Status& death);

namespace guard {

struct GaveUp {};
// Leaves the running call. Call it only inside guarded(). `why`: for mpi_abort_message().
[[noreturn]] void give_up(const char* why);

class Entry {
 public:
  // is_watched is false for calls that may block for long in normal operation.
  Entry(Calls& calls, bool is_watched) : calls_(calls), is_watched_(is_watched) {
    if (calls_.depth++ == 0 && is_watched_) calls_.count_up();
  }
  ~Entry() {
    if (--calls_.depth == 0 && is_watched_) calls_.count_up();
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

 private:
  Calls& calls_;
  const bool is_watched_;
};

template <typename Call>
int call_inside(Calls& calls, bool is_watched, const Call& call) {
  try {
    Entry entry(calls, is_watched);
    return call();
  } catch (const GaveUp&) {
    return MPI_ERR_OTHER;
  }
}

}  // namespace guard

// Returns the MPI code that `call` returns, or MPI_ERR_OTHER if MPI gives up in `call` or had given
// up before. For calls that may communicate but do not wait for other ranks; calls that only query
// or allocate need no guard. `call` must not hold objects with destructors, as they would not run.
template <typename Call>
int guarded(const Call& call) {
  if (mpi_gave_up()) return MPI_ERR_OTHER;
  guard::Calls& calls = guard::calls_of_thread();
  // A jump out of the call lands here. It skips only frames of MPI, of `call` and of this file.
  if (calls.depth == 0 && sigsetjmp(calls.way_out, /*savemask=*/0) != 0) return MPI_ERR_OTHER;
  return guard::call_inside(calls, true, call);
}

// Like guarded(), but not watched: for calls that wait for other ranks on an abandonable thread.
template <typename Call>
int guarded_blocking(const Call& call) {
  if (mpi_gave_up()) return MPI_ERR_OTHER;
  return guard::call_inside(guard::calls_of_thread(), false, call);
}

}  // namespace dscomm
