#include "core/engine/group.h"

#include <algorithm>
#include <exception>

#include "core/base/log.h"
#include "core/engine/context.h"
#include "core/engine/point_to_point.h"
#include "core/engine/worker_pool.h"
#include "core/shm/formation.h"
#include "core/shm/shm_team.h"
#include "core/team/hierarchical_team.h"
#include "core/team/self_team.h"

namespace dscomm {
namespace {

constexpr const char* kStorePrefix = "dscomm/";

}  // namespace

// An operation of the queue. A thread that waits for it may run the queue up to it.
class Group::Queued final : public Operation {
 public:
  Queued(std::shared_ptr<Group> group, Body body, std::chrono::milliseconds timeout,
         uint64_t ticket)
      : group_(std::move(group)), body_(std::move(body)), timeout_(timeout), ticket_(ticket) {}

  Status execute() {
    group_->recorder_.running(ticket_);
    Status status = group_->execute(body_, timeout_);
    group_->recorder_.finished(ticket_, status.ok());
    body_ = nullptr;  // lets go of the tensors, before anyone hears that the operation is done
    return status;
  }

 protected:
  void help(std::chrono::milliseconds limit) override {
    // A wait with a limit of its own must not get stuck in the operation: a worker runs it.
    if (limit.count() == 0) group_->drain(this);
  }

