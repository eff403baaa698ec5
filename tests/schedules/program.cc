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

// None, those that fit a slot, one more, a page, and many rounds with small_settings().
constexpr int kCounts[] = {0, 1, 13, 14, 15, 100, 300, 1500, 4000};
constexpr size_t kSmallCounts = 5;
// For a message: more cells than a ring has.
constexpr int kLongMessage = 9000;

// What a program's steps have in common. Many similar calls in one group reuse slots, buffers and
// cells while some rank may still read them; consecutive groups reuse the memory of a group that
// some rank has yet to leave.
enum class Shape { kMixed, kOneRoot, kOnePair, kShortLives };

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
  constexpr Shape kShapes[] = {Shape::kMixed,   Shape::kMixed,   Shape::kMixed,
                               Shape::kOneRoot, Shape::kOnePair, Shape::kShortLives};
  const Shape shape = kShapes[below(std::size(kShapes))];
  const bool lives_are_short = shape == Shape::kShortLives;
  const bool is_mixed = shape == Shape::kMixed;
  const int further_groups = is_mixed ? below(3) : lives_are_short ? 2 : below(2);
  for (int more = 0; more < further_groups; ++more) {
    std::vector<int> members = everyone;
    std::shuffle(members.begin(), members.end(), generator);
    members.resize(static_cast<size_t>(2 + below(static_cast<uint64_t>(program.ranks - 1))));
    std::sort(members.begin(), members.end());
    program.groups.push_back(members);
  }

  std::vector<bool> is_made(program.groups.size(), false);
  const int length = is_mixed ? 3 + below(14) : 12 + below(20);
  const int usual_root = below(static_cast<uint64_t>(program.ranks));
  const auto is_member = [&](const std::vector<int>& members, int rank) {
    return std::find(members.begin(), members.end(), rank) != members.end();
  };
  while (static_cast<int>(program.steps.size()) < length) {
    Step step;
    step.group = is_mixed || lives_are_short || below(8) == 0 ? below(program.groups.size()) : 0;
    const auto group = static_cast<size_t>(step.group);
    const std::vector<int>& members = program.groups[group];
    if (!is_made[group]) {
      step.kind = Kind::kMake;
      is_made[group] = true;
      program.steps.push_back(step);
      continue;
    }
    const int choice = is_mixed ? below(20) : below(80);
    if (choice < 9)
      step.kind = static_cast<Kind>(choice);
    else if (choice < 12)
      step.kind = Kind::kBroadcast;
    else if (choice < 17)
      step.kind = Kind::kMessage;
    else if (choice < 18)
      step.kind = Kind::kDestroy;
    else if (choice < 20)
      step.kind = Kind::kSleep;
    else if (lives_are_short && choice < 45)
      step.kind = Kind::kDestroy;
    else if (shape == Shape::kOnePair)
      step.kind = Kind::kMessage;
    else
      step.kind = choice < 65 ? Kind::kBroadcast : Kind::kScatter;
    if (step.kind == Kind::kDestroy) is_made[group] = false;
    step.root = members[static_cast<size_t>(below(members.size()))];
    if (!is_mixed && below(16) != 0 && is_member(members, usual_root)) step.root = usual_root;
    do step.peer = members[static_cast<size_t>(below(members.size()))];
    while (step.peer == step.root);
    const int next = (usual_root + 1) % program.ranks;
    if (shape == Shape::kOnePair && step.root == usual_root && is_member(members, next))
      step.peer = next;
    const bool is_small = shape == Shape::kOneRoot && below(4) != 0;
    step.count = kCounts[below(is_small ? kSmallCounts : std::size(kCounts))];
    if (step.kind == Kind::kMessage && below(8) == 0) step.count = kLongMessage;
    step.queued = below(4) == 0;
    step.pooled = below(3) == 0;
    step.any_source = below(3) == 0;
    step.blocking = step.kind == Kind::kMessage && !step.queued && below(2) == 0;
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
    if (step.blocking) text += " blocking";
    if (step.kind == Kind::kMessage && step.any_source) text += " any source";
  }
  return text;
}

}  // namespace dscomm::schedule
