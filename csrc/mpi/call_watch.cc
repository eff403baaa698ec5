#include "mpi/call_watch.h"

#include <gnu/lib-names.h>
#include <link.h>
#include <signal.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>

#include "core/base/log.h"
#include "core/base/process_state.h"
#include "core/base/thread.h"
#include "mpi/guarded.h"

namespace dscomm {
namespace {

constexpr std::chrono::milliseconds kTick{50};
constexpr int kTicks = 16;
// After so many ticks a call without a known deadline may be left.
constexpr int kTicksWithoutDeadline = 100;
// If a call mostly makes system calls, such as Open MPI 4's loop that prints "invalid connection
// state", a signal rarely interrupts it outside the C library. So after this many ticks, and from
// the second signal on, its thread also leaves it inside the C library, just after a system call.
// The thread may then hold a lock of malloc's, but would otherwise hang. 1.5 s, because a rank must
// notice a death on another host within 2 s.
constexpr int kPatientTicks = 30;
// CPU time in one call that counts as hanging. A healthy call moves a chunk of a few MiB.
constexpr int64_t kBusyNs = 400'000'000;

// Relaxed: a stale value is corrected at the next tick, 50 ms later.
std::atomic<bool> watches_closely{false};

struct Registry {
  std::mutex mutex;
  std::set<guard::Calls*> threads;  // running threads that have called MPI
};
Registry& registry = *new Registry;  // never destroyed: threads may call MPI until the process ends

// The address range of the C library's code.
uintptr_t libc_begin = 0, libc_end = 0;

void find_libc() {
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void*) {
        if (!std::string_view(object->dlpi_name).ends_with("/" LIBC_SO)) return 0;
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const ElfW(Phdr) & segment = object->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
          libc_begin = object->dlpi_addr + segment.p_vaddr;
          libc_end = libc_begin + segment.p_memsz;
        }
        return 1;
      },
      nullptr);
}

uintptr_t interrupted_at(const void* context) {
  const auto* machine = &static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return static_cast<uintptr_t>(machine->gregs[REG_RIP]);
#elif defined(__aarch64__)
  return machine->pc;
#else
  static_cast<void>(machine);
  return libc_begin;  // unknown machine: never leave a call
#endif
}

// Whether a system call has just returned to `at`.
bool is_after_system_call(uintptr_t at) {
#if defined(__x86_64__)
  const auto* code = reinterpret_cast<const unsigned char*>(at);
  return code[-2] == 0x0f && code[-1] == 0x05;
#elif defined(__aarch64__)
  return reinterpret_cast<const uint32_t*>(at)[-1] == 0xd4000001;
#else
  static_cast<void>(at);
  return false;
#endif
}

void leave_call(int, siginfo_t*, void* context) {
  guard::Calls& calls = guard::calls_of_thread();
  const uint64_t number = calls.number.load(std::memory_order_relaxed);
  // Acquire: pairs with the release store in check_calls().
  if (number % 2 == 0 || calls.to_leave.load(std::memory_order_acquire) != number) return;
  const uintptr_t at = interrupted_at(context);
  const auto from = calls.from.load(std::memory_order_acquire);
  if (from != guard::Calls::kAnywhere && at >= libc_begin && at < libc_end &&
      (from == guard::Calls::kOutsideLibc || !is_after_system_call(at)))
    return;
  note_mpi_gave_up();
  calls.depth = 0;
  calls.count_up();
  siglongjmp(calls.way_out, 1);
}

// A real-time signal that nothing else in the process uses; 0 if there is none.
int take_signal() {
  find_libc();
  for (int number = SIGRTMAX; number >= SIGRTMIN; --number) {
    struct sigaction known{};
    if (sigaction(number, nullptr, &known) != 0 || known.sa_handler != SIG_DFL) continue;
    struct sigaction action{};
    action.sa_sigaction = &leave_call;
    // SA_NODEFER: the jump out of the handler must not leave the signal blocked.
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    if (sigaction(number, &action, nullptr) == 0) return number;
  }
  return 0;
}

