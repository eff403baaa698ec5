// Packer and Unpacker: encode numbers and texts, one after another, for values that ranks exchange
// once. Lengths are checked. Small numbers take one byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dscomm {

class Packer {
 public:
  Packer& number(uint64_t value);
  Packer& text(std::string_view value);
  Packer& texts(const std::vector<std::string>& values);
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Missing fields read as 0 or "".
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : rest_(bytes) {}
  uint64_t number();
  std::string text();
  std::vector<std::string> texts();
  // The number of entries that follow, checked against the remaining bytes.
  uint64_t count();
  // Whether no field was missing and nothing is left.
  bool whole() const { return good_ && rest_.empty(); }

 private:
  std::string_view take(uint64_t bytes);
  std::string_view rest_;
  bool good_ = true;
};

}  // namespace dscomm
