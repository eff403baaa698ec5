#include "mpi/bring_up.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>

#include "core/base/log.h"
#include "core/base/packer.h"
#include "core/store/store_exchange.h"
#include "core/topology/topology.h"
#include "core/transport/members.h"
#include "core/transport/networks.h"
#include "mpi/environment.h"
#include "mpi/guarded.h"
#include "mpi/lost_helper.h"
#include "mpi/mca_files.h"
#include "mpi/meet.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_tags.h"
#include "mpi/persistent_all_reduce.h"
#include "mpi/tcp_hooks.h"
#include "pmix/process.h"

namespace dscomm {
namespace {

constexpr int kGroupTag = 0x2473;

// MPI_Init_thread did not return, once: nobody knows what it has done.
std::atomic<bool> initialisation_left_behind{false};

// What one rank says of itself.
struct MemberEntry {
  std::string place;  // equal where a PMIx server and Open MPI's shared memory work for both
  int64_t pid = 0;
  uint64_t start_time = 0;
  uint32_t uid = 0, gid = 0;
  std::string cpu_list;
  uint64_t quota_millicpus = 0;  // 0: none
  std::string mpi_version;
  bool initialised = false;
  std::vector<std::string> addresses;  // of its network namespace
  // What a launcher has said; empty without one.
  std::string name_space, launcher_rank;
  uint64_t launcher_size = 0;  // 0: not known
};

struct PlannedHost {
  PmixHost host;
  std::vector<PmixClient> clients;  // by entry of host.ranks; the first is the leader
  bool crowded = false;             // more ranks than cores
};

struct Plan {
  MpiOrigin origin = MpiOrigin::kHelper;
  std::vector<PlannedHost> hosts;
  std::vector<std::string> addresses;  // from which MPI's connections may come
};

// What one rank is in MPI_COMM_WORLD, and whether its connections can carry a token.
struct WorldPlace {
  uint64_t rank = 0, size = 0;
  bool carries_token = false;
};

std::string name_space_inode(const char* name) {
  struct stat status{};
  if (stat((std::string("/proc/self/ns/") + name).c_str(), &status) != 0) return "?";
  return std::to_string(status.st_ino);
}

std::string own_place() {
  std::string place = std::to_string(geteuid());
  for (const char* name : {"net", "pid", "mnt", "ipc", "user"})
    place.append(" ").append(name_space_inode(name));
  return place;
}

// "Open MPI v4.1.4": what follows says who built it. And what was left out of it that ranks must
// have alike.
std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string version(text);
  return version.substr(0, version.find(',')) +
         (PersistentAllReduce::available() ? "" : " without persistent collectives");
}

uint64_t launcher_size() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "FLUX_JOB_SIZE"})
    if (uint64_t size = std::strtoull(environment_value(name).c_str(), nullptr, 10)) return size;
  return 0;
}

// A network adapter that MPI drives by a library of its own: InfiniBand, RoCE, Omni-Path, EFA,
// Slingshot, BXI.
bool has_fast_network() {
  std::error_code none;
  for (const char* kind : {"/sys/class/infiniband", "/sys/class/cxi", "/sys/class/bxi"})
    if (std::filesystem::directory_iterator(kind, none) != std::filesystem::directory_iterator())
      return true;
  return false;
}

MemberEntry own_entry() {
  MemberEntry entry;
  entry.place = own_place();
  entry.pid = getpid();
  entry.start_time = process_start_time(getpid());
  entry.uid = geteuid();
  entry.gid = getegid();
  entry.cpu_list = process_cpu_list();
  double quota = cgroup_cpu_quota();
  if (quota < 1e6) entry.quota_millicpus = static_cast<uint64_t>(std::max(quota * 1000, 1.0));
  entry.mpi_version = mpi_version();
  int initialised = 0;
  MPI_Initialized(&initialised);
  entry.initialised = initialised != 0;
  entry.addresses = own_addresses();
  // A launcher that starts torchrun once on each host gives all workers of the host one rank, and
  // does not take that rank back when torchrun restarts them.
  if (started_by_torchrun()) return entry;
  entry.name_space = environment_value("PMIX_NAMESPACE");
  entry.launcher_rank = environment_value("PMIX_RANK");
  entry.launcher_size = launcher_size();
  return entry;
}