 private:
  std::shared_ptr<Group> group_;
  Body body_;
  const std::chrono::milliseconds timeout_;
  const uint64_t ticket_;
};

Group::Group(std::shared_ptr<Context> context, GroupOptions options)
    : context_(std::move(context)),
      options_(std::move(options)),
      recorder_(static_cast<size_t>(context_->settings().recorder_entries)),
      timeout_ms_(options_.timeout.count()) {}

Result<std::shared_ptr<Group>> Group::create(std::shared_ptr<Context> context, Store& store,
                                             GroupOptions options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    return make_status(Code::kInvalidArgument, "rank %d is not in a group of %d", options.rank,
                       options.size);
  DSCOMM_RETURN_IF_ERROR(context->check_process());
  std::shared_ptr<Group> group(new Group(std::move(context), std::move(options)));
  const GroupOptions& known = group->options_;
  set_log_rank(known.global_ranks.empty() ? known.rank
                                          : known.global_ranks[static_cast<size_t>(known.rank)]);
  DSCOMM_RETURN_IF_ERROR(group->form(store));
  log_line(LogLevel::kInfo, "group '%s' of %d ranks: %s; %s", group->name().c_str(), group->size(),
           group->team_->describe().c_str(), group->context_->topology().describe().c_str());
  return group;
}

void Group::decline(Store& store, const GroupOptions& options, const Status& cause) {
  if (options.size == 1) return;
  FormationRequest request;
  request.prefix = kStorePrefix;
  request.name = options.name;
  request.rank = options.rank;
  request.size = options.size;
  request.global_ranks = options.global_ranks;
  decline_group(store, request, cause, Deadline::after(options.timeout));
}

// Makes the Team: this rank alone, one ShmTeam, or ShmTeams inside a ShmTeam where the ranks are
// bound to several NUMA nodes or L3 caches.
Status Group::form(Store& store) {
  if (options_.size == 1) {
    team_ = std::make_unique<SelfTeam>();
    return {};
  }
  Deadline deadline = Deadline::after(options_.timeout);
  deadline.expired();  // starts the clock
  std::vector<int> everyone(static_cast<size_t>(options_.size));
  for (size_t k = 0; k < everyone.size(); ++k) everyone[k] = static_cast<int>(k);
  FormationParty party = context_->party();

  auto form_subset = [&](std::span<const int> ranks, const std::string& prefix,
                         const std::string& name) -> Result<Formation> {
    FormationRequest request;
    request.prefix = prefix;
    request.name = name;
    request.size = static_cast<int>(ranks.size());
    request.rank =
        static_cast<int>(std::find(ranks.begin(), ranks.end(), options_.rank) - ranks.begin());
    if (flat_) request.watch = [this] { return watch_flat(); };
    for (int rank : ranks)
      if (!options_.global_ranks.empty())
        request.global_ranks.push_back(options_.global_ranks[static_cast<size_t>(rank)]);
    return form_group(party, store, request, deadline);
  };
  auto make_team = [&](const Formation& formation, const std::string& name, int rank) {
    return std::make_unique<ShmTeam>(context_->arena(), formation.group_id, name, rank,
                                     formation.members, formation.wait_policy, formation.tuning);
  };

  Result<Formation> whole = form_subset(everyone, kStorePrefix, options_.name);
  if (!whole.ok()) return whole.status();
  const Formation& formation = whole.value();
  auto flat = make_team(formation, options_.name, options_.rank);

  Domains domains = make_domains(formation.places, formation.hierarchy);
  if (domains.ranks.size() == 1) {
    ShmTeam& lines = *flat;
    team_ = std::move(flat);
    make_point_to_point(formation, lines);
    return {};
  }
  flat_ = std::move(flat);
  for (const LinesMember& member : formation.members) flat_peers_.push_back(member.peer);
  TeamFactory factory = [&](std::span<const int> ranks,
                            const std::string& name) -> Result<std::unique_ptr<Team>> {
    Result<Formation> part =
        form_subset(ranks, kStorePrefix + name + "/", options_.name + ": " + name);
    if (!part.ok()) return part.status();
    int rank =
        static_cast<int>(std::find(ranks.begin(), ranks.end(), options_.rank) - ranks.begin());
    return std::unique_ptr<Team>(make_team(part.value(), options_.name + ": " + name, rank));
  };
  Result<std::unique_ptr<HierarchicalTeam>> composed =
      HierarchicalTeam::make(options_.rank, domains.ranks, factory, factory, {"hierarchy"});
  if (!composed.ok()) {
    flat_->abort(composed.status());  // whoever waits in another domain sees it there
    return composed.status();
  }
  team_ = std::move(composed).value();
  make_point_to_point(formation, *flat_);
  return {};
}

// While the parts of a hierarchical Team are formed: whether a member of the whole gave up or died.
Status Group::watch_flat() {
  DSCOMM_RETURN_IF_ERROR(flat_->failure());
  for (size_t rank = 0; rank < flat_peers_.size(); ++rank)
    if (!flat_peers_[rank]->alive())
      return Status(Code::kPeerDied,
                    flat_->name_member(static_cast<int>(rank)) + " died or exited");
  return {};
}

void Group::make_point_to_point(const Formation& formation, ShmTeam& flat) {
  // The closures are called only while the group lives: shutdown() has point-to-point forget it
  // first.
  auto known = std::make_shared<PointToPointGroup>();
  known->id = formation.group_id;
  known->name = options_.name;
  known->rank = options_.rank;
  for (const LinesMember& member : formation.members) known->peers.push_back(member.peer);
  known->failure = [&flat, team = team_.get()] {
    DSCOMM_RETURN_IF_ERROR(flat.failure());
    return team == &flat ? Status() : team->failure();
  };
  known->abort = [&flat, team = team_.get()](const Status& cause) {
    flat.abort(cause);
    if (team != &flat) team->abort(cause);
  };
  known->has_left = [&flat](int member) { return flat.has_left(member); };
  known->name_member = [&flat](int member) { return flat.name_member(member); };
  known->wait = formation.wait_policy;
  point_to_point_ = std::move(known);
}

Group::~Group() {
  if (context_->check_process().ok()) {
    shutdown();
    return;
  }
  // A forked child: the memory is not mapped here.
  static_cast<void>(team_.release());
  static_cast<void>(flat_.release());
}

std::chrono::milliseconds Group::timeout() const {
  return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));  // orders nothing
}

void Group::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ms_.store(timeout.count(), std::memory_order_relaxed);  // orders nothing
}

std::string Group::describe() const {
  std::lock_guard lock(mutex_);
  return team_ ? team_->describe() : "closed";
}

