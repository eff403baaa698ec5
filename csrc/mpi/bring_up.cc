#include "mpi/bring_up.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <tuple>
#include <vector>

#include "core/base/log.h"
#include "core/base/packer.h"
#include "core/store/store_exchange.h"
#include "core/transport/members.h"
#include "core/transport/networks.h"
#include "mpi/abandonable.h"
#include "mpi/guarded.h"
#include "mpi/meet.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_tags.h"
#include "mpi/persistent_all_reduce.h"
#include "mpi/start.h"
#include "mpi/start_plan.h"

namespace dscomm {
namespace {

constexpr int kGroupTag = 0x2473;

// The largest job whose ranks all connect in advance: each connection takes a descriptor.
constexpr int kMostConnected = 256;

// MPI_Init_thread runs, or was abandoned and MPI's state is unknown. Guards no data.
std::atomic<bool> initialisation_left_behind{false};

// A rank's place in MPI_COMM_WORLD, and its MpiStart::carries_token().
struct WorldRank {
  uint64_t rank = 0, size = 0;
  bool carries_token = false;

  static constexpr std::tuple kFields{&WorldRank::rank, &WorldRank::size,
                                      &WorldRank::carries_token};
};

// What the ranks agree on.
struct AgreedWorld {
  std::vector<int> ranks;  // of the members, in MPI_COMM_WORLD
  std::string token;       // of MPI's connections; empty: none

  static constexpr std::tuple kFields{&AgreedWorld::ranks, &AgreedWorld::token};
};

}  // namespace

class BringUp {
 public:
  BringUp(const TransportRequest& request, std::shared_ptr<Store> store, const Deadline& deadline,
          const std::string& helper_path, const GiveUpCheck& check)
      : request_(request),
        deadline_(deadline),
        prefix_(request.prefix + "mpi/"),
        exchange_(*store, exchange_request(check), deadline),
        context_{request, std::move(store), deadline, helper_path, prefix_, exchange_, {}} {}

  Result<std::unique_ptr<MpiWorld>> run() {
    Status status = steps();
    if (status.ok()) return std::move(world_);
    return Status(status.code(), "MPI between hosts could not be started: " + status.message());
  }

 private:
  Status steps() {
    step_ = "agreeing on how to start MPI";
    DSCOMM_RETURN_IF_ERROR(own(check_own_networks()));
    DSCOMM_RETURN_IF_ERROR(own(check_own_mpi()));
    DSCOMM_RETURN_IF_ERROR(agree_on_plan());
    world_ = std::make_unique<MpiWorld>(plan().origin, std::move(start_));
    if (plan().origin == MpiOrigin::kDscomm) {
      step_ = std::string("starting ") + start().helper_name();
      DSCOMM_RETURN_IF_ERROR(own(start().get_ready(context_)));
    }
    if (plan().origin != MpiOrigin::kProgram) DSCOMM_RETURN_IF_ERROR(initialise());
    DSCOMM_RETURN_IF_ERROR(agree_on_world());
    return make_communicator();
  }

  // --- failures

  const StartPlan& plan() const { return context_.plan; }
  MpiStart& start() const { return *world_->start_; }
  int size() const { return static_cast<int>(request_.members.size()); }
  std::string name(int rank) const { return name_member(request_.members, rank); }

  ExchangeRequest exchange_request(const GiveUpCheck& check) const {
    ExchangeRequest exchange = exchange_of(request_);
    exchange.prefix = prefix_;
    exchange.check = check;
    exchange.timeout_hint = [this] { return timeout_hint(); };
    return exchange;
  }

  Status at_step(const Status& status) const {
    return Status(status.code(),
                  step_ + " failed on " + name(request_.rank) + ": " + status.message());
  }

