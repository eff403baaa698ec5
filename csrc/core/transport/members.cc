#include "core/transport/members.h"

#include <chrono>

#include "core/base/format.h"

namespace dscomm {

std::string name_member(const std::vector<TransportMember>& members, int rank) {
  const TransportMember& member = members[rank];
  return format_text("rank {} (pid {} on host {})",
                     member.global_rank >= 0 ? member.global_rank : rank, member.pid,
                     member.host_name);
}

ExchangeRequest exchange_of(const TransportRequest& request) {
  ExchangeRequest exchange;
  exchange.prefix = format_text("{}detector/{:016x}/", request.prefix, request.id);
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
