// HierarchicalTeam: a parent team of other Teams. The ranks are divided into domains: the NUMA
// nodes or L3 caches of a host, or hosts. An inner Team joins the ranks of one domain, and outer
// Teams join domains. A direct Team joins all ranks. It carries blocks, each from one rank to one
// other rank.
//
// Slices. L is the number of ranks in the largest domain. The data has L slices. In each domain,
// the leader of slice k is local rank k modulo the size of the domain. One outer Team for each
// slice joins its leaders, in the order of the domains. So each rank carries its own share across
// domains, and none is a bottleneck. If domains differ in size, a rank of a small domain leads
// several slices.
//
//     domain 0: ranks 0 1        slice 0: ranks 0, 2      slice 2: ranks 0, 4
//     domain 1: ranks 2 3 4      slice 1: ranks 1, 3
//
// Arithmetic. Reduces first in each domain, in the order of the inner Team, then across, in the
// order of the outer Team. The order depends on the placement of ranks alone, so a result has the
// same bits on all ranks and in all runs. float16 and bfloat16 travel through both levels as
// float32 and are rounded once, at the end, or are rounded at both levels (see HierarchyOptions).
// AVG divides once, by the number of all ranks. PREMUL_SUM applies its factor at the inner level
// only.
//
// Order. All ranks make their sub-calls in one global order: by chunk of the data, then by step of
// the algorithm, then by slice. A sub-call completes when all members of its Team have made it. No
// member of the earliest incomplete sub-call waits in another sub-call, so there is no deadlock. (A
// sub-call of the direct Team begins to send before the others, but waits last.)
//
// Overlap. If the outer Teams support chunks (see Chunks), a long all_reduce, all_gather or
// broadcast makes one outer call for each slice. While the outer call moves some chunks between
// domains, other chunks are reduced or distributed inside them. The same holds for a long reduce or
// reduce_scatter, if all domains have the same size. An overlapped call uses only as many slices as
// the smallest domain has ranks, so no rank leads two: more slices would not make the smallest
// domain faster. (A broadcast uses slice 0 only. If domains differ in size, an all_gather makes
// several outer calls for each slice. Each carries one block of each domain.) The inner calls have
// the same order on all ranks, for example when reducing (R) and distributing (S) chunks: R0 R1 S0
// R2 S1 R3 S2 ... Each inner call follows a fixed step of the outer calls: the same step in all
// slices, or the last step of a shorter slice. So a rank that waits in an inner call has completed
// all steps for which the others may wait before they reach this inner call.
//
// Agreement. Each sub-call carries the record of its parent call (CallOptions::parent_call). The
// Teams below compare these records and show them in errors. So two ranks of one Team that make
// different calls detect this in the first sub-call that they share. The domains and slice 0
// together join all ranks. In each call, each rank takes part in these Teams, even with no
// elements, before it uses another slice or waits in the direct Team: first in its domain, then, as
// leader of slice 0, with the other leaders. (That leader may meet the other leaders
// first.) So any disagreement is detected by some pair of neighbours. The two end all their
// Teams. Ranks that wait for these two, or make their next call, adopt the cause. A rank that waits
// for none of the ranks that disagree (the root of a broadcast, a sender of a gather) may have
// returned by then. It gets the cause in its next call, as in any Team.
//
// With HierarchyOptions::compare_calls, ranks that wait for long make all ranks compare their
// calls. With this option, calls that use the direct Team skip slice 0 and, in a gather or scatter,
// domains without the root skip their inner Team. In these calls, and in broadcasts and reduces
// among few domains, only ranks that exchange data compare the call at once. The others detect a
// difference in a later call, which carries a hash of the calls before it (CallOptions::history).
//
// Time. A rank in a later step of a call may wait for a rank in an earlier step, and that rank has
// better evidence of the fault. So each step has a slightly later deadline than the step before.
// The first timeout is then that of a rank that waits for the rank at fault itself, and the others
// adopt it. A rank that sees a stopped rank on its own host does not use the later deadline,
// because other ranks may already wait in the next call, whose steps start over.
//
// Failure. The first cause from any child Team is kept, aborts all others, and is returned
// unchanged. A rank that waits in one Team checks the others for aborts, but not for deaths,
// because a dead rank may have published all that is needed. A rank that waits for the dead rank
// itself sees the death, fails, and aborts its Teams. So the ranks that wait for this rank fail
// too, and so on. But a rank may not have reached the call, and then it sees nothing. If
// HierarchyOptions::note_call makes the begun calls of each rank known, `received_notice` reports a
// rank that died before it began this call.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/team/call_record.h"
#include "core/team/call_tally.h"
#include "core/team/first_cause.h"
#include "core/team/team.h"

