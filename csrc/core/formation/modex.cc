#include "core/formation/modex.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <mutex>
#include <sstream>
#include <utility>

#include "core/base/format.h"
#include "core/base/log.h"
#include "core/base/packer.h"
#include "core/base/settings.h"
#include "core/shm/mailbox/layout.h"

namespace dscomm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{1}, kLongestPause{50};
// The limit to read a key that exists. A read takes long only if the store is lost.
constexpr milliseconds kReadLimit{10'000};
// How often a waiting rank looks whether the meeting has failed.
constexpr int64_t kCheckEveryNs = 100'000'000;
// Rank 0 times out first and names the missing ranks; the others wait this much longer to hear it.
constexpr int64_t kLastWordNs = 1'000'000'000;
// If another process overwrites the entry of a live rank, that rank reports this within this time.
constexpr int64_t kObjectionNs = 300'000'000;
// How often rank 0 reads single entries while it waits for all expected ones. That finds failures,
// and entries of ranks that were not expected.
constexpr int64_t kPassEveryNs = 250'000'000;
// How often a rank puts its entry again while it waits for ranks that it will speak for.
constexpr int64_t kPutEveryNs = 1'000'000'000;
// If a rank finds a failure in the store when it comes, the failure may be of an attempt in which
// this rank failed, too: rank 0 gets this long to remove the failure.
constexpr int64_t kClosedNs = 2'000'000'000;
// In the relay tree, a leader at depth d waits at most d * kParentLimit for its parent's table, and
// then reads the store. A parent waits at most kChildrenLimit until its children have the table.
constexpr milliseconds kParentLimit{1'000}, kChildrenLimit{2'000};
// Most bytes of a peer's table, per rank. An entry with many networks takes some kilobytes.
constexpr size_t kMostEntryBytes = 65536;
// Without torchrun, the limit to wait for the successor of a process that has ended: restarts are
// rare then, and an unlimited wait would hide a crash.
constexpr int64_t kRestartWaitNs = 5'000'000'000;

const std::string kTrouble = "trouble", kClosed = "closed";

// When ranks of this process last failed to meet, by prefix and rank (wall clock, ns).
class Failures {
 public:
  void note(const ModexRequest& request, int64_t later_ns = 0) {
    std::lock_guard lock(mutex_);
    int64_t& last_ns = last_ns_[{request.prefix, request.rank}];
    last_ns = std::max(last_ns, wall_clock_ns() + later_ns);
  }
  int64_t last_ns(const ModexRequest& request) {
    std::lock_guard lock(mutex_);
    auto found = last_ns_.find({request.prefix, request.rank});
    return found == last_ns_.end() ? 0 : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, int64_t> last_ns_;
};
Failures& failures() {
  static auto* failures = new Failures;  // never destroyed: other threads may outlive main()
  return *failures;
}

std::string entry_name(int rank) { return format_text("entry/{}", rank); }
std::string claims_name(int rank) { return format_text("claims/{}", rank); }
std::string to_name(uint64_t nonce) { return format_text("to/{:016x}", nonce); }

// Rank 0's answer to an entry: the meeting's id and the rank's node, or a failure.
std::string pack_answer(uint64_t id, const Status& cause, const RelayNode& node) {
  return Packer()
      .number(id)
      .status(cause)
      .fields(node.parent, node.number, node.depth, node.children)
      .take();
}

Status make_random(uint64_t* number) {
  do {
    if (getrandom(number, sizeof *number, 0) != static_cast<ssize_t>(sizeof *number))
      return Status(Code::kResource, "getrandom failed");
  } while (*number == 0);
  return {};
}

}  // namespace

int64_t process_began_ns() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');  // of field 2, which may contain anything
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));
  std::string field;
  for (int number = 3; number <= 22; ++number) fields >> field;
  timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  const int64_t since_boot_ns = int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  const int64_t tick_ns = 1'000'000'000 / sysconf(_SC_CLK_TCK);
  return wall_clock_ns() - (since_boot_ns - std::strtoll(field.c_str(), nullptr, 10) * tick_ns);
}

Modex::Modex(Store& store, ModexRequest request, const Deadline& deadline)
    : store_(store),
      request_(std::move(request)),
      deadline_(deadline),
      seen_(static_cast<size_t>(request_.size)) {}

std::string Modex::id_text() const { return format_text("{:016x}", id_); }

