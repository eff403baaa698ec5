#include "core/formation/formation.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "core/base/format.h"
#include "core/base/log.h"
#include "core/base/memory_limit.h"
#include "core/base/memory_reservation.h"
#include "core/base/packer.h"
#include "core/formation/tcp_relay.h"
#include "core/store/store_exchange.h"
#include "core/team/departure.h"

namespace dscomm {
namespace {

// The most members that an entry names: every rank reads all entries, so entries must be short.
constexpr size_t kNamedMembers = 32;

// How often a leader that waits for its members' reports checks whether they live.
constexpr int64_t kCheckReportsNs = 50'000'000;

// A leader stops waiting for reports this long before the deadline, or a twentieth of the timeout
// before it if that is less. Rank 0 waits until the deadline.
constexpr int64_t kLeaderHeadStartNs = 250 * kMs;

// The body of a rank's entry.
struct Member {
  PeerAddress address;
  uint64_t mailbox_offset = 0;
  int global_rank = -1;
  CpuBinding binding;
  double cpu_quota = 0;
  ShmTuning tuning;
  std::string hierarchy;
  bool halves_as_float32 = false;  // between hosts
  uint32_t message_port = 0;
  std::string cpu_list;
  std::string host_identity;
  std::vector<std::string> networks;
  uint64_t transport_id = 0;
};

// Packs or unpacks a Member: `common` has the fields that the ranks of a host mostly share.
template <typename Coder, typename AnyMember>
void code_member(Coder& common, Coder& own, AnyMember& member) {
  auto& address = member.address;
  auto& tuning = member.tuning;
  common.fields(address.magic, address.version, address.uid)
      .text(address.host)
      .real(member.cpu_quota)
      .fields(tuning.chunk_bytes, tuning.one_shot_bytes, tuning.staging_bytes, member.hierarchy,
              member.halves_as_float32, member.host_identity, member.networks, member.transport_id);
  own.bytes(address.arena)
      .bytes(address.socket)
      .bytes(address.doorbell)
      .fields(address.pid, member.mailbox_offset)
      .index(member.global_rank)
      .index(member.binding.numa)
      .index(member.binding.l3)
      .fields(member.message_port, member.cpu_list);
}

MemberEntry pack(const Member& member) {
  Packer common, own;
  code_member(common, own, member);
  return {common.take(), own.take()};
}

bool unpack(const MemberEntry& bytes, Member* member) {
  Unpacker common(bytes.common), own(bytes.own);
  code_member(common, own, *member);
  const ShmTuning& tuning = member->tuning;
  return common.whole() && own.whole() && member->address.magic == kArenaMagic &&
         member->address.version == kLayoutVersion && tuning.chunk_bytes != 0 &&
         tuning.staging_bytes / tuning.chunk_bytes >= kLeastBuffers;
}

// One rank's part in a formation.
class FormationRun {
 public:
  FormationRun(const FormingProcess& process, Store& store, const FormationRequest& request,
               const Deadline& deadline)
      : process_(process),
        store_(store),
        request_(request),
        deadline_(deadline),
        relay_(make_relay(process, request)),
        modex_(store, modex_request(request, relay_.get()), deadline) {}
  ~FormationRun() {
    if (mailbox_offset_ == 0) return;
    // If this rank gave up after its report, a member may still have seen a good verdict, and
    // learns from the mailbox at its first call that this rank has left. So the mailbox is then not
    // reused.
    close_mailbox(*process_.arena, mailbox_offset_);
    if (!reported_) process_.arena->release(mailbox_offset_, sizeof(Mailbox));
  }

  Result<Formation> run() {
    Member own;
    if (Status prepared = describe_itself(&own); !prepared.ok()) {
      decline(prepared);
      return error(prepared);
    }
    Status result = meet(pack(own));
    // The members of this leader raise the same cause.
    if (!result.ok() && leader_ != nullptr) leader_->send_failure(result);
    if (!result.ok()) return error(result);
    mailbox_offset_ = 0;  // the ShmTeam owns it now
    return std::move(formation_);
  }

