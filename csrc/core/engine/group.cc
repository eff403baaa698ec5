#include "core/engine/group.h"

#include <algorithm>
#include <exception>
#include <set>

#include "core/base/format.h"
#include "core/base/log.h"
#include "core/detector/failure_detector.h"
#include "core/engine/context.h"
#include "core/engine/worker_pool.h"
#include "core/formation/formation.h"
#include "core/formation/team_builder.h"
#include "core/messages/point_to_point.h"
#include "core/shm/shm_team.h"
#include "core/team/self_team.h"

namespace dscomm {
namespace {

const std::string kStorePrefix = "dscomm/";

FormationRequest formation_request(const GroupOptions& options) {
  FormationRequest request;
  request.prefix = kStorePrefix;
  request.name = options.name;
  request.rank = options.rank;
  request.size = options.size;
  request.global_ranks = options.global_ranks;
  return request;
}

OperationInfo message_info(const char* title, DType dtype, size_t count, int peer, int tag,
                           bool asynchronous) {
  return {.title = title,
          .dtype = dtype,
          .count = static_cast<int64_t>(count),
          .peer = peer,
          .tag = tag,
          .asynchronous = asynchronous};
}

}  // namespace

// An operation in the queue. A thread that waits for it may run the queue up to it.
class Group::Queued final : public Operation {
 public:
  Queued(std::shared_ptr<Group> group, Body body, std::chrono::milliseconds timeout,
         uint64_t ticket)
      : group_(std::move(group)),
        body_(std::move(body)),
        timeout_(timeout),
        ticket_(ticket),
        had_ended_(group_->has_ended_.load(std::memory_order_relaxed)) {}

  // A call that was queued before the group ended raises the cause as its own error, because its
  // caller could not know of the end.
  Status execute() {
    group_->recorder_.running(ticket_);
    Status status = group_->execute(body_, timeout_, had_ended_);
    group_->recorder_.finished(ticket_, status.ok());
    body_ = nullptr;  // releases the tensors before other threads see that the operation is done
    return status;
  }

 protected:
  void help(std::chrono::milliseconds limit) override {
    // A wait with a limit must not block in the operation, so a worker runs it.
    if (limit.count() == 0) group_->drain(this);
  }

