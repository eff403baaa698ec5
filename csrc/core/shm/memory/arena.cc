#include "core/shm/memory/arena.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <new>
#include <ranges>

#include "core/base/round_up.h"
#include "core/topology/topology.h"

namespace dscomm {
namespace {

// The arena grows by multiples of this: growth by a page would cost system calls for each mailbox.
constexpr size_t kArenaStepBytes = 256 * 1024;
// Lent memory leaves an eighth of the arena to lasting memory: mailboxes, channels, kept staging.
constexpr size_t kUnlentShare = 8;
// Pending releases that release_when() checks: more than one, so that the list shrinks; not all,
// because it may hold thousands.
constexpr size_t kSweptAtOnce = 4;

// Address space that this process has mapped; 0 if /proc cannot be read.
size_t mapped_bytes() {
  std::ifstream file("/proc/self/statm");
  size_t pages = 0;
  file >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Result<std::shared_ptr<Arena>> Arena::create(size_t arena_bytes, const Topology* topology) {
  arena_bytes = std::min<size_t>(arena_bytes, resource_limit(RLIMIT_FSIZE));
  // The peers' arenas and the threads need address space, too.
  if (const size_t limit = resource_limit(RLIMIT_AS); limit != RLIM_INFINITY)
    arena_bytes = std::min(arena_bytes, (limit - std::min(limit, mapped_bytes())) / 16);
  arena_bytes = arena_bytes / kPageBytes * kPageBytes;
  if (arena_bytes < 1 << 20)
    return make_status(
        Code::kResource,
        "the limits on file size or address space (ulimit -f, ulimit -v) leave {} bytes for "
        "shared memory; at least 1 MiB is needed: raise them",
        arena_bytes);

  std::shared_ptr<Arena> arena(new Arena);
  DSCOMM_ASSIGN_OR_RETURN(SealedMemory memory, SealedMemory::reserve("dscomm-arena", arena_bytes));
  arena->space_ = BlockSpace(std::move(memory), kArenaStepBytes);
  if (topology != nullptr) topology->place_memory(arena->data(), arena_bytes);
  // A forked child must not keep the arena alive.
  madvise(arena->data(), arena_bytes, MADV_DONTFORK);

  DSCOMM_RETURN_IF_ERROR(arena->allocate(sizeof(ArenaHeader)).status());
  auto* header = new (arena->data()) ArenaHeader{};
  header->magic = kArenaMagic;
  header->version = kLayoutVersion;
  header->arena_bytes = arena_bytes;
  if (getrandom(&header->id, sizeof header->id, 0) != static_cast<ssize_t>(sizeof header->id))
    return system_error("getrandom");
  return arena;
}

Result<uint64_t> Arena::allocate(size_t bytes) {
  std::lock_guard lock(mutex_);
  return allocate_locked(round_up(std::max<size_t>(bytes, 1), kPageBytes));
}

Result<uint64_t> Arena::allocate_mailbox() {
  static_assert(sizeof(Mailbox) <= kPageBytes);
  std::lock_guard lock(mutex_);
  if (vacant_mailboxes_.empty()) sweep_locked(pending_.size());
  if (vacant_mailboxes_.empty()) {
    Result<uint64_t> offset = allocate_locked(kPageBytes);
    if (offset.ok()) mailboxes_.insert(offset.value());
    return offset;
  }
  const uint64_t offset = vacant_mailboxes_.back();
  vacant_mailboxes_.pop_back();
  used_ += kPageBytes;
  return offset;
}

Arena::Ticket::Ticket(Arena& arena, const Borrower& borrower) : arena_(arena) {
  std::lock_guard lock(arena_.mutex_);
  number_ = arena_.next_ticket_++;
  arena_.tickets_.emplace(number_, borrower);
}

Arena::Ticket::~Ticket() {
  std::lock_guard lock(arena_.mutex_);
  arena_.tickets_.erase(number_);
}

Result<uint64_t> Arena::lend(size_t bytes, const Borrower& borrower, const Ticket* ticket) {
  bytes = round_up(std::max<size_t>(bytes, 1), kPageBytes);
  std::lock_guard lock(mutex_);
  if (!tickets_.empty() && (ticket == nullptr || ticket->number_ != tickets_.begin()->first))
    return full_locked();
  if (used_ + bytes > size() - size() / kUnlentShare) sweep_locked(pending_.size());
  if (used_ + bytes > size() - size() / kUnlentShare) return full_locked();
  Result<uint64_t> offset = allocate_locked(bytes);
  if (offset.ok()) lent_[offset.value()] = borrower;
  return offset;
}

bool Arena::may_lend_later(const Ticket& ticket) const {
  std::lock_guard lock(mutex_);
  if (ticket.number_ != tickets_.begin()->first) return true;
  const auto waits_for_turn = [this](const Borrower& borrower) {
    return std::ranges::any_of(tickets_ | std::views::values, [&](const Borrower& queued) {
      return borrower.group_id == queued.group_id && borrower.sequence >= queued.sequence;
    });
  };
  return !std::ranges::all_of(lent_ | std::views::values, waits_for_turn) ||
         !std::ranges::all_of(pending_, [&](const Pending& pending) {
           return pending.borrower && waits_for_turn(*pending.borrower);
         });
}

Result<uint64_t> Arena::allocate_locked(size_t bytes) {
  std::optional<uint64_t> offset = space_.take(bytes);
  if (!offset && !pending_.empty()) {
    sweep_locked(pending_.size());
    offset = space_.take(bytes);
  }
  if (!offset) {
    if (!space_.has_room(bytes)) return full_locked();
    const uint64_t backed = space_.backed_bytes();
    if (Status grown = space_.grow(bytes); !grown.ok())
      return Status(grown.code(), "no shared memory: " + grown.message() +
                                      "; give the job more memory or lower DSCOMM_STAGING_BYTES");
    space_.memory().map_now(backed, space_.backed_bytes());
    offset = space_.take(bytes);
  }
  used_ += bytes;
  return *offset;
}

Status Arena::full_locked() const {
  const bool has_late_readers = !lent_.empty() || !pending_.empty();
  return make_status(
      Code::kResource,
      "the arena of {} bytes is full{}; raise DSCOMM_ARENA_BYTES (and ulimit -f or -v) or {}",
      size(), has_late_readers ? " of data that other ranks have not read yet" : "",
      has_late_readers ? "have fewer calls in flight" : "destroy groups that are done");
}

void Arena::release(uint64_t offset, size_t bytes) {
  std::lock_guard lock(mutex_);
  release_locked(offset, bytes);
}

void Arena::release_locked(uint64_t offset, size_t bytes) {
  bytes = round_up(bytes, kPageBytes);
  used_ -= bytes;
  if (mailboxes_.contains(offset))
    vacant_mailboxes_.push_back(offset);
  else
    space_.give(offset, bytes);
}

void Arena::release_when(std::function<bool()> is_free,
                         std::vector<std::pair<uint64_t, size_t>> pieces,
                         std::optional<Borrower> borrower) {
  std::lock_guard lock(mutex_);
  for (const auto& [offset, bytes] : pieces) lent_.erase(offset);
  if (ended_) return;
  pending_.push_back({std::move(is_free), std::move(pieces), borrower});
  sweep_locked(kSweptAtOnce);
}

// Checks up to `most` pending releases, in turn.
void Arena::sweep_locked(size_t most) {
  for (size_t asked = std::min(most, pending_.size()); asked > 0; --asked) {
    if (next_pending_ >= pending_.size()) next_pending_ = 0;
    Pending& next = pending_[next_pending_];
    if (!next.is_free()) {
      ++next_pending_;
      continue;
    }
    for (auto [offset, bytes] : next.pieces) release_locked(offset, bytes);
    if (&next != &pending_.back()) next = std::move(pending_.back());
    pending_.pop_back();
  }
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
  std::vector<Pending> dropped;  // destroyed after unlocking: may hold the last reference to this
  std::lock_guard lock(mutex_);
  ended_ = true;
  dropped.swap(pending_);
}

size_t Arena::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_;
}

}  // namespace dscomm
