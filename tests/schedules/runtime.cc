#include "runtime.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

namespace dscomm::schedule {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kMostThreads = 96;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
// Worlds of one kernel process run one after another, with this much virtual time between them:
// static variables of the code under test remember times.
constexpr int64_t kBetweenNs = 3'600'000'000'000;
int64_t next_start_ns = 1'000'000'000'000;
constexpr int64_t kStepNs = 5;
constexpr int64_t kYieldNs = 1000;
// Every thread sees a store after this much time, as on any machine.
constexpr int64_t kVisibleNs = 3000;
constexpr size_t kPageBytes = 4096;
// This many stores take longer than that.
constexpr size_t kUnfenced = 1000;
constexpr size_t kHistory = 8;  // values that a location remembers
constexpr pthread_t kFirstHandle = 0x7ead0000;

using Clock = std::array<uint32_t, kMostThreads>;

void join(Clock* into, const Clock& from, size_t threads) {
  for (size_t k = 0; k < threads; ++k) (*into)[k] = std::max((*into)[k], from[k]);
}

// Shared memory of all processes is mapped here, so that one comparison recognises it. Addresses
// are not reused: memory of a killed rank stays mapped.
constexpr size_t kSharedBytes = size_t{1} << 40;
constexpr uintptr_t kNowhere = uintptr_t{1} << 62;
uintptr_t shared_begin = kNowhere, shared_next = 0;

bool is_shared(uintptr_t address) { return address - shared_begin < kSharedBytes; }

// Objects for reuse by later worlds, since allocating them takes longer than running.
template <typename T>
class Spares {
 public:
  T* take() {
    if (free_.empty()) return new T();
    T* one = free_.back();
    free_.pop_back();
    return one;
  }
  void give_back(T* one) { free_.push_back(one); }

 private:
  std::vector<T*> free_;
};
Spares<Clock> spare_clocks;

bool acquires(int order) {
  return order == __ATOMIC_ACQUIRE || order == __ATOMIC_CONSUME || order == __ATOMIC_ACQ_REL ||
         order == __ATOMIC_SEQ_CST;
}
bool releases(int order) {
  return order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST;
}

struct Thread {
  enum class State { kReady, kBlocked, kEnded, kKilled };

  int id = 0;
  int process = -1;
  State state = State::kReady;
  ucontext_t context;  // its start
  jmp_buf place;       // where it continues; unlike swapcontext(), without a system call
  bool has_started = false;
  struct Stack* stack = nullptr;
  void* (*function)(void*) = nullptr;
  void* argument = nullptr;
  void* result = nullptr;
  const void* key = nullptr;  // what it is blocked on
  int64_t wake_ns = kNever;
  bool woken = false;
  const char* where = "";  // the function in which it is blocked
  bool polls = false;      // checks itself whether it can continue
  uint64_t looked_at = 0;  // the world's progress at its last check
  int shared_mutexes = 0;
  Clock clock{};
  // Its stores to shared memory with an order below seq_cst since its last fence, with their
  // numbers.
  std::vector<std::pair<uintptr_t, uint64_t>> unfenced;
  std::array<void*, 2> exceptions{};  // the C++ runtime's state, which it keeps per kernel thread
};

// A value that an atomic had.
struct Store {
  uint64_t value = 0;
  int64_t at_ns = 0;
  Clock* released = nullptr;  // null: not a release
  uint32_t epoch = 0;
  int thread = -1;
  int process = -1;
};

struct Location {
  std::array<Store, kHistory> values;  // number n is in n % kHistory
  uint64_t first = 0, end = 0;         // numbers of the oldest value and after the newest
  uint64_t sequential = 0;             // the oldest value that a seq_cst load may return
  std::vector<uint64_t> seen;          // by thread: the newest number read

  Store& value(uint64_t number) { return values[number % kHistory]; }
  uint64_t newest() const { return end - 1; }
  void forget_oldest() {
    if (Clock* clock = value(first++).released) spare_clocks.give_back(clock);
  }
  void forget_all() {
    while (first < end) forget_oldest();
  }
  void add(const Store& store) {
    if (end - first == kHistory) forget_oldest();
    value(end++) = store;
  }
};

// Eight bytes of shared memory, for data races. Only the newest read since the last write is kept
// if it happens after the others.
struct Cell {
  uint32_t written = 0, read = 0;  // epochs
  int16_t writer = -1, reader = -1;
  uint32_t reads = 0;  // not 0: index of a list of unordered reads
  void *write_place = nullptr, *read_place = nullptr;
};
struct Read {
  int thread;
  uint32_t epoch;
  void* place;
};
constexpr size_t kCellsOfPage = 512;
struct CellPage {
  std::array<Cell, kCellsOfPage> cells;
};
Spares<CellPage> spare_pages;

struct Stack {
  void* memory =
      reinterpret_cast<void*>(::syscall(SYS_mmap, nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0));
};
Spares<Stack> spare_stacks;

struct Mutex {
  Thread* owner = nullptr;
  int depth = 0;
  Clock released{};
};

struct Range {
  uintptr_t begin, end;
};

class World;
World* world = nullptr;  // of the kernel thread that runs it
bool inside = false;     // false while the runtime itself works

class World {
 public:
  explicit World(const Options& options) : options_(options), state_(options.seed * 2 + 1) {
    for (int warm = 0; warm < 8; ++warm) next();
    if (shared_begin != kNowhere) return;
    shared_begin = shared_next = reinterpret_cast<uintptr_t>(reserve(nullptr, kSharedBytes, 0));
  }
  ~World() {
    for (auto& [address, place] : locations_) place.forget_all();
    for (auto& [number, page] : cells_) give_back(page);
    for (auto& thread : threads_) spare_stacks.give_back(thread->stack);
  }

