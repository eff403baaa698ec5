#include "core/store/store_exchange.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "core/base/packer.h"

namespace dscomm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstStepPause{1}, kLongestStepPause{50};
// How often a waiting rank asks the store whether another has failed.
constexpr int64_t kCheckFailureNs = 100'000'000;
// If kRanksAtFullPace ranks wait for one rank, the store gets thirty thousand requests a second. In
// larger groups each rank asks less often: its pauses are up to kSlowestPace times as long.
constexpr int kRanksAtFullPace = 1024, kSlowestPace = 8;
// All deadlines pass together, but only rank 0 knows the missing ranks: the others wait this much
// longer for rank 0 to name them.
constexpr int64_t kLastStepWordNs = 1'000'000'000;
// How long a rank may take from the claim of a failure to its publication.
constexpr int64_t kFailurePublishNs = 1'000'000'000;

const std::string kFailed = "failed", kRead = "read";

std::string entry_of(const std::string& step, int rank) {
  return step + "/" + std::to_string(rank);
}

// The counter that settles the step. The first rank to increment it wins: rank 0 with its decision,
// or any rank with a failure.
std::string claim_of(int step) { return "claims/" + std::to_string(step); }

}  // namespace

StoreExchange::StoreExchange(Store& store, ExchangeRequest request, const Deadline& deadline)
    : store_(store),
      request_(std::move(request)),
      deadline_(deadline),
      pause_factor_(std::clamp(request_.size / kRanksAtFullPace, 1, kSlowestPace)) {}

Result<std::string> StoreExchange::agree(const std::string& step, std::string_view own,
                                         const Decide& decide) {
  const std::string decided = step + "/decided";
  if (request_.rank != 0) {
    DSCOMM_RETURN_IF_ERROR(publish(entry_of(step, request_.rank), own));
    awaited_ = 0;
    Result<std::string> decision = await(decided, deadline_.later(kLastStepWordNs));
    awaited_ = -1;
    if (!decision.ok() && decision.status().code() == Code::kTimeout && !has_read_failure_) {
      const std::string others = missing(step);
      decision = fail_or_read(
          decided,
          timed_out(others.empty() ? request_.name(0) + ", which does not answer" : others));
    }
    decided_ = decided;
    if (!decision.ok()) return decision;
    remove(entry_of(step, request_.rank));  // rank 0 has read it
    ++step_;
    return decision;
  }
  DSCOMM_ASSIGN_OR_RETURN(std::vector<std::string> said, gather(step, own));
  Result<std::string> decision = decide(said);
  if (!decision.ok()) return fail(decision.status());
  // A rank that waits for this decision may have learned of a death and have failed the step.
  DSCOMM_ASSIGN_OR_RETURN(int64_t claims, store_.add(key(claim_of(step_)), 1));
  if (claims > 1)
    return fail(Status(Code::kInternal,
                       "a rank failed without a reason; see the output of the other ranks"));
  DSCOMM_RETURN_IF_ERROR(publish(decided, decision.value()));
  if (!decided_.empty()) {  // all are in this step, so they have read the last decision
    remove(decided_);
    remove(claim_of(step_ - 1));
  }
  decided_ = decided;
  ++step_;
  return decision;
}

Result<std::vector<std::string>> StoreExchange::gather(const std::string& step,
                                                       std::string_view own) {
  std::vector<std::string> keys, said{std::string(own)};
  for (int rank = 1; rank < request_.size; ++rank) keys.push_back(key(entry_of(step, rank)));
  if (keys.empty()) return said;
  awaited_ = 1;
  find_again_ns_ = monotonic_ns() + kCheckFailureNs;
  const auto find_all = [&]() -> Result<std::optional<std::string>> {
    DSCOMM_ASSIGN_OR_RETURN(std::optional<std::vector<std::string>> found, store_.find_all(keys));
    if (!found) {
      find_awaited(keys);
      return std::optional<std::string>();
    }
    for (std::string& entry : *found) said.push_back(std::move(entry));
    return std::optional<std::string>("");
  };
  Result<std::string> all = await("", find_all, deadline_);
  awaited_ = -1;
  if (!all.ok() && all.status().code() == Code::kTimeout && !has_read_failure_)
    return fail(timed_out(missing(step)));
  if (!all.ok()) return all.status();
  return said;
}

// Finds the first missing rank now and then, for callers of awaited().
void StoreExchange::find_awaited(const std::vector<std::string>& keys) {
  if (monotonic_ns() < find_again_ns_) return;
  find_again_ns_ = monotonic_ns() + kCheckFailureNs;
  size_t low = 0,
         high = keys.size() - 1;  // the keys before `low` exist; one up to `high` is missing
  while (low < high) {
    const size_t middle = (low + high) / 2;
    const auto first = keys.begin() + static_cast<ptrdiff_t>(low);
    Result<bool> are_there =
        store_.has_all({first, keys.begin() + static_cast<ptrdiff_t>(middle) + 1});
    if (!are_there.ok()) return;
    (are_there.value() ? low : high) = are_there.value() ? middle + 1 : middle;
  }
  awaited_ = static_cast<int>(low) + 1;
}

