// Runs a program: a Context and a thread for each rank, and the checks of each rank's results.
#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

#include "code_name.h"
#include "in_process_host.h"
#include "machine.h"
#include "program.h"
#include "runtime.h"

namespace dscomm::schedule {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTimeout{20'000};
// No call may take longer than this: its timeout, the extra time of composed calls, and formation's
// grace.
constexpr int64_t kMostNs = 30'000'000'000;
// The same if sleeps last until a wake-up, as they do without a fault. (A rank that misses its
// wake-up checks again at its timeout, and may then go on.)
constexpr int64_t kMostAsleepNs = 15'000'000'000;

Settings settings_of(const Program& program) {
  Settings settings = test::small_settings();
  settings.in_place_bytes = 0;
  // Without a ring of pieces for messages, or with the shortest one.
  settings.channel_bytes = program.moment % 2 == 0 ? 8192 : 17 * 8192;
  settings.spin_pauses = 5;
  settings.yield_us = 5;
  settings.sleep_slice_ms = program.slice_ms;
  settings.worker_idle_ms = 100;
  // Declared, because reading this host's topology takes longer than a whole program.
  settings.topology = program.composed ? "numa:2 core:1 pu:1" : "numa:1 core:2 pu:1";
  return settings;
}

// Rank `rank`'s input to a step: value `index` of the block for `block`.
int64_t value_of(int step, int rank, int block, int index) {
  return 1 + step * 1'000'003 + rank * 10'007 + block * 503 + index * 7;
}

// State that the ranks of a world share, outside of dscomm.
struct World {
  explicit World(const Program& of)
      : program(of),
        progress(static_cast<size_t>(of.ranks)),
        ranks_left(static_cast<size_t>(of.ranks)) {
    for (int rank = 0; rank < of.ranks; ++rank)
      ++ranks_left[static_cast<size_t>(of.process_of(rank))];
  }

  const Program& program;
  test::InProcessHost host;
  struct Progress {
    bool is_done = false;
    bool failed = false;
    bool asked_anyone = false;  // in a receive from any source
    bool forms = false;         // it forms a group, or timed out doing so
    int made = 0;               // number of groups
  };
  std::vector<Progress> progress;
  std::vector<int> ranks_left;  // by process
  int skipped_call = -1;        // number of the skipped step; -1: none
};

class Rank {
 public:
  Rank(World& world, int rank, std::shared_ptr<Context> context)
      : world_(world),
        program_(world.program),
        rank_(rank),
        context_(std::move(context)),
        groups_(program_.groups.size()),
        times_made_(program_.groups.size()) {}

  void run() {
    const bool is_culprit = rank_ == program_.culprit;
    if (is_culprit && program_.fault == Fault::kDies) kill_after(rank_, program_.moment % 4000);
    const auto fault_step = static_cast<int>(program_.moment % program_.steps.size());
    for (int number = 0; number < static_cast<int>(program_.steps.size()); ++number) {
      Step step = program_.steps[static_cast<size_t>(number)];
      if (number == fault_step && rank_ == program_.culprit) {
        if (program_.fault == Fault::kLosesTime) lose_time(3 * kMostNs);
        if (step.kind < Kind::kBarrier && is_member(step.group)) {
          if (program_.fault == Fault::kSkips) {
            world_.skipped_call = number;
            continue;
          }
          if (program_.fault == Fault::kOtherRoot) step.root = step.peer;
        }
      }
      if (is_member(step.group)) make_step(number, step);
      if (stopped_) break;
    }
    finish_queued();
    world_.progress[static_cast<size_t>(rank_)].is_done = true;
    if (is_culprit && program_.fault == Fault::kDiesAtTheEnd) exit();
    if (is_culprit && program_.fault == Fault::kAborts && groups_[0] != nullptr)
      groups_[0]->abort("the program says so");
    for (auto& group : groups_) close(group);
    if (program_.exits && --world_.ranks_left[static_cast<size_t>(program_.process_of(rank_))] == 0)
      exit();
  }

 private:
  // Ends the process; its memory stays unchanged.
  [[noreturn]] void exit() {
    kill(program_.process_of(rank_));
    while (true) std::this_thread::sleep_for(milliseconds(1));  // until kill() takes effect
  }

