#include "core/base/packer.h"

#include <cstring>

namespace dscomm {

Packer& Packer::number(uint64_t value) {
  bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  return *this;
}

Packer& Packer::text(std::string_view value) {
  number(value.size());
  bytes_.append(value);
  return *this;
}

Packer& Packer::texts(const std::vector<std::string>& values) {
  number(values.size());
  for (const std::string& value : values) text(value);
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
  std::string_view bytes = take(sizeof value);
  if (good_) std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

std::string Unpacker::text() { return std::string(take(number())); }

uint64_t Unpacker::count() {
  uint64_t entries = number();
  good_ = good_ && entries <= rest_.size();  // an entry is a byte at least
  return good_ ? entries : 0;
}

std::vector<std::string> Unpacker::texts() {
  std::vector<std::string> values(count());
  for (std::string& value : values) value = text();
  return values;
}

}  // namespace dscomm
