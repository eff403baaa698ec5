#include "mpi/mpi_transport.h"

#include <sys/resource.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

#include "core/base/format.h"
#include "core/base/log.h"
#include "core/team/first_cause.h"
#include "core/transport/members.h"
#include "mpi/abandonable.h"
#include "mpi/call_watch.h"
#include "mpi/guarded.h"
#include "mpi/meet.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_tags.h"
#include "mpi/mpi_team.h"

namespace dscomm {
namespace {

// Limit of MPI_Finalize in leave() after a failure in the job, and the least limit otherwise.
constexpr std::chrono::seconds kLeaveLimit{5};
constexpr std::chrono::milliseconds kFlushLimit{1000};

// MPI opens a descriptor for each rank that it talks to, and reports a lack of them as a failure of
// the peer. The usual soft limit, 1,024, is for programs that use select().
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  const rlim_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
  if (setrlimit(RLIMIT_NOFILE, &limit) == 0)
    log_line(LogLevel::kInfo, "the soft limit of open files is raised from {} to {}, for MPI",
             before, limit.rlim_max);
}

// The results of a thread that may be abandoned.
struct Communicators {
  int code = MPI_SUCCESS;
  MPI_Comm data = MPI_COMM_NULL, check = MPI_COMM_NULL;
};

}  // namespace

class MpiTransport::MpiPeerProcess final : public PeerProcess {
 public:
  MpiPeerProcess(std::shared_ptr<MpiTransport> transport, int rank)
      : transport_(std::move(transport)), rank_(rank) {}

  const ArenaId& id() const override { return member().id; }
  bool alive(bool) const override {
    return transport_->detector_->gone(rank_).code() != Code::kPeerDied;
  }
  std::string describe() const override {
    return format_text("pid {} on host {}", member().pid, member().host_name);
  }
  std::string state_text() const override { return alive(false) ? "on another host" : "gone"; }
  const ArenaId* doorbell() const override { return nullptr; }
  SocketList* sockets() const override { return &mpi_sockets(); }
  bool sleeps() const override { return false; }
  std::unique_ptr<CellChannel> make_channel(const std::shared_ptr<Arena>&,
                                            ChannelDirectory&) override {
    const auto gone = [detector = transport_->detector_.get(), rank = rank_] {
      return detector->count() == 0 ? Status() : detector->gone(rank);
    };
    return std::make_unique<MpiChannel>(transport_->arrivals_, rank_, describe(), gone);
  }

 private:
  const TransportMember& member() const {
    return transport_->request_.members[static_cast<size_t>(rank_)];
  }

  const std::shared_ptr<MpiTransport> transport_;
  const int rank_;
};

MpiTransport::MpiTransport(const TransportRequest& request) : request_(request) {
  for (size_t rank = 0; rank < request_.members.size(); ++rank)
    ranks_[request_.members[rank].id] = static_cast<int>(rank);
  const int host = request_.members[static_cast<size_t>(request_.rank)].host;
  const auto on_this_host = std::ranges::count(request_.members, host, &TransportMember::host);
  // A spinning rank takes the core of another rank, perhaps of the one for which it waits.
  wait_policy_.is_crowded = on_this_host > request_.usable_cores;
  if (wait_policy_.is_crowded) wait_policy_.spin_polls = 0;
}

Result<std::shared_ptr<Transport>> MpiTransport::make(const TransportRequest& request,
                                                      std::shared_ptr<Store> store,
                                                      const Deadline& deadline,
                                                      const std::string& folder) {
  // The module has its own copy of the core, and so of the log settings.
  set_log_level(request.settings.debug);
  const int global_rank = request.members[static_cast<size_t>(request.rank)].global_rank;
  set_log_rank(global_rank >= 0 ? global_rank : request.rank);
  std::shared_ptr<MpiTransport> transport(new MpiTransport(request));
  DSCOMM_RETURN_IF_ERROR(transport->bring_up_all(std::move(store), deadline, folder));
  return std::shared_ptr<Transport>(std::move(transport));
}

Status MpiTransport::bring_up_all(std::shared_ptr<Store> store, const Deadline& deadline,
                                  const std::string& folder) {
  raise_descriptor_limit();
  DSCOMM_ASSIGN_OR_RETURN(detector_, TcpFailureDetector::connect(request_, *store, deadline));
  detector_->on_death([](const Status& death) {
    note_first_death(death);
    watch_calls_closely();
  });
  std::vector<int> everyone(request_.members.size());
  std::iota(everyone.begin(), everyone.end(), 0);
  DSCOMM_ASSIGN_OR_RETURN(world_,
                          bring_up(request_, std::move(store), deadline, folder + "/dscomm-pmix",
                                   missing_member_check(everyone)));
  arrivals_ = std::make_shared<MpiArrivals>(world_->comm());
  return {};
}

