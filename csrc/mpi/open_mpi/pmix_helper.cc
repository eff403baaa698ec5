#include "mpi/open_mpi/pmix_helper.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/format.h"
#include "core/base/log.h"
#include "core/base/packer.h"
#include "core/base/process_state.h"
#include "core/base/thread.h"
#include "mpi/environment.h"

namespace dscomm {
namespace {

constexpr int kSliceMs = 10;

// Pauses between store requests. Hosts that start together enter a fence in the first few pauses.
constexpr int kFirstPauseMs = 1, kLongestPauseMs = 20;

// How often a host that waits for a Fence's gathered data lists the hosts that are missing.
constexpr int64_t kNameEveryNs = 1'000'000'000;

// Liveness probes: how long the helper may take to answer one, and how often a late answer is
// reported; less if the timeout is short. A report only adds to the message of a failure.
constexpr int64_t kPatienceNs = 1'000'000'000;
constexpr int kProbeSliceMs = 100;
constexpr const char* kSilent = "silent";  // key of the report

constexpr std::chrono::seconds kQuitLimit{1};

// Starts dscomm-pmix. The process started here forks the server and exits (pmix/main.cc).
class Starter {
 public:
  Status spawn(const std::string& path, int socket) {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    errno = ENOMEM;  // the only error of the two init functions
    if (posix_spawn_file_actions_init(&actions) != 0 || posix_spawnattr_init(&attributes) != 0)
      return system_error("posix_spawn");
    posix_spawn_file_actions_adddup2(&actions, socket, kPmixSocket);
    // Block signals that are meant for the job; the helper unblocks them once it ignores them.
    sigset_t signals;
    sigemptyset(&signals);
    for (int number : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) sigaddset(&signals, number);
    posix_spawnattr_setsigmask(&attributes, &signals);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    std::string name = path.substr(path.rfind('/') + 1);
    char* arguments[] = {name.data(), nullptr};
    int error =
        posix_spawn(&pid_, path.c_str(), &actions, &attributes, arguments, whole_environment());
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    if (error == 0) return {};
    pid_ = 0;
    errno = error;  // posix_spawn() does not set it
    if (error != ENOENT && error != EACCES && error != ENOEXEC) return system_error("posix_spawn");
    return make_status(Code::kUnsupported,
                       "{} cannot be run ({}); install PMIx (apt-get install libpmix-dev) and "
                       "reinstall deepspeed_comm, or start the ranks with mpirun or srun "
                       "--mpi=pmix",
                       path, std::strerror(error));
  }

  // False while the started process runs, true after its success; an error if it failed.
  Result<bool> ended() {
    if (pid_ == 0) return true;
    int status = 0;
    pid_t reaped = ::waitpid(pid_, &status, WNOHANG);
    if (reaped == 0) return false;
    pid_ = 0;
    // If the program ignores SIGCHLD, the kernel has reaped the child.
    if (reaped < 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) return true;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
      return Status(Code::kUnsupported,
                    "it could not be loaded, and has said why on standard error; is PMIx installed "
                    "(apt-get install libpmix2)?");
    return WIFEXITED(status)
               ? make_status(Code::kInternal, "it ended with status {}", WEXITSTATUS(status))
               : make_status(Code::kInternal, "it was ended by signal {}", WTERMSIG(status));
  }

  // If pid_ is not 0, the process is not reaped yet, so the pid is still valid.
  ~Starter() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);  // returns soon: it has been killed
  }

 private:
  pid_t pid_ = 0;
};

}  // namespace

struct PmixHelper::State {
  // A fence in progress. The first of its hosts gathers the others' data from the store, and puts
  // the data of all hosts there.
  struct Fence {
    PmixFence asked;
    std::vector<std::optional<std::string>> data;  // on the first host: by entry of asked.hosts
    int64_t name_again_ns = 0;  // on the others: next time to list the missing hosts
    std::string missing;        // hosts that were missing at the last listing
    bool is_answered = false;
  };

  PmixSocket socket;
  UniqueFd stop;
  std::shared_ptr<Store> store;
  std::string prefix;
  PmixDescription description;
  int64_t pid = 0;  // 0: not known yet

