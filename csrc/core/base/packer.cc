#include "core/base/packer.h"

namespace dscomm {

// Seven bits a byte, the lowest first; the eighth bit says whether more bytes follow.
Packer& Packer::number(uint64_t value) {
  for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
  bytes_.push_back(static_cast<char>(value));
  return *this;
}

Packer& Packer::text(std::string_view value) {
  number(value.size());
  bytes_.append(value);
  return *this;
}

std::string_view Unpacker::take(uint64_t bytes) {
  good_ = good_ && bytes <= rest_.size();
  if (!good_) return {};
  std::string_view taken = rest_.substr(0, bytes);
  rest_.remove_prefix(bytes);
  return taken;
}

uint64_t Unpacker::number() {
  uint64_t value = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    const std::string_view byte = take(1);
    if (!good_) return 0;
    const auto bits = static_cast<unsigned char>(byte.front());
    value |= static_cast<uint64_t>(bits & 0x7f) << shift;
    if (bits < 0x80) return value;
  }
  good_ = false;
  return 0;
}

std::string Unpacker::text() { return std::string(take(number())); }

uint64_t Unpacker::count() {
  uint64_t entries = number();
  good_ = good_ && entries <= rest_.size();  // an entry has at least one byte
  return good_ ? entries : 0;
}

Unpacker& Unpacker::status(Status& value) {
  const uint64_t code = number();
  const std::string message = text();
  good_ = good_ && code <= static_cast<uint64_t>(Code::kInternal);
  value = good_ && code != 0 ? Status(static_cast<Code>(code), message) : Status();
  return *this;
}

Status malformed_value(std::string_view what) {
  return make_status(Code::kInternal, "malformed {}; do all ranks run one build of dscomm?", what);
}

}  // namespace dscomm