  // Reports this rank's own failure to all ranks. Another rank's failure is returned unchanged.
  Status own(const Status& status) {
    if (status.ok() || exchange_.has_read_failure()) return status;
    // kInternal: an error of MPI_Init_thread, for example.
    const bool may_suspect = status.code() == Code::kTimeout || status.code() == Code::kInternal;
    return exchange_.fail(
        at_step(Status(status.code(), status.message() + (may_suspect ? timeout_hint() : ""))));
  }

  // A PMIx server that does not answer, on any host, blocks MPI_Init_thread on all ranks.
  std::string timeout_hint() const {
    const std::string silent = world_ == nullptr ? "" : start().silent_helper(context_);
    return silent.empty() ? "" : "; " + silent;
  }

  Status malformed(int rank) const { return malformed_value("message from " + name(rank)); }

  // The values of all ranks, by rank.
  template <typename T>
  Result<std::vector<T>> unpack_all(const std::vector<std::string>& said) const {
    std::vector<T> values(said.size());
    for (size_t rank = 0; rank < values.size(); ++rank)
      if (!unpack(said[rank], &values[rank])) return at_step(malformed(static_cast<int>(rank)));
    return values;
  }

  // --- the plan

  // The two checks that need no other rank. If DSCOMM_IFNAME fits no network, MPI would not say so.
  Status check_own_networks() const {
    if (!request_.members[request_.rank].networks.empty()) return {};
    return select_networks(own_interfaces(), request_.settings.ifname).status();
  }

  Status check_own_mpi() {
    if (initialisation_left_behind.load())
      return Status(Code::kUnsupported,
                    "an earlier attempt to start MPI in this process has not returned; start the "
                    "process again");
    int initialised = 0, finalised = 0, level = 0;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    if (finalised != 0)
      return Status(Code::kUnsupported,
                    "MPI has been finalised in this process and cannot be started twice; make the "
                    "group before MPI_Finalize");
    if (initialised == 0) return {};
    MPI_Query_thread(&level);
    return check_thread_level(level);
  }

  static Status check_thread_level(int level) {
    if (level >= MPI_THREAD_MULTIPLE) return {};
    return Status(Code::kUnsupported,
                  "MPI was initialised without MPI_THREAD_MULTIPLE, which dscomm needs because it "
                  "calls MPI from threads of its own; if the program initialised it, ask for that "
                  "level (in mpi4py: mpi4py.rc.thread_level = 'multiple' before MPI is imported), "
                  "else install an MPI that has it");
  }

  Status agree_on_plan() {
    MpiMemberEntry entry = own_entry(request_.rank);
    start_->describe(&entry);
    // Ranks with and without persistent collectives cannot work together: make versions differ.
    if (!PersistentAllReduce::available()) entry.mpi_version += " without persistent collectives";
    Result<std::string> plan = exchange_.agree(
        "plan", pack(entry), [this](const std::vector<std::string>& said) -> Result<std::string> {
          DSCOMM_ASSIGN_OR_RETURN(const auto entries, unpack_all<MpiMemberEntry>(said));
          Result<StartPlan> made = make_plan(request_, entries);
          if (!made.ok()) return at_step(made.status());
          return pack(made.value());
        });
    if (!plan.ok()) return plan.status();
    if (!unpack(plan.value(), &context_.plan) || context_.plan.origin > MpiOrigin::kProgram)
      return own(malformed(0));
    return {};
  }

  // --- starting MPI

  Status initialise() {
    step_ = "MPI_Init_thread";
    struct Answer {
      int code = MPI_SUCCESS, level = 0;
    };
    auto answer = std::make_shared<Answer>();
    Status status;
    {
      const std::unique_ptr<EnvironmentForStart> environment = start().make_environment(context_);
      initialisation_left_behind.store(true);
      status = run_abandonable(
          "MPI_Init_thread",
          [answer] {
            answer->code = guarded_blocking([&] {
              return MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &answer->level);
            });
          },
          deadline_, [this] { return check_start(); });
    }
    if (!status.ok()) return own(explain_timeout(status));
    initialisation_left_behind.store(false);
    if (answer->code != MPI_SUCCESS) return own(mpi_error("MPI_Init_thread", answer->code));
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    start().has_started(context_);
    return own(check_thread_level(answer->level));
  }

