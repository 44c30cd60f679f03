// What: contexts with made-up rows, written and read back. Tests only.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "carrel/v1/context.pb.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {

struct TestContextSpec {
  std::string name = "report";
  int32_t layers = 2;
  int32_t kv_heads = 2;
  int32_t head_dim = 16;
  int64_t tokens = 300;
  int64_t segment_tokens = 128;
  uint64_t seed = 1;  // of the rows
};

v1::Manifest TestManifest(const TestContextSpec& spec, ContextId id);

// The payload that the spec's context has under a key.
std::string TestPayload(const TestContextSpec& spec, const SegmentKey& key);
// Every key of the context but the manifest's, in order.
std::vector<SegmentKey> TestKeys(const TestContextSpec& spec, ContextId id);

// Writes an SST per layer, and one for token ids, into the folder; returns their paths.
absl::StatusOr<std::vector<std::string>> WriteTestFiles(const TestContextSpec& spec, ContextId id,
                                                        const std::string& folder);
absl::StatusOr<ContextId> PublishTestContext(Store& store, const std::string& folder,
                                             const TestContextSpec& spec);

// What was published in the folder as `name`, as a program of format version 1 or 2 would have left
// it: under a number, and unbound. Nobody has the store open. Returns the number.
absl::StatusOr<ContextId> MakeUnbound(const std::string& folder, const std::string& name,
                                      uint32_t version = kUnboundManifestFormatVersion);

// As somebody with a hand in the catalog would have left the context; nobody has the store open.
absl::Status EditManifest(const std::string& folder, const std::string& name,
                          const std::function<void(v1::Manifest&)>& edit);

// Opens and verifies everything; DataLoss of the store as it is; Internal if bytes or manifest are
// not the spec's although they verified, or are missing.
absl::Status CheckTestContext(const Store& store, const TestContextSpec& spec);
absl::Status CheckTestContext(const StoredContext& context, const TestContextSpec& spec);

}  // namespace carrel::kvstore