std::string Modex::pack(const Entry& entry) {
  Packer packer;
  packer.number(kArenaMagic + kLayoutVersion)
      .fields(entry.nonce, entry.time_ns, entry.follows, entry.size, entry.members)
      .status(entry.cause)
      .fields(entry.awaited);
  std::vector<std::string> commons;
  std::vector<size_t> common_of;
  for (const auto& [rank, body] : entry.bodies) {
    const auto known = std::find(commons.begin(), commons.end(), body.common);
    common_of.push_back(static_cast<size_t>(known - commons.begin()));
    if (known == commons.end()) commons.push_back(body.common);
  }
  packer.fields(commons).number(entry.bodies.size());
  size_t next = 0;
  for (const auto& [rank, body] : entry.bodies) packer.fields(rank, common_of[next++], body.own);
  return packer.text(entry.relay).take();
}

bool Modex::unpack(std::string_view bytes, Entry* entry) {
  Unpacker unpacker(bytes);
  if (unpacker.number() != kArenaMagic + kLayoutVersion) return false;
  uint64_t size = 0;
  unpacker.fields(entry->nonce, entry->time_ns, entry->follows, size, entry->members)
      .status(entry->cause)
      .fields(entry->awaited);
  entry->size = static_cast<int>(std::min<uint64_t>(size, std::numeric_limits<int>::max()));
  std::vector<std::string> commons;
  unpacker.fields(commons);
  for (uint64_t left = unpacker.count(); left > 0; --left) {
    const auto rank = static_cast<int>(unpacker.number());
    const uint64_t common = unpacker.number();
    if (common >= commons.size()) return false;
    entry->bodies[rank] = {commons[common], unpacker.text()};
  }
  entry->relay = unpacker.text();
  return unpacker.whole();
}

// Puts this rank's entry, in place of any earlier one.
Status Modex::put(const Status& cause) {
  DSCOMM_ASSIGN_OR_RETURN(int64_t claims, store_.add(key(claims_name(request_.rank)), 1));
  follows_ = claims > 1;
  return set(cause);
}

// Updates this rank's entry.
Status Modex::set(const Status& cause) {
  Entry entry;
  entry.nonce = nonce_;
  entry.time_ns = wall_clock_ns();
  entry.follows = follows_;
  entry.size = request_.size;
  entry.members = request_.members;
  entry.cause = cause;
  if (cause.ok()) {
    if (local_ != nullptr) {
      entry.bodies = local_->entries();
      entry.awaited.assign(local_->awaited().begin(), local_->awaited().end());
      put_changes_ = local_->changes();
    }
    entry.bodies[request_.rank] = body_;
    entry.relay = relay_;
  }
  is_put_ = true;
  put_ns_ = monotonic_ns();
  return store_.set(key(entry_name(request_.rank)), pack(entry));
}

// Puts the entry once this rank has heard from all ranks that it speaks for. An incomplete entry
// (see check_own_entry()) is updated now and then, so that rank 0 knows whom this rank waits for.
Status Modex::put_if_due() {
  const bool is_whole = local_ == nullptr || local_->awaited().empty();
  if (!is_put_) return is_whole ? put(Status()) : Status();
  if (local_ == nullptr || local_->changes() == put_changes_) return {};
  return is_whole || monotonic_ns() - put_ns_ > kPutEveryNs ? set(Status()) : Status();
}

// Reads the entry of `rank` into seen_. Returns whether it exists.
Result<bool> Modex::read(int rank) {
  Result<std::optional<std::string>> found = std::optional<std::string>();
  if (auto fetched = fetched_.extract(rank); !fetched.empty())
    found = std::optional<std::string>(std::move(fetched.mapped()));
  else
    found = store_.find(key(entry_name(rank)));
  if (!found.ok()) return found.status();
  Entry& seen = seen_[static_cast<size_t>(rank)];
  seen.is_there = found.value().has_value();
  if (!seen.is_there) return false;
  Entry entry;
  if (!unpack(*found.value(), &entry)) {
    entry = Entry();
    entry.time_ns = wall_clock_ns();
    entry.cause = Status(Code::kUnsupported,
                         "rank " + std::to_string(rank) +
                             " runs another version of dscomm; install the same everywhere");
  }
  entry.is_there = true;
  entry.since_ns = seen.since_ns != 0 && seen.nonce == entry.nonce ? seen.since_ns : monotonic_ns();
  seen = std::move(entry);
  return true;
}

