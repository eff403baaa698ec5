#include "program.h"

#include <algorithm>
#include <random>

namespace dscomm::schedule {
namespace {

const char* const kKinds[] = {
    "all_reduce", "broadcast", "reduce",  "all_gather", "reduce_scatter", "gather", "scatter",
    "all_to_all", "barrier",   "message", "make",       "destroy",        "sleep"};
const char* const kFaults[] = {
    "none",         "dies after its last step", "dies",           "aborts", "all lose time",
    "skips a call", "names another root",       "memory is short"};

// None, those in a slot, one more, a page, many rounds of small_settings().
constexpr int kCounts[] = {0, 1, 13, 14, 15, 100, 300, 1500, 4000};

}  // namespace

Program Program::make(uint64_t seed) {
  std::mt19937_64 generator(seed);
  const auto below = [&](uint64_t bound) { return static_cast<int>(generator() % bound); };
  Program program;
  program.seed = seed;
  program.ranks = 2 + below(3);
  program.composed = program.ranks == 4 && below(3) == 0;
  constexpr uint32_t kSwitches[] = {10, 50, 150, 400};
  program.switch_per_mille = kSwitches[below(4)];
  program.stale_per_mille = below(2) == 0 ? 0 : 200;
  if (below(3) == 0) program.slow = below(static_cast<uint64_t>(program.ranks));

  std::vector<int> everyone;
  for (int rank = 0; rank < program.ranks; ++rank) everyone.push_back(rank);
  program.groups.push_back(everyone);
  const int further_groups = below(3);
  for (int more = 0; more < further_groups; ++more) {
    std::vector<int> members = everyone;
    std::shuffle(members.begin(), members.end(), generator);
    members.resize(static_cast<size_t>(2 + below(static_cast<uint64_t>(program.ranks - 1))));
    std::sort(members.begin(), members.end());
    program.groups.push_back(members);
  }

  std::vector<bool> is_made(program.groups.size(), false);
  const int length = 3 + below(14);
  while (static_cast<int>(program.steps.size()) < length) {
    Step step;
    step.group = below(program.groups.size());
    const auto group = static_cast<size_t>(step.group);
    const std::vector<int>& members = program.groups[group];
    if (!is_made[group]) {
      step.kind = Kind::kMake;
      is_made[group] = true;
      program.steps.push_back(step);
      continue;
    }
    const int choice = below(20);
    if (choice < 9)
      step.kind = static_cast<Kind>(choice);
    else if (choice < 12)
      step.kind = Kind::kBroadcast;
    else if (choice < 17)
      step.kind = Kind::kMessage;
    else if (choice < 18)
      step.kind = Kind::kDestroy;
    else
      step.kind = Kind::kSleep;
    if (step.kind == Kind::kDestroy) is_made[group] = false;
    step.root = members[static_cast<size_t>(below(members.size()))];
    do step.peer = members[static_cast<size_t>(below(members.size()))];
    while (step.peer == step.root);
    step.count = kCounts[below(std::size(kCounts))];
    step.queued = below(4) == 0;
    step.pooled = below(3) == 0;
    step.any_source = below(3) == 0;
    program.steps.push_back(step);
  }

  constexpr Fault kMost[] = {Fault::kNone,      Fault::kNone,       Fault::kNone,
                             Fault::kDies,      Fault::kDies,       Fault::kDiesAtTheEnd,
                             Fault::kAborts,    Fault::kSkips,      Fault::kOtherRoot,
                             Fault::kLosesTime, Fault::kShortMemory};
  program.fault = kMost[below(std::size(kMost))];
  program.culprit = below(static_cast<uint64_t>(program.ranks));
  program.moment = generator();
  program.exits = below(2) == 0;
  if (program.fault == Fault::kNone && !program.exits && below(2) == 0) program.slice_ms = 0;
  const bool dies = program.fault == Fault::kDies || program.fault == Fault::kDiesAtTheEnd;
  program.shared = !dies && !program.composed && below(4) == 0;
  return program;
}

std::string Program::describe() const {
  std::string text = std::to_string(ranks) + " ranks" + (composed ? ", composed" : "") +
                     (shared ? ", ranks 0 and 1 in one process" : "") +
                     (exits ? ", ranks exit" : "") + (slice_ms == 0 ? ", sleep until woken" : "") +
                     ", fault: " + kFaults[static_cast<int>(fault)];
  if (fault != Fault::kNone && fault != Fault::kLosesTime && fault != Fault::kShortMemory)
    text += " (rank " + std::to_string(culprit) + ")";
  for (size_t k = 0; k < groups.size(); ++k) {
    text += "\n  group " + std::to_string(k) + ": ranks";
    for (int rank : groups[k]) text += " " + std::to_string(rank);
  }
  for (size_t k = 0; k < steps.size(); ++k) {
    const Step& step = steps[k];
    text += "\n  " + std::to_string(k) + ": " + kKinds[static_cast<int>(step.kind)] + " group " +
            std::to_string(step.group);
    if (step.kind == Kind::kMake || step.kind == Kind::kDestroy) continue;
    text += " root " + std::to_string(step.root);
    if (step.kind == Kind::kMessage) text += " to " + std::to_string(step.peer);
    text += " count " + std::to_string(step.count);
    if (step.queued) text += " queued";
    if (step.pooled) text += " pooled";
    if (step.kind == Kind::kMessage && step.any_source) text += " any source";
  }
  return text;
}

}  // namespace dscomm::schedule
