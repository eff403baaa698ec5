// PointToPoint: send and receive between the ranks of groups, through channels between processes.
//
// Matching: messages with the same (group, source, destination, tag) match receives in the order of
// sending; different tags may match out of order. A receive from any source takes the message that
// arrived first. Named and any-source receives match in the order of posting. An unexpected message
// is moved to the heap, up to DSCOMM_UNEXPECTED_BYTES per process; beyond that, the message's
// channel is not read, and the sender waits.
//
// A process may hold several ranks of a group, as threads. Each rank of each group has a port,
// which its group opens before it forms and closes at its end. Cells name the port of their
// destination. A channel, in contrast, exists once per ordered pair of processes.
//
// Progress is made by threads that wait for an operation, and by one worker thread for all other
// operations. Progress runs under one mutex and never blocks, except for the sleep on the doorbell,
// which does not hold the mutex. That sleep ends when a peer publishes or consumes, when data from
// another host arrives, at the end of a slice, or at the first deadline. Slices are short if a peer
// is on another host, because such a peer rings no doorbell. After a slice, the thread checks the
// groups' failures, the deadlines, and whether the peers are alive. Time in which this process was
// stopped is added to the deadlines.
//
// Callbacks of operations run without any lock of this file. A callback that blocks the worker
// thread delays the operations that no thread waits for.
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
#include <utility>
#include <vector>

#include "core/base/operation.h"
#include "core/base/settings.h"
#include "core/base/socket_sleep.h"
#include "core/base/status.h"
#include "core/messages/channel.h"
#include "core/messages/doorbell.h"
#include "core/messages/gone_members.h"
#include "core/messages/peer_process.h"
#include "core/shm/mailbox/wait.h"
#include "core/types/dtype.h"

namespace dscomm {

// The properties of a group that point-to-point needs; immutable. The functions are called with
// PointToPoint's mutex held, until close_port() has returned. They must not wait, call into
// PointToPoint, or take a lock under which another thread calls into PointToPoint.
struct PointToPointGroup {
  uint64_t id = 0;
  std::string name;
  int rank = 0;
  std::vector<std::shared_ptr<PeerProcess>> peers;  // by rank, this rank included
  std::vector<uint32_t> ports;                      // by rank: open_port() of each member
  std::shared_ptr<TensorPool> pool;          // readable by all members of this host; may be null
  std::function<Status()> failure;           // not OK once the group has failed; cheap
  std::function<void(const Status&)> abort;  // ends the group for every member with a cause
  std::function<void()> note_failed_calls = [] {};  // before callers see that their calls failed
  std::function<bool(int)> has_left;                // whether a member left the group
  std::function<Departure(int)> departure =         // how a member left
      [](int) { return Departure(); };
  std::function<std::string(int)> name_member;  // "rank 2 (pid 7 on host a)"
  WaitPolicy wait;                              // spin_pauses and yield_ns of waits in this group
};

class PointToPoint {
 public:
  // One per arena, for its whole lifetime. The address that the process publishes must contain the
  // doorbell's token.
  PointToPoint(std::shared_ptr<Arena> arena, const Settings& settings,
               std::unique_ptr<Doorbell> doorbell);
  // Ends the worker; pending operations fail with kAborted.
  ~PointToPoint();

  // Starts a send or a receive. Never blocks. Thread-safe. The operation is done when `data` has
  // been read (send) or written (receive). `keep` owns the memory and is released before the
  // operation is done. Invalid arguments return a failed operation; any other error ends the group.
  // src -1 receives from any member.
  OperationPtr send(std::shared_ptr<PointToPointGroup> group, const void* data, size_t count,
                    DType dtype, int dst, int tag, std::shared_ptr<void> keep,
                    std::chrono::milliseconds timeout);
  OperationPtr receive(std::shared_ptr<PointToPointGroup> group, void* data, size_t count,
                       DType dtype, int src, int tag, std::shared_ptr<void> keep,
                       std::chrono::milliseconds timeout);

