// The log: each message is one write to standard error, with the rank as prefix. Messages less
// severe than the level in DSCOMM_DEBUG are dropped.
#pragma once

#include <string>
#include <utility>

#include "core/base/format.h"

namespace dscomm {

enum class LogLevel { kError = 0, kWarn = 1, kInfo = 2, kDebug = 3 };

// Process-wide: ranks that are threads of one process share these.
void set_log_level(const std::string& name);  // "error", "warn", "info", "debug"
void set_log_rank(int rank);                  // -1: not known yet
bool log_enabled(LogLevel level);

void write_log_line(LogLevel level, const std::string& text);

// Formats a line and writes it to standard error; does neither if the level is not enabled.
template <typename... Args>
void log_line(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(level)) write_log_line(level, format_text(format, std::forward<Args>(args)...));
}

}  // namespace dscomm
