// What: decoding against a kvstore without a model: the queries that prefill sampled, asked layer
//       by layer over a socket as a decoder asks its own.
// Ownership: keeps the script, which outlives it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "retrieval/session.h"

namespace carrel::kvstore {
class StoredContext;
}

namespace carrel::bench {

// queries[step][layer]: one token's, [q_heads, head_dim].
struct Script {
  AttentionShape shape;
  std::vector<std::vector<std::vector<float>>> queries;
  retrieval::FingerprintFields fingerprint;
};

absl::StatusOr<Script> ReadScript(const kvstore::StoredContext& context);

class Decoding {
 public:
  static absl::StatusOr<Decoding> Open(const std::string& address, const std::string& context,
                                       int64_t top_k, const Script& script);

  // ATTEND; the checksum of what attention over the selected rows gave.
  absl::StatusOr<uint32_t> Ask(int64_t step, int32_t layer);

  int64_t bytes_sent() const { return client_->bytes_sent(); }
  int64_t bytes_received() const { return client_->bytes_received(); }

 private:
  Decoding(int64_t top_k, const Script& script) : top_k_(top_k), script_(&script) {}
  int64_t top_k_;
  const Script* script_;
  std::unique_ptr<retrieval::Session> client_;
};

}  // namespace carrel::bench
