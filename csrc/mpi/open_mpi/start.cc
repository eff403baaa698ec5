// Starts Open MPI: dscomm-pmix serves MPI_Init_thread; MCA parameters configure the rest.
#include "mpi/start.h"

#include <mpi.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/format.h"
#include "core/base/log.h"
#include "core/base/packer.h"
#include "core/base/settings.h"
#include "core/transport/members.h"
#include "mpi/call_watch.h"
#include "mpi/host_networks.h"
#include "mpi/open_mpi/lost_helper.h"
#include "mpi/open_mpi/mca_files.h"
#include "mpi/open_mpi/pmix_helper.h"
#include "mpi/open_mpi/tcp_hooks.h"

namespace dscomm {
namespace {

constexpr std::string_view kMcaPrefix = "OMPI_MCA_";

bool starts_with_any(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  return std::ranges::any_of(prefixes,
                             [&](std::string_view prefix) { return name.starts_with(prefix); });
}

// Variables that mpirun and PMIx servers set to identify a rank; users set other MCA parameters.
bool identifies_a_rank(std::string_view name) {
  if (name.starts_with("PMIX_MCA_")) return false;
  if (!name.starts_with(kMcaPrefix)) return starts_with_any(name, {"OMPI_", "PMIX_", "PRTE_"});
  return starts_with_any(
             name.substr(kMcaPrefix.size()),
             {"orte_", "ess", "initial_wdir", "mpi_oversubscribe", "shmem_RUNTIME_QUERY_hint"}) ||
         name == "OMPI_MCA_pmix";
}

uint64_t launcher_size() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "FLUX_JOB_SIZE"})
    if (uint64_t size = std::strtoull(environment_value(name).c_str(), nullptr, 10)) return size;
  return 0;
}

// Converts networks for Open MPI, which reads only IPv4 networks: if there are none, returns the
// names of this host's interfaces in `networks`.
std::vector<std::string> as_mpi_reads(const std::vector<std::string>& networks) {
  const std::vector<std::string> ipv4 = only_ipv4(networks);
  return ipv4.empty() ? interfaces_in(networks) : ipv4;
}

