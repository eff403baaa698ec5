// Checks every collective of any Team against a plain reference.
//
// A test passes a function `run_ranks`, which makes a new Team for each of `ranks` ranks, calls the
// given body with each rank's Team, all at the same time, and returns when every body has. The
// ranks must be threads of this process.
//
//   check_every_collective(4, run_ranks): collectives x dtypes x ops x sizes x roots x in place
//   check_same_bits(4, run_ranks): random data; the same bits on every rank
//   check_disagreements(4, run_ranks): ranks that make different calls all get an error
//
// Values are small whole numbers whose sums and products are exact in the accumulator's type, so
// the reference does not depend on a Team's order of reduction. float16 and bfloat16 cannot hold
// most of the results, so a Team that rounds more than once is detected.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <complex>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "code_name.h"
#include "core/reduce/reduce.h"
#include "core/team/call_record.h"
#include "core/team/team.h"

namespace dscomm::testing {

using RankBody = std::function<void(Team&)>;
using RunRanks = std::function<void(const RankBody&)>;

// How much the checks try. The environment variable TEST_MATRIX=full or reduced sets it; the drill
// has full.
//
// - full: everything
// - usual: with more than four ranks one dtype, since it makes no difference to them
// - reduced: also one dtype of each width, the operators that Teams handle differently, fewer
//   disagreements, and fewer numbers of ranks. Arithmetic has no races, so this is usual under a
//   sanitizer, where calls are many times slower.
enum class Matrix { kReduced, kUsual, kFull };

inline Matrix matrix() {
  static const Matrix chosen = [] {
    const char* variable = std::getenv("TEST_MATRIX");
    const std::string wish = variable == nullptr ? "" : variable;
    if (wish == "full") return Matrix::kFull;
    if (wish == "reduced") return Matrix::kReduced;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return Matrix::kReduced;
#else
    return Matrix::kUsual;
#endif
  }();
  return chosen;
}

inline bool matrix_is_reduced() { return matrix() == Matrix::kReduced; }

inline bool is_in_matrix(DType dtype) {
  return !matrix_is_reduced() || dtype == DType::kUInt8 || dtype == DType::kBFloat16 ||
         dtype == DType::kFloat32 || dtype == DType::kComplex128;
}

inline bool is_in_matrix(ReduceOp op) {
  return !matrix_is_reduced() || op == ReduceOp::kSum || op == ReduceOp::kAvg ||
         op == ReduceOp::kPremulSum || op == ReduceOp::kMax;
}

inline std::vector<DType> all_dtypes() {
  std::vector<DType> dtypes;
  for (int value = 0; value < kDTypeCount; ++value) dtypes.push_back(static_cast<DType>(value));
  return dtypes;
}

// The dtypes of a test that are in the matrix, or else its first one.
inline std::vector<DType> dtypes_in_matrix(const std::vector<DType>& dtypes) {
  std::vector<DType> chosen;
  for (DType dtype : dtypes)
    if (is_in_matrix(dtype)) chosen.push_back(dtype);
  if (chosen.empty()) chosen.push_back(dtypes.front());
  return chosen;
}

struct ReferenceOptions {
  std::vector<DType> dtypes = all_dtypes();
  std::vector<size_t> counts = {0, 1, 3, 1000};
  std::chrono::milliseconds timeout{
      60000};  // for every call; long, for sanitizers on busy machines
};

// Thrown inside a body to end a rank whose Team has failed.
struct RankStopped {};

// Memory with guards on both sides, filled so that an unwritten element is noticed.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(size_t bytes) : bytes_(bytes), memory_(bytes + 2 * kGuardBytes, kGuard) {
    std::fill_n(data(), bytes, std::byte{0xEE});
  }
  std::byte* data() { return memory_.data() + kGuardBytes; }
  const std::byte* data() const { return memory_.data() + kGuardBytes; }
  size_t bytes() const { return bytes_; }
  bool guards_are_intact() const {
    auto is_guard = [](std::byte byte) { return byte == kGuard; };
    return std::all_of(memory_.begin(), memory_.begin() + kGuardBytes, is_guard) &&
           std::all_of(memory_.end() - kGuardBytes, memory_.end(), is_guard);
  }

 private:
  static constexpr size_t kGuardBytes = 64;
  static constexpr std::byte kGuard{0xA5};
  size_t bytes_;
  std::vector<std::byte> memory_;
};

