#include "pmix/server.h"

#include <pmix.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstdlib>
#include <ranges>
#include <set>
#include <string_view>

#include "core/base/format.h"

namespace dscomm {
namespace {

// An array of libpmix's key-value pairs; libpmix copies them.
class InfoList {
 public:
  InfoList() = default;
  InfoList(const InfoList&) = delete;
  InfoList& operator=(const InfoList&) = delete;
  ~InfoList() {
    for (pmix_info_t& info : infos_) PMIX_INFO_DESTRUCT(&info);
  }

  void text(const char* key, const std::string& value) { load(key, value.c_str(), PMIX_STRING); }
  void flag(const char* key, bool value) { load(key, &value, PMIX_BOOL); }
  void rank(const char* key, pmix_rank_t value) { load(key, &value, PMIX_PROC_RANK); }
  void number16(const char* key, size_t value) {
    auto narrow = static_cast<uint16_t>(value);
    load(key, &narrow, PMIX_UINT16);
  }
  void number32(const char* key, size_t value) {
    auto narrow = static_cast<uint32_t>(value);
    load(key, &narrow, PMIX_UINT32);
  }
  void regex(const char* key, const char* value) { load(key, value, PMIX_REGEX); }
  void list(const char* key, InfoList& entries) {
    pmix_data_array_t array{};
    array.type = PMIX_INFO;
    array.size = entries.infos_.size();
    array.array = entries.infos_.data();
    load(key, &array, PMIX_DATA_ARRAY);
  }

  pmix_info_t* data() { return infos_.data(); }
  size_t size() const { return infos_.size(); }

 private:
  void load(const char* key, const void* value, pmix_data_type_t type) {
    pmix_info_t info{};
    PMIx_Info_load(&info, key, value, type);
    infos_.push_back(info);
  }
  std::vector<pmix_info_t> infos_;
};

bool done(pmix_status_t status) {
  return status == PMIX_SUCCESS || status == PMIX_OPERATION_SUCCEEDED;
}

std::string failed(const char* what, pmix_status_t status) {
  return format_text("{} failed: {}", what, PMIx_Error_string(status));
}

std::string join_ranks(const MpiHost& host) {
  return join_text(host.ranks | std::views::transform(&RankProcess::rank), ",");
}

void release_text(void* text) { delete static_cast<std::string*>(text); }

}  // namespace

PmixServer* PmixServer::the_server = nullptr;

std::string PmixServer::start(const PmixDescription& description, const std::string& directory) {
  description_ = description;
  the_server = this;
  wakeup_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wakeup_.valid()) return "eventfd failed; raise the limit of open files (ulimit -n)";

  static pmix_server_module_t module{};
  module.client_connected = on_connected;
  module.client_finalized = on_finalized;
  module.abort = on_abort;
  module.fence_nb = on_fence;
  module.direct_modex = on_direct_modex;
  module.job_control = on_job_control;
  InfoList infos;
  infos.text(PMIX_SERVER_TMPDIR, directory);
  infos.text(PMIX_SYSTEM_TMPDIR, directory);
  infos.rank(PMIX_SERVER_RANK, description_.own_host);
  infos.text(PMIX_SERVER_NSPACE, description_.name_space + "-server");
  infos.text(PMIX_HOSTNAME, description_.hosts[description_.own_host].name);
  pmix_status_t status = PMIx_server_init(&module, infos.data(), infos.size());
  if (!done(status)) return failed("PMIx_server_init", status);
  initialised_ = true;
  std::string error = register_job(directory);
  return error.empty() ? register_clients() : error;
}

