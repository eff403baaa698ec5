// HierarchicalTeam: a Team made of Teams. The ranks are divided into domains (the NUMA nodes of a
// host, or hosts); an inner Team joins the ranks of one domain, and outer Teams join domains. A
// direct Team joins all ranks, for blocks that go from one rank to one other.
//
// Slices. L is the number of ranks in the largest domain. There are L slices, and slice k is led in
// every domain by the local rank k mod (the domain's size); one outer Team for each slice joins its
// leaders, in the order of the domains. So every rank carries its own share across and none is a
// bottleneck; where domains are uneven, a rank of a small one leads several slices.
//
//     domain 0: ranks 0 1        slice 0: ranks 0, 2      slice 2: ranks 0, 4
//     domain 1: ranks 2 3 4      slice 1: ranks 1, 3
//
// Arithmetic. Within a domain in the inner Team's order, then across in the outer Team's: a
// property of the placement, so that a result has the same bits on every rank and in every run.
// float16 and bfloat16 travel through both levels as float32 and are rounded once, at the end, or
// are rounded at both (see HierarchyOptions); AVG divides once, by the whole size; PREMUL_SUM
// applies its factor at the inner level alone.
//
// Order. Every rank calls its Teams in one global order: by chunk of the data, then by the step of
// the algorithm, then by slice. Each sub-call is complete once all members of its Team make it, and
// the earliest one that is not complete has all of its members on the way, so nobody waits in a
// circle. (A call of the direct Team begins to send before the others of its call, but waits last.)
//
// Overlap. Where the outer Teams take chunks (see Chunks), a long all_reduce, all_gather or
// broadcast is one outer call for each slice: while it moves some chunks between domains, others
// are reduced or spread inside. So is a long reduce or reduce_scatter where all domains are of one
// size. Such a call uses only as many slices as the smallest domain has ranks, so no rank leads two
// of them: more would not make the smallest domain faster. (An all_gather makes several such
// calls, each for the blocks of as many ranks of each domain.) The inner calls have one order
// on all ranks, those of reducing (R) and spreading (S) a chunk for one: R0 R1 S0 R2 S1 R3 S2 ...
// And each comes after certain steps of the outer calls, the same in all of them (where a slice is
// shorter, after all that it has): a rank that waits in an inner call has completed all the steps
// that the others may wait for before they come to it.
//
// Agreement. Every piece of a call carries the record of the whole call (CallOptions::whole). The
// Teams below compare and show these records, so two ranks of one Team that make different calls
// detect it in the first piece that they share. The domains and slice 0 join all ranks. Every rank
// takes part in every call of these Teams, even with no elements, before it uses another slice or
// waits in the direct Team: first in its domain, then, as the leader of slice 0, with the other
// leaders. (A leader of slice 0 may begin there.) So some pair of neighbours detects any
// disagreement. The two end all of their Teams, and ranks that wait for them, or call next, adopt
// the cause. A rank that waits for none of those that disagree (a broadcast's root, a sender of a
// gather) may have returned by then. It learns the cause in its next call, as in any Team.
//
// Where ranks that wait for long have all compare their calls (HierarchyOptions::compare_calls),
// calls that use the direct Team leave slice 0 out, and so do domains without the root with their
// inner Team. Then, and in broadcasts and reduces among few domains, only ranks that exchange
// data compare the call at once; the others find out in a later call, which carries a hash of those
// before it (CallOptions::history).
//
// Time. Who waits in a later step of a call may wait for a rank that waits in an earlier one, and
// that one knows better who is at fault. So every step gives up a little after the one before it:
// the first timeout is that of a rank that waits for the rank at fault, and the others hear of it.
// Who sees on its own host that a rank is stopped does not give it that little more: others may
// wait in the next call already, whose steps begin anew.
//
// Failure. The first cause that any sub-team gives is kept, aborts all others, and is returned as
// it is. A rank that waits in one Team asks the others for aborts, but not for deaths: a dead rank
// may have published all that is needed of it. A rank that waits for the dead one itself sees the
// death, fails, and tells its Teams; so whoever waits for that rank hears of it, and so on. But the
// rank waited for may not have come to the call, and see nothing: where it is known who began which
// call (HierarchyOptions::note_call), who died before this one is found by `heard`.
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
#include "core/team/first_cause.h"
#include "core/team/team.h"

