// Starts MPICH: a PmiServer in each rank's process serves MPI_Init_thread; environment variables
// configure the rest.
#include "mpi/start.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/packer.h"
#include "core/base/settings.h"
#include "core/transport/networks.h"
#include "mpi/call_watch.h"
#include "mpi/host_networks.h"
#include "mpi/mpich/exit_hook.h"
#include "mpi/mpich/listeners.h"
#include "mpi/mpich/pmi_server.h"
#include "mpi/mpich/pmi_session.h"

namespace dscomm {
namespace {

// Variables that launchers set to identify a rank or its PMI version.
bool identifies_a_rank(std::string_view name) {
  return name.ends_with("_PMI_VERSION") || name.starts_with("PMI_") || name.starts_with("PMI2_") ||
         (name.starts_with("PMIX_") && !name.starts_with("PMIX_MCA_"));
}

// Removes MPICH's shared-memory files. MPI_Init_thread makes them, even for a single rank, and only
// MPI_Finalize removes them: a rank that exits without it, or is killed, leaves them. Call it once
// the ranks of this host have mapped the files: without names, they disappear with the last of
// these ranks.
void remove_names_of_shared_files() {
  std::set<std::string> mapped;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (const size_t begin = line.find("/dev/shm/mpich_shm_"); begin != std::string::npos)
      mapped.insert(line.substr(begin, line.find(' ', begin) - begin));
  for (const std::string& file : mapped) ::unlink(file.c_str());
}

class MpichStart final : public MpiStart {
 public:
  MpichStart() {
    if (!hook_exit(reinterpret_cast<const void*>(&PMPI_Testall)))
      log_line(LogLevel::kInfo, "MPICH may end the process when a connection breaks");
  }

  // The first line: "MPICH Version:      5.0.2".
  std::string version() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string all(text);
    std::istringstream line(all.substr(0, all.find('\n')));
    std::string version;
    for (std::string word; line >> word;) version += (version.empty() ? "" : " ") + word;
    if (const size_t word = version.find(" Version: "); word != std::string::npos)
      version.replace(word, sizeof " Version: " - 1, " ");
    return version;
  }

  // Leaves the launcher's fields empty: unless the program has initialised MPICH, dscomm starts it.
  void describe(MpiMemberEntry* entry) const override { entry->mpi_version = version(); }

  const char* helper_name() const override { return "dscomm's PMI"; }

  Status get_ready(StartContext& context) override {
    if (!has_fast_network()) DSCOMM_RETURN_IF_ERROR(choose_networks(context.request));
    std::vector<size_t> hosts;
    const int size = static_cast<int>(context.request.members.size());
    for (int rank = 0; rank < size; ++rank) hosts.push_back(context.plan.host_of(rank));
    DSCOMM_ASSIGN_OR_RETURN(server_, PmiServer::start(size, node_map_of(hosts)));
    return {};
  }

  std::unique_ptr<EnvironmentForStart> make_environment(const StartContext& context) override {
    auto environment = std::make_unique<EnvironmentForStart>(std::vector<std::string>{
        "PMI_", "PMI2_", "PMIX_", "MPIR_", "MPICH_", "I_MPI_", "FI_", "UCX_"});
    if (!version().starts_with("MPICH"))
      log_line(LogLevel::kWarn, "{} is not MPICH, with which dscomm was built and tested",
               version());
    environment->unset_if(identifies_a_rank);
    environment->set("PMI_FD=" + std::to_string(server_->client()));
    environment->set("PMI_RANK=" + std::to_string(context.request.rank));
    environment->set("PMI_SIZE=" + std::to_string(context.request.members.size()));
    if (!has_fast_network()) choose_tcp(context, *environment);
    listeners_.emplace();
    return environment;
  }

  // Serves the PMI barriers of MPI_Init_thread, which all ranks enter in the same order.
  Status check(StartContext& context) override {
    listeners_->restrict_new(context.plan.addresses);
    std::optional<std::string> put = server_->entered_barrier();
    if (!put) return {};
    DSCOMM_ASSIGN_OR_RETURN(const std::string all,
                            context.exchange.agree("pmi" + std::to_string(barriers_++), *put,
                                                   pack<std::vector<std::string>>));
    std::vector<std::string> said;
    if (!unpack(all, &said)) return malformed_value("message from rank 0");
    return server_->end_barrier(said);
  }

