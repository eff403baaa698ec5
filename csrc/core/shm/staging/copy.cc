// copy(), compiled for every instruction set, like the kernels of core/reduce.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/shm/staging/copy.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
// clang-format on

#include "core/shm/staging/copy.h"

#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace dscomm {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Streams whole cache lines, because a partial line would be read back first. `to` is aligned to 64
// bytes and `bytes` is a multiple of 64.
void stream_lines(uint8_t* to, const uint8_t* from, size_t bytes) {
  const hn::CappedTag<uint8_t, 64> d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < bytes; i += 64)
    for (size_t k = 0; k < 64; k += lanes) hn::Stream(hn::LoadU(d, from + i + k), d, to + i + k);
}

}  // namespace HWY_NAMESPACE
}  // namespace dscomm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dscomm {
namespace {
HWY_EXPORT(stream_lines);
}  // namespace

void finish_copies() { hwy::FlushStream(); }

void copy(void* to, const void* from, size_t bytes, Stores stores) {
  constexpr size_t kLine = 64;
  if (bytes == 0) return;
  if (stores == Stores::kOrdinary || bytes <= kShortCopyBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  auto* out = static_cast<uint8_t*>(to);
  auto* in = static_cast<const uint8_t*>(from);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine;
  std::memcpy(out, in, head);
  const size_t lines = (bytes - head) / kLine * kLine;
  HWY_DYNAMIC_DISPATCH(stream_lines)(out + head, in + head, lines);
  std::memcpy(out + head + lines, in + head + lines, bytes - head - lines);
}

}  // namespace dscomm
#endif  // HWY_ONCE
