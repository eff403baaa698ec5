#include "core/team/call_tally.h"

#include <algorithm>

#include "core/base/format.h"
#include "core/base/log.h"

namespace dscomm {
namespace {

std::string range_text(size_t least_bytes, size_t most_bytes) {
  if (most_bytes == least_bytes) return format_text("{} bytes", most_bytes);
  return format_text("{} to {} bytes", least_bytes, most_bytes);
}

}  // namespace

std::unique_ptr<CallTally> CallTally::make(const std::string& group, const std::string& team) {
  if (!log_enabled(LogLevel::kDebug)) return nullptr;
  return std::make_unique<CallTally>(format_text("group '{}' ({})", group, team));
}

CallTally::~CallTally() {
  for (size_t k = 0; k < tallies_.size(); ++k)
    if (const std::string text = summary(static_cast<Collective>(k + 1)); !text.empty())
      log_line(LogLevel::kDebug, "{}", text);
}

void CallTally::add(Collective kind, const char* algorithm, size_t bytes) {
  current_ = kind;
  std::vector<AlgorithmUse>& uses = of(kind).uses;
  // Compared by address, so equal literals in two files may have two entries.
  const auto use = std::ranges::find(uses, algorithm, &AlgorithmUse::algorithm);
  if (use == uses.end()) {
    uses.push_back({algorithm, 1, bytes, bytes});
    log_line(LogLevel::kDebug, "{}: first {} {}: {} bytes", team_, collective_name(kind), algorithm,
             bytes);
    return;
  }
  ++use->calls;
  use->least_bytes = std::min(use->least_bytes, bytes);
  use->most_bytes = std::max(use->most_bytes, bytes);
}

void CallTally::add_tensor(bool is_in_pool) {
  Tally& tally = of(current_);
  ++tally.tensors;
  if (is_in_pool) ++tally.in_pool;
}

std::string CallTally::summary(Collective kind) const {
  const Tally& tally = tallies_[static_cast<size_t>(kind) - 1];
  if (tally.uses.empty()) return "";
  std::string text = format_text("{}: {}", team_, collective_name(kind));
  const char* separator = ": ";
  for (const AlgorithmUse& use : tally.uses) {
    text += format_text("{}{} {}, {}", separator, use.calls, use.algorithm,
                        range_text(use.least_bytes, use.most_bytes));
    separator = "; ";
  }
  if (tally.tensors > 0)
    text += format_text("; {} of {} large tensors read in place, from the pool", tally.in_pool,
                        tally.tensors);
  return *distance_ == '\0' ? text : text + "; peers: " + distance_;
}

}  // namespace dscomm