  Outcome run(const std::function<void()>& body) {
    body_ = &body;
    Thread* first = make_thread(
        [](void* self) -> void* {
          (*static_cast<World*>(self)->body_)();
          return nullptr;
        },
        this);
    current_ = first;
    world = this;
    inside = true;
    if (_setjmp(main_) == 0) go_on(first);
    inside = false;
    world = nullptr;
    next_start_ns = now_ns_ + kBetweenNs;
    return {failure_, steps_, switches_};
  }

  // ---- scheduling

  uint64_t next() {  // xorshift64*
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Dull;
  }
  bool chance(uint32_t per_mille) { return (next() >> 33) % 1000 < per_mille; }
  uint64_t below(uint64_t bound) { return bound == 0 ? 0 : (next() >> 20) % bound; }

  Thread* make_thread(void* (*function)(void*), void* argument) {
    if (threads_.size() == kMostThreads) fail("more threads than a world has room for");
    auto thread = std::make_unique<Thread>();
    thread->id = static_cast<int>(threads_.size());
    thread->function = function;
    thread->argument = argument;
    thread->stack = spare_stacks.take();
    if (current_ != nullptr) {
      thread->process = current_->process;
      release(&thread->clock);
    }
    thread->clock[static_cast<size_t>(thread->id)] = 1;
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack->memory;
    thread->context.uc_stack.ss_size = kStackBytes;
    thread->context.uc_link = nullptr;
    makecontext(&thread->context, &World::enter, 0);
    threads_.push_back(std::move(thread));
    return threads_.back().get();
  }

  static void enter() {
    World& self = *world;
    inside = true;
    Thread* me = self.current_;
    me->result = me->function(me->argument);
    inside = false;
    me->state = Thread::State::kEnded;
    self.wake(me, kMostThreads);
    self.switch_thread();
    std::abort();
  }

  // A step of the current thread. At `may_switch` another thread may continue.
  void step(bool may_switch) {
    if (++steps_ > options_.most_steps) fail("more steps than a program takes: does it spin?");
    now_ns_ += kStepNs;
    const auto process = static_cast<size_t>(current_->process);
    if (current_->process >= 0 && process < deaths_.size() && deaths_[process] != kNever) {
      if (deaths_[process] > 0) --deaths_[process];
      if (deaths_[process] == 0 && holds_nothing(current_->process)) die(current_->process);
    }
    if (may_switch && chance(options_.switch_per_mille)) switch_thread();
  }

  bool holds_nothing(int process) const {
    return std::all_of(threads_.begin(), threads_.end(), [&](const auto& thread) {
      return thread->process != process || thread->state == Thread::State::kEnded ||
             thread->shared_mutexes == 0;
    });
  }

  // Continues another thread, or this one.
  void switch_thread() {
    Thread* before = current_;
    Thread* after = choose();
    if (after == before) return;
    ++switches_;
    auto* globals = reinterpret_cast<void**>(__cxxabiv1::__cxa_get_globals());
    before->exceptions = {globals[0], globals[1]};
    globals[0] = after->exceptions[0];
    globals[1] = after->exceptions[1];
    current_ = after;
    if (_setjmp(before->place) == 0) go_on(after);
  }

  [[noreturn]] static void go_on(Thread* thread) {
    if (thread->has_started) _longjmp(thread->place, 1);
    thread->has_started = true;
    setcontext(&thread->context);
    std::abort();
  }

  Thread* choose() {
    while (true) {
      ready_.clear();
      int64_t earliest = kNever;
      for (const auto& thread : threads_) {
        if (thread->state == Thread::State::kBlocked) {
          // A polling thread checks again once others have progressed.
          const bool looks = thread->polls && thread->looked_at < progress_ && chance(300);
          if (thread->wake_ns <= now_ns_ || looks)
            thread->state = Thread::State::kReady;
          else
            earliest = std::min(earliest, thread->wake_ns);
        }
        if (thread->state == Thread::State::kReady) ready_.push_back(thread.get());
      }
      if (ready_.empty())
        for (const auto& thread : threads_)
          if (thread->state == Thread::State::kBlocked && thread->polls &&
              thread->looked_at < progress_) {
            thread->state = Thread::State::kReady;
            ready_.push_back(thread.get());
          }
      if (!ready_.empty()) {
        Thread* chosen = ready_[below(ready_.size())];
        if (ready_.size() > 1 && chosen->process >= 0 && chosen->process == options_.slow_process &&
            !chance(50))
          chosen = ready_[below(ready_.size())];
        if (!chosen->polls) ++progress_;
        return chosen;
      }
      const bool all_over = std::all_of(threads_.begin(), threads_.end(), [](const auto& thread) {
        return thread->state == Thread::State::kEnded || thread->state == Thread::State::kKilled;
      });
      if (all_over) leave();
      if (earliest == kNever) fail("deadlock:" + sleepers());
      now_ns_ = earliest;
    }
  }

  std::string sleepers() const {
    std::string text;
    for (const auto& thread : threads_)
      if (thread->state == Thread::State::kBlocked)
        text += " thread " + std::to_string(thread->id) + " of process " +
                std::to_string(thread->process) + " in " + thread->where + ";";
    return text;
  }