  void decline(const Status& cause) {
    modex_.decline(make_status(cause.code(), "rank {} (pid {}): {}", request_.rank, getpid(),
                               cause.message()));
  }

 private:
  // Null if the group has few hosts, or if their number is not known.
  static std::unique_ptr<TableRelay> make_relay(const FormingProcess& process,
                                                const FormationRequest& request) {
    if (process.settings == nullptr ||
        static_cast<int64_t>(request.local.leaders.size()) < process.settings->relay_hosts)
      return nullptr;
    const auto rank = static_cast<size_t>(request.rank);
    TransportMember own;
    own.global_rank =
        rank < request.global_ranks.size() ? request.global_ranks[rank] : request.rank;
    own.pid = process.address->pid;
    own.host_name = process.address->host_name();
    own.networks = process.networks;
    return std::make_unique<TcpRelay>(request.name, process.host_identity, std::move(own),
                                      *process.settings);
  }

  static ModexRequest modex_request(const FormationRequest& request, TableRelay* relay) {
    ModexRequest modex;
    modex.relay = relay;
    modex.prefix = request.prefix;
    modex.rank = request.rank;
    modex.size = request.size;
    const std::vector<int>& ranks = request.global_ranks;
    for (size_t k = 0; k < std::min(ranks.size(), kNamedMembers); ++k)
      modex.members += format_text("{}{}", k == 0 ? "" : ", ", ranks[k]);
    if (ranks.size() > kNamedMembers)
      modex.members += format_text(" and {} more", ranks.size() - kNamedMembers);
    modex.entry_owners = request.local.leaders;
    const std::vector<int>& here = request.local.ranks;
    if (!here.empty() && here.front() == 0) {
      modex.check = request.gone;
      modex.formed = request.formed;
    } else {  // rank 0, perhaps on another host, may wait for this rank: this rank must decline
      modex.check = [&request] {
        DSCOMM_RETURN_IF_ERROR(request.gone());
        return request.formed();
      };
    }
    modex.began_ns = request.began_ns;
    return modex;
  }

  Status meet(const MemberEntry& entry) {
    DSCOMM_RETURN_IF_ERROR(set_up_local_exchange(entry));
    while (true) {
      Result<Modex::Table> table = next_table_          ? modex_.take_table(*next_table_)
                                   : member_ != nullptr ? modex_.follow(*member_)
                                                        : modex_.gather(entry, leader_.get());
      next_table_.reset();
      if (!table.ok()) return table.status();
      StoreExchange exchange(store_, exchange_request(), deadline_);
      exchange_ = &exchange;
      Status result = join(table.value());
      exchange_ = nullptr;
      if (exchange.is_restarted() || next_table_) continue;
      if (result.code() == Code::kPeerDied) modex_.fail_others(result);
      return result;
    }
  }

  // Whether this rank speaks for all ranks, so that it no longer needs the store.
  bool speaks_for_all() const { return modex_.entry_owners().size() == 1 && member_ == nullptr; }

  // Finds out whether this rank speaks for others, or another for it.
  Status set_up_local_exchange(const MemberEntry& entry) {
    const std::vector<int>& here = request_.local.ranks;
    if (here.size() < 2) return {};
    LocalEntry own{request_.rank,
                   format_text("rank {} ({})", request_.rank, process_.address->describe()),
                   request_.size, modex_request(request_, nullptr).members, entry};
    if (here.front() == request_.rank) {
      leader_ = LocalLeader::listen(request_.local, own);
      return {};
    }
    member_ = std::make_unique<LocalMember>(request_.local);
    DSCOMM_ASSIGN_OR_RETURN(bool joined, modex_.join_leader(*member_, own));
    if (!joined) member_.reset();
    return {};
  }

  // The exchange through the store, among the ranks that put entries there. A rank with a leader
  // uses it only once the leader has died, to report the failure.
  ExchangeRequest exchange_request() {
    const std::vector<int>& entry_owners = modex_.entry_owners();
    ExchangeRequest exchange;
    exchange.prefix = modex_.prefix();
    exchange.rank = static_cast<int>(
        std::find(entry_owners.begin(), entry_owners.end(), request_.rank) - entry_owners.begin());
    exchange.size = static_cast<int>(entry_owners.size());
    exchange.name = [this](int owner) {
      return name_rank(modex_.entry_owners()[static_cast<size_t>(owner)]);
    };
    exchange.check = [this] { return check(); };
    return exchange;
  }

