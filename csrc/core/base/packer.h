// Packer and Unpacker: numbers and texts, one after the other, for what ranks tell each other once:
// never parsed, and checked by length. Small numbers take a byte.
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

// What is not there reads as 0 or "".
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : rest_(bytes) {}
  uint64_t number();
  std::string text();
  std::vector<std::string> texts();
  // How many entries follow: never more than there can be.
  uint64_t count();
  // Whether everything was there, and nothing is left.
  bool whole() const { return good_ && rest_.empty(); }

 private:
  std::string_view take(uint64_t bytes);
  std::string_view rest_;
  bool good_ = true;
};

}  // namespace dscomm
