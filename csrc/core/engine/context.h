// Context: the state of a process that its groups share: settings, its arena, the peers whose
// arenas it maps, point-to-point, and worker threads. Of this state, only the process's Context
// is static, so tests can run ranks as threads with one Context each.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/settings.h"
#include "core/base/status.h"
#include "core/engine/flight_record.h"
#include "core/formation/formation.h"
#include "core/transport/load.h"
#include "core/transport/transport.h"

namespace dscomm {

class Doorbell;
class Group;
class PointToPoint;
class WorkerPool;

class Context {
 public:
  // The process's Context. The first call creates it and starts its service thread; it lives until
  // the process ends. A forked child creates a new one, and the parent's groups refuse to work in
  // it.
  static Result<std::shared_ptr<Context>> process();

  // A separate Context, for tests whose ranks are threads. `directory` maps the arenas of peers,
  // `make_transport` connects hosts, and `host` is the host that this rank pretends to be on ("":
  // the real one).
  static Result<std::shared_ptr<Context>> create(const Settings& settings,
                                                 std::unique_ptr<Directory> directory,
                                                 TransportFactory make_transport = load_transport,
                                                 const std::string& host = "");
  ~Context();

  const Settings& settings() const { return settings_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  // Null if DSCOMM_POOL_BYTES is 0 or TensorPool::create() has failed, as under `ulimit -v`.
  const std::shared_ptr<TensorPool>& pool() const { return pool_; }
  // The pool of the process's Context; also null before there is a Context. Thread-safe.
  static std::shared_ptr<TensorPool> process_pool();
  const Topology& topology() const { return *topology_; }
  FormingProcess forming_process() const;
  WorkerPool& workers() { return *workers_; }
  PointToPoint& point_to_point() { return *point_to_point_; }
  FlightRecord& flight_record() { return *flight_record_; }

  // The transport between hosts. The first call creates it, collectively over the members of the
  // request. Later requests must have the id of the first one, and get the same transport.
  Result<std::shared_ptr<Transport>> transport(const TransportRequest& request,
                                               std::shared_ptr<Store> store,
                                               const Deadline& deadline);

  // Adds a group to its world (GroupOptions::world), unless that is 0.
  void add_group(uintptr_t world, bool is_default, std::weak_ptr<Group> group);
  // The default group of a world, else the world's first group; null if there is none. This group
  // knows which processes of later groups are alive.
  std::shared_ptr<Group> first_group(uintptr_t world) const;
  // Notes that group `name` was formed. `number` identifies it in ArenaHeader::formed; 0: the other
  // members formed the group without this process.
  void note_formed(uintptr_t world, const std::string& name, uint64_t number);

  // Notes that a group has failed, or that an unhandled exception ends the process. Thread-safe.
  void note_failure() { has_failed_.store(true, std::memory_order_relaxed); }  // orders nothing

  // Call it when the process ends by itself, also by an unhandled exception: tells the other hosts
  // that this process leaves. Groups that span hosts do not work afterwards.
  static void end_transport();

  // OK in the process that created this Context; kUnsupported in a forked child.
  Status check_process() const;

 private:
  Context() = default;
  // In fork.cc.
  static Status handle_forks();
  static void after_fork_in_child();
  void note_process();

  inline static std::mutex process_mutex_;
  // Never destroyed: groups, tensors and threads may outlive static destructors.
  inline static std::shared_ptr<Context>* process_context_ = nullptr;

  Settings settings_;
  std::unique_ptr<Topology> topology_;
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<TensorPool> pool_;
  std::unique_ptr<Directory> directory_;
  PeerAddress address_;
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<PointToPoint> point_to_point_;
  std::unique_ptr<FlightRecord> flight_record_;
  std::string host_identity_;
  std::vector<std::string> networks_;
  TransportFactory make_transport_;
  mutable std::mutex transport_mutex_;
  uint64_t transport_id_ = 0;  // 0: none
  std::shared_ptr<Transport> transport_;
  mutable std::mutex worlds_mutex_;
  std::map<uintptr_t, std::weak_ptr<Group>> worlds_;
  size_t formed_ = 0;  // numbered groups formed so far; under worlds_mutex_
  std::atomic<bool> has_failed_{false};
  int made_in_pid_ = 0;
  int made_after_forks_ = 0;
};

}  // namespace dscomm
