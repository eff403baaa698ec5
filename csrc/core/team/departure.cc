#include "core/team/departure.h"

namespace dscomm {

std::string Departure::how() const {
  if (!exception) return "left the group";
  if (exception->empty()) return "ended without destroy_process_group()";
  return "was ended by an unhandled " + *exception;
}

std::string Departure::advice(const std::string& rule) const {
  if (!exception) return rule;
  if (exception->empty()) return "see its output for an error; " + rule;
  return "see its output for the traceback";
}

}  // namespace dscomm