 private:
  std::shared_ptr<Group> group_;
  Body body_;
  const std::chrono::milliseconds timeout_;
  const uint64_t ticket_;
  const bool had_ended_;
};

Group::Group(std::shared_ptr<Context> context, GroupOptions options)
    : context_(std::move(context)),
      options_(std::move(options)),
      recorder_(static_cast<size_t>(context_->settings().recorder_entries)),
      timeout_ms_(options_.timeout.count()) {}

Result<std::shared_ptr<Group>> Group::create(std::shared_ptr<Context> context,
                                             std::shared_ptr<Store> store, GroupOptions options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    return make_status(Code::kInvalidArgument, "rank {} is not in a group of {}", options.rank,
                       options.size);
  DSCOMM_RETURN_IF_ERROR(context->check_process());
  std::shared_ptr<Group> group(new Group(std::move(context), std::move(options)));
  const GroupOptions& known = group->options_;
  set_log_rank(known.global_ranks.empty() ? known.rank
                                          : known.global_ranks[static_cast<size_t>(known.rank)]);
  DSCOMM_RETURN_IF_ERROR(group->form(std::move(store)));
  group->context_->flight_record().add(group);
  group->context_->add_group(group->options_.world, group->options_.global_ranks.empty(), group);
  log_line(LogLevel::kInfo, "group '{}' of {} ranks: {}; {}", group->name(), group->size(),
           group->team_->describe(), group->context_->topology().describe());
  return group;
}

void Group::decline(Store& store, const GroupOptions& options, const Status& cause) {
  if (options.size == 1) return;
  decline_group(store, formation_request(options), cause, Deadline::after(options.timeout));
}

Status Group::form(std::shared_ptr<Store> store) {
  if (options_.size == 1) {
    team_ = std::make_unique<SelfTeam>();
    return {};
  }
  // Opened before other ranks can know the port: they may send once they have formed the group.
  message_port_ = context_->point_to_point().open_port();
  FormationRequest request = formation_request(options_);
  request.message_port = message_port_;
  const auto first_group = [this] { return context_->first_group(options_.world); };
  if (options_.global_ranks.empty())
    request.local = local_ranks_of_launcher(options_.rank, options_.size, options_.name);
  else if (const std::shared_ptr<Group> first = first_group(); first != nullptr)
    request.local = first->local_ranks(options_.global_ranks, options_.name);
  const std::string& key = request.local.group;
  const uint64_t number = key.empty() ? 0 : std::hash<std::string>()(key);
  request.gone = [this, first_group] {
    const std::shared_ptr<Group> first = first_group();
    return first == nullptr ? Status() : first->gone(options_.global_ranks);
  };
  request.formed = [this, first_group, number] {
    const std::shared_ptr<Group> first = first_group();
    return first == nullptr ? Status() : first->formed_without_this(options_.global_ranks, number);
  };
  const TransportFinder find_transport = [this, &store](const TransportRequest& asked,
                                                        const Deadline& deadline) {
    return context_->transport(asked, store, deadline);
  };
  Result<FormedGroup> made =
      build_teams(context_->forming_process(), *store, request, find_transport, options_.timeout);
  if (!made.ok()) {
    close_message_port();
    // Counts a group that the others formed without this rank, as they do: see local_ranks().
    if (!request.formed().ok()) context_->note_formed(options_.world, options_.name, 0);
    return made.status();
  }
  if (number != 0) context_->note_formed(options_.world, options_.name, number);
  FormedGroup& teams = made.value();
  team_ = std::move(teams.team);
  flat_ = std::move(teams.flat);
  of_host_ = teams.of_host;
  transport_ = std::move(teams.transport);
  make_point_to_point(teams.formation, teams.in_place);
  return {};
}

void Group::close_message_port() {
  if (message_port_ != 0) context_->point_to_point().close_port(message_port_);
}

void Group::make_point_to_point(const Formation& formation, const InPlace& in_place) {
  auto known = std::make_shared<PointToPointGroup>();
  known->id = formation.group_id;
  known->name = options_.name;
  known->rank = options_.rank;
  known->ports = formation.message_ports;
  known->pool = in_place.pool;
  known->wait = formation.wait_policy;
  std::vector<int> here;  // by member: its rank in of_host_, or -1
  std::vector<std::string> names;
  int here_count = 0;
  for (size_t k = 0; k < formation.members.size(); ++k) {
    const MailboxMember& member = formation.members[k];
    peers_.push_back(member.peer);
    if (transport_ != nullptr)
      transport_ranks_.push_back(transport_->rank_of(formation.addresses[k].arena));
    if (member.peer != nullptr) {
      here.push_back(here_count++);
      known->peers.push_back(std::make_shared<HostPeerProcess>(member.peer));
    } else {
      here.push_back(-1);
      known->peers.push_back(transport_->peer_process(transport_ranks_.back()));
    }
    names.push_back(MailboxMember::name(static_cast<int>(k), member.global_rank,
                                        known->peers.back()->describe()));
  }
  hosts_ = formation.hosts;
  // The closures are called only while the Teams live: shutdown() closes the port first.
  known->failure = [team = team_.get(), flat = flat_.get(), transport = transport_,
                    ranks = transport_ranks_] {
    DSCOMM_RETURN_IF_ERROR(team->failure());
    if (flat != nullptr) DSCOMM_RETURN_IF_ERROR(flat->failure());
    // A member that waits for a dead rank ends the group for all. A rank that is cut off does not
    // learn of that end.
    if (transport == nullptr || transport->detector().count() == 0) return Status();
    return transport->detector().death_if_cut_off(ranks);
  };
  known->abort = [team = team_.get(), flat = flat_.get()](const Status& cause) {
    team->abort(cause);
    if (flat != nullptr) flat->abort(cause);
  };
  known->note_failed_calls = [this] { has_ended_.store(true, std::memory_order_relaxed); };
  known->has_left = [of_host = of_host_, transport = transport_, here,
                     ranks = transport_ranks_](int member) {
    const auto k = static_cast<size_t>(member);
    return here[k] >= 0 ? of_host->has_left(here[k])
                        : transport->detector().gone(ranks[k]).code() == Code::kPeerLeft;
  };
  known->departure = [of_host = of_host_, transport = transport_, here,
                      ranks = transport_ranks_](int member) {
    const auto k = static_cast<size_t>(member);
    if (here[k] < 0) return transport->detector().departure(ranks[k]);
    return of_host != nullptr ? of_host->departure(here[k]) : Departure();  // none if alone
  };
  known->name_member = [names](int member) { return names[static_cast<size_t>(member)]; };
  point_to_point_ = std::move(known);
  context_->point_to_point().join(point_to_point_);
}

Group::~Group() {
  if (context_->check_process().ok()) {
    shutdown_with_warning();
    return;
  }
  // In a forked child the Teams' memory is not mapped, so they must not be destroyed.
  static_cast<void>(team_.release());
  static_cast<void>(flat_.release());
}

std::chrono::milliseconds Group::timeout() const {
  return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));  // orders nothing
}