  // The steps that all members of a table take together.
  Status join(const Modex::Table& table) {
    formation_ = Formation();
    formation_.group_id = table.id;
    reported_ = false;
    Status result = read_table(table);
    if (result.ok()) result = check_memory();
    if (result.ok()) result = attach_all();
    if (member_ == nullptr)
      if (Status withdrawn = modex_.remove_own_entry(); result.ok()) result = withdrawn;
    // A rank that cannot go on reports the cause, so that no rank waits for it. fail() returns an
    // earlier cause of another rank, if any: that may be why a rank died or could not be reached.
    if (!result.ok()) return fail(result);
    return agree_on_verdict();
  }

  Status fail(const Status& cause) {
    if (member_ == nullptr) return speaks_for_all() ? cause : exchange_->fail(cause);
    return read_leader_answer(member_->fail(cause, deadline_)).status();
  }

  // Returns the verdict or the failure in the leader's answer. Keeps a newer table in next_table_.
  Result<std::string> read_leader_answer(Result<LocalMessage> word) {
    if (!word.ok()) return member_->has_ended() ? exchange_->fail(word.status()) : word.status();
    if (word.value().kind == LocalMessageKind::kVerdict) return word.value().text;
    next_table_ = std::move(word).value();
    return Status(Code::kAborted, "a newer meeting of the members replaced this one");  // not shown
  }

  Status error(const Status& cause) const {
    return Status(cause.code(), "forming group '" + request_.name + "': " + cause.message());
  }

  std::string name_rank(int rank) const {
    return format_text("rank {} ({})", rank,
                       members_[static_cast<size_t>(rank)].address.describe());
  }

  Status describe_itself(Member* member) {
    const Settings& settings = *process_.settings;
    const auto rank = static_cast<size_t>(request_.rank);
    member->address = *process_.address;
    member->global_rank = rank < request_.global_ranks.size() ? request_.global_ranks[rank] : -1;
    member->binding = process_.topology->binding();
    member->cpu_quota = cgroup_cpu_quota();
    member->cpu_list = process_.topology->cpu_list();
    member->hierarchy = settings.hierarchy;
    member->halves_as_float32 = settings.wire_halves == "float32";
    member->host_identity = process_.host_identity;
    member->networks = process_.networks;
    member->transport_id = process_.transport_id;
    member->message_port = request_.message_port;
    // A chunk has room for an element of the largest dtype (16 bytes) from every rank.
    const uint64_t least =
        (static_cast<uint64_t>(request_.size) * 16 + kPageBytes - 1) / kPageBytes;
    // Staging is to take at most a quarter of the arena, which limits may have made small.
    const uint64_t room = process_.arena->size() / 4;
    const uint64_t pages =
        std::min<uint64_t>(settings.staging_chunk_bytes, room / kLeastBuffers) / kPageBytes;
    const uint64_t chunk = std::max(pages, least) * kPageBytes;
    member->tuning = {
        chunk, static_cast<uint64_t>(settings.one_shot_bytes),
        std::max(kLeastBuffers * chunk,
                 std::min<uint64_t>(settings.staging_bytes, room) / kPageBytes * kPageBytes)};
    DSCOMM_ASSIGN_OR_RETURN(uint64_t mailbox, process_.arena->allocate_mailbox());
    mailbox_offset_ = member->mailbox_offset = mailbox;
    set_up_mailbox(*process_.arena, mailbox_offset_);
    return {};
  }