// Writes a whole number of at most 8 bits (float16: 11) and a sign. Integers wrap it, bool takes
// its lowest bit, float8 its bits, and a complex number also gets an imaginary part.
inline void store_value(DType dtype, std::byte* at, int value) {
  auto put = [at](auto element) { std::memcpy(at, &element, sizeof element); };
  auto float16 = [](int whole) {
    uint16_t sign = whole < 0 ? 0x8000 : 0;
    auto magnitude = static_cast<unsigned>(std::abs(whole));
    if (magnitude == 0) return sign;
    auto exponent = static_cast<unsigned>(std::bit_width(magnitude)) - 1;
    return static_cast<uint16_t>(sign | (exponent + 15) << 10 |
                                 ((magnitude << (10 - exponent)) & 0x3ff));
  };
  auto imaginary = [](int whole) { return whole % 2 == 0 ? 1 : 2; };
  switch (dtype) {
    case DType::kBool:
      return put(static_cast<uint8_t>(value & 1));
    case DType::kUInt8:
    case DType::kInt8:
      return put(static_cast<int8_t>(value));
    case DType::kUInt16:
    case DType::kInt16:
      return put(static_cast<int16_t>(value));
    case DType::kUInt32:
    case DType::kInt32:
      return put(static_cast<int32_t>(value));
    case DType::kUInt64:
    case DType::kInt64:
      return put(static_cast<int64_t>(value));
    case DType::kFloat16:
      return put(float16(value));
    case DType::kBFloat16:
      return put(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16));
    case DType::kFloat32:
      return put(static_cast<float>(value));
    case DType::kFloat64:
      return put(static_cast<double>(value));
    case DType::kComplex64:
      return put(
          std::complex<float>(static_cast<float>(value), static_cast<float>(imaginary(value))));
    case DType::kComplex128:
      return put(std::complex<double>(value, imaginary(value)));
    default:
      return put(static_cast<uint8_t>(value));
  }
}

// The value of rank `rank` at element `index`. `salt` distinguishes calls.
inline int value_of(const Reduction& reduction, int rank, size_t index, unsigned salt) {
  unsigned mixed = (static_cast<unsigned>(rank) * 2654435761u) ^
                   (static_cast<unsigned>(index) * 40503u + salt * 97u);
  mixed = (mixed ^ mixed >> 15) * 2246822519u;
  mixed ^= mixed >> 13;
  // Factors of 1 to 3 keep the products of a dozen ranks exact in float32. Other values use all
  // bits of the dtype, so that it cannot hold the sum of two.
  unsigned bound = reduction.dtype == DType::kFloat16 ? 2048 : 256;
  int magnitude =
      static_cast<int>(reduction.op == ReduceOp::kProduct ? 1 + mixed % 3 : mixed % bound);
  bool negative =
      (mixed >> 20 & 1) != 0 &&
      (is_floating(reduction.dtype) || is_complex(reduction.dtype) || is_integral(reduction.dtype));
  return negative ? -magnitude : magnitude;
}

// Compares bytes first; a zero of a complex product may have either sign.
inline bool elements_are_equal(DType dtype, const std::byte* a, const std::byte* b, size_t count) {
  size_t bytes = count * dtype_bytes(dtype);
  if (bytes == 0 || std::memcmp(a, b, bytes) == 0) return true;
  auto equal_as = [&](auto zero) {
    using Element = decltype(zero);
    std::vector<Element> left(count), right(count);
    std::memcpy(left.data(), a, bytes);
    std::memcpy(right.data(), b, bytes);
    return left == right;
  };
  if (dtype == DType::kComplex64) return equal_as(std::complex<float>());
  if (dtype == DType::kComplex128) return equal_as(std::complex<double>());
  return false;
}

// One rank's side of the checks.
class ReferenceRank {
 public:
  ReferenceRank(Team& team, const ReferenceOptions& options)
      : team_(team), options_(options), finished_(team.finished_calls()) {}

  // `plan` as in CallOptions.
  void check_all_reduce(const Reduction& reduction, size_t count, bool in_place,
                        uint64_t plan = 0) {
    begin("all_reduce", reduction, count,
          std::string(in_place ? "in place" : "") + (plan != 0 ? " planned" : ""));
    GuardedBuffer in = input(reduction, rank(), count, salt_), out(in.bytes());
    GuardedBuffer& result = in_place ? in : out;
    CallOptions options = call_options();
    options.plan = plan;
    finish(team_.all_reduce(in.data(), result.data(), count, reduction, options));
    expect(reduction.dtype, result, reduced(reduction, count, salt_), count);
    if (!in_place) expect_unchanged(in, reduction, count, salt_);
  }