std::string pack(const MemberEntry& entry) {
  return Packer()
      .text(entry.place)
      .number(static_cast<uint64_t>(entry.pid))
      .number(entry.start_time)
      .number(entry.uid)
      .number(entry.gid)
      .text(entry.cpu_list)
      .number(entry.quota_millicpus)
      .text(entry.mpi_version)
      .number(entry.initialised)
      .texts(entry.addresses)
      .text(entry.name_space)
      .text(entry.launcher_rank)
      .number(entry.launcher_size)
      .take();
}

bool unpack(std::string_view text, MemberEntry* entry) {
  Unpacker unpacker(text);
  entry->place = unpacker.text();
  entry->pid = static_cast<int64_t>(unpacker.number());
  entry->start_time = unpacker.number();
  entry->uid = static_cast<uint32_t>(unpacker.number());
  entry->gid = static_cast<uint32_t>(unpacker.number());
  entry->cpu_list = unpacker.text();
  entry->quota_millicpus = unpacker.number();
  entry->mpi_version = unpacker.text();
  entry->initialised = unpacker.number() != 0;
  entry->addresses = unpacker.texts();
  entry->name_space = unpacker.text();
  entry->launcher_rank = unpacker.text();
  entry->launcher_size = unpacker.number();
  return unpacker.whole();
}

std::string pack(const Plan& plan) {
  Packer packer;
  packer.number(static_cast<uint64_t>(plan.origin)).number(plan.hosts.size());
  for (const PlannedHost& host : plan.hosts) {
    packer.text(host.host.name).number(host.crowded).number(host.clients.size());
    for (const PmixClient& client : host.clients)
      packer.number(client.rank)
          .number(static_cast<uint64_t>(client.pid))
          .number(client.start_time)
          .number(client.uid)
          .number(client.gid);
  }
  return packer.texts(plan.addresses).take();
}

bool unpack(std::string_view text, Plan* plan) {
  Unpacker unpacker(text);
  uint64_t origin = unpacker.number();
  plan->origin = static_cast<MpiOrigin>(origin);
  plan->hosts.resize(unpacker.count());
  for (PlannedHost& host : plan->hosts) {
    host.host.name = unpacker.text();
    host.crowded = unpacker.number() != 0;
    host.clients.resize(unpacker.count());
    for (PmixClient& client : host.clients) {
      client.rank = static_cast<uint32_t>(unpacker.number());
      client.pid = static_cast<int64_t>(unpacker.number());
      client.start_time = unpacker.number();
      client.uid = static_cast<uint32_t>(unpacker.number());
      client.gid = static_cast<uint32_t>(unpacker.number());
      host.host.ranks.push_back(client.rank);
    }
  }
  plan->addresses = unpacker.texts();
  return unpacker.whole() && origin <= static_cast<uint64_t>(MpiOrigin::kProgram);
}

// What libpmix's lists of hosts can carry: letters, digits, points and dashes.
std::string plain_name(const std::string& name) {
  std::string plain;
  for (char letter : name)
    plain += std::isalnum(static_cast<unsigned char>(letter)) || letter == '.' ? letter : '-';
  return plain.empty() ? "host" : plain;
}

std::string join(const std::vector<std::string>& texts) {
  std::string joined;
  for (const std::string& text : texts) joined += (joined.empty() ? "" : ",") + text;
  return joined;
}

}  // namespace

const char* origin_name(MpiOrigin origin) {
  switch (origin) {
    case MpiOrigin::kHelper:
      return "dscomm-pmix";
    case MpiOrigin::kLauncher:
      return "the launcher";
    case MpiOrigin::kProgram:
      return "the program";
  }
  return "?";
}

