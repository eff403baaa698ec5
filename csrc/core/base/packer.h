// Packer encodes numbers and texts, one after another, and Unpacker decodes them. For values that
// ranks exchange rarely. Unpacker checks lengths. Numbers below 128 take one byte. pack() encodes a
// struct, and unpack() decodes it.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/base/status.h"

namespace dscomm {

class Packer {
 public:
  Packer& number(uint64_t value);
  Packer& index(int value) { return number(static_cast<uint64_t>(value + 1)); }  // >= -1
  Packer& real(double value) { return number(std::bit_cast<uint64_t>(value)); }
  Packer& text(std::string_view value);
  Packer& status(const Status& value) {
    return number(static_cast<uint64_t>(value.code())).text(value.message());
  }
  // Encodes the bytes of a value as they lie in memory.
  template <typename T>
  Packer& bytes(const T& value) {
    return text({reinterpret_cast<const char*>(&value), sizeof value});
  }
  // Encodes each value with pack_value().
  template <typename... Values>
  Packer& fields(const Values&... values);
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Missing numbers read as 0, indices as -1, texts as "". Functions with a parameter are called like
// those of Packer, so that one template can list a struct's fields for encoding and decoding.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : rest_(bytes) {}
  uint64_t number();
  std::string text();
  Unpacker& index(int& value) {
    value = static_cast<int>(number()) - 1;
    return *this;
  }
  Unpacker& real(double& value) {
    value = std::bit_cast<double>(number());
    return *this;
  }
  // Cuts the text to the size of the array, which stays NUL-terminated.
  template <size_t N>
  Unpacker& text(char (&value)[N]) {
    value[text().copy(value, N - 1)] = '\0';
    return *this;
  }
  Unpacker& status(Status& value);
  template <typename T>
  Unpacker& bytes(T& value) {
    const std::string memory = text();
    good_ = good_ && memory.size() == sizeof value;
    if (good_) std::memcpy(&value, memory.data(), sizeof value);
    return *this;
  }
  template <typename... Values>
  Unpacker& fields(Values&... values);
  // The number of entries that follow, checked against the remaining bytes.
  uint64_t count();
  // Whether no field was missing or malformed, and no bytes are left.
  bool whole() const { return good_ && rest_.empty(); }

 private:
  std::string_view take(uint64_t bytes);
  std::string_view rest_;
  bool good_ = true;
};

// Encodes a number, a text, a list, or a struct. A struct has a tuple `kFields` of pointers to its
// members, in the order in which they are encoded.
template <typename T>
void pack_value(Packer& packer, const T& value) {
  if constexpr (requires { T::kFields; }) {
    std::apply([&](auto... field) { (pack_value(packer, value.*field), ...); }, T::kFields);
  } else if constexpr (std::is_same_v<T, std::string>) {
    packer.text(value);
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    packer.number(static_cast<uint64_t>(value));
  } else {
    packer.number(value.size());
    for (const auto& entry : value) pack_value(packer, entry);
  }
}

template <typename T>
void unpack_value(Unpacker& unpacker, T* value) {
  if constexpr (requires { T::kFields; }) {
    std::apply([&](auto... field) { (unpack_value(unpacker, &(value->*field)), ...); }, T::kFields);
  } else if constexpr (std::is_same_v<T, std::string>) {
    *value = unpacker.text();
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    *value = static_cast<T>(unpacker.number());
  } else {
    value->resize(unpacker.count());
    for (auto& entry : *value) unpack_value(unpacker, &entry);
  }
}

template <typename T>
std::string pack(const T& value) {
  Packer packer;
  pack_value(packer, value);
  return packer.take();
}

// False if `bytes` are not a packed T.
template <typename T>
bool unpack(std::string_view bytes, T* value) {
  Unpacker unpacker(bytes);
  unpack_value(unpacker, value);
  return unpacker.whole();
}

template <typename... Values>
Packer& Packer::fields(const Values&... values) {
  (pack_value(*this, values), ...);
  return *this;
}

template <typename... Values>
Unpacker& Unpacker::fields(Values&... values) {
  (unpack_value(*this, &values), ...);
  return *this;
}

// An error: `what`, which another process sent, could not be decoded.
Status malformed_value(std::string_view what);

}  // namespace dscomm