  void check_reduce(const Reduction& reduction, size_t count, int root, bool in_place) {
    begin("reduce", reduction, count, "to " + std::to_string(root) + (in_place ? " in place" : ""));
    GuardedBuffer in = input(reduction, rank(), count, salt_), out(in.bytes());
    bool is_root = rank() == root;
    GuardedBuffer& result = in_place ? in : out;
    finish(team_.reduce(in.data(), is_root ? result.data() : nullptr, count, reduction, root,
                        call_options()));
    if (is_root) expect(reduction.dtype, result, reduced(reduction, count, salt_), count);
    if (!is_root || !in_place) expect_unchanged(in, reduction, count, salt_);
  }

  void check_broadcast(DType dtype, size_t count, int root) {
    Reduction moved{dtype};
    begin("broadcast", moved, count, "from " + std::to_string(root));
    GuardedBuffer buffer(count * dtype_bytes(dtype));
    if (rank() == root) buffer = input(moved, root, count, salt_);
    finish(team_.broadcast(buffer.data(), count, dtype, root, call_options()));
    expect(dtype, buffer, input(moved, root, count, salt_), count);
  }

  void check_all_gather(DType dtype, const std::vector<size_t>& counts, bool in_place) {
    Reduction moved{dtype};
    begin("all_gather", moved, own(counts), in_place ? "in place" : "");
    GuardedBuffer in = input(moved, rank(), own(counts), salt_);
    std::vector<GuardedBuffer> outs = buffers(dtype, counts);
    if (in_place) std::copy_n(in.data(), in.bytes(), outs[me()].data());
    finish(team_.all_gather(in_place ? outs[me()].data() : in.data(), own(counts), dtype,
                            pointers(outs), counts, call_options()));
    expect_from_all(moved, outs, counts, 0);
  }

  void check_reduce_scatter(const Reduction& reduction, const std::vector<size_t>& counts,
                            bool in_place) {
    begin("reduce_scatter", reduction, own(counts), in_place ? "in place" : "");
    std::vector<GuardedBuffer> ins = inputs(reduction, counts);
    GuardedBuffer out(ins[me()].bytes());
    GuardedBuffer& result = in_place ? ins[me()] : out;
    finish(team_.reduce_scatter(const_pointers(ins), counts, result.data(), reduction,
                                call_options()));
    expect(reduction.dtype, result, reduced(reduction, own(counts), salt_for(rank())), own(counts));
  }

  void check_gather(DType dtype, const std::vector<size_t>& counts, int root, bool in_place) {
    Reduction moved{dtype};
    begin("gather", moved, own(counts),
          "to " + std::to_string(root) + (in_place ? " in place" : ""));
    GuardedBuffer in = input(moved, rank(), own(counts), salt_);
    bool is_root = rank() == root;
    std::vector<GuardedBuffer> outs;
    if (is_root) outs = buffers(dtype, counts);
    if (is_root && in_place) std::copy_n(in.data(), in.bytes(), outs[me()].data());
    finish(team_.gather(is_root && in_place ? outs[me()].data() : in.data(), own(counts), dtype,
                        pointers(outs), is_root ? counts : std::vector<size_t>(), root,
                        call_options()));
    if (is_root) expect_from_all(moved, outs, counts, 0);
  }

  void check_scatter(DType dtype, const std::vector<size_t>& counts, int root, bool in_place) {
    Reduction moved{dtype};
    begin("scatter", moved, own(counts),
          "from " + std::to_string(root) + (in_place ? " in place" : ""));
    bool is_root = rank() == root;
    std::vector<GuardedBuffer> ins;
    if (is_root) ins = inputs(moved, counts);
    GuardedBuffer out(own(counts) * dtype_bytes(dtype));
    GuardedBuffer& result = is_root && in_place ? ins[me()] : out;
    finish(team_.scatter(const_pointers(ins), is_root ? counts : std::vector<size_t>(),
                         result.data(), own(counts), dtype, root, call_options()));
    expect(dtype, result, input(moved, root, own(counts), salt_for(rank())), own(counts));
  }

