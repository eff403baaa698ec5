#include "mpi/mpi_agreement.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "core/base/format.h"
#include "core/reduce/reduce.h"
#include "core/team/mismatch.h"
#include "mpi/mpi_error.h"

namespace dscomm {
namespace {

// A pair of ranks without data weighs 0, so that it can be left out.
uint64_t weigh(uint64_t from, uint64_t to, uint64_t count) {
  if (count == 0) return 0;
  return mix_hash(mix_hash(mix_hash(0, from), to), count);
}

// MPI's reduction of headers: combines `first` into `second`. MPI may pass unaligned memory.
void combine_headers(void* first, void* second, int* count, MPI_Datatype*) {
  for (int i = 0; i < *count; ++i) {
    CallHeader a, b;
    std::byte* result = static_cast<std::byte*>(second) + static_cast<size_t>(i) * sizeof b;
    std::memcpy(&a, static_cast<std::byte*>(first) + static_cast<size_t>(i) * sizeof a, sizeof a);
    std::memcpy(&b, result, sizeof b);
    const HeaderFields& head = a.head;
    // If ranks disagree about the data, the hashes differ and the data is not used.
    const Reduction reduction{static_cast<DType>(head.dtype), static_cast<ReduceOp>(head.op)};
    if (head.count > 0 && head.count == b.head.count && head.dtype == b.head.dtype &&
        head.op == b.head.op && check_reduction(reduction).ok() &&
        head.count * dtype_bytes(reduction.dtype) <= kPiggybackBytes) {
      const void* sources[2] = {a.data.data(), b.data.data()};
      reduce(b.data.data(), sources, 2, head.count, reduction, 1);
    }
    b.head.combine(head);
    std::memcpy(result, &b, sizeof b);
  }
}

struct Side {
  CallRecord call;
  Splits splits;
};

std::vector<Side> decode_sides(std::span<const std::byte> bytes, size_t ranks) {
  std::vector<Side> sides(ranks);
  const std::byte* at = bytes.data();
  auto take = [&at](void* to, size_t length) {
    std::memcpy(to, at, length);
    at += length;
  };
  DSCOMM_CHECK(bytes.size() == ranks * side_bytes(ranks), "sides have one length");
  for (Side& side : sides) {
    side.splits.clear(ranks);
    take(&side.call, sizeof side.call);
    take(side.splits.sends.data(), ranks * sizeof(uint64_t));
    take(side.splits.expects.data(), ranks * sizeof(uint64_t));
  }
  return sides;
}

}  // namespace

void HeaderFields::combine(const HeaderFields& other) {
  hash = std::min(hash, other.hash);
  complement = std::min(complement, other.complement);
  balance += other.balance;
  longest = std::max(longest, other.longest);
}

Result<HeaderType> header_type() {
  static std::mutex mutex;
  static HeaderType made;
  static bool is_made = false;
  std::lock_guard lock(mutex);
  if (is_made) return made;
  int code = MPI_Type_contiguous(sizeof(CallHeader), MPI_BYTE, &made.type);
  if (code != MPI_SUCCESS) return mpi_error("MPI_Type_contiguous", code);
  code = MPI_Type_commit(&made.type);
  if (code != MPI_SUCCESS) return mpi_error("MPI_Type_commit", code);
  code = MPI_Op_create(&combine_headers, /*commute=*/1, &made.op);
  if (code != MPI_SUCCESS) return mpi_error("MPI_Op_create", code);
  is_made = true;
  return made;
}

uint64_t Splits::balance(int rank) const {
  uint64_t sum = 0;
  for (size_t k = 0; k < sends.size(); ++k)
    sum += weigh(static_cast<uint64_t>(rank), k, sends[k]) -
           weigh(k, static_cast<uint64_t>(rank), expects[k]);
  return sum;
}

uint64_t Splits::longest() const {
  uint64_t most = 0;
  for (uint64_t count : sends) most = std::max(most, count);
  for (uint64_t count : expects) most = std::max(most, count);
  return most;
}

std::vector<std::byte> encode_side(const CallRecord& call, const Splits& splits, size_t ranks) {
  std::vector<std::byte> side(side_bytes(ranks));
  std::memcpy(side.data(), &call, sizeof call);
  if (splits.sends.empty()) return side;
  std::byte* sends = side.data() + sizeof call;
  std::memcpy(sends, splits.sends.data(), ranks * sizeof(uint64_t));
  std::memcpy(sends + ranks * sizeof(uint64_t), splits.expects.data(), ranks * sizeof(uint64_t));
  return side;
}

std::string explain_lost_difference(const CallRecord& call) {
  return format_text(
      "{} before call #{} (no longer recorded), or made it with other counts or match_id{}",
      kDifferentCalls, call.number(), kMakeSameCalls);
}

std::string explain_split(Collective kind, const std::string& sender, uint64_t sent,
                          const std::string& receiver, uint64_t expected) {
  if (kind == Collective::kScatter)
    return format_text("{} scatters {} elements to {}, whose output holds {}; make both equal",
                       sender, sent, receiver, expected);
  return format_text("{} sends {} elements to {}, which expects {}; make both equal", sender, sent,
                     receiver, expected);
}

std::string explain_mismatch(std::span<const std::byte> bytes,
                             const std::vector<std::string>& names) {
  const std::vector<Side> sides = decode_sides(bytes, names.size());
  const CallRecord& first = sides[0].call;
  for (size_t k = 1; k < sides.size(); ++k) {
    const CallRecord& other = sides[k].call;
    if (hash_call(0, other) == hash_call(0, first)) continue;
    return describe_mismatch(first, names[0], other, names[k]);
  }
  for (size_t from = 0; from < sides.size(); ++from)
    for (size_t to = 0; to < sides.size(); ++to)
      if (uint64_t sent = sides[from].splits.sends[to], expected = sides[to].splits.expects[from];
          sent != expected)
        return explain_split(static_cast<Collective>(first.kind), names[from], sent, names[to],
                             expected);
  return explain_lost_difference(first);
}

}  // namespace dscomm
