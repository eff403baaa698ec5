#define FMT_HEADER_ONLY
#include "core/base/format.h"

#include <fmt/format.h>

namespace dscomm {

std::string format_arguments(fmt::string_view text, fmt::format_args arguments) {
  return fmt::vformat(text, arguments);
}

}  // namespace dscomm
