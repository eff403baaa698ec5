// The PMIx server of one host: implements libpmix's callbacks.
//
// libpmix answers the ranks of this host on its own thread. It calls back for requests that involve
// other hosts: a fence, once all ranks of this host have entered it. libpmix allows one server per
// process.
#pragma once

#include <pmix_server.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/owned.h"
#include "pmix/messages.h"

namespace dscomm {

class PmixServer {
 public:
  PmixServer() = default;
  ~PmixServer();

  // Starts the server. libpmix and Open MPI put this host's shared files below `directory`. Returns
  // an empty string, or an error.
  std::string start(const PmixDescription& description, const std::string& directory);
  // By client; valid after start().
  const std::vector<std::vector<std::string>>& environments() const { return environments_; }

  // Whether a rank has ever connected. Such ranks die if the server ends before them.
  bool has_been_used() const { return used_.load(); }

  // Sends a request without effect to libpmix's thread. The answer makes take_probe() true once.
  void probe();
  bool take_probe() { return probed_.exchange(false); }

  // Readable when there are fences to take, or an answer to a probe.
  int fd() const { return wakeup_.get(); }
  std::vector<PmixFence> take_fences();
  void complete(const PmixFenceResult& result);

 private:
  struct Waiting {
    pmix_modex_cbfunc_t answer;
    void* context;
  };

  std::string register_job(const std::string& directory);
  std::string register_clients();

  static pmix_status_t on_connected(const pmix_proc_t*, void*, pmix_op_cbfunc_t, void*);
  static pmix_status_t on_finalized(const pmix_proc_t*, void*, pmix_op_cbfunc_t, void*);
  static pmix_status_t on_abort(const pmix_proc_t*, void*, int, const char*, pmix_proc_t*, size_t,
                                pmix_op_cbfunc_t, void*);
  static pmix_status_t on_fence(const pmix_proc_t* ranks, size_t rank_count, const pmix_info_t*,
                                size_t, char* data, size_t bytes, pmix_modex_cbfunc_t answer,
                                void* context);
  static pmix_status_t on_direct_modex(const pmix_proc_t*, const pmix_info_t*, size_t,
                                       pmix_modex_cbfunc_t, void*);
  static pmix_status_t on_job_control(const pmix_proc_t*, const pmix_proc_t*, size_t,
                                      const pmix_info_t*, size_t, pmix_info_cbfunc_t, void*);
  static void on_probed(pmix_status_t, void*);
  void wake_main_thread();
  pmix_status_t begin_fence(const pmix_proc_t* ranks, size_t rank_count, std::string data,
                            Waiting waiting);

  static PmixServer* the_server;

  PmixDescription description_;
  std::vector<std::vector<std::string>> environments_;
  bool initialised_ = false;
  UniqueFd wakeup_;  // eventfd
  std::atomic<bool> used_{false};
  // on_probed() sets it before it wakes the main thread, which takes it in take_probe().
  std::atomic<bool> probed_{false};

  // libpmix's thread adds to these; the main thread takes from them.
  std::mutex mutex_;
  uint64_t fences_begun_ = 0;
  std::map<std::string, uint64_t> begun_by_name_;
  std::map<uint64_t, Waiting> waiting_;  // by number
  std::vector<PmixFence> fences_;
};

}  // namespace dscomm