Result<Modex::Table> Modex::gather(const MemberEntry& entry, LocalLeader* local) {
  begin();
  // A new nonce each time: rank 0's answer in a meeting that was called off must not count.
  DSCOMM_RETURN_IF_ERROR(make_random(&nonce_));
  is_put_ = false;
  removed_ns_.clear();
  local_ = local;
  if (local_ != nullptr) local_->begin_table();
  body_ = entry;
  relay_.clear();
  node_ = RelayNode();
  if (request_.relay != nullptr) {
    Result<std::string> listening = request_.relay->listen();
    if (listening.ok())
      relay_ = std::move(listening).value();
    else
      log_line(LogLevel::kInfo, "the member table comes from the store: {}",
               listening.status().message());
  }
  Result<Table> table = request_.rank == 0 ? decide() : follow();
  if (!table.ok()) failures().note(request_);
  if (table.ok() && local_ != nullptr) local_->send_table(id_, table_bytes_);
  if (request_.relay == nullptr) return table;
  if (table.ok())
    request_.relay->pass_on(
        node_, id_, table_bytes_, [this] { return check_during_relay(); },
        relay_limit(kChildrenLimit));
  request_.relay->close();
  return table;
}

// At most an eighth of the time left, because the store may have to be asked next.
Deadline Modex::relay_limit(milliseconds most) const {
  const milliseconds left(std::max<int64_t>(deadline_.remaining_ns(), 0) / kMs);
  return Deadline::after(std::min(most, left / 8));
}

Status Modex::check_during_relay() {
  if (local_ != nullptr) DSCOMM_RETURN_IF_ERROR(local_->handle_messages());
  if (monotonic_ns() < check_again_ns_) return {};
  check_again_ns_ = monotonic_ns() + kCheckEveryNs;
  return request_.check();
}

void Modex::begin() {
  came_ns_ = monotonic_ns();
  check_again_ns_ = came_ns_ + kCheckEveryNs;
  recheck_pause_ns_ = kCheckEveryNs;
  recheck_ns_ = came_ns_ + recheck_pause_ns_;
}

void Modex::decline(const Status& cause) {
  // Notes a time some seconds ahead: rank 0 puts this cause under `closed` a little later.
  failures().note(request_, kRestartWaitNs);
  if (nonce_ == 0) static_cast<void>(make_random(&nonce_));
  // The store's answers do not matter: this rank raises its cause anyway.
  static_cast<void>(put(cause));
  static_cast<void>(store_.set(key(kTrouble), std::to_string(request_.rank)));
  if (request_.rank == 0) static_cast<void>(give_up(cause));
}

Status Modex::remove_own_entry() {
  DSCOMM_ASSIGN_OR_RETURN(bool taken, remove_if_own());
  return taken ? Status() : conflict(seen_[static_cast<size_t>(request_.rank)]);
}

// False if another process has replaced this rank's entry; the other's entry then stays.
Result<bool> Modex::remove_if_own() {
  DSCOMM_ASSIGN_OR_RETURN(bool there, read(request_.rank));
  if (there && seen_[static_cast<size_t>(request_.rank)].nonce != nonce_) return false;
  remove_entry(request_.rank);
  return true;
}

void Modex::remove_entry(int rank) {
  remove(entry_name(rank));
  remove(claims_name(rank));
}

// --- rank 0

Result<Modex::Table> Modex::decide() {
  remove(kClosed);
  Status status = collect();
  if (status.ok()) status = make_random(&id_);
  if (!status.ok()) return give_up(status);
  if (has_trouble_) remove(kTrouble);  // of an earlier attempt
  Packer table;
  std::vector<std::string> relays;  // addresses, by owner; not in the table: children get them
  table.number(entry_owners_.size());
  for (int rank : entry_owners_) {
    Entry& entry = seen_[static_cast<size_t>(rank)];
    relays.push_back(std::exchange(entry.relay, ""));
    table.fields(rank, pack(entry));
  }
  table_bytes_ = table.take();
  if (entry_owners_.size() > 1) {
    tables_.push_back(id_text() + "/table");
    DSCOMM_RETURN_IF_ERROR(store_.set(key(tables_.back()), table_bytes_));
  }
  Store::KeysAndValues answers;
  const std::vector<RelayNode> nodes = relay_nodes(relays);
  node_ = nodes.front();
  for (size_t k = 1; k < entry_owners_.size(); ++k) {
    const Entry& entry = seen_[static_cast<size_t>(entry_owners_[k])];
    answers.emplace_back(key(to_name(entry.nonce)), pack_answer(id_, Status(), nodes[k]));
  }
  DSCOMM_RETURN_IF_ERROR(store_.set_all(answers));
  return finish();
}

