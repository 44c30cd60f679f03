// What:    how this library reports: a code with a message that names the thing, its value and its
//          bound. Nothing throws but what the standard library throws for want of memory.
// Ownership: values; they own their text.
// Threads: as std::string.
// Example: const auto model = carrel::Model::Load(path);
//          if (!model.ok()) std::fprintf(stderr, "%s\n", model.status().message().c_str());
//          // examples/01_prefill.cc
#pragma once

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "carrel/export.h"

namespace carrel {
inline namespace api {

// The numbers of google.rpc.Code.
enum class StatusCode : int32_t {
  kOk = 0,
  kCancelled = 1,  // by a callback of the caller's
  kUnknown = 2,
  kInvalidArgument = 3,  // names the argument and what it may be
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,   // a limit, a full disk, no memory
  kFailedPrecondition = 9,  // another model's context, a locked store
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,  // no server, or no GPU
  kDataLoss = 15,     // damaged: what was asked for was not answered
  kUnauthenticated = 16,
};

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value, or why there is none. Reading the value of one that failed ends the program.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(Status status) : status_(std::move(status)) {  // NOLINT: as return values convert
    if (status_.ok()) status_ = Status(StatusCode::kInternal, "no value, and no error either");
  }
  Result(T value) : value_(std::move(value)) {}  // NOLINT: likewise
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& operator*() & { return Value(); }
  const T& operator*() const& { return const_cast<Result*>(this)->Value(); }
  T&& operator*() && { return std::move(Value()); }
  T* operator->() { return &Value(); }
  const T* operator->() const { return &const_cast<Result*>(this)->Value(); }

 private:
  T& Value() {
    if (!value_.has_value()) std::abort();
    return *value_;
  }
  Status status_;
  std::optional<T> value_;
};

}  // namespace api
}  // namespace carrel
