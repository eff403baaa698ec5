// PointToPoint: send and receive between the ranks of groups, through channels between processes.
//
// Matching: messages of one (group, source, destination, tag) match receives in the order of
// sending; other tags may match out of order. A receive from any source takes the message that
// arrived first. Named and any-source receives match in the order in which they were posted. A
// message that finds no receive is moved to the heap, up to DSCOMM_UNEXPECTED_BYTES for the
// process; past that its channel is left alone, and the sender waits.
//
// A process may hold several ranks of a group, as threads. Every rank of every group has a port,
// which its group opens before it forms and closes at its end, and which cells name; all state goes
// by port. A channel, in contrast, is one for each ordered pair of processes.
//
// Progress is made by whoever waits for an operation, and by one worker thread for operations that
// nobody waits for. All of it is straight-line code under one mutex, and none of it blocks but for
// the sleep on the doorbell, which happens with the mutex free. Who ends that sleep: a peer that
// publishes or consumes, data from another host, the end of a slice, or the first deadline. A slice
// is short where a peer is on another host, which rings no doorbell; after it, the groups'
// failures, the deadlines and the lives of the peers that are waited for are looked at. Time in
// which this process did not run, because it was stopped, is added to the deadlines.
//
// Callbacks of operations run with no lock of this file held. One that blocks on the worker thread
// holds up what nobody waits for until it returns.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/base/operation.h"
#include "core/base/settings.h"
#include "core/base/socket_sleep.h"
#include "core/base/status.h"
#include "core/messages/channel.h"
#include "core/messages/doorbell.h"
#include "core/messages/endpoint.h"
#include "core/messages/liveness.h"
#include "core/shm/wait.h"
#include "core/types/dtype.h"

namespace dscomm {

// What point-to-point must know of a group. Made once by the group, then shared and not changed.
// The functions are called with PointToPoint's mutex held, and no more once close_port() has
// returned: they do not wait, and neither call into PointToPoint nor need a lock under which
// somebody does.
struct PointToPointGroup {
  uint64_t id = 0;
  std::string name;
  int rank = 0;
  std::vector<std::shared_ptr<Endpoint>> peers;  // in group order, own rank included
  std::vector<uint32_t> ports;                   // in group order: open_port() of each member
  std::shared_ptr<TensorPool> pool;              // that all members of this host read; may be null
  std::function<Status()> failure;               // not OK once the group has failed; cheap
  std::function<void(const Status&)> abort;      // ends the group for every member with a cause
  std::function<bool(int)> has_left;             // a member left the group
  std::function<Departure(int)> departure =      // how, of one that has
      [](int) { return Departure(); };
  std::function<std::string(int)> name_member;  // "rank 2 (pid 7 on host a)"
  WaitPolicy wait;                              // spin_pauses and yield_ns of waits in this group
};

class PointToPoint {
 public:
  // One per arena, for the arena's whole life. The doorbell's token must be in the address that the
  // process publishes.
  PointToPoint(std::shared_ptr<Arena> arena, const Settings& settings,
               std::unique_ptr<Doorbell> doorbell);
  // Ends the worker; what is still pending fails with kAborted.
  ~PointToPoint();

  // Starts a send or a receive; never blocks. The operation is done when the data has left `data`
  // (send) or stands in it (receive). `keep` owns the memory and is dropped before the operation is
  // done. Bad arguments come back as an operation that is done; every other error ends the group.
  // src -1 takes any member's.
  OperationPtr send(std::shared_ptr<PointToPointGroup> group, const void* data, size_t count,
                    DType dtype, int dst, int tag, std::shared_ptr<void> keep,
                    std::chrono::milliseconds timeout);
  OperationPtr receive(std::shared_ptr<PointToPointGroup> group, void* data, size_t count,
                       DType dtype, int src, int tag, std::shared_ptr<void> keep,
                       std::chrono::milliseconds timeout);