  const std::vector<int>& members(int group) const {
    return program_.groups[static_cast<size_t>(group)];
  }
  bool is_member(int group) const { return position(group, rank_) >= 0; }
  int position(int group, int rank) const {
    const std::vector<int>& all = members(group);
    for (size_t k = 0; k < all.size(); ++k)
      if (all[k] == rank) return static_cast<int>(k);
    return -1;
  }

  void make_step(int number, const Step& step) {
    std::shared_ptr<Group>& group = groups_[static_cast<size_t>(step.group)];
    if (step.kind == Kind::kSleep) {
      // Shorter than the second that a call keeps after its time was lost.
      if (step.root == rank_) std::this_thread::sleep_for(milliseconds(step.count % 500));
      return;
    }
    if (step.kind == Kind::kMake) {
      make(number, step.group);
      return;
    }
    if (group == nullptr) return;
    if (step.kind == Kind::kDestroy) {
      finish_queued();
      close(group);
      return;
    }
    if (step.kind == Kind::kMessage)
      message(number, step, *group);
    else
      collective(number, step, *group);
  }

  void make(int number, int group) {
    const std::string name = std::to_string(group);
    GroupOptions options = test::InProcessHost::options(
        position(group, rank_), static_cast<int>(members(group).size()), name, kTimeout);
    options.global_ranks = members(group);
    const int generation = times_made_[static_cast<size_t>(group)]++;
    World::Progress& progress = world_.progress[static_cast<size_t>(rank_)];
    progress.forms = true;
    const int64_t began = now_ns();
    Result<std::shared_ptr<Group>> made = world_.host.try_group(
        context_, std::move(options), name + "." + std::to_string(generation) + "/");
    progress.forms = made.status().code() == Code::kTimeout;
    look_at(number, made.status(), began);
    if (!made.ok()) return;
    ++progress.made;
    groups_[static_cast<size_t>(group)] = std::move(made).value();
  }

  void close(std::shared_ptr<Group>& group) {
    if (group == nullptr) return;
    look_at(-1, group->shutdown(), now_ns());
    group.reset();
  }

  // Memory for int64 values, from the heap or the pool. After a failed call pool memory is not
  // freed: a peer may still be reading it in place (and discards the data), which would count as a
  // race with another rank of this process that reuses the memory.
  std::shared_ptr<int64_t> memory(size_t count, bool pooled) {
    if (pooled && context_->pool() != nullptr) {
      Result<std::byte*> block = context_->pool()->allocate(std::max<size_t>(count, 1) * 8);
      if (block.ok())
        return {reinterpret_cast<int64_t*>(block.value()),
                [pool = context_->pool(),
                 &progress = world_.progress[static_cast<size_t>(rank_)]](int64_t* values) {
                  if (!progress.failed) pool->release(reinterpret_cast<std::byte*>(values));
                }};
    }
    return {new int64_t[std::max<size_t>(count, 1)], [](int64_t* values) { delete[] values; }};
  }

  // One call's memory: input and output blocks.
  struct Call {
    std::shared_ptr<int64_t> in, out;
    size_t in_count = 0, out_count = 0;
    std::vector<const void*> ins;
    std::vector<void*> outs;
    std::vector<size_t> counts;
  };

