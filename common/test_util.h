// What: what every test shares: a printed seed, the one comparer, matchers of Status. Tests only.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/test_random.h"

namespace carrel {

// RelativeError of common/test_random.h; infinite too if the sizes differ.
inline double RelativeError(absl::Span<const float> out, absl::Span<const float> ref) {
  if (out.size() != ref.size()) return INFINITY;
  return RelativeError(out.data(), ref.data(), static_cast<int64_t>(out.size()));
}

inline const absl::Status& ToStatus(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& ToStatus(const T& status_or) {
  return status_or.status();
}

#define CARREL_ASSERT_OK(expr) ASSERT_EQ(absl::OkStatus(), ::carrel::ToStatus(expr))
#define CARREL_EXPECT_OK(expr) EXPECT_EQ(absl::OkStatus(), ::carrel::ToStatus(expr))

// StatusIs(code, substring of the message)
MATCHER_P2(StatusIs, code, substring,
           absl::StrCat("has code ", absl::StatusCodeToString(code), " and a message with \"",
                        substring, "\"")) {
  const absl::Status& status = ToStatus(arg);
  *result_listener << status;
  return status.code() == code &&
         std::string(status.message()).find(substring) != std::string::npos;
}

// Whether compute-sanitizer runs the test (./run gputest --sanitize). A kernel then takes hundreds of
// times as long: tests do as little as starts every kernel that they start without it.
inline bool UnderComputeSanitizer() { return std::getenv("CARREL_SANITIZE") != nullptr; }

// A folder of this test's own, emptied first; parallel tests do not share it. It is gone at the program's
// end, unless a test failed.
std::string FreshTempDir();

// Where this process may make a socket: a socket's path is at most 107 bytes. Gone in the same way.
std::string SocketPath(absl::string_view name = "socket");

}  // namespace carrel
