// Construction, the start and end of each call, and failures. The algorithms are in
// hierarchical_reduce.cc and hierarchical_move.cc.

#include "core/team/hierarchical_team.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <ranges>

#include "core/base/format.h"
#include "core/team/mismatch.h"
#include "core/team/self_team.h"

namespace dscomm {
namespace {

constexpr int64_t kHearEveryNs = 1'000'000;

Status check_domains(int rank, const std::vector<std::vector<int>>& domains) {
  size_t rank_count = 0;
  for (const std::vector<int>& domain : domains) rank_count += domain.size();
  std::vector<bool> seen(rank_count, false);
  for (const std::vector<int>& domain : domains) {
    if (domain.empty()) return make_status(Code::kInvalidArgument, "a domain has no ranks");
    for (int member : domain) {
      if (member < 0 || static_cast<size_t>(member) >= rank_count || seen[member])
        return make_status(Code::kInvalidArgument,
                           "the domains must hold each of the ranks 0 to {} once, but rank {} is "
                           "outside or there twice",
                           rank_count - 1, member);
      seen[member] = true;
    }
  }
  if (rank >= 0 && static_cast<size_t>(rank) < rank_count) return {};
  return make_status(Code::kInvalidArgument, "the rank is {}, expected 0 to {}", rank,
                     rank_count - 1);
}

// `index` is this rank's position in `ranks`.
Result<std::unique_ptr<Team>> make_team(const std::vector<int>& ranks, int index,
                                        const TeamFactory& factory, const std::string& name) {
  if (ranks.size() == 1) return std::unique_ptr<Team>(std::make_unique<SelfTeam>());
  DSCOMM_ASSIGN_OR_RETURN(std::unique_ptr<Team> team, factory(ranks, name));
  DSCOMM_CHECK(team->rank() == index && team->size() == static_cast<int>(ranks.size()),
               "a Team numbers its ranks as they are listed");
  return team;
}

}  // namespace

Result<std::unique_ptr<HierarchicalTeam>> HierarchicalTeam::make(
    int rank, std::vector<std::vector<int>> domains, const TeamFactory& make_inner,
    const TeamFactory& make_outer, HierarchyOptions options) {
  DSCOMM_RETURN_IF_ERROR(check_domains(rank, domains));
  std::unique_ptr<HierarchicalTeam> team(
      new HierarchicalTeam(rank, std::move(domains), std::move(options)));
  Status status = team->make_teams(make_inner, make_outer);
  if (!status.ok()) return team->end_call(status);
  return team;
}

HierarchicalTeam::HierarchicalTeam(int rank, std::vector<std::vector<int>> domains,
                                   HierarchyOptions options)
    : rank_(rank), domains_(std::move(domains)), options_(std::move(options)) {
  const auto sizes = domains_ | std::views::transform(std::ranges::size);
  const auto [least, most] = std::ranges::minmax(sizes);
  least_domain_ = static_cast<int>(least);
  slice_count_ = static_cast<int>(most);
  const size_t rank_count = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
  domain_of_.resize(rank_count);
  index_of_.resize(rank_count);
  for (int domain = 0; domain < domain_count(); ++domain) {
    for (int index = 0; member(domain, index) >= 0; ++index) {
      domain_of_[member(domain, index)] = domain;
      index_of_[member(domain, index)] = index;
    }
  }
  domain_ = domain_of(rank_);
  index_ = index_of(rank_);

  destinations_.resize(members().size());
  for (int slice = 0; slice < slice_count_; ++slice)
    for (int domain = 0; domain < domain_count(); ++domain)
      if (int destination = member(domain, slice); destination >= 0)
        destinations_[slice % local_count()].push_back(destination);
}

HierarchicalTeam::~HierarchicalTeam() {
  if (inner_ != nullptr) static_cast<void>(leave());
}

Status HierarchicalTeam::make_teams(const TeamFactory& make_inner, const TeamFactory& make_outer) {
  const std::string& name = options_.name;
  DSCOMM_ASSIGN_OR_RETURN(
      inner_, make_team(members(), index_, make_inner, format_text("{}/domain{}", name, domain_)));
  teams_.push_back(inner_.get());

  for (int slice = index_; slice < slice_count_; slice += local_count()) {
    std::vector<int> leaders;
    for (const std::vector<int>& domain : domains_)
      leaders.push_back(domain[slice % domain.size()]);
    DSCOMM_ASSIGN_OR_RETURN(auto across, make_team(leaders, domain_, make_outer,
                                                   format_text("{}/slice{}", name, slice)));
    teams_.push_back(across.get());
    led_.push_back({slice, std::move(across)});
  }
  std::vector<int> everyone(domain_of_.size());
  std::iota(everyone.begin(), everyone.end(), 0);
  DSCOMM_ASSIGN_OR_RETURN(direct_, make_team(everyone, rank_, make_outer, name + kDirect));
  teams_.push_back(direct_.get());
  set_parent(this);
  overlaps_ = outer().takes_chunks();
  tally_ = CallTally::make(options_.group, format_text("hierarchical, {} ranks", size()));
  return {};
}

void HierarchicalTeam::set_parent(const Team* parent) {
  for (Team* team : teams_) team->set_parent(parent);
}

std::string HierarchicalTeam::describe() const {
  const auto sizes = domains_ | std::views::transform(std::ranges::size);
  return format_text("hierarchical, {} ranks in domains of {}: inside ({}), across ({})", size(),
                     join_text(sizes, "+"), inner_->describe(), outer().describe());
}

int HierarchicalTeam::member(int domain, int index) const {
  const std::vector<int>& ranks = domains_[domain];
  return static_cast<size_t>(index) < ranks.size() ? ranks[index] : -1;
}

Result<std::byte*> HierarchicalTeam::staging(int which, size_t bytes) {
  Staging& buffer = staging_[which];
  if (buffer.bytes < bytes) {
    buffer.memory.reset(new (std::nothrow) std::byte[bytes]);
    buffer.bytes = buffer.memory == nullptr ? 0 : bytes;
    if (buffer.memory == nullptr)
      return make_status(Code::kResource,
                         "a rank got no {} bytes of memory; free memory on its host", bytes);
  }
  return buffer.memory.get();
}

Status HierarchicalTeam::end_call(const Status& status) {
  if (status.ok()) {
    finished_calls_.store(sequence_, std::memory_order_relaxed);  // orders nothing
    return status;
  }
  abort(first_difference(status));
  return cause_.get();
}

// A sub-call has shown a difference. But the first difference may be in an earlier call, which this
// rank finished without waiting for others. Waits up to kDifferenceWait for a report of that one.
Status HierarchicalTeam::first_difference(const Status& found) {
  if (!found.message().starts_with(kDifferentCalls) || !options_.compare_calls ||
      !cause_.get().ok())
    return found;
  options_.compare_calls(true);
  const Deadline limit = Deadline::after(kDifferenceWait);
  while (!limit.expired()) {
    if (Status heard = options_.received_notice(kAnyCall); !heard.ok()) return heard;
    limit.nap(kHearEveryNs);
  }
  return found;
}

void HierarchicalTeam::abort(const Status& cause) {
  Status first = cause_.keep(cause);
  if (options_.send_notice) options_.send_notice(first, finished_calls() + 1);
  for (Team* team : teams_) team->abort(first);
}

void HierarchicalTeam::note_end(const std::string& exception) {
  for (Team* team : teams_) team->note_end(exception);
}

Status HierarchicalTeam::failure() {
  DSCOMM_RETURN_IF_ERROR(cause_.get());
  Status first = options_.received_notice ? options_.received_notice(kAnyCall) : Status();
  for (Team* team : teams_)
    if (first.ok()) first = team->failure();
  if (first.ok()) return {};
  abort(first);
  return cause_.get();
}

Status HierarchicalTeam::death() {
  for (Team* team : teams_) DSCOMM_RETURN_IF_ERROR(team->death());
  return {};
}

Status HierarchicalTeam::failure_in(uint64_t call) {
  DSCOMM_RETURN_IF_ERROR(cause_.get());
  if (options_.received_notice) DSCOMM_RETURN_IF_ERROR(options_.received_notice(call));
  for (Team* team : teams_) DSCOMM_RETURN_IF_ERROR(team->failure_in(call));
  return {};
}

Status HierarchicalTeam::leave() {
  if (has_left_) return {};
  has_left_ = true;
  // If the Team has failed, this aborts its child Teams, so that they report nothing more.
  Status ended = failure();
  Status first;
  for (Team* team : teams_) {
    Status found = team->leave();
    // Abort the other Teams, too, so that members that are still in them get this error.
    if (first.ok() && !found.ok()) abort(first = found);
  }
  return ended.ok() ? first : Status();
}

Status HierarchicalTeam::begin_call(Call& call) {
  const CallOptions& options = *call.options;
  if (Status dead = failure_in(options.parent_call != nullptr ? options.parent_call->number()
                                                              : sequence_ + 1);
      !dead.ok())
    return end_call(dead);
  if (!call.out_counts.empty()) call.record.digest = hash_counts(call.out_counts);
  call_ = as_sub_call(call.record, options);
  call_.sequence = ++sequence_;
  if (options_.note_call)
    options_.note_call(call_, reads_everyone(static_cast<Collective>(call.record.kind),
                                             call.record.root == rank_));
  options.deadline.expired();  // starts the clock that all sub-calls share
  sub_call_options_ = options;
  sub_call_options_.parent_call = &call_;
  if (options.parent_call == nullptr) {
    sub_call_options_.history = history_;
    history_ = hash_call(history_, call_);
  }
  sub_call_options_.domains = nullptr;  // options.domains are the parent team's
  sub_call_options_.meanwhile = nullptr;
  if (sub_call_options_.parent == nullptr)
    sub_call_options_.parent = this;  // the outermost parent, which checks all child Teams
  call.options = &sub_call_options_;
  return {};
}

CallOptions HierarchicalTeam::later(const CallOptions& sub_call, int steps, const Chunks* chunks) {
  // A step is longer than a failure notice takes, and than the delay between the first and the last
  // rank that begin a call on a loaded machine. It is short compared with the timeout.
  const int64_t step_ns = std::min<int64_t>(250, sub_call.deadline.timeout_ms() / 12) * 1'000'000;
  CallOptions next = sub_call;
  next.deadline = sub_call.deadline.later(steps * step_ns);
  next.chunks = chunks;
  return next;
}

}  // namespace dscomm
