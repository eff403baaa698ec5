#include "core/base/memory_reservation.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "core/base/deadline.h"
#include "core/base/log.h"
#include "core/base/round_up.h"

// Since Linux 3.15; glibc declares these constants only for _GNU_SOURCE.
#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

namespace dscomm {
namespace {

constexpr size_t kPageBytes = 4096;  // one byte of a lock announces one page
// Each announcement starts at a random multiple of the largest size, so that those of two processes
// do not overlap.
constexpr int64_t kMostPages = int64_t{1} << 28;  // 1 TiB
constexpr int64_t kStarts = int64_t{1} << 34;
constexpr int64_t kLedgerEnd = kStarts * kMostPages;

constexpr int64_t kSpareBytes = 16 << 20;
// In each process that maps the memory, page tables take 1/512 of the memory's size, charged when
// they are created. So 1/64 is enough for eight processes.
constexpr size_t kSpareShare = 64;

constexpr auto kPause = std::chrono::milliseconds(1);
constexpr int64_t kTurnNs = std::chrono::nanoseconds(MemoryReservation::kLongestTurn).count();
constexpr int64_t kStaleNs = std::chrono::nanoseconds(MemoryReservation::kStaleAfter).count();
constexpr int64_t kLongestNs = std::chrono::nanoseconds(MemoryReservation::kLongestWait).count();

int64_t random_number() {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number)
    number = static_cast<uint64_t>(monotonic_ns());
  return static_cast<int64_t>(number >> 1);
}

struct flock record(short type, int64_t begin, int64_t end) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = begin;
  lock.l_len = end - begin;
  return lock;
}

// The pages that other descriptors have announced in the ledger (the file or folder of a limit).
// Stops after kMostRecords queries, and counts at most kMostPages for a record, because no real
// announcement is larger.
int64_t announced_pages(int ledger) {
  constexpr int kMostRecords = 10000;
  std::vector<std::pair<int64_t, int64_t>> ranges{{0, kLedgerEnd}};
  int64_t pages = 0;
  for (int k = 0; k < kMostRecords && !ranges.empty(); ++k) {
    const auto [begin, end] = ranges.back();
    ranges.pop_back();
    struct flock found = record(F_WRLCK, begin, end);
    if (fcntl(ledger, F_OFD_GETLK, &found) != 0 || found.l_type == F_UNLCK) continue;
    const int64_t first = std::max<int64_t>(begin, found.l_start);
    const int64_t last =
        found.l_len == 0 || found.l_len > end - found.l_start ? end : found.l_start + found.l_len;
    pages += std::min(std::max<int64_t>(last - first, 0), kMostPages);
    if (begin < first) ranges.emplace_back(begin, first);
    if (first <= last && last < end) ranges.emplace_back(last, end);
  }
  return pages;
}

// The flocks and announcements for which this process has stopped waiting, by path, so that it does
// not soon wait for them again.
class Distrust {
 public:
  void lock_is_stuck(const std::string& path) { note(path).lock_until_ns = until(); }
  bool is_lock_stuck(const std::string& path) { return note(path).lock_until_ns > monotonic_ns(); }

  void is_stale(const std::string& path, int64_t bytes) {
    Note& known = note(path);
    known.stale_bytes = bytes;
    known.stale_until_ns = until();
  }
  int64_t stale_bytes(const std::string& path) {
    const Note& known = note(path);
    return known.stale_until_ns > monotonic_ns() ? known.stale_bytes.load() : 0;
  }

 private:
  struct Note {
    std::atomic<int64_t> lock_until_ns{0}, stale_until_ns{0}, stale_bytes{0};
  };
  static int64_t until() { return monotonic_ns() + 10 * kStaleNs; }
  Note& note(const std::string& path) {
    std::lock_guard lock(mutex_);
    return notes_[path];
  }
  std::mutex mutex_;
  std::map<std::string, Note> notes_;  // nodes have stable addresses
};

Distrust& distrust() {
  static auto* never_destroyed = new Distrust;
  return *never_destroyed;
}

// Holds the flocks of all paths while this process announces.
class Order {
 public:
  void enter(int ledger, const std::string& path) {
    while (flock(ledger, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) return;
      if (distrust().is_lock_stuck(path)) return;
      if (monotonic_ns() > end_ns_) return distrust().lock_is_stuck(path);
      std::this_thread::sleep_for(kPause);
    }
    held_.push_back(ledger);
  }
  // Unlocks explicitly, because a child forked meanwhile shares the open file and its locks.
  ~Order() {
    for (int ledger : held_) flock(ledger, LOCK_UN);
  }

 private:
  const int64_t end_ns_ = monotonic_ns() + kTurnNs;
  std::vector<int> held_;
};

void log_once(const std::string& path, int error) {
  // Relaxed: `told` guards no data. The first thread to set it logs.
  static std::atomic<bool> told{false};
  if (!told.exchange(true, std::memory_order_relaxed))
    log_line(LogLevel::kInfo,
             "{} cannot be locked ({}): limits on memory are read, but what other processes take "
             "at the same time is not known",
             path, std::strerror(error));
}