  // Returns to run() for good.
  [[noreturn]] void leave() { _longjmp(main_, 1); }

  [[noreturn]] void fail(const std::string& what) {
    inside = false;
    if (failure_.empty()) failure_ = what;
    leave();
  }

  // True if it was woken, false at wake_ns.
  bool block(const char* where, const void* key, int64_t wake_ns, bool polls = false) {
    current_->where = where;
    current_->state = Thread::State::kBlocked;
    current_->key = key;
    current_->wake_ns = wake_ns;
    current_->woken = false;
    current_->polls = polls;
    switch_thread();
    current_->key = nullptr;
    current_->polls = false;
    return current_->woken;
  }

  size_t wake(const void* key, size_t most) {
    size_t count = 0;
    for (const auto& thread : threads_) {
      if (count == most) break;
      if (thread->state != Thread::State::kBlocked || thread->key != key) continue;
      thread->state = Thread::State::kReady;
      thread->woken = true;
      ++count;
    }
    return count;
  }

  // ---- happens-before

  uint32_t epoch() const { return current_->clock[static_cast<size_t>(current_->id)]; }
  // All that the current thread has done happens before a later acquire of `into`.
  void release(Clock* into) {
    join(into, current_->clock, threads_.size());
    ++current_->clock[static_cast<size_t>(current_->id)];
  }
  void acquire(const Clock& from) { join(&current_->clock, from, threads_.size()); }
  bool knows(int thread, uint32_t epoch) const {
    return thread < 0 || thread == current_->id ||
           current_->clock[static_cast<size_t>(thread)] >= epoch;
  }

  Location& location(uintptr_t address, uint64_t value) {
    Location& place = locations_[address];
    // Changed as plain memory meanwhile, or new: no history.
    if (place.end == place.first || place.value(place.newest()).value != value) {
      place.forget_all();
      Store store;
      store.value = value;
      place.add(store);
    }
    return place;
  }

  // Unshared memory orders nothing between processes, although the processes of a world share
  // objects, such as an arena's reference count.
  bool reaches_me(uintptr_t address, const Store& store) const {
    return is_shared(address) || store.process < 0 || current_->process < 0 ||
           store.process == current_->process;
  }

  // A value that the load may return; the newest one if `is_newest`.
  uint64_t load(uintptr_t address, uint64_t value, int order, bool is_newest) {
    Location& place = location(address, value);
    uint64_t number = place.newest();
    if (is_shared(address)) {
      const bool is_sequential = order == __ATOMIC_SEQ_CST;
      const auto me = static_cast<size_t>(current_->id);
      if (place.seen.size() <= me) place.seen.resize(me + 1);
      uint64_t& seen = place.seen[me];
      const uint64_t least =
          std::max({place.first, seen, is_sequential ? place.sequential : uint64_t{0}});
      if (!is_newest && least < number && chance(options_.stale_per_mille)) {
        uint64_t oldest = number;
        while (oldest > least) {
          const Store& store = place.value(oldest);
          if (knows(store.thread, store.epoch) || store.at_ns + kVisibleNs < now_ns_) break;
          --oldest;
        }
        number = oldest + below(number - oldest + 1);
      }
      seen = std::max(seen, number);
      if (is_sequential) place.sequential = std::max(place.sequential, number);
    }
    const Store& store = place.value(number);
    if (acquires(order) && store.released != nullptr && reaches_me(address, store))
      acquire(*store.released);
    return store.value;
  }

  void store(uintptr_t address, uint64_t old_value, uint64_t value, int order, bool is_exchange) {
    Location& place = location(address, old_value);
    const Store& before = place.value(place.newest());
    Store store;
    store.value = value;
    store.thread = current_->id;
    store.epoch = epoch();
    store.at_ns = now_ns_;
    store.process = current_->process;
    // Continues the release sequence.
    const bool goes_on = is_exchange && before.released != nullptr && reaches_me(address, before);
    if (goes_on || releases(order)) {
      store.released = spare_clocks.take();
      *store.released = goes_on ? *before.released : Clock{};
    }
    if (releases(order)) release(store.released);
    place.add(store);
    if (!is_shared(address)) {  // its loads return the newest value
      while (place.first < place.newest()) place.forget_oldest();
      return;
    }
    const auto me = static_cast<size_t>(current_->id);
    if (place.seen.size() <= me) place.seen.resize(me + 1);
    place.seen[me] = place.newest();
    if (order == __ATOMIC_SEQ_CST)
      place.sequential = place.newest();
    else
      current_->unfenced.emplace_back(address, place.newest());
    if (current_->unfenced.size() > kUnfenced) current_->unfenced.clear();
  }

  // A later seq_cst load sees what the thread stored before the fence.
  void fence(int order) {
    if (order != __ATOMIC_SEQ_CST) return;
    for (const auto& [address, number] : current_->unfenced) {
      const auto found = locations_.find(address);
      if (found == locations_.end() || found->second.newest() < number) continue;  // forgotten
      found->second.sequential = std::max(found->second.sequential, number);
    }
    current_->unfenced.clear();
  }