int leave_signal() {
  static const int number = take_signal();
  return number;
}

// Registers this thread until the thread ends.
struct Registration {
  Registration() {
    calls.thread = pthread_self();
    calls.thread_id = gettid();
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, leave_signal());
    // Threads of this library block all signals (core/base/thread.h), so unblock this one.
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    std::lock_guard lock(registry.mutex);
    registry.threads.insert(&calls);
  }
  ~Registration() {
    std::lock_guard lock(registry.mutex);
    registry.threads.erase(&calls);
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  guard::Calls calls;
};

int64_t cpu_ns(pthread_t thread) {
  clockid_t clock;
  timespec time{};
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// The watch's observations of a thread's current call.
struct Seen {
  uint64_t number = 0;
  int ticks = 0;
  int ticks_asleep = 0;  // without a break, up to now
  int signals = 0;
  int64_t cpu_at_first_ns = 0;
};

// Whether the deadline of a hanging call has passed, or does not count. It does not count once MPI
// has given up in one thread, because other threads may wait for locks of that thread.
bool is_late(const guard::Calls& calls, int ticks) {
  if (watches_closely.load(std::memory_order_relaxed) || mpi_gave_up()) return true;
  const int64_t deadline_ns = calls.deadline_ns.load(std::memory_order_relaxed);
  return deadline_ns == 0 ? ticks >= kTicksWithoutDeadline : monotonic_ns() > deadline_ns;
}

void check_calls(guard::Calls& calls, Seen* seen) {
  const uint64_t number = calls.number.load(std::memory_order_relaxed);
  if (number % 2 == 0 || number != seen->number) {
    *seen = {number, 0, 0, 0, number % 2 == 0 ? 0 : cpu_ns(calls.thread)};
    return;
  }
  ++seen->ticks;
  // A thread that waits for a disk (D) does not count: it will return.
  seen->ticks_asleep = process_state(calls.thread_id) == 'S' ? seen->ticks_asleep + 1 : 0;
  const bool is_asleep = seen->ticks_asleep >= kTicks;
  if (seen->ticks < kTicks || !is_late(calls, seen->ticks)) return;
  if (!is_asleep && cpu_ns(calls.thread) - seen->cpu_at_first_ns < kBusyNs) return;
  if (seen->signals++ == 0)
    log_line(LogLevel::kWarn,
             "a call of MPI does not return, as when a rank has died or a connection is broken: "
             "dscomm gives it up, and groups of several hosts no longer work in this process");
  // Release stores: pair with the acquire loads in the signal handler, leave_call().
  const bool is_patient = seen->ticks < kPatientTicks || seen->signals == 1;
  calls.from.store(is_asleep    ? guard::Calls::kAnywhere
                   : is_patient ? guard::Calls::kOutsideLibc
                                : guard::Calls::kAlsoAfterSystemCalls,
                   std::memory_order_release);
  calls.to_leave.store(number, std::memory_order_release);
  pthread_kill(calls.thread, leave_signal());
}

// Runs until the process ends.
void watch() {
  std::map<guard::Calls*, Seen> seen;
  while (true) {
    std::this_thread::sleep_for(kTick);
    // No thread can end while this lock is held.
    std::lock_guard lock(registry.mutex);
    std::erase_if(seen, [](const auto& entry) { return !registry.threads.contains(entry.first); });
    for (guard::Calls* calls : registry.threads) check_calls(*calls, &seen[calls]);
  }
}

}  // namespace

guard::Calls& guard::calls_of_thread() {
  thread_local Registration registration;
  return registration.calls;
}

void watch_calls() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (leave_signal() == 0) return;
    Result<std::thread> thread = start_thread("the watch over calls of MPI", [] { watch(); });
    if (thread.ok())
      thread.value().detach();
    else
      log_line(LogLevel::kWarn, "{}", thread.status().message());
  });
}

void watch_calls_closely() {
  watches_closely.store(true, std::memory_order_relaxed);
  watch_calls();
}

}  // namespace dscomm
