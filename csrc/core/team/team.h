// Team: a set of ranks that can do collectives. Teams compose.
//
// A Team runs one collective at a time: the engine (or the Team that composes this one) calls it in
// the group's order and never from two threads at once; abort() alone may come from any thread.
// Every call blocks until this rank's part is done, the deadline passes, or a member is known to
// have died, left, aborted or called something else; the status then names the rank at fault. After
// any status that is not OK (but kInvalidArgument and kUnsupported, which are found before anything
// is published) the Team is dead: every later call returns the first cause.
//
// Buffers are plain contiguous memory. Counts are elements, *_bytes are bytes; both are 64-bit and
// may be zero. In-place is expressed by equal pointers. Nothing is written into a caller's buffer
// after the call has returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/types/dtype.h"
#include "core/types/reduce_op.h"

namespace dscomm {

struct CallRecord;
class Team;

// A call whose values are still being made while it is in progress, and whose results are used as
// soon as they are there: a Team that composes another one overlaps its own work with the other's.
// Both functions run on the calling thread, inside the call; when one fails, the call fails with
// that status.
struct Chunks {
  size_t count = 0;  // elements of a chunk, of every block of the call; the last one may be shorter
  // Not 0: where a reduction reads, value i of each block lies at i modulo `ring`, which is two
  // chunks; and `out_ring` says the same of where it writes. `count` is a power of two then, or
  // four times a multiple of the elements of Team::piece_bytes().
  size_t ring = 0, out_ring = 0;
  // Called before values are read, with ends that grow: those before `end` (which may lie behind
  // the last) must be there. The first chunk is there from the beginning. At most two chunks are in
  // progress: one of chunk k + 2 is asked for once those of chunk k are read no more, and take()
  // has been told of it. Empty where all values are there.
  std::function<Status(size_t end)> make;
  // Called once all results before `end` are there and the values before it are read no more. Where
  // a call is short this may be left out; the results are there when it returns. May be empty.
  std::function<Status(size_t end)> take;
};

// What every collective is told besides its buffers.
struct CallOptions {
  Deadline deadline;
  // Position in a coalesced list; ranks whose lists differ in length are told so.
  uint32_t part = 0;
  uint32_t part_count = 1;
  // Set by a Team that composes this one: its own call, of which this call is a piece. It is part
  // of what members must agree on, because pieces may look alike though the calls they belong to
  // differ, and what errors show.
  const CallRecord* whole = nullptr;
  // With it: a hash of the calls before `whole`, which members must also agree on. A rank that
  // needs no data from others may have finished a call in which they differ.
  uint64_t history = 0;
  // And itself: what ends it ends this call, whose waits ask look() now and then. Who waits in one
  // of its Teams may hear of a fault only through another one.
  Team* composer = nullptr;
  // For a Team that takes_chunks(): of an all_reduce, a reduce, a reduce_scatter, an all_gather or
  // a broadcast. The same count on all ranks.
  const Chunks* chunks = nullptr;
  // For a gather, a scatter or an all_to_all: the domain of each rank, or null. Ranks of one domain
  // exchange no elements in this call. Other Teams compare the call inside the domains, so this
  // Team may compare only ranks that exchange elements, and wait only for these.
  const std::vector<int>* domains = nullptr;
  // For a Team that takes_chunks(), with `domains`; may be null. Called once, on the calling
  // thread, after this rank has begun to send and before it waits, unless the call has failed by
  // then. When it fails, the call fails with that status.
  const std::function<Status()>* meanwhile = nullptr;
  // Not 0: an all_reduce that will be made again, with as many values of the same kind; a Team may
  // keep what it prepares for it. Part of what members must agree on.
  uint64_t plan = 0;
};

class Team {
 public:
  virtual ~Team() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // One line for people: "shm, 4 ranks", "hierarchical: 2 x shm(4)".
  virtual std::string describe() const = 0;

  // out[i] = reduction over the ranks of in[i], the same bits on every rank. in may equal out.
  virtual Status all_reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                            const CallOptions& options) = 0;

  // Every rank's buffer becomes the root's. count and dtype must agree on all ranks.
  virtual Status broadcast(void* buffer, size_t count, DType dtype, int root,
                           const CallOptions& options) = 0;

