// The log: each message is one write to standard error, with the rank as prefix, if its level is at
// or above DSCOMM_DEBUG.
#pragma once

#include <string>

namespace dscomm {

enum class LogLevel { kError = 0, kWarn = 1, kInfo = 2, kDebug = 3 };

// Process-wide: ranks that are threads of one process share these.
void set_log_level(const std::string& name);  // "error", "warn", "info", "debug"
void set_log_rank(int rank);                  // -1: not known yet
bool log_enabled(LogLevel level);

void log_line(LogLevel level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace dscomm