// Reads all entries into seen_, and their authors into entry_owners_.
Status Modex::collect() {
  std::vector<int> taken_by(seen_.size(), -1);
  expected_ = request_.entry_owners;
  std::erase(expected_, request_.rank);
  fetched_.clear();
  int64_t pass_ns = came_ns_ + kPassEveryNs;
  TimeLeft time_left(deadline_);
  for (auto pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
    const bool is_over = time_left.is_over();  // if so, the store is asked once more
    DSCOMM_RETURN_IF_ERROR(put_if_due());
    DSCOMM_RETURN_IF_ERROR(fetch());
    const bool passes = expected_.empty() || is_over || monotonic_ns() >= pass_ns;
    if (passes) pass_ns = monotonic_ns() + kPassEveryNs;
    bool is_whole = passes;
    // Reads in rank order up to the first missing entry, so that a pass asks for only one missing
    // key. An entry that exists, but does not count yet (see is_settled()), does not end the pass.
    for (int rank = 0; passes && rank < request_.size; ++rank) {
      if (taken_by[static_cast<size_t>(rank)] >= 0) continue;
      DSCOMM_ASSIGN_OR_RETURN(bool there, take_entry_of(rank, &taken_by));
      is_whole = is_whole && taken_by[static_cast<size_t>(rank)] >= 0;
      if (!there) break;
    }
    if (is_whole) {
      entry_owners_.assign(taken_by.begin(), taken_by.end());
      std::sort(entry_owners_.begin(), entry_owners_.end());
      entry_owners_.erase(std::unique(entry_owners_.begin(), entry_owners_.end()),
                          entry_owners_.end());
      return {};
    }
    DSCOMM_RETURN_IF_ERROR(check());
    if (is_over)
      return make_status(Code::kTimeout,
                         "timed out after {} waiting for {} to join; see whether each has "
                         "started and makes this call; call new_group() with the same "
                         "members and in the same order on all ranks",
                         deadline_.timeout_text(), missing());
    DSCOMM_RETURN_IF_ERROR(listen(pause, deadline_));
  }
}

// Reads the expected entries in one request, once all exist: one for each would slow rank 0.
Status Modex::fetch() {
  if (expected_.empty()) return {};
  std::vector<std::string> keys;
  for (int rank : expected_) keys.push_back(key(entry_name(rank)));
  DSCOMM_ASSIGN_OR_RETURN(std::optional<std::vector<std::string>> found, store_.find_all(keys));
  if (!found) return {};
  for (size_t k = 0; k < keys.size(); ++k) fetched_[expected_[k]] = std::move((*found)[k]);
  expected_.clear();
  return {};
}

// Whether there is an entry that speaks, or will speak, for `rank`. Once an entry is settled, sets
// taken_by for the ranks that it speaks for.
Result<bool> Modex::take_entry_of(int rank, std::vector<int>* taken_by) {
  std::vector<int> candidates;
  for (int other = 0; other < rank; ++other) {
    const Entry& seen = seen_[static_cast<size_t>(other)];
    if (seen.is_there && std::count(seen.awaited.begin(), seen.awaited.end(), rank) > 0)
      candidates.push_back(other);
  }
  candidates.push_back(rank);
  bool is_there = false;
  for (int owner : candidates) {
    if (owner == request_.rank && !is_put_) continue;  // a predecessor's, if any
    DSCOMM_ASSIGN_OR_RETURN(bool there, read(owner));
    if (!there) continue;
    is_there = true;
    DSCOMM_ASSIGN_OR_RETURN(bool settled, is_settled(owner));
    if (!settled) continue;
    const std::map<int, MemberEntry>& bodies = seen_[static_cast<size_t>(owner)].bodies;
    DSCOMM_ASSIGN_OR_RETURN(bool sole, is_sole_entry_of(bodies, owner, taken_by));
    if (!sole) continue;
    for (const auto& [covered, body] : bodies) (*taken_by)[static_cast<size_t>(covered)] = owner;
    if ((*taken_by)[static_cast<size_t>(rank)] >= 0) break;
  }
  return is_there;
}

