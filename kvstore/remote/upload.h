// What:   one file as one object: a PUT, or parts where it is large; parts of an upload that was interrupted
//         are not sent again where the server says that they are the same bytes.
// Edge:   the key names the bytes (their SHA-256), so that several who send the same file may share an upload.
// Errors: as s3_client.h.
// Threads: any.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kvstore/remote/s3_client.h"

namespace carrel::kvstore {

inline constexpr int64_t kUploadPartBytes = int64_t{64} << 20;

// sha256: of the bytes, in hex; empty: it is computed here. part_bytes: at least kLeastPartBytes; more where the
// file would have too many. sent: told the bytes that were sent, part by part.
absl::Status UploadFile(S3Client& client, const std::string& key, absl::string_view bytes,
                        const std::string& sha256, const std::function<void(int64_t)>& sent,
                        int64_t part_bytes = kUploadPartBytes);

}  // namespace carrel::kvstore
