// Helpers for the members of a transport before they are connected.
#pragma once

#include <string>
#include <vector>

#include "core/store/store_exchange.h"
#include "core/transport/transport.h"

namespace dscomm {

// "rank 3 (pid 7 on host b)": the rank in the job if known, else that in the transport.
std::string name_member(const std::vector<TransportMember>& members, int rank);

// For the StoreExchange through which the members find each other. `request` must outlive both.
ExchangeRequest exchange_of(const TransportRequest& request);

// For a member that cannot take part: fails that StoreExchange, so the others soon raise `cause`.
void decline_transport(const TransportRequest& request, Store& store, const Status& cause);

}  // namespace dscomm
