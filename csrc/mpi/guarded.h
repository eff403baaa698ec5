// The way to call MPI: guarded([&] { return MPI_Isend(...); }).
//
// When a connection breaks on which something is still to be sent, as when a rank of another host
// dies, Open MPI does one of two things that would take this process along, before it has said who
// died:
//
//   It ends the process ("pml_ob1_sendreq.c:190 FATAL", Open MPI 4 and 5), by ompi_rte_abort(). The
//   guard replaces that: inside guarded() it throws, through MPI's own frames, and guarded()
//   returns an error code instead.
//
//   Its TCP code stays in the call, waiting for a lock or going round in circles. A thread watches
//   the calls (call_watch.h) and takes the caller out of one that does not return: guarded()
//   returns an error code, too.
//
// MPICH does the same: it ends the process by exit() (mpich/exit_hook.h), or stays in the call.
//
// Whatever MPI was doing then stays half done, and locks of its may be held; so MPI has given up,
// for all threads of the process, and is not called again.
//
// In MPI calls of the program itself nothing changes: Open MPI's own function is called as ever.
#pragma once

#include <mpi.h>

#include <string>

#include "core/base/status.h"
#include "mpi/call_watch.h"

namespace dscomm {

// MPI has given up in this process. Any thread.
bool mpi_gave_up();
// Why, in its own words; empty where it has none, as when a connection breaks.
std::string mpi_last_words();

// The first death reported by the failure detector; OK if none. Any thread.
Status first_death();
void note_first_death(const Status& death);

namespace guard {

struct GaveUp {};
// Inside guarded(): leaves the call that is under way. `why` in MPI's words.
[[noreturn]] void give_up(const char* why);

class Entry {
 public:
  // Calls that may block for long in order are not watched.
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

// What `call` returns, one of MPI's codes; MPI_ERR_OTHER when MPI gives up in it or has done so
// before. For calls that may communicate but do not wait for other ranks; what only asks or
// allocates needs no guard. Objects with a destructor do not belong into `call`: where it is left,
// they are not destroyed.
template <typename Call>
int guarded(const Call& call) {
  if (mpi_gave_up()) return MPI_ERR_OTHER;
  guard::Calls& calls = guard::calls_of_thread();
  // A second return: the call was left. Only MPI's frames and this one lie between.
  if (calls.depth == 0 && sigsetjmp(calls.way_out, /*savemask=*/0) != 0) return MPI_ERR_OTHER;
  return guard::call_inside(calls, true, call);
}

// The same for calls that wait for other ranks. They belong on a thread that can be left behind
// (core's abandonable calls).
template <typename Call>
int guarded_blocking(const Call& call) {
  if (mpi_gave_up()) return MPI_ERR_OTHER;
  return guard::call_inside(guard::calls_of_thread(), false, call);
}

}  // namespace dscomm