uint64_t Group::sequence() const {
  return sequence_.load(std::memory_order_relaxed);
}  // orders nothing

// Why a call cannot start at all; under mutex_.
Status Group::refuse_locked() const {
  DSCOMM_RETURN_IF_ERROR(context_->check_process());
  if (closed_)
    return Status(Code::kInvalidArgument,
                  "group '" + options_.name + "' has been destroyed on this rank");
  return {};
}

Status Group::execute(const Body& body, std::chrono::milliseconds timeout) {
  CallOptions options{Deadline::after(timeout.count() > 0 ? timeout : this->timeout())};
  // The body is the glue's: what it throws must not cross a thread.
  try {
    Status status = body(*team_, options);
    // Messages live by the lines of flat_, and end with the group.
    if (flat_ && !status.ok())
      if (Status cause = team_->failure(); !cause.ok()) flat_->abort(cause);
    return status;
  } catch (const std::exception& error) {
    Status status(Code::kInternal, "rank " + std::to_string(options_.rank) + " of group '" +
                                       options_.name + "': " + error.what());
    team_->abort(status);
    if (flat_) flat_->abort(status);
    return status;
  }
}

Status Group::run(const OperationInfo& info, const Body& body, std::chrono::milliseconds timeout) {
  bool nothing_before;
  {
    std::lock_guard lock(mutex_);
    DSCOMM_RETURN_IF_ERROR(refuse_locked());
    nothing_before = !running_ && queue_.empty();
    if (nothing_before) running_ = true;
  }
  if (!nothing_before) return start(info, body, timeout)->wait();
  sequence_.fetch_add(1, std::memory_order_relaxed);  // orders nothing
  uint64_t ticket = recorder_.started(info);
  Status status = execute(body, timeout);
  recorder_.finished(ticket, status.ok());
  Status scheduled;
  {
    std::lock_guard lock(mutex_);
    running_ = false;
    scheduled = schedule_locked();
    if (!scheduled.ok()) end_locked(scheduled);
    idle_.notify_all();
  }
  if (!scheduled.ok()) drain(nullptr);
  return status;
}

OperationPtr Group::start(const OperationInfo& info, Body body, std::chrono::milliseconds timeout) {
  std::shared_ptr<Queued> operation;
  Status scheduled;
  {
    std::lock_guard lock(mutex_);
    if (Status refused = refuse_locked(); !refused.ok()) return Operation::refuse(refused);
    sequence_.fetch_add(1, std::memory_order_relaxed);  // orders nothing
    operation = std::make_shared<Queued>(shared_from_this(), std::move(body), timeout,
                                         recorder_.queued(info));
    queue_.push_back(operation);
    scheduled = schedule_locked();
    if (!scheduled.ok()) end_locked(scheduled);
  }
  if (!scheduled.ok()) drain(nullptr);  // fails them all, now that the group has ended
  return operation;
}

// Asks for a worker when there is something to run and nobody runs it; under mutex_. kResource when
// no thread can be had: the caller, who may be a worker and can go on himself, decides.
Status Group::schedule_locked() {
  if (queue_.empty() || running_ || scheduled_) return {};
  Status submitted =
      context_->workers().submit([self = shared_from_this()] { self->drain(nullptr, true); });
  scheduled_ = submitted.ok();
  if (submitted.ok()) return {};
  return Status(submitted.code(), "rank " + std::to_string(options_.rank) + " of group '" +
                                      options_.name + "': " + submitted.message());
}

