// Durations in messages.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace dscomm {

// "200 ms", "2.5 s", "90 s", "30 min": in minutes if whole and at least 2, else in s from 1 s on.
inline std::string duration_text(int64_t milliseconds) {
  if (milliseconds < 1000) return std::to_string(milliseconds) + " ms";
  if (milliseconds >= 120'000 && milliseconds % 60'000 == 0)
    return std::to_string(milliseconds / 60'000) + " min";
  char text[32];
  std::snprintf(text, sizeof text, "%.15g s", static_cast<double>(milliseconds) / 1000.0);
  return text;
}

}  // namespace dscomm
