// Group: the engine of one c10d group: its Team, its ordered queue, its point-to-point and its end.
//
// A synchronous collective runs on the calling thread when nothing is queued before it, and then
// takes no lock of the group and allocates nothing. Asynchronous ones queue in order and are run by
// a worker of the process's pool, or by a thread that waits for one and finds the queue idle.
// Groups progress independently. Point-to-point never enters the queue.
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
  std::string name;  // for messages: c10d's group name, "0" for the world
  int rank = 0;      // of this process in the group
  int size = 1;
  std::vector<int> global_ranks;  // of every member, for messages; may be empty
  std::chrono::milliseconds timeout{0};
  // The same for all groups whose global ranks mean the same processes; 0: not known.
  uintptr_t world = 0;
};

class Group : public std::enable_shared_from_this<Group>, public RecordedGroup {
 public:
  // Straight-line code over the Team. The deadline in `options` starts when the body does.
  using Body = std::function<Status(Team& team, const CallOptions& options)>;

  // Collective over the members: meets through the store, proves locality, makes the Team. Blocks
  // until every member has done so or the timeout passes; the error then names who is missing.
  static Result<std::shared_ptr<Group>> create(std::shared_ptr<Context> context,
                                               std::shared_ptr<Store> store, GroupOptions options);
  // In place of create(), by a rank whose Context failed: the other members raise `cause` soon.
  static void decline(Store& store, const GroupOptions& options, const Status& cause);
  ~Group() override;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::string& name() const { return options_.name; }
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);
  std::string describe() const;  // which Team carries it, one line

  // Runs a collective and returns how it ended; after what is queued before it. timeout 0: the
  // group's.
  Status run(const OperationInfo& info, const Body& body, std::chrono::milliseconds timeout);

  // Queues a collective. The body, and what it captures, lives until the operation is done.
  OperationPtr start(const OperationInfo& info, Body body, std::chrono::milliseconds timeout);

  // Point-to-point. `keep` owns the memory and is dropped once the operation is done. A send is
  // done when its data has left `data`. A receive matches messages of its group and tag in the
  // order in which they were sent; src -1 takes any member's. The bytes must be exactly the
  // sender's (else kMismatch on both). Bad arguments come back as an operation that is already
  // done.
  OperationPtr send(const void* data, size_t count, DType dtype, int dst, int tag,
                    std::shared_ptr<void> keep, std::chrono::milliseconds timeout);
  OperationPtr receive(void* data, size_t count, DType dtype, int src, int tag,
                       std::shared_ptr<void> keep, std::chrono::milliseconds timeout);

  // The same, done when they return; the memory is the caller's meanwhile. `came_from`, which may
  // be null, gets the rank that was received from. The fastest way for messages of one cell.
  Status blocking_send(const void* data, size_t count, DType dtype, int dst, int tag,
                       std::chrono::milliseconds timeout);
  Status blocking_receive(void* data, size_t count, DType dtype, int src, int tag,
                          std::chrono::milliseconds timeout, int* came_from = nullptr);

  // How many collectives this rank has called in this group.
  uint64_t sequence() const;

  // OK while the group lives, else its first cause.
  Status failure() const;
  // The same for the next collective: OK also where the group was aborted by members that had
  // finished that call before, as they have published what it needs of them.
  Status failure_of_next_call() const;

  // OK in the process that made the group; in a child forked from it kUnsupported with a sentence.
  Status check_process() const;

  // Waits, for no longer than the limit, until no call is queued or runs.
  bool idle_within(std::chrono::milliseconds limit);

  // Ends the group for every member, from any thread; pending operations fail with the first cause.
  void abort(const std::string& reason);

  // Says to the other members that this process is about to end without having left the group, for
  // an unhandled exception of that type or, where it is empty, for none that is known. Calls still
  // work.
  void note_end(const std::string& exception);
  // The process ends, on this thread: from now on calls of this thread alone are accepted, and an
  // asynchronous one runs before start() returns, as no other thread may touch Python any more.
  void begin_exit();

  // Leaves the group: lets what is queued finish (under its deadlines), then refuses later calls.
  // Not collective. Idempotent. Any thread but one that runs a call of this group. kMismatch or
  // kPeerLeft, once, where the calls of the ranks differ and nobody was told: they were the last
  // ones, or their Works were dropped. The group is left all the same.
  Status shutdown();
  // For where nothing can be raised: logs it.
  void shutdown_with_warning();
  // A caller has been given an error of a call of this group. Any thread.
  void note_told() { was_told_.store(true, std::memory_order_relaxed); }  // orders nothing
  // A caller's next call is refused, because this ended the group. Any thread.
  void note_refused(const Status& cause) {
    note_told();
    record_failure(cause);
  }

  // Of a member whose process is known to have ended, kPeerDied or kPeerLeft; else OK, also where
  // the group has been destroyed on this rank.
  Status gone(int global_rank) const;
  // Of the next group `name` of these global ranks; empty where this one is not the default group.
  LocalRanks local_ranks(const std::vector<int>& global_ranks, const std::string& name);
  void note_formed(const std::string& name);
  // Whether the first of these ranks, or another one if that is on another host, has formed the
  // group of that number (see ArenaHeader; 0: none), for which this one still waits: then
  // kMismatch.
  Status formed_without_this(const std::vector<int>& global_ranks, uint64_t number) const;

  std::string flight_record_json() const { return recorder_.json(); }
  bool tell(GroupRecord* record) const override;

 private:
  class Queued;  // an Operation of the queue

  Group(std::shared_ptr<Context> context, GroupOptions options);
  Status form(std::shared_ptr<Store> store);
  void make_point_to_point(const Formation& formation, const InPlace& in_place);
  void close_message_port();
  std::chrono::milliseconds limit_of(std::chrono::milliseconds timeout) const;
  // What a call that takes no lock must know and tell, in one word: these bits, and above them, in
  // units of kOneCall, how many collectives were called. kRunning is set by the thread that begins
  // to run the Team, and all other bits with mutex_ held. Without it a thread changes the word only
  // where no bit is set, and where kRunning alone is; so with mutex_ held a word that has one of
  // the others does not change.
  enum StateBit : uint64_t {
    kRunning = 1,   // some thread runs the Team
    kQueued = 2,    // the queue is not empty
    kClosed = 4,    // shutdown() was called
    kWatched = 8,   // somebody waits for idle_
    kExiting = 16,  // begin_exit() was called
  };
  static constexpr uint64_t kOneCall = 32;
  Status refuse_locked() const;
  // Whether refuse_locked() may say no for a reason of this group's.
  bool may_refuse() const { return (state_.load() & (kClosed | kExiting)) != 0; }
  bool has_state(StateBit bit) const { return (state_.load() & bit) != 0; }
  bool begin_running_locked() { return (state_.fetch_or(kRunning) & kRunning) == 0; }
  void end_running_locked();
  void drain(const Operation* until, bool was_scheduled = false);
  Status execute(const Body& body, std::chrono::milliseconds timeout);
  Status execute_body(const Body& body, std::chrono::milliseconds timeout);
  void record_failure(const Status& status);
  Status schedule_locked();
  void end_locked(const Status& cause);
  template <typename Start>
  OperationPtr start_message(const OperationInfo& info, std::chrono::milliseconds timeout,
                             Start start);

  std::shared_ptr<Context> context_;
  GroupOptions options_;
  std::unique_ptr<Team> team_;
  // Of the members on this host: point-to-point lives by its lines. Part of team_, or flat_ where
  // the Team of this host is a hierarchical one or collectives go over the transport alone.
  ShmTeam* lines_ = nullptr;
  std::unique_ptr<ShmTeam> flat_;
  std::vector<std::shared_ptr<Peer>> peers_;  // by rank in the group; null on other hosts
  std::vector<int> hosts_;                    // by rank in the group: see Formation
  std::map<uint64_t, uint64_t> formations_;   // how often a name was formed, by its hash
  std::vector<int> transport_ranks_;          // by rank in the group; -1 on this host
  std::shared_ptr<Transport> transport_;      // null where all members are on one host
  std::shared_ptr<PointToPointGroup> point_to_point_;
  uint32_t message_port_ = 0;  // 0: none
  Recorder recorder_;
  std::atomic<bool> was_told_{false};
  Status unheard_;  // of the first queued call that ended with an error; guarded by mutex_
  std::atomic<bool> failure_recorded_{false};  // the flight record was written for it

  mutable std::mutex mutex_;
  std::condition_variable idle_;  // a runner has ended; told only if kClosed or kWatched is set
  int watchers_ = 0;              // threads in idle_within()
  std::deque<std::shared_ptr<Queued>> queue_;
  bool scheduled_ = false;       // a worker has been asked for
  std::thread::id exit_thread_;  // set with kExiting
  std::atomic<uint64_t> state_{0};
  std::atomic<int64_t> timeout_ms_;
};

}  // namespace dscomm
