#include "core/shm/formation.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <sstream>

#include "core/base/log.h"
#include "core/base/memory_limit.h"
#include "core/base/memory_reservation.h"

namespace dscomm {
namespace {

constexpr size_t kTextBytes = 512;

// Fixed binary format: what travels through the store is checked by length and magic, never parsed.
struct Card {
  PeerAddress address;
  uint64_t lines_offset = 0;
  int32_t global_rank = -1;
  int32_t numa = -1, l3 = -1;
  uint32_t failed_code = 0;  // Code; 0 when the card is good
  double cpu_quota = 0;
  ShmTuning tuning;
  char hierarchy[16] = {};
  uint32_t halves_as_float32 = 0;  // between hosts
  uint32_t message_port = 0;
  char members[256] = {};  // the global ranks of the group, as this rank was told
  char cpu_list[256] = {};
  char host_identity[96] = {};
  char networks[512] = {};  // "address/prefix", space-separated
  uint64_t transport_id = 0;
  char failed_text[kTextBytes] = {};
};

struct TableHead {
  uint64_t magic = kArenaMagic;
  uint64_t group_id = 0;
  uint64_t card_count = 0;   // 0 when forming failed
  uint32_t failed_code = 0;  // Code
  uint32_t reserved = 0;
  char failed_text[2 * kTextBytes] = {};
};

struct Report {
  uint64_t magic = kArenaMagic;
  uint32_t failed_code = 0;  // Code; 0 when all is well
  uint32_t lacks_pool = 0;   // 1: there is a pool that a rank cannot read
  char failed_text[2 * kTextBytes] = {};
};

template <size_t N>
void set_text(char (&field)[N], const std::string& text) {
  size_t length = std::min(text.size(), N - 1);
  std::memcpy(field, text.data(), length);
  field[length] = '\0';
}
template <size_t N>
std::string get_text(const char (&field)[N]) {
  return std::string(field, strnlen(field, N));
}

// As many of the words as fit.
std::string join(const std::vector<std::string>& words, size_t most) {
  std::string text;
  for (const std::string& word : words) {
    if (text.size() + 1 + word.size() > most) break;
    text += (text.empty() ? "" : " ") + word;
  }
  return text;
}
std::vector<std::string> split(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), std::istream_iterator<std::string>()};
}

template <typename T>
std::string to_bytes(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}
template <typename T>
bool from_bytes(const std::string& bytes, T* value) {
  if (bytes.size() != sizeof *value) return false;
  std::memcpy(static_cast<void*>(value), bytes.data(), sizeof *value);
  return true;
}

// One rank's way through a formation.
class Former {
 public:
  Former(const FormationParty& party, Store& store, const FormationRequest& request,
         const Deadline& deadline)
      : party_(party), store_(store), request_(request), deadline_(deadline) {}
  ~Former() {
    if (lines_offset_ == 0) return;
    // A member may have seen a good verdict all the same, where this rank gave up after its report:
    // it learns at its first call that this rank has left. So these lines are never used again.
    Lines::close(*party_.arena, lines_offset_);
    if (!reported_) party_.arena->release(lines_offset_, sizeof(GroupLines));
  }

  Result<Formation> run() {
    DSCOMM_RETURN_IF_ERROR(find_generation());
    DSCOMM_RETURN_IF_ERROR(claim_rank());
    Status prepared = publish_card();
    DSCOMM_RETURN_IF_ERROR(request_.rank == 0 ? collect_cards() : fetch_table());
    if (!prepared.ok()) return prepared;
    Status result = check_table();
    if (result.ok()) result = check_memory();
    if (result.ok()) result = attach_all();
    if (!result.ok()) return give_up(result);
    DSCOMM_RETURN_IF_ERROR(publish_report());
    DSCOMM_RETURN_IF_ERROR(request_.rank == 0 ? collect_reports() : fetch_verdict());
    lines_offset_ = 0;  // now the ShmTeam's
    return std::move(formation_);
  }

