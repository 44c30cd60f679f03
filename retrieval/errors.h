// What: what every session says of requests, and of errors, so that all say the same.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "retrieval/query.h"

namespace carrel::retrieval {

std::string Describe(const OpenRequest& open);
std::string DescribeQuery(Layer layer);
std::string Describe(const Fetch& fetch);

// What the store said is not said twice.
absl::Status AnnotateOnce(const absl::Status& status, absl::string_view what);

// What Next says of a request that has no reply to come.
absl::Status NothingToCome(RequestId id);

}  // namespace carrel::retrieval