void Group::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ms_.store(timeout.count(), std::memory_order_relaxed);  // orders nothing
  if (transport_ && context_->check_process().ok()) transport_->tolerate_silence(timeout);
}

// The timeout of a call; 0: the group's.
std::chrono::milliseconds Group::limit_of(std::chrono::milliseconds timeout) const {
  if (timeout.count() <= 0) return this->timeout();
  if (transport_ && timeout > this->timeout()) transport_->tolerate_silence(timeout);
  return timeout;
}

std::string Group::describe() const {
  std::lock_guard lock(mutex_);
  return team_ ? team_->describe() : "closed";
}

// The error of a call that cannot start, or OK. Called under mutex_.
Status Group::refuse_locked() const {
  DSCOMM_RETURN_IF_ERROR(context_->check_process());
  if (has_state(kClosed))
    return make_status(Code::kInvalidArgument, "group '{}' has been destroyed on this rank",
                       options_.name);
  if (has_state(kExiting) && exit_thread_ != std::this_thread::get_id())
    return make_status(Code::kInvalidArgument,
                       "this process is ending, and group '{}' takes calls only from the "
                       "thread that runs its exit handlers",
                       options_.name);
  return {};
}

Status Group::execute(const Body& body, std::chrono::milliseconds timeout, bool had_ended) {
  Status status = execute_body(body, timeout);
  if (status.ok()) [[likely]]
    return status;
  note_failure(status);
  return told(status, had_ended);
}

Status Group::refuse(const Status& cause) {
  const bool had_ended = has_ended_.load(std::memory_order_relaxed);
  note_reported();
  note_failure(cause);
  return told(cause, had_ended);
}

// Writes the flight record once: for the first error that is no mistake of the caller and no abort
// by the user.
void Group::note_failure(const Status& status) {
  if (!failure().ok()) has_ended_.store(true, std::memory_order_relaxed);
  if (status.code() == Code::kInvalidArgument || status.code() == Code::kUnsupported ||
      status.code() == Code::kAborted)
    return;
  context_->note_failure();
  if (!context_->flight_record().enabled() || failure_recorded_.exchange(true)) return;
  context_->flight_record().write_after_failure(
      format_text("group '{}': {}", options_.name, status.message()));
}

// The error of a call. `had_ended`: the call was made after the group's end. An error other than
// the group's cause is the call's own: for example, a receive does not fit its send.
Status Group::told(const Status& status, bool had_ended) const {
  if (!had_ended || status.message() != failure().message()) return status;
  return Status(status.code(), "group '" + options_.name + "' ended earlier: " + status.message());
}

