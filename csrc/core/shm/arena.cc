#include "core/shm/arena.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>

#include "core/base/memory_limit.h"

namespace dscomm {
namespace {

// Lines come in pages; asking the kernel for each would cost a call a group.
constexpr size_t kBackingStep = 256 * 1024;
// Left to the rest of the machine when limits are checked.
constexpr int64_t kSpareBytes = 16 << 20;

size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

Status system_error(const char* what) {
  return make_status(Code::kResource, "%s failed: %s", what, std::strerror(errno));
}

// What this process has mapped; 0 where /proc does not tell.
size_t mapped_bytes() {
  std::ifstream file("/proc/self/statm");
  size_t pages = 0;
  file >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Result<std::shared_ptr<Arena>> Arena::create(size_t arena_bytes) {
  arena_bytes = std::min(arena_bytes, file_size_limit());
  rlimit limit;
  // Address space is needed for every peer's arena too, and for threads.
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    arena_bytes = std::min(
        arena_bytes, (limit.rlim_cur - std::min<size_t>(limit.rlim_cur, mapped_bytes())) / 16);
  arena_bytes = arena_bytes / kPageBytes * kPageBytes;
  if (arena_bytes < 1 << 20)
    return make_status(
        Code::kResource,
        "the limits on file size or address space (ulimit -f, ulimit -v) leave %zu bytes for "
        "shared memory; at least 1 MiB is needed",
        arena_bytes);

  std::shared_ptr<Arena> arena(new Arena);
  Result<SealedMemory> memory = SealedMemory::reserve("dscomm-arena", arena_bytes);
  if (!memory.ok()) return memory.status();
  arena->memory_ = std::move(memory).value();
  // A forked child must not keep the arena alive.
  madvise(arena->data(), arena_bytes, MADV_DONTFORK);

  Result<uint64_t> first = arena->allocate(sizeof(ArenaHeader));
  if (!first.ok()) return first.status();
  auto* header = new (arena->data()) ArenaHeader{};
  header->magic = kArenaMagic;
  header->version = kLayoutVersion;
  header->arena_bytes = arena_bytes;
  if (getrandom(&header->id, sizeof header->id, 0) != static_cast<ssize_t>(sizeof header->id))
    return system_error("getrandom");
  return arena;
}

Arena::~Arena() = default;

Status Arena::check_limits(size_t bytes, int ranks) {
  MemoryLimit limit = memory_limit();
  int64_t wanted = static_cast<int64_t>(bytes) * ranks;
  if (wanted + kSpareBytes <= limit.available_bytes) return {};
  return make_status(
      Code::kResource,
      "%d ranks on this host need %lld bytes of shared memory, but %s leaves %lld; give the job "
      "more memory or lower DSCOMM_STAGING_BYTES",
      ranks, static_cast<long long>(wanted), limit.source.c_str(),
      static_cast<long long>(limit.available_bytes));
}

Result<uint64_t> Arena::allocate(size_t bytes) {
  bytes = round_up(std::max<size_t>(bytes, 1), kPageBytes);
  std::lock_guard lock(mutex_);
  sweep_locked();
  std::vector<uint64_t>& reusable = free_[bytes];
  if (!reusable.empty()) {
    uint64_t offset = reusable.back();
    reusable.pop_back();
    used_ += bytes;
    return offset;
  }
  if (next_ + bytes > memory_.size())
    return make_status(
        Code::kResource,
        "the arena of %zu bytes is full; raise DSCOMM_ARENA_BYTES or destroy groups that are done",
        memory_.size());
  if (next_ + bytes > backed_) {
    uint64_t end = std::min<uint64_t>(round_up(next_ + bytes, kBackingStep), memory_.size());
    DSCOMM_RETURN_IF_ERROR(check_limits(end - backed_, 1));
    DSCOMM_RETURN_IF_ERROR(memory_.back(backed_, end));
    memory_.map_now(backed_, end);
    backed_ = end;
  }
  uint64_t offset = next_;
  next_ += bytes;
  used_ += bytes;
  return offset;
}

void Arena::release(uint64_t offset, size_t bytes) {
  std::lock_guard lock(mutex_);
  release_locked(offset, bytes);
}

void Arena::release_locked(uint64_t offset, size_t bytes) {
  bytes = round_up(bytes, kPageBytes);
  free_[bytes].push_back(offset);
  used_ -= bytes;
}

void Arena::release_when(std::function<bool()> is_free,
                         std::vector<std::pair<uint64_t, size_t>> pieces) {
  std::lock_guard lock(mutex_);
  if (ended_) return;
  pending_.push_back({std::move(is_free), std::move(pieces)});
  sweep_locked();
}

void Arena::sweep_locked() {
  auto keep = std::partition(pending_.begin(), pending_.end(),
                             [](const Pending& p) { return !p.is_free(); });
  for (auto freed = keep; freed != pending_.end(); ++freed)
    for (auto [offset, bytes] : freed->pieces) release_locked(offset, bytes);
  pending_.erase(keep, pending_.end());
}

void Arena::begin_life() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  int result = pthread_mutex_init(&header().life, &attributes);
  if (result == 0) result = pthread_mutex_lock(&header().life);
  pthread_mutexattr_destroy(&attributes);
  DSCOMM_CHECK(result == 0, "a fresh robust mutex can be locked");
}

void Arena::end_life() {
  pthread_mutex_unlock(&header().life);
  std::vector<Pending> dropped;  // with the lock free: a peer that goes may take its arena along
  std::lock_guard lock(mutex_);
  ended_ = true;
  dropped.swap(pending_);
}

size_t Arena::resident_bytes() const {
  std::lock_guard lock(mutex_);
  return backed_;
}

size_t Arena::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_;
}

}  // namespace dscomm