// Whether only the entry of `owner` speaks for the ranks in `bodies`. Removes another entry if its
// process may have ended. kMismatch if it has not, or puts the entry again within kObjectionNs.
Result<bool> Modex::is_sole_entry_of(const std::map<int, MemberEntry>& bodies, int owner,
                                     std::vector<int>* taken_by) {
  bool is_sole = true;
  for (const auto& [covered, body] : bodies) {
    if (covered < 0 || covered >= request_.size) return malformed_value("entry of a rank");
    const int by = (*taken_by)[static_cast<size_t>(covered)];
    if (by < 0 || by == owner) continue;
    const bool may_be_left = by == covered || is_stale(seen_[static_cast<size_t>(by)].time_ns);
    if (!may_be_left || removed_ns_.count(by) > 0)
      return Status(Code::kMismatch, duplicate_rank_text(covered));
    remove_entry(by);
    removed_ns_[by] = monotonic_ns();
    std::replace(taken_by->begin(), taken_by->end(), by, -1);
  }
  for (const auto& [rank, removed_ns] : removed_ns_) {
    if (bodies.count(rank) == 0 || rank == owner) continue;
    is_sole = is_sole && monotonic_ns() - removed_ns >= kObjectionNs;
    DSCOMM_ASSIGN_OR_RETURN(bool is_back, read(rank));
    if (is_back) return Status(Code::kMismatch, duplicate_rank_text(rank));
  }
  return is_sole;
}

// One pause of a wait, in which a leader handles its members' messages.
Status Modex::listen(milliseconds pause, const Deadline& deadline) {
  if (local_ != nullptr)
    return local_->await_messages(std::chrono::nanoseconds(pause).count(), deadline);
  deadline.nap(pause);
  return {};
}

// Whether the entry of `rank`, as last read, counts. Fails with its fault, if that is certain.
Result<bool> Modex::is_settled(int rank) {
  const Entry& entry = seen_[static_cast<size_t>(rank)];
  if (rank == 0 && entry.nonce != nonce_) return conflict(entry);
  const int64_t known_ns = monotonic_ns() - entry.since_ns;
  if (Status fault = fault_of(rank); !fault.ok()) {
    if (is_stale(entry.time_ns) && known_ns < successor_limit_ns()) return false;
    return fault;
  }
  return entry.awaited.empty() && (!entry.follows || known_ns >= kObjectionNs);
}

Status Modex::fault_of(int rank) const {
  const Entry& entry = seen_[static_cast<size_t>(rank)];
  DSCOMM_RETURN_IF_ERROR(entry.cause);
  if (entry.size == request_.size) return {};
  return members_differ({"rank 0", request_.size, request_.members},
                        {format_text("rank {}", rank), entry.size, entry.members});
}

// Checks now and then for a reason to give up waiting.
Status Modex::check() {
  if (monotonic_ns() < check_again_ns_) return {};
  check_again_ns_ = monotonic_ns() + kCheckEveryNs;
  // Asks the caller first: a dead rank writes no more, so the reads below see its last entry.
  const Status reason = ask_caller();
  if (is_formed_) return reason;
  DSCOMM_RETURN_IF_ERROR(check_own_entry());
  DSCOMM_RETURN_IF_ERROR(check_awaited());
  DSCOMM_RETURN_IF_ERROR(request_.rank == 0 ? check_failed_ranks() : check_closed());
  return reason;
}

Status Modex::ask_caller() {
  DSCOMM_RETURN_IF_ERROR(request_.check());
  const Status formed = request_.formed();
  is_formed_ = !formed.ok();
  return formed;
}

// Fails if a rank has said, by the key `trouble` and its entry, that it cannot take part.
Status Modex::check_failed_ranks() {
  DSCOMM_ASSIGN_OR_RETURN(std::optional<std::string> found, store_.find(key(kTrouble)));
  if (!found) return {};
  const int rank = std::atoi(found->c_str());
  if (rank <= 0 || rank >= request_.size) return {};
  has_trouble_ = true;
  DSCOMM_ASSIGN_OR_RETURN(bool there, read(rank));
  if (!there) return {};
  Result<bool> settled = is_settled(rank);
  return settled.ok() ? Status() : settled.status();
}

