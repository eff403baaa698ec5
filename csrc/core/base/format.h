// Texts, formatted by {fmt}.
//
// format_text() is fmt::format(), compiled once. A file that calls fmt::format() (header-only)
// compiles {fmt} again, which takes some 3 s of CPU time.
#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>
#include <utility>

namespace dscomm {

std::string format_arguments(fmt::string_view text, fmt::format_args arguments);

template <typename... Args>
std::string format_text(fmt::format_string<Args...> text, Args&&... arguments) {
#ifdef FMT_HEADER_ONLY  // in files that include torch, whose headers bring another {fmt}
  return fmt::format(text, std::forward<Args>(arguments)...);
#else
  return format_arguments(text, fmt::make_format_args(arguments...));
#endif
}

// "1, 2, 3" if the separator is ", ".
template <typename Items>
std::string join_text(const Items& items, std::string_view separator) {
  std::string text;
  for (const auto& item : items) {
    if (!text.empty()) text += separator;
    text += format_text("{}", item);
  }
  return text;
}

}  // namespace dscomm