  // The same, done when they return; the memory is the caller's meanwhile. `came_from` may be null.
  // A message for which nobody has to sleep takes no operation and, if it is short, no allocation.
  Status blocking_send(const std::shared_ptr<PointToPointGroup>& group, const void* data,
                       size_t count, DType dtype, int dst, int tag,
                       std::chrono::milliseconds timeout);
  Status blocking_receive(const std::shared_ptr<PointToPointGroup>& group, void* data, size_t count,
                          DType dtype, int src, int tag, std::chrono::milliseconds timeout,
                          int* came_from);

  // A number under which one rank of a group that is about to form receives messages; not 0, and
  // never used again. Peers may send to it as soon as they know it.
  uint32_t open_port();
  // The group has formed; it has its port in `ports`. Nothing is sent or received before.
  void join(std::shared_ptr<PointToPointGroup> group);
  // The group is closing, or has not formed: pending operations of the port fail with the group's
  // first cause, or with kAborted when there is none; messages to it, come and to come, are
  // dropped. Finishes operations, so the caller holds no lock. Idempotent.
  void close_port(uint32_t port);

  // Until what was sent needs this process no more, or the limit has passed.
  void flush(std::chrono::milliseconds limit);

  // In a forked child: closes what it inherited. Nothing else works on this object there.
  void close_descriptors() {
    doorbell_->close_descriptors();
    far_sockets_.reset();
  }

 private:
  class Transfer;
  struct Message;
  struct Port;
  struct Connection;
  struct Settled;
  using TransferPtr = std::shared_ptr<Transfer>;
  using MessagePtr = std::shared_ptr<Message>;
  using GroupPtr = std::shared_ptr<PointToPointGroup>;
  using Outcome = std::vector<Settled>;  // to be finished once the mutex is free

  OperationPtr submit(const TransferPtr& transfer);  // with the mutex free, as the next two
  void help(Transfer& transfer, std::chrono::milliseconds limit);
  void deliver(Outcome outcome);

  // The rest is called with mutex_ held. In point_to_point.cc:
  Port* find_port(uint32_t number) const;
  void use(Port& port);
  Status start(Port& port, const TransferPtr& transfer, Outcome* outcome);
  Status start_send(Port& port, const TransferPtr& transfer);
  Status start_receive(Port& port, const TransferPtr& transfer, Outcome* outcome);
  Status attend(const TransferPtr& transfer);
  // What the blocking calls do without an operation, as far as it goes; the caller waits for `rest`
  // where there is one.
  enum class AtOnce { kDone, kNotYet, kNo };
  AtOnce send_at_once(const GroupPtr& group, const void* data, size_t count, DType dtype, int dst,
                      int tag, std::chrono::milliseconds timeout, OperationPtr* rest,
                      Outcome* outcome);
  AtOnce receive_at_once(const GroupPtr& group, void* data, size_t count, DType dtype, int src,
                         int tag, std::chrono::milliseconds timeout, CellFlag* flag,
                         OperationPtr* rest, Outcome* outcome);
  void go_on(Port& port, const TransferPtr& transfer, Outcome* outcome);
  void settle(TransferPtr transfer, const Status& status, Outcome* outcome);
  void fail_group(Port& port, const Status& cause, Outcome* outcome);
  void end_port(Port& port, const Status& status, Outcome* outcome);
  void drop_dead_channels();
  void ring(const Endpoint& peer) const {
    if (peer.doorbell() != nullptr) doorbell_->ring(*peer.doorbell());
  }