// Runs the queue until `until` is done (null: until it is empty), or somebody else runs it.
void Group::drain(const Operation* until, bool was_scheduled) {
  std::unique_lock lock(mutex_);
  if (was_scheduled) scheduled_ = false;
  while (!running_ && !queue_.empty() && (until == nullptr || !until->done())) {
    std::shared_ptr<Queued> operation = queue_.front();
    queue_.pop_front();
    running_ = true;
    lock.unlock();
    Status status = operation->execute();
    lock.lock();
    running_ = false;
    // Done before the next call can start or shutdown() return; called back when the queue is free
    // of it, since its callbacks may start the next call.
    std::vector<Operation::Callback> callbacks = operation->complete(status);
    idle_.notify_all();
    // A worker runs what is left while the callbacks do; where none can be had, who runs the queue
    // to its end does it after them.
    if (Status scheduled = schedule_locked(); !scheduled.ok() && until != nullptr) {
      end_locked(scheduled);
      until = nullptr;
    }
    lock.unlock();
    Operation::call_back(callbacks, status);
    callbacks.clear();
    operation.reset();
    lock.lock();
  }
}

OperationPtr Group::send(const void* data, size_t count, DType dtype, int dst, int tag,
                         std::shared_ptr<void> keep, std::chrono::milliseconds timeout) {
  return start_message(
      {"send", dtype, false, ReduceOp::kSum, static_cast<int64_t>(count), dst, tag, true},
      [&](PointToPoint& engine, std::chrono::milliseconds limit) {
        return engine.send(point_to_point_, data, count, dtype, dst, tag, std::move(keep), limit);
      },
      timeout);
}

OperationPtr Group::receive(void* data, size_t count, DType dtype, int src, int tag,
                            std::shared_ptr<void> keep, std::chrono::milliseconds timeout) {
  return start_message(
      {"recv", dtype, false, ReduceOp::kSum, static_cast<int64_t>(count), src, tag, true},
      [&](PointToPoint& engine, std::chrono::milliseconds limit) {
        return engine.receive(point_to_point_, data, count, dtype, src, tag, std::move(keep),
                              limit);
      },
      timeout);
}

template <typename Start>
OperationPtr Group::start_message(const OperationInfo& info, Start start,
                                  std::chrono::milliseconds timeout) {
  {
    std::lock_guard lock(mutex_);
    if (Status refused = refuse_locked(); !refused.ok()) return Operation::refuse(refused);
    if (point_to_point_ == nullptr)
      return Operation::refuse(
          Status(Code::kInvalidArgument, std::string(info.title) + ": group '" + options_.name +
                                             "' has no other rank to talk to"));
  }
  uint64_t ticket = recorder_.started(info);
  OperationPtr operation =
      start(context_->point_to_point(), timeout.count() > 0 ? timeout : this->timeout());
  operation->when_done([self = shared_from_this(), ticket](const Status& status) {
    self->recorder_.finished(ticket, status.ok());
  });
  return operation;
}

Status Group::check_process() const { return context_->check_process(); }

bool Group::idle_within(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, limit, [this] { return queue_.empty() && !running_; });
}

Status Group::failure() const {
  DSCOMM_RETURN_IF_ERROR(context_->check_process());
  std::lock_guard lock(mutex_);
  if (team_ == nullptr) return {};
  DSCOMM_RETURN_IF_ERROR(team_->failure());
  return flat_ ? flat_->failure() : Status();
}

void Group::abort(const std::string& reason) {
  if (!context_->check_process().ok()) return;
  std::lock_guard lock(mutex_);
  end_locked(Status(Code::kAborted, "group '" + options_.name + "' was aborted by rank " +
                                        std::to_string(options_.rank) + ": " + reason));
}

// Under mutex_.
void Group::end_locked(const Status& cause) {
  if (team_) team_->abort(cause);
  if (flat_) flat_->abort(cause);
}

void Group::shutdown() {
  if (!context_->check_process().ok()) return;
  std::unique_lock lock(mutex_);
  closed_ = true;
  // Ends: what is queued runs under its deadlines.
  idle_.wait(lock, [this] { return queue_.empty() && !running_; });
  if (team_ == nullptr) return;
  std::unique_ptr<Team> team = std::move(team_);
  std::unique_ptr<ShmTeam> flat = std::move(flat_);
  lock.unlock();
  // Before the Teams go, which its closures ask.
  if (point_to_point_ != nullptr) context_->point_to_point().forget(point_to_point_->id);
}

}  // namespace dscomm
