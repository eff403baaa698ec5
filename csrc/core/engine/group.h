// Group: the engine of one c10d group. It has a Team, an ordered queue and point-to-point
// operations, applies the group's timeout, and ends the group.
//
// A synchronous collective runs at once, on the calling thread, if none is queued or running; then
// it takes no lock of the group and allocates nothing. Asynchronous collectives are queued in
// order. A worker of the process's pool runs them, or a thread that waits for one of them while no
// thread runs the queue.
// Groups progress independently. Point-to-point operations do not enter the queue.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/base/operation.h"
#include "core/base/status.h"
#include "core/engine/flight_record.h"
#include "core/engine/recorder.h"
#include "core/formation/local_ranks.h"
#include "core/store/store.h"
#include "core/team/team.h"

namespace dscomm {

class Context;
class Peer;
class PointToPoint;
class ShmTeam;
class Transport;
struct Formation;
struct InPlace;
struct PointToPointGroup;

struct GroupOptions {
  std::string name;  // c10d's group name; "0" for the world
  int rank = 0;      // of this process in the group
  int size = 1;
  std::vector<int> global_ranks;  // of every member; empty for torch's default group
  std::chrono::milliseconds timeout{0};
  // Equal for all groups whose global ranks denote the same processes; 0: not known.
  uintptr_t world = 0;
};

class Group : public std::enable_shared_from_this<Group>, public RecordedGroup {
 public:
  // The code of one collective, which calls the Team. The deadline in `options` has not started.
  using Body = std::function<Status(Team& team, const CallOptions& options)>;

  // Collective over the members: forms the group through the store, proves which ranks share
  // memory, makes the Team. Blocks until all members have done so, or until the timeout; the error
  // then names the missing ranks.
  static Result<std::shared_ptr<Group>> create(std::shared_ptr<Context> context,
                                               std::shared_ptr<Store> store, GroupOptions options);
  // Called instead of create() by a rank whose Context failed: the others soon raise `cause`.
  static void decline(Store& store, const GroupOptions& options, const Status& cause);
  ~Group() override;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::string& name() const { return options_.name; }
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);
  std::string describe() const;  // its Team, in one line

  // Runs a collective after those in the queue, and returns its result. timeout 0: the group's.
  Status run(const OperationInfo& info, const Body& body, std::chrono::milliseconds timeout);

  // Queues a collective. The body and its captures live until the operation is done.
  OperationPtr start(const OperationInfo& info, Body body, std::chrono::milliseconds timeout);

  // Point-to-point. `keep` owns the memory, and is released when the operation is done. A send is
  // done when `data` may be reused. A receive matches messages of its group and tag in the order of
  // sending; src -1 matches any member. Lengths must be equal (else kMismatch on both sides).
  // Invalid arguments return an operation that is already done.
  OperationPtr send(const void* data, size_t count, DType dtype, int dst, int tag,
                    std::shared_ptr<void> keep, std::chrono::milliseconds timeout);
  OperationPtr receive(void* data, size_t count, DType dtype, int src, int tag,
                       std::shared_ptr<void> keep, std::chrono::milliseconds timeout);

  // Like send() and receive(), but blocking; the caller keeps the memory alive. `came_from`, which
  // may be null, gets the source rank. The fastest way for messages that fit one cell (cell.h).
  Status blocking_send(const void* data, size_t count, DType dtype, int dst, int tag,
                       std::chrono::milliseconds timeout);
  Status blocking_receive(void* data, size_t count, DType dtype, int src, int tag,
                          std::chrono::milliseconds timeout, int* came_from = nullptr);

  // How many collectives this rank has called in this group. Relaxed: orders nothing.
  uint64_t sequence() const { return state_.load(std::memory_order_relaxed) / kOneCall; }

  // OK while the group lives, else the first cause that ended it.
  Status failure() const;
  // Like failure(), for the next collective: also OK if the members that aborted the group had
  // finished that call before, because they have published all that the call needs.
  Status failure_of_next_call() const;

  // OK in the process that created the group; kUnsupported in a forked child.
  Status check_process() const;

  // Waits, up to the limit, until no collective is queued or running; returns whether none is.
  bool idle_within(std::chrono::milliseconds limit);

  // Ends the group for all members, from any thread. Pending operations fail with the first cause.
  void abort(const std::string& reason);

  // Tells the other members that this process is about to end without having left the group:
  // because of an unhandled exception of this type, or for an unknown reason if `exception` is
  // empty. Calls still work.
  void note_end(const std::string& exception);
  // Call on the thread that ends the process. From now on, only calls of this thread are accepted,
  // and an asynchronous call runs before start() returns, because no other thread may touch Python
  // any more.
  void begin_exit();

  // Refuses new calls, lets queued calls finish (under their deadlines), then leaves the group.
  // Not collective. Idempotent. Thread-safe, but not for a thread that runs a call of this group.
  // Returns kMismatch or kPeerLeft, once, if the ranks' calls differ and no caller got that error,
  // because these were the last calls or their Works were dropped. The group is left in any case.
  Status shutdown();
  // Like shutdown(), for callers that cannot raise the error: logs it.
  void shutdown_with_warning();
  // Notes that a caller has received an error of a call of this group. Thread-safe.
  void note_reported() { was_reported_.store(true, std::memory_order_relaxed); }  // orders nothing
  // The error of a call that is refused because the group has ended with this cause. Thread-safe.
  Status refuse(const Status& cause);