std::string PmixServer::register_job(const std::string& directory) {
  size_t rank_count = 0;
  std::vector<std::string> names, ranks;
  for (const MpiHost& host : description_.hosts) {
    rank_count += host.ranks.size();
    names.push_back(host.name);
    ranks.push_back(join_ranks(host));
  }
  char* node_map = nullptr;
  char* process_map = nullptr;
  pmix_status_t status = PMIx_generate_regex(join_text(names, ",").c_str(), &node_map);
  if (!done(status)) return failed("PMIx_generate_regex", status);
  status = PMIx_generate_ppn(join_text(ranks, ";").c_str(), &process_map);
  if (!done(status)) return failed("PMIx_generate_ppn", status);

  const MpiHost& own = description_.hosts[description_.own_host];
  const std::string job_directory = directory + "/" + description_.name_space;
  InfoList infos;
  infos.text(PMIX_JOBID, description_.name_space);
  infos.regex(PMIX_NODE_MAP, node_map);
  infos.regex(PMIX_PROC_MAP, process_map);
  infos.text(PMIX_LOCAL_PEERS, join_ranks(own));
  infos.number32(PMIX_NODEID, description_.own_host);
  infos.number32(PMIX_LOCAL_SIZE, own.ranks.size());
  infos.number32(PMIX_NUM_NODES, description_.hosts.size());
  infos.number32(PMIX_UNIV_SIZE, rank_count);
  infos.number32(PMIX_JOB_SIZE, rank_count);
  infos.number32(PMIX_MAX_PROCS, rank_count);
  infos.number32(PMIX_JOB_NUM_APPS, 1);
  infos.number32(PMIX_APPNUM, 0);
  infos.text(PMIX_TMPDIR, directory);
  infos.text(PMIX_NSDIR, job_directory);
  infos.flag(PMIX_TDIR_RMCLEAN, true);
  for (size_t host = 0; host < description_.hosts.size(); ++host) {
    const MpiHost& node = description_.hosts[host];
    for (size_t local = 0; local < node.ranks.size(); ++local) {
      uint32_t rank = node.ranks[local].rank;
      InfoList process;
      process.rank(PMIX_RANK, rank);
      process.number32(PMIX_NODEID, host);
      process.text(PMIX_HOSTNAME, node.name);
      process.number16(PMIX_LOCAL_RANK, local);
      process.number16(PMIX_NODE_RANK, local);
      process.number32(PMIX_APPNUM, 0);
      process.rank(PMIX_GLOBAL_RANK, rank);
      process.rank(PMIX_APP_RANK, rank);
      if (host == description_.own_host)
        process.text(PMIX_PROCDIR, format_text("{}/{}", job_directory, rank));
      infos.list(PMIX_PROC_INFO_ARRAY, process);
    }
  }
  status = PMIx_server_register_nspace(description_.name_space.c_str(),
                                       static_cast<int>(own.ranks.size()), infos.data(),
                                       infos.size(), nullptr, nullptr);
  std::free(node_map);
  std::free(process_map);
  return done(status) ? "" : failed("PMIx_server_register_nspace", status);
}

std::string PmixServer::register_clients() {
  for (const RankProcess& client : description_.clients()) {
    pmix_proc_t name{};
    PMIX_LOAD_PROCID(&name, description_.name_space.c_str(), client.rank);
    pmix_status_t status =
        PMIx_server_register_client(&name, client.uid, client.gid, nullptr, nullptr, nullptr);
    if (!done(status)) return failed("PMIx_server_register_client", status);
    char** environment = nullptr;
    status = PMIx_server_setup_fork(&name, &environment);
    if (!done(status)) return failed("PMIx_server_setup_fork", status);
    std::vector<std::string>& own = environments_.emplace_back();
    for (char** entry = environment; entry != nullptr && *entry != nullptr; ++entry) {
      own.emplace_back(*entry);
      std::free(*entry);
    }
    std::free(environment);
  }
  return "";
}

PmixServer::~PmixServer() {
  if (initialised_) (void)PMIx_server_finalize();
}

pmix_status_t PmixServer::on_connected(const pmix_proc_t*, void*, pmix_op_cbfunc_t, void*) {
  the_server->used_.store(true);
  return PMIX_OPERATION_SUCCEEDED;
}

pmix_status_t PmixServer::on_finalized(const pmix_proc_t*, void*, pmix_op_cbfunc_t, void*) {
  return PMIX_OPERATION_SUCCEEDED;
}

// A rank that calls MPI_Abort ends itself; this server does not end the others.
pmix_status_t PmixServer::on_abort(const pmix_proc_t*, void*, int, const char*, pmix_proc_t*,
                                   size_t, pmix_op_cbfunc_t, void*) {
  return PMIX_OPERATION_SUCCEEDED;
}