// One dscomm-pmix per host serves MPI_Init_thread.
class OpenMpiStart final : public MpiStart {
 public:
  // The version without the builder's name, which follows a comma.
  std::string version() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string version(text);
    return version.substr(0, version.find(','));
  }

  void describe(MpiMemberEntry* entry) const override {
    entry->mpi_version = version();
    // A launcher that starts torchrun once per host gives all workers of the host the same rank,
    // and does not accept that rank again when torchrun restarts them.
    if (started_by_torchrun()) return;
    entry->name_space = environment_value("PMIX_NAMESPACE");
    entry->launcher_rank = environment_value("PMIX_RANK");
    entry->launcher_size = launcher_size();
  }

  const char* helper_name() const override { return "dscomm-pmix"; }

  Status get_ready(StartContext& context) override {
    const TransportRequest& request = context.request;
    const size_t own_host = context.plan.host_of(request.rank);
    const int leader = static_cast<int>(context.plan.hosts[own_host].ranks.front().rank);
    if (leader == request.rank) DSCOMM_RETURN_IF_ERROR(start_helper(context, own_host));
    const std::string mine = format_text("environment/{}", request.rank);
    const std::string name = name_member(request.members, leader);
    Result<std::string> text = context.exchange.await(mine, context.deadline);
    if (text.status().code() == Code::kTimeout && !context.exchange.has_read_failure())
      return make_status(Code::kTimeout,
                         "timed out: nothing was heard from {} within {}; see its output", name,
                         context.deadline.timeout_text());
    if (!text.ok()) return text.status();
    context.exchange.remove(mine);
    Unpacker unpacker(text.value());
    unpacker.fields(own_variables_, defaults_);
    return unpacker.whole() ? Status() : malformed_value("message from " + name);
  }

  std::unique_ptr<EnvironmentForStart> make_environment(const StartContext& context) override {
    auto environment = std::make_unique<EnvironmentForStart>(
        std::vector<std::string>{"OMPI_", "OPAL_", "ORTE_", "PMIX_", "PRTE_", "JSM_"});
    prepare(context, *environment);
    guard_mpi_listeners(context.plan.addresses, may_carry_token(context));
    return environment;
  }

  Status check(StartContext&) override { return helper_ == nullptr ? Status() : helper_->fault(); }

  std::string waiting_for() const override {
    return helper_ == nullptr ? "" : helper_->waiting_for();
  }

  std::string silent_helper(const StartContext& context) const override {
    return PmixHelper::silent_helper(*context.store, fence_prefix(context));
  }

  void has_started(const StartContext& context) override {
    // Watch calls from now on: at the first message to a rank MPI asks the helper, which may hang.
    watch_calls();
    if (context.plan.origin != MpiOrigin::kDscomm) return;
    std::vector<std::string> given = own_variables_;
    given.insert(given.end(), defaults_.begin(), defaults_.end());
    survive_lost_helper(given);
  }

  bool carries_token(const StartContext& context) const override {
    return may_carry_token(context) && are_hooks_called();
  }
  std::string make_token() const override { return random_token(); }
  void admit(const std::string& token) override { admit_greetings(token); }

  void has_met(bool) override {
    if (helper_ != nullptr) helper_->remove_keys();
    watch_calls();
  }

  std::string networks_used() const override {
    std::string chosen = environment_value("OMPI_MCA_btl_tcp_if_include");
    if (chosen.empty()) chosen = networks_told_;
    if (chosen.empty()) chosen = file_value("btl_tcp_if_include");
    if (chosen.empty())
      return "MPI chooses the networks by itself; see Open MPI's btl_tcp_if_include and _exclude";
    return format_text("over TCP MPI uses {}; OMPI_MCA_btl_tcp_if_include or DSCOMM_IFNAME sets it",
                       chosen);
  }

  void leave() override {
    if (helper_ != nullptr) helper_->quit();
    tidy_up_for_lost_helper();
  }

  void close_descriptors() override {
    if (helper_ != nullptr) helper_->close_descriptors();
  }

 private:
  static std::string fence_prefix(const StartContext& context) { return context.prefix + "fence/"; }

  Status start_helper(StartContext& context, size_t own_host) {
    PmixDescription description;
    description.name_space = format_text("dscomm-{:016x}", context.request.id);
    description.own_host = static_cast<uint32_t>(own_host);
    description.hosts = context.plan.hosts;
    description.verbose = log_enabled(LogLevel::kDebug);
    DSCOMM_ASSIGN_OR_RETURN(
        helper_,
        PmixHelper::start(context.helper_path, description, context.store, fence_prefix(context),
                          context.deadline, [&context] { return context.exchange.check(); }));
    DSCOMM_RETURN_IF_ERROR(helper_->serve());
    const PmixEnvironments& environments = helper_->environments();
    for (size_t i = 0; i < environments.own.size(); ++i)
      DSCOMM_RETURN_IF_ERROR(context.exchange.publish(
          format_text("environment/{}", description.clients()[i].rank),
          Packer().fields(environments.own[i], environments.defaults).take()));
    return {};
  }

  // Sets the environment of MPI_Init_thread.
  void prepare(const StartContext& context, EnvironmentForStart& environment) {
    if (context.plan.origin == MpiOrigin::kDscomm) {
      environment.unset_if(identifies_a_rank);
      for (const std::string& variable : own_variables_) environment.set(variable);
      for (const std::string& variable : defaults_) set_default(environment, variable);
      // Open MPI takes a process for a job of one rank, unless its own daemon or a known launcher
      // started it. IBM's jsrun is such a launcher, and leaves everything else to PMIx.
      set_default(environment, "JSM_JSRUN_PORT=0");
      set_default(environment, "OMPI_MCA_schizo=jsm");
      // Makes waiting ranks yield their cores if the host has more ranks than cores.
      if (context.plan.hosts[context.plan.host_of(context.request.rank)].crowded)
        set_default(environment, "OMPI_MCA_mpi_yield_when_idle=1");
      if (!has_fast_network()) leave_out_fast_networks(environment);
    }
    networks_told_ = networks_for_mpi(context);
    if (!networks_told_.empty())
      environment.set_default("OMPI_MCA_btl_tcp_if_include=" + networks_told_);
    const PortRange ports = parse_ports(context.request.settings.ports).value_or(PortRange{});
    if (ports.is_any()) return;
    for (const char* family : {"v4", "v6"}) {
      environment.set_default(format_text("OMPI_MCA_btl_tcp_port_min_{}={}", family, ports.first));
      environment.set_default(
          format_text("OMPI_MCA_btl_tcp_port_range_{}={}", family, ports.last - ports.first + 1));
    }
  }

  // Does nothing if the environment or an MCA file sets the variable.
  void set_default(EnvironmentForStart& environment, const std::string& assignment) const {
    const std::string name = assignment.substr(0, assignment.find('='));
    if (name.starts_with(kMcaPrefix) && files_.contains(name.substr(kMcaPrefix.size()))) return;
    environment.set_default(assignment);
  }

  // The libraries for fast networks take 0.2 s (Open MPI 5: 1.3 s) to find that the host has none.
  // Adds to the exclusions of an MCA file; does nothing if the file selects libraries.
  void leave_out_fast_networks(EnvironmentForStart& environment) const {
    const auto chooses = [](const std::string& list) { return !list.empty() && list[0] != '^'; };
    if (chooses(file_value("pml"))) return;
    for (const auto& [framework, libraries] : {std::pair("mtl", "ofi,psm,psm2"), {"btl", "ofi"}}) {
      const std::string list = file_value(framework);
      if (!chooses(list))
        environment.set_default(format_text("{}{}={}{}", kMcaPrefix, framework,
                                            list.empty() ? "^" : list + ",", libraries));
    }
  }

  std::string file_value(const std::string& parameter) const {
    auto found = files_.find(parameter);
    return found == files_.end() ? "" : found->second;
  }

  // Open MPI tries all interfaces, including container bridges that have the same address on every
  // host and lead nowhere: the first message then never arrives. A launcher's own configuration is
  // kept unless the user sets an interface. Returns "" if an exclude list is set, because Open MPI
  // rejects an include list together with it.
  std::string networks_for_mpi(const StartContext& context) const {
    if (!environment_value("OMPI_MCA_btl_tcp_if_exclude").empty()) return "";
    if (files_.contains("btl_tcp_if_exclude")) {
      if (!context.request.settings.ifname.empty())
        log_line(
            LogLevel::kWarn,
            "MPI is not told of DSCOMM_IFNAME={}, because a file of Open MPI's parameters sets "
            "btl_tcp_if_exclude = {}; set btl_tcp_if_include there instead",
            context.request.settings.ifname, file_value("btl_tcp_if_exclude"));
      return "";
    }
    if (!context.request.settings.ifname.empty()) return context.request.settings.ifname;
    if (context.plan.origin != MpiOrigin::kDscomm || !file_value("btl_tcp_if_include").empty())
      return "";
    return join_text(as_mpi_reads(networks_between_hosts(context.request)), ",");
  }

  // Whether no rank connects before all ranks have agreed on a token. It is not so if MPI is
  // configured to connect in MPI_Init_thread, or at any time.
  bool may_carry_token(const StartContext& context) const {
    return context.plan.origin != MpiOrigin::kProgram && !is_set("mpi_preconnect_mpi") &&
           !is_set("btl_tcp_progress_thread");
  }

  bool is_set(const std::string& parameter) const {
    std::string value = environment_value("OMPI_MCA_" + parameter);
    if (value.empty()) value = file_value(parameter);
    return !value.empty() && value != "0" && value != "false";
  }

  const McaParameters files_ = parameters_of_mca_files();
  std::unique_ptr<PmixHelper> helper_;  // on the leader of a host
  std::vector<std::string> own_variables_, defaults_;
  std::string networks_told_;  // to MPI
};

}  // namespace

std::unique_ptr<MpiStart> make_mpi_start() { return std::make_unique<OpenMpiStart>(); }

}  // namespace dscomm
