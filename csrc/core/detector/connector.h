// Connector: connects to another member, at its first address that answers. Never blocks.
#pragma once

#include <poll.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/detector/connection.h"
#include "core/transport/networks.h"
#include "core/transport/transport.h"

namespace dscomm {

class Connector {
 public:
  // Connects to `rank`, whose addresses read() takes from the invitation. `request` must outlive
  // the Connector. Gives up when all addresses have refused `refusals` times in a row.
  Connector(const TransportRequest& request, int rank, int refusals = 10)
      : request_(request), rank_(rank), refusals_(refusals) {}
  Status read(const std::string& invitation);

  // Begins the attempts that are due. Returns an error if no address works.
  Status begin();
  // The descriptors to poll; and the time, on monotonic_ns(), at which begin() is due next.
  void add_to(std::vector<pollfd>* entries) const;
  int64_t next_attempt_ns() const;
  // Handles the results of poll() for add_to()'s entries. Returns whether connection() is ready.
  bool handle(std::span<const pollfd> entries);
  Connection connection() { return std::move(connection_); }
  // Sends a last message over those attempts that are connected, and closes all attempts.
  void hang_up(const Message& last_message);

  // "rank 1 (...) <how> to rank 0 (...) at 10.0.0.1:4444 (Connection refused); ..."
  Status unreachable(Code code, const std::string& how) const;

 private:
  struct Endpoint {
    SocketAddress address;
    std::string text;     // "10.0.0.1:4444"
    std::string outcome;  // of the last attempt
    bool refused = false;
  };
  struct Attempt {
    Connection connection;
    size_t endpoint = 0;
    bool connected = false;
  };

  void add_endpoint(const std::string& text, const std::string& address);
  bool is_tried(size_t endpoint) const;
  Result<bool> begin_attempt(size_t endpoint);
  bool is_over(Attempt& attempt);
  Status end_round();
  std::string own_name() const;
  std::string name() const;

  const TransportRequest& request_;
  const int rank_, refusals_;
  std::string token_;
  std::vector<Endpoint> endpoints_;  // the best first
  std::vector<Attempt> attempts_;
  size_t next_ = 0;            // index of the endpoint to try next in this round
  int64_t start_next_ns_ = 0;  // when to try it
  int refused_rounds_ = 0;
  Connection connection_;
};

}  // namespace dscomm