  // count_between(source, destination): the elements that go from one to the other.
  void check_all_to_all(DType dtype, const std::function<size_t(int, int)>& count_between) {
    Reduction moved{dtype};
    std::vector<size_t> in_counts, out_counts;
    for (int k = 0; k < team_.size(); ++k) {
      in_counts.push_back(count_between(rank(), k));
      out_counts.push_back(count_between(k, rank()));
    }
    begin("all_to_all", moved, in_counts[0], "");
    std::vector<GuardedBuffer> ins = inputs(moved, in_counts), outs = buffers(dtype, out_counts);
    finish(team_.all_to_all(const_pointers(ins), in_counts, pointers(outs), out_counts, dtype,
                            call_options()));
    expect_from_all(moved, outs, out_counts, salt_for(rank()) - salt_);
  }

  void check_barrier() {
    begin("barrier", {}, 0, "");
    finish(team_.barrier(call_options()));
  }

  CallOptions call_options() const {
    CallOptions options{Deadline::after(options_.timeout)};
    return options;
  }
  int rank() const { return team_.rank(); }

 private:
  size_t me() const { return static_cast<size_t>(rank()); }
  size_t own(const std::vector<size_t>& counts) const { return counts[me()]; }
  // The salt of the block for rank k.
  unsigned salt_for(int k) const { return salt_ + 1000u + static_cast<unsigned>(k); }

  void begin(const char* collective, const Reduction& reduction, size_t count,
             const std::string& more) {
    salt_ += 7919;
    what_ = team_.describe() + ": " + collective + " " + dtype_name(reduction.dtype) + " " +
            reduce_op_name(reduction.op) + " of " + std::to_string(count) + " " + more + ", rank " +
            std::to_string(rank());
  }

  void finish(const Status& status) {
    if (status.ok()) {
      // If it does not count, a later abort would end the call on ranks that are still in it.
      const uint64_t finished = team_.finished_calls();
      if (team_.size() > 1 && finished == finished_) wrong("it does not count as finished");
      finished_ = finished;
      return;
    }
    ADD_FAILURE() << what_ << ": " << code_name(status.code()) << ": " << status.message();
    throw RankStopped();
  }

  // Ends the Team after a few wrong results: more would say nothing new.
  void wrong(const std::string& how) {
    ADD_FAILURE() << what_ << ": " << how;
    if (++wrong_count_ < 5) return;
    team_.abort(make_status(Code::kAborted, "the test has seen enough wrong results"));
    throw RankStopped();
  }

  GuardedBuffer input(const Reduction& reduction, int source, size_t count, unsigned salt) const {
    size_t element_bytes = dtype_bytes(reduction.dtype);
    GuardedBuffer buffer(count * element_bytes);
    for (size_t i = 0; i < count; ++i)
      store_value(reduction.dtype, buffer.data() + i * element_bytes,
                  value_of(reduction, source, i, salt));
    return buffer;
  }

  std::vector<GuardedBuffer> inputs(const Reduction& reduction,
                                    const std::vector<size_t>& counts) const {
    std::vector<GuardedBuffer> result;
    for (size_t k = 0; k < counts.size(); ++k)
      result.push_back(input(reduction, rank(), counts[k], salt_for(static_cast<int>(k))));
    return result;
  }

  static std::vector<GuardedBuffer> buffers(DType dtype, const std::vector<size_t>& counts) {
    std::vector<GuardedBuffer> result;
    for (size_t count : counts) result.emplace_back(count * dtype_bytes(dtype));
    return result;
  }
  static std::vector<void*> pointers(std::vector<GuardedBuffer>& buffers) {
    std::vector<void*> result;
    for (GuardedBuffer& buffer : buffers) result.push_back(buffer.data());
    return result;
  }
  static std::vector<const void*> const_pointers(const std::vector<GuardedBuffer>& buffers) {
    std::vector<const void*> result;
    for (const GuardedBuffer& buffer : buffers) result.push_back(buffer.data());
    return result;
  }

  GuardedBuffer reduced(const Reduction& reduction, size_t count, unsigned salt) const {
    std::vector<GuardedBuffer> sources;
    for (int source = 0; source < team_.size(); ++source)
      sources.push_back(input(reduction, source, count, salt));
    std::vector<const void*> from = const_pointers(sources);
    GuardedBuffer result(count * dtype_bytes(reduction.dtype));
    if (count > 0)
      reduce_scalar(result.data(), from.data(), team_.size(), count, reduction, team_.size());
    return result;
  }

  void expect(DType dtype, const GuardedBuffer& got, const GuardedBuffer& expected, size_t count) {
    if (!got.guards_are_intact()) wrong("wrote outside of the result");
    if (elements_are_equal(dtype, got.data(), expected.data(), count)) return;
    size_t element_bytes = dtype_bytes(dtype), i = 0;
    while (elements_are_equal(dtype, got.data() + i * element_bytes,
                              expected.data() + i * element_bytes, 1))
      ++i;
    wrong("element " + std::to_string(i) + " is " +
          hex(got.data() + i * element_bytes, element_bytes) + ", expected " +
          hex(expected.data() + i * element_bytes, element_bytes));
  }