  Status read_table(const Modex::Table& table) {
    members_.assign(table.entries.size(), Member());
    for (size_t rank = 0; rank < members_.size(); ++rank)
      if (!unpack(table.entries[rank], &members_[rank]))
        return malformed_value("entry of rank " + std::to_string(rank));
    const Member& first = members_.front();
    formation_.tuning = first.tuning;
    formation_.hierarchy = first.hierarchy;
    formation_.halves_as_float32 = first.halves_as_float32;
    std::map<std::string, int> hosts;  // numbers of hosts, by identity
    for (const Member& member : members_) {
      formation_.bindings.push_back(member.binding);
      formation_.addresses.push_back(member.address);
      formation_.networks.push_back(member.networks);
      formation_.transport_ids.push_back(member.transport_id);
      formation_.message_ports.push_back(member.message_port);
      formation_.hosts.push_back(
          hosts.try_emplace(member.host_identity, static_cast<int>(hosts.size())).first->second);
    }
    formation_.host_count = static_cast<int>(hosts.size());
    choose_wait_policy();
    // If global ranks are known, all ranks must see the same members.
    for (size_t rank = 0; rank < request_.global_ranks.size() && rank < members_.size(); ++rank)
      if (members_[rank].global_rank != request_.global_ranks[rank])
        return make_status(
            Code::kMismatch,
            "the ranks passed different members to it: {} is global rank {}, but rank "
            "{} expects global rank {}; pass the same list on every rank",
            name_rank(static_cast<int>(rank)), members_[rank].global_rank, request_.rank,
            request_.global_ranks[rank]);
    return {};
  }

  // The cause of a rank's end: reported to this leader, or in the rank's entry; else kPeerDied.
  Status death_of(int rank) {
    if (leader_ != nullptr) DSCOMM_RETURN_IF_ERROR(leader_->handle_messages());
    Status cause = modex_.final_cause(rank);
    if (!cause.ok()) return cause;
    return Status(Code::kPeerDied, name_rank(rank) + " died or exited" + kDeathAdvice);
  }

  bool is_here(int rank) const {
    return formation_.hosts[static_cast<size_t>(rank)] ==
           formation_.hosts[static_cast<size_t>(request_.rank)];
  }

  // Considers the ranks of this host, which compete for its cores.
  void choose_wait_policy() {
    std::vector<std::string> cpu_lists;
    double quota = 0;
    for (int rank = 0; rank < request_.size; ++rank) {
      if (!is_here(rank)) continue;
      const Member& member = members_[static_cast<size_t>(rank)];
      if (cpu_lists.empty()) quota = member.cpu_quota;
      cpu_lists.push_back(member.cpu_list);
    }
    formation_.wait_policy = WaitPolicy::choose(
        *process_.settings, static_cast<int>(cpu_lists.size()), usable_cores(cpu_lists, quota));
  }

  // Checks whether the first large calls of this host's ranks will find memory. Reserves none: each
  // rank reserves memory when it allocates it.
  Status check_memory() const {
    const auto ranks =
        static_cast<size_t>(std::count(formation_.hosts.begin(), formation_.hosts.end(),
                                       formation_.hosts[static_cast<size_t>(request_.rank)]));
    const size_t bytes = ranks * (sizeof(Mailbox) + formation_.tuning.staging_bytes);
    const int64_t spare_bytes = MemoryReservation::spare_bytes(bytes);
    const MemoryLimit limit = memory_limit();
    if (static_cast<int64_t>(bytes) + spare_bytes <= limit.available_bytes) return {};
    return make_status(Code::kResource,
                       "{} {} on this host need {} bytes of shared memory, and {} must stay free, "
                       "but {} leaves {}, as {} found; give the job more memory or lower "
                       "DSCOMM_STAGING_BYTES and DSCOMM_STAGING_CHUNK_BYTES on rank 0",
                       ranks, ranks == 1 ? "rank" : "ranks", bytes, spare_bytes, limit.source,
                       limit.available_bytes, name_rank(request_.rank));
  }

