// What the members of a transport need to agree on its making, before they are connected.
#pragma once

#include <string>
#include <vector>

#include "core/store/store_exchange.h"
#include "core/transport/transport.h"

namespace dscomm {

// "rank 3 (pid 7 on host b)": its rank in the job where that is known, else its number.
std::string name_member(const std::vector<TransportMember>& members, int rank);

// The exchange through which they find each other. `request` outlives it.
ExchangeRequest exchange_of(const TransportRequest& request);

// By a member that cannot even begin: the others, which look in that exchange, raise `cause` soon.
void decline_transport(const TransportRequest& request, Store& store, const Status& cause);

}  // namespace dscomm
