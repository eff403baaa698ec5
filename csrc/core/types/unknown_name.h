// Names for enumerators that came from a peer and are out of range.
#pragma once

#include <array>
#include <cstdint>

namespace dscomm {

// "unknown(77)", with static storage, so that the name is a plain C string for any value.
inline const char* unknown_name(uint8_t value) {
  using Name = std::array<char, sizeof("unknown(255)")>;
  static constexpr std::array<Name, 256> kNames = [] {
    std::array<Name, 256> names{};
    for (int number = 0; number < 256; ++number) {
      Name& name = names[number];
      size_t length = 0;
      for (char letter : {'u', 'n', 'k', 'n', 'o', 'w', 'n', '('}) name[length++] = letter;
      if (number >= 100) name[length++] = static_cast<char>('0' + number / 100);
      if (number >= 10) name[length++] = static_cast<char>('0' + number / 10 % 10);
      name[length++] = static_cast<char>('0' + number % 10);
      name[length++] = ')';
    }
    return names;
  }();
  return kNames[value].data();
}

}  // namespace dscomm