  Status attach_all() {
    open_mailbox(*process_.arena, mailbox_offset_, formation_.group_id);
    awaits_successor_ = Status();
    std::string unreachable, limited, late;
    Status ended;
    bool are_all_old = true;
    for (int rank = 0; rank < request_.size; ++rank) {
      const Member& member = members_[static_cast<size_t>(rank)];
      if (!is_here(rank)) {
        formation_.members.push_back({nullptr, 0, member.global_rank});
        continue;
      }
      Directory::Attached attached = process_.directory->attach(member.address, deadline_);
      if (attached.peer != nullptr &&
          attached.peer->at(member.mailbox_offset, sizeof(Mailbox), kPageBytes) == nullptr)
        attached = {nullptr, "its mailbox lies outside its memory"};
      formation_.members.push_back({attached.peer, member.mailbox_offset, member.global_rank});
      if (attached.peer != nullptr) continue;
      const std::string why_not = name_rank(rank) + ": " + attached.why_not;
      are_all_old = are_all_old && modex_.may_be_stale(rank);
      if (attached.code == Code::kPeerDied && ended.ok()) ended = death_of(rank);
      if (attached.code == Code::kTimeout && late.empty()) late = why_not;
      if (attached.code == Code::kResource && limited.empty()) limited = why_not;
      unreachable += (unreachable.empty() ? "" : "; ") + why_not;
    }
    if (unreachable.empty()) return {};
    const std::string own_name = name_rank(request_.rank);
    Status failure(Code::kUnsupported,
                   format_text("{} cannot share memory with ranks of the same host ({}); run all "
                               "ranks of a host as one user, in one job",
                               own_name, unreachable));
    if (!ended.ok()) failure = ended;
    if (!limited.empty())
      failure = Status(Code::kResource, own_name + " could not attach the memory of " + limited);
    if (!late.empty())
      failure =
          Status(Code::kTimeout, own_name + " timed out while it attached the memory of " + late);
    if (!are_all_old) return failure;
    await_successor(failure);
    return {};
  }

  // Gets the verdict on the reports of all ranks: whether a rank cannot read the pool of another.
  Status agree_on_verdict() {
    uint64_t lacks_pool = 0;
    for (const MailboxMember& member : formation_.members)
      if (member.peer != nullptr && member.peer->lacks_pool()) lacks_pool = 1;
    reported_ = true;
    const Report own{lacks_pool, awaits_successor_};
    DSCOMM_ASSIGN_OR_RETURN(std::string verdict,
                            member_ != nullptr ? hear_verdict(own) : make_verdict(own));
    formation_.reads_pools = Unpacker(verdict).number() == 0;
    if (!formation_.reads_pools)
      log_line(LogLevel::kInfo,
               "group '{}': a rank cannot read the pool of another (ulimit -v, ulimit -n), so all "
               "tensors are staged",
               request_.name);
    return {};
  }

  // The report of a rank, or of all ranks that it speaks for.
  struct Report {
    uint64_t lacks_pool = 0;
    Status failure;  // awaits_successor_ of a rank, or kTimeout if a report is missing
  };

  static std::string pack_report(const Report& report) {
    return Packer().number(report.lacks_pool).status(report.failure).take();
  }

  static Status add_report(const std::string& bytes, Report* sum) {
    Unpacker unpacker(bytes);
    sum->lacks_pool |= unpacker.number();
    Status failure;
    if (!unpacker.status(failure).whole()) return malformed_value("report of a rank");
    if (sum->failure.ok()) sum->failure = failure;
    return {};
  }

  // Used on a rank without a leader, for itself and the ranks that it leads.
  Result<std::string> make_verdict(Report all) {
    if (Status gathered = gather_reports(&all); !gathered.ok())
      return exchange_->is_restarted() ? gathered : fail(gathered);
    const auto decide = [](const std::vector<std::string>& reports) -> Result<std::string> {
      Report sum;
      for (const std::string& report : reports) DSCOMM_RETURN_IF_ERROR(add_report(report, &sum));
      // The owners of all entries have reported, so no successor will come: a failure is final.
      DSCOMM_RETURN_IF_ERROR(sum.failure);
      return Packer().number(sum.lacks_pool).take();
    };
    const std::string report = pack_report(all);
    DSCOMM_ASSIGN_OR_RETURN(std::string verdict, speaks_for_all()
                                                     ? decide({report})
                                                     : exchange_->agree("report", report, decide));
    if (leader_ != nullptr) leader_->send_verdict(verdict);
    if (speaks_for_all()) return verdict;
    if (request_.rank == 0) modex_.remove_tables();  // a verdict means that all have read them
    exchange_->finish();
    return verdict;
  }