  // Blocking send and receive; the caller keeps the memory until they return. `came_from` may be
  // null. Usually, if no thread has to sleep, they make no operation and, for a short message, no
  // allocation.
  Status blocking_send(const std::shared_ptr<PointToPointGroup>& group, const void* data,
                       size_t count, DType dtype, int dst, int tag,
                       std::chrono::milliseconds timeout);
  Status blocking_receive(const std::shared_ptr<PointToPointGroup>& group, void* data, size_t count,
                          DType dtype, int src, int tag, std::chrono::milliseconds timeout,
                          int* came_from);

  // A number under which one rank of a group that is about to form receives messages; not 0, never
  // reused. Peers may send to it as soon as they know it.
  uint32_t open_port();
  // Call it when the group has formed and its `ports` contain the port, before any send or receive.
  void join(std::shared_ptr<PointToPointGroup> group);
  // For a group that is closing, or that failed to form: pending operations of the port fail with
  // the group's first cause, or with kAborted if there is none; messages to the port are dropped
  // from now on. Completes operations, so the caller must hold no lock. Idempotent.
  void close_port(uint32_t port);

  // Waits until sent messages no longer need this process, or until the limit has passed.
  void flush(std::chrono::milliseconds limit);

  // In a forked child: closes inherited descriptors. No other call works there.
  void close_descriptors() {
    doorbell_->close_descriptors();
    remote_sockets_.reset();
  }

 private:
  class Transfer;
  struct Message;
  struct Port;
  struct Connection;
  using TransferPtr = std::shared_ptr<Transfer>;
  using MessagePtr = std::shared_ptr<Message>;
  using GroupPtr = std::shared_ptr<PointToPointGroup>;
  using FinishedTransfers = std::vector<std::pair<TransferPtr, Status>>;  // to complete unlocked

  OperationPtr submit(const TransferPtr& transfer);  // without the mutex, like the next two
  void help(Transfer& transfer, std::chrono::milliseconds limit);
  void deliver(FinishedTransfers finished);

  // All others are called with mutex_ held. In point_to_point.cc:
  Port* find_port(uint32_t number) const;
  void connect_members(Port& port);
  Status start(Port& port, const TransferPtr& transfer, FinishedTransfers* finished);
  Status start_send(Port& port, const TransferPtr& transfer);
  Status start_receive(Port& port, const TransferPtr& transfer, FinishedTransfers* finished);
  Status register_pending(const TransferPtr& transfer);
  // The part of a blocking call that needs no operation. If `rest` is set, the caller waits for it.
  enum class FastPath { kDone, kNotYet, kNotPossible };
  FastPath try_send(const GroupPtr& group, const void* data, size_t count, DType dtype, int dst,
                    int tag, std::chrono::milliseconds timeout, OperationPtr* rest,
                    FinishedTransfers* finished);
  FastPath try_receive(const GroupPtr& group, void* data, size_t count, DType dtype, int src,
                       int tag, std::chrono::milliseconds timeout, CellFlag* flag,
                       OperationPtr* rest, FinishedTransfers* finished);
  void continue_as_operation(Port& port, const TransferPtr& transfer, FinishedTransfers* finished);
  void finish_transfer(TransferPtr transfer, const Status& status, FinishedTransfers* finished);
  void fail_group(Port& port, const Status& cause, FinishedTransfers* finished);
  void end_port(Port& port, const Status& status, FinishedTransfers* finished);
  void drop_dead_channels();
  void ring(const PeerProcess& peer) const {
    if (peer.doorbell() != nullptr) doorbell_->ring(*peer.doorbell());
  }