  // In progress.cc:
  // `awaited` is the transfer that the caller waits for or starts; null: any may be.
  bool progress(Outcome* outcome, const Transfer* awaited = nullptr);
  bool is_due(const Connection& connection, const Transfer* awaited, int64_t now) const;
  bool progress_in(Connection& connection, Outcome* outcome);
  bool progress_out(Connection& connection, Outcome* outcome);
  bool settle_read_in_place(Connection& connection, Outcome* outcome);
  bool can_read_in_place(const PointToPointGroup& group, const Connection& connection,
                         const void* data, uint64_t bytes, std::optional<uint64_t>* offset) const;
  enum class CellFate { kTaken, kLeft, kPartly };
  CellFate take_cell(Connection& connection, const ArrivedCell& cell, Outcome* outcome);
  CellFate read_in_place(Connection& connection, Outcome* outcome);
  MessagePtr begin_message(Connection& connection, const CellHeader& header, Outcome* outcome);
  MessagePtr hold_message(Port& port, MessagePtr message, Outcome* outcome);
  bool has_room(uint64_t bytes) const;
  void end_abandoned(const MessagePtr& message, Outcome* outcome);
  bool break_connection(Connection& connection, const Status& cause);
  static Status nonsense(const Connection& connection, const char* what);
  Status check_match(const Transfer& transfer, const Message& message) const;
  void refund(Message* message);

  // In look.cc:
  void look_when_due(Outcome* outcome);
  Status look_at(Port& port, int64_t now, bool thoroughly, Outcome* outcome);
  Status look_for_hopeless(Port& port, const std::vector<MemberLife>& members) const;
  std::string timeout_text(const Transfer& transfer, const std::vector<MemberLife>& members) const;
  void credit_lost_time(int64_t now);

  // In waiting.cc:
  // Starts the worker if it does not run, and unparks it if no waiting thread makes progress.
  Status start_worker(const PointToPointGroup& group);
  void unpark_worker();
  bool has_work() const { return pending_count_ > 0 || abandoning_count_ > 0 || in_flight_; }
  // Sleeps once, until end_ns at the latest: on the doorbell, or where another thread does, until
  // that one has made progress. The mutex is free meanwhile. Returns what is to be delivered.
  Outcome sleep_once(std::unique_lock<std::mutex>& lock, int64_t end_ns);
  bool progress_before_sleep(Outcome* outcome);
  int64_t next_polled_slice() const;
  void deliver_as_helper(std::unique_lock<std::mutex>& lock, Outcome outcome);
  void work();

  const std::shared_ptr<Arena> arena_;
  const std::unique_ptr<Doorbell> doorbell_;
  const size_t channel_bytes_;
  const uint64_t unexpected_bytes_;
  const int64_t in_place_bytes_;  // as DSCOMM_IN_PLACE_BYTES
  const int64_t slice_ns_;        // 0: until woken

  std::mutex mutex_;  // guards everything below
  ChannelDirectory directory_;
  std::map<ArenaId, std::unique_ptr<Connection>> connections_;
  // Those that are open. A number up to last_port_ that is not here was closed.
  std::unordered_map<uint32_t, std::unique_ptr<Port>> ports_;
  uint32_t last_port_ = 0;
  uint64_t unexpected_used_ = 0;
  size_t pending_count_ = 0;
  size_t abandoning_count_ = 0;  // connections whose peer must still hear of a message given up
  size_t polled_count_ = 0;      // connections to peers that ring no doorbell
  bool asked_polled_ = false;    // passes ask some of these for cells that have arrived
  int64_t polled_slice_ns_ = 0;  // how long the last sleep beside them was to be; 0: cells moved
  // Of these peers; null while they are not known. The thread that has set polling_ sleeps by it.
  std::unique_ptr<SocketSleep> far_sockets_;
  bool in_flight_ = false;  // what was sent needs this process to get through; see progress()

  std::condition_variable changed_;  // after progress by the thread that sleeps on the doorbell
  bool polling_ = false;             // a thread has taken the doorbell
  bool asleep_ = false;              // and sleeps on it now
  int64_t next_deadline_ns_ = INT64_MAX;  // no pending operation's is earlier
  int64_t last_look_ns_ = 0, last_thorough_look_ns_ = 0;

  int helpers_ = 0;             // threads in help()
  uint64_t helper_visits_ = 0;  // how often one came
  std::thread worker_;
  std::condition_variable worker_wake_;
  bool worker_parked_ = false;  // it looks at nothing until it is woken
  bool stopping_ = false;
};

}  // namespace dscomm
