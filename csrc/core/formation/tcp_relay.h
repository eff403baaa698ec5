// TcpRelay: the TableRelay between hosts. It listens and connects as the failure detector's members
// do (see listener.h and dial.h), and admits only clients with the token from the store.
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
  // `own` is this process; its networks are those at which children may reach it. `host` is the
  // same for all processes of this host, and no other (see host_identity()). `group` is for
  // messages.
  TcpRelay(std::string group, std::string host, TransportMember own, Settings settings);
  TcpRelay(const TcpRelay&) = delete;  // the listener refers to it

  Result<std::string> listen() override;
  Result<std::string> fetch(const RelayPlace& place, uint64_t meeting, size_t most_bytes,
                            const Look& look, const Deadline& limit) override;
  void pass_on(const RelayPlace& place, uint64_t meeting, const std::string& table,
               const Look& look, const Deadline& limit) override;
  void close() override { listener_.reset(); }

 private:
  // Rank 0 is a parent; its children have their numbers as ranks. `own_number` is this process.
  TransportRequest request_of(int own_number) const;

  const std::string group_, host_;
  const TransportMember own_;
  const Settings settings_;
  TransportRequest request_;  // of the listener
  std::optional<Listener> listener_;
};

}  // namespace dscomm
