// What:   the parts of a job that do not depend on where rows come from (a model, or synth): checks
//         before it starts, and publication of what lies in its staging folder.
// Errors: as prefill.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "kvstore/index/index.h"

namespace carrel::v1 {
class Manifest;
}
namespace carrel::kvstore {
class Store;
}

namespace carrel::prefill {

class Staging;

absl::Status ValidateSegmentTokens(int64_t segment_tokens);

// Of a context that is to be made: what follows from these, and that rows are bf16.
v1::Manifest NewManifest(const std::string& name, const std::vector<TokenId>& tokens,
                         const AttentionShape& shape, int64_t segment_tokens);
void AddFingerprint(const std::string& name, const std::string& value, v1::Manifest& job);

// OK if no context has the name.
absl::Status CheckNameIsFree(const kvstore::Store& store, const std::string& store_folder,
                             const std::string& name);

// What `layers` layers of the job, as its manifest plans it, will take on disk, within a third: at
// most, where the index is chosen on the way.
int64_t StoredBytes(const v1::Manifest& job, int32_t layers);

// Whether the disk of a folder has that much room, before hours are spent. what: "prefill of ...".
absl::Status CheckRoom(const std::string& folder, int64_t bytes, absl::string_view what);

// Writes the token ids, completes the job by the fragments of its layers, publishes all, and
// removes the staging folder.
absl::Status PublishStaged(v1::Manifest& job, const Staging& staging,
                           const std::vector<TokenId>& tokens, kvstore::Store& store);

}  // namespace carrel::prefill
