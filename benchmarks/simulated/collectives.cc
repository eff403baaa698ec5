// Collectives between simulated hosts: MpiTeam and HierarchicalTeam, as they are, over SimGrid's
// SMPI, beside MPI's own. Every rank is a simulated process; times are those of the simulated
// network, and computing takes none. Started by benchmarks/simulated/run.
//
//   collectives RANKS_OF_A_HOST COLLECTIVE CHECKED BYTES...
//
// COLLECTIVE is all_reduce, reduce_scatter or all_gather. BYTES is the size of the tensor or, in
// the last two, of the data of all ranks together: float32, with SUM. CHECKED is 1: results are
// checked; or 0: all ranks, which are threads of one process, use the same buffers, so that many
// hosts fit into memory. Inside a host an MpiTeam is used instead of shared memory.
//
// Prints lines: ranks, bytes, and the us of MPI, MpiTeam and HierarchicalTeam. With one rank on
// each host there is no HierarchicalTeam, and MpiTeam's time is repeated.

#include <mpi.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <functional>
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
  Status death_if_cut_off(const std::vector<int>&, int64_t) const override { return {}; }
  Status ended(uint64_t, uint64_t) const override { return {}; }
  void end(uint64_t, const Status& cause, uint64_t) override {
    std::fprintf(stderr, "a Team has ended: %s\n", cause.message().c_str());
    std::abort();
  }
  void note_position(uint64_t, uint64_t) override {}
  void forget(uint64_t) override {}
  uint64_t ask(uint64_t, uint64_t) override { return 0; }
  std::vector<Answer> answers(uint64_t) const override { return {}; }
  void close_question(uint64_t) override {}
  void note_call(uint64_t, const CallRecord&, const CallerName&) override {}
  void compare_calls(uint64_t, bool) override {}
};

CallOptions without_limit() { return {Deadline::after(std::chrono::hours(100))}; }

bool has_parts(const std::string& name) { return name != "all_reduce"; }

float value(size_t element, size_t rank) { return static_cast<float>((element + rank) % 5); }

// The buffers of a rank's calls, each of about `elements` elements.
struct Buffers {
  Buffers(size_t ranks, size_t rank, size_t elements, bool has_parts, bool is_checked)
      : part_count(std::max<size_t>(elements / ranks, 1)),
        count(has_parts ? part_count * ranks : std::max<size_t>(elements, 1)),
        is_checked(is_checked),
        counts(ranks, part_count) {
    static std::vector<float> shared;
    std::vector<float>& memory = is_checked ? own : shared;
    if (memory.size() != 2 * count) memory.assign(2 * count, 0);
    given = memory.data();
    all = given + count;
    const size_t part = part_count;
    if (is_checked)
      for (size_t i = 0; i < count; ++i) given[i] = value(i, rank);
    if (!has_parts) return;
    for (size_t k = 0; k < counts.size(); ++k) {
      ins.push_back(given + k * part);
      outs.push_back(all + k * part);
    }
  }

  size_t part_count, count;
  bool is_checked;
  std::vector<float> own;
  float *given, *all;
  std::vector<const void*> ins;
  std::vector<void*> outs;
  std::vector<size_t> counts;
};