  Cell& cell(uintptr_t number) {
    if (last_page_ == nullptr || last_page_number_ != number / kCellsOfPage) {
      last_page_number_ = number / kCellsOfPage;
      CellPage*& page = cells_[last_page_number_];
      if (page == nullptr) page = spare_pages.take();
      last_page_ = page;
    }
    return last_page_->cells[number % kCellsOfPage];
  }
  static void give_back(CellPage* page) {
    *page = {};
    spare_pages.give_back(page);
  }

  void read_plain(uintptr_t address, size_t bytes, void* place) {
    const int me = current_->id;
    const uint32_t now = epoch();
    for (uintptr_t at = address / 8; at <= (address + bytes - 1) / 8; ++at) {
      Cell& cell = this->cell(at);
      if (!knows(cell.writer, cell.written))
        race("reads", place, "wrote", cell.writer, cell.write_place, at);
      if (cell.reads == 0 && !knows(cell.reader, cell.read)) {
        cell.reads = static_cast<uint32_t>(reads_.size());
        reads_.push_back({{cell.reader, cell.read, cell.read_place}});
      }
      if (cell.reads == 0) {
        cell.reader = static_cast<int16_t>(me);
        cell.read = now;
        cell.read_place = place;
        continue;
      }
      std::vector<Read>& reads = reads_[cell.reads];
      const auto mine = std::find_if(reads.begin(), reads.end(),
                                     [me](const Read& read) { return read.thread == me; });
      if (mine == reads.end())
        reads.push_back({me, now, place});
      else
        *mine = {me, now, place};
    }
  }

  void write_plain(uintptr_t address, size_t bytes, void* place) {
    for (uintptr_t at = address / 8; at <= (address + bytes - 1) / 8; ++at) {
      Cell& cell = this->cell(at);
      if (!knows(cell.writer, cell.written))
        race("writes", place, "wrote", cell.writer, cell.write_place, at);
      if (!knows(cell.reader, cell.read))
        race("writes", place, "read", cell.reader, cell.read_place, at);
      for (const Read& read : reads_[cell.reads])
        if (!knows(read.thread, read.epoch))
          race("writes", place, "read", read.thread, read.place, at);
      cell = {epoch(), 0, static_cast<int16_t>(current_->id), -1, 0, place, nullptr};
    }
  }

  [[noreturn]] void race(const char* what, void* place, const char* other_what, int other,
                         void* other_place, uintptr_t cell) {
    const Thread& them = *threads_[static_cast<size_t>(other)];
    fail("data race: thread " + std::to_string(current_->id) + " of process " +
         std::to_string(current_->process) + " " + what + " in " + name_place(place) +
         " what thread " + std::to_string(other) + " of process " + std::to_string(them.process) +
         " " + other_what + " in " + name_place(other_place) + " (" + name_memory(cell * 8) + ")");
  }

  // The function and, for addr2line, the address in the program's file.
  static std::string name_place(void* place) {
    Dl_info info{};
    if (dladdr(place, &info) == 0) return "a place that is not known";
    int status = 0;
    char* plain = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string name = status == 0 ? plain : info.dli_sname == nullptr ? "?" : info.dli_sname;
    std::free(plain);
    char text[32];
    std::snprintf(text, sizeof text, " [%#zx]",
                  reinterpret_cast<size_t>(place) - reinterpret_cast<size_t>(info.dli_fbase));
    return name + text;
  }

  std::string name_memory(uintptr_t address) const {
    for (const Range& range : ranges_)
      if (address >= range.begin && address < range.end)
        return "offset " + std::to_string(address - range.begin) + " of " +
               std::to_string(range.end - range.begin) + " shared bytes";
    return "shared memory that is mapped no more";
  }

  static void* reserve(void* at, size_t bytes, int flags) {
    return reinterpret_cast<void*>(::syscall(SYS_mmap, at, bytes, PROT_NONE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags,
                                             -1, 0));
  }
  void* share(size_t bytes, int protection, int flags, int fd, off_t offset) {
    const uintptr_t begin = shared_next;
    auto* address = reinterpret_cast<void*>(
        ::syscall(SYS_mmap, begin, bytes, protection, flags | MAP_FIXED, fd, offset));
    if (address == MAP_FAILED) return address;
    const size_t pages = (bytes + kPageBytes - 1) / kPageBytes + 1;  // plus one guard page
    shared_next += pages * kPageBytes;
    ranges_.push_back({begin, begin + bytes});
    return address;
  }
  int unshare(void* address, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    std::erase_if(ranges_, [&](const Range& range) {
      return range.begin >= begin && range.end <= begin + bytes;
    });
    return reserve(address, bytes, MAP_FIXED) == MAP_FAILED ? -1 : 0;
  }

  // ---- mutexes

  static bool is_robust(const pthread_mutex_t* mutex) {
    return (mutex->__data.__kind & 16) != 0;  // glibc's mark
  }

