#include "core/base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace dscomm {
namespace {

// Relaxed: independent words that order nothing.
std::atomic<int> log_level{static_cast<int>(LogLevel::kWarn)};
std::atomic<int> log_rank{-1};

}  // namespace

void set_log_level(const std::string& name) {
  LogLevel level = LogLevel::kWarn;
  if (name == "error") level = LogLevel::kError;
  if (name == "info") level = LogLevel::kInfo;
  if (name == "debug") level = LogLevel::kDebug;
  log_level.store(static_cast<int>(level), std::memory_order_relaxed);
}

void set_log_rank(int rank) { log_rank.store(rank, std::memory_order_relaxed); }

bool log_enabled(LogLevel level) {
  return static_cast<int>(level) <= log_level.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, const char* format, ...) {
  if (!log_enabled(level)) return;
  static const char* const names[] = {"error", "warning", "info", "debug"};
  char line[1024];
  const int rank = log_rank.load(std::memory_order_relaxed);
  const std::string who = rank < 0 ? "" : " rank " + std::to_string(rank);
  int length = std::snprintf(line, sizeof line, "[dscomm%s pid %d] %s: ", who.c_str(),
                             static_cast<int>(getpid()), names[static_cast<int>(level)]);
  va_list arguments;
  va_start(arguments, format);
  length += std::vsnprintf(line + length, sizeof line - static_cast<size_t>(length) - 1, format,
                           arguments);
  va_end(arguments);
  length = std::min(length, static_cast<int>(sizeof line) - 2);
  line[length++] = '\n';
  // If standard error is closed, there is no place to report it.
  [[maybe_unused]] ssize_t written = ::write(STDERR_FILENO, line, static_cast<size_t>(length));
}

}  // namespace dscomm