namespace dscomm {

// Makes this rank's Team of `ranks` (at least two, this one among them), in which a rank's position
// in the list is its number. Called on all of these ranks, with the same name.
using TeamFactory = std::function<Result<std::unique_ptr<Team>>(std::span<const int> ranks,
                                                                const std::string& name)>;

struct HierarchyOptions {
  // The Teams below are called "<name>/domain<d>", "<name>/slice<k>" and "<name>/direct".
  std::string name;
  // About how much of the data is in flight at once, and the size of each of the two buffers that a
  // rank holds once it needs them. Overlapped calls have two chunks of up to twice that for each
  // slice in flight, in the caller's memory, or up to 16 times that in these buffers. Among so many
  // domains that their messages would be short, chunks are longer. All ranks must give the same.
  size_t staging_bytes = size_t{1} << 20;
  // Whether sums of float16 and bfloat16 are float32 from end to end, and rounded once; otherwise
  // they are rounded at each of the two levels, and half of the bytes travel across. AVG and
  // PREMUL_SUM are rounded once all the same.
  bool halves_as_float32 = true;
  // For ranks that meet in no Team, to hear at once why another one has ended its Team or is gone:
  // tells all, and asks. Without, it comes through the Teams below. Any thread; neither blocks.
  std::function<void(const Status& cause, uint64_t unfinished_call)> tell = {};
  std::function<Status(uint64_t call)> heard = {};  // see Team::look()
  // For ranks that meet in no Team, to compare their calls: told of each call before its first
  // piece, and whether this rank needs what every other one puts in.
  std::function<void(const CallRecord& call, bool reads_all)> note_call = {};
  // See Team::compare_calls(); goes together with `heard`. With it the domains need not agree in
  // calls in which ranks wait only for those whose data they need.
  std::function<void(bool always)> compare_calls = {};
};

class HierarchicalTeam final : public Team {
 public:
  // How the name of the direct Team ends.
  static constexpr const char* kDirect = "/direct";

  // Collective. `domains` divides the ranks 0 to n-1 and is the same on all of them. Every rank
  // makes its Teams in the same order: its domain, then the slices that it leads, ascending, then
  // the direct Team, which `make_outer` makes too. A Team of one rank is a SelfTeam and needs no
  // factory. When a factory fails, what this rank has made is aborted, so that the others fail as
  // well instead of waiting.
  static Result<std::unique_ptr<HierarchicalTeam>> make(int rank,
                                                        std::vector<std::vector<int>> domains,
                                                        const TeamFactory& make_inner,
                                                        const TeamFactory& make_outer,
                                                        HierarchyOptions options);

  // Leaves, while the Teams below can still ask how many calls are finished.
  ~HierarchicalTeam() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(domain_of_.size()); }
  std::string describe() const override;