class Simulation {
 public:
  explicit Simulation(int local_count) : local_count_(local_count) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }

  std::unique_ptr<Team> flat() {
    std::vector<int> everyone(static_cast<size_t>(size_));
    std::iota(everyone.begin(), everyone.end(), 0);
    return team_of(everyone, 0, local_count_ > 1);
  }

  std::unique_ptr<Team> hierarchical() {
    std::vector<std::vector<int>> hosts(static_cast<size_t>(size_ / local_count_));
    for (int rank = 0; rank < size_; ++rank)
      hosts[static_cast<size_t>(rank / local_count_)].push_back(rank);
    // MPI_Comm_split() needs all ranks: each passes its host, its local rank (for slices), or 0.
    auto inside = [this](std::span<const int> ranks, const std::string&) {
      return Result<std::unique_ptr<Team>>(team_of(ranks, rank_ / local_count_));
    };
    auto across = [this](std::span<const int> ranks, const std::string&) {
      const bool is_direct = ranks.size() == static_cast<size_t>(size_);
      return Result<std::unique_ptr<Team>>(team_of(ranks, is_direct ? 0 : rank_ % local_count_));
    };
    auto team = HierarchicalTeam::make(rank_, hosts, inside, across, {"simulated"});
    if (!team.ok()) std::abort();
    return std::move(team).value();
  }

  // Simulated us of a call on the slowest rank. Times the second call, as the first one sets up.
  double time(const std::function<void()>& call) {
    double began = 0;
    for (int round = 0; round < 2; ++round) {
      MPI_Barrier(MPI_COMM_WORLD);
      began = MPI_Wtime();
      call();
    }
    double took = MPI_Wtime() - began, slowest = 0;
    MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return 1e6 * slowest;
  }

  double time(Team& team, const std::string& name, Buffers& b) {
    if (b.is_checked) std::fill(b.all, b.all + b.count, -1.0F);
    const double us = time([&] { check(call(team, name, b)); });
    if (b.is_checked) verify(name, b);
    return us;
  }

  // MPI's own, blocking.
  double time_mpi(const std::string& name, Buffers& b) {
    const auto whole = static_cast<int>(b.count), part = static_cast<int>(b.part_count);
    const float* given = b.given;
    float* out = b.all;
    return time([&] {
      if (name == "all_reduce")
        MPI_Allreduce(given, out, whole, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      else if (name == "reduce_scatter")
        MPI_Reduce_scatter_block(given, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      else
        MPI_Allgather(given, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
    });
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  static void check(const Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::abort();
  }

  Status call(Team& team, const std::string& name, Buffers& b) {
    const CallOptions options = without_limit();
    const Reduction sum{};
    if (name == "all_reduce") return team.all_reduce(b.given, b.all, b.count, sum, options);
    if (name == "reduce_scatter") return team.reduce_scatter(b.ins, b.counts, b.all, sum, options);
    return team.all_gather(b.given, b.part_count, sum.dtype, b.outs, b.counts, options);
  }

  void verify(const std::string& name, const Buffers& b) const {
    const auto ranks = static_cast<size_t>(size_), part = b.part_count;
    float sums[5] = {};  // of the elements with this remainder
    for (size_t i = 0; i < 5; ++i)
      for (size_t rank = 0; rank < ranks; ++rank) sums[i] += value(i, rank);
    const size_t first = name == "reduce_scatter" ? part * static_cast<size_t>(rank_) : 0;
    const size_t count = name == "reduce_scatter" ? part : b.count;
    for (size_t i = 0; i < count; ++i) {
      const float expected =
          name == "all_gather" ? value(i % part, i / part) : sums[(first + i) % 5];
      if (b.all[i] == expected) continue;
      std::fprintf(stderr, "%s: element %zu of rank %d is %f\n", name.c_str(), i, rank_, b.all[i]);
      std::abort();
    }
  }

  // Called by all ranks of the world; those of one color form a Team.
  std::unique_ptr<Team> team_of(std::span<const int> ranks, int color, bool shares_hosts = false) {
    MpiTeamOptions options;
    options.shares_hosts = shares_hosts;
    options.id = ++teams_;
    options.name = "simulated";
    // Never naps: a nap would take real time of this machine.
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
    const int local_count = std::atoi(argv[1]);
    const std::string name = argv[2];
    const bool is_checked = std::atoi(argv[3]) != 0;
    dscomm::Simulation simulation(local_count);
    std::unique_ptr<dscomm::Team> flat = simulation.flat();
    std::unique_ptr<dscomm::Team> hierarchical =
        local_count > 1 ? simulation.hierarchical() : nullptr;
    for (int k = 4; k < argc; ++k) {
      const size_t bytes = std::strtoull(argv[k], nullptr, 10);
      const auto ranks = static_cast<size_t>(simulation.size());
      dscomm::Buffers buffers(ranks, static_cast<size_t>(simulation.rank()), bytes / sizeof(float),
                              dscomm::has_parts(name), is_checked);
      const double mpi = simulation.time_mpi(name, buffers);
      const double of_flat = simulation.time(*flat, name, buffers);
      const double of_both =
          hierarchical == nullptr ? of_flat : simulation.time(*hierarchical, name, buffers);
      if (simulation.rank() == 0) {
        std::printf("%zu %zu %.1f %.1f %.1f\n", ranks, buffers.count * sizeof(float), mpi, of_flat,
                    of_both);
        std::fflush(stdout);
      }
    }
  }
  MPI_Finalize();
}
