// dscomm-pmix: lets the ranks of one host call MPI_Init without an MPI launcher.
//
// The lowest rank of the host, its leader, starts dscomm-pmix and describes the job over a socket.
// dscomm-pmix answers with the environment that makes each rank a member of an MPI job, and serves
// PMIx to the ranks. It passes fences that involve other hosts to the leader.
//
// Open MPI ends a process whose PMIx server goes away. So once a rank has connected, this process
// outlives all ranks of the host. Asked to quit, it ends before them only if none has connected 5 s
// later. It removes its files at its end, and those of killed servers at its start.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/deadline.h"
#include "pmix/locked_directory.h"
#include "pmix/messages.h"
#include "pmix/process.h"
#include "pmix/server.h"

extern char** environ;

namespace dscomm {
namespace {

// Limits of the start and the end: a process that hangs in either is useless.
constexpr unsigned kStartSeconds = 120;
constexpr std::chrono::seconds kEndLimit{10};

// A rank that has the server's address connects within this time, or never.
constexpr int64_t kUnusedNs = 5'000'000'000;

// How often to check whether ranks live, if the kernel cannot notify, and whether to quit unused.
constexpr int kLookMs = 100;

// The most shared memory that Open MPI uses for a rank: a segment of 4 MiB, and as much again for
// segments that it attaches later.
constexpr uint64_t kSharedBytesPerRank = uint64_t{8} << 20;

constexpr const char* kSharedMemory = "/dev/shm";

void close_other_descriptors() {
#ifdef SYS_close_range
  if (syscall(SYS_close_range, kPmixSocket + 1, ~0u, 0) == 0) return;
#endif
  for (long fd = kPmixSocket + 1, end = sysconf(_SC_OPEN_MAX); fd < end; ++fd)
    ::close(static_cast<int>(fd));
}

// Variables of an outer launcher identify its ranks, and this server is not one of these ranks.
void drop_launcher_variables() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string_view text(*entry);
    if (text.starts_with("PMIX_") || text.starts_with("OMPI_"))
      names.emplace_back(text.substr(0, text.find('=')));
  }
  for (const std::string& name : names) unsetenv(name.c_str());
}

// PMIx 5.0.0 and 5.0.1 (Ubuntu 24.04) pass the job's description in memory that server and rank map
// at the same address. torch's processes already use that address, and MPI_Init_thread fails with
// PMIX_ERR_OUT_OF_RESOURCE. Later versions call the fixed component shmem2, and older ones have no
// shmem, so this does not affect them.
void disable_faulty_components() { setenv("PMIX_MCA_gds", "^shmem", 1); }

// Leaves the job's terminal and process group: their signals are for the ranks, and this process
// must end after the ranks. Also stops being a child of the leader, which may wait for children.
bool detach() {
  for (int number : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGPIPE, SIGTSTP}) signal(number, SIG_IGN);
  for (int number : {SIGALRM, SIGCHLD}) signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  pid_t child = fork();
  if (child > 0) _exit(0);
  if (child < 0) return false;
  setsid();
  umask(077);
  return chdir("/") == 0;
}

void silence(std::initializer_list<int> descriptors) {
  int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (null < 0) return;
  for (int fd : descriptors) dup2(null, fd);
  if (null > kPmixSocket) ::close(null);
}

class Helper {
 public:
  Helper() : leader_(UniqueFd(kPmixSocket)) {}

  // Returns the exit status.
  int run() {
    alarm(kStartSeconds);
    leader_.send(PmixMessageKind::kStarted, std::to_string(getpid()));
    if (!receive_description()) return 1;
    if (std::string error = prepare(); !error.empty()) {
      leader_.send(PmixMessageKind::kFailed, error);
      return 1;
    }
    alarm(0);
    serve();
    bound_the_end();
    server_.reset();
    return 0;
  }

 private:
  // Makes this process remove its files and end within kEndLimit, even if PMIx hangs.
  void bound_the_end() {
    std::vector<std::string> paths{directory_->path()};
    if (shared_ != nullptr) paths.push_back(shared_->path());
    std::thread([paths = std::move(paths)] {
      std::this_thread::sleep_for(kEndLimit);
      for (const std::string& path : paths) remove_tree(path);
      _exit(1);
    }).detach();
  }

  // False if the leader goes, or sends something else than a valid description.
  bool receive_description() {
    while (true) {
      pollfd entry{leader_.fd(), leader_.events(), 0};
      ::poll(&entry, 1, -1);  // ends when the leader sends or goes, or at the alarm
      bool open = leader_.exchange();
      if (std::optional<PmixMessage> message = leader_.next())
        return message->kind == PmixMessageKind::kDescription &&
               unpack(message->text, &description_) &&
               description_.own_host < description_.hosts.size() && !description_.clients().empty();
      if (!open) return false;
    }
  }