class BringUp {
 public:
  BringUp(const TransportRequest& request, std::shared_ptr<Store> store, const Deadline& deadline,
          const std::string& helper_path, const Look& look)
      : request_(request),
        store_(std::move(store)),
        deadline_(deadline),
        helper_path_(helper_path),
        prefix_(request.prefix + "mpi/"),
        exchange_(*store_, exchange_request(look), deadline) {}

  Result<std::unique_ptr<MpiWorld>> run() {
    Status status = steps();
    if (status.ok()) return std::move(world_);
    return Status(status.code(), "MPI between hosts could not be started: " + status.message());
  }

 private:
  Status steps() {
    step_ = "agreeing on how to start MPI";
    DSCOMM_RETURN_IF_ERROR(own(check_own_mpi()));
    DSCOMM_RETURN_IF_ERROR(agree_on_plan());
    world_ = std::make_unique<MpiWorld>(plan_.origin, nullptr);
    if (plan_.origin == MpiOrigin::kHelper) DSCOMM_RETURN_IF_ERROR(get_environment());
    if (plan_.origin != MpiOrigin::kProgram) DSCOMM_RETURN_IF_ERROR(initialise());
    DSCOMM_RETURN_IF_ERROR(agree_on_world());
    return make_communicator();
  }

  // --- what goes wrong

  int size() const { return static_cast<int>(request_.members.size()); }
  std::string name(int rank) const { return name_member(request_.members, rank); }

  ExchangeRequest exchange_request(const Look& look) const {
    ExchangeRequest exchange;
    exchange.prefix = prefix_;
    exchange.rank = request_.rank;
    exchange.size = size();
    exchange.name = [this](int rank) { return name(rank); };
    exchange.look = look;
    return exchange;
  }

  Status at_step(const Status& status) const {
    return Status(status.code(), std::string(step_) + " failed on " + name(request_.rank) + ": " +
                                     status.message());
  }

  // A status of this rank's own step: the others raise it too. One that came from another rank is
  // passed on as it is.
  Status own(const Status& status) {
    return status.ok() || exchange_.is_told() ? status : exchange_.fail(at_step(status));
  }

  Status look() { return exchange_.look(); }

  Status garbled(int rank) const {
    return Status(Code::kInternal, "what " + name(rank) +
                                       " said is not understood; do all ranks run one build of "
                                       "dscomm?");
  }

  // --- how to start MPI

