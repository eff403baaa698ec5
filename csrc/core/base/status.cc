#include "core/base/status.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace dscomm {

const std::string& Status::message() const {
  static const std::string empty;
  return detail_ ? detail_->message : empty;
}

Status system_error(const char* what) {
  return make_status(Code::kResource, "{} failed: {}", what, std::strerror(errno));
}

void check_failed(const char* condition, const char* what, const char* file, int line) {
  std::fprintf(stderr, "dscomm: %s:%d: %s (%s does not hold); this is a defect of dscomm\n", file,
               line, what, condition);
  std::abort();
}

}  // namespace dscomm
