#include "mpi/meet.h"

#include <algorithm>
#include <memory>

#include "mpi/abandonable.h"
#include "mpi/call_watch.h"
#include "mpi/guarded.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_wait.h"

namespace dscomm {
namespace {

constexpr MpiWaitPolicy kMeetingPolicy{.spin_polls = 0};

class MeetingMonitor final : public MpiWaitMonitor {
 public:
  MeetingMonitor(const GiveUpCheck& ends, const Deadline& deadline)
      : ends_(ends), deadline_(deadline) {}

  void expect(std::string name) { name_ = std::move(name); }
  Status check(int64_t) override { return ends_(); }
  Status timed_out() override {
    return make_status(Code::kTimeout, "timed out after {} waiting for {}",
                       deadline_.timeout_text(), name_);
  }

 private:
  const GiveUpCheck& ends_;
  const Deadline& deadline_;
  std::string name_;
};

struct Posted {
  int code = MPI_SUCCESS;
  std::vector<MPI_Request> requests;
};

// Posts an empty message to and from each other rank.
void post_to_all(MPI_Comm comm, int tag, Posted* posted) {
  int rank = 0, size = 0;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  posted->requests.assign(2 * static_cast<size_t>(size - 1), MPI_REQUEST_NULL);
  MPI_Request* request = posted->requests.data();
  posted->code = guarded_blocking([&] {
    int code = MPI_SUCCESS;
    for (int distance = 1; distance < size && code == MPI_SUCCESS; ++distance)
      code = MPI_Irecv(nullptr, 0, MPI_BYTE, (rank + size - distance) % size, tag, comm, request++);
    for (int distance = 1; distance < size && code == MPI_SUCCESS; ++distance)
      code = MPI_Isend(nullptr, 0, MPI_BYTE, (rank + distance) % size, tag, comm, request++);
    return code;
  });
}

}  // namespace

Status connect_all(MPI_Comm comm, int tag, const Deadline& deadline, const GiveUpCheck& check) {
  auto posted = std::make_shared<Posted>();
  DSCOMM_RETURN_IF_ERROR(run_abandonable(
      "connecting to the other ranks",
      [posted, comm, tag] { post_to_all(comm, tag, posted.get()); }, deadline, check));
  if (posted->code != MPI_SUCCESS)
    return reason_or(mpi_error("a message of MPI", posted->code), deadline, check);
  MeetingMonitor monitor(check, deadline);
  monitor.expect("a rank that has not connected");
  return wait_for(&posted->requests, kMeetingPolicy, deadline, monitor);
}

Status meet(MPI_Comm comm, const std::vector<int>& ranks, int tag, const Deadline& deadline,
            const GiveUpCheck& check, const std::function<std::string(size_t index)>& name) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  const auto own = static_cast<size_t>(std::ranges::find(ranks, rank) - ranks.begin());
  DSCOMM_CHECK(own < ranks.size(), "this rank is not one of those that meet");
  const guard::CallDeadline calls_end(deadline);
  MeetingMonitor monitor(check, deadline);
  for (size_t distance = 1; distance < ranks.size(); distance *= 2) {
    const size_t before = (own + ranks.size() - distance) % ranks.size();
    const int source = ranks[before], target = ranks[(own + distance) % ranks.size()];
    std::vector<MPI_Request> requests(2, MPI_REQUEST_NULL);
    const int code = guarded([&] {
      const int begun = MPI_Irecv(nullptr, 0, MPI_BYTE, source, tag, comm, &requests[0]);
      return begun != MPI_SUCCESS
                 ? begun
                 : MPI_Isend(nullptr, 0, MPI_BYTE, target, tag, comm, &requests[1]);
    });
    if (code != MPI_SUCCESS) return reason_or(mpi_error("a message of MPI", code), deadline, check);
    monitor.expect(name(before) + ", which may be stopped, or wait for another rank");
    const Status status = wait_for(&requests, kMeetingPolicy, deadline, monitor);
    if (status.ok()) continue;
    // Cancel the receive, because a later meeting with this tag posts a new one.
    if (!requests.empty() && requests[0] != MPI_REQUEST_NULL)
      (void)guarded([&] { return MPI_Cancel(&requests[0]); });
    return status;
  }
  return {};
}

int create_communicator(MPI_Comm comm, const std::vector<int>& ranks, int tag, MPI_Comm* made) {
  MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  int code = MPI_Comm_group(comm, &all);
  if (code == MPI_SUCCESS)
    code = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members);
  if (code == MPI_SUCCESS)
    code = guarded_blocking([&] { return MPI_Comm_create_group(comm, members, tag, made); });
  if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(*made, MPI_ERRORS_RETURN);
  if (members != MPI_GROUP_NULL) MPI_Group_free(&members);
  if (all != MPI_GROUP_NULL) MPI_Group_free(&all);
  return code;
}

}  // namespace dscomm