  void lock(pthread_mutex_t* mutex) {
    Mutex* state = &mutexes_[mutex];
    if (state->owner == current_ && (mutex->__data.__kind & 3) == PTHREAD_MUTEX_RECURSIVE) {
      ++state->depth;
      return;
    }
    if (state->owner == current_) fail("a thread locks a mutex that it holds");
    step(true);
    while (mutexes_[mutex].owner != nullptr) block("a mutex", mutex, kNever);
    take(mutex);
  }
  void take(pthread_mutex_t* mutex) {
    Mutex& state = mutexes_[mutex];
    state.owner = current_;
    state.depth = 1;
    acquire(state.released);
    if (is_robust(mutex)) {
      set_word(mutex, 1000 + static_cast<uint32_t>(current_->id));
      robust_.push_back(mutex);
    } else {
      ++current_->shared_mutexes;
    }
  }
  void unlock(pthread_mutex_t* mutex) {
    Mutex& state = mutexes_[mutex];
    if (state.owner != current_) fail("a thread unlocks a mutex that it does not hold");
    if (--state.depth > 0) return;
    release(&state.released);
    state.owner = nullptr;
    if (is_robust(mutex)) {
      set_word(mutex, 0);
      std::erase(robust_, mutex);
    } else {
      --current_->shared_mutexes;
    }
    wake(mutex, 1);
  }
  bool try_lock(pthread_mutex_t* mutex) {
    if (mutexes_[mutex].owner != nullptr) return false;
    take(mutex);
    return true;
  }
  // The word that peers of a process read.
  void set_word(pthread_mutex_t* mutex, uint32_t value) {
    auto* word = reinterpret_cast<uint32_t*>(mutex);
    store(reinterpret_cast<uintptr_t>(word), *word, value, __ATOMIC_SEQ_CST, false);
    *word = value;
  }

  // ---- processes

  void kill_after(int process, uint64_t steps) {
    if (deaths_.size() <= static_cast<size_t>(process))
      deaths_.resize(static_cast<size_t>(process) + 1, kNever);
    deaths_[static_cast<size_t>(process)] = static_cast<int64_t>(steps);
  }
  bool is_dead(int process) const {
    return std::any_of(threads_.begin(), threads_.end(), [&](const auto& thread) {
      return thread->process == process && thread->state == Thread::State::kKilled;
    });
  }
  void die(int process) {
    deaths_[static_cast<size_t>(process)] = kNever;
    const bool myself = current_->process == process;
    Clock before{};
    for (const auto& thread : threads_)
      if (thread->process == process) {
        join(&before, thread->clock, threads_.size());
        if (thread->state != Thread::State::kEnded) thread->state = Thread::State::kKilled;
      }
    for (const auto& thread : threads_)
      if (thread->process == process) wake(thread.get(), kMostThreads);
    // The kernel's store comes after everything that the process did.
    for (pthread_mutex_t* mutex : std::vector<pthread_mutex_t*>(robust_)) {
      Thread* owner = mutexes_[mutex].owner;
      if (owner == nullptr || owner->process != process) continue;
      acquire(before);
      auto* word = reinterpret_cast<uint32_t*>(mutex);
      set_word(mutex, *word | FUTEX_OWNER_DIED);
      std::erase(robust_, mutex);
    }
    if (myself) {
      switch_thread();
      std::abort();
    }
  }

  Options options_;
  uint64_t state_;
  std::string failure_;
  uint64_t steps_ = 0, switches_ = 0;
  int64_t now_ns_ = next_start_ns;
  uint64_t progress_ = 1;  // how often a thread that does not poll has continued
  int64_t memory_left_ = kNever;
  const std::function<void()>* body_ = nullptr;
  jmp_buf main_;
  Thread* current_ = nullptr;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Thread*> ready_;
  std::vector<int64_t> deaths_;  // by process: remaining steps
  std::unordered_map<pthread_mutex_t*, Mutex> mutexes_;
  std::vector<pthread_mutex_t*> robust_;
  std::unordered_map<uintptr_t, Location> locations_;
  std::unordered_map<uintptr_t, CellPage*> cells_;
  CellPage* last_page_ = nullptr;
  uintptr_t last_page_number_ = 0;
  std::vector<std::vector<Read>> reads_ = {{}};
  std::vector<Range> ranges_;
};

// Marks work of the runtime, which must not enter its own functions.
class Outside {
 public:
  Outside() { inside = false; }
  ~Outside() { inside = true; }
  Outside(const Outside&) = delete;
};

// The C library's function behind a replacement below.
template <typename Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

Outcome run(const Options& options, const std::function<void()>& body) {
  return World(options).run(body);
}

uint64_t random(uint64_t bound) { return world->below(bound); }
int64_t now_ns() { return world->now_ns_; }
void set_process(int process) { world->current_->process = process; }
void kill(int process) { kill_after(process, 0); }
void kill_after(int process, uint64_t steps) {
  const Outside outside;
  world->kill_after(process, steps);
}
bool is_dead(int process) { return world->is_dead(process); }
void lose_time(int64_t ns) { world->now_ns_ += ns; }
void limit_memory(int64_t bytes) { world->memory_left_ = bytes; }
void fail(const std::string& what) { world->fail(what); }

namespace {

template <typename T>
uintptr_t address_of(const volatile T* place) {
  return reinterpret_cast<uintptr_t>(place);
}

template <typename T>
T atomic_load(const volatile T* place, int order) {
  if (!inside) return __atomic_load_n(place, __ATOMIC_SEQ_CST);
  const Outside outside;
  world->step(true);
  return static_cast<T>(world->load(address_of(place), *place, order, false));
}

template <typename T>
void atomic_store(volatile T* place, T value, int order) {
  if (!inside) return __atomic_store_n(place, value, __ATOMIC_SEQ_CST);
  const Outside outside;
  world->step(true);
  world->store(address_of(place), *place, value, order, false);
  *place = value;
}

template <typename T, typename Change>
T atomic_change(volatile T* place, int order, Change change) {
  const bool was_inside = inside;
  if (!was_inside) {  // outside of a world nothing runs concurrently
    const T before = *place;
    *place = change(before);
    return before;
  }
  const Outside outside;
  world->step(true);
  const T before = *place;
  const T after = change(before);
  world->load(address_of(place), before, order, true);
  world->store(address_of(place), before, after, order, true);
  *place = after;
  return before;
}

template <typename T>
int atomic_compare(volatile T* place, T* expected, T value, int order, int failure_order) {
  if (!inside) {
    if (*place == *expected) return *place = value, 1;
    return *expected = *place, 0;
  }
  const Outside outside;
  world->step(true);
  const T before = *place;
  const bool same = before == *expected;
  world->load(address_of(place), before, same ? order : failure_order, true);
  if (!same) return *expected = before, 0;
  world->store(address_of(place), before, value, order, true);
  *place = value;
  return 1;
}

void plain_read(void* place, size_t bytes, void* from) {
  if (!inside || bytes == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(place);
  if (!is_shared(address)) return;
  const Outside outside;
  world->read_plain(address, bytes, from);
}
void plain_write(void* place, size_t bytes, void* from) {
  if (!inside || bytes == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(place);
  if (!is_shared(address)) return;
  const Outside outside;
  world->write_plain(address, bytes, from);
}

int64_t in_ns(const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; }

int wait_on(pthread_cond_t* condition, pthread_mutex_t* mutex, int64_t wake_ns) {
  const Outside outside;
  world->unlock(mutex);
  const bool woken = world->block("a condition", condition, wake_ns);
  while (world->mutexes_[mutex].owner != nullptr) world->block("a mutex", mutex, kNever);
  world->take(mutex);
  return woken ? 0 : ETIMEDOUT;
}

int sleep_for(const timespec* time) {
  const Outside outside;
  world->step(true);
  world->block("sleep", nullptr, world->now_ns_ + std::max<int64_t>(in_ns(*time), 1));
  return 0;
}

}  // namespace
}  // namespace dscomm::schedule

// ---- functions that the compiler calls

using namespace dscomm::schedule;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

#define DSCOMM_PLAIN(bytes)                                                                        \
  void __tsan_read##bytes(void* p) { plain_read(p, bytes, __builtin_return_address(0)); }          \
  void __tsan_write##bytes(void* p) { plain_write(p, bytes, __builtin_return_address(0)); }        \
  void __tsan_unaligned_read##bytes(void* p) {                                                     \
    plain_read(p, bytes, __builtin_return_address(0));                                             \
  }                                                                                                \
  void __tsan_unaligned_write##bytes(void* p) {                                                    \
    plain_write(p, bytes, __builtin_return_address(0));                                            \
  }                                                                                                \
  void __tsan_volatile_read##bytes(void* p) { plain_read(p, bytes, __builtin_return_address(0)); } \
  void __tsan_volatile_write##bytes(void* p) { plain_write(p, bytes, __builtin_return_address(0)); }
