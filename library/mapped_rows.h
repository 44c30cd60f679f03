// What:   the rows of a stored context for a decoder in the same process (decoder/select): maps and
//         verifies all of them. Joins decoder/ and kvstore/, as store_access.h does.
// Errors: NotFound no such store or context; DataLoss damaged rows; FailedPrecondition rows that
//         are not bf16.
// Cost:   reads K and V of the whole context once, to verify them.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "decoder/select/host_rows.h"

namespace carrel::library {

absl::StatusOr<std::shared_ptr<const decoder::HostRows>> MapContextRows(
    const std::string& store_folder, const std::string& context, ThreadPool* pool);

// Whether a context has the codes that HostRows::StoredCodes gives. Reads its manifest alone.
absl::StatusOr<bool> HasStoredCodes(const std::string& store_folder, const std::string& context);

}  // namespace carrel::library