Status refusal(const MemoryLimit& limit, int64_t others_bytes, size_t bytes) {
  std::string others;
  if (others_bytes > 0)
    others = ", of which other processes have reserved " + std::to_string(others_bytes);
  return make_status(Code::kResource, "{} leaves {} bytes{}; {} are needed, and {} must stay free",
                     limit.source, limit.available_bytes, others, bytes,
                     MemoryReservation::spare_bytes(bytes));
}

}  // namespace

int64_t MemoryReservation::spare_bytes(size_t bytes) {
  return kSpareBytes + static_cast<int64_t>(bytes / kSpareShare);
}

MemoryReservation::~MemoryReservation() { withdraw(); }

// Unlocks explicitly, because a child forked meanwhile shares the open file and its locks.
void MemoryReservation::withdraw() {
  taken(bytes_);
  entries_.clear();
}

void MemoryReservation::taken(size_t bytes) {
  const auto pages = static_cast<int64_t>(round_up(bytes, kPageBytes) / kPageBytes);
  for (Entry& entry : entries_) {
    const int64_t begin = std::min(entry.begin + pages, entry.end);
    if (begin == entry.begin) continue;
    struct flock lock = record(F_UNLCK, entry.begin, begin);
    fcntl(entry.ledger.get(), F_OFD_SETLK, &lock);
    entry.begin = begin;
  }
}

void MemoryReservation::announce(Entry* entry, const std::string& path) {
  const auto pages = static_cast<int64_t>(round_up(bytes_, kPageBytes) / kPageBytes);
  const int64_t begin = random_number() % kStarts * kMostPages;
  struct flock lock = record(F_RDLCK, begin, begin + pages);
  if (fcntl(entry->ledger.get(), F_OFD_SETLK, &lock) == 0) {
    entry->begin = begin;
    entry->end = begin + pages;
  } else {
    log_once(path, errno);
    entry->ledger.reset();
  }
}

MemoryReservation::Refusal MemoryReservation::try_once(const std::string& proc,
                                                       const std::string& cgroup, Others* others,
                                                       Status* why) {
  const std::vector<MemoryLimit> paths = memory_limits(proc, cgroup);
  Order order;
  for (const MemoryLimit& limit : paths) {
    entries_.emplace_back().ledger = UniqueFd(open(limit.path.c_str(), O_RDONLY | O_CLOEXEC));
    if (entries_.back().ledger.valid())
      order.enter(entries_.back().ledger.get(), limit.path);
    else
      log_once(limit.path, errno);
  }
  for (size_t k = 0; k < paths.size(); ++k)
    if (entries_[k].ledger.valid()) announce(&entries_[k], paths[k].path);
  // Reads announcements before limits: pages charged in between then count twice, not zero times.
  std::map<std::string, int64_t> announced;
  for (size_t k = 0; k < paths.size(); ++k)
    if (entries_[k].ledger.valid())
      announced[paths[k].path] = announced_pages(entries_[k].ledger.get()) * int64_t{kPageBytes};
  Refusal refused = Refusal::kNone;
  for (const MemoryLimit& limit : memory_limits(proc, cgroup)) {
    const int64_t all = announced[limit.path];
    const int64_t believed = std::max<int64_t>(all - distrust().stale_bytes(limit.path), 0);
    const int64_t left = limit.available_bytes - spare_bytes(bytes_) - static_cast<int64_t>(bytes_);
    if (left >= believed) continue;
    *why = refusal(limit, all, bytes_);
    *others = {limit.path, all};
    refused = left < 0 ? Refusal::kLimit : Refusal::kOthers;
    if (left < 0) break;
  }
  // Withdraws before the flocks are released: the next process must not count this announcement.
  if (refused != Refusal::kNone) withdraw();
  return refused;
}

Result<MemoryReservation> MemoryReservation::make(size_t bytes, const std::string& proc,
                                                  const std::string& cgroup) {
  if (bytes > static_cast<size_t>(kMostPages) * kPageBytes)
    return make_status(Code::kResource, "{} bytes of memory are more than can be reserved at once",
                       bytes);
  const int64_t began_ns = monotonic_ns();
  MemoryReservation reservation(bytes);
  Others last;
  int64_t changed_ns = began_ns;
  while (true) {
    Status why;
    Others others;
    const Refusal refused = reservation.try_once(proc, cgroup, &others, &why);
    if (refused == Refusal::kNone) return reservation;
    const int64_t now = monotonic_ns();
    if (refused == Refusal::kLimit || now - began_ns > kLongestNs) return why;
    if (others != last) {
      last = others;
      changed_ns = now;
    } else if (now - changed_ns > kStaleNs) {
      distrust().is_stale(others.path, others.bytes);
      log_line(LogLevel::kWarn, "{}; the others took none of it for a second and are ignored",
               why.message());
    }
    std::this_thread::sleep_for(kPause * (1 + random_number() % 4));
  }
}

}  // namespace dscomm
