// Team: a set of ranks that can do collectives. A parent team is a Team that is made of other
// Teams, its child Teams: each of its calls is made of calls of the child Teams, the sub-calls.
//
// A Team runs one collective at a time. The engine, or the parent team, calls it in the group's
// order and never from two threads at once, except for functions marked as thread-safe. Each call
// blocks until this rank's part is done, the deadline passes, or a member is known to have died,
// left, aborted or made another call. The status then names the rank at fault. After an error, the
// Team is dead, and each later call returns the first cause. The exceptions are kInvalidArgument
// and kUnsupported, if they are detected before anything is published.
//
// Buffers are contiguous memory. Counts are elements, *_bytes are bytes; both have 64 bits and may
// be zero. Equal pointers mean in place. Nothing is written to the caller's buffers after the call
// has returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/types/dtype.h"
#include "core/types/reduce_op.h"

namespace dscomm {

struct Call;
struct CallRecord;
class Team;

// Lets a parent team produce the input of a sub-call, and consume its results, while the sub-call
// is in progress, so that the work of both overlaps. Both functions run on the calling thread,
// inside the call. If one fails, the call fails with that status.
struct Chunks {
  size_t count = 0;  // elements of each block in one chunk; the last chunk may be shorter
  // If `ring` is not 0, the memory of each input block of a reduction is a ring of `ring` elements,
  // the length of two chunks: element i of the block lies at index i modulo `ring`. `out_ring`: the
  // same for results. With a ring, `count` is a power of two, or a multiple of the number of
  // elements in 4 * Team::piece_bytes().
  size_t ring = 0, out_ring = 0;
  // Called before values are read, with a growing `end`: must produce the values of each block
  // before index `end`, which may lie behind the last value. The first chunk must exist when the
  // call begins. At most two chunks are in progress: chunk k + 2 is requested after chunk k has
  // been read and passed to consume(). Empty if all values exist when the call begins.
  std::function<Status(size_t end)> make;
  // Called when all results before `end` exist and the values before `end` will not be read again.
  // A Team need not call this in a short call: all results exist when that returns. May be empty.
  std::function<Status(size_t end)> consume;
};

// The parameters of a collective besides its buffers.
struct CallOptions {
  Deadline deadline;
  // Position in a coalesced list. Lists of different lengths are a mismatch.
  uint32_t part = 0;
  uint32_t part_count = 1;
  // Set by the parent team: its call, of which this one is a sub-call. Members must agree on the
  // parent's call, because sub-calls of different calls may be identical. Errors show that call.
  const CallRecord* parent_call = nullptr;
  // With `parent_call`: a hash of the calls before that one, on which members must also agree: a
  // rank that needs no data from others may have finished an earlier call that differs.
  uint64_t history = 0;
  // The outermost parent team. An error that ends this parent team ends the call, too: waits call
  // parent->failure_in() now and then, because a rank that waits in one child Team may learn of a
  // fault only through another.
  Team* parent = nullptr;
  // Only for a Team that takes_chunks(), in an all_reduce, reduce, reduce_scatter, all_gather or
  // broadcast. The same count on all ranks.
  const Chunks* chunks = nullptr;
  // For a gather, a scatter or an all_to_all: the domain of each rank, or null. Ranks of one domain
  // exchange no elements in this call. Other Teams compare the call inside domains, so this Team
  // may restrict its comparisons and waits to ranks that exchange elements.
  const std::vector<int>* domains = nullptr;
  // For a Team that takes_chunks(), with `domains`; may be null. Called once, on the calling
  // thread, after this rank has begun to send and before it waits, unless the call has failed. If
  // the function fails, the call fails with that status.
  const std::function<Status()>* meanwhile = nullptr;
  // Not 0: an all_reduce that will be repeated with the same count and dtype, so a Team may keep
  // what it prepares. Members must agree on it.
  uint64_t plan = 0;
};

class Team {
 public:
  // Lists with one entry for each rank.
  using Inputs = std::span<const void* const>;
  using Outputs = std::span<void* const>;
  using Counts = std::span<const size_t>;

  // The sum of the counts.
  static size_t total_count(Counts counts) {
    return std::accumulate(counts.begin(), counts.end(), size_t{0});
  }

  virtual ~Team() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // For logs: "shared memory, 4 ranks", "hierarchical, 4 ranks in domains of 2+2: inside (shared
  // memory, 2 ranks), across (mpi, 2 ranks)".
  virtual std::string describe() const = 0;

  // out[i] = reduction over the ranks of in[i], the same bits on every rank. in may equal out.
  Status all_reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                    const CallOptions& options);

  // Copies the root's buffer to all ranks. count and dtype must agree on all ranks.
  Status broadcast(void* buffer, size_t count, DType dtype, int root, const CallOptions& options);

  // As all_reduce, but writes only the root's out. Others may pass a null out; their in is kept.
  Status reduce(const void* in, void* out, size_t count, const Reduction& reduction, int root,
                const CallOptions& options);

