// All-reduces between simulated hosts: MpiTeam and HierarchicalTeam, as they are, over SimGrid's
// SMPI instead of Open MPI. Every rank is a simulated process; times are those of the simulated
// network, and computing takes none. Started by benchmarks/simulated/run.
//
//   all_reduce RANKS_OF_A_HOST BYTES...
//
// SMPI's own MPI_Iallreduce sends from every rank to every other. Open MPI's goes up and down a
// tree, so here it is MPI_Allreduce, for which SMPI has that algorithm; it blocks, which loses the
// overlap of rounds. Between the ranks of one host MpiTeam stands in for shared memory.

#include <mpi.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/detector/failure_detector.h"
#include "core/team/hierarchical_team.h"
#include "mpi/mpi_team.h"

namespace dscomm {
namespace {

// Nobody dies here.
class NoFailures final : public FailureDetector {
 public:
  uint64_t count() const override { return 0; }
  Status gone(int) const override { return {}; }
  Departure departure(int) const override { return {}; }
  void note_end(const std::string&) override {}
  Status cut_off(const std::vector<int>&, int64_t) const override { return {}; }
  Status ended(uint64_t, uint64_t) const override { return {}; }
  void end(uint64_t, const Status& cause, uint64_t) override {
    std::fprintf(stderr, "a Team has ended: %s\n", cause.message().c_str());
    std::abort();
  }
  void note_position(uint64_t, uint64_t) override {}
  void forget(uint64_t) override {}
  uint64_t ask(uint64_t, uint64_t) override { return 0; }
  std::vector<Progress> answers(uint64_t) const override { return {}; }
  void close_question(uint64_t) override {}
};

CallOptions without_limit() { return {Deadline::after(std::chrono::hours(100))}; }

class Simulation {
 public:
  explicit Simulation(int local_count) : local_count_(local_count) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }

  std::unique_ptr<Team> flat() {
    std::vector<int> everyone(static_cast<size_t>(size_));
    std::iota(everyone.begin(), everyone.end(), 0);
    return team_of(everyone, 0);
  }

  std::unique_ptr<Team> hierarchical() {
    std::vector<std::vector<int>> hosts(static_cast<size_t>(size_ / local_count_));
    for (int rank = 0; rank < size_; ++rank)
      hosts[static_cast<size_t>(rank / local_count_)].push_back(rank);
    // All ranks split at the same time: by host, and by local rank, whose slice it leads.
    auto inside = [this](std::span<const int> ranks, const std::string&) {
      return Result<std::unique_ptr<Team>>(team_of(ranks, rank_ / local_count_));
    };
    auto across = [this](std::span<const int> ranks, const std::string&) {
      return Result<std::unique_ptr<Team>>(team_of(ranks, rank_ % local_count_));
    };
    auto team = HierarchicalTeam::make(rank_, hosts, inside, across, {"simulated"});
    if (!team.ok()) std::abort();
    return std::move(team).value();
  }

  // Simulated seconds of one call, the slowest rank's. The second of two: the first sets up.
  double time(Team& team, size_t bytes) {
    std::vector<float> values(bytes / sizeof(float), 1.0F);
    double began = 0;
    for (int call = 0; call < 2; ++call) {
      MPI_Barrier(MPI_COMM_WORLD);
      began = MPI_Wtime();
      Status status =
          team.all_reduce(values.data(), values.data(), values.size(), {}, without_limit());
      if (!status.ok()) std::abort();
    }
    double took = MPI_Wtime() - began, slowest = 0;
    MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    const auto expected = static_cast<float>(size_) * static_cast<float>(size_);
    for (float value : values)
      if (value != expected) std::abort();
    return slowest;
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  // Called by all ranks of the world, those of one color together.
  std::unique_ptr<Team> team_of(std::span<const int> ranks, int color) {
    MpiTeamOptions options;
    options.id = ++teams_;
    options.name = "simulated";
    // A wait that naps would do so in the time of this machine.
    options.wait_policy.spin_polls = INT_MAX;
    for (int rank : ranks) options.members.push_back({rank, "rank " + std::to_string(rank)});
    MPI_Comm data, check;
    MPI_Comm_split(MPI_COMM_WORLD, color, rank_, &data);
    MPI_Comm_split(MPI_COMM_WORLD, color, rank_, &check);
    return std::make_unique<MpiTeam>(data, check, detector_, std::move(options));
  }

  const int local_count_;
  int rank_ = 0, size_ = 0;
  uint64_t teams_ = 0;
  NoFailures detector_;
};

}  // namespace
}  // namespace dscomm

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  {
    dscomm::Simulation simulation(std::atoi(argv[1]));
    std::unique_ptr<dscomm::Team> flat = simulation.flat();
    std::unique_ptr<dscomm::Team> hierarchical = simulation.hierarchical();
    for (int k = 2; k < argc; ++k) {
      const size_t bytes = std::strtoull(argv[k], nullptr, 10);
      const double flat_s = simulation.time(*flat, bytes);
      const double hierarchical_s = simulation.time(*hierarchical, bytes);
      if (simulation.rank() == 0)
        std::printf("%d %zu %.1f %.1f\n", simulation.size(), bytes, 1e6 * flat_s,
                    1e6 * hierarchical_s);
    }
  }
  MPI_Finalize();
}
