// Departure: how a rank has gone without dying, for the error texts of other ranks. Either the rank
// left its group, or its process announced that it is about to end (Team::note_end()).
#pragma once

#include <optional>
#include <string>

namespace dscomm {

// The advice in messages about a process that died or exited.
inline constexpr char kDeathAdvice[] =
    "; look for its own error, a signal or the out-of-memory killer in its output and the system "
    "log";

struct Departure {
  // The type of the unhandled exception that ended the process; empty if none is known;
  // nullopt if the rank had left its group.
  std::optional<std::string> exception;

  // "left the group", "ended without destroy_process_group()", "was ended by an unhandled
  // ValueError".
  std::string how() const {
    if (!exception) return "left the group";
    if (exception->empty()) return "ended without destroy_process_group()";
    return "was ended by an unhandled " + *exception;
  }
  // The advice to the user. It contains `rule`, which the ranks have broken, unless an exception
  // ended the process.
  std::string advice(const std::string& rule = "every rank must make the same calls") const {
    if (!exception) return rule;
    if (exception->empty()) return "see its output for an error; " + rule;
    return "see its output for the traceback";
  }
};

}  // namespace dscomm