  Status check_start() {
    DSCOMM_RETURN_IF_ERROR(start().check(context_));
    return exchange_.check();
  }

  Status explain_timeout(const Status& status) const {
    if (status.code() != Code::kTimeout || exchange_.has_read_failure()) return status;
    std::string reason;
    if (plan().origin == MpiOrigin::kLauncher)
      reason =
          "; it waits for all ranks of the launcher's job: see whether each runs and makes this "
          "group";
    else if (const std::string hosts = start().waiting_for(); !hosts.empty())
      reason = "; it waits for the ranks of " + hosts;
    return Status(status.code(), status.message() + reason);
  }

  Status agree_on_world() {
    step_ = "agreeing on MPI's ranks";
    int rank = 0, world_size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    const WorldRank own_rank{static_cast<uint64_t>(rank), static_cast<uint64_t>(world_size),
                             start().carries_token(context_)};
    Result<std::string> world = exchange_.agree(
        "world", pack(own_rank),
        [this](const std::vector<std::string>& said) -> Result<std::string> {
          DSCOMM_ASSIGN_OR_RETURN(const auto world_ranks, unpack_all<WorldRank>(said));
          if (Status checked = check_world(world_ranks); !checked.ok()) return at_step(checked);
          AgreedWorld agreed;
          for (const WorldRank& each : world_ranks)
            agreed.ranks.push_back(static_cast<int>(each.rank));
          if (std::ranges::all_of(world_ranks, &WorldRank::carries_token))
            agreed.token = start().make_token();
          return pack(agreed);
        });
    if (!world.ok()) return world.status();
    AgreedWorld agreed;
    if (!unpack(world.value(), &agreed) || agreed.ranks.size() != request_.members.size())
      return own(malformed(0));
    world_ranks_ = std::move(agreed.ranks);
    start().admit(agreed.token);
    if (agreed.token.empty() && plan().origin != MpiOrigin::kProgram)
      log_line(LogLevel::kInfo, "MPI's connections over TCP need no token");
    return {};
  }

  Status check_world(const std::vector<WorldRank>& world_ranks) const {
    std::set<uint64_t> ranks;
    for (int member = 0; member < size(); ++member) {
      const WorldRank& world_rank = world_ranks[static_cast<size_t>(member)];
      const bool fits =
          ranks.insert(world_rank.rank).second && world_rank.rank < world_rank.size &&
          world_rank.size == world_ranks[0].size && world_rank.size >= world_ranks.size() &&
          (plan().origin != MpiOrigin::kDscomm || world_rank.rank == static_cast<uint64_t>(member));
      if (fits) continue;
      const char* advice =
          plan().origin == MpiOrigin::kProgram
              ? "MPI was initialised before dscomm could do so: let dscomm do it (in mpi4py: "
                "mpi4py.rc.initialize = False before MPI is imported), or start all ranks with one "
                "mpirun"
              : "look for another MPI on the library path, and for settings of MPI in the "
                "environment";
      return make_status(Code::kUnsupported,
                         "{} came up as rank {} of {} in MPI_COMM_WORLD, not in one world of "
                         "all {} ranks; {}",
                         name(member), world_rank.rank, world_rank.size, size(), advice);
    }
    return {};
  }