  Status decline(const Status& cause) {
    DSCOMM_RETURN_IF_ERROR(find_generation());
    return refuse(Status(cause.code(), "rank " + std::to_string(request_.rank) + " (pid " +
                                           std::to_string(getpid()) + "): " + cause.message()));
  }

 private:
  std::string key(const std::string& name) const { return prefix_ + name; }

  Status error(Code code, const std::string& text) const {
    return Status(code, "forming group '" + request_.name + "': " + text);
  }

  Status publish(const std::string& name, const std::string& bytes) {
    const Status status = store_.set(key(name), bytes);
    return status.ok() ? status : error(status.code(), status.message());
  }

  std::string name_rank(int rank) const {
    const PeerAddress& address = cards_[static_cast<size_t>(rank)].address;
    return "rank " + std::to_string(rank) + " (pid " + std::to_string(address.pid) + " on host " +
           std::string(address.host, strnlen(address.host, sizeof address.host)) + ")";
  }

  // By global rank where it is known, because two processes may believe to be the same rank of the
  // group: that is what claim_rank() finds.
  Status find_generation() {
    size_t rank = static_cast<size_t>(request_.rank);
    int who = rank < request_.global_ranks.size() ? request_.global_ranks[rank] : request_.rank;
    Result<int64_t> generation = store_.add(request_.prefix + "formed/" + std::to_string(who), 1);
    if (!generation.ok()) return error(generation.status().code(), generation.status().message());
    prefix_ = request_.prefix + std::to_string(generation.value()) + "/";
    return {};
  }

  Status claim_rank() {
    std::string rank = std::to_string(request_.rank);
    Result<int64_t> claims = store_.add(key("claim/" + rank), 1);
    if (!claims.ok()) return error(claims.status().code(), claims.status().message());
    if (claims.value() == 1) return {};
    Card first;
    Result<std::string> bytes = store_.get(key("card/" + rank), deadline_);
    std::string theirs =
        bytes.ok() && from_bytes(bytes.value(), &first) ? get_text(first.members) : "others";
    Status refusal(Code::kMismatch,
                   "the ranks passed different members to it: two processes are its rank " + rank +
                       ", one made it of global ranks " + theirs + ", the other of " +
                       members_text());
    return give_up(refusal);
  }

  std::string members_text() const {
    std::string text;
    for (int rank : request_.global_ranks) {
      if (!text.empty()) text += ", ";
      text += std::to_string(rank);
    }
    return text;
  }

  Status publish_card() {
    Card card;
    Status status = fill_card(&card);
    if (!status.ok()) {
      card.failed_code = static_cast<uint32_t>(status.code());
      set_text(card.failed_text, status.message());
    }
    DSCOMM_RETURN_IF_ERROR(publish("card/" + std::to_string(request_.rank), to_bytes(card)));
    return status;
  }

  Status fill_card(Card* card) {
    const Settings& settings = *party_.settings;
    size_t rank = static_cast<size_t>(request_.rank);
    card->address = *party_.address;
    card->global_rank = rank < request_.global_ranks.size() ? request_.global_ranks[rank] : -1;
    Place place = party_.topology->place();
    card->numa = place.numa;
    card->l3 = place.l3;
    card->cpu_quota = cgroup_cpu_quota();
    set_text(card->cpu_list, party_.topology->cpu_list());
    set_text(card->hierarchy, settings.hierarchy);
    card->halves_as_float32 = settings.wire_halves == "float32" ? 1 : 0;
    set_text(card->members, members_text());
    set_text(card->host_identity, party_.host_identity);
    set_text(card->networks, join(party_.networks, sizeof card->networks - 1));
    card->transport_id = party_.transport_id;
    card->message_port = request_.message_port;
    // Room for an element of the largest dtype from every rank, however many there are.
    uint64_t least = (static_cast<uint64_t>(request_.size) * 16 + kPageBytes - 1) / kPageBytes;
    // Of an arena that limits have made small, staging leaves most to other groups.
    const uint64_t room = party_.arena->size() / 4;
    const uint64_t pages =
        std::min<uint64_t>(settings.staging_chunk_bytes, room / kLeastBuffers) / kPageBytes;
    const uint64_t chunk = std::max(pages, least) * kPageBytes;
    card->tuning = {
        chunk, static_cast<uint64_t>(settings.one_shot_bytes),
        std::max(kLeastBuffers * chunk,
                 std::min<uint64_t>(settings.staging_bytes, room) / kPageBytes * kPageBytes)};
    Result<uint64_t> lines = party_.arena->allocate_lines();
    if (!lines.ok()) return lines.status();
    lines_offset_ = card->lines_offset = lines.value();
    Lines::set_up(*party_.arena, lines_offset_);
    return {};
  }

