// ThreadTeam: a Team whose ranks are threads that meet at a board. Simple and strict: in every
// collective every rank waits for every other one, and all compare their calls. It allows tests of
// Teams that compose Teams, without any transport.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/reduce/reduce.h"
#include "core/team/call_record.h"
#include "core/team/team.h"

namespace dscomm::testing {

using Bytes = std::vector<std::byte>;

// One rank's data for one collective: a copy, so that in-place calls need no order.
struct Post {
  std::string description;    // must be equal on all ranks
  std::vector<Bytes> blocks;  // for all ranks, or one for each rank
};

class ThreadBoard {
 public:
  explicit ThreadBoard(int size) : size_(size) {}

  using Posts = std::shared_ptr<const std::vector<Post>>;

  // Returns all ranks' posts once all are there. `meanwhile` may be null.
  Result<Posts> meet(uint64_t sequence, int rank, Post post, const Deadline& deadline,
                     const std::function<Status()>* meanwhile) {
    std::unique_lock lock(mutex_);
    if (!failure_.ok()) return failure_;
    std::shared_ptr<Call>& entry = calls_[sequence];
    if (entry == nullptr) entry = std::make_shared<Call>(size_);
    std::shared_ptr<Call> call = entry;
    call->posts[static_cast<size_t>(rank)] = std::move(post);
    call->present[static_cast<size_t>(rank)] = true;
    if (++call->present_count == size_) {
      compare(*call);
      calls_.erase(sequence);
      changed_.notify_all();
    }
    if (meanwhile != nullptr && failure_.ok()) {
      ++meanwhile_calls_;
      lock.unlock();
      const Status status = (*meanwhile)();
      lock.lock();
      if (!status.ok()) fail_locked(status);
    }
    auto over = [&] { return call->present_count == size_ || !failure_.ok(); };
    while (!over()) {
      int64_t left_ns = deadline.remaining_ns();
      if (left_ns <= 0) {
        fail_locked(make_status(Code::kTimeout, "rank {} waited {} ms for{}: {}", rank,
                                deadline.timeout_ms(), absent(*call),
                                call->posts[static_cast<size_t>(rank)].description));
        break;
      }
      changed_.wait_for(lock, std::chrono::nanoseconds(left_ns), over);
    }
    if (!failure_.ok()) return failure_;
    return Posts(call, &call->posts);
  }

  void fail(const Status& cause) {
    std::lock_guard lock(mutex_);
    fail_locked(cause);
  }

  Status failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  int meanwhile_calls() const {
    std::lock_guard lock(mutex_);
    return meanwhile_calls_;
  }

 private:
  struct Call {
    explicit Call(int size)
        : posts(static_cast<size_t>(size)), present(static_cast<size_t>(size)) {}
    std::vector<Post> posts;
    std::vector<bool> present;
    int present_count = 0;
  };

  void compare(const Call& call) {
    for (int rank = 1; rank < size_; ++rank) {
      const std::string& mine = call.posts[static_cast<size_t>(rank)].description;
      if (mine == call.posts[0].description) continue;
      fail_locked(make_status(Code::kMismatch, "rank 0 called {}, rank {} called {}",
                              call.posts[0].description, rank, mine));
    }
  }

  std::string absent(const Call& call) const {
    std::string names;
    for (int rank = 0; rank < size_; ++rank)
      if (!call.present[static_cast<size_t>(rank)]) names += " " + std::to_string(rank);
    return names;
  }

  void fail_locked(const Status& cause) {
    if (failure_.ok()) failure_ = cause;
    changed_.notify_all();
  }

  const int size_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::shared_ptr<Call>> calls_;
  Status failure_;
  int meanwhile_calls_ = 0;
};

class ThreadTeam final : public Team {
 public:
  ThreadTeam(std::shared_ptr<ThreadBoard> board, int rank, int size, bool take_chunks = false)
      : board_(std::move(board)), rank_(rank), size_(size), takes_chunks_(take_chunks) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t finished_calls() const override { return sequence_; }
  std::string describe() const override { return "threads, " + std::to_string(size_) + " ranks"; }

  bool takes_chunks() const override { return takes_chunks_; }

  void abort(const Status& cause) override { board_->fail(cause); }
  Status failure() override { return board_->failure(); }

 private:
  Status run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                        const Reduction& reduction, const CallOptions& options) override {
    if (options.chunks != nullptr) return all_reduce_chunks(in, out, count, reduction, options);
    auto posts = meet(call_of("all_reduce", reduction) + " of " + std::to_string(count),
                      {bytes_of(in, count, reduction.dtype)}, options);
    if (!posts.ok()) return posts.status();
    reduce_blocks(*posts.value(), 0, out, count, reduction);
    return {};
  }