  // kPeerDied for the first of these members that is known to have died; if none has, kPeerLeft for
  // the first whose process has left and ended; else OK. OK if the group has been destroyed on this
  // rank. A death comes first, because it may be why other members have left.
  Status gone(const std::vector<int>& global_ranks) const;
  // The ranks of this host in the next group `name` of these global ranks; empty if this is not the
  // default group.
  LocalRanks local_ranks(const std::vector<int>& global_ranks, const std::string& name);
  void note_formed(const std::string& name);
  // kMismatch if another rank has formed the group of this number (see ArenaHeader; 0: none), for
  // which this rank still waits. Reads only the arena of the first of these ranks; but if that is
  // this rank or on another host, reads the arenas of all of them that are on this host.
  Status formed_without_this(const std::vector<int>& global_ranks, uint64_t number) const;

  std::string flight_record_json() const { return recorder_.json(); }
  bool fill(GroupRecord* record) const override;

 private:
  class Queued;  // an operation in the queue

  Group(std::shared_ptr<Context> context, GroupOptions options);
  Status form(std::shared_ptr<Store> store);
  void make_point_to_point(const Formation& formation, const InPlace& in_place);
  void close_message_port();
  Status gone(int global_rank) const;
  std::chrono::milliseconds limit_of(std::chrono::milliseconds timeout) const;
  // The state that a call without locks reads and changes, in one word: these bits, and above them,
  // in units of kOneCall, the number of collectives called. kRunning is set by the thread that
  // begins to run the Team; all other bits are set with mutex_ held. Without mutex_, a thread
  // changes the word only if no bit other than kRunning is set. So while a thread holds mutex_, a
  // word with one of the other bits does not change.
  enum StateBit : uint64_t {
    kRunning = 1,   // a thread runs the Team
    kQueued = 2,    // the queue is not empty
    kClosed = 4,    // shutdown() was called
    kWatched = 8,   // a thread waits for idle_
    kExiting = 16,  // begin_exit() was called
  };
  static constexpr uint64_t kOneCall = 32;
  Status refuse_locked() const;
  // Whether refuse_locked() may refuse because of this group's state.
  bool may_refuse() const { return (state_.load() & (kClosed | kExiting)) != 0; }
  bool has_state(StateBit bit) const { return (state_.load() & bit) != 0; }
  bool begin_running_locked() { return (state_.fetch_or(kRunning) & kRunning) == 0; }
  void end_running_locked();
  void drain(const Operation* until, bool was_scheduled = false);
  Status execute(const Body& body, std::chrono::milliseconds timeout, bool had_ended);
  Status execute_body(const Body& body, std::chrono::milliseconds timeout);
  void note_failure(const Status& status);
  Status told(const Status& status, bool had_ended) const;
  Status finish_message(uint64_t ticket, const Status& status, bool had_ended);
  Status schedule_locked();
  void end_locked(const Status& cause);
  template <typename Start>
  OperationPtr start_message(const OperationInfo& info, std::chrono::milliseconds timeout,
                             Start start);

  std::shared_ptr<Context> context_;
  GroupOptions options_;
  std::unique_ptr<Team> team_;
  // The flat Team of the members on this host, whose mailboxes tell point-to-point which members
  // have left. Part of team_, or flat_ if the Team of this host is hierarchical or all collectives
  // use the transport.
  ShmTeam* of_host_ = nullptr;
  std::unique_ptr<ShmTeam> flat_;
  std::vector<std::shared_ptr<Peer>> peers_;  // by rank in the group; null on other hosts
  std::vector<int> hosts_;                    // host numbers by rank in the group: see Formation
  std::map<uint64_t, uint64_t> formations_;   // number of groups formed, by hash of their name
  std::shared_ptr<Transport> transport_;      // null if all members are on one host
  std::vector<int> transport_ranks_;          // by rank in the group; empty without a transport
  std::shared_ptr<PointToPointGroup> point_to_point_;
  uint32_t message_port_ = 0;  // 0: none
  Recorder recorder_;
  std::atomic<bool> was_reported_{false};
  Status unheard_;  // error of the first failed queued call; guarded by mutex_
  std::atomic<bool> failure_recorded_{false};  // the flight record has been written

  mutable std::mutex mutex_;
  std::condition_variable idle_;  // kRunning cleared; notified only if kClosed or kWatched is set
  int watchers_ = 0;              // threads in idle_within()
  std::deque<std::shared_ptr<Queued>> queue_;
  bool scheduled_ = false;       // a worker has been requested
  std::thread::id exit_thread_;  // set with kExiting
  std::atomic<uint64_t> state_{0};
  // Whether this rank has noticed the end of the group: a call failed because of it, or this rank
  // aborted. Set before that call is done. Relaxed: for a call that overlaps with the end, told()
  // may get either value.
  std::atomic<bool> has_ended_{false};
  std::atomic<int64_t> timeout_ms_;
};

}  // namespace dscomm
