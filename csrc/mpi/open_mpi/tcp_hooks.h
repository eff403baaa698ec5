// Open MPI's connections over TCP (its component btl/tcp) without strangers.
//
// A rank of Open MPI listens on all interfaces for as long as the job lasts. A client is to send a
// fixed text and the number of a rank, which anybody can know; and until it has sent that, the rank
// that reads it is stuck in a call of MPI that should return at once.
//
// Three functions of that component are found here before its own, like ompi_rte_abort
// (guarded.cc). The first prepares each socket, so it reveals MPI's listeners, and the connections
// with whose data a sleep can end. The others send and read the greeting: they add the job's token,
// in the same packet, and read without waiting. A greeting that is not all there, or has another
// token, is refused.
//
// If Open MPI binds its own functions (linked with -Bsymbolic-functions), its connections stay as
// they are, and are_hooks_called() is false.
#pragma once

#include <string>
#include <vector>

namespace dscomm {

// Of 16 random bytes; empty where the system has none.
std::string random_token();

// Before MPI_Init_thread: only packets from `addresses` reach MPI's listeners. With
// `refuses_greetings` nobody connects until admit_greetings().
void guard_mpi_listeners(const std::vector<std::string>& addresses, bool refuses_greetings);
// Whether MPI has called the hooks. Once MPI_Init_thread has returned.
bool are_hooks_called();
// From now on greetings carry `token`; empty: they are as Open MPI has them. Before this process
// connects to another rank.
void admit_greetings(const std::string& token);

}  // namespace dscomm