  Status all_reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                    const CallOptions& options) override;
  Status broadcast(void* buffer, size_t count, DType dtype, int root,
                   const CallOptions& options) override;
  Status reduce(const void* in, void* out, size_t count, const Reduction& reduction, int root,
                const CallOptions& options) override;
  Status all_gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                    std::span<const size_t> out_counts, const CallOptions& options) override;
  Status reduce_scatter(std::span<const void* const> ins, std::span<const size_t> counts, void* out,
                        const Reduction& reduction, const CallOptions& options) override;
  Status gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                std::span<const size_t> out_counts, int root, const CallOptions& options) override;
  Status scatter(std::span<const void* const> ins, std::span<const size_t> in_counts, void* out,
                 size_t count, DType dtype, int root, const CallOptions& options) override;
  Status all_to_all(std::span<const void* const> ins, std::span<const size_t> in_counts,
                    std::span<void* const> outs, std::span<const size_t> out_counts, DType dtype,
                    const CallOptions& options) override;
  Status barrier(const CallOptions& options) override;

  void abort(const Status& cause) override;
  Status failure() override;
  Status leave() override;
  Status death() override;
  Status look(uint64_t call) override;
  void compare_calls(bool always) override {
    if (options_.compare_calls) options_.compare_calls(always);
  }
  void set_composer(const Team* composer) override;
  uint64_t finished_calls() const override {
    return finished_calls_.load(std::memory_order_relaxed);  // orders nothing
  }
  void note_end(const std::string& exception) override;

 private:
  // An outer Team that this rank belongs to.
  struct Slice {
    int index;
    std::unique_ptr<Team> team;
  };
  // A rank whose data crosses domains in one slice, whose number is the rank's local number in its
  // domain.
  struct Destination {
    int domain;
    int rank;
  };
  class Slicing;
  struct Levels;

  HierarchicalTeam(int rank, std::vector<std::vector<int>> domains, HierarchyOptions options);
  Status make_teams(const TeamFactory& make_inner, const TeamFactory& make_outer);

  // The frame of every call: begin() refuses on a dead Team, end() tells all sub-teams of a
  // failure.
  Status begin(const CallOptions& options);
  Status end(const Status& status);
  Status first_difference(const Status& found);
  // The options of every piece of a call, which hold until the next one begins.
  CallOptions pieces_of(const CallRecord& call, const CallOptions& options);
  // As `piece`, for a sub-call that comes `steps` steps later; see "Time".
  static CallOptions later(const CallOptions& piece, int steps);

  // The algorithms. `piece` is what their sub-calls are told.
  Status run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                        const Reduction& reduction, const CallOptions& piece);
  Status run_reduction_overlapped(const std::byte* in, std::byte* out, const Slicing& slicing,
                                  const Levels& levels, int root, size_t chunk,
                                  const CallOptions& piece);
  Status run_reduce(const std::byte* in, std::byte* out, size_t count, const Reduction& reduction,
                    int root, const CallOptions& piece);
  Status run_reduce_scatter(std::span<const void* const> ins, std::span<const size_t> counts,
                            std::byte* out, const Reduction& reduction, const CallOptions& piece);
  Status run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                       const CallOptions& piece);
  Status run_all_gather(const void* in, DType dtype, std::span<void* const> outs,
                        std::span<const size_t> counts, const CallOptions& piece);
  Status run_gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                    std::span<const size_t> out_counts, int root, const CallOptions& piece);
  Status run_scatter(std::span<const void* const> ins, std::span<const size_t> in_counts, void* out,
                     size_t count, DType dtype, int root, const CallOptions& piece);
  Status run_all_to_all(std::span<const void* const> ins, std::span<const size_t> in_counts,
                        std::span<void* const> outs, std::span<const size_t> out_counts,
                        DType dtype, const CallOptions& piece);
  Status run_barrier(const CallOptions& piece);

  // Elements of a chunk of an overlapped call, of blocks with up to `count` elements of this size
  // for each slice, and of no less than `least_bytes`; 0 where they are too short for that, or
  // nothing can overlap.
  size_t overlapped_chunk(size_t count, size_t element_bytes, size_t least_bytes = 0,
                          size_t least_chunks = 2) const;
  // The same of an all_reduce or a reduce, and its slices.
  size_t overlapped_chunk(const Slicing& slicing, const Levels& levels, bool is_in_place) const;
  // `chunk` rounded down to a size that rings allow, or up where that is below `least_bytes`.
  size_t ring_chunk(size_t chunk, size_t element_bytes, size_t least_bytes = 0) const;
  Status run_reduce_scatter_overlapped(std::span<const void* const> ins,
                                       std::span<const size_t> counts, std::byte* out, size_t chunk,
                                       const Levels& levels, const CallOptions& piece);
  Status run_broadcast_overlapped(std::byte* buffer, size_t count, DType dtype, int root,
                                  size_t chunk, const CallOptions& piece);
  Status spread_overlapped(DType dtype, std::span<void* const> outs, std::span<const size_t> counts,
                           size_t chunk, const CallOptions& piece);
  // Steps that algorithms share; see where they are defined.
  Status reduce_slices(const std::byte* values, std::byte* sums, std::byte* results,
                       const Slicing& slicing, const Levels& levels, int root_domain,
                       const CallOptions& piece);
  void settle(std::byte* sums, std::byte* results, size_t count, const Levels& levels) const;
  Status spread_packed(DType dtype, std::span<void* const> outs, std::span<const size_t> counts,
                       const CallOptions& piece);
  Status spread_in_place(DType dtype, std::span<void* const> outs, std::span<const size_t> counts,
                         const CallOptions& piece);
  Status spread_blocks(DType dtype, std::span<void* const> outs, std::span<const size_t> counts,
                       int domain, int first, int width, size_t begin, size_t chunk,
                       const CallOptions& piece);
  Status cross(DType dtype, std::span<void* const> blocks, std::span<const size_t> counts,
               const CallOptions& piece);
  // inside(): the entries of this domain's ranks, by local number. outside(): all entries, with 0
  // for these ranks. Both return an empty list for an empty one.
  template <typename Pointer>
  std::vector<Pointer> inside(std::span<Pointer const> blocks) const;
  std::vector<size_t> inside(std::span<const size_t> counts) const;
  std::vector<size_t> outside(std::span<const size_t> counts) const;
  Status agree_inside(const CallOptions& piece);
  template <typename CallInner, typename CallDirect>
  Status exchange_blocks(const CallOptions& piece, const CallInner& call_inner,
                         const CallDirect& call_direct);

  bool is_even() const { return least_domain_ == slice_count_; }  // all domains are of one size
  int local_count() const { return static_cast<int>(members().size()); }
  const std::vector<int>& members() const { return domains_[domain_]; }
  int domain_count() const { return static_cast<int>(domains_.size()); }
  // The rank with this local number in the domain, or -1.
  int member(int domain, int index) const;
  int domain_of(int rank) const { return domain_of_[rank]; }
  int index_of(int rank) const { return index_of_[rank]; }
  // The outer Team of a slice that this rank leads.
  Team& outer(int slice);
  // One of two buffers of at least this size. Its contents last until the next call for the same.
  Result<std::byte*> staging(int which, size_t bytes);

  const int rank_;
  const std::vector<std::vector<int>> domains_;
  const HierarchyOptions options_;
  std::vector<int> domain_of_;  // by rank
  std::vector<int> index_of_;   // by rank: its local number
  int domain_ = 0;              // of this rank
  int index_ = 0;               // of this rank
  int slice_count_ = 0;
  int least_domain_ = 0;   // ranks of the smallest domain
  bool overlaps_ = false;  // the outer Teams take chunks

  // By local rank: the destinations of the slices that it leads, by slice and then by domain.
  std::vector<std::vector<Destination>> destinations_;

  CallRecord whole_;  // the call in progress
  uint64_t sequence_ = 0;

  std::unique_ptr<Team> inner_;
  std::vector<Slice> led_;        // ascending by index
  std::unique_ptr<Team> direct_;  // of all ranks
  std::vector<Team*> teams_;      // all of these, in the order in which they were made
  uint64_t history_ = 0;          // see CallOptions
  FirstCause cause_;
  std::atomic<uint64_t> finished_calls_{0};
  bool has_left_ = false;

  struct Staging {
    std::unique_ptr<std::byte[]> memory;
    size_t bytes = 0;
  };
  std::array<Staging, 2> staging_;
};

}  // namespace dscomm