DSCOMM_PLAIN(1)
DSCOMM_PLAIN(2)
DSCOMM_PLAIN(4)
DSCOMM_PLAIN(8)
DSCOMM_PLAIN(16)
void __tsan_read_range(void* p, unsigned long bytes) {
  plain_read(p, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
  plain_write(p, bytes, __builtin_return_address(0));
}

#define DSCOMM_ATOMIC(bits, type)                                                                 \
  type __tsan_atomic##bits##_load(const volatile type* p, int order) {                            \
    return atomic_load(p, order);                                                                 \
  }                                                                                               \
  void __tsan_atomic##bits##_store(volatile type* p, type value, int order) {                     \
    atomic_store(p, value, order);                                                                \
  }                                                                                               \
  type __tsan_atomic##bits##_exchange(volatile type* p, type value, int order) {                  \
    return atomic_change(p, order, [value](type) { return value; });                              \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_add(volatile type* p, type value, int order) {                 \
    return atomic_change(p, order, [value](type old) { return static_cast<type>(old + value); }); \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_sub(volatile type* p, type value, int order) {                 \
    return atomic_change(p, order, [value](type old) { return static_cast<type>(old - value); }); \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_and(volatile type* p, type value, int order) {                 \
    return atomic_change(p, order, [value](type old) { return static_cast<type>(old & value); }); \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_or(volatile type* p, type value, int order) {                  \
    return atomic_change(p, order, [value](type old) { return static_cast<type>(old | value); }); \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_xor(volatile type* p, type value, int order) {                 \
    return atomic_change(p, order, [value](type old) { return static_cast<type>(old ^ value); }); \
  }                                                                                               \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* expected, type value, \
                                                    int order, int failure) {                     \
    return atomic_compare(p, expected, value, order, failure);                                    \
  }                                                                                               \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile type* p, type* expected, type value,   \
                                                  int order, int failure) {                       \
    return atomic_compare(p, expected, value, order, failure);                                    \
  }                                                                                               \
  type __tsan_atomic##bits##_compare_exchange_val(volatile type* p, type expected, type value,    \
                                                  int order, int failure) {                       \
    atomic_compare(p, &expected, value, order, failure);                                          \
    return expected;                                                                              \
  }
DSCOMM_ATOMIC(8, uint8_t)
DSCOMM_ATOMIC(16, uint16_t)
DSCOMM_ATOMIC(32, uint32_t)
DSCOMM_ATOMIC(64, uint64_t)
void __tsan_atomic_thread_fence(int order) {
  if (!inside) return;
  const Outside outside;
  world->step(true);
  world->fence(order);
}
void __tsan_atomic_signal_fence(int) {}

void* __real_memcpy(void*, const void*, size_t);
void* __real_memmove(void*, const void*, size_t);
void* __real_memset(void*, int, size_t);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  plain_read(const_cast<void*>(from), bytes, __builtin_return_address(0));
  plain_write(to, bytes, __builtin_return_address(0));
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  plain_read(const_cast<void*>(from), bytes, __builtin_return_address(0));
  plain_write(to, bytes, __builtin_return_address(0));
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  plain_write(to, bytes, __builtin_return_address(0));
  return __real_memset(to, value, bytes);
}

