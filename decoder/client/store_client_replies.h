// What: what every StoreClient says of requests and makes of replies, so that all say and make the
//       same.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "decoder/client/store_client.h"

namespace carrel::v1 {
class SessionRequest;
}

namespace carrel::decoder {

std::string Describe(const v1::SessionRequest& request);

// What the store said is not said twice.
absl::Status AnnotateOnce(const absl::Status& status, absl::string_view what);

// A status that the store itself answered with, where asking again would not help (common/routing.h).
bool Answered(const absl::Status& status);

// A reply to `what`, as Next gives it: an Error becomes its status.
absl::StatusOr<v1::SessionReply> TakeReply(v1::SessionReply reply, absl::string_view what);
// The reply to Open. DataLoss: it is one to something else.
absl::StatusOr<v1::OpenReply> TakeOpenReply(v1::SessionReply reply, absl::string_view what);

// What Next says of a request that has no reply to come.
absl::Status NothingToCome(RequestId id);

}  // namespace carrel::decoder