  Status run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                       const CallOptions& options) override {
    if (options.chunks != nullptr) return broadcast_chunks(buffer, count, dtype, root, options);
    auto posts = meet(call_of("broadcast", dtype, root) + " of " + std::to_string(count),
                      {bytes_of(buffer, count, dtype)}, options);
    if (!posts.ok()) return posts.status();
    copy_block(*posts.value(), root, 0, buffer);
    return {};
  }

  Status run_reduce(const std::byte* in, std::byte* out, size_t count, const Reduction& reduction,
                    int root, const CallOptions& options) override {
    if (options.chunks != nullptr)
      return reduce_chunks(in, rank_ == root ? out : nullptr, count, reduction, root, options);
    auto posts = meet(call_of("reduce", reduction, root) + " of " + std::to_string(count),
                      {bytes_of(in, count, reduction.dtype)}, options);
    if (!posts.ok()) return posts.status();
    if (rank_ == root) reduce_blocks(*posts.value(), 0, out, count, reduction);
    return {};
  }

  Status run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                        Counts out_counts, const CallOptions& options) override {
    if (options.chunks != nullptr)
      return all_gather_chunks(in, count, dtype, outs, out_counts, options);
    auto posts = meet(call_of("all_gather", dtype), {bytes_of(in, count, dtype)}, options);
    if (!posts.ok()) return posts.status();
    return copy_from_all(*posts.value(), 0, dtype, outs, out_counts);
  }

  Status run_reduce_scatter(Inputs ins, Counts counts, std::byte* out, const Reduction& reduction,
                            const CallOptions& options) override {
    if (options.chunks != nullptr)
      return reduce_scatter_chunks(ins, counts, out, reduction, options);
    std::string call = call_of("reduce_scatter", reduction) + " of";
    for (size_t count : counts) call += " " + std::to_string(count);
    auto posts = meet(call, blocks_of(ins, counts, reduction.dtype), options);
    if (!posts.ok()) return posts.status();
    reduce_blocks(*posts.value(), rank_, out, counts[static_cast<size_t>(rank_)], reduction);
    return {};
  }

  Status run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                    int root, const CallOptions& options) override {
    auto posts = meet(call_of("gather", dtype, root), {bytes_of(in, count, dtype)}, options);
    if (!posts.ok()) return posts.status();
    if (rank_ != root) return {};
    return copy_from_all(*posts.value(), 0, dtype, outs, out_counts);
  }

  Status run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count, DType dtype,
                     int root, const CallOptions& options) override {
    auto posts = meet(call_of("scatter", dtype, root), blocks_of(ins, in_counts, dtype), options);
    if (!posts.ok()) return posts.status();
    DSCOMM_RETURN_IF_ERROR(expect(*posts.value(), root, rank_, count, dtype));
    copy_block(*posts.value(), root, rank_, out);
    return {};
  }

  Status run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts, DType dtype,
                        const CallOptions& options) override {
    auto posts = meet(call_of("all_to_all", dtype), blocks_of(ins, in_counts, dtype), options);
    if (!posts.ok()) return posts.status();
    return copy_from_all(*posts.value(), rank_, dtype, outs, out_counts);
  }

  Status run_barrier(const CallOptions& options) override {
    return meet("barrier", {}, options).status();
  }

  static std::string call_of(const char* collective, DType dtype, int root = 0) {
    return std::string(collective) + " " + dtype_name(dtype) + " root " + std::to_string(root);
  }
  static std::string call_of(const char* collective, const Reduction& reduction, int root = 0) {
    return call_of(collective, reduction.dtype, root) + " " + reduce_op_name(reduction.op) +
           (reduction.op == ReduceOp::kPremulSum ? " " + std::to_string(reduction.factor) : "");
  }

  static Bytes bytes_of(const void* data, size_t count, DType dtype) {
    Bytes bytes(count * dtype_bytes(dtype));
    if (!bytes.empty()) std::memcpy(bytes.data(), data, bytes.size());
    return bytes;
  }
  static std::vector<Bytes> blocks_of(std::span<const void* const> ins,
                                      std::span<const size_t> counts, DType dtype) {
    std::vector<Bytes> blocks;
    for (size_t rank = 0; rank < ins.size(); ++rank)
      blocks.push_back(bytes_of(ins[rank], counts[rank], dtype));
    return blocks;
  }

  Result<ThreadBoard::Posts> meet(const std::string& call, std::vector<Bytes> blocks,
                                  const CallOptions& options) {
    std::string description = call + ", part " + std::to_string(options.part) + " of " +
                              std::to_string(options.part_count);
    if (options.plan != 0) description += ", plan " + std::to_string(options.plan);
    // The call that this is a piece of is compared as a whole.
    if (options.parent_call != nullptr)
      description += ", a piece of " + std::to_string(hash_call(0, *options.parent_call));
    DSCOMM_CHECK(options.meanwhile == nullptr || takes_chunks_, "it would be forgotten");
    return board_->meet(sequence_++, rank_, {std::move(description), std::move(blocks)},
                        options.deadline, options.meanwhile);
  }

  // A call in rounds of a quarter of a chunk, which delivers results as late as allowed:
  // round(begin, piece, options) makes a round for elements from `begin` on, and deliver() delivers
  // the earliest results not delivered yet.
  template <typename Round, typename Deliver>
  Status by_rounds(size_t longest, const CallOptions& options, const Round& round,
                   const Deliver& deliver) {
    constexpr size_t kLate = 4;
    const Chunks& chunks = *options.chunks;
    const size_t piece = std::max<size_t>(chunks.count / kLate, 1);
    const size_t rounds = (longest + piece - 1) / piece;
    CallOptions one = options;
    one.chunks = nullptr;
    for (size_t number = 0; number < rounds + kLate; ++number) {
      if (number >= kLate && number - kLate < rounds) {
        deliver();
        if (chunks.consume) DSCOMM_RETURN_IF_ERROR(chunks.consume((number - kLate + 1) * piece));
      }
      if (number >= rounds) continue;
      if (chunks.make) DSCOMM_RETURN_IF_ERROR(chunks.make((number + 1) * piece));
      DSCOMM_RETURN_IF_ERROR(round(number * piece, piece, one));
    }
    return {};
  }
  static size_t in_piece(size_t count, size_t begin, size_t piece) {
    return count > begin ? std::min(piece, count - begin) : 0;
  }
  // The destination of a round's results, and the results.
  struct Late {
    void* place;
    Bytes bytes;
  };
  static auto deliver_from(std::deque<std::vector<Late>>& late) {
    return [&late] {
      for (const Late& each : late.front())
        if (!each.bytes.empty()) std::memcpy(each.place, each.bytes.data(), each.bytes.size());
      late.pop_front();
    };
  }

  Status all_reduce_chunks(const void* in, void* out, size_t count, const Reduction& reduction,
                           const CallOptions& options) {
    return reduce_chunks(in, out, count, reduction, -1, options);
  }

  // A negative root means all_reduce.
  Status reduce_chunks(const void* in, void* out, size_t count, const Reduction& reduction,
                       int root, const CallOptions& options) {
    const size_t element_bytes = dtype_bytes(reduction.dtype);
    const auto at = [&](size_t begin, size_t ring) {
      return (ring == 0 ? begin : begin % ring) * element_bytes;
    };
    std::deque<std::vector<Late>> late;
    const auto round = [&](size_t begin, size_t piece, const CallOptions& one) {
      const size_t length = in_piece(count, begin, piece);
      const void* values = static_cast<const std::byte*>(in) + at(begin, options.chunks->ring);
      Late result{static_cast<std::byte*>(out) + at(begin, options.chunks->out_ring),
                  Bytes(length * element_bytes)};
      Status status = root < 0 ? all_reduce(values, result.bytes.data(), length, reduction, one)
                               : reduce(values, result.bytes.data(), length, reduction, root, one);
      if (out == nullptr) result.bytes.clear();
      late.push_back({std::move(result)});
      return status;
    };
    return by_rounds(count, options, round, deliver_from(late));
  }

  Status broadcast_chunks(void* buffer, size_t count, DType dtype, int root,
                          const CallOptions& options) {
    const size_t element_bytes = dtype_bytes(dtype);
    std::deque<std::vector<Late>> late;
    const auto round = [&](size_t begin, size_t piece, const CallOptions& one) {
      const size_t length = in_piece(count, begin, piece);
      std::byte* place = static_cast<std::byte*>(buffer) + begin * element_bytes;
      Late result{place, Bytes(length * element_bytes)};
      if (rank_ == root) std::memcpy(result.bytes.data(), place, result.bytes.size());
      Status status = broadcast(result.bytes.data(), length, dtype, root, one);
      late.push_back({std::move(result)});
      return status;
    };
    return by_rounds(count, options, round, deliver_from(late));
  }

  Status all_gather_chunks(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                           std::span<const size_t> out_counts, const CallOptions& options) {
    const size_t element_bytes = dtype_bytes(dtype);
    std::deque<std::vector<Late>> late;
    const auto round = [&](size_t begin, size_t piece, const CallOptions& one) {
      std::vector<Late> results;
      std::vector<void*> places;
      std::vector<size_t> lengths;
      for (size_t rank = 0; rank < outs.size(); ++rank) {
        lengths.push_back(in_piece(out_counts[rank], begin, piece));
        auto* place = static_cast<std::byte*>(outs[rank]);
        results.push_back({lengths.back() > 0 ? place + begin * element_bytes : nullptr,
                           Bytes(lengths.back() * element_bytes)});
      }
      for (Late& each : results) places.push_back(each.bytes.data());
      const size_t length = in_piece(count, begin, piece);
      const auto* own = static_cast<const std::byte*>(in);
      Status status = all_gather(length > 0 ? own + begin * element_bytes : nullptr, length, dtype,
                                 places, lengths, one);
      late.push_back(std::move(results));
      return status;
    };
    return by_rounds(*std::max_element(out_counts.begin(), out_counts.end()), options, round,
                     deliver_from(late));
  }

  Status reduce_scatter_chunks(std::span<const void* const> ins, std::span<const size_t> counts,
                               void* out, const Reduction& reduction, const CallOptions& options) {
    const size_t element_bytes = dtype_bytes(reduction.dtype);
    const size_t ring = options.chunks->ring;
    std::deque<std::vector<Late>> late;
    const auto round = [&](size_t begin, size_t piece, const CallOptions& one) {
      std::vector<const void*> values;
      std::vector<size_t> lengths;
      for (size_t rank = 0; rank < ins.size(); ++rank) {
        lengths.push_back(in_piece(counts[rank], begin, piece));
        values.push_back(static_cast<const std::byte*>(ins[rank]) +
                         (ring == 0 ? begin : begin % ring) * element_bytes);
      }
      const size_t length = lengths[static_cast<size_t>(rank_)];
      auto* place = static_cast<std::byte*>(out);
      const size_t out_ring = options.chunks->out_ring;
      const size_t written = out_ring == 0 ? begin : begin % out_ring;
      Late result{length > 0 ? place + written * element_bytes : nullptr,
                  Bytes(length * element_bytes)};
      Status status = reduce_scatter(values, lengths, result.bytes.data(), reduction, one);
      late.push_back({std::move(result)});
      return status;
    };
    return by_rounds(*std::max_element(counts.begin(), counts.end()), options, round,
                     deliver_from(late));
  }

  static const Bytes& block(const std::vector<Post>& posts, int rank, int index) {
    return posts[static_cast<size_t>(rank)].blocks.at(static_cast<size_t>(index));
  }

  Status expect(const std::vector<Post>& posts, int rank, int index, size_t count, DType dtype) {
    size_t sent = block(posts, rank, index).size() / dtype_bytes(dtype);
    if (sent == count) return {};
    Status mismatch =
        make_status(Code::kMismatch, "rank {} expects {} from rank {}, which sends {}", rank_,
                    count, rank, sent);
    board_->fail(mismatch);
    return mismatch;
  }

  static void copy_block(const std::vector<Post>& posts, int rank, int index, void* out) {
    const Bytes& bytes = block(posts, rank, index);
    if (!bytes.empty()) std::memcpy(out, bytes.data(), bytes.size());
  }

  Status copy_from_all(const std::vector<Post>& posts, int index, DType dtype,
                       std::span<void* const> outs, std::span<const size_t> out_counts) {
    for (int rank = 0; rank < size_; ++rank)
      DSCOMM_RETURN_IF_ERROR(
          expect(posts, rank, index, out_counts[static_cast<size_t>(rank)], dtype));
    for (int rank = 0; rank < size_; ++rank)
      copy_block(posts, rank, index, outs[static_cast<size_t>(rank)]);
    return {};
  }

  void reduce_blocks(const std::vector<Post>& posts, int index, void* out, size_t count,
                     const Reduction& reduction) {
    std::vector<const void*> sources;
    for (int rank = 0; rank < size_; ++rank) sources.push_back(block(posts, rank, index).data());
    if (count > 0) reduce_scalar(out, sources.data(), size_, count, reduction, size_);
  }

  std::shared_ptr<ThreadBoard> board_;
  const int rank_;
  const int size_;
  const bool takes_chunks_;
  uint64_t sequence_ = 0;
};

// The boards of one test, by name, so that all ranks' factories find the same one.
class ThreadBoards {
 public:
  explicit ThreadBoards(bool take_chunks = false) : take_chunks_(take_chunks) {}

  // This rank's ThreadTeam of `ranks`, which include it.
  std::unique_ptr<Team> make(int rank, std::span<const int> ranks, const std::string& name) {
    int size = static_cast<int>(ranks.size());
    size_t index = 0;
    while (ranks[index] != rank) ++index;
    std::lock_guard lock(mutex_);
    std::shared_ptr<ThreadBoard>& board = boards_[name];
    if (board == nullptr) board = std::make_shared<ThreadBoard>(size);
    return std::make_unique<ThreadTeam>(board, static_cast<int>(index), size, take_chunks_);
  }

  // Counted over all ranks of all Teams.
  int meanwhile_calls() const {
    std::lock_guard lock(mutex_);
    int calls = 0;
    for (const auto& [name, board] : boards_) calls += board->meanwhile_calls();
    return calls;
  }

 private:
  const bool take_chunks_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<ThreadBoard>> boards_;
};

}  // namespace dscomm::testing