  // In progress.cc: `awaited` is the transfer that the caller waits for or starts; null: any
  // transfer.
  bool progress(FinishedTransfers* finished, const Transfer* awaited = nullptr);
  bool is_due(const Connection& connection, const Transfer* awaited, int64_t now) const;
  bool progress_in(Connection& connection, FinishedTransfers* finished);
  bool progress_out(Connection& connection, FinishedTransfers* finished);
  bool finish_read_in_place(Connection& connection, FinishedTransfers* finished);
  bool can_read_in_place(const PointToPointGroup& group, const Connection& connection,
                         const void* data, uint64_t bytes, std::optional<uint64_t>* offset) const;
  enum class CellResult { kTaken, kLeft, kPartlyTaken };
  CellResult take_cell(Connection& connection, const ArrivedCell& cell,
                       FinishedTransfers* finished);
  CellResult read_in_place(Connection& connection, FinishedTransfers* finished);
  MessagePtr begin_message(Connection& connection, const CellHeader& header,
                           FinishedTransfers* finished);
  MessagePtr store_unexpected(Port& port, MessagePtr message, FinishedTransfers* finished);
  bool has_room(uint64_t bytes) const;
  void end_abandoned(const MessagePtr& message, FinishedTransfers* finished);
  bool break_connection(Connection& connection, const Status& cause);
  static Status malformed(const Connection& connection, const char* what);
  Status check_match(const Transfer& transfer, const Message& message) const;
  void release_charge(Message* message);

  // In checks.cc:
  void check_when_due(FinishedTransfers* finished);
  Status check_port(Port& port, int64_t now, bool thoroughly, FinishedTransfers* finished);
  Status find_impossible(Port& port, const std::vector<MemberLife>& members) const;
  std::string timeout_text(const Transfer& transfer, const std::vector<MemberLife>& members) const;
  void extend_deadlines(int64_t now);

  // In waiting.cc:
  // Starts the worker if it does not run, and unparks it if no waiting thread makes progress.
  Status start_worker(const PointToPointGroup& group);
  void unpark_worker();
  bool has_work() const { return pending_count_ > 0 || unreported_count_ > 0 || in_flight_; }
  // Sleeps once, until end_ns at the latest: on the doorbell or, if another thread sleeps there,
  // until that thread has made progress. Unlocks to sleep. The caller must deliver the result.
  FinishedTransfers sleep_once(std::unique_lock<std::mutex>& lock, int64_t end_ns);
  bool progress_before_sleep(FinishedTransfers* finished);
  int64_t next_polled_slice() const;
  void deliver_as_helper(std::unique_lock<std::mutex>& lock, FinishedTransfers finished);
  void work();

  const std::shared_ptr<Arena> arena_;
  const std::unique_ptr<Doorbell> doorbell_;
  const size_t channel_bytes_;
  const uint64_t unexpected_bytes_;
  const int64_t in_place_bytes_;  // DSCOMM_IN_PLACE_BYTES
  const int64_t slice_ns_;        // limit of a sleep; 0: none

  std::mutex mutex_;  // guards everything below
  ChannelDirectory directory_;
  std::map<ArenaId, std::unique_ptr<Connection>> connections_;
  // The open ports. A number up to last_port_ that is not in here was closed.
  std::unordered_map<uint32_t, std::unique_ptr<Port>> ports_;
  uint32_t last_port_ = 0;
  uint64_t unexpected_used_ = 0;
  size_t pending_count_ = 0;
  size_t unreported_count_ = 0;   // connections that must still tell the peer of an abandoned send
  size_t polled_count_ = 0;       // connections to peers without a doorbell
  bool some_are_polled_ = false;  // some of these are still polled for cells
  int64_t polled_slice_ns_ = 0;   // limit that they set to the last sleep; 0: cells have moved
  // Sockets of peers without a doorbell; null while unknown. Used by the thread that set polling_.
  std::unique_ptr<SocketSleep> remote_sockets_;
  bool in_flight_ = false;  // sent cells need this process to get through; see progress()

  std::condition_variable changed_;  // notified after progress by the thread that has the doorbell
  bool polling_ = false;             // a thread has the doorbell
  bool asleep_ = false;              // that thread sleeps on it now
  int64_t next_deadline_ns_ = INT64_MAX;  // lower bound of the pending operations' deadlines
  int64_t last_check_ns_ = 0, last_thorough_check_ns_ = 0;

  int helpers_ = 0;             // threads in help(), except those in a callback
  uint64_t helper_visits_ = 0;  // how often helpers_ has grown
  std::thread worker_;
  std::condition_variable worker_wake_;
  bool worker_parked_ = false;  // it sleeps until unpark_worker()
  bool stopping_ = false;
};

}  // namespace dscomm
