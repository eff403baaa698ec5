#include "core/formation/domain_teams.h"

#include <algorithm>
#include <span>

#include "core/team/hierarchical_team.h"

namespace dscomm {
namespace {

// A rank is in the Team of its domain, if the domain has other ranks; in a Team for each slice that
// it carries (in a domain of n ranks, that at index k mod n carries slice k); and in one Team of
// all ranks. Each rank shares the offsets of its mailboxes: entry 0 is for the domain, 1 + k / n
// for slice k, the last for the Team of all.
class DomainTeamsBuilder {
 public:
  explicit DomainTeamsBuilder(const DomainTeamsRequest& request) : request_(request) {
    size_t smallest = SIZE_MAX;
    for (const std::vector<int>& domain : request_.domains) {
      slices_ = std::max(slices_, domain.size());
      smallest = std::min(smallest, domain.size());
      auto own = std::find(domain.begin(), domain.end(), request_.rank);
      if (own == domain.end()) continue;
      index_ = static_cast<size_t>(own - domain.begin());
      domain_size_ = domain.size();
    }
    width_ = 2 + (slices_ + smallest - 1) / smallest;
    offsets_.resize(width_ * request_.members.size());
  }

  ~DomainTeamsBuilder() {
    // A member may know these mailboxes, and learns from them at its first call that this rank has
    // left. So the mailboxes are never reused.
    for (uint64_t offset : unused_) close_mailbox(*request_.arena, offset);
  }

  // Tells every rank where the mailboxes of all lie.
  Status share_mailboxes(ShmTeam& flat, const Deadline& deadline) {
    std::vector<uint64_t> own(width_);  // 0: this rank is in no Team for the entry
    if (domain_size_ > 1) DSCOMM_RETURN_IF_ERROR(allocate(0, &own[0]));
    for (size_t slice = index_; slice < slices_; slice += domain_size_)
      DSCOMM_RETURN_IF_ERROR(allocate(1 + slice, &own[1 + slice / domain_size_]));
    DSCOMM_RETURN_IF_ERROR(allocate(1 + slices_, &own[width_ - 1]));
    const std::vector<size_t> counts(request_.members.size(), width_);
    std::vector<void*> outs;
    for (size_t k = 0; k < counts.size(); ++k) outs.push_back(&offsets_[k * width_]);
    return flat.all_gather(own.data(), width_, DType::kInt64, outs, counts, {deadline});
  }

  Result<std::unique_ptr<Team>> make(ShmTeam& flat) {
    TeamFactory inner = [this](std::span<const int> ranks, const std::string&) {
      return make_part(ranks, 0, std::vector<size_t>(ranks.size(), 0));
    };
    TeamFactory outer = [this, slice = index_](std::span<const int> ranks,
                                               const std::string&) mutable {
      if (slice >= slices_)
        return make_part(ranks, 1 + slices_, std::vector<size_t>(ranks.size(), width_ - 1));
      std::vector<size_t> entries;
      for (const std::vector<int>& domain : request_.domains)
        entries.push_back(1 + slice / domain.size());
      Result<std::unique_ptr<Team>> part = make_part(ranks, 1 + slice, entries);
      slice += domain_size_;
      return part;
    };
    // If a call needs data from all, `flat` reports a member that is gone and has not begun it. The
    // child Teams may miss that, because perhaps none contains both this rank and that member.
    HierarchyOptions options{.name = "hierarchy"};
    options.group = request_.group_name;
    options.note_call = [&flat](const CallRecord& call, bool reads_all) {
      flat.agreement().note_call(call, reads_all);
    };
    options.received_notice = [&flat](uint64_t) { return flat.agreement().find_missing_member(); };
    DSCOMM_ASSIGN_OR_RETURN(
        std::unique_ptr<HierarchicalTeam> composed,
        HierarchicalTeam::make(request_.rank, request_.domains, inner, outer, std::move(options)));
    flat.agreement().end_forming();
    return std::unique_ptr<Team>(std::move(composed));
  }

 private:
  // Teams of different domains may have the same id, because they share no member.
  uint64_t id_of(size_t part) const {
    return (request_.group_id ^ (part + 1)) * 0x9e3779b97f4a7c15ull;
  }

  // Allocates a mailbox and opens it, before any other rank knows of it.
  Status allocate(size_t part, uint64_t* offset) {
    DSCOMM_ASSIGN_OR_RETURN(*offset, request_.arena->allocate_mailbox());
    unused_.push_back(*offset);
    set_up_mailbox(*request_.arena, *offset);
    open_mailbox(*request_.arena, *offset, id_of(part));
    return {};
  }

  // Makes the Team of the positions `ranks`. ranks[k] uses the mailbox of its entry entries[k].
  Result<std::unique_ptr<Team>> make_part(std::span<const int> ranks, size_t part,
                                          const std::vector<size_t>& entries) {
    std::vector<MailboxMember> members;
    int rank = 0;
    for (size_t k = 0; k < ranks.size(); ++k) {
      const auto position = static_cast<size_t>(ranks[k]);
      MailboxMember member = request_.members[position];
      member.mailbox_offset = offsets_[position * width_ + entries[k]];
      if (member.mailbox_offset == 0 ||
          member.peer->at(member.mailbox_offset, sizeof(Mailbox), kPageBytes) == nullptr)
        return Status(Code::kInternal,
                      "the mailbox of " + request_.names[position] + " lies outside its memory");
      if (ranks[k] == request_.rank) rank = static_cast<int>(k);
      members.push_back(std::move(member));
    }
    std::erase(unused_, members[static_cast<size_t>(rank)].mailbox_offset);
    return std::unique_ptr<Team>(std::make_unique<ShmTeam>(
        request_.arena, id_of(part), request_.group_name, rank, std::move(members),
        request_.wait_policy, request_.tuning, request_.in_place));
  }

  const DomainTeamsRequest& request_;
  size_t slices_ = 0, domain_size_ = 1, index_ = 0;  // sizes: largest domain, own one; index in own
  size_t width_ = 0;                                 // offsets per rank
  std::vector<uint64_t> offsets_;                    // width_ for each position
  std::vector<uint64_t> unused_;                     // this rank's mailboxes that no Team owns yet
};

}  // namespace

Result<std::unique_ptr<Team>> make_domain_teams(const DomainTeamsRequest& request, ShmTeam& flat,
                                                const Deadline& deadline) {
  DomainTeamsBuilder builder(request);
  Status status = builder.share_mailboxes(flat, deadline);
  if (status.ok()) {
    Result<std::unique_ptr<Team>> team = builder.make(flat);
    if (team.ok()) return team;
    status = team.status();
  }
  flat.abort(status);
  const Status cause = flat.failure();
  return cause.ok() ? status : cause;
}

}  // namespace dscomm