  // What this process alone can say.
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
                  "calls MPI from threads of its own; ask MPI_Init_thread for it (in mpi4py: "
                  "mpi4py.rc.thread_level = 'multiple' before MPI is imported), or let dscomm "
                  "initialise MPI");
  }

  Status agree_on_plan() {
    Result<std::string> plan =
        exchange_.agree("plan", pack(own_entry()),
                        [this](const std::vector<std::string>& said) -> Result<std::string> {
                          std::vector<MemberEntry> entries(said.size());
                          for (size_t rank = 0; rank < entries.size(); ++rank)
                            if (!unpack(said[rank], &entries[rank]))
                              return at_step(garbled(static_cast<int>(rank)));
                          Result<Plan> made = make_plan(entries);
                          if (!made.ok()) return at_step(made.status());
                          return pack(made.value());
                        });
    if (!plan.ok()) return plan.status();
    if (!unpack(plan.value(), &plan_)) return own(garbled(0));
    for (size_t host = 0; host < plan_.hosts.size(); ++host)
      for (uint32_t rank : plan_.hosts[host].host.ranks)
        if (rank == static_cast<uint32_t>(request_.rank)) own_host_ = host;
    return {};
  }

  Result<Plan> make_plan(const std::vector<MemberEntry>& entries) const {
    for (int rank = 1; rank < size(); ++rank) {
      const MemberEntry& one = entries[0];
      const MemberEntry& other = entries[static_cast<size_t>(rank)];
      if (one.mpi_version != other.mpi_version)
        return Status(Code::kUnsupported, name(0) + " has " + one.mpi_version + " and " +
                                              name(rank) + " has " + other.mpi_version +
                                              "; install the same MPI on all hosts");
      if (one.initialised != other.initialised)
        return Status(Code::kUnsupported,
                      "MPI has been initialised already in " + name(one.initialised ? 0 : rank) +
                          " but not in " + name(one.initialised ? rank : 0) +
                          "; initialise it in all ranks before the first group that spans hosts, "
                          "or in none");
    }
    Plan plan;
    plan.origin = entries[0].initialised       ? MpiOrigin::kProgram
                  : launcher_made_job(entries) ? MpiOrigin::kLauncher
                                               : MpiOrigin::kHelper;
    plan.hosts = place(entries);
    std::set<std::string> addresses;
    for (const MemberEntry& entry : entries)
      addresses.insert(entry.addresses.begin(), entry.addresses.end());
    plan.addresses.assign(addresses.begin(), addresses.end());
    return plan;
  }

  // Whether one launcher has made exactly the members an MPI job. Workers of a torchrun that a
  // launcher started once per host have all inherited one rank; and MPI_Init_thread waits for all
  // ranks of a launcher's job, so it must not have others.
  static bool launcher_made_job(const std::vector<MemberEntry>& entries) {
    std::set<std::string> ranks;
    for (const MemberEntry& entry : entries) {
      if (entry.name_space.empty() || entry.name_space != entries[0].name_space) return false;
      if (entry.launcher_size != 0 && entry.launcher_size != entries.size()) return false;
      ranks.insert(entry.launcher_rank);
    }
    return ranks.size() == entries.size();
  }

  // The hosts as MPI shall see them: ranks of a host in different containers are on different ones.
  std::vector<PlannedHost> place(const std::vector<MemberEntry>& entries) const {
    std::vector<PlannedHost> hosts;
    std::map<std::pair<int, std::string>, size_t> known;
    std::map<int, std::vector<size_t>> ranks_by_host;
    std::set<std::string> names;
    for (size_t rank = 0; rank < entries.size(); ++rank) {
      const MemberEntry& entry = entries[rank];
      const TransportMember& member = request_.members[rank];
      ranks_by_host[member.host].push_back(rank);
      auto [found, is_new] = known.try_emplace({member.host, entry.place}, hosts.size());
      if (is_new) {
        std::string plain = plain_name(member.host_name), unique = plain;
        for (int count = 2; !names.insert(unique).second; ++count)
          unique = plain + "-" + std::to_string(count);
        hosts.emplace_back().host.name = unique;
      }
      hosts[found->second].clients.push_back(
          {static_cast<uint32_t>(rank), entry.pid, entry.start_time, entry.uid, entry.gid});
    }
    for (PlannedHost& host : hosts) {
      const size_t leader = host.clients.front().rank;
      host.crowded = crowded(entries, ranks_by_host[request_.members[leader].host]);
    }
    return hosts;
  }

  static bool crowded(const std::vector<MemberEntry>& entries, const std::vector<size_t>& ranks) {
    std::vector<std::string> cpu_lists;
    double quota = 1e9;
    for (size_t rank : ranks) {
      cpu_lists.push_back(entries[rank].cpu_list);
      if (entries[rank].quota_millicpus != 0)
        quota = std::min(quota, static_cast<double>(entries[rank].quota_millicpus) / 1000);
    }
    return static_cast<int>(ranks.size()) > usable_cores(cpu_lists, quota);
  }

  // --- a job of our own

  Status get_environment() {
    step_ = "starting dscomm-pmix";
    const std::vector<PmixClient>& clients = plan_.hosts[own_host_].clients;
    const int leader = static_cast<int>(clients.front().rank);
    if (leader == request_.rank) DSCOMM_RETURN_IF_ERROR(start_helper(clients));
    const std::string mine = "environment/" + std::to_string(request_.rank);
    Result<std::string> text = exchange_.await(mine, deadline_);
    if (text.status().code() == Code::kTimeout && !exchange_.is_told())
      return own(make_status(Code::kTimeout, "timed out: nothing was heard from %s within %lld ms",
                             name(leader).c_str(), static_cast<long long>(deadline_.timeout_ms())));
    if (!text.ok()) return own(text.status());
    exchange_.remove(mine);
    Unpacker unpacker(text.value());
    own_variables_ = unpacker.texts();
    defaults_ = unpacker.texts();
    return unpacker.whole() ? Status() : own(garbled(leader));
  }

  Status start_helper(const std::vector<PmixClient>& clients) {
    PmixDescription description;
    char text[32];
    std::snprintf(text, sizeof text, "dscomm-%016llx",
                  static_cast<unsigned long long>(request_.id));
    description.name_space = text;
    description.own_host = static_cast<uint32_t>(own_host_);
    for (const PlannedHost& host : plan_.hosts) {
      description.hosts.push_back(host.host);
      description.hosts.back().ranks.clear();
      for (const PmixClient& client : host.clients)
        description.hosts.back().ranks.push_back(client.rank);
    }
    description.clients = clients;
    description.verbose = log_enabled(LogLevel::kDebug);
    Result<std::unique_ptr<PmixHelper>> helper =
        PmixHelper::start(helper_path_, description, deadline_, [this] { return look(); });
    if (!helper.ok()) return own(helper.status());
    world_->helper_ = std::move(helper).value();
    DSCOMM_RETURN_IF_ERROR(own(world_->helper_->serve(store_, prefix_ + "fence/")));
    const PmixEnvironments& environments = world_->helper_->environments();
    for (size_t i = 0; i < clients.size(); ++i)
      DSCOMM_RETURN_IF_ERROR(own(exchange_.publish(
          "environment/" + std::to_string(clients[i].rank),
          Packer().texts(environments.own[i]).texts(environments.defaults).take())));
    return {};
  }

  // What MPI_Init_thread shall find in the environment.
  void prepare(EnvironmentForStart& environment) {
    if (plan_.origin == MpiOrigin::kHelper) {
      environment.put_launcher_aside();
      for (const std::string& variable : own_variables_) environment.set(variable);
      for (const std::string& variable : defaults_) environment.set_default(variable);
      // Open MPI takes a process that no daemon of its own started for a job of one, unless a
      // launcher that it knows did. IBM's jsrun is one that leaves everything to PMIx.
      environment.set_default("JSM_JSRUN_PORT=0");
      environment.set_default("OMPI_MCA_schizo=jsm");
      // Waiting ranks burn the cores of others, unless they are told that there are too few.
      if (plan_.hosts[own_host_].crowded) environment.set_default("OMPI_MCA_mpi_yield_when_idle=1");
      if (!has_fast_network()) leave_out_fast_networks(environment);
    }
    networks_told_ = networks_for_mpi();
    if (!networks_told_.empty())
      environment.set_over_files("OMPI_MCA_btl_tcp_if_include=" + networks_told_);
    const PortRange ports = parse_ports(request_.settings.ports).value_or(PortRange{});
    if (ports.is_any()) return;
    for (const std::string family : {"v4", "v6"}) {
      environment.set_over_files("OMPI_MCA_btl_tcp_port_min_" + family + "=" +
                                 std::to_string(ports.first));
      environment.set_over_files("OMPI_MCA_btl_tcp_port_range_" + family + "=" +
                                 std::to_string(ports.last - ports.first + 1));
    }
  }

  // The libraries for fast networks take 0.2 s to find that there is none. A file that excludes
  // some of them is added to; one that chooses stays as it is.
  void leave_out_fast_networks(EnvironmentForStart& environment) const {
    const auto chooses = [](const std::string& list) { return !list.empty() && list[0] != '^'; };
    const std::string mtl = file_value("mtl");
    if (chooses(mtl) || chooses(file_value("pml"))) return;
    environment.set_over_files("OMPI_MCA_mtl=" + (mtl.empty() ? "^" : mtl + ",") + "ofi,psm,psm2");
  }

  std::string file_value(const std::string& parameter) const {
    auto found = files_.find(parameter);
    return found == files_.end() ? "" : found->second;
  }

  // Open MPI tries all interfaces, also a bridge of containers that has the same address on every
  // host and leads nowhere: then the first message never arrives. Launchers are configured by their
  // administrators, so only a user's wish is told to those. Open MPI refuses to be told both what
  // to include and what to exclude.
  std::string networks_for_mpi() const {
    if (!environment_value("OMPI_MCA_btl_tcp_if_exclude").empty()) return "";
    if (files_.contains("btl_tcp_if_exclude")) {
      if (!request_.settings.ifname.empty())
        log_line(
            LogLevel::kWarn,
            "MPI is not told of DSCOMM_IFNAME=%s, because a file of Open MPI's parameters sets "
            "btl_tcp_if_exclude = %s; set btl_tcp_if_include there instead",
            request_.settings.ifname.c_str(), file_value("btl_tcp_if_exclude").c_str());
      return "";
    }
    if (!request_.settings.ifname.empty()) return request_.settings.ifname;
    if (plan_.origin != MpiOrigin::kHelper || !file_value("btl_tcp_if_include").empty()) return "";
    const std::vector<std::string> common = common_networks(request_.members);
    // Hosts in subnets of their own, with routers in between.
    return join(
        as_mpi_reads(common.empty() ? distinct_networks(request_.members, request_.rank) : common));
  }

  // Open MPI reads networks of IPv4 alone; where there are only others, the names of the interfaces
  // of this host that are in them.
  static std::vector<std::string> as_mpi_reads(std::vector<std::string> networks) {
    const auto is_v6 = [](const std::string& network) {
      return network.find(':') != std::string::npos;
    };
    if (!std::all_of(networks.begin(), networks.end(), is_v6)) {
      std::erase_if(networks, is_v6);
      return networks;
    }
    std::vector<std::string> names;
    const std::vector<Interface> own = own_interfaces();
    for (const std::string& network : networks)
      for (const Interface& interface : own)
        if (select_networks({interface}, network).ok() &&
            std::find(names.begin(), names.end(), interface.name) == names.end())
          names.push_back(interface.name);
    return names;
  }

  // --- MPI

  Status initialise() {
    step_ = "MPI_Init_thread";
    struct Answer {
      int code = MPI_SUCCESS, level = 0;
    };
    auto answer = std::make_shared<Answer>();
    Status status;
    {
      EnvironmentForStart environment(files_);
      prepare(environment);
      guard_mpi_listeners(plan_.addresses, carries_token());
      initialisation_left_behind.store(true);
      status = run_abandonable(
          step_,
          [answer] {
            answer->code = guarded_blocking([&] {
              return MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &answer->level);
            });
          },
          deadline_, [this] { return look_at_start(); });
    }
    if (!status.ok()) return own(explain_timeout(status));
    initialisation_left_behind.store(false);
    if (answer->code != MPI_SUCCESS) return own(mpi_error("MPI_Init_thread", answer->code));
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    if (plan_.origin == MpiOrigin::kHelper) {
      std::vector<std::string> given = own_variables_;
      given.insert(given.end(), defaults_.begin(), defaults_.end());
      survive_lost_helper(given);
    }
    return own(check_thread_level(answer->level));
  }

  Status look_at_start() {
    if (world_->helper_ != nullptr) DSCOMM_RETURN_IF_ERROR(world_->helper_->fault());
    return look();
  }

  Status explain_timeout(const Status& status) const {
    if (status.code() != Code::kTimeout || exchange_.is_told()) return status;
    std::string reason;
    if (plan_.origin == MpiOrigin::kLauncher)
      reason =
          "; it waits for all ranks of the launcher's job, so all of them must be in the first "
          "group that spans hosts";
    else if (world_->helper_ != nullptr && !world_->helper_->waiting_for().empty())
      reason = "; it waits for the ranks of " + world_->helper_->waiting_for();
    return Status(status.code(), status.message() + reason);
  }

  Status agree_on_world() {
    step_ = "agreeing on MPI's ranks";
    int rank = 0, world_size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    Result<std::string> world =
        exchange_.agree("world",
                        Packer()
                            .number(static_cast<uint64_t>(rank))
                            .number(static_cast<uint64_t>(world_size))
                            .number(carries_token() && are_hooks_called())
                            .take(),
                        [this](const std::vector<std::string>& said) -> Result<std::string> {
                          Packer all;
                          std::vector<WorldPlace> places(said.size());
                          for (size_t member = 0; member < places.size(); ++member) {
                            Unpacker unpacker(said[member]);
                            WorldPlace& place = places[member];
                            place.rank = unpacker.number();
                            place.size = unpacker.number();
                            place.carries_token = unpacker.number() != 0;
                            if (!unpacker.whole())
                              return at_step(garbled(static_cast<int>(member)));
                            all.number(place.rank);
                          }
                          if (Status checked = check_world(places); !checked.ok())
                            return at_step(checked);
                          const bool can_all = std::all_of(
                              places.begin(), places.end(),
                              [](const WorldPlace& place) { return place.carries_token; });
                          return all.text(can_all ? random_token() : "").take();
                        });
    if (!world.ok()) return world.status();
    Unpacker unpacker(world.value());
    for (int member = 0; member < size(); ++member)
      world_->world_ranks_.push_back(static_cast<int>(unpacker.number()));
    const std::string token = unpacker.text();
    if (!unpacker.whole()) return own(garbled(0));
    admit_greetings(token);
    if (token.empty() && plan_.origin != MpiOrigin::kProgram)
      log_line(LogLevel::kInfo, "MPI's connections over TCP need no token");
    return {};
  }

  // Whether nobody connects before all ranks have agreed on a token. MPI may be told to connect all
  // in MPI_Init_thread, and to connect at any time.
  bool carries_token() const {
    return plan_.origin != MpiOrigin::kProgram && !is_set("mpi_preconnect_mpi") &&
           !is_set("btl_tcp_progress_thread");
  }

  bool is_set(const std::string& parameter) const {
    std::string value = environment_value("OMPI_MCA_" + parameter);
    if (value.empty()) value = file_value(parameter);
    return !value.empty() && value != "0" && value != "false";
  }

  Status check_world(const std::vector<WorldPlace>& places) const {
    std::set<uint64_t> ranks;
    for (int member = 0; member < size(); ++member) {
      const WorldPlace& place = places[static_cast<size_t>(member)];
      const bool fits =
          ranks.insert(place.rank).second && place.rank < place.size &&
          place.size == places[0].size && place.size >= places.size() &&
          (plan_.origin != MpiOrigin::kHelper || place.rank == static_cast<uint64_t>(member));
      if (fits) continue;
      const char* advice =
          plan_.origin == MpiOrigin::kProgram
              ? "MPI was initialised before dscomm was asked to: let dscomm do it (in mpi4py: "
                "mpi4py.rc.initialize = False before MPI is imported), or start all ranks with one "
                "mpirun"
              : "is there another Open MPI on the library path, or a setting for it in the "
                "environment?";
      return make_status(Code::kUnsupported,
                         "%s came up as rank %llu of %llu in MPI_COMM_WORLD, which is not one "
                         "world of the %d ranks; %s",
                         name(member).c_str(), static_cast<unsigned long long>(place.rank),
                         static_cast<unsigned long long>(place.size), size(), advice);
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
    const bool ours = plan_.origin != MpiOrigin::kProgram;
    const Look ends = [this] { return look(); };
    // The program may use this tag.
    Status status =
        ours ? meet(MPI_COMM_WORLD, world_->world_ranks_, kMeetTags + kGroupTag, deadline_, ends,
                    [this](size_t member) { return name(static_cast<int>(member)); })
             : Status();
    if (status.ok()) {
      step_ = "MPI_Comm_create_group";
      status = run_abandonable(
          step_,
          [answer, ours, ranks = world_->world_ranks_] {
            answer->code = create(ranks, ours, &answer->comm);
          },
          deadline_, ends);
    }
    if (status.code() == Code::kTimeout && !exchange_.is_told())
      status = Status(status.code(), status.message() +
                                         ": the first messages between the hosts do not arrive; " +
                                         networks_used());
    if (!status.ok()) return own(status);
    if (answer->code != MPI_SUCCESS)
      return own(reason_or(mpi_error(step_, answer->code), deadline_, ends));
    world_->comm_ = answer->comm;
    if (world_->helper_ != nullptr) world_->helper_->remove_keys();
    exchange_.finish();
    log_line(LogLevel::kInfo,
             "MPI between hosts is up: %s, started by way of %s; rank %d of %d; %s",
             mpi_version().c_str(), origin_name(plan_.origin), request_.rank, size(),
             networks_used().c_str());
    return {};
  }

  static int create(const std::vector<int>& ranks, bool ours, MPI_Comm* comm) {
    // The program's own handler stays the program's.
    MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
    if (!ours) {
      MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
      MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    }
    MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
    int code = MPI_Comm_group(MPI_COMM_WORLD, &all);
    if (code == MPI_SUCCESS)
      code = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members);
    if (code == MPI_SUCCESS)
      code = guarded_blocking(
          [&] { return MPI_Comm_create_group(MPI_COMM_WORLD, members, kGroupTag, comm); });
    if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN);
    if (members != MPI_GROUP_NULL) MPI_Group_free(&members);
    if (all != MPI_GROUP_NULL) MPI_Group_free(&all);
    if (!ours) {
      MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
      MPI_Errhandler_free(&handler);
    }
    return code;
  }

  std::string networks_used() const {
    std::string chosen = environment_value("OMPI_MCA_btl_tcp_if_include");
    if (chosen.empty()) chosen = networks_told_;
    if (chosen.empty()) chosen = file_value("btl_tcp_if_include");
    if (chosen.empty())
      return "MPI chooses the networks by itself; DSCOMM_IFNAME can name the interface that joins "
             "the hosts";
    return "over TCP MPI uses " + chosen + "; DSCOMM_IFNAME can name another interface";
  }

  const TransportRequest& request_;
  std::shared_ptr<Store> store_;
  const Deadline& deadline_;
  const std::string& helper_path_;
  const std::string prefix_;
  StoreExchange exchange_;
  const McaParameters files_ = parameters_of_mca_files();

  const char* step_ = "";
  Plan plan_;
  size_t own_host_ = 0;  // in plan_.hosts
  std::vector<std::string> own_variables_, defaults_;
  std::string networks_told_;  // to MPI
  std::unique_ptr<MpiWorld> world_;
};

void MpiWorld::leave(const Deadline& deadline) {
  if (left_.exchange(true)) return;
  if (helper_ != nullptr) helper_->quit();
  tidy_up_for_lost_helper();
  if (origin_ != MpiOrigin::kLauncher || mpi_gave_up()) return;
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (finalised != 0) return;
  Status status = run_abandonable(
      "MPI_Finalize", [] { (void)guarded_blocking([] { return MPI_Finalize(); }); }, deadline,
      [] { return Status(); });
  if (!status.ok()) log_line(LogLevel::kWarn, "%s", status.message().c_str());
}

void MpiWorld::close_descriptors() {
  left_.store(true);
  if (helper_ != nullptr) helper_->close_descriptors();
}

Result<std::unique_ptr<MpiWorld>> bring_up(const TransportRequest& request,
                                           std::shared_ptr<Store> store, const Deadline& deadline,
                                           const std::string& helper_path, const Look& look) {
  return BringUp(request, std::move(store), deadline, helper_path, look).run();
}

}  // namespace dscomm