  void collective(int number, const Step& step, Group& group) {
    const auto size = members(step.group).size();
    const auto count = static_cast<size_t>(step.count);
    const int me = position(step.group, rank_), root = position(step.group, step.root);
    auto call = std::make_shared<Call>();
    const bool many_in = step.kind == Kind::kReduceScatter || step.kind == Kind::kScatter ||
                         step.kind == Kind::kAllToAll;
    const bool many_out =
        step.kind == Kind::kAllGather || step.kind == Kind::kGather || step.kind == Kind::kAllToAll;
    call->in_count = count * (many_in ? size : 1);
    call->out_count = count * (many_out ? size : 1);
    call->in = memory(call->in_count, step.pooled);
    call->out = memory(call->out_count, step.pooled);
    for (size_t k = 0; k < call->in_count; ++k)
      call->in.get()[k] = value_of(number, rank_, static_cast<int>(k / std::max<size_t>(count, 1)),
                                   static_cast<int>(k % std::max<size_t>(count, 1)));
    for (size_t k = 0; k < call->out_count; ++k) call->out.get()[k] = -1;
    if (step.kind == Kind::kBroadcast && me == root)
      for (size_t k = 0; k < count; ++k) call->out.get()[k] = call->in.get()[k];
    for (size_t k = 0; k < size; ++k) {
      if (many_in) call->ins.push_back(call->in.get() + k * count);
      if (many_out) call->outs.push_back(call->out.get() + k * count);
      call->counts.push_back(count);
    }
    const Kind kind = step.kind;
    auto body = [call, kind, count, me, root](Team& team, const CallOptions& options) -> Status {
      const Reduction sum{DType::kInt64, ReduceOp::kSum};
      const bool is_root = me == root;
      std::vector<void*> no_outs;
      std::vector<const void*> no_ins;
      std::vector<size_t> no_counts;
      switch (kind) {
        case Kind::kAllReduce:
          return team.all_reduce(call->in.get(), call->out.get(), count, sum, options);
        case Kind::kBroadcast:
          return team.broadcast(call->out.get(), count, DType::kInt64, root, options);
        case Kind::kReduce:
          return team.reduce(call->in.get(), is_root ? call->out.get() : nullptr, count, sum, root,
                             options);
        case Kind::kAllGather:
          return team.all_gather(call->in.get(), count, DType::kInt64, call->outs, call->counts,
                                 options);
        case Kind::kReduceScatter:
          return team.reduce_scatter(call->ins, call->counts, call->out.get(), sum, options);
        case Kind::kGather:
          return team.gather(call->in.get(), count, DType::kInt64, is_root ? call->outs : no_outs,
                             is_root ? call->counts : no_counts, root, options);
        case Kind::kScatter:
          return team.scatter(is_root ? call->ins : no_ins, is_root ? call->counts : no_counts,
                              call->out.get(), count, DType::kInt64, root, options);
        case Kind::kAllToAll:
          return team.all_to_all(call->ins, call->counts, call->outs, call->counts, DType::kInt64,
                                 options);
        default:
          return team.barrier(options);
      }
    };
    const OperationInfo info{
        "call", DType::kInt64, false, ReduceOp::kSum, static_cast<int64_t>(count), root, 0, false};
    if (step.queued) {
      pending_.push_back({group.start(info, body, milliseconds(0)), number, step, call});
      return;
    }
    const int64_t began = now_ns();
    Status status = group.run(info, body, milliseconds(0));
    if (look_at(number, status, began)) check(number, step, *call);
  }

  void check(int number, const Step& step, const Call& call) {
    // A call that was skipped among similar ones only changes the count, checked at the end.
    if (program_.fault == Fault::kSkips) return;
    const std::vector<int>& all = members(step.group);
    const int count = step.count, me = position(step.group, rank_);
    const bool is_root = rank_ == step.root;
    const auto sum = [&](int block, int index) {
      int64_t total = 0;
      for (int rank : all) total += value_of(number, rank, block, index);
      return total;
    };
    for (int k = 0; k < static_cast<int>(call.out_count); ++k) {
      const int block = count == 0 ? 0 : k / count, index = count == 0 ? 0 : k % count;
      int64_t expected = -1;
      switch (step.kind) {
        case Kind::kAllReduce:
          expected = sum(0, index);
          break;
        case Kind::kBroadcast:
          expected = value_of(number, step.root, 0, index);
          break;
        case Kind::kReduce:
          if (is_root) expected = sum(0, index);
          break;
        case Kind::kAllGather:
          expected = value_of(number, all[static_cast<size_t>(block)], 0, index);
          break;
        case Kind::kReduceScatter:
          expected = sum(me, index);
          break;
        case Kind::kGather:
          if (is_root) expected = value_of(number, all[static_cast<size_t>(block)], 0, index);
          break;
        case Kind::kScatter:
          expected = value_of(number, step.root, me, index);
          break;
        case Kind::kAllToAll:
          expected = value_of(number, all[static_cast<size_t>(block)], me, index);
          break;
        default:
          break;
      }
      if (call.out.get()[k] != expected)
        wrong(number, "value " + std::to_string(k) + " is " + std::to_string(call.out.get()[k]) +
                          ", not " + std::to_string(expected));
    }
  }