  void has_started(const StartContext& context) override {
    server_->let_through();
    listeners_->restrict_new(context.plan.addresses);
    if (listeners_->count() == 0)
      log_line(LogLevel::kInfo, "MPI's port was not found: anybody may connect to it");
  }

  bool blocks_to_connect() const override { return true; }

  void has_met(bool are_all_connected) override {
    if (server_ != nullptr) remove_names_of_shared_files();
    // A call that sends to a departed rank retries its connection for ever, and must be left. One
    // that first connects to a slow rank looks the same, but must not be left. Once all ranks are
    // connected, no call needs to connect first.
    if (are_all_connected) watch_calls_closely();
  }

  std::string networks_used() const override {
    std::string chosen = environment_value("FI_TCP_IFACE");
    if (chosen.empty()) chosen = interface_;
    if (chosen.empty())
      return "MPI chooses the network by itself; FI_TCP_IFACE can name that between the hosts";
    return "over TCP MPI uses " + chosen + "; FI_TCP_IFACE can name another interface";
  }

  void close_descriptors() override {
    if (server_ != nullptr) server_->close_descriptors();
  }

 private:
  // By default MPICH searches for fast networks, and may choose an interface that leads nowhere.
  void choose_tcp(const StartContext& context, EnvironmentForStart& environment) {
    environment.set_default("MPIR_CVAR_CH4_NETMOD=ofi");
    environment.set_default("FI_PROVIDER=tcp");
    // dscomm has its own shared memory.
    environment.set_default("MPIR_CVAR_NOLOCAL=1");
    // By default libfabric buffers 64 unexpected messages of a peer and then stops reading from it,
    // which can hold back the message that a rank waits for.
    environment.set_default("FI_TCP_MAX_SAVED=1000000");
    if (const auto names = interfaces_in(networks_); !names.empty()) interface_ = names.front();
    if (!interface_.empty()) environment.set_default("FI_TCP_IFACE=" + interface_);
    const PortRange all = parse_ports(context.request.settings.ports).value_or(PortRange{});
    if (all.is_any()) return;
    // If libfabric binds two ranks of a host to one port at the same time, both succeed, but the
    // second cannot listen.
    const auto& members = context.request.members;
    const auto own = members.begin() + context.request.rank;
    const auto is_here = [&](const TransportMember& member) { return member.host == own->host; };
    const PortRange ports =
        ports_of_rank(all, static_cast<int>(std::count_if(members.begin(), own, is_here)),
                      static_cast<int>(std::count_if(members.begin(), members.end(), is_here)));
    environment.set_default("FI_TCP_PORT_LOW_RANGE=" + std::to_string(ports.first));
    environment.set_default("FI_TCP_PORT_HIGH_RANGE=" + std::to_string(ports.last));
  }

  // Fails if all networks are IPv6: libfabric takes a link-local address, which it cannot bind.
  Status choose_networks(const TransportRequest& request) {
    networks_ = networks_between_hosts(request);
    if (const std::string& wanted = request.settings.ifname; !wanted.empty())
      if (auto selected = select_networks(own_interfaces(), wanted); selected.ok())
        networks_ = std::move(selected).value();
    const bool had_any = !networks_.empty();
    networks_ = only_ipv4(networks_);
    if (!had_any || !networks_.empty() || !environment_value("FI_TCP_IFACE").empty()) return {};
    return Status(Code::kUnsupported,
                  "MPICH's connections over TCP need IPv4, and the networks chosen have only IPv6; "
                  "name others in DSCOMM_IFNAME, or use Open MPI (DSCOMM_MPI=openmpi)");
  }

  std::shared_ptr<PmiServer> server_;
  std::optional<NewListeners> listeners_;  // since MPI_Init_thread began
  int barriers_ = 0;
  std::vector<std::string> networks_;  // for MPI over TCP
  std::string interface_;              // given to MPI
};

}  // namespace

std::unique_ptr<MpiStart> make_mpi_start() { return std::make_unique<MpichStart>(); }

}  // namespace dscomm