// Returns a check for the time in which `ranks` make something together. It fails if one of them
// has died, or left kGraceOfLeaversNs ago: until then, messages that it sent may be in transit.
GiveUpCheck MpiTransport::missing_member_check(std::vector<int> ranks) const {
  return [this, ranks = std::move(ranks), left_since_ns = int64_t{0}]() mutable -> Status {
    if (detector_->count() == 0) return {};
    Status left;
    for (int rank : ranks) {
      Status gone = detector_->gone(rank);
      if (gone.code() == Code::kPeerDied) return gone;
      if (left.ok()) left = std::move(gone);
    }
    if (left.ok()) return {};
    if (left_since_ns == 0) left_since_ns = monotonic_ns();
    return monotonic_ns() - left_since_ns < kGraceOfLeaversNs ? Status() : left;
  };
}

int MpiTransport::rank_of(const ArenaId& id) const {
  auto found = ranks_.find(id);
  return found == ranks_.end() ? -1 : found->second;
}

Result<std::unique_ptr<Team>> MpiTransport::make_team(const TransportTeam& team,
                                                      const Deadline& deadline) {
  MpiTeamOptions options;
  options.id = team.id;
  options.name = team.name;
  options.halves_as_float32 = team.halves_as_float32;
  options.wait_policy = wait_policy_;
  std::set<int> hosts;
  for (int rank : team.ranks) {
    options.members.push_back({rank, name_member(request_.members, rank)});
    hosts.insert(request_.members[static_cast<size_t>(rank)].host);
  }
  // Inside a host MPI may use shared memory, which ends no sleep on sockets; no block uses it.
  options.shares_hosts = hosts.size() < team.ranks.size();
  options.wait_policy.by_sockets = team.only_for_blocks || !options.shares_hosts;
  for (int rank : team.group) options.group.push_back({rank, name_member(request_.members, rank)});
  const GiveUpCheck give_up_check = [this, gone = missing_member_check(team.ranks), id = team.id,
                                     ends = AbortMonitor()]() mutable -> Status {
    DSCOMM_RETURN_IF_ERROR(
        ends.check(0, [&](uint64_t call) { return detector_->ended(id, call); }));
    return gone();
  };
  auto made = std::make_shared<Communicators>();
  // Groups that are made at the same time get different tags, except for one pair in 14,336.
  const int tag = static_cast<int>((team.id ^ team.id >> 32) % kGroupTags);
  const bool needs_check =
      !team.only_for_blocks && static_cast<int>(team.ranks.size()) > options.few_ranks;
  Status status = meet(world_->comm(), team.ranks, kMeetTags + tag, deadline, give_up_check,
                       [&](size_t index) { return options.members[index].name; });
  if (status.ok())
    status = run_abandonable(
        "MPI_Comm_create_group",
        [made, members = team.ranks, tag, needs_check, from = world_->comm()] {
          made->code = create_communicator(from, members, tag, &made->data);
          if (made->code == MPI_SUCCESS && needs_check)
            made->code = create_communicator(from, members, tag, &made->check);
        },
        deadline, give_up_check);
  if (status.ok() && made->code != MPI_SUCCESS)
    status = reason_or(mpi_error("MPI_Comm_create_group", made->code), deadline, give_up_check);
  if (!status.ok()) {
    detector_->end(team.id, status);
    return make_status(status.code(), "making the communicators of group '{}': {}", team.name,
                       status.message());
  }
  return std::unique_ptr<Team>(
      std::make_unique<MpiTeam>(made->data, made->check, *detector_, std::move(options)));
}

std::shared_ptr<PeerProcess> MpiTransport::peer_process(int rank) {
  return std::make_shared<MpiPeerProcess>(shared_from_this(), rank);
}

void MpiTransport::leave(bool has_failed) {
  flush();
  detector_->leave();
  // The launcher ends the job if a process exits without MPI_Finalize. MPI_Finalize waits for all
  // ranks, and they may still have calls to make. So allow it the longest timeout of a group.
  std::chrono::milliseconds limit = kLeaveLimit;
  if (!has_failed && first_death().ok())
    limit = std::max(limit, std::chrono::milliseconds(longest_timeout_ms_.load()));
  world_->leave(Deadline::after(limit));
}

void MpiTransport::tolerate_silence(std::chrono::milliseconds timeout) {
  int64_t longest = longest_timeout_ms_.load();
  while (timeout.count() > longest &&
         !longest_timeout_ms_.compare_exchange_weak(longest, timeout.count())) {
  }
  detector_->tolerate_silence(timeout);
}

// A collective that is complete here may still have data to send, and MPI sends only in its calls.
// So this rank calls MPI until all ranks have reached flush(), but at most for kFlushLimit.
void MpiTransport::flush() {
  MPI_Request request = MPI_REQUEST_NULL;
  int is_finalized = 0;  // finalised by the program: nothing is in transit
  MPI_Finalized(&is_finalized);
  if (flushed_.exchange(true) || is_finalized || detector_->count() != 0 ||
      guarded([&] { return MPI_Ibarrier(world_->comm(), &request); }) != MPI_SUCCESS)
    return;
  const Deadline deadline = Deadline::after(kFlushLimit);
  int done = 0;
  const auto test = [&] { return MPI_Test(&request, &done, MPI_STATUS_IGNORE); };
  while (guarded(test) == MPI_SUCCESS && !done && !deadline.expired() && detector_->count() == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void MpiTransport::close_descriptors() {
  if (detector_ != nullptr) detector_->close_descriptors();
  if (world_ != nullptr) world_->close_descriptors();
}

}  // namespace dscomm
