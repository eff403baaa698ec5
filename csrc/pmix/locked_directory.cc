#include "pmix/locked_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <system_error>
#include <vector>

#include "core/base/format.h"
#include "core/base/process_state.h"

namespace dscomm {
namespace {

constexpr const char* kPrefix = "dscomm-pmix.";
constexpr const char* kLock = "/lock";

// A directory looks abandoned between its creation and its locking, so young ones are spared.
constexpr time_t kYoungSeconds = 60;

UniqueFd lock_file(const std::string& path, int flags) {
  UniqueFd file(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (file.valid() && ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) file.reset();
  return file;
}

}  // namespace

std::unique_ptr<LockedDirectory> LockedDirectory::make(const std::string& parent,
                                                       std::string* error) {
  // Retries with another name if another process locked the file first, to remove the directory.
  for (int attempt = 0; attempt < 3; ++attempt) {
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) < 0) random = static_cast<uint64_t>(attempt);
    std::string path = format_text("{}/{}{}.{}.{:016x}", parent, kPrefix, getpid(),
                                   process_start_time(getpid()), random);
    if (::mkdir(path.c_str(), 0700) != 0) {
      *error = format_text("making a directory in {} failed: {}", parent, std::strerror(errno));
      return nullptr;
    }
    UniqueFd lock = lock_file(path + kLock, O_RDWR | O_CREAT | O_EXCL);
    struct stat status{};
    if (lock.valid() && ::fstat(lock.get(), &status) == 0 && status.st_nlink > 0) {
      // Cleaners of /tmp (systemd-tmpfiles) spare a locked directory.
      UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      if (directory.valid()) (void)::flock(directory.get(), LOCK_SH | LOCK_NB);
      return std::unique_ptr<LockedDirectory>(
          new LockedDirectory(std::move(path), std::move(lock), std::move(directory)));
    }
    *error = format_text("locking a file in {} failed: {}", path, std::strerror(errno));
    remove_tree(path);
  }
  return nullptr;
}

bool is_own_directory(const std::string& path) {
  return path.compare(path.rfind('/') + 1, std::strlen(kPrefix), kPrefix) == 0;
}

std::string lock_file_of(const std::string& path) { return path + kLock; }

void remove_tree(const std::string& path) {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

LockedDirectory::~LockedDirectory() { remove_tree(path_); }

void remove_if_abandoned(const std::string& path) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != geteuid())
    return;
  if (std::time(nullptr) < status.st_mtime + kYoungSeconds &&
      ::access((path + kLock).c_str(), F_OK) != 0)
    return;
  // If the owner lives, it holds the lock. Otherwise this process holds it until the tree is
  // removed. A process that has made the directory but not locked it yet then uses another name.
  UniqueFd lock = lock_file(lock_file_of(path), O_RDWR);
  if (lock.valid() || errno == ENOENT) remove_tree(path);
}

void remove_abandoned_directories(const std::string& parent) {
  std::vector<std::string> found;
  std::error_code ignored;
  for (std::filesystem::directory_iterator entry(parent, ignored), end; entry != end;
       entry.increment(ignored))
    if (is_own_directory(entry->path())) found.push_back(entry->path());
  for (const std::string& path : found) remove_if_abandoned(path);
}

}  // namespace dscomm
