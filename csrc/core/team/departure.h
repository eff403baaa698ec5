// Departure: how a rank is gone that has not died, as the errors of collectives and messages say
// it. It left its group, or its process ended in order and noted how; see Team::note_end().
#pragma once

#include <optional>
#include <string>

namespace dscomm {

struct Departure {
  // The type of the unhandled exception that ended the process; empty where it ended without one,
  // and nothing where the rank left before.
  std::optional<std::string> exception;

  // "left the group", "ended without destroy_process_group()", "was ended by an unhandled
  // ValueError".
  std::string how() const;
  // What to look at; `rule` is what the ranks should have done where it was no exception.
  std::string advice(const std::string& rule = "every rank must make the same calls") const;
};

}  // namespace dscomm
