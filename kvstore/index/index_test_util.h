// What: keys and queries that look like a model's, and a context in memory. Tests only.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "carrel/v1/context.pb.h"
#include "kvstore/index/index.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {

// Keys after RoPE: clusters around a common mean with a few large channels, rotated by position;
// queries come from another distribution, partly aligned to single keys.
struct KeySet {
  int64_t count = 0;
  int64_t head_dim = 0;
  std::vector<uint16_t> keys;  // bf16 [count, head_dim]

  Rows AsRows() const { return Rows::FromMemory(keys.data(), count, head_dim); }
  const uint16_t* Row(Position i) const { return keys.data() + i * head_dim; }
};
KeySet MakeKeys(std::mt19937_64& rng, int64_t count, int64_t head_dim);
std::vector<float> MakeQueries(std::mt19937_64& rng, const KeySet& keys, int64_t group);

// One layer and KV head of keys as stored segments, whose bytes a test may damage.
class MemoryContext : public StoredContext {
 public:
  MemoryContext(const KeySet& keys, int64_t segment_tokens);

  const v1::Manifest& manifest() const override { return manifest_; }
  absl::StatusOr<std::shared_ptr<const PinnedSegment>> Segment(int32_t layer, Kind kind,
                                                               KvHead kv_head,
                                                               uint32_t segment) const override;
  absl::StatusOr<uint32_t> SegmentCount(int32_t layer, Kind kind, KvHead kv_head) const override;

  v1::Manifest& mutable_manifest() { return manifest_; }
  // The stored bytes of a segment of keys.
  std::string& value(uint32_t segment) { return values_.at(segment); }
  void erase(uint32_t segment) { values_.erase(segment); }

 private:
  v1::Manifest manifest_;
  std::map<uint32_t, std::string> values_;
};

}  // namespace carrel::kvstore