  // Used by start(), then by the service thread only.
  std::vector<Fence> fences;
  int64_t patience_ns = kPatienceNs;
  int64_t asked_at_ns = 0;  // time of the unanswered probe; 0: none
  int64_t probe_at_ns = 0, report_at_ns = 0;
  bool is_reported = false;

  // Cleared by remove_keys(), loaded by the service thread's loop. Guards no data.
  std::atomic<bool> probes{true};

  mutable std::mutex mutex;
  std::condition_variable ended_condition;
  bool ended = false;
  std::string waiting_for;
  std::vector<std::string> keys;  // put into the store by this host
  Status fault;

  void serve();
  Status take_messages();
  Status begin(Fence fence);
  Status advance();
  void has_answered();
  Status probe();
  void resume();
  Status gather(Fence& fence, std::string* missing);
  Status await_others(Fence& fence, std::string* missing);
  Status put(const std::string& name, const std::string& data);
  void answer(Fence& fence, std::string data);
  std::string key(const Fence& fence, uint32_t host) const {
    return format_text("{}{}/{}", prefix, fence.asked.name, host);
  }
  std::string key_of_all(const Fence& fence) const { return prefix + fence.asked.name + "/all"; }
};

Result<std::unique_ptr<PmixHelper>> PmixHelper::start(
    const std::string& path, const PmixDescription& description, std::shared_ptr<Store> store,
    const std::string& prefix, const Deadline& deadline, const std::function<Status()>& check) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return system_error("socketpair");
  UniqueFd ours(ends[0]), theirs(ends[1]);
  auto state = std::make_shared<State>();
  state->stop = UniqueFd(eventfd(0, EFD_CLOEXEC));
  if (!state->stop.valid()) return system_error("eventfd");
  state->description = description;
  state->store = std::move(store);
  state->prefix = prefix;
  state->patience_ns = std::min(kPatienceNs, deadline.timeout_ms() * kMs / 4);
  Starter starter;
  DSCOMM_RETURN_IF_ERROR(starter.spawn(path, theirs.get()));
  theirs.reset();
  PmixSocket& socket = state->socket;
  socket = PmixSocket(std::move(ours));
  socket.send(PmixMessageKind::kDescription, pack(description));
  state->asked_at_ns = monotonic_ns();
  std::unique_ptr<PmixHelper> helper(new PmixHelper(state));
  bool ready = false;
  TimeLeft time_left(deadline);
  while (true) {
    const bool is_over = time_left.is_over();  // even then, read the socket once more
    bool open = socket.exchange();
    while (std::optional<PmixMessage> message = socket.next()) {
      if (message->kind == PmixMessageKind::kStarted) {
        state->pid = std::strtoll(message->text.c_str(), nullptr, 10);
        continue;
      }
      if (message->kind == PmixMessageKind::kFailed) return Status(Code::kResource, message->text);
      ready = message->kind == PmixMessageKind::kReady &&
              unpack(message->text, &helper->environments_) &&
              helper->environments_.own.size() == description.clients().size();
      if (!ready) return malformed_value("message from dscomm-pmix");
      state->has_answered();
    }
    DSCOMM_RETURN_IF_ERROR(state->probe());
    DSCOMM_ASSIGN_OR_RETURN(bool detached, starter.ended());
    if (ready && detached) return helper;
    if (!open && detached)
      return Status(Code::kInternal, "it ended before it was ready; standard error may say why");
    DSCOMM_RETURN_IF_ERROR(check());
    if (is_over)
      return make_status(Code::kTimeout, "timed out: it was not ready after {}",
                         deadline.timeout_text());
    pollfd entry{socket.fd(), socket.events(), 0};
    // A closed socket would make this loop spin; from a ready helper nothing more is awaited here.
    const bool listens = open && !ready;
    const int slice_ms = listens ? kSliceMs : 1;
    const int64_t began_ns = monotonic_ns();
    ::poll(&entry, listens ? 1 : 0, slice_ms);
    deadline.note_slice(began_ns, int64_t{slice_ms} * 1'000'000);
  }
}

Status PmixHelper::serve() {
  DSCOMM_ASSIGN_OR_RETURN(
      service_, start_thread("the carrier of MPI's fences", [state = state_] { state->serve(); }));
  return {};
}