  void message(int number, const Step& step, Group& group) {
    if (rank_ != step.root && rank_ != step.peer) return;
    const auto count = static_cast<size_t>(step.count);
    auto call = std::make_shared<Call>();
    call->out_count = count;
    call->out = memory(count, step.pooled);
    const int from = position(step.group, step.root), to = position(step.group, step.peer);
    const bool sends = rank_ == step.root;
    if (!sends && step.any_source) world_.progress[static_cast<size_t>(rank_)].asked_anyone = true;
    for (size_t k = 0; k < count; ++k)
      call->out.get()[k] = sends ? value_of(number, rank_, 0, static_cast<int>(k)) : -1;
    if (step.blocking) {
      const int64_t began = now_ns();
      const Status status =
          sends ? group.blocking_send(call->out.get(), count, DType::kInt64, to, number,
                                      milliseconds(0))
                : group.blocking_receive(call->out.get(), count, DType::kInt64,
                                         step.any_source ? -1 : from, number, milliseconds(0));
      if (look_at(number, status, began)) check_message(number, step, *call);
      return;
    }
    OperationPtr operation;
    if (sends) {
      operation =
          group.send(call->out.get(), count, DType::kInt64, to, number, call, milliseconds(0));
    } else {
      operation = group.receive(call->out.get(), count, DType::kInt64, step.any_source ? -1 : from,
                                number, call, milliseconds(0));
    }
    if (step.queued) {
      pending_.push_back({operation, number, step, call});
      return;
    }
    const int64_t began = now_ns();
    if (look_at(number, operation->wait(), began)) check_message(number, step, *call);
  }

  void check_message(int number, const Step& step, const Call& call) {
    for (size_t k = 0; k < call.out_count; ++k)
      if (call.out.get()[k] != value_of(number, step.root, 0, static_cast<int>(k)))
        wrong(number, "value " + std::to_string(k) + " of the message is " +
                          std::to_string(call.out.get()[k]));
  }

  struct Queued {
    OperationPtr operation;
    int number;
    Step step;
    std::shared_ptr<Call> call;
  };

  void finish_queued() {
    for (Queued& each : pending_) {
      const int64_t began = now_ns();
      if (!look_at(each.number, each.operation->wait(), began)) continue;
      if (each.step.kind == Kind::kMessage)
        check_message(each.number, each.step, *each.call);
      else
        check(each.number, each.step, *each.call);
    }
    pending_.clear();
  }

  // Whether a call succeeded; a failure must be explained by the program.
  bool look_at(int number, const Status& status, int64_t began) {
    const int64_t most_ns = program_.slice_ms == 0 ? kMostAsleepNs : kMostNs;
    if (now_ns() - began > most_ns && program_.fault != Fault::kLosesTime)
      wrong(number, "it took " + std::to_string((now_ns() - began) / 1'000'000) + " ms");
    if (status.ok()) return true;
    if (status.message().find("unknown(") != std::string::npos)
      wrong(number, "a call's record was read half-written: " + status.message());
    const bool may = may_fail(status);
    world_.progress[static_cast<size_t>(rank_)].failed = true;
    stopped_ = true;
    if (!may) wrong(number, std::string(code_name(status.code())) + ": " + status.message());
    return false;
  }

