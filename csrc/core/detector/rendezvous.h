// How the members of a transport come to be connected (see links.h).
//
// Every member listens, for those that connect to it, at its addresses and publishes them in the
// store with a random token. Who connects tries them side by side, and shows the token and its
// rank. A member whose own connections are there, and to which all of those that connect to it have
// said the same, says so to whom it has connected; the first member of the first host then lets all
// start. Nobody listens any longer.
//
// Whoever cannot go on says why, over its connections and in the store, so that all raise the first
// cause, soon. A stranger that finds the port has no token, and holds nobody up.
#pragma once

#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/detector/connection.h"
#include "core/store/store.h"
#include "core/transport/transport.h"

namespace dscomm {

// A connection to another member.
struct Link {
  int rank = 0;
  Connection connection;
};

// Collective over the members, all of which return soon after the deadline at the latest. What came
// after kStart is still to be read from the connections. What failed has removed its invitation.
Result<std::vector<Link>> connect_members(const TransportRequest& request, Store& store,
                                          const Deadline& deadline);

// By each member, after that: removes what it has published. May wait for the store, so the
// connections are to be served meanwhile.
void remove_invitation(const TransportRequest& request, Store& store, const Deadline& deadline);

}  // namespace dscomm