bool Group::fill(GroupRecord* record) const {
  if (!context_->check_process().ok()) return false;
  record->name = options_.name;
  record->global_ranks = options_.global_ranks;
  if (record->global_ranks.empty())
    for (int rank = 0; rank < options_.size; ++rank) record->global_ranks.push_back(rank);
  record->global_rank = record->global_ranks[static_cast<size_t>(options_.rank)];
  record->timeout_ms = timeout().count();
  record->called = sequence();
  record->failure = failure();
  record->operations = recorder_.operations(record->called);
  return !has_state(kClosed) || failure_recorded_;
}

Status Group::execute_body(const Body& body, std::chrono::milliseconds timeout) {
  CallOptions options{Deadline::after(limit_of(timeout))};
  // The body belongs to the glue: its exceptions must not cross a thread.
  try {
    Status status = body(*team_, options);
    // Point-to-point operations use the mailboxes of flat_, the Team of all ranks of this host. If
    // team_ has failed, they must fail with the same cause.
    if (flat_ && !status.ok())
      if (Status cause = team_->failure(); !cause.ok()) flat_->abort(cause);
    return status;
  } catch (const std::exception& error) {
    Status status(Code::kInternal, format_text("rank {} of group '{}': {}", options_.rank,
                                               options_.name, error.what()));
    team_->abort(status);
    if (flat_) flat_->abort(status);
    return status;
  }
}

Status Group::run(const OperationInfo& info, const Body& body, std::chrono::milliseconds timeout) {
  DSCOMM_RETURN_IF_ERROR(context_->check_process());
  const bool had_ended = has_ended_.load(std::memory_order_relaxed);
  uint64_t state = state_.load(std::memory_order_relaxed);  // the exchange orders
  uint64_t running = 0;
  do {
    if (state % kOneCall != 0) {
      const Status status = start(info, body, timeout)->wait();
      if (!status.ok()) note_reported();
      return status;
    }
    running = state + kOneCall + kRunning;
    // Acquires the stores of the thread that ran the Team before, released below or in
    // end_running_locked().
  } while (!state_.compare_exchange_weak(state, running, std::memory_order_acquire,
                                         std::memory_order_relaxed));
  uint64_t ticket = recorder_.started(info, running / kOneCall);
  Status status = execute(body, timeout, had_ended);
  if (!status.ok()) [[unlikely]]
    note_reported();
  recorder_.finished(ticket, status.ok());
  state = running;
  // Releases to the next thread that runs the Team, and to shutdown(), which destroys it.
  if (state_.compare_exchange_strong(state, running - kRunning, std::memory_order_release,
                                     std::memory_order_relaxed))
    return status;
  // During the call another thread has queued a call, waits for this one, or called begin_exit().
  Status scheduled;
  {
    std::lock_guard lock(mutex_);
    end_running_locked();
    scheduled = schedule_locked();
    if (!scheduled.ok()) end_locked(scheduled);
  }
  if (!scheduled.ok()) drain(nullptr);
  return status;
}

// Called under mutex_, by the thread that has begun to run the Team.
void Group::end_running_locked() {
  if ((state_.fetch_and(~uint64_t{kRunning}) & (kClosed | kWatched)) != 0) idle_.notify_all();
}

OperationPtr Group::start(const OperationInfo& info, Body body, std::chrono::milliseconds timeout) {
  std::shared_ptr<Queued> operation;
  Status scheduled;
  bool exiting = false;
  {
    std::lock_guard lock(mutex_);
    if (Status refused = refuse_locked(); !refused.ok()) return Operation::refuse(refused);
    const uint64_t sequence = state_.fetch_add(kOneCall) / kOneCall + 1;
    operation = std::make_shared<Queued>(shared_from_this(), std::move(body), timeout,
                                         recorder_.queued(info, sequence));
    queue_.push_back(operation);
    state_.fetch_or(kQueued);
    exiting = has_state(kExiting);
    if (!exiting) scheduled = schedule_locked();
    if (!scheduled.ok()) end_locked(scheduled);
  }
  // Without a worker, the group has ended, and drain() fails its calls. At exit, drain() runs them.
  if (!scheduled.ok() || exiting) drain(nullptr);
  return operation;
}