namespace dscomm {

// Makes this rank's Team of `ranks` (at least two, including this rank). A rank's position in the
// list is its number in the Team. Called on all of these ranks, with the same name.
using TeamFactory = std::function<Result<std::unique_ptr<Team>>(std::span<const int> ranks,
                                                                const std::string& name)>;

struct HierarchyOptions {
  // The Teams below are called "<name>/domain<d>", "<name>/slice<k>" and "<name>/direct".
  std::string name;
  // About how many bytes are in flight at once, and the usual size of each of the two buffers that
  // a rank allocates when it needs them. Overlapped calls have two chunks in flight for each slice.
  // A chunk has up to twice this size in the caller's memory; a buffer, up to 16 times. Chunks are
  // longer if messages among many domains would be too short. Must be the same on all ranks.
  size_t staging_bytes = size_t{1} << 20;
  // Whether sums of float16 and bfloat16 are float32 from end to end and rounded once. Otherwise
  // they are rounded at each of the two levels, and half as many bytes travel across. AVG and
  // PREMUL_SUM are rounded once in both cases.
  bool halves_as_float32 = true;
  // Failure notices between ranks that share no child Team: `send_notice` sends the cause to all
  // ranks, `received_notice` returns a cause that has arrived. Without them, causes travel through
  // the child Teams. Called from any thread; must not block.
  std::function<void(const Status& cause, uint64_t unfinished_call)> send_notice = {};
  std::function<Status(uint64_t call)> received_notice = {};  // see Team::failure_in()
  // For comparing calls between ranks that share no child Team. Called before the first sub-call of
  // each call. reads_all: this rank needs data from all others.
  std::function<void(const CallRecord& call, bool reads_all)> note_call = {};
  // See Team::compare_calls(). Requires `received_notice`. If set, a call in which each rank waits
  // only for ranks whose data it needs omits the sub-calls that only serve the agreement.
  std::function<void(bool always)> compare_calls = {};
  std::string group = {};  // the name of the user's group, for the log
};

class HierarchicalTeam final : public Team {
 public:
  // The end of the direct Team's name.
  static constexpr const char* kDirect = "/direct";

  // Collective. `domains` divides the ranks 0 to n-1 and is the same on all ranks. Each rank makes
  // its Teams in this order: by `make_inner`, its domain's; by `make_outer`, those of the slices
  // that it leads, ascending, and the direct Team. A Team of one rank is a SelfTeam and needs no
  // factory. If a factory fails, the Teams that this rank has made are aborted, so that the other
  // ranks fail instead of waiting.
  static Result<std::unique_ptr<HierarchicalTeam>> make(int rank,
                                                        std::vector<std::vector<int>> domains,
                                                        const TeamFactory& make_inner,
                                                        const TeamFactory& make_outer,
                                                        HierarchyOptions options);

  // Calls leave() while the child Teams can still call this Team's finished_calls().
  ~HierarchicalTeam() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(domain_of_.size()); }
  std::string describe() const override;

  void abort(const Status& cause) override;
  Status failure() override;
  Status leave() override;
  Status death() override;
  Status failure_in(uint64_t call) override;
  void compare_calls(bool always) override {
    if (options_.compare_calls) options_.compare_calls(always);
  }
  void set_parent(const Team* parent) override;
  uint64_t finished_calls() const override {
    return finished_calls_.load(std::memory_order_relaxed);  // orders nothing
  }
  void note_end(const std::string& exception) override;

 private:
  // A slice that this rank leads, with its outer Team.
  struct LedSlice {
    int index;
    std::unique_ptr<Team> team;
  };
  class Slicing;
  struct Levels;

  HierarchicalTeam(int rank, std::vector<std::vector<int>> domains, HierarchyOptions options);
  Status make_teams(const TeamFactory& make_inner, const TeamFactory& make_outer);

  // Fails on a dead Team; makes the options of all sub-calls, valid until the next call begins.
  Status begin_call(Call& call) override;
  // Aborts all child Teams after a failure.
  Status end_call(const Status& status) override;
  Status first_difference(const Status& found);
  // The options of a sub-call that comes `steps` steps later; see "Time".
  static CallOptions later(const CallOptions& sub_call, int steps, const Chunks* chunks = nullptr);

