// Listener: accepts connections of other members while it expects some. A peer must first send the
// token and its rank, or it is rejected. Never blocks.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/base/owned.h"
#include "core/base/status.h"
#include "core/detector/connection.h"
#include "core/transport/transport.h"

namespace dscomm {

class Listener {
 public:
  // `request` must outlive the Listener. Expects connections of `expected` members.
  Listener(const TransportRequest& request, size_t expected)
      : request_(request), expected_(expected) {}

  // Listens at all addresses of this member, and at no other: if the user has chosen some addresses
  // (DSCOMM_IFNAME), the rest stay closed. kUnsupported if the member has no address.
  Status open();
  bool is_open() const { return !listeners_.empty(); }
  // The message that other members need in order to connect.
  Message invitation() const;
  const std::string& endpoints() const { return endpoints_; }  // "10.0.0.1:4444 10.1.0.1:5555"

  void add_to(std::vector<pollfd>* entries) const;
  // Handles the results of poll() for add_to()'s entries. Calls `admit` for each member that has
  // identified itself; `admit` takes the connection, or leaves it to be closed.
  using Admit = std::function<void(int rank, Connection&& connection)>;
  Status handle(std::span<const pollfd> entries, const Admit& admit);

 private:
  // A connection whose peer has not identified itself.
  struct PendingConnection {
    Connection connection;
    int64_t since_ns = 0;
  };

  Status listen_at(const std::string& address);
  Status accept_from(int listener);
  bool is_settled(Connection* connection, const Admit& admit);
  std::string own_name() const;

  const TransportRequest& request_;
  const size_t expected_;
  std::string token_, endpoints_;
  std::vector<UniqueFd> listeners_;
  std::vector<PendingConnection> pending_;
};

}  // namespace dscomm