  // outs[k] (out_counts[k] elements) becomes rank k's in. Counts may differ between ranks, but each
  // rank's count must be what the others expect (else kMismatch). in may equal outs[rank()].
  Status all_gather(const void* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                    const CallOptions& options);

  // out becomes the reduction over the ranks of their ins[rank()]. counts[k] elements belong to
  // rank k and must agree on all ranks. out may equal ins[rank()].
  Status reduce_scatter(Inputs ins, Counts counts, void* out, const Reduction& reduction,
                        const CallOptions& options);

  // The root's outs[k] becomes rank k's in. outs and out_counts are empty on other ranks. in may
  // equal outs[root] on the root.
  Status gather(const void* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                int root, const CallOptions& options);

  // Rank k's out becomes the root's ins[k]. ins and in_counts are empty on other ranks. out may
  // equal ins[root] on the root.
  Status scatter(Inputs ins, Counts in_counts, void* out, size_t count, DType dtype, int root,
                 const CallOptions& options);

  // outs[k] becomes rank k's ins[rank()]. in_counts[k] here must equal out_counts[rank()] on k
  // (else kMismatch, before anything is copied between the two). ins and outs do not overlap.
  Status all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts, DType dtype,
                    const CallOptions& options);

  // Returns when all members have called it.
  Status barrier(const CallOptions& options);

  // Ends the Team for all members with this cause. Thread-safe. Does not block.
  virtual void abort(const Status& cause) = 0;

  // The cause that ended the Team, or OK. Adopts a member's abort; later calls return the same
  // cause. Does not check for deaths. Thread-safe. Inexpensive.
  virtual Status failure() = 0;

  // Publishes that this rank's process is about to end without having left: because of an unhandled
  // exception of this type, or for an unknown reason if `exception` is empty. Calls still work
  // until the process is gone. Thread-safe.
  virtual void note_end(const std::string& /*exception*/) {}

  // Publishes that this rank makes no more calls. Compares its calls, without waiting, with those
  // that other members have published: kMismatch if a difference is found that no rank has reported
  // yet. Call it last, on the thread of the calls. The destructor leaves, too.
  virtual Status leave() { return {}; }

  // The rest is for parent teams: on the thread of the calls only, unless marked as thread-safe.

  // For the outermost Team, on the thread of the call in progress: makes the other members compare
  // their last calls with this rank's, including the call in progress. A difference ends the Team;
  // see FailureDetector::compare_calls(). Does not wait. Does nothing if unsupported.
  virtual void compare_calls(bool /*always*/) {}
  // Whether the Team supports CallOptions::chunks and CallOptions::meanwhile.
  virtual bool takes_chunks() const { return false; }
  // Length of the messages in which long data travels; 0: any.
  virtual size_t piece_bytes() const { return 0; }
  // The shortest chunk, or call, at which an all_reduce reaches about its full speed.
  virtual size_t least_chunk_bytes() const { return 0; }
  // kPeerDied if a member is known to have died without leaving. Does not end the Team.
  virtual Status death() { return {}; }
  // The cause that ended the Team, for the call in progress, which has this CallRecord::number().
  // Ignores the abort of a member that had finished that call: the member has published all that
  // the call needs. With kAnyCall, ignores none. Adopts no abort. Thread-safe.
  virtual Status failure_in(uint64_t /*call*/) { return failure(); }
  // Sets the outermost parent team, whose calls are counted in abort records. Call it before the
  // first call. The parent outlives this Team.
  virtual void set_parent(const Team* /*parent*/) {}
  // How many calls of this Team this rank has finished, for abort records. Thread-safe.
  virtual uint64_t finished_calls() const { return 0; }

 protected:
  // Each collective above checks its arguments, makes the record of the call, and then calls
  // begin_call(), its run_*() and end_call().

  // Called before anything is published. Fails on a dead Team. A parent team replaces
  // `call.options`, which run_*() gets, by the options of its sub-calls.
  virtual Status begin_call(Call& /*call*/) { return {}; }
  // The status of the call, given that of run_*().
  virtual Status end_call(const Status& status) { return status; }
  virtual Status run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                                const Reduction& reduction, const CallOptions& options) = 0;
  virtual Status run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                               const CallOptions& options) = 0;
  virtual Status run_reduce(const std::byte* in, std::byte* out, size_t count,
                            const Reduction& reduction, int root, const CallOptions& options) = 0;
  virtual Status run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                                Counts out_counts, const CallOptions& options) = 0;
  virtual Status run_reduce_scatter(Inputs ins, Counts counts, std::byte* out,
                                    const Reduction& reduction, const CallOptions& options) = 0;
  virtual Status run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                            Counts out_counts, int root, const CallOptions& options) = 0;
  virtual Status run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count,
                             DType dtype, int root, const CallOptions& options) = 0;
  virtual Status run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts,
                                DType dtype, const CallOptions& options) = 0;
  virtual Status run_barrier(const CallOptions& options) = 0;
};

inline constexpr uint64_t kAnyCall = UINT64_MAX;

}  // namespace dscomm