  void expect_unchanged(const GuardedBuffer& in, const Reduction& reduction, size_t count,
                        unsigned salt) {
    GuardedBuffer before = input(reduction, rank(), count, salt);
    if (!in.guards_are_intact() || std::memcmp(in.data(), before.data(), in.bytes()) != 0)
      wrong("the input was changed");
  }

  void expect_from_all(const Reduction& moved, const std::vector<GuardedBuffer>& outs,
                       const std::vector<size_t>& counts, unsigned salt_offset) {
    for (size_t k = 0; k < counts.size(); ++k)
      expect(moved.dtype, outs[k],
             input(moved, static_cast<int>(k), counts[k], salt_ + salt_offset), counts[k]);
  }

  static std::string hex(const std::byte* at, size_t bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string text;
    for (size_t i = 0; i < bytes; ++i) {
      text += digits[static_cast<unsigned>(at[i]) >> 4];
      text += digits[static_cast<unsigned>(at[i]) & 15];
    }
    return text + " in memory";
  }

  Team& team_;
  const ReferenceOptions& options_;
  unsigned salt_ = 0;
  int wrong_count_ = 0;
  uint64_t finished_ = 0;
  std::string what_;
};

inline std::vector<Reduction> legal_reductions(const std::vector<DType>& dtypes) {
  std::vector<Reduction> reductions;
  for (DType dtype : dtypes) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      Reduction reduction{dtype, static_cast<ReduceOp>(op), 1.5};
      if (is_in_matrix(reduction.op) && check_reduction(reduction).ok())
        reductions.push_back(reduction);
    }
  }
  return reductions;
}

// The same count for all ranks, and different counts with some zeros.
inline std::vector<std::vector<size_t>> count_layouts(int ranks, size_t count) {
  auto n = static_cast<size_t>(ranks);
  std::vector<size_t> uneven(n);
  for (size_t k = 0; k < n; ++k) uneven[k] = count * (3 * k + 2) / 4 % (count + 1);
  std::vector<size_t> only_last(n, 0);
  only_last[n - 1] = count;
  return {std::vector<size_t>(n, count), uneven, only_last};
}

inline void check_reductions(ReferenceRank& rank, int ranks, const ReferenceOptions& options) {
  int root = 0;
  for (const Reduction& reduction : legal_reductions(options.dtypes)) {
    for (size_t count : options.counts) {
      for (bool in_place : {false, true}) {
        rank.check_all_reduce(reduction, count, in_place);
        rank.check_all_reduce(reduction, count, in_place, 1 + count);
        rank.check_reduce(reduction, count, root++ % ranks, in_place);
        for (const std::vector<size_t>& counts : count_layouts(ranks, count))
          rank.check_reduce_scatter(reduction, counts, in_place);
      }
    }
  }
}

inline void check_moves(ReferenceRank& rank, int ranks, const ReferenceOptions& options) {
  for (DType dtype : options.dtypes) {
    bool every_root = dtype == options.dtypes.front() || dtype == DType::kFloat32;
    int first = every_root ? 0 : static_cast<int>(dtype) % ranks;
    int last = every_root ? ranks - 1 : first;
    for (size_t count : options.counts) {
      for (int root = first; root <= last; ++root) rank.check_broadcast(dtype, count, root);
      for (const std::vector<size_t>& counts : count_layouts(ranks, count)) {
        for (bool in_place : {false, true}) {
          rank.check_all_gather(dtype, counts, in_place);
          for (int root = first; root <= last; ++root) {
            rank.check_gather(dtype, counts, root, in_place);
            rank.check_scatter(dtype, counts, root, in_place);
          }
        }
      }
      rank.check_all_to_all(dtype, [&](int, int) { return count; });
      rank.check_all_to_all(dtype, [&](int source, int destination) {
        auto pair = static_cast<size_t>(source * ranks + destination);
        return count * (5 * pair + 3) / 7 % (count + 1);
      });
    }
    rank.check_barrier();
  }
}

// A Team whose barrier does nothing passes check_moves; an early release fails here.
inline void check_barrier_holds(Team& team, std::atomic<int>& entered, const CallOptions& options) {
  for (int round = 1; round <= 20; ++round) {
    entered.fetch_add(1);
    Status status = team.barrier(options);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_GE(entered.load(), round * team.size()) << "a rank left barrier " << round << " early";
  }
}