// ---- the C library's threads

int pthread_create(pthread_t* handle, const pthread_attr_t* attributes, void* (*function)(void*),
                   void* argument) {
  if (!inside) {
    static auto* original = real<decltype(pthread_create)>("pthread_create");
    return original(handle, attributes, function, argument);
  }
  const Outside outside;
  world->step(false);
  Thread* thread = world->make_thread(function, argument);
  *handle = kFirstHandle + static_cast<pthread_t>(thread->id);
  return 0;
}

int pthread_join(pthread_t handle, void** result) {
  if (!inside) {
    static auto* original = real<decltype(pthread_join)>("pthread_join");
    return original(handle, result);
  }
  const Outside outside;
  Thread* thread = world->threads_.at(handle - kFirstHandle).get();
  while (thread->state != Thread::State::kEnded && thread->state != Thread::State::kKilled)
    world->block("join", thread, kNever);
  world->acquire(thread->clock);
  if (result != nullptr) *result = thread->result;
  return 0;
}

int pthread_detach(pthread_t handle) {
  if (inside) return 0;
  static auto* original = real<decltype(pthread_detach)>("pthread_detach");
  return original(handle);
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (!inside) {
    static auto* original = real<decltype(pthread_mutex_lock)>("pthread_mutex_lock");
    return world != nullptr ? 0 : original(mutex);
  }
  const Outside outside;
  world->lock(mutex);
  return 0;
}
int pthread_mutex_trylock(pthread_mutex_t* mutex) {
  if (!inside) {
    static auto* original = real<decltype(pthread_mutex_trylock)>("pthread_mutex_trylock");
    return world != nullptr ? 0 : original(mutex);
  }
  const Outside outside;
  return world->try_lock(mutex) ? 0 : EBUSY;
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  if (!inside) {
    static auto* original = real<decltype(pthread_mutex_unlock)>("pthread_mutex_unlock");
    return world != nullptr ? 0 : original(mutex);
  }
  const Outside outside;
  world->unlock(mutex);
  return 0;
}

// Ignored: it would block the signals of the whole world, including the walk's alarm.
int pthread_sigmask(int how, const sigset_t* set, sigset_t* before) {
  static auto* original = real<decltype(pthread_sigmask)>("pthread_sigmask");
  if (!inside) return original(how, set, before);
  if (before != nullptr) sigemptyset(before);
  return 0;
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  if (!inside) {
    static auto* original = real<decltype(pthread_cond_wait)>("pthread_cond_wait");
    return original(condition, mutex);
  }
  return wait_on(condition, mutex, kNever);
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  if (!inside) {
    static auto* original = real<decltype(pthread_cond_clockwait)>("pthread_cond_clockwait");
    return original(condition, mutex, clock, until);
  }
  return wait_on(condition, mutex, in_ns(*until));  // all clocks of a world are one
}
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  if (!inside) {
    static auto* original = real<decltype(pthread_cond_timedwait)>("pthread_cond_timedwait");
    return original(condition, mutex, until);
  }
  return wait_on(condition, mutex, in_ns(*until));
}
int pthread_cond_signal(pthread_cond_t* condition) {
  if (!inside) {
    static auto* original = real<decltype(pthread_cond_signal)>("pthread_cond_signal");
    return original(condition);
  }
  const Outside outside;
  world->wake(condition, 1);
  return 0;
}
int pthread_cond_broadcast(pthread_cond_t* condition) {
  if (!inside) {
    static auto* original = real<decltype(pthread_cond_broadcast)>("pthread_cond_broadcast");
    return original(condition);
  }
  const Outside outside;
  world->wake(condition, kMostThreads);
  return 0;
}

// ---- time, sleep and shared memory

int clock_gettime(clockid_t clock, timespec* time) {
  if (!inside || clock == CLOCK_THREAD_CPUTIME_ID || clock == CLOCK_PROCESS_CPUTIME_ID)
    return static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  const int64_t now = world->now_ns_ += kStepNs;
  time->tv_sec = now / 1'000'000'000;
  time->tv_nsec = now % 1'000'000'000;
  return 0;
}

int sched_yield() {
  if (!inside) return static_cast<int>(::syscall(SYS_sched_yield));
  const Outside outside;
  world->now_ns_ += kYieldNs;
  world->step(false);
  world->switch_thread();
  return 0;
}

int nanosleep(const timespec* time, timespec* left) {
  if (inside) return sleep_for(time);
  return static_cast<int>(::syscall(SYS_nanosleep, time, left));
}
int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  if (inside && flags == 0) return sleep_for(time);
  return ::syscall(SYS_clock_nanosleep, clock, flags, time, left) == 0 ? 0 : errno;
}