  // Returns an empty string, or an error.
  std::string prepare() {
    const char* wish = std::getenv("TMPDIR");
    const std::string temporary = wish == nullptr || *wish != '/' ? "/tmp" : wish;
    remove_abandoned_directories(temporary);
    remove_abandoned_directories(kSharedMemory);
    std::string error;
    directory_ = LockedDirectory::make(temporary, &error);
    if (directory_ == nullptr)
      return error + "; set TMPDIR to a directory that can be written, on a disk of the host";
    server_ = std::make_unique<PmixServer>();
    if (error = server_->start(description_, directory_->path()); !error.empty()) return error;
    for (const RankProcess& client : description_.clients())
      processes_.emplace_back(client.pid, client.start_time);
    const RankProcess& leader = description_.clients().front();
    leader_process_ = std::make_unique<WatchedProcess>(leader.pid, leader.start_time);

    const std::string& shared = shared_directory();
    PmixEnvironments environments;
    environments.own = server_->environments();
    // One setting, by its names in Open MPI 4 and Open MPI 5.
    environments.defaults = {"OMPI_MCA_btl_vader_backing_directory=" + shared,
                             "OMPI_MCA_btl_sm_backing_directory=" + shared};
    leader_.send(PmixMessageKind::kReady, pack(environments));
    if (!description_.verbose) silence({STDERR_FILENO});
    return "";
  }

  // The directory for the ranks' shared memory. This process removes it at its end, with the files
  // that killed ranks left in it.
  const std::string& shared_directory() {
    struct statvfs space{};
    uint64_t needed = kSharedBytesPerRank * description_.clients().size();
    std::string ignored;
    if (statvfs(kSharedMemory, &space) == 0 && space.f_bavail * space.f_frsize >= needed)
      shared_ = LockedDirectory::make(kSharedMemory, &ignored);
    return shared_ != nullptr ? shared_->path() : directory_->path();
  }

  void serve() {
    while (!processes_.empty()) {
      if (quit_by_ns_ != 0 && !server_->has_been_used() && monotonic_ns() >= quit_by_ns_) return;
      wait();
      std::erase_if(processes_, [](WatchedProcess& process) { return process.gone(); });
      listen_to_leader();
      for (PmixFence& fence : server_->take_fences()) begin(std::move(fence));
      if (server_->take_probe() && leader_.open()) leader_.send(PmixMessageKind::kAlive, "");
    }
  }

  void wait() {
    std::vector<pollfd> entries = {{server_->fd(), POLLIN, 0}};
    if (leader_.open()) entries.push_back({leader_.fd(), leader_.events(), 0});
    int timeout_ms = quit_by_ns_ != 0 && !server_->has_been_used() ? kLookMs : -1;
    for (const WatchedProcess& process : processes_) {
      if (process.fd() < 0) timeout_ms = kLookMs;
      entries.push_back({process.fd(), POLLIN, 0});
    }
    // Also returns when a rank ends: the descriptor of its process becomes readable.
    ::poll(entries.data(), entries.size(), timeout_ms);
  }

  void listen_to_leader() {
    if (!leader_.open()) return;
    bool open = leader_.exchange();
    while (std::optional<PmixMessage> message = leader_.next()) {
      PmixFenceResult result;
      if (message->kind == PmixMessageKind::kFenceResult && unpack(message->text, &result)) {
        server_->complete(result);
        std::erase(asked_, result.number);
      }
      if (message->kind == PmixMessageKind::kProbe) server_->probe();
      if (message->kind == PmixMessageKind::kQuit) quit_soon();
    }
    // A forked child may keep the leader's end of the socket open after the leader has died.
    const bool gone = leader_process_->gone();
    if (open && !gone) return;
    leader_.close();
    if (!gone) quit_soon();
    for (uint64_t number : asked_) server_->complete({number, false, ""});
    asked_.clear();
  }

  void quit_soon() {
    if (quit_by_ns_ == 0) quit_by_ns_ = monotonic_ns() + kUnusedNs;
  }

  void begin(PmixFence fence) {
    if (fence.hosts.size() == 1) {
      server_->complete({fence.number, true, std::move(fence.data)});
    } else if (leader_.open()) {
      asked_.push_back(fence.number);
      leader_.send(PmixMessageKind::kFence, pack(fence));
    } else {
      server_->complete({fence.number, false, ""});
    }
  }

  PmixSocket leader_;
  PmixDescription description_;
  std::unique_ptr<LockedDirectory> directory_, shared_;
  std::unique_ptr<PmixServer> server_;
  std::vector<WatchedProcess> processes_;  // live ranks of the host
  std::unique_ptr<WatchedProcess> leader_process_;
  std::vector<uint64_t> asked_;  // fences that wait for the leader's answer
  int64_t quit_by_ns_ = 0;       // when to end if unused; 0: not asked to
};

}  // namespace
}  // namespace dscomm

int main(int argument_count, char**) {
  struct stat status{};
  if (argument_count != 1 || fstat(dscomm::kPmixSocket, &status) != 0 ||
      !S_ISSOCK(status.st_mode)) {
    std::fputs(
        "dscomm-pmix is started by dscomm, on every host of a job whose ranks no MPI "
        "launcher has started. There is nothing to call it with.\n",
        stderr);
    return 2;
  }
  dscomm::close_other_descriptors();
  dscomm::silence({STDIN_FILENO, STDOUT_FILENO});
  dscomm::drop_launcher_variables();
  dscomm::disable_faulty_components();
  if (!dscomm::detach()) return 1;
  return dscomm::Helper().run();
}
