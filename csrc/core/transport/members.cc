#include "core/transport/members.h"

#include <chrono>
#include <cinttypes>
#include <cstdio>

namespace dscomm {

std::string name_member(const std::vector<TransportMember>& members, int rank) {
  const TransportMember& member = members[rank];
  return "rank " + std::to_string(member.global_rank >= 0 ? member.global_rank : rank) + " (pid " +
         std::to_string(member.pid) + " on host " + member.host_name + ")";
}

ExchangeRequest exchange_of(const TransportRequest& request) {
  ExchangeRequest exchange;
  char id[32];
  std::snprintf(id, sizeof id, "%016" PRIx64 "/", request.id);
  exchange.prefix = request.prefix + "detector/" + id;
  exchange.rank = request.rank;
  exchange.size = static_cast<int>(request.members.size());
  exchange.name = [&request](int rank) { return name_member(request.members, rank); };
  return exchange;
}

void decline_transport(const TransportRequest& request, Store& store, const Status& cause) {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(0));
  static_cast<void>(StoreExchange(store, exchange_of(request), deadline).fail(cause));
}

}  // namespace dscomm
