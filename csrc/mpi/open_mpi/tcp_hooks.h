// Keeps strangers off Open MPI's TCP connections (its component btl/tcp).
//
// A rank of Open MPI listens on all interfaces while the job lasts. It accepts any client that
// sends a fixed text and a rank number. While a connected client has not sent them, an MPI call of
// the rank hangs, even one that should return at once.
//
// The dynamic linker finds three functions here before that component's own, as with ompi_rte_abort
// (abort.cc). The first one sets the options of each socket, so it reveals MPI's listeners and
// connections, on whose data a sleep can wake. The second reads the greeting without waiting, and
// refuses an incomplete one or a wrong token. The third sends the greeting, with the job's token in
// the same packet.
//
// If Open MPI binds its own functions (linked with -Bsymbolic-functions), nothing changes and
// are_hooks_called() is false.
#pragma once

#include <string>
#include <vector>

namespace dscomm {

// 16 random bytes; empty if the system has none.
std::string random_token();

// Call it before MPI_Init_thread: only packets from `addresses` then reach MPI's listeners. With
// `refuses_greetings`, no rank can connect until admit_greetings().
void guard_mpi_listeners(const std::vector<std::string>& addresses, bool refuses_greetings);
// Whether MPI has called the hooks. Call it after MPI_Init_thread.
bool are_hooks_called();
// From now on greetings carry `token`; empty: unchanged greetings. Call it before this process
// connects to another rank.
void admit_greetings(const std::string& token);

}  // namespace dscomm