inline void check_every_collective(int ranks, const RunRanks& run_ranks,
                                   ReferenceOptions options = {}) {
  options.dtypes = dtypes_in_matrix(options.dtypes);
  if (matrix() != Matrix::kFull && ranks > 4) options.dtypes.resize(1);
  std::atomic<int> bodies = 0, entered = 0;
  run_ranks([&](Team& team) {
    ++bodies;
    ASSERT_EQ(team.size(), ranks);
    ReferenceRank rank(team, options);
    check_barrier_holds(team, entered, rank.call_options());
    try {
      check_reductions(rank, ranks, options);
      check_moves(rank, ranks, options);
    } catch (const RankStopped&) {
    }
  });
  EXPECT_EQ(bodies.load(), ranks) << "run_ranks must call the body once for each rank";
}

inline void check_same_bits(int ranks, const RunRanks& run_ranks,
                            const ReferenceOptions& options = {}) {
  constexpr size_t kCount = 5003;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kAvg, ReduceOp::kPremulSum}) {
      if (!is_in_matrix(dtype) || !is_in_matrix(op)) continue;
      Reduction reduction{dtype, op, 0.3};
      std::vector<std::vector<std::byte>> results(static_cast<size_t>(ranks));
      run_ranks([&](Team& team) {
        std::vector<std::byte> data(kCount * dtype_bytes(dtype));
        // Random bits between 0.5 and 2 in every format: the sums round at every step.
        uint32_t state = 12345u + static_cast<uint32_t>(team.rank()) * 7919u;
        for (size_t i = 0; i < kCount; ++i) {
          state = state * 1664525u + 1013904223u;
          double value = 0.5 + static_cast<double>(state >> 8) / (1 << 24);
          std::byte* at = data.data() + i * dtype_bytes(dtype);
          if (dtype == DType::kFloat64) {
            std::memcpy(at, &value, 8);
          } else if (auto single = static_cast<float>(value); dtype == DType::kFloat32) {
            std::memcpy(at, &single, 4);
          } else {
            // The upper half of a float32 from 0.5 to 1.5 is a bfloat16; for float16, any bits
            // between those of 0.5 and 2.
            auto upper = static_cast<uint16_t>(std::bit_cast<uint32_t>(single) >> 16);
            auto half = static_cast<uint16_t>(0x3800 + (state >> 8) % 0x0800);
            std::memcpy(at, dtype == DType::kBFloat16 ? &upper : &half, 2);
          }
        }
        CallOptions call{Deadline::after(options.timeout)};
        Status status = team.all_reduce(data.data(), data.data(), kCount, reduction, call);
        ASSERT_TRUE(status.ok()) << status.message();
        results[static_cast<size_t>(team.rank())] = std::move(data);
      });
      for (int rank = 1; rank < ranks; ++rank)
        EXPECT_EQ(results[static_cast<size_t>(rank)], results[0])
            << dtype_name(dtype) << " " << reduce_op_name(op) << ": ranks 0 and " << rank
            << " differ";
    }
  }
}

// A call that some ranks make wrongly: `odd` is true on those ranks.
struct Disagreement {
  const char* name;
  std::function<Status(Team& team, bool odd, const CallOptions& options)> call;
};