  // As all_reduce, but only the root's out is written (others may pass null, and their in is kept).
  virtual Status reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                        int root, const CallOptions& options) = 0;

  // outs[k] (out_counts[k] elements) becomes rank k's in. Counts may differ from rank to rank, but
  // a rank's count must be what the others expect of it (else kMismatch).
  // in may equal outs[rank()].
  virtual Status all_gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                            std::span<const size_t> out_counts, const CallOptions& options) = 0;

  // out becomes the reduction over the ranks of their ins[rank()]. counts[k] elements belong to
  // rank k and must agree on all ranks. out may equal ins[rank()].
  virtual Status reduce_scatter(std::span<const void* const> ins, std::span<const size_t> counts,
                                void* out, const Reduction& reduction,
                                const CallOptions& options) = 0;

  // The root's outs[k] becomes rank k's in. outs and out_counts are empty elsewhere. in may equal
  // outs[root] on the root.
  virtual Status gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                        std::span<const size_t> out_counts, int root,
                        const CallOptions& options) = 0;

  // Rank k's out becomes the root's ins[k]. ins and in_counts are empty elsewhere. out may equal
  // ins[root] on the root.
  virtual Status scatter(std::span<const void* const> ins, std::span<const size_t> in_counts,
                         void* out, size_t count, DType dtype, int root,
                         const CallOptions& options) = 0;

  // outs[k] becomes rank k's ins[rank()]. in_counts[k] here must equal out_counts[rank()] on k
  // (else kMismatch, before anything is copied between the two). ins and outs do not overlap.
  virtual Status all_to_all(std::span<const void* const> ins, std::span<const size_t> in_counts,
                            std::span<void* const> outs, std::span<const size_t> out_counts,
                            DType dtype, const CallOptions& options) = 0;

  // Returns when every member has called it.
  virtual Status barrier(const CallOptions& options) = 0;

  // Ends the Team for every member with this cause. Any thread; does not block.
  virtual void abort(const Status& cause) = 0;

  // What ended the Team, or OK while it lives. Takes over a member's abort, and then always says
  // the same; death is not looked for. Any thread. Cheap.
  virtual Status failure() = 0;

  // Says that the process of this rank is about to end without having left, for an unhandled
  // exception of that type or, where it is empty, for none that is known. Later calls still work,
  // until the process is gone. Any thread.
  virtual void note_end(const std::string& exception) { (void)exception; }

  // Says that this rank makes no more calls, and compares, without waiting, its calls with what the
  // other members left behind: kMismatch if some member's differ, which nobody has been told yet.
  // The last call, on the thread that makes the calls; the destructor leaves as well.
  virtual Status leave() { return {}; }

  // The rest is for a Team that this one composes or is composed of, on the thread that calls it.

  // Of the outermost Team, from the thread of the call in progress: asks the other members, without
  // waiting, whether their last calls, this one included, differ from this rank's, which ends the
  // Team; see FailureDetector::compare_calls(). Does nothing if the Team cannot.
  virtual void compare_calls(bool always) { (void)always; }
  // Whether CallOptions::chunks and CallOptions::meanwhile are heeded.
  virtual bool takes_chunks() const { return false; }
  // Length of the messages that carry long data; 0: any.
  virtual size_t piece_bytes() const { return 0; }
  // The shortest chunk, or call, with which an all_reduce reaches about its full speed.
  virtual size_t least_chunk_bytes() const { return 0; }
  // kPeerDied when a member is known to have died without leaving; ends nothing.
  virtual Status death() { return {}; }
  // What has ended the Team, for a call of this number (CallRecord::number()) that is in progress.
  // An abort of a member that had finished that call before is left aside, as the member has
  // published all that the call needs of it; kAnyCall leaves nothing aside. Takes nothing over. Any
  // thread.
  virtual Status look(uint64_t call) {
    (void)call;
    return failure();
  }
  // Of the outermost Team that this one is a part of: its calls are counted in abort records.
  // Before the first call; it lives as long as this one.
  virtual void set_composer(const Team* composer) { (void)composer; }
  // How many calls are finished on this rank, for that. Any thread.
  virtual uint64_t finished_calls() const { return 0; }
};

inline constexpr uint64_t kAnyCall = UINT64_MAX;

}  // namespace dscomm