  // The algorithms. `sub_call` has the options of their sub-calls.
  Status run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                        const Reduction& reduction, const CallOptions& sub_call) override;
  Status run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                       const CallOptions& sub_call) override;
  Status run_reduce(const std::byte* in, std::byte* out, size_t count, const Reduction& reduction,
                    int root, const CallOptions& sub_call) override;
  Status run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                        Counts out_counts, const CallOptions& sub_call) override;
  Status run_reduce_scatter(Inputs ins, Counts counts, std::byte* out, const Reduction& reduction,
                            const CallOptions& sub_call) override;
  Status run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                    int root, const CallOptions& sub_call) override;
  Status run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count, DType dtype,
                     int root, const CallOptions& sub_call) override;
  Status run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts, DType dtype,
                        const CallOptions& sub_call) override;
  Status run_barrier(const CallOptions& sub_call) override;
  Status run_reduction_overlapped(const std::byte* in, std::byte* out, const Slicing& slicing,
                                  const Levels& levels, int root, size_t chunk,
                                  const CallOptions& sub_call);

  // The number of elements in a chunk of an overlapped call. Each slice of the call has blocks of
  // up to `count` elements. A chunk has at least `least_bytes`. Returns 0 if the blocks are shorter
  // than `least_chunks` of the shortest chunks, or if nothing can overlap.
  size_t overlapped_chunk(size_t count, size_t element_bytes, size_t least_bytes = 0,
                          size_t least_chunks = 2) const;
  // The same for the slices of an all_reduce or a reduce. is_in_place: sums need no rings.
  size_t overlapped_chunk(const Slicing& slicing, const Levels& levels, bool is_in_place) const;
  // `chunk`, rounded down to a size for rings (see Chunks), or up if down is below `least_bytes`.
  size_t ring_chunk(size_t chunk, size_t element_bytes, size_t least_bytes = 0) const;
  Status run_reduce_scatter_overlapped(Inputs ins, Counts counts, std::byte* out, size_t chunk,
                                       const Levels& levels, const CallOptions& sub_call);
  Status run_broadcast_overlapped(std::byte* buffer, size_t count, DType dtype, int root,
                                  size_t chunk, const CallOptions& sub_call);
  Status spread_overlapped(DType dtype, Outputs outs, Counts counts, size_t chunk,
                           const CallOptions& sub_call);
  // Steps that algorithms share; see their definitions.
  Status reduce_slices(const std::byte* values, std::byte* sums, std::byte* results,
                       const Slicing& slicing, const Levels& levels, int root_domain,
                       const CallOptions& sub_call);
  void make_results(std::byte* sums, std::byte* results, size_t count, const Levels& levels) const;
  void pack(Inputs ins, Counts counts, size_t begin, size_t chunk, const Levels& levels,
            std::byte* packed, std::vector<const void*>* regions,
            std::vector<size_t>* region_counts) const;
  Status spread_packed(DType dtype, Outputs outs, Counts counts, const CallOptions& sub_call);
  Status spread_blocks(DType dtype, Outputs outs, Counts counts, int domain, int first, int width,
                       size_t begin, size_t chunk, const CallOptions& sub_call);
  Status gather_across(DType dtype, Outputs blocks, Counts counts, const CallOptions& sub_call);
  // inside(): the entries of this domain's ranks, by local rank. outside(): all entries, with 0 for
  // these ranks. Both return an empty list for an empty list.
  template <typename Entry>
  std::vector<Entry> inside(std::span<Entry const> entries) const;
  std::vector<size_t> outside(Counts counts) const;
  Status agree_inside(const CallOptions& sub_call);
  template <typename CallInner, typename CallDirect>
  Status exchange_blocks(const CallOptions& sub_call, const CallInner& call_inner,
                         const CallDirect& call_direct);

  // For the log.
  void note(Collective kind, const char* algorithm, size_t bytes) const {
    if (tally_ != nullptr) tally_->add(kind, algorithm, bytes);
  }

  bool is_even() const { return least_domain_ == slice_count_; }  // all domains have the same size
  int local_count() const { return static_cast<int>(members().size()); }
  const std::vector<int>& members() const { return domains_[domain_]; }
  int domain_count() const { return static_cast<int>(domains_.size()); }
  // The rank with this local rank in the domain, or -1.
  int member(int domain, int index) const;
  int domain_of(int rank) const { return domain_of_[rank]; }
  int index_of(int rank) const { return index_of_[rank]; }
  // The outer Team of the first slice that this rank leads.
  Team& outer() const { return *led_.front().team; }
  // Buffer `which` of the two, with at least this size. Its contents are valid until the next
  // staging() of the same buffer.
  Result<std::byte*> staging(int which, size_t bytes);

  const int rank_;
  const std::vector<std::vector<int>> domains_;
  const HierarchyOptions options_;
  std::vector<int> domain_of_;  // by rank
  std::vector<int> index_of_;   // by rank: its local rank
  int domain_ = 0;              // of this rank
  int index_ = 0;               // of this rank
  int slice_count_ = 0;
  int least_domain_ = 0;   // ranks of the smallest domain
  bool overlaps_ = false;  // takes_chunks() of the outer Teams

  // By local rank: the destinations of a reduce_scatter or all_gather in the slices that this local
  // rank leads, by slice and then by domain. The data of a destination crosses domains in the slice
  // whose number is the destination's local rank.
  std::vector<std::vector<int>> destinations_;

  CallRecord call_;  // the call in progress
  CallOptions sub_call_options_{Deadline::after(std::chrono::milliseconds(0))};
  uint64_t sequence_ = 0;

  std::unique_ptr<Team> inner_;
  std::vector<LedSlice> led_;     // ascending by index
  std::unique_ptr<Team> direct_;  // of all ranks
  std::vector<Team*> teams_;      // all child Teams, in the order of creation
  uint64_t history_ = 0;          // see CallOptions
  FirstCause cause_;
  std::atomic<uint64_t> finished_calls_{0};
  bool has_left_ = false;

  struct Staging {
    std::unique_ptr<std::byte[]> memory;
    size_t bytes = 0;
  };
  std::array<Staging, 2> staging_;
  std::unique_ptr<CallTally> tally_;  // null unless calls are logged
};

}  // namespace dscomm
