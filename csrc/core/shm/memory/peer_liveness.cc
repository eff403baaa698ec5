// Whether the process of a peer on this host lives, and in which state it is. The errors are made
// in shm/mailbox/ (members.cc, diagnosis.cc) and in messages/checks.cc.
#include <linux/futex.h>
#include <poll.h>

#include <fstream>
#include <string>

#include "core/base/process_state.h"
#include "core/shm/memory/peer.h"

namespace dscomm {
namespace {

// The pid of a pidfd's process in this PID namespace; 0: not visible here, -1: it has ended.
int pid_of(int pidfd) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(pidfd));
  std::string key;
  int pid = 0;
  while (info >> key) {
    if (key == "Pid:" && info >> pid) return pid;
  }
  return 0;
}

}  // namespace

bool Peer::alive(bool thoroughly) const {
  // The futex word is the first word of glibc's mutex. Acquire pairs with the kernel's store at
  // exit, so that all that the owner published is visible.
  auto* word = reinterpret_cast<const uint32_t*>(&header().life);
  uint32_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  if ((value & FUTEX_OWNER_DIED) != 0 || (value & FUTEX_TID_MASK) == 0) return false;
  if (thoroughly && pidfd_.valid()) {
    pollfd entry{pidfd_.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) <= 0;  // EINTR counts as alive
  }
  return true;
}

// The kernel's letter for the state of the process; 0: unknown.
char Peer::state() const {
  int pid = pidfd_.valid() ? pid_of(pidfd_.get()) : 0;
  if (pid < 0) return 'Z';
  if (pid == 0) return 0;
  return process_state(pid);
}

bool Peer::is_stopped() const {
  if (arena_ != nullptr) return false;
  const char letter = state();
  return letter == 'T' || letter == 't';
}

std::string Peer::state_text() const {
  if (arena_ != nullptr) return "in this process";
  if (!alive(true)) return "gone";
  return process_state_text(state());
}

}  // namespace dscomm
