// How the members of a transport connect to each other (see links.h).
//
// Each member listens for those that connect to it, and publishes its addresses with a random token
// in the store. The others try the addresses in parallel, and send the token and their rank. A
// member is ready once it has all its connections and all members that connect to it are ready. It
// then tells the members that it connects to. So readiness reaches the first member of the first
// host, which starts all. Then all stop listening.
//
// A member that cannot go on reports the cause over its connections and in the store, so that all
// soon raise the first cause. A stranger that finds the port has no token, and delays nobody.
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

// Collective over the members, which all return soon after the deadline at the latest. Messages
// that follow kStart are still unread in the connections. A failure removes the invitation.
Result<std::vector<Link>> connect_members(const TransportRequest& request, Store& store,
                                          const Deadline& deadline);

// Call on each member after connect_members(): removes the member's invitation. May wait for the
// store, so another thread must serve the connections during the call.
void remove_invitation(const TransportRequest& request, Store& store, const Deadline& deadline);

}  // namespace dscomm