// Tells the cause to all ranks that have come, and to those that will come.
Status Modex::give_up(const Status& cause) {
  static_cast<void>(
      store_.set(key(kClosed), Packer().fields(wall_clock_ns()).status(cause).take()));
  std::vector<bool> have_entry = ranks_with_entries();
  if (local_ != nullptr)
    for (const auto& [rank, body] : local_->entries()) have_entry[static_cast<size_t>(rank)] = true;
  for (int rank = 1; rank < request_.size; ++rank) {
    const Entry& entry = seen_[static_cast<size_t>(rank)];
    if (!entry.is_there) continue;
    // Removes the entry before its rank learns of the failure and may begin anew.
    remove_entry(rank);
    answer(entry.nonce, cause);
    if (!is_stale(entry.time_ns)) continue;
    // The process of this entry may have ended. Then its successor must still be told.
    have_entry[static_cast<size_t>(rank)] = false;
    for (const auto& [covered, body] : entry.bodies)
      if (covered > 0 && covered < request_.size) have_entry[static_cast<size_t>(covered)] = false;
  }
  const bool are_all_told =
      std::all_of(have_entry.begin() + 1, have_entry.end(), [](bool heard) { return heard; });
  if (!has_conflict_) static_cast<void>(remove_if_own());
  if (are_all_told) remove(kClosed);
  remove(kTrouble);
  return cause;
}

void Modex::answer(uint64_t nonce, const Status& cause) {
  static_cast<void>(store_.set(key(to_name(nonce)), pack_answer(0, cause, RelayNode())));
}

void Modex::fail_others(const Status& cause) {
  for (const auto& [rank, entry] : table_) {
    if (rank == request_.rank) continue;
    Result<bool> there = read(rank);
    if (!there.ok()) return;
    if (there.value() && seen_[static_cast<size_t>(rank)].nonce == entry.nonce)
      answer(entry.nonce, cause);
  }
}

Status Modex::final_cause(int rank) {
  Result<bool> there = read(rank);
  if (!there.ok() || !there.value()) return {};
  const Entry& entry = seen_[static_cast<size_t>(rank)];
  auto was = table_.find(rank);
  return was != table_.end() && entry.nonce == was->second.nonce ? entry.cause : Status();
}

bool Modex::is_superseded(int rank) {
  if (monotonic_ns() < ask_again_ns_) return false;
  ask_again_ns_ = monotonic_ns() + kCheckEveryNs;
  Result<bool> there = read(rank);
  if (!there.ok() || !there.value()) return false;
  const Entry& entry = seen_[static_cast<size_t>(rank)];
  // A cause: the rank has said, after the table was made, that it cannot take part.
  return entry.nonce != entry_of(rank).nonce || !entry.cause.ok();
}

// --- the others

Result<Modex::Table> Modex::follow() {
  DSCOMM_RETURN_IF_ERROR(check_closed());
  const Deadline last = deadline_.later(kLastWordNs);
  TimeLeft time_left(last);
  for (auto pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
    DSCOMM_RETURN_IF_ERROR(put_if_due());
    DSCOMM_ASSIGN_OR_RETURN(bool is_answered, has_answer());
    if (is_answered) return finish();
    const bool is_over = time_left.is_over();
    Status reason = is_over ? Status(Code::kTimeout, "") : check();
    if (reason.ok()) reason = listen(pause, last);
    if (reason.ok()) continue;
    DSCOMM_ASSIGN_OR_RETURN(is_answered, has_answer());
    if (is_answered) return finish();
    if (is_over) {
      const std::string who = missing();
      reason =
          make_status(Code::kTimeout, "timed out after {} waiting for {}", deadline_.timeout_text(),
                      who.empty() ? "rank 0, which does not answer; see whether it runs" : who);
      // If rank 0 arrives later, it fails at once instead of waiting for this rank.
      static_cast<void>(put(make_status(Code::kTimeout, "rank {} has already given up: {}",
                                        request_.rank, reason.message())));
    } else if (is_closed_ || is_formed_) {  // rank 0 reads no more entries
      static_cast<void>(remove_if_own());
    } else {
      decline(reason);
    }
    return reason;
  }
}

// Reads rank 0's answer to this rank: the table, or a failure.
Result<bool> Modex::has_answer() {
  const std::string mine = key(to_name(nonce_));
  DSCOMM_ASSIGN_OR_RETURN(std::optional<std::string> found, store_.find(mine));
  if (!found) return false;
  remove(to_name(nonce_));
  Unpacker unpacker(*found);
  Status cause;
  node_ = RelayNode();
  unpacker.fields(id_).status(cause).fields(node_.parent, node_.number, node_.depth,
                                            node_.children);
  if (!unpacker.whole()) cause = malformed_value("message from rank 0");
  if (!cause.ok()) {
    static_cast<void>(remove_if_own());
    return cause;
  }
  DSCOMM_RETURN_IF_ERROR(read_table());
  return true;
}