inline std::vector<Disagreement> disagreements() {
  // Large enough for any of the calls; not read afterwards.
  static constexpr size_t kMost = 4096;
  struct Data {
    explicit Data(Team& team)
        : in(kMost * 8),
          out(kMost * 8),
          size(static_cast<size_t>(team.size())),
          ins(size, in.data()),
          blocks(size, std::vector<std::byte>(kMost * 8)) {
      for (std::vector<std::byte>& block : blocks) outs.push_back(block.data());
    }
    std::vector<std::byte> in, out;
    size_t size;
    std::vector<const void*> ins;
    std::vector<std::vector<std::byte>> blocks;
    std::vector<void*> outs;
  };
  auto counts = [](Team& team, size_t count) {
    return std::vector<size_t>(static_cast<size_t>(team.size()), count);
  };
  auto all_reduce = [](Team& team, size_t count, const Reduction& reduction,
                       const CallOptions& options) {
    Data data(team);
    return team.all_reduce(data.in.data(), data.out.data(), count, reduction, options);
  };
  auto broadcast = [](Team& team, size_t count, int root, const CallOptions& options) {
    Data data(team);
    return team.broadcast(data.in.data(), count, DType::kFloat32, root, options);
  };
  auto gather = [counts](Team& team, size_t count, size_t expected, int root,
                         const CallOptions& options) {
    Data data(team);
    bool is_root = team.rank() == root;
    std::vector<size_t> out_counts = counts(team, expected);
    if (is_root) out_counts[static_cast<size_t>(root)] = count;
    return team.gather(data.in.data(), count, DType::kFloat32,
                       is_root ? std::span<void* const>(data.outs) : std::span<void* const>(),
                       is_root ? std::span<const size_t>(out_counts) : std::span<const size_t>(),
                       root, options);
  };
  auto scatter = [counts](Team& team, size_t count, size_t sent, int root,
                          const CallOptions& options) {
    Data data(team);
    bool is_root = team.rank() == root;
    std::vector<size_t> in_counts = counts(team, sent);
    if (is_root) in_counts[static_cast<size_t>(root)] = count;
    return team.scatter(
        is_root ? std::span<const void* const>(data.ins) : std::span<const void* const>(),
        is_root ? std::span<const size_t>(in_counts) : std::span<const size_t>(), data.out.data(),
        count, DType::kFloat32, root, options);
  };
  const Reduction sum{DType::kFloat32, ReduceOp::kSum};
  const Reduction max{DType::kFloat32, ReduceOp::kMax};
  const Reduction of_int{DType::kInt32, ReduceOp::kSum};

  return {
      {"all_reduce of another count",
       [=](Team& team, bool odd, const CallOptions& options) {
         return all_reduce(team, odd ? 101 : 100, sum, options);
       }},
      {"all_reduce of several chunks against one",
       [=](Team& team, bool odd, const CallOptions& options) {
         return all_reduce(team, odd ? 4096 : 16, sum, options);
       }},
      {"all_reduce of nothing",
       [=](Team& team, bool odd, const CallOptions& options) {
         return all_reduce(team, odd ? 0 : 5, sum, options);
       }},
      {"an empty call that the others do not make",
       [=](Team& team, bool odd, const CallOptions& options) {
         if (odd) DSCOMM_RETURN_IF_ERROR(all_reduce(team, 0, sum, options));
         return all_reduce(team, 5, sum, options);
       }},
      {"all_reduce with another op",
       [=](Team& team, bool odd, const CallOptions& options) {
         return all_reduce(team, 100, odd ? max : sum, options);
       }},
      {"all_reduce of another dtype",
       [=](Team& team, bool odd, const CallOptions& options) {
         return all_reduce(team, 100, odd ? of_int : sum, options);
       }},
      {"all_reduce with another factor",
       [=](Team& team, bool odd, const CallOptions& options) {
         return all_reduce(team, 100, {DType::kFloat32, ReduceOp::kPremulSum, odd ? 2.0 : 0.5},
                           options);
       }},
      {"a list of another length",
       [=](Team& team, bool odd, const CallOptions& options) {
         CallOptions part = options;
         part.part_count = odd ? 3 : 2;
         return all_reduce(team, 100, sum, part);
       }},
      {"all_reduce by another plan",
       [=](Team& team, bool odd, const CallOptions& options) {
         CallOptions planned = options;
         planned.plan = odd ? 3 : 2;
         return all_reduce(team, 100, sum, planned);
       }},
      {"all_reduce by a plan and without",
       [=](Team& team, bool odd, const CallOptions& options) {
         CallOptions planned = options;
         planned.plan = odd ? 3 : 0;
         return all_reduce(team, 100, sum, planned);
       }},
      {"a piece of another call",
       [=](Team& team, bool odd, const CallOptions& options) {
         CallRecord whole =
             make_record(Collective::kBarrier, DType::kUInt8, odd ? 77 : 78, options);
         CallOptions piece = options;
         piece.parent_call = &whole;
         return all_reduce(team, 100, sum, piece);
       }},
      {"broadcast against all_reduce",
       [=](Team& team, bool odd, const CallOptions& options) {
         return odd ? broadcast(team, 100, 0, options) : all_reduce(team, 100, sum, options);
       }},
      {"all_gather against all_reduce",
       [=](Team& team, bool odd, const CallOptions& options) {
         if (!odd) return all_reduce(team, 4, sum, options);
         Data data(team);
         return team.all_gather(data.in.data(), 4, DType::kFloat32, data.outs, counts(team, 4),
                                options);
       }},
      {"barrier against broadcast",
       [=](Team& team, bool odd, const CallOptions& options) {
         return odd ? team.barrier(options) : broadcast(team, 100, 0, options);
       }},
      {"broadcast from another root",
       [=](Team& team, bool odd, const CallOptions& options) {
         return broadcast(team, 100, odd ? team.size() - 1 : 0, options);
       }},
      {"broadcast of another count",
       [=](Team& team, bool odd, const CallOptions& options) {
         return broadcast(team, odd ? 4096 : 64, 0, options);
       }},
      {"reduce to another root",
       [=](Team& team, bool odd, const CallOptions& options) {
         Data data(team);
         return team.reduce(data.in.data(), data.out.data(), 100, sum, odd ? 1 : 0, options);
       }},
      {"all_gather of another count",
       [=](Team& team, bool odd, const CallOptions& options) {
         Data data(team);
         // The odd ranks expect one element more from rank 0, which sends it if it is odd.
         std::vector<size_t> out_counts = counts(team, 10);
         if (odd) ++out_counts[0];
         size_t count = out_counts[static_cast<size_t>(team.rank())];
         return team.all_gather(data.in.data(), count, DType::kFloat32, data.outs, out_counts,
                                options);
       }},
      {"reduce_scatter with other counts",
       [=](Team& team, bool odd, const CallOptions& options) {
         Data data(team);
         std::vector<size_t> each = counts(team, 10);
         if (odd) std::swap(++each[0], each[1]);
         return team.reduce_scatter(data.ins, each, data.out.data(), sum, options);
       }},
      {"gather to another root",
       [=](Team& team, bool odd, const CallOptions& options) {
         return gather(team, 10, 10, odd ? 1 : 0, options);
       }},
      {"gather of a count that the root does not expect",
       [=](Team& team, bool odd, const CallOptions& options) {
         int root = team.size() / 2;
         bool is_root = team.rank() == root;
         return gather(team, odd && !is_root ? 11 : 10, odd && is_root ? 12 : 10, root, options);
       }},
      {"scatter from another root",
       [=](Team& team, bool odd, const CallOptions& options) {
         return scatter(team, 10, 10, odd ? 1 : 0, options);
       }},
      {"scatter of a count that a rank does not expect",
       [=](Team& team, bool odd, const CallOptions& options) {
         int root = team.size() / 2;
         bool is_root = team.rank() == root;
         return scatter(team, odd && !is_root ? 11 : 10, odd && is_root ? 12 : 10, root, options);
       }},
      {"all_to_all of counts that do not match",
       [=](Team& team, bool odd, const CallOptions& options) {
         Data data(team);
         std::vector<size_t> in_counts = counts(team, 10), out_counts = counts(team, 10);
         size_t self = static_cast<size_t>(team.rank()), next = (self + 1) % data.size;
         if (odd) ++in_counts[next];  // the next rank does not expect it, odd or not
         return team.all_to_all(data.ins, in_counts, data.outs, out_counts, DType::kFloat32,
                                options);
       }},
  };
}