  // "rank 2, rank 5": those whose key is not in the store.
  std::string missing(const std::string& what) {
    std::string text;
    for (int rank = 0; rank < request_.size; ++rank) {
      Result<bool> there = store_.has(key(what + "/" + std::to_string(rank)));
      if (there.ok() && there.value()) continue;
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
    return text;
  }

  Status collect_cards() {
    TableHead head;
    Status status;
    for (int rank = 0; rank < request_.size && status.ok(); ++rank) {
      Result<std::string> bytes = get_watching("card/" + std::to_string(rank), deadline_);
      Card card;
      if (!bytes.ok()) {
        status = bytes.status().code() == Code::kTimeout
                     ? Status(Code::kTimeout,
                              "timed out after " + std::to_string(deadline_.timeout_ms()) +
                                  " ms waiting for " + missing("card") +
                                  " to call it; did it start, and does it call it too?")
                     : bytes.status();
      } else if (!from_bytes(bytes.value(), &card) || card.address.magic != kArenaMagic ||
                 card.address.version != kLayoutVersion) {
        status = Status(Code::kUnsupported,
                        "rank " + std::to_string(rank) +
                            " runs another version of dscomm; install the same everywhere");
      } else if (card.failed_code != 0) {
        cards_.resize(static_cast<size_t>(rank) + 1);
        cards_.back() = card;
        status = Status(static_cast<Code>(card.failed_code),
                        name_rank(rank) + ": " + get_text(card.failed_text));
      } else {
        cards_.push_back(card);
      }
    }
    if (status.ok() && getrandom(&head.group_id, sizeof head.group_id, 0) != sizeof head.group_id)
      status = Status(Code::kResource, "getrandom failed");
    if (!status.ok()) {
      head.failed_code = static_cast<uint32_t>(status.code());
      set_text(head.failed_text, status.message());
    } else {
      head.card_count = cards_.size();
    }
    std::string table = to_bytes(head);
    if (status.ok())
      for (const Card& card : cards_) table += to_bytes(card);
    DSCOMM_RETURN_IF_ERROR(publish("table", table));
    if (!status.ok()) return error(status.code(), status.message());
    formation_.group_id = head.group_id;
    return {};
  }

  // Rank 0 gives up at the deadline and then says so: leave it the time to.
  Deadline a_little_longer() const {
    std::chrono::nanoseconds left(std::max<int64_t>(deadline_.remaining_ns(), 0));
    return Deadline::after(std::chrono::duration_cast<std::chrono::milliseconds>(left) +
                           std::chrono::milliseconds(1000));
  }

  Status fetch_table() {
    Result<std::string> bytes = get_watching("table", a_little_longer());
    if (!bytes.ok()) {
      if (bytes.status().code() != Code::kTimeout)
        return error(bytes.status().code(), bytes.status().message());
      std::string who = missing("card");
      return error(Code::kTimeout, "timed out after " + std::to_string(deadline_.timeout_ms()) +
                                       " ms waiting for " +
                                       (who.empty() ? "rank 0, which has ended" : who));
    }
    TableHead head;
    if (bytes.value().size() < sizeof head)
      return error(Code::kInternal, "the member table is too short");
    std::memcpy(static_cast<void*>(&head), bytes.value().data(), sizeof head);
    if (head.magic != kArenaMagic)
      return error(Code::kUnsupported, "rank 0 runs another version of dscomm");
    if (head.failed_code != 0)
      return error(static_cast<Code>(head.failed_code), get_text(head.failed_text));
    if (bytes.value().size() != sizeof head + head.card_count * sizeof(Card))
      return error(Code::kInternal, "the member table has the wrong length");
    cards_.resize(head.card_count);
    std::memcpy(static_cast<void*>(cards_.data()), bytes.value().data() + sizeof head,
                head.card_count * sizeof(Card));
    formation_.group_id = head.group_id;
    return {};
  }

  Status check_table() {
    if (cards_.size() != static_cast<size_t>(request_.size))
      return make_status(Code::kMismatch, "rank 0 believes in %zu ranks, rank %d in %d",
                         cards_.size(), request_.rank, request_.size);
    const Card& first = cards_.front();
    formation_.tuning = first.tuning;
    formation_.hierarchy = get_text(first.hierarchy);
    formation_.halves_as_float32 = first.halves_as_float32 != 0;
    std::vector<std::string> identities;  // by host number
    for (const Card& card : cards_) {
      formation_.places.push_back({card.numa, card.l3});
      formation_.addresses.push_back(card.address);
      formation_.networks.push_back(split(get_text(card.networks)));
      formation_.transport_ids.push_back(card.transport_id);
      formation_.message_ports.push_back(card.message_port);
      std::string identity = get_text(card.host_identity);
      auto known = std::find(identities.begin(), identities.end(), identity);
      formation_.hosts.push_back(static_cast<int>(known - identities.begin()));
      if (known == identities.end()) identities.push_back(std::move(identity));
    }
    formation_.host_count = static_cast<int>(identities.size());
    choose_wait_policy();
    // Each rank of a job whose global ranks are known must see the same members.
    for (size_t rank = 0; rank < request_.global_ranks.size() && rank < cards_.size(); ++rank)
      if (cards_[rank].global_rank != request_.global_ranks[rank])
        return Status(
            Code::kMismatch,
            "the ranks passed different members to it: " + name_rank(static_cast<int>(rank)) +
                " is global rank " + std::to_string(cards_[rank].global_rank) + ", but rank " +
                std::to_string(request_.rank) + " expects global rank " +
                std::to_string(request_.global_ranks[rank]));
    return {};
  }

  bool is_here(int rank) const {
    return formation_.hosts[static_cast<size_t>(rank)] ==
           formation_.hosts[static_cast<size_t>(request_.rank)];
  }

  // By the ranks of this host, which compete for its cores.
  void choose_wait_policy() {
    std::vector<std::string> cpu_lists;
    double quota = 0;
    for (int rank = 0; rank < request_.size; ++rank) {
      if (!is_here(rank)) continue;
      const Card& card = cards_[static_cast<size_t>(rank)];
      if (cpu_lists.empty()) quota = card.cpu_quota;
      cpu_lists.push_back(get_text(card.cpu_list));
    }
    formation_.wait_policy = WaitPolicy::choose(
        *party_.settings, static_cast<int>(cpu_lists.size()), usable_cores(cpu_lists, quota));
  }

  // Whether the first large calls of this host's ranks will find memory. Nothing is reserved: that
  // is for whoever takes it.
  Status check_memory() const {
    const auto ranks =
        static_cast<size_t>(std::count(formation_.hosts.begin(), formation_.hosts.end(),
                                       formation_.hosts[static_cast<size_t>(request_.rank)]));
    const size_t bytes = ranks * (sizeof(GroupLines) + formation_.tuning.staging_bytes);
    const MemoryLimit limit = memory_limit();
    if (static_cast<int64_t>(bytes) + MemoryReservation::spare_bytes(bytes) <=
        limit.available_bytes)
      return {};
    return make_status(
        Code::kResource,
        "%zu %s on this host need %zu bytes of shared memory, but %s leaves %lld, as %s found; "
        "give the job more memory or lower DSCOMM_STAGING_BYTES",
        ranks, ranks == 1 ? "rank" : "ranks", bytes, limit.source.c_str(),
        static_cast<long long>(limit.available_bytes), name_rank(request_.rank).c_str());
  }

  Status attach_all() {
    Lines::open(*party_.arena, lines_offset_, formation_.group_id);
    std::string unreachable, ended, limited, late;
    for (int rank = 0; rank < request_.size; ++rank) {
      const Card& card = cards_[static_cast<size_t>(rank)];
      if (!is_here(rank)) {
        formation_.members.push_back({nullptr, 0, card.global_rank});
        continue;
      }
      Directory::Attached attached = party_.directory->attach(card.address, deadline_);
      if (attached.peer != nullptr &&
          attached.peer->at(card.lines_offset, sizeof(GroupLines), kPageBytes) == nullptr)
        attached = {nullptr, "its lines lie outside its memory"};
      if (attached.peer == nullptr) {
        std::string why_not = name_rank(rank) + ": " + attached.why_not;
        if (attached.code == Code::kPeerDied && ended.empty()) ended = name_rank(rank);
        if (attached.code == Code::kTimeout && late.empty()) late = why_not;
        if (attached.code == Code::kResource && limited.empty()) limited = why_not;
        unreachable += (unreachable.empty() ? "" : "; ") + why_not;
      }
      formation_.members.push_back({attached.peer, card.lines_offset, card.global_rank});
    }
    if (unreachable.empty()) return {};
    if (!late.empty())
      return Status(Code::kTimeout, name_rank(request_.rank) + " waited for the memory of " + late);
    if (!limited.empty())
      return Status(Code::kResource,
                    name_rank(request_.rank) + " could not attach the memory of " + limited);
    if (!ended.empty()) return Status(Code::kPeerDied, ended + " died or exited");
    return Status(Code::kUnsupported,
                  name_rank(request_.rank) + " cannot share memory with " + unreachable +
                      ", which is on the same host; run all ranks of a host as one user, in one "
                      "job");
  }

  // A rank that cannot go on says so, so that nobody waits for it. Another's cause comes first: who
  // could not be reached, or died, may have ended because of it.
  Status give_up(const Status& own) {
    Status first = refuse(own);
    return error(first.code(), first.message());
  }

  Status publish_report() {
    reported_ = true;
    Report report;
    for (const LinesMember& member : formation_.members)
      if (member.peer != nullptr && member.peer->lacks_pool()) report.lacks_pool = 1;
    return publish("report/" + std::to_string(request_.rank), to_bytes(report));
  }

  // Says why the group cannot be formed to all who still wait, before this rank raises it: who sees
  // this rank end afterwards must not take it for the cause. A cause that is there already stays
  // and is returned; of two that come at once either may stay.
  Status refuse(const Status& cause) {
    if (Status first = refused(); !first.ok()) return first;
    Report refusal;
    refusal.failed_code = static_cast<uint32_t>(cause.code());
    set_text(refusal.failed_text, cause.message());
    // Where the store is gone too (rank 0 may have held it), the cause is what this rank raises.
    static_cast<void>(store_.set(key("refused"), to_bytes(refusal)));
    return cause;
  }

  Status refused() {
    Result<bool> there = store_.has(key("refused"));
    if (!there.ok() || !there.value()) return {};
    Result<std::string> bytes = store_.get(key("refused"), deadline_);
    Report refusal;
    if (!bytes.ok() || !from_bytes(bytes.value(), &refusal) || refusal.failed_code == 0) return {};
    return Status(static_cast<Code>(refusal.failed_code), get_text(refusal.failed_text));
  }

  // Gets a key, and notices that a member died meanwhile or that the group was refused.
  Result<std::string> get_watching(const std::string& name, const Deadline& deadline) {
    const auto slice = [] { return Deadline::after(std::chrono::milliseconds(100)); };
    // The store notes time that the process lost during its slices of sleep.
    TimeLeft time_left(deadline);
    while (true) {
      Result<std::string> bytes = store_.get(key(name), slice());
      if (bytes.ok() || bytes.status().code() != Code::kTimeout) return bytes;
      DSCOMM_RETURN_IF_ERROR(refused());
      for (size_t rank = 0; rank < formation_.members.size(); ++rank) {
        const std::shared_ptr<Peer>& peer = formation_.members[rank].peer;
        if (peer == nullptr || peer->alive()) continue;
        // Looked at again, now that it can do no more: it may have ended because the group was
        // refused, or long after the group was formed.
        DSCOMM_RETURN_IF_ERROR(refused());
        bytes = store_.get(key(name), slice());
        if (bytes.ok()) return bytes;
        return refuse(
            Status(Code::kPeerDied, name_rank(static_cast<int>(rank)) + " died or exited"));
      }
      if (time_left.is_over()) return bytes;
    }
  }

  Status collect_reports() {
    Report verdict;
    for (int rank = 0; rank < request_.size && verdict.failed_code == 0; ++rank) {
      Result<std::string> bytes = get_watching("report/" + std::to_string(rank), deadline_);
      Report report;
      if (!bytes.ok()) {
        verdict.failed_code = static_cast<uint32_t>(bytes.status().code());
        set_text(verdict.failed_text, bytes.status().code() == Code::kTimeout
                                          ? "timed out after " +
                                                std::to_string(deadline_.timeout_ms()) +
                                                " ms waiting for " + missing("report")
                                          : bytes.status().message());
      } else if (!from_bytes(bytes.value(), &report) || report.magic != kArenaMagic) {
        verdict.failed_code = static_cast<uint32_t>(Code::kInternal);
        set_text(verdict.failed_text, "the report of " + name_rank(rank) + " is malformed");
      } else {
        verdict.lacks_pool |= report.lacks_pool;
      }
    }
    // Before the verdict lets anyone go: some may still attach, and would take this rank for dead.
    if (verdict.failed_code != 0) {
      Status first =
          refuse(Status(static_cast<Code>(verdict.failed_code), get_text(verdict.failed_text)));
      verdict.failed_code = static_cast<uint32_t>(first.code());
      set_text(verdict.failed_text, first.message());
    }
    DSCOMM_RETURN_IF_ERROR(publish("verdict", to_bytes(verdict)));
    return accept(verdict);
  }

  Status fetch_verdict() {
    Result<std::string> bytes = get_watching("verdict", a_little_longer());
    if (!bytes.ok())
      return error(bytes.status().code(), bytes.status().code() == Code::kTimeout
                                              ? "timed out waiting for rank 0"
                                              : bytes.status().message());
    Report verdict;
    if (!from_bytes(bytes.value(), &verdict))
      return error(Code::kInternal, "the verdict of rank 0 is malformed");
    return accept(verdict);
  }

  Status accept(const Report& verdict) {
    if (verdict.failed_code != 0)
      return error(static_cast<Code>(verdict.failed_code), get_text(verdict.failed_text));
    formation_.reads_pools = verdict.lacks_pool == 0;
    if (!formation_.reads_pools)
      log_line(LogLevel::kInfo,
               "group '%s': a rank cannot read the pool of another (ulimit -v, ulimit -n), so all "
               "tensors are staged",
               request_.name.c_str());
    return {};
  }

  const FormationParty& party_;
  Store& store_;
  const FormationRequest& request_;
  const Deadline& deadline_;
  std::string prefix_;
  uint64_t lines_offset_ = 0;
  bool reported_ = false;
  std::vector<Card> cards_;
  Formation formation_;
};

}  // namespace

Result<Formation> form_group(const FormationParty& party, Store& store,
                             const FormationRequest& request, const Deadline& deadline) {
  return Former(party, store, request, deadline).run();
}

void decline_group(Store& store, const FormationRequest& request, const Status& cause,
                   const Deadline& deadline) {
  // What the store answers changes nothing: this rank raises its own cause all the same.
  static_cast<void>(Former(FormationParty(), store, request, deadline).decline(cause));
}

}  // namespace dscomm