  Status gather_reports(Report* all) {
    if (leader_ == nullptr) return {};
    TimeLeft time_left(deadline_);
    // Rank 0 knows only the leaders, so a leader names its missing members before rank 0 times out.
    const int64_t earlier_ns =
        request_.rank == 0 ? 0 : std::min(kLeaderHeadStartNs, deadline_.timeout_ms() * kMs / 20);
    for (bool is_over = false; leader_->reports().size() < leader_->entries().size();) {
      if (is_over) {
        const Status late = make_status(Code::kTimeout, "timed out after {} waiting for {}",
                                        deadline_.timeout_text(), leader_->without_report());
        if (request_.rank == 0) return late;
        all->failure = late;
        return {};
      }
      is_over = time_left.ns() <= earlier_ns;
      DSCOMM_RETURN_IF_ERROR(leader_->await_messages(kCheckReportsNs, deadline_));
      DSCOMM_RETURN_IF_ERROR(speaks_for_all() ? check() : exchange_->check());
    }
    for (const auto& [rank, report] : leader_->reports())
      DSCOMM_RETURN_IF_ERROR(add_report(report, all));
    return {};
  }

  // Used on a rank with a leader.
  Result<std::string> hear_verdict(const Report& own) {
    member_->report(pack_report(own));
    return read_leader_answer(member_->await([this] { return check(); }, deadline_));
  }

  void await_successor(const Status& cause) {
    if (!awaits_successor_.ok()) return;
    awaits_successor_ = cause;
    came_to_wait_ns_ = monotonic_ns();
  }

  // Called during waits: finds dead ranks, superseded entries, and the caller's reason to give up.
  Status check() {
    for (size_t rank = 0; rank < formation_.members.size(); ++rank) {
      const std::shared_ptr<Peer>& peer = formation_.members[rank].peer;
      if (peer == nullptr || peer->alive()) continue;
      const Status death = death_of(static_cast<int>(rank));
      if (!modex_.may_be_stale(static_cast<int>(rank))) return death;
      await_successor(death);
    }
    if (request_.rank == 0 && exchange_->awaited() > 0 &&
        modex_.is_superseded(modex_.entry_owners()[static_cast<size_t>(exchange_->awaited())]))
      exchange_->restart_all();
    if (!awaits_successor_.ok() && monotonic_ns() - came_to_wait_ns_ >= Modex::successor_limit_ns())
      return awaits_successor_;
    return request_.gone();
  }

  const FormingProcess& process_;
  Store& store_;
  const FormationRequest& request_;
  const Deadline& deadline_;
  const std::unique_ptr<TableRelay> relay_;  // null if there are few hosts
  Modex modex_;
  // At most one is set: this rank speaks for others of its host, or another for it.
  std::unique_ptr<LocalLeader> leader_;
  std::unique_ptr<LocalMember> member_;
  std::optional<LocalMessage> next_table_;  // of a meeting that superseded the last one
  StoreExchange* exchange_ = nullptr;
  uint64_t mailbox_offset_ = 0;
  bool reported_ = false;
  std::vector<Member> members_;
  Formation formation_;
  // OK, or a failure to attach a rank, or the rank's death. The entry of that rank may be left from
  // an earlier process, so this rank waits for a successor before it fails.
  Status awaits_successor_;
  int64_t came_to_wait_ns_ = 0;
};

}  // namespace

Result<Formation> form_group(const FormingProcess& process, Store& store,
                             const FormationRequest& request, const Deadline& deadline) {
  deadline.expired();  // starts the clock
  return FormationRun(process, store, request, deadline).run();
}

void decline_group(Store& store, const FormationRequest& request, const Status& cause,
                   const Deadline& deadline) {
  FormationRun(FormingProcess(), store, request, deadline).decline(cause);
}

}  // namespace dscomm
