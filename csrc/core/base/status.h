// Status and Result<T>: how the core reports errors.
//
// The core throws no exceptions. A function that can fail returns Status, or Result<T> if it has a
// value; both are [[nodiscard]]. An OK status is one null pointer, so success costs nothing. The
// c10d glue (csrc/torch) turns a status into an exception, in one place.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/base/format.h"

namespace dscomm {

enum class Code {
  kOk,
  kInvalidArgument,  // the caller's mistake, seen on this rank alone
  kUnsupported,      // a valid request that dscomm does not support
  kMismatch,         // ranks made different calls
  kPeerDied,         // a process ended without leaving the group
  kPeerLeft,         // a rank left the group before it published the awaited data
  kTimeout,          // the deadline passed
  kAborted,          // the group was aborted by its user
  kResource,         // memory, descriptors or another limit
  kInternal,         // an invariant of dscomm does not hold
};

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(Code code, std::string message)
      : detail_(std::make_shared<const Detail>(Detail{code, std::move(message)})) {}

  bool ok() const { return detail_ == nullptr; }
  explicit operator bool() const { return ok(); }
  Code code() const { return detail_ ? detail_->code : Code::kOk; }
  // Empty when OK.
  const std::string& message() const;

 private:
  struct Detail {
    Code code;
    std::string message;
  };
  std::shared_ptr<const Detail> detail_;
};

// Formats the message with format_text().
template <typename... Args>
Status make_status(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return Status(code, format_text(format, std::forward<Args>(args)...));
}

// kResource, with the text of errno: "fallocate of shared memory failed: Cannot allocate memory".
Status system_error(const char* what);

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}  // must not be OK

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }

 private:
  Status status_;
  std::optional<T> value_;
};

// Checks an invariant, also in release builds. If it fails, prints it and aborts the process.
#define DSCOMM_CHECK(condition, what)                                               \
  do {                                                                              \
    if (!(condition)) ::dscomm::check_failed(#condition, what, __FILE__, __LINE__); \
  } while (0)

[[noreturn]] void check_failed(const char* condition, const char* what, const char* file, int line);

#define DSCOMM_RETURN_IF_ERROR(expression)                                      \
  do {                                                                          \
    if (::dscomm::Status status_ = (expression); !status_.ok()) return status_; \
  } while (0)

// DSCOMM_ASSIGN_OR_RETURN(int fd, open(path)): takes the value of a Result, or returns its status.
#define DSCOMM_ASSIGN_OR_RETURN(target, ...) \
  DSCOMM_ASSIGN_OR_RETURN_(DSCOMM_JOIN(result_, __LINE__), target, (__VA_ARGS__))
#define DSCOMM_ASSIGN_OR_RETURN_(result, target, expression) \
  auto result = expression;                                  \
  if (!result.ok()) return result.status();                  \
  target = std::move(result).value()
#define DSCOMM_JOIN(one, other) DSCOMM_JOIN_(one, other)
#define DSCOMM_JOIN_(one, other) one##other

}  // namespace dscomm
