// TcpRelay: the TableRelay between hosts. Listens and connects like the failure detector's members
// (see listener.h and connector.h), and admits only clients with the token from the store.
#pragma once

#include <optional>
#include <string>

#include "core/base/settings.h"
#include "core/detector/listener.h"
#include "core/formation/table_relay.h"
#include "core/transport/transport.h"

namespace dscomm {

class TcpRelay final : public TableRelay {
 public:
  // `own` is this process, with the networks at which children may reach it. `host` identifies this
  // host (see host_identity()). `group` is for messages.
  TcpRelay(std::string group, std::string host, TransportMember own, Settings settings);
  TcpRelay(const TcpRelay&) = delete;  // the listener refers to request_

  Result<std::string> listen() override;
  Result<std::string> fetch(const RelayNode& node, uint64_t meeting, size_t most_bytes,
                            const GiveUpCheck& check, const Deadline& limit) override;
  void pass_on(const RelayNode& node, uint64_t meeting, const std::string& table,
               const GiveUpCheck& check, const Deadline& limit) override;
  void close() override { listener_.reset(); }

 private:
  // The members are a parent, as rank 0, and its children, whose ranks are their numbers.
  TransportRequest request_of(int own_number) const;

  const std::string group_, host_;
  const TransportMember own_;
  const Settings settings_;
  TransportRequest request_;  // of the listener
  std::optional<Listener> listener_;
};

}  // namespace dscomm
