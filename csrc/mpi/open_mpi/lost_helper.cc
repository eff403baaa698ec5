#include "mpi/open_mpi/lost_helper.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pmix.h>
#include <sys/file.h>

#include <filesystem>
#include <mutex>
#include <set>

#include "core/base/log.h"
#include "core/base/owned.h"
#include "pmix/locked_directory.h"

namespace dscomm {
namespace {

// One per process. Never destroyed: PMIx calls the handler until the process ends.
struct LostHelper {
  std::mutex mutex;
  std::set<std::string> directories;  // of the helper
  bool is_lost = false, has_left = false;
  // Shared locks on the directories' lock files: a directory with one is not abandoned.
  std::vector<UniqueFd> locks;
};
LostHelper& lost_helper = *new LostHelper;

// Called on a thread of PMIx, before Open MPI's own handler, which is then not called.
void note_loss(size_t, pmix_status_t, const pmix_proc_t*, pmix_info_t*, size_t, pmix_info_t*,
               size_t, pmix_event_notification_cbfunc_fn_t done, void* data) {
  {
    std::lock_guard lock(lost_helper.mutex);
    if (!lost_helper.is_lost)
      log_line(LogLevel::kWarn,
               "dscomm-pmix, which served PMIx to the ranks of this host, has ended before them; "
               "see whether it was killed. MPI goes on without it");
    lost_helper.is_lost = true;
    // If this process has already cleaned up, it must not take the locks again.
    if (!lost_helper.has_left)
      for (const std::string& directory : lost_helper.directories) {
        UniqueFd file(::open(lock_file_of(directory).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
        if (file.valid() && ::flock(file.get(), LOCK_SH | LOCK_NB) == 0)
          lost_helper.locks.push_back(std::move(file));
      }
  }
  if (done != nullptr) done(PMIX_EVENT_ACTION_COMPLETE, nullptr, 0, nullptr, nullptr, data);
}

}  // namespace

void survive_lost_helper(const std::vector<std::string>& environment) {
  // The libpmix that Open MPI has loaded.
  void* library = ::dlopen("libpmix.so.2", RTLD_NOW | RTLD_NOLOAD);
  const auto register_handler = library == nullptr
                                    ? nullptr
                                    : reinterpret_cast<decltype(&PMIx_Register_event_handler)>(
                                          ::dlsym(library, "PMIx_Register_event_handler"));
  if (register_handler == nullptr) {
    log_line(LogLevel::kDebug,
             "Open MPI's PMIx was not found: if dscomm-pmix is killed, so are we");
    return;
  }
  {
    std::lock_guard lock(lost_helper.mutex);
    for (const std::string& variable : environment) {
      const std::filesystem::path value = variable.substr(variable.find('=') + 1);
      if (is_own_directory(value)) lost_helper.directories.insert(value);
    }
  }
  pmix_status_t codes[] = {PMIX_ERR_LOST_CONNECTION};
  // Handlers for one code run before handlers for all codes, such as Open MPI's.
  register_handler(codes, 1, nullptr, 0, &note_loss, nullptr, nullptr);
}

void tidy_up_for_lost_helper() {
  std::lock_guard lock(lost_helper.mutex);
  lost_helper.has_left = true;
  lost_helper.locks.clear();
  // Does no harm while the helper lives: the helper holds the locks, so its directories stay.
  for (const std::string& directory : lost_helper.directories) remove_if_abandoned(directory);
}

}  // namespace dscomm