  bool may_fail(const Status& status) const {
    const bool asked_anyone =
        std::any_of(world_.progress.begin(), world_.progress.end(),
                    [](const World::Progress& rank) { return rank.asked_anyone; });
    const Code code = status.code();
    const std::string& text = status.message();
    // A rank stops at its first error, so it may leave other groups with fewer calls.
    const bool is_of_leaving = text.find("as it left group") != std::string::npos;
    const bool is_forming = text.find("forming group") != std::string::npos;
    const bool names_culprit =
        text.find("global rank " + std::to_string(program_.culprit)) != std::string::npos ||
        text.find("rank " + std::to_string(program_.culprit)) != std::string::npos;
    switch (program_.fault) {
      case Fault::kDies:
        // A rank that raises leaves, and others may need it or miss its calls. Formation numbers
        // ranks within the group. It notices the death of a rank without an entry in the store only
        // by the timeout, for which others then wait. A receive from any source waits for the
        // living members; a rank that waits for the receiver may time out first.
        return (code == Code::kPeerDied && (names_culprit || is_forming)) ||
               (code == Code::kTimeout &&
                (is_forming || asked_anyone || culprit_was_forming() || waits_for_a_former())) ||
               (code == Code::kPeerLeft && someone_failed()) ||
               (code == Code::kMismatch && is_of_leaving && someone_failed());
      case Fault::kAborts:
        return code == Code::kAborted ||
               ((code == Code::kPeerLeft ||
                 (code == Code::kTimeout && (is_forming || waits_for_a_former())) ||
                 (code == Code::kMismatch && is_of_leaving)) &&
                someone_failed());
      case Fault::kSkips:
      case Fault::kOtherRoot:
        return code == Code::kMismatch || code == Code::kPeerLeft || code == Code::kTimeout;
      case Fault::kShortMemory:
        return code == Code::kResource ||
               ((code == Code::kPeerLeft ||
                 (code == Code::kTimeout && (is_forming || waits_for_a_former())) ||
                 (code == Code::kMismatch && is_of_leaving)) &&
                someone_failed());
      default:
        // Ranks that still form a composed Team take a member that left and ended for dead.
        return code == Code::kPeerDied && is_forming && program_.exits;
    }
  }
  // Whether the culprit died before it had made all of its groups.
  bool culprit_was_forming() const {
    return world_.progress[static_cast<size_t>(program_.culprit)].made <
           std::count_if(
               program_.steps.begin(), program_.steps.end(),
               [this](const Step& step) {
                 const std::vector<int>& all = members(step.group);
                 return step.kind == Kind::kMake &&
                        std::find(all.begin(), all.end(), program_.culprit) != all.end();
               });
  }
  // Whether another rank forms a group without a member that raised before: it notices only by the
  // timeout, and a rank that waits for it may time out first.
  bool waits_for_a_former() const {
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (rank != rank_ && world_.progress[static_cast<size_t>(rank)].forms)
        return someone_failed();
    return false;
  }
  bool someone_failed() const {
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (world_.progress[static_cast<size_t>(rank)].failed || is_dead(program_.process_of(rank)))
        return true;
    return false;
  }

  [[noreturn]] void wrong(int number, const std::string& what) {
    fail("rank " + std::to_string(rank_) + ", step " + std::to_string(number) + ": " + what);
  }

  World& world_;
  const Program& program_;
  const int rank_;
  std::shared_ptr<Context> context_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::vector<int> times_made_;
  std::vector<Queued> pending_;
  bool stopped_ = false;
};

void run_world(const Program& program) {
  World world(program);
  const Settings settings = settings_of(program);
  std::vector<std::shared_ptr<Context>> contexts;
  for (int rank = 0; rank < program.ranks; ++rank) {
    if (program.process_of(rank) != rank) {
      contexts.push_back(contexts[static_cast<size_t>(program.process_of(rank))]);
      continue;
    }
    set_process(rank);
    // As if each rank were bound to a core of its own node.
    set_cpus(program.composed ? std::to_string(rank / 2) : "0-1");
    Result<std::shared_ptr<Context>> context = world.host.try_process(settings);
    if (!context.ok()) fail("no Context: " + context.status().message());
    contexts.push_back(std::move(context).value());
  }
  set_process(-1);
  if (program.fault == Fault::kShortMemory)
    limit_memory(static_cast<int64_t>(program.moment % (1 << 20)));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < program.ranks; ++rank) {
    threads.emplace_back([&world, rank, &context = contexts[static_cast<size_t>(rank)]] {
      set_process(world.program.process_of(rank));
      Rank(world, rank, context).run();
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (world.skipped_call >= 0 &&
      std::none_of(world.progress.begin(), world.progress.end(),
                   [](const World::Progress& rank) { return rank.failed; }))
    fail("nobody was told that step " + std::to_string(world.skipped_call) + " was skipped");
  for (int rank = 0; rank < program.ranks; ++rank) {
    std::shared_ptr<Context>& context = contexts[static_cast<size_t>(rank)];
    // A worker may still hold the group of its last call.
    const long others = program.shared && rank == 0 ? 2 : 1;
    const int process = program.process_of(rank);
    while (!is_dead(process) && context.use_count() > others)
      std::this_thread::sleep_for(milliseconds(1));
    if (is_dead(process)) {
      // Its threads never run again, so it cannot be destroyed, and is leaked.
      new std::shared_ptr<Context>(std::move(context));
      continue;
    }
    context.reset();
  }
}

}  // namespace

Verdict run_program(const Program& program, uint64_t schedule_seed) {
  Options options;
  options.seed = schedule_seed;
  options.switch_per_mille = program.switch_per_mille;
  options.stale_per_mille = program.stale_per_mille;
  options.slow_process = program.slow;
  Outcome outcome = run(options, [&program] { run_world(program); });
  return {outcome.failure, outcome.steps, outcome.switches};
}

}  // namespace dscomm::schedule
