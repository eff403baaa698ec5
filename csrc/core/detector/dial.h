// Dial: one attempt to become connected to another member, at whichever of the addresses that it
// has published answers first. Never blocks.
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

class Dial {
 public:
  // To `rank`, which listens at what it says in the invitation. `request` outlives it. Gives
  // up after so many rounds in a row in which all addresses refused.
  Dial(const TransportRequest& request, int rank, int refusals = 10)
      : request_(request), rank_(rank), refusals_(refusals) {}
  Status read(const std::string& invitation);

  // One turn: begins what is due. Not OK: there is no way.
  Status begin();
  // What to wait for, and when the next turn is due even so.
  void add_to(std::vector<pollfd>* entries) const;
  int64_t next_turn_ns() const;
  // Takes what has happened; `entries` are those that add_to() added. Whether it is connected.
  bool take(std::span<const pollfd> entries);
  Connection connection() { return std::move(made_); }
  // Says something where it is connected, answered or not, and closes all.
  void hang_up(const Message& last_word);

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
  std::vector<Endpoint> endpoints_;  // the most promising first
  std::vector<Attempt> attempts_;
  size_t next_ = 0;            // of the endpoints, in this round
  int64_t start_next_ns_ = 0;  // when it is tried
  int refused_rounds_ = 0;
  Connection made_;
};

}  // namespace dscomm
