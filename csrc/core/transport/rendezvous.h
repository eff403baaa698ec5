// How the connections of a Lifeline come to be.
//
// Member 0 listens at its addresses and publishes them in the store with a random token. Every
// other member connects to the first address that answers, and shows the token and its rank. When
// all have come, member 0 tells them so and stops listening.
//
// Whoever cannot go on says why, over its connection or in the store, so that all raise the first
// cause, soon. A stranger that finds the port has no token, and holds nobody up.
#pragma once

#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/store/store.h"
#include "core/transport/connection.h"
#include "core/transport/transport.h"

namespace dscomm {

// Collective over the members, all of which return soon after the deadline at the latest. One entry
// for each member: on member 0 connections to all others, on these one to member 0; the rest are
// not open. What came after kStart is still to be read from them.
Result<std::vector<Connection>> meet(const TransportRequest& request, Store& store,
                                     const Deadline& deadline);

// In place of meet(), by a member that cannot even begin: the others raise `cause` soon.
void decline_to_meet(const TransportRequest& request, Store& store, const Status& cause);

// "rank 3 (pid 7 on host b)": its rank in the job where that is known, else its number.
std::string name_member(const std::vector<TransportMember>& members, int rank);

}  // namespace dscomm
