#include "core/formation/tcp_relay.h"

#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/log.h"
#include "core/base/packer.h"
#include "core/detector/connection.h"
#include "core/detector/connector.h"
#include "core/transport/members.h"

namespace dscomm {
namespace {

constexpr int64_t kRelaySliceNs = 100 * kMs;

// How much of a table is queued for a child at a time.
constexpr size_t kQueuedBytes = 256 << 10;

// In each message, `rank` is the number of messages that follow.
std::string encode_table(std::string_view table, uint64_t meeting) {
  const size_t messages =
      std::max<size_t>(1, (table.size() + kMessageTextBytes - 1) / kMessageTextBytes);
  std::string bytes;
  bytes.reserve(table.size() + messages * encode(Message()).size());
  for (size_t k = 0; k < messages; ++k) {
    Message message =
        Message::about(MessageKind::kTable, static_cast<int>(messages - k - 1), meeting);
    message.text = table.substr(k * kMessageTextBytes, kMessageTextBytes);
    bytes += encode(message);
  }
  return bytes;
}

// Waits for an event of `entries` until `until_ns` or `limit`, but at most kRelaySliceNs.
Status wait_for(std::vector<pollfd>* entries, int64_t until_ns, const Deadline& limit) {
  const int64_t began_ns = monotonic_ns();
  const int64_t asked_ns =
      std::clamp(std::min(until_ns - began_ns, limit.remaining_ns()), kMs, kRelaySliceNs);
  const int ready = ::poll(entries->data(), entries->size(), static_cast<int>(asked_ns / kMs));
  const int reason = errno;
  limit.note_slice(began_ns, asked_ns);
  if (ready >= 0) return {};
  for (pollfd& entry : *entries) entry.revents = 0;
  if (reason == EINTR) return {};
  return Status(Code::kResource, std::string("poll failed: ") + std::strerror(reason));
}

}  // namespace

TcpRelay::TcpRelay(std::string group, std::string host, TransportMember own, Settings settings)
    : group_(std::move(group)),
      host_(std::move(host)),
      own_(std::move(own)),
      settings_(std::move(settings)) {}

TransportRequest TcpRelay::request_of(int own_number) const {
  TransportRequest request;
  request.name = group_;
  request.rank = own_number;
  request.settings = settings_;
  request.members.resize(1 + kRelayChildren);
  request.members[static_cast<size_t>(own_number)] = own_;
  int host = 0;
  for (TransportMember& member : request.members) member.host = host++;
  return request;
}

Result<std::string> TcpRelay::listen() {
  close();
  request_ = request_of(0);
  if (getrandom(&request_.id, sizeof request_.id, 0) != static_cast<ssize_t>(sizeof request_.id))
    return Status(Code::kResource, "getrandom failed");
  listener_.emplace(request_, kRelayChildren);
  if (Status status = listener_->open(); !status.ok()) {
    close();
    return status;
  }
  return Packer()
      .number(request_.id)
      .index(own_.global_rank)
      .fields(own_.pid, host_, own_.host_name, own_.networks, encode(listener_->invitation()))
      .take();
}

Result<std::string> TcpRelay::fetch(const RelayNode& node, uint64_t meeting, size_t most_bytes,
                                    const GiveUpCheck& check, const Deadline& limit) {
  const Status malformed = malformed_value("address of a parent");
  if (node.number < 1 || node.number > kRelayChildren) return malformed;
  TransportRequest request = request_of(node.number);
  TransportMember& parent = request.members.front();
  Unpacker unpacker(node.parent);
  std::string host, invitation;
  unpacker.fields(request.id)
      .index(parent.global_rank)
      .fields(parent.pid, host, parent.host_name, parent.networks, invitation);
  if (!unpacker.whole()) return malformed;
  // A rank that speaks for itself may be on its parent's host: then both members have one host.
  if (host == host_) parent.host = node.number;
  const std::string name = name_member(request.members, 0);

  Connector connector(request, 0, 1);  // after one refusal the store is asked
  DSCOMM_RETURN_IF_ERROR(connector.read(invitation));
  Connection connection;
  std::string table;
  while (!limit.expired()) {
    DSCOMM_RETURN_IF_ERROR(check());
    std::vector<pollfd> entries;
    int64_t wake_ns = monotonic_ns() + kRelaySliceNs;
    if (connection.open()) {
      entries.push_back({connection.fd(), POLLIN, 0});
    } else {
      DSCOMM_RETURN_IF_ERROR(connector.begin());
      connector.add_to(&entries);
      wake_ns = connector.next_attempt_ns();
    }
    DSCOMM_RETURN_IF_ERROR(wait_for(&entries, wake_ns, limit));
    if (connection.open()) {
      connection.receive();
    } else if (connector.handle(entries)) {
      connection = connector.connection();
    } else {
      continue;
    }
    Message message;
    while (connection.next(&message)) {
      if (message.kind != MessageKind::kTable || message.id != meeting ||
          table.size() + message.text.size() > most_bytes)
        return Status(Code::kInternal, name + " sent something other than the member table");
      table += message.text;
      if (message.rank != 0) continue;
      log_line(LogLevel::kDebug, "the member table of '{}' came from {}", group_, name);
      connection.hang_up();
      return table;
    }
    if (connection.ended())
      return Status(Code::kPeerDied, name + " did not pass on the whole member table");
  }
  return Status(Code::kTimeout, name + " did not pass on the member table in time");
}

void TcpRelay::pass_on(const RelayNode& node, uint64_t meeting, const std::string& table,
                       const GiveUpCheck& check, const Deadline& limit) {
  if (!listener_ || node.children.empty()) return;
  const std::string messages = encode_table(table, meeting);
  struct Child {
    Connection connection;  // the child closes it when it has the table
    size_t queued = 0;      // bytes of `messages`
  };
  std::map<int, Child> served;  // by number
  const auto serve = [&](Child& child) {
    if (!child.connection.has_queued()) {
      child.connection.queue(std::string_view(messages).substr(child.queued, kQueuedBytes));
      child.queued = std::min(child.queued + kQueuedBytes, messages.size());
    }
    child.connection.flush();
    child.connection.receive();
    for (Message ignored; child.connection.next(&ignored);) continue;
  };
  const auto admit = [&](int number, Connection&& arrived) {
    if (std::count(node.children.begin(), node.children.end(), number) == 0) return;
    Connection connection = std::move(arrived);
    // A child tries several addresses: the first connection counts.
    if (served.count(number) > 0) return;
    connection.queue(Message::about(MessageKind::kWelcome, number, request_.id));
    served[number].connection = std::move(connection);
    serve(served[number]);
  };
  while (!limit.expired() && check().ok()) {
    std::vector<pollfd> entries;
    for (const auto& [number, child] : served) {
      const bool sends = child.connection.has_queued() || child.queued < messages.size();
      if (!child.connection.ended())
        entries.push_back(
            {child.connection.fd(), static_cast<short>(sends ? POLLIN | POLLOUT : POLLIN), 0});
    }
    if (served.size() == node.children.size() && entries.empty()) return;
    const size_t first_of_listener = entries.size();
    listener_->add_to(&entries);
    if (!wait_for(&entries, monotonic_ns() + kRelaySliceNs, limit).ok()) return;
    for (auto& [number, child] : served)
      if (!child.connection.ended()) serve(child);
    if (!listener_->handle(std::span<const pollfd>(entries).subspan(first_of_listener), admit).ok())
      return;
  }
}

}  // namespace dscomm
