// Measures the smallest calls of the engine: small all-reduces, and the barrier. The ranks are
// threads, each with a Context.
//
//   mailbox_benchmark --benchmark_filter='all_reduce/.*'
//
// Times are wall-clock times. On a virtual machine they depend on the current placement of its
// cores, which one_host_probe measures.
#include <benchmark/benchmark.h>

#include <atomic>
#include <string>

#include "core/engine/context.h"
#include "core/engine/group.h"
#include "in_process.h"

namespace {

using namespace std::chrono_literals;
using dscomm::DType;
using dscomm::ReduceOp;

// The registry and store through which the ranks of a run meet; each run has new ones.
struct World {
  std::shared_ptr<dscomm::test::Registry> registry = std::make_shared<dscomm::test::Registry>();
  dscomm::test::MemoryStore store;
};
std::shared_ptr<World> world;

// One thread's rank: its own Context and group.
class Rank {
 public:
  explicit Rank(const benchmark::State& state) : world_(world) {
    dscomm::Settings settings;
    settings.arena_bytes = 32 << 20;
    auto context = dscomm::Context::create(
        settings, std::make_unique<dscomm::test::InProcessDirectory>(world_->registry));
    if (!context.ok()) {
      failure_ = context.status();
      return;
    }
    dscomm::GroupOptions options;
    options.name = "0";
    options.rank = state.thread_index();
    options.size = state.threads();
    options.timeout = 60s;
    // The store outlives the group: both are this object's.
    auto group = dscomm::Group::create(
        context.value(), std::shared_ptr<dscomm::Store>(world_, &world_->store), options);
    if (group.ok())
      group_ = group.value();
    else
      failure_ = group.status();
  }
  ~Rank() {
    if (group_ != nullptr) group_->shutdown_with_warning();
  }

  void run(benchmark::State& state, const dscomm::OperationInfo& info,
           const dscomm::Group::Body& body) {
    if (!failure_.ok()) state.SkipWithError(failure_.message().c_str());
    for (auto _ : state) {
      dscomm::Status status = group_->run(info, body, 0ms);
      if (!status.ok()) state.SkipWithError(status.message().c_str());
    }
  }

 private:
  std::shared_ptr<World> world_;
  dscomm::Status failure_;
  std::shared_ptr<dscomm::Group> group_;
};

void all_reduce(benchmark::State& state) {
  Rank rank(state);
  const auto bytes = static_cast<size_t>(state.range(0));
  std::vector<float> values(bytes / sizeof(float));  // zeros, whose sums are zeros
  const dscomm::Reduction sum{DType::kFloat32, ReduceOp::kSum};
  const dscomm::OperationInfo info{
      "all_reduce", sum.dtype, true, sum.op, static_cast<int64_t>(values.size()), -1, 0, false};
  rank.run(state, info, [&](dscomm::Team& team, const dscomm::CallOptions& options) {
    return team.all_reduce(values.data(), values.data(), values.size(), sum, options);
  });
}

void barrier(benchmark::State& state) {
  Rank rank(state);
  const dscomm::OperationInfo info{"barrier", DType::kUInt8, false, ReduceOp::kSum, 0, -1,
                                   0,         false};
  rank.run(state, info, [](dscomm::Team& team, const dscomm::CallOptions& options) {
    return team.barrier(options);
  });
}

void make_world(const benchmark::State&) { world = std::make_shared<World>(); }

BENCHMARK(all_reduce)
    ->ArgName("bytes")
    ->Arg(8)
    ->Arg(64)
    ->Arg(512)
    ->Arg(4096)
    ->Setup(make_world)
    ->Threads(2)
    ->UseRealTime();
BENCHMARK(barrier)->Setup(make_world)->Threads(2)->UseRealTime();

}  // namespace