int ppoll(pollfd* entries, nfds_t count, const timespec* timeout, const sigset_t* mask) {
  timespec none{};
  if (!inside) {
    static auto* original = real<decltype(ppoll)>("ppoll");
    return original(entries, count, timeout, mask);
  }
  const Outside outside;
  const int64_t end = timeout == nullptr ? kNever : world->now_ns_ + in_ns(*timeout);
  while (true) {
    world->step(true);
    none = {};
    const auto ready =
        static_cast<int>(::syscall(SYS_ppoll, entries, count, &none, nullptr, size_t{8}));
    if (ready != 0 || world->now_ns_ >= end) {
      ++world->progress_;
      return ready;
    }
    world->current_->looked_at = world->progress_;
    world->block("poll", entries, end, true);
  }
}
int poll(pollfd* entries, nfds_t count, int timeout_ms) {
  timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000};
  return ppoll(entries, count, timeout_ms < 0 ? nullptr : &timeout, nullptr);
}

// Pages are allocated when touched: allocating them ahead takes longer than most programs.
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (inside && (mode & FALLOC_FL_PUNCH_HOLE) == 0) {
    if (world->memory_left_ == kNever) return 0;
    if (bytes > world->memory_left_) {
      errno = ENOSPC;
      return -1;
    }
    world->memory_left_ -= bytes;
    return 0;
  }
  return static_cast<int>(::syscall(SYS_fallocate, fd, mode, offset, bytes));
}
int madvise(void* address, size_t bytes, int advice) {
  if (inside && advice != MADV_DONTNEED && advice != MADV_REMOVE) return 0;
  return static_cast<int>(::syscall(SYS_madvise, address, bytes, advice));
}

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (inside && (flags & MAP_SHARED) != 0 && fd >= 0) {
    const Outside outside;
    if (at != nullptr) world->fail("shared memory at an address that no world knows");
    return world->share(bytes, protection, flags, fd, offset);
  }
  return reinterpret_cast<void*>(::syscall(SYS_mmap, at, bytes, protection, flags, fd, offset));
}
int munmap(void* address, size_t bytes) {
  if (is_shared(reinterpret_cast<uintptr_t>(address))) {
    if (inside) {
      const Outside outside;
      return world->unshare(address, bytes);
    }
    return World::reserve(address, bytes, MAP_FIXED) == MAP_FAILED ? -1 : 0;
  }
  return static_cast<int>(::syscall(SYS_munmap, address, bytes));
}

// Socket names come from the seed, and another walk may use the same seed.
sockaddr_un name_here(const sockaddr* address, socklen_t* bytes) {
  sockaddr_un name{};
  std::memcpy(&name, address, std::min<size_t>(*bytes, sizeof name));
  static const std::string walk = "-" + std::to_string(getppid());
  std::memcpy(reinterpret_cast<char*>(&name) + *bytes, walk.data(),
              std::min(walk.size(), sizeof name - *bytes));
  *bytes = static_cast<socklen_t>(std::min(*bytes + walk.size(), sizeof name));
  return name;
}
int bind(int fd, const sockaddr* address, socklen_t bytes) {
  static auto* original = real<decltype(bind)>("bind");
  if (!inside || address->sa_family != AF_UNIX) return original(fd, address, bytes);
  const Outside outside;
  const sockaddr_un name = name_here(address, &bytes);
  return original(fd, reinterpret_cast<const sockaddr*>(&name), bytes);
}
ssize_t sendto(int fd, const void* data, size_t size, int flags, const sockaddr* address,
               socklen_t bytes) {
  static auto* original = real<decltype(sendto)>("sendto");
  if (!inside || address == nullptr || address->sa_family != AF_UNIX)
    return original(fd, data, size, flags, address, bytes);
  const Outside outside;
  const sockaddr_un name = name_here(address, &bytes);
  return original(fd, data, size, flags, reinterpret_cast<const sockaddr*>(&name), bytes);
}

// A world has one host.
int getifaddrs(ifaddrs** first) {
  static auto* original = real<decltype(getifaddrs)>("getifaddrs");
  return inside ? -1 : original(first);
}

// Ids come from the seed, too.
ssize_t getrandom(void* to, size_t bytes, unsigned flags) {
  if (!inside) return ::syscall(SYS_getrandom, to, bytes, flags);
  const Outside outside;
  for (size_t k = 0; k < bytes; ++k)
    static_cast<uint8_t*>(to)[k] = static_cast<uint8_t>(world->next() >> 40);
  return static_cast<ssize_t>(bytes);
}

// The futex calls of a wait.
long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& argument : a) argument = va_arg(list, long);
  va_end(list);
  if (!inside || number != SYS_futex)
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  const Outside outside;
  const auto* word = reinterpret_cast<const uint32_t*>(a[0]);
  const int operation = static_cast<int>(a[1]) & FUTEX_CMD_MASK;
  world->step(true);
  if (operation == FUTEX_WAKE)
    return static_cast<long>(world->wake(word, static_cast<size_t>(a[2])));
  if (operation != FUTEX_WAIT) world->fail("a futex call that no world knows");
  // The kernel compares under its lock, so with the newest value.
  if (*word != static_cast<uint32_t>(a[2])) {
    errno = EAGAIN;
    return -1;
  }
  const auto* timeout = reinterpret_cast<const timespec*>(a[3]);
  const bool woken =
      world->block("futex", word, timeout == nullptr ? kNever : world->now_ns_ + in_ns(*timeout));
  if (woken) return 0;
  errno = ETIMEDOUT;
  return -1;
}

}  // extern "C"