// Requests a worker if the queue is not empty and no thread runs it; under mutex_. kResource if the
// system refuses a thread: then the caller ends the group, or runs the queue itself.
Status Group::schedule_locked() {
  if (queue_.empty() || has_state(kRunning) || scheduled_) return {};
  Status submitted =
      context_->workers().submit([self = shared_from_this()] { self->drain(nullptr, true); });
  scheduled_ = submitted.ok();
  if (submitted.ok()) return {};
  return make_status(submitted.code(), "rank {} of group '{}': {}", options_.rank, options_.name,
                     submitted.message());
}

// Runs the queue until `until` is done (null: until it is empty), or another thread runs it.
void Group::drain(const Operation* until, bool was_scheduled) {
  std::unique_lock lock(mutex_);
  if (was_scheduled) scheduled_ = false;
  while (!queue_.empty() && (until == nullptr || !until->done()) && begin_running_locked()) {
    std::shared_ptr<Queued> operation = queue_.front();
    queue_.pop_front();
    if (queue_.empty()) state_.fetch_and(~uint64_t{kQueued});
    lock.unlock();
    Status status = operation->execute();
    lock.lock();
    if (!status.ok() && unheard_.ok()) unheard_ = status;
    // The operation completes before the next call can start or shutdown() can return. Callbacks
    // run after the operation has left the queue, because they may start the next call.
    std::vector<Operation::Callback> callbacks = operation->complete(status);
    end_running_locked();
    // A worker runs the rest of the queue during the callbacks. Without a worker, this thread runs
    // it after them; if this thread only waits for `until`, the rest fails.
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
  const OperationInfo info = message_info("send", dtype, count, dst, tag, true);
  return start_message(info, timeout, [&](PointToPoint& engine, std::chrono::milliseconds limit) {
    return engine.send(point_to_point_, data, count, dtype, dst, tag, std::move(keep), limit);
  });
}

OperationPtr Group::receive(void* data, size_t count, DType dtype, int src, int tag,
                            std::shared_ptr<void> keep, std::chrono::milliseconds timeout) {
  const OperationInfo info = message_info("recv", dtype, count, src, tag, true);
  return start_message(info, timeout, [&](PointToPoint& engine, std::chrono::milliseconds limit) {
    return engine.receive(point_to_point_, data, count, dtype, src, tag, std::move(keep), limit);
  });
}

// No lock keeps the Teams alive here: point-to-point uses them only with its mutex held, and
// shutdown() closes the port under that mutex before it destroys the Teams.
Status Group::blocking_send(const void* data, size_t count, DType dtype, int dst, int tag,
                            std::chrono::milliseconds timeout) {
  if (!context_->check_process().ok() || may_refuse() || point_to_point_ == nullptr)
    return send(data, count, dtype, dst, tag, nullptr, timeout)->wait();
  const bool had_ended = has_ended_.load(std::memory_order_relaxed);
  const uint64_t ticket = recorder_.started(message_info("send", dtype, count, dst, tag, false));
  Status status = context_->point_to_point().blocking_send(point_to_point_, data, count, dtype, dst,
                                                           tag, limit_of(timeout));
  return finish_message(ticket, status, had_ended);
}

Status Group::blocking_receive(void* data, size_t count, DType dtype, int src, int tag,
                               std::chrono::milliseconds timeout, int* came_from) {
  if (!context_->check_process().ok() || may_refuse() || point_to_point_ == nullptr) {
    const OperationPtr operation = receive(data, count, dtype, src, tag, nullptr, timeout);
    const Status status = operation->wait();
    if (came_from != nullptr) *came_from = operation->source();
    return status;
  }
  const bool had_ended = has_ended_.load(std::memory_order_relaxed);
  const uint64_t ticket = recorder_.started(message_info("recv", dtype, count, src, tag, false));
  Status status = context_->point_to_point().blocking_receive(
      point_to_point_, data, count, dtype, src, tag, limit_of(timeout), came_from);
  return finish_message(ticket, status, had_ended);
}

Status Group::finish_message(uint64_t ticket, const Status& status, bool had_ended) {
  recorder_.finished(ticket, status.ok());
  if (status.ok()) [[likely]]
    return status;
  note_failure(status);
  return told(status, had_ended);
}

template <typename Start>
OperationPtr Group::start_message(const OperationInfo& info, std::chrono::milliseconds timeout,
                                  Start start) {
  {
    std::lock_guard lock(mutex_);
    if (Status refused = refuse_locked(); !refused.ok()) return Operation::refuse(refused);
    if (point_to_point_ == nullptr)
      return Operation::refuse(make_status(Code::kInvalidArgument,
                                           "{}: group '{}' has no other rank to talk to",
                                           info.title, options_.name));
  }
  const bool had_ended = has_ended_.load(std::memory_order_relaxed);
  uint64_t ticket = recorder_.started(info);
  OperationPtr operation = start(context_->point_to_point(), limit_of(timeout));
  operation->when_done([self = shared_from_this(), ticket](const Status& status) {
    self->recorder_.finished(ticket, status.ok());
    if (!status.ok()) self->note_failure(status);
  });
  // If the group had ended, the operation has already succeeded or failed.
  const Status status = operation->status();
  return had_ended && !status.ok() ? Operation::refuse(told(status, had_ended)) : operation;
}

Status Group::check_process() const { return context_->check_process(); }

bool Group::idle_within(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  ++watchers_;
  state_.fetch_or(kWatched);
  const bool idle =
      idle_.wait_for(lock, limit, [this] { return queue_.empty() && !has_state(kRunning); });
  if (--watchers_ == 0) state_.fetch_and(~uint64_t{kWatched});
  return idle;
}

Status Group::gone(int global_rank) const {
  const std::vector<int>& ranks = options_.global_ranks;
  const auto k =
      ranks.empty()  // torch passes none for the default group
          ? static_cast<size_t>(global_rank)
          : static_cast<size_t>(std::find(ranks.begin(), ranks.end(), global_rank) - ranks.begin());
  if (!context_->check_process().ok() || k >= peers_.size()) return {};
  std::lock_guard lock(mutex_);  // keeps the Team alive
  if (team_ == nullptr) return {};
  if (peers_[k] == nullptr) return transport_->detector().gone(transport_ranks_[k]);
  if (peers_[k]->alive()) return {};
  const std::string name = format_text("global rank {} ({})", global_rank, peers_[k]->describe());
  const auto here = std::count_if(peers_.begin(), peers_.begin() + static_cast<ptrdiff_t>(k),
                                  [](const auto& peer) { return peer != nullptr; });
  if (of_host_ != nullptr && of_host_->has_left(static_cast<int>(here)))
    return Status(Code::kPeerLeft, name + " has left and ended");
  return Status(Code::kPeerDied, name + " died or exited" + kDeathAdvice);
}

Status Group::gone(const std::vector<int>& global_ranks) const {
  Status left;
  for (int rank : global_ranks) {
    Status found = gone(rank);
    if (found.code() == Code::kPeerDied) return found;
    if (left.ok()) left = std::move(found);
  }
  return left;
}

LocalRanks Group::local_ranks(const std::vector<int>& global_ranks, const std::string& name) {
  if (!options_.global_ranks.empty() || point_to_point_ == nullptr) return {};
  LocalRanks local;
  {
    // All members have formed equally many groups of this name, so the count tells these apart.
    std::lock_guard lock(mutex_);
    auto formed = formations_.find(std::hash<std::string>()(name));
    local.group = format_text("{}/{}/{}", point_to_point_->id, name,
                              formed == formations_.end() ? 0 : formed->second);
  }
  std::set<int> hosts;
  for (size_t k = 0; k < global_ranks.size(); ++k) {
    const auto rank = static_cast<size_t>(global_ranks[k]);
    if (rank >= peers_.size()) return {};
    if (peers_[rank] != nullptr) local.ranks.push_back(static_cast<int>(k));
    if (hosts.insert(hosts_[rank]).second) local.leaders.push_back(static_cast<int>(k));
  }
  return local;
}

void Group::note_formed(const std::string& name) {
  std::lock_guard lock(mutex_);
  ++formations_[std::hash<std::string>()(name)];
}

Status Group::formed_without_this(const std::vector<int>& global_ranks, uint64_t number) const {
  if (number == 0 || !options_.global_ranks.empty() || !context_->check_process().ok()) return {};
  for (int rank : global_ranks) {
    const auto k = static_cast<size_t>(rank);
    if (k >= peers_.size() || peers_[k] == nullptr || rank == options_.rank) continue;
    for (const std::atomic<uint64_t>& formed : peers_[k]->header().formed)
      if (formed.load(std::memory_order_acquire) == number)  // pairs with Context::note_formed()
        return make_status(Code::kMismatch,
                           "the ranks passed different members to it: global rank {} ({}) "
                           "has formed it without global rank {}; pass the same list on every rank",
                           rank, peers_[k]->describe(), options_.rank);
    if (rank == global_ranks.front()) return {};
  }
  return {};
}

Status Group::failure() const {
  DSCOMM_RETURN_IF_ERROR(context_->check_process());
  std::lock_guard lock(mutex_);
  if (team_ == nullptr) return {};
  DSCOMM_RETURN_IF_ERROR(team_->failure());
  return flat_ ? flat_->failure() : Status();
}

Status Group::failure_of_next_call() const {
  {
    DSCOMM_RETURN_IF_ERROR(context_->check_process());
    std::lock_guard lock(mutex_);
    // Asks only about the oldest unfinished call. While calls are queued, a new call may be
    // accepted although it will fail when it runs.
    if (team_ == nullptr || team_->failure_in(team_->finished_calls() + 1).ok()) return {};
  }
  return failure();
}

void Group::abort(const std::string& reason) {
  if (!context_->check_process().ok()) return;
  std::lock_guard lock(mutex_);
  end_locked(make_status(Code::kAborted, "group '{}' was aborted by rank {}: {}", options_.name,
                         options_.rank, reason));
}

// Called under mutex_.
void Group::end_locked(const Status& cause) {
  has_ended_.store(true, std::memory_order_relaxed);
  if (team_) team_->abort(cause);
  if (flat_) flat_->abort(cause);
}

void Group::note_end(const std::string& exception) {
  if (!context_->check_process().ok()) return;
  std::lock_guard lock(mutex_);
  if (!exception.empty()) context_->note_failure();
  if (team_) team_->note_end(exception);
  if (flat_) flat_->note_end(exception);
  if (team_ && transport_) transport_->detector().note_end(exception);
}

void Group::begin_exit() {
  if (!context_->check_process().ok()) return;
  std::lock_guard lock(mutex_);
  exit_thread_ = std::this_thread::get_id();
  state_.fetch_or(kExiting);
}

Status Group::shutdown() {
  if (!context_->check_process().ok()) return {};
  std::unique_lock lock(mutex_);
  state_.fetch_or(kClosed);
  // This wait ends, because queued calls have deadlines.
  idle_.wait(lock, [this] { return queue_.empty() && !has_state(kRunning); });
  if (team_ == nullptr) return {};
  std::unique_ptr<Team> team = std::move(team_);
  std::unique_ptr<ShmTeam> flat = std::move(flat_);
  const Status unheard = was_reported_.load(std::memory_order_relaxed) ? Status() : unheard_;
  lock.unlock();
  // Close the port before the Teams are destroyed, because the port's closures use them.
  close_message_port();
  Status left = team->leave();
  if (flat != nullptr) {
    if (!left.ok()) flat->abort(left);
    if (Status of_flat = flat->leave(); left.ok()) left = of_flat;
  }
  DSCOMM_RETURN_IF_ERROR(left);
  // Of unheard errors, only those of differing calls are returned: no other call will report them.
  const bool is_of_calls = unheard.code() == Code::kMismatch || unheard.code() == Code::kPeerLeft;
  return is_of_calls ? unheard : Status();
}

void Group::shutdown_with_warning() {
  if (Status status = shutdown(); !status.ok())
    log_line(LogLevel::kWarn, "leaving group '{}': {}", options_.name, status.message());
}

}  // namespace dscomm
