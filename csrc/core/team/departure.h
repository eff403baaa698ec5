// Departure: how a rank that has not died is gone, for errors of collectives and messages. It left
// its group, or its process ended and noted how; see Team::note_end().
#pragma once

#include <optional>
#include <string>

namespace dscomm {

struct Departure {
  // The type of the unhandled exception that ended the process; empty if it ended without one;
  // nothing if the rank had left before.
  std::optional<std::string> exception;

  // "left the group", "ended without destroy_process_group()", "was ended by an unhandled
  // ValueError".
  std::string how() const {
    if (!exception) return "left the group";
    if (exception->empty()) return "ended without destroy_process_group()";
    return "was ended by an unhandled " + *exception;
  }
  // What the user should check. If there was no exception, `rule` is the rule that the ranks have
  // broken.
  std::string advice(const std::string& rule = "every rank must make the same calls") const {
    if (!exception) return rule;
    if (exception->empty()) return "see its output for an error; " + rule;
    return "see its output for the traceback";
  }
};

}  // namespace dscomm