void PmixHelper::State::serve() {
  int pause_ms = kFirstPauseMs;
  while (true) {
    pollfd entries[2] = {{socket.fd(), socket.events(), 0}, {stop.get(), POLLIN, 0}};
    // Returns when the helper sends something or ends, when quit() is called, or when the store or
    // a probe is due.
    ::poll(entries, 2, !fences.empty() ? pause_ms : probes.load() ? kProbeSliceMs : -1);
    if (entries[1].revents != 0) break;
    size_t waiting = fences.size();
    Status status = take_messages();
    if (status.ok()) status = advance();
    if (status.ok() && probes.load()) status = probe();
    if (!status.ok()) {
      std::lock_guard lock(mutex);
      fault = std::move(status);
      break;
    }
    pause_ms = fences.size() == waiting ? std::min(pause_ms * 2, kLongestPauseMs) : kFirstPauseMs;
  }
  socket.send(PmixMessageKind::kQuit, "");
  resume();
  std::lock_guard lock(mutex);
  waiting_for.clear();
  ended = true;
  ended_condition.notify_all();
}

// Fails if the helper has ended or its socket is broken.
Status PmixHelper::State::take_messages() {
  bool open = socket.exchange();
  Status status;
  while (std::optional<PmixMessage> message = socket.next()) {
    if (message->kind == PmixMessageKind::kAlive) {
      has_answered();
      continue;
    }
    Fence fence;
    if (message->kind != PmixMessageKind::kFence || !unpack(message->text, &fence.asked))
      status = malformed_value("message from dscomm-pmix");
    if (status.ok()) status = begin(std::move(fence));
  }
  if (!status.ok() || open) return status;
  return Status(Code::kPeerDied, "dscomm-pmix has ended; see whether it was killed on host " +
                                     description.hosts[description.own_host].name);
}

Status PmixHelper::State::begin(Fence fence) {
  for (uint32_t host : fence.asked.hosts)
    if (host >= description.hosts.size())
      return Status(Code::kInternal, "dscomm-pmix named a host that there is not");
  fence.name_again_ns = monotonic_ns() + kNameEveryNs;
  Status status = put(key(fence, description.own_host), fence.asked.data);
  if (fence.asked.hosts.front() == description.own_host) {
    fence.data.resize(fence.asked.hosts.size());
    fence.data.front() = fence.asked.data;
  }
  fences.push_back(std::move(fence));
  return status;
}

// Checks which other hosts have entered the fences, and answers complete fences.
Status PmixHelper::State::advance() {
  std::string missing;
  for (Fence& fence : fences) {
    DSCOMM_RETURN_IF_ERROR(fence.data.empty() ? await_others(fence, &missing)
                                              : gather(fence, &missing));
  }
  std::erase_if(fences, [](const Fence& fence) { return fence.is_answered; });
  std::lock_guard lock(mutex);
  waiting_for = std::move(missing);
  return {};
}

Status PmixHelper::State::gather(Fence& fence, std::string* missing) {
  bool is_whole = true;
  for (size_t i = 1; i < fence.data.size(); ++i) {
    if (fence.data[i].has_value()) continue;
    DSCOMM_ASSIGN_OR_RETURN(fence.data[i], store->find(key(fence, fence.asked.hosts[i])));
    if (fence.data[i].has_value()) continue;
    is_whole = false;
    *missing += (missing->empty() ? "" : ", ") + description.hosts[fence.asked.hosts[i]].name;
  }
  if (!is_whole) return {};
  std::string all;
  for (const std::optional<std::string>& part : fence.data) all += *part;
  DSCOMM_RETURN_IF_ERROR(put(key_of_all(fence), all));
  answer(fence, std::move(all));
  return {};
}

