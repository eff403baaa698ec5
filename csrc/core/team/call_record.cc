#include "core/team/call_record.h"

#include <bit>

#include "core/base/format.h"

namespace dscomm {
namespace {

// The finaliser of MurmurHash3: each input bit affects each output bit.
uint64_t mix(uint64_t h) {
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdull;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ull;
  return h ^ h >> 33;
}

}  // namespace

uint64_t mix_hash(uint64_t hash, uint64_t word) { return mix(mix(hash + 1) ^ word); }

uint64_t hash_counts(std::span<const size_t> counts) {
  uint64_t hash = 0;
  for (size_t count : counts) hash = mix_hash(hash, count);
  return hash;
}

uint64_t hash_text(std::string_view text) {
  uint64_t hash = mix_hash(0, text.size());
  for (unsigned char letter : text) hash = mix_hash(hash, letter);
  return hash != 0 ? hash : 1;
}

CallRecord make_record(Collective kind, DType dtype, size_t count, const CallOptions& options,
                       int root) {
  CallRecord call;
  call.kind = static_cast<uint8_t>(kind);
  call.dtype = static_cast<uint8_t>(dtype);
  call.count = count;
  call.root = root;
  call.part = options.part;
  call.part_count = options.part_count;
  call.is_planned = options.plan != 0;
  call.digest = options.plan;
  return call;
}

CallRecord make_record(Collective kind, const Reduction& reduction, size_t count,
                       const CallOptions& options, int root) {
  CallRecord call = make_record(kind, reduction.dtype, count, options, root);
  call.op = static_cast<uint8_t>(reduction.op);
  // Other operators ignore the factor, so ranks need not agree on it.
  if (reduction.op == ReduceOp::kPremulSum) call.factor = reduction.factor;
  return call;
}

CallRecord as_sub_call(const CallRecord& call, const CallOptions& options) {
  if (options.parent_call == nullptr) return call;
  CallRecord sub_call = *options.parent_call;
  sub_call.parent_number = options.parent_call->number();
  sub_call.digest =
      mix_hash(mix_hash(options.parent_call->digest, options.history), hash_call(0, call));
  return sub_call;
}

uint64_t hash_call(uint64_t before, const CallRecord& call) {
  const uint64_t kinds = uint64_t{call.kind} | uint64_t{call.dtype} << 8 | uint64_t{call.op} << 16 |
                         uint64_t{static_cast<uint32_t>(call.root)} << 32;
  const uint64_t parts = uint64_t{call.part} | uint64_t{call.part_count} << 32;
  // Independent products, for speed: each call computes this hash. An odd factor preserves a
  // difference in one word; differences in several words cancel with probability 2^-64.
  const uint64_t sum = kinds * 0x9e3779b97f4a7c15ull + call.count * 0xc2b2ae3d27d4eb4full +
                       std::bit_cast<uint64_t>(call.factor) * 0x165667b19e3779f9ull +
                       parts * 0xd6e8feb86659fd93ull + call.digest * 0xa0761d6478bd642full +
                       call.parent_number * 0xe7037ed1a0b428dbull;
  return mix(mix(before + call.sequence) ^ mix(sum));
}

std::string describe_call(const CallRecord& call) {
  std::string text = collective_name(static_cast<Collective>(call.kind));
  if (static_cast<Collective>(call.kind) == Collective::kBarrier) return text + "()";
  if (call.is_planned) text += "_caching";
  text += format_text("({}[{}]", dtype_name(static_cast<DType>(call.dtype)),
                      call.count != 0 ? call.count : call.own_count);
  if (call.op != 255) text += format_text(", {}", reduce_op_name(static_cast<ReduceOp>(call.op)));
  if (call.factor != 1.0) text += format_text(", factor {}", call.factor);
  if (call.root >= 0) text += format_text(", root {}", call.root);
  text += ")";
  if (call.part_count != 1)
    text += format_text(" as tensor {} of {}", call.part + 1, call.part_count);
  return text;
}

}  // namespace dscomm