// Ranks make different calls, then a barrier: by then all have got kMismatch, well in time.
inline void check_disagreements(
    int ranks, const RunRanks& run_ranks,
    std::chrono::milliseconds timeout = std::chrono::milliseconds(60000)) {
  std::vector<std::pair<std::string, std::function<bool(int)>>> odd_ones = {
      {"rank 0", [](int rank) { return rank == 0; }},
      {"the last rank", [=](int rank) { return rank == ranks - 1; }},
      {"the upper half", [=](int rank) { return rank >= (ranks + 1) / 2; }},
      {"every other rank", [](int rank) { return rank % 2 == 1; }},
  };
  if (matrix_is_reduced()) odd_ones = {odd_ones[0], odd_ones[2]};
  for (const Disagreement& disagreement : disagreements()) {
    for (const auto& [who, is_odd] : odd_ones) {
      std::mutex mutex;
      std::vector<std::string> wrong;
      run_ranks([&](Team& team) {
        Status status = disagreement.call(team, is_odd(team.rank()), {Deadline::after(timeout)});
        if (status.ok()) status = team.barrier({Deadline::after(timeout)});
        if (status.code() == Code::kMismatch) return;
        std::lock_guard lock(mutex);
        wrong.push_back("rank " + std::to_string(team.rank()) + ": " + code_name(status.code()) +
                        ": " + status.message());
      });
      for (const std::string& line : wrong)
        ADD_FAILURE() << disagreement.name << ", " << who << " being odd: " << line;
    }
  }
}

}  // namespace dscomm::testing