Status Modex::read_table() {
  if (request_.relay != nullptr && !node_.parent.empty()) {
    Result<std::string> passed_on = request_.relay->fetch(
        node_, id_, static_cast<size_t>(request_.size) * kMostEntryBytes,
        [this] { return check_during_relay(); }, relay_limit(node_.depth * kParentLimit));
    if (passed_on.ok()) {
      table_bytes_ = std::move(passed_on).value();
      return {};
    }
    log_line(LogLevel::kInfo, "the member table comes from the store: {}",
             passed_on.status().message());
  }
  DSCOMM_ASSIGN_OR_RETURN(table_bytes_,
                          store_.get(key(id_text() + "/table"), Deadline::after(kReadLimit)));
  return {};
}

// --- ranks with a leader

Result<bool> Modex::join_leader(LocalMember& local, const LocalEntry& own) {
  begin();
  const auto check_others = [this]() -> Status {
    if (monotonic_ns() < check_again_ns_) return {};
    check_again_ns_ = monotonic_ns() + kCheckEveryNs;
    const Status reason = ask_caller();
    if (!is_formed_) DSCOMM_RETURN_IF_ERROR(check_closed());
    return reason;
  };
  Result<bool> joined = local.join_leader(own, check_others, deadline_);
  if (joined.ok()) {
    // Removes a failure of an earlier attempt: it would stay, because this rank puts no entry now.
    if (joined.value() && failures().last_ns(request_) != 0) remove_entry(request_.rank);
    return joined;
  }
  if (!is_closed_ && !is_formed_ && !local.leader_has_failed()) decline(joined.status());
  failures().note(request_, local.leader_has_failed() ? kRestartWaitNs : 0);
  return joined;
}

Result<Modex::Table> Modex::follow(LocalMember& local) {
  Result<LocalMessage> table = local.await([this] { return ask_caller(); }, deadline_);
  if (!table.ok()) {
    Status cause = table.status();
    if (local.has_ended()) {
      if (Status closed = check_closed(); !closed.ok()) cause = closed;
      if (!is_closed_ && request_.formed().ok()) decline(cause);
    }
    failures().note(request_);
    return cause;
  }
  return take_table(table.value());
}

Result<Modex::Table> Modex::take_table(const LocalMessage& message) {
  Unpacker unpacker(message.text);
  id_ = unpacker.number();
  table_bytes_ = unpacker.text();
  if (message.kind != LocalMessageKind::kTable || !unpacker.whole())
    return malformed_value("message from the leader of this host");
  return finish();
}

// Returns rank 0's failure from the key `closed`, or OK. If the key existed before this rank came,
// it may be of an earlier attempt: rank 0 then removes it on arrival.
Status Modex::check_closed() {
  DSCOMM_ASSIGN_OR_RETURN(std::optional<std::string> found, store_.find(key(kClosed)));
  if (!closed_first_) closed_first_ = found.value_or("");
  is_closed_ = found.has_value();
  if (!is_closed_) return {};
  Unpacker unpacker(*found);
  int64_t time_ns = 0;
  Status cause;
  if (!unpacker.fields(time_ns).status(cause).whole())
    cause = malformed_value("message from rank 0");
  int64_t limit_ns = 0;
  if (is_stale(time_ns))
    limit_ns = successor_limit_ns();
  else if (time_ns <= failures().last_ns(request_))
    limit_ns = kClosedNs;
  is_closed_ = *found != *closed_first_ || monotonic_ns() - came_ns_ >= limit_ns;
  return is_closed_ ? cause : Status();
}

// --- all ranks

// Parses the table.
Result<Modex::Table> Modex::finish() {
  const Status malformed = malformed_value("member table");
  Unpacker unpacker(table_bytes_);
  table_.clear();
  entry_owners_.clear();
  owner_of_.assign(static_cast<size_t>(request_.size), -1);
  Table result;
  result.id = id_;
  result.entries.resize(owner_of_.size());
  for (uint64_t left = unpacker.count(); left > 0; --left) {
    const auto owner = static_cast<int>(unpacker.number());
    Entry entry;
    if (!unpack(unpacker.text(), &entry)) return malformed;
    for (auto& [rank, body] : entry.bodies) {
      if (rank < 0 || rank >= request_.size || owner_of_[static_cast<size_t>(rank)] >= 0)
        return malformed;
      owner_of_[static_cast<size_t>(rank)] = owner;
      result.entries[static_cast<size_t>(rank)] = std::move(body);
    }
    entry.bodies.clear();
    table_[owner] = std::move(entry);
    entry_owners_.push_back(owner);
  }
  if (!unpacker.whole() || std::count(owner_of_.begin(), owner_of_.end(), -1) > 0) return malformed;
  const int owner = owner_of_[static_cast<size_t>(request_.rank)];
  if (is_put_ && (owner != request_.rank || table_[owner].nonce != nonce_))
    return Status(Code::kInternal, "the member table was made of others");
  return result;
}

