// PointToPoint: checks, between slices of sleep, whether waiting still makes sense.
#include "core/base/format.h"
#include "core/base/timeout_advice.h"
#include "core/messages/state.h"
#include "core/team/first_cause.h"

namespace dscomm {
namespace {

// A check visits every member of every group with pending operations. The interval is as long as
// the first slice of a futex wait.
constexpr int64_t kCheckNs = 1'000'000;
// A thorough check costs a system call for each member.
constexpr int64_t kThoroughCheckNs = 100'000'000;

// A check that is this late shows that the process did not run.
constexpr int64_t kLostTimeNs = 1'000'000'000;

}  // namespace

// Checks all groups, if the last check is old enough or a deadline has passed.
void PointToPoint::check_when_due(FinishedTransfers* finished) {
  int64_t now = monotonic_ns();
  if (now < last_check_ns_ + kCheckNs && now < next_deadline_ns_) return;
  extend_deadlines(now);
  last_check_ns_ = now;
  bool thoroughly = now >= last_thorough_check_ns_ + kThoroughCheckNs;
  if (thoroughly) last_thorough_check_ns_ = now;
  next_deadline_ns_ = INT64_MAX;
  for (auto& [number, port] : ports_) {
    if (port->pending.empty() || !port->failure.ok()) continue;
    if (Status status = check_port(*port, now, thoroughly, finished); !status.ok())
      fail_group(*port, status, finished);
  }
}

// Adds time in which this process did not run (see LostTime) to the deadlines of operations. While
// operations are pending, a check follows each slice of sleep, so a check that is late shows such
// time.
void PointToPoint::extend_deadlines(int64_t now) {
  if (slice_ns_ == 0) return;  // then checks are irregular
  const int64_t lost_ns = now - (last_check_ns_ + slice_ns_);
  if (lost_ns < kLostTimeNs) return;
  for (auto& [number, port] : ports_)
    for (const TransferPtr& transfer : port->pending)
      if (transfer->end_ns != INT64_MAX) transfer->end_ns += lost_ns;
}

Status PointToPoint::check_port(Port& port, int64_t now, bool thoroughly,
                                FinishedTransfers* finished) {
  const PointToPointGroup& group = *port.group;
  Status failure = group.failure();
  const int size = static_cast<int>(group.peers.size());
  std::vector<MemberLife> members(group.peers.size());
  bool some_gone = false;
  for (int member = 0; member < size; ++member) {
    if (member == group.rank) continue;
    members[member] = read_member_life([&] { return group.peers[member]->alive(thoroughly); },
                                       [&] { return group.has_left(member); });
    some_gone |= members[member].gone();
  }
  bool late = false;
  for (const TransferPtr& transfer : port.pending) late |= transfer->end_ns <= now;
  const bool suspicious = !port.pending_cause.ok() && now - port.pending_since_ns >= kCauseGraceNs;
  if (!failure.ok() || some_gone || late || suspicious) {
    // Receive all that gone members published: alive() and has_left() were acquire loads.
    progress(finished);
    if (!port.failure.ok() || port.pending.empty()) return {};
    // A member may have recorded why it went.
    DSCOMM_RETURN_IF_ERROR(group.failure());
    for (int member = 0; member < size; ++member)
      if (member != group.rank) members[member].unread = port.connections[member]->unread;
    if (some_gone) DSCOMM_RETURN_IF_ERROR(find_impossible(port, members));
    if (suspicious) return port.pending_cause;
  }
  for (const TransferPtr& transfer : port.pending) {
    if (transfer->end_ns <= now) return Status(Code::kTimeout, timeout_text(*transfer, members));
    next_deadline_ns_ = std::min(next_deadline_ns_, transfer->end_ns);
  }
  return {};
}

// Fails if a pending operation needs something that a member will never do.
Status PointToPoint::find_impossible(Port& port, const std::vector<MemberLife>& members) const {
  const PointToPointGroup& group = *port.group;
  for (const TransferPtr& transfer : port.pending) {
    const std::string what = transfer->describe() + ": ";
    if (!port.pending_cause.ok())  // then any death is the cause
      for (size_t member = 0; member < members.size(); ++member)
        if (members[member].died)
          return Status(Code::kPeerDied,
                        what + death_text(group.name_member(static_cast<int>(member))));
    if (std::optional<Status> never =
            can_never_complete(transfer->sending, transfer->peer, group.rank, members, what,
                               group.name_member, group.departure))
      return *never;
  }
  return {};
}

std::string PointToPoint::timeout_text(const Transfer& transfer,
                                       const std::vector<MemberLife>& members) const {
  const PointToPointGroup& group = *transfer.group;
  const int peer = transfer.came_from >= 0 ? transfer.came_from : transfer.peer;
  std::string awaited;
  bool held_up = false;
  for (int member = 0; member < static_cast<int>(members.size()); ++member) {
    if (member == group.rank || (peer >= 0 && peer != member)) continue;
    const MemberLife& life = members[member];
    held_up |= life.unread && !transfer.sending;
    if (peer == -1 && life.gone() && !life.unread) continue;
    awaited += format_text("{}{}, which is {}", awaited.empty() ? "" : "; ",
                           group.name_member(member), group.peers[member]->state_text());
  }
  const std::string what = transfer.sending ? " waiting until it is received by "
                           : transfer.came_from >= 0
                               ? " waiting for the rest of a send from "
                               : format_text(": no send with tag {} has arrived at rank {} from ",
                                             transfer.tag, group.rank);
  std::string text = format_text("{} timed out after {}{}{}", transfer.describe(),
                                 duration_text(transfer.timeout_ms), what, awaited);
  if (peer == -1)
    if (const std::string gone = list_gone(group.rank, members, group.name_member, group.departure);
        !gone.empty())
      text += "; " + gone + " before";
  if (held_up)
    text +=
        "; messages that nobody has received fill DSCOMM_UNEXPECTED_BYTES and hold up what comes "
        "after them: receive them, or raise it";
  return text + timeout_advice(awaited);
}

}  // namespace dscomm