Status PmixHelper::State::await_others(Fence& fence, std::string* missing) {
  DSCOMM_ASSIGN_OR_RETURN(std::optional<std::string> all, store->find(key_of_all(fence)));
  if (all.has_value()) {
    answer(fence, std::move(*all));
    return {};
  }
  if (monotonic_ns() >= fence.name_again_ns) {
    fence.name_again_ns = monotonic_ns() + kNameEveryNs;
    fence.missing.clear();
    for (uint32_t host : fence.asked.hosts) {
      DSCOMM_ASSIGN_OR_RETURN(bool there, store->has(key(fence, host)));
      if (!there)
        fence.missing += (fence.missing.empty() ? "" : ", ") + description.hosts[host].name;
    }
  }
  if (!fence.missing.empty()) *missing += (missing->empty() ? "" : ", ") + fence.missing;
  return {};
}

void PmixHelper::State::answer(Fence& fence, std::string data) {
  socket.send(PmixMessageKind::kFenceResult,
              pack(PmixFenceResult{fence.asked.number, true, std::move(data)}));
  fence.is_answered = true;
}

void PmixHelper::State::has_answered() {
  asked_at_ns = 0;
  probe_at_ns = monotonic_ns() + patience_ns / 2;
}

// Sends a probe when it is due. While the answer is late, keeps a report in the store, under one
// key for all hosts. Writes the report repeatedly, because another host may remove it.
Status PmixHelper::State::probe() {
  const int64_t now = monotonic_ns();
  if (asked_at_ns == 0 && now >= probe_at_ns) {
    socket.send(PmixMessageKind::kProbe, "");
    asked_at_ns = now;
  }
  if (asked_at_ns == 0 || now - asked_at_ns < patience_ns) {
    report_at_ns = 0;
    return std::exchange(is_reported, false) ? store->remove(prefix + kSilent) : Status();
  }
  if (now < report_at_ns) return {};
  report_at_ns = now + patience_ns;
  const std::string process = pid == 0 ? "" : format_text("pid {} ", pid);
  const std::string state = pid == 0 ? "" : ", " + process_state_text(process_state(pid));
  const std::string sentence = format_text(
      "dscomm-pmix ({}on host {}) does not answer{}; continue it if it is stopped, and check that "
      "host's CPU and memory",
      process, description.hosts[description.own_host].name, state);
  return std::exchange(is_reported, true) ? store->set(prefix + kSilent, sentence)
                                          : put(prefix + kSilent, sentence);
}

std::string PmixHelper::silent_helper(Store& store, const std::string& prefix) {
  Result<std::optional<std::string>> found = store.find(prefix + kSilent);
  return found.ok() ? found.value().value_or("") : "";
}

// Continues a stopped helper, so that it can end. Its pid is valid while its socket is open.
void PmixHelper::State::resume() {
  if (pid > 0 && socket.exchange()) ::kill(static_cast<pid_t>(pid), SIGCONT);
}

Status PmixHelper::State::put(const std::string& name, const std::string& data) {
  {
    std::lock_guard lock(mutex);
    keys.push_back(name);
  }
  return store->set(name, data);
}

void PmixHelper::remove_keys() {
  state_->probes.store(false);
  std::vector<std::string> keys;
  {
    std::lock_guard lock(state_->mutex);
    keys.swap(state_->keys);
  }
  // A key that cannot be removed only takes some of the store's memory.
  for (const std::string& key : keys) static_cast<void>(state_->store->remove(key));
}

std::string PmixHelper::waiting_for() const {
  std::lock_guard lock(state_->mutex);
  return state_->waiting_for;
}

Status PmixHelper::fault() const {
  std::lock_guard lock(state_->mutex);
  return state_->fault;
}

void PmixHelper::quit() {
  if (left_behind_) return;
  if (!service_.joinable()) {
    state_->resume();
    state_->socket.close();  // also tells the helper
    return;
  }
  ::eventfd_write(state_->stop.get(), 1);
  std::unique_lock lock(state_->mutex);
  bool ended = state_->ended_condition.wait_for(lock, kQuitLimit, [&] { return state_->ended; });
  lock.unlock();
  if (ended) {
    service_.join();
    return;
  }
  log_line(LogLevel::kWarn, "the store does not answer; a thread of dscomm still waits for it");
  service_.detach();
  left_behind_ = true;
}

PmixHelper::~PmixHelper() { quit(); }

void PmixHelper::close_descriptors() {
  state_->socket.close();
  state_->stop.reset();
  // The thread exists only in the parent.
  if (service_.joinable()) service_.detach();
}

}  // namespace dscomm