Status StoreExchange::timed_out(const std::string& waiting_for) const {
  return Status(Code::kTimeout, "timed out after " + deadline_.timeout_text() + " waiting for " +
                                    waiting_for + request_.timeout_hint());
}

// "rank 2, rank 5": the ranks that have published nothing in this step.
std::string StoreExchange::missing(const std::string& step) {
  std::string names;
  for (int rank = 1; rank < request_.size; ++rank) {
    Result<bool> there = store_.has(key(entry_of(step, rank)));
    if (there.ok() && there.value()) continue;
    names += (names.empty() ? "" : ", ") + request_.name(rank);
  }
  return names;
}

Status StoreExchange::publish(const std::string& name, std::string_view value) {
  return store_.set(key(name), value);
}

// If the store cannot remove keys, some bytes stay there.
void StoreExchange::remove(const std::string& name) { static_cast<void>(store_.remove(key(name))); }

Result<std::string> StoreExchange::await(const std::string& name, const Deadline& deadline) {
  return await(name, [&] { return find(name); }, deadline);
}

Result<std::string> StoreExchange::await(const std::string& name, const Find& find,
                                         const Deadline& deadline) {
  TimeLeft time_left(deadline);
  for (auto pause = kFirstStepPause;;
       pause = std::min(pause * 2, kLongestStepPause * pause_factor_)) {
    const bool is_over = time_left.is_over();  // if so, the store is asked once more
    DSCOMM_ASSIGN_OR_RETURN(std::optional<std::string> found, find());
    if (found) return std::move(*found);
    if (Status reason = check(); !reason.ok())
      return has_read_failure_ ? Result<std::string>(reason) : fail_or_read(name, reason);
    if (is_restarted_) return failure();
    if (is_over)
      return Status(Code::kTimeout, "timed out waiting for '" + key(name) + "' in the store");
    deadline.nap(pause);
  }
}

Status StoreExchange::check() {
  const Status reason = request_.check();
  if (reason.ok() && monotonic_ns() < check_again_ns_) return {};
  check_again_ns_ = monotonic_ns() + kCheckFailureNs * pause_factor_;
  // The caller was asked before the store: if a rank is dead, it writes no more, so this read sees
  // the failure that the rank may have published before it died.
  DSCOMM_RETURN_IF_ERROR(failure());
  return reason;
}

Status StoreExchange::failure() {
  DSCOMM_ASSIGN_OR_RETURN(std::optional<std::string> found, find(kFailed));
  if (!found) return {};
  Unpacker unpacker(*found);
  Status status;
  if (!unpacker.status(status).whole()) return malformed_value("failure of another rank");
  has_read_failure_ = true;
  is_restarted_ = status.ok();
  return is_restarted_ ? Status(Code::kAborted, "the exchange was called off") : status;
}

Status StoreExchange::fail(const Status& cause) { return fail_or_read("", cause).status(); }

// fail() of a rank that waits for `name`. Returns the value of `name` if that came first.
Result<std::string> StoreExchange::fail_or_read(const std::string& name, const Status& cause) {
  while (true) {
    // If the store fails, too, the deadlines of the other ranks end their waits.
    Status first = failure();
    if (has_read_failure_) return first;
    if (cause.code() != Code::kTimeout || request_.rank == 0 || !first.ok() ||
        deadline_.remaining_ns() <= -kLastStepWordNs)
      break;
    std::this_thread::sleep_for(kLongestStepPause);
  }
  const auto value = [&]() -> std::optional<std::string> {
    if (name.empty()) return {};
    Result<std::optional<std::string>> found = find(name);
    return found.ok() ? std::move(found).value() : std::nullopt;
  };
  if (std::optional<std::string> found = value()) return std::move(*found);
  const Result<int64_t> claims = store_.add(key(claim_of(step_)), 1);
  const bool is_first = !claims.ok() || claims.value() == 1;
  for (const int64_t since_ns = monotonic_ns();
       !is_first && monotonic_ns() - since_ns < kFailurePublishNs;) {
    if (std::optional<std::string> found = value()) return std::move(*found);
    if (Status first = failure(); has_read_failure_) return first;
    std::this_thread::sleep_for(kFirstStepPause);
  }
  publish_failure(cause);
  return cause;
}

// If the store is lost, the deadlines of the other ranks end their waits.
void StoreExchange::publish_failure(const Status& cause) {
  static_cast<void>(publish(kFailed, Packer().status(cause).take()));
}

void StoreExchange::restart_all() {
  Result<int64_t> claims = store_.add(key(claim_of(step_)), 1);
  if (!claims.ok() || claims.value() > 1) return;  // a rank has failed, and publishes why
  publish_failure(Status());
  static_cast<void>(failure());
}

void StoreExchange::finish() {
  Result<int64_t> readers = store_.add(key(kRead), 1);
  if (!readers.ok() || readers.value() != request_.size) return;
  if (!decided_.empty()) {
    remove(decided_);
    remove(claim_of(step_ - 1));
  }
  remove(kRead);
}

}  // namespace dscomm