  Status make_communicator() {
    step_ = "the first exchange between the hosts";
    struct Answer {
      int code = MPI_SUCCESS;
      MPI_Comm comm = MPI_COMM_NULL;
    };
    auto answer = std::make_shared<Answer>();
    const bool ours = plan().origin != MpiOrigin::kProgram;
    const GiveUpCheck ends = [this] { return exchange_.check(); };
    // If the program initialised MPI, it may use this tag too, so the ranks skip meet().
    Status status = ours
                        ? meet(MPI_COMM_WORLD, world_ranks_, kMeetTags + kGroupTag, deadline_, ends,
                               [this](size_t member) { return name(static_cast<int>(member)); })
                        : Status();
    if (status.ok()) {
      step_ = "MPI_Comm_create_group";
      status = run_abandonable(
          "MPI_Comm_create_group",
          [answer, ours, ranks = world_ranks_] {
            answer->code = create(ranks, ours, &answer->comm);
          },
          deadline_, ends);
    }
    const bool connects_all = start().blocks_to_connect() && size() <= kMostConnected;
    if (status.ok() && answer->code == MPI_SUCCESS && connects_all) {
      step_ = "connecting all ranks";
      status = connect_all(answer->comm, kMeetTags + kGroupTag, deadline_, ends);
    }
    if (status.code() == Code::kTimeout && !exchange_.has_read_failure())
      status = Status(status.code(), status.message() +
                                         "; a rank may be stopped, or the network wrong: " +
                                         start().networks_used());
    if (!status.ok()) return own(status);
    if (answer->code != MPI_SUCCESS)
      return own(reason_or(mpi_error(step_.c_str(), answer->code), deadline_, ends));
    world_->comm_ = answer->comm;
    start().has_met(connects_all);
    exchange_.finish();
    log_line(
        LogLevel::kInfo, "MPI between hosts is up: {}, started by way of {}; rank {} of {}; {}",
        start().version(), world_->started_by(), request_.rank, size(), start().networks_used());
    return {};
  }

  static int create(const std::vector<int>& ranks, bool ours, MPI_Comm* comm) {
    if (ours) return create_communicator(MPI_COMM_WORLD, ranks, kGroupTag, comm);
    // Replaces the program's error handler only during this call.
    MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    const int code = create_communicator(MPI_COMM_WORLD, ranks, kGroupTag, comm);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
    MPI_Errhandler_free(&handler);
    return code;
  }

  const TransportRequest& request_;
  const Deadline& deadline_;
  const std::string prefix_;
  StoreExchange exchange_;
  StartContext context_;

  std::string step_;
  std::unique_ptr<MpiStart> start_ = make_mpi_start();  // moved to world_ after the plan
  std::unique_ptr<MpiWorld> world_;
  std::vector<int> world_ranks_;  // of the members, in MPI_COMM_WORLD
};

MpiWorld::MpiWorld(MpiOrigin origin, std::unique_ptr<MpiStart> start)
    : origin_(origin), start_(std::move(start)) {}

MpiWorld::~MpiWorld() = default;

const char* MpiWorld::started_by() const {
  switch (origin_) {
    case MpiOrigin::kDscomm:
      return start_->helper_name();
    case MpiOrigin::kLauncher:
      return "the launcher";
    case MpiOrigin::kProgram:
      return "the program";
  }
  return "?";
}

void MpiWorld::leave(const Deadline& deadline) {
  if (left_.exchange(true)) return;
  start_->leave();
  if (origin_ != MpiOrigin::kLauncher || mpi_gave_up()) return;
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (finalised != 0) return;
  Status status = run_abandonable(
      "MPI_Finalize", [] { (void)guarded_blocking([] { return MPI_Finalize(); }); }, deadline,
      [] { return Status(); });
  if (!status.ok()) log_line(LogLevel::kWarn, "{}; see which rank does not end", status.message());
}

void MpiWorld::close_descriptors() {
  left_.store(true);
  start_->close_descriptors();
}

Result<std::unique_ptr<MpiWorld>> bring_up(const TransportRequest& request,
                                           std::shared_ptr<Store> store, const Deadline& deadline,
                                           const std::string& helper_path,
                                           const GiveUpCheck& check) {
  return BringUp(request, std::move(store), deadline, helper_path, check).run();
}

}  // namespace dscomm
