// Listener: where other members connect to this one, for as long as it expects some. Who connects
// shows the token and its rank at once, or is turned away. Never blocks.
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
  // `request` outlives it. It expects connections of so many members.
  Listener(const TransportRequest& request, size_t expected)
      : request_(request), expected_(expected) {}

  // At all addresses of this member, and no other: where a user has chosen among them, the rest
  // stay closed. kUnsupported where it has none.
  Status open();
  bool is_open() const { return !listeners_.empty(); }
  // For those who are to connect.
  Message invitation() const;
  const std::string& endpoints() const { return endpoints_; }  // "10.0.0.1:4444 10.1.0.1:5555"

  void add_to(std::vector<pollfd>* entries) const;
  // What has happened; `entries` are those that add_to() added. `admit` is called for each member
  // that has shown who it is, and has the connection unless it does not want it.
  using Admit = std::function<void(int rank, Connection&& connection)>;
  Status take(std::span<const pollfd> entries, const Admit& admit);

 private:
  // A connection that has not shown who it is.
  struct Arrival {
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
  std::vector<Arrival> arrivals_;
};

}  // namespace dscomm