// Not needed, because the first fence collects the data of all ranks.
pmix_status_t PmixServer::on_direct_modex(const pmix_proc_t*, const pmix_info_t*, size_t,
                                          pmix_modex_cbfunc_t, void*) {
  return PMIX_ERR_NOT_FOUND;
}

// Only needs to be set: libpmix then registers the files that a rank wants removed at its end.
pmix_status_t PmixServer::on_job_control(const pmix_proc_t*, const pmix_proc_t*, size_t,
                                         const pmix_info_t*, size_t, pmix_info_cbfunc_t, void*) {
  return PMIX_ERR_NOT_SUPPORTED;
}

pmix_status_t PmixServer::on_fence(const pmix_proc_t* ranks, size_t rank_count, const pmix_info_t*,
                                   size_t, char* data, size_t bytes, pmix_modex_cbfunc_t answer,
                                   void* context) {
  std::string own(data == nullptr ? std::string_view() : std::string_view(data, bytes));
  return the_server->begin_fence(ranks, rank_count, std::move(own), {answer, context});
}

pmix_status_t PmixServer::begin_fence(const pmix_proc_t* ranks, size_t rank_count, std::string data,
                                      Waiting waiting) {
  bool all = rank_count == 0;
  std::set<uint32_t> named;
  for (size_t i = 0; i < rank_count; ++i) {
    if (std::string_view(ranks[i].nspace) != description_.name_space) return PMIX_ERR_NOT_SUPPORTED;
    all = all || ranks[i].rank == PMIX_RANK_WILDCARD;
    named.insert(ranks[i].rank);
  }
  PmixFence fence;
  for (size_t host = 0; host < description_.hosts.size(); ++host) {
    const auto is_named = [&](const RankProcess& process) { return named.contains(process.rank); };
    if (all || std::ranges::any_of(description_.hosts[host].ranks, is_named))
      fence.hosts.push_back(static_cast<uint32_t>(host));
  }
  // All hosts must derive one name: from the participants and the number of their fences so far.
  std::string who = "all";
  if (!all) {
    uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
    for (uint32_t rank : named) hash = (hash ^ rank) * 0x100000001b3ull;
    who = format_text("{}-{:016x}", named.size(), hash);
  }
  fence.data = std::move(data);

  std::lock_guard lock(mutex_);
  fence.number = ++fences_begun_;
  fence.name = format_text("{}/{}", who, begun_by_name_[who]++);
  waiting_[fence.number] = waiting;
  fences_.push_back(std::move(fence));
  wake_main_thread();
  return PMIX_SUCCESS;
}

// Deregisters a client that libpmix does not know. The only effect is that libpmix's thread calls
// on_probed(), which shows that the thread still runs.
void PmixServer::probe() {
  pmix_proc_t nobody{};
  PMIX_LOAD_PROCID(&nobody, "dscomm-probe", 0);
  PMIx_server_deregister_client(&nobody, on_probed, nullptr);
}

void PmixServer::on_probed(pmix_status_t, void*) {
  the_server->probed_.store(true);
  the_server->wake_main_thread();
}

void PmixServer::wake_main_thread() {
  ::eventfd_write(wakeup_.get(), 1);  // cannot fail: the counter is reset before it could overflow
}

std::vector<PmixFence> PmixServer::take_fences() {
  std::lock_guard lock(mutex_);
  eventfd_t count;
  ::eventfd_read(wakeup_.get(), &count);
  return std::exchange(fences_, {});
}

void PmixServer::complete(const PmixFenceResult& result) {
  Waiting waiting;
  {
    std::lock_guard lock(mutex_);
    auto found = waiting_.find(result.number);
    if (found == waiting_.end()) return;
    waiting = found->second;
    waiting_.erase(found);
  }
  auto* data = new std::string(result.data);
  waiting.answer(result.succeeded ? PMIX_SUCCESS : PMIX_ERR_LOST_CONNECTION, data->data(),
                 data->size(), waiting.context, release_text, data);
}

}  // namespace dscomm
