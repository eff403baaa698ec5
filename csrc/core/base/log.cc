#include "core/base/log.h"

#include <unistd.h>

#include <atomic>

#include "core/base/format.h"

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

void write_log_line(LogLevel level, const std::string& text) {
  static const char* const names[] = {"error", "warning", "info", "debug"};
  const int rank = log_rank.load(std::memory_order_relaxed);
  const std::string line =
      format_text("[dscomm{} pid {}] {}: {}\n", rank < 0 ? "" : format_text(" rank {}", rank),
                  getpid(), names[static_cast<int>(level)], text);
  // One write, so that lines of several ranks do not mix. A failed write cannot be reported.
  [[maybe_unused]] ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace dscomm
