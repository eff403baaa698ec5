// The way to call MPI: guarded([&] { return MPI_Isend(...); }).
//
// Open MPI 4 and 5 end the process when a connection breaks on which something is still to be sent
// ("pml_ob1_sendreq.c:190 FATAL"). So a rank that dies could take ranks of other hosts along,
// before they have said who died. Open MPI does that by way of ompi_rte_abort(), which this
// replaces: inside guarded() it throws, through MPI's own frames, and guarded() returns an error
// code instead. Whatever MPI was doing then stays half done, and locks of its may be held; so MPI
// has given up, for all threads of the process, and is not called again. (A call of another thread
// that is under way at that moment can meet such a lock, and stay.)
//
// Elsewhere, in MPI calls of the program itself, Open MPI's own function is called as ever.
#pragma once

#include <mpi.h>

#include <string>

namespace dscomm {

// MPI has given up in this process. Any thread.
bool mpi_gave_up();
// Why, in Open MPI's words; empty where it has none, as when a connection breaks.
std::string mpi_last_words();

namespace guard {

struct GaveUp {};

// Counts the calls to guarded() that this thread is in.
class Entry {
 public:
  Entry();
  ~Entry();
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
};

}  // namespace guard

// What `call` returns, one of MPI's codes; MPI_ERR_OTHER when MPI gives up in it or has done so
// before. For calls that may communicate; what only asks or allocates needs no guard.
template <typename Call>
int guarded(const Call& call) {
  if (mpi_gave_up()) return MPI_ERR_OTHER;
  try {
    guard::Entry entry;
    return call();
  } catch (const guard::GaveUp&) {
    return MPI_ERR_OTHER;
  }
}

}  // namespace dscomm