// Checks that no other process has replaced this rank's entry.
Status Modex::check_own_entry() {
  DSCOMM_ASSIGN_OR_RETURN(bool there, read(request_.rank));
  // Rank 0 of another attempt may have removed the entry; or this leader still waits for members.
  if (!there || !is_put_) return put(Status());
  const Entry& entry = seen_[static_cast<size_t>(request_.rank)];
  return entry.nonce == nonce_ ? Status() : conflict(entry);
}

// Stops waiting for ranks that speak for themselves, although this rank was to speak for them.
Status Modex::check_awaited() {
  if (local_ == nullptr || monotonic_ns() < recheck_ns_) return {};
  recheck_pause_ns_ = std::min(2 * recheck_pause_ns_, kPutEveryNs);
  recheck_ns_ = monotonic_ns() + recheck_pause_ns_;
  const std::set<int> awaited = local_->awaited();
  for (int rank : awaited) {
    DSCOMM_ASSIGN_OR_RETURN(bool there, read(rank));
    if (!there) continue;
    // An entry older than this process counts as a live rank's if it stays for kRestartWaitNs.
    const Entry& entry = seen_[static_cast<size_t>(rank)];
    if (!is_stale(entry.time_ns) || monotonic_ns() - entry.since_ns >= kRestartWaitNs)
      local_->stop_awaiting(rank);
  }
  return {};
}

// Reports that two live processes claim this rank of the group.
Status Modex::conflict(const Entry& other) {
  // The default group is made without a list of members.
  const std::string advice =
      other.members.empty() && request_.members.empty()
          ? "; start one process for each rank, and give each job a store of its own"
          : format_text(
                ", one made it of global ranks {}, the other of {}; pass the same list on every "
                "rank",
                other.members, request_.members);
  const Status cause(Code::kMismatch, duplicate_rank_text(request_.rank) + advice);
  const uint64_t theirs = other.nonce;
  has_conflict_ = true;
  // Rank 0 reads only entries, so this rank's entry has the cause.
  static_cast<void>(put(cause));
  if (request_.rank != 0) {
    static_cast<void>(store_.set(key(kTrouble), std::to_string(request_.rank)));
    answer(theirs, cause);
  }
  return cause;
}

std::string Modex::duplicate_rank_text(int rank) const {
  const std::string twice = format_text("two processes are its rank {}", rank);
  return request_.members.empty() ? twice : "the ranks passed different members to it: " + twice;
}

// By rank: whether an entry speaks for it. Reads all entries again.
std::vector<bool> Modex::ranks_with_entries() {
  std::vector<bool> have(seen_.size());
  for (int rank = 0; rank < request_.size; ++rank) {
    Entry& entry = seen_[static_cast<size_t>(rank)];
    entry.is_there = false;
    if (have[static_cast<size_t>(rank)]) continue;
    Result<bool> there = read(rank);
    if (!there.ok() || !there.value()) continue;
    have[static_cast<size_t>(rank)] = true;
    for (const auto& [covered, body] : entry.bodies)
      if (covered >= 0 && covered < request_.size) have[static_cast<size_t>(covered)] = true;
  }
  return have;
}

// "rank 2, rank 5": the ranks without a valid entry, except those that came and timed out.
std::string Modex::missing() {
  std::vector<bool> have = ranks_with_entries();
  std::string text;
  for (int rank = 0; rank < request_.size; ++rank) {
    const Entry& entry = seen_[static_cast<size_t>(rank)];
    if (have[static_cast<size_t>(rank)] &&
        (!entry.is_there || fault_of(rank).ok() || fault_of(rank).code() == Code::kTimeout))
      continue;
    text += format_text("{}rank {}", text.empty() ? "" : ", ", rank);
  }
  return text;
}

bool Modex::is_stale(int64_t time_ns) const { return time_ns < request_.began_ns; }

// Unlimited with torchrun, which ends all processes of an attempt before it starts the next.
int64_t Modex::successor_limit_ns() {
  return started_by_torchrun() ? std::numeric_limits<int64_t>::max() : kRestartWaitNs;
}

}  // namespace dscomm
