// What: a context of random rows with its indexes, in memory and published to a store; what a query
//       must answer, by plain loops in double; and ways to ask and to damage. Tests only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "kvstore/engine/engine.h"
#include "kvstore/engine/request.h"
#include "kvstore/format/context_id.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

class Store;

struct RandomContextSpec {
  std::string name = "report";
  AttentionShape shape = {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 32};
  int64_t tokens = 700;
  int64_t segment_tokens = 128;
  IndexParams index = {.ef_construction = 24};
  FingerprintFields fingerprint = {{"kv_dtype", "bf16"}, {"weights_sha256", "5eed"}};
  int64_t summary_rows = 0;  // of a cluster; 0: no summaries
  bool query_drift = false;  // of every layer but the first
  bool document = false;     // with token ids
  uint64_t seed = 1;
};

class RandomContext {
 public:
  explicit RandomContext(const RandomContextSpec& spec);

  const RandomContextSpec& spec() const { return spec_; }
  // Empty without `document`.
  const std::vector<TokenId>& token_ids() const { return token_ids_; }
  // [tokens, head_dim] bf16.
  const uint16_t* keys(Layer layer, KvHead head) const { return At(keys_, layer, head); }
  const uint16_t* values(Layer layer, KvHead head) const { return At(values_, layer, head); }
  const std::string& index_blob(Layer layer, KvHead head) const;
  const std::string& summaries(Layer layer, KvHead head) const;
  // [layers] of [q_heads, head_dim]; empty where there is none.
  std::vector<std::vector<float>>& query_drift() { return query_drift_; }

  // Writes SST files below `folder` and publishes them.
  absl::Status Publish(Store& store, const std::string& folder,
                       ContextId id = ContextId::Random()) const;

  // [tokens, q_heads, head_dim]; the more `sharp`, the more one row stands out.
  std::vector<float> Queries(int64_t tokens, uint64_t seed, float sharp = 1) const;
  OpenRequest Opening(int64_t sink = 4, int64_t local = 60) const;

  // By plain loops: scaled scores of q head h (of all) with every row of the zone.
  std::vector<double> Scores(Layer layer, int64_t q_head, const float* query, RowRange zone) const;
  // [zone]: the group score of each row (kernels/score/group_score).
  std::vector<double> GroupScores(Layer layer, KvHead head, const float* queries,
                                  RowRange zone) const;
  // Rows of the zone by group score, best first, ties by id.
  std::vector<Position> Ranked(Layer layer, KvHead head, const float* queries, RowRange zone) const;
  // Attention of a q head over the given rows.
  void Attend(Layer layer, int64_t q_head, const float* query, const std::vector<Position>& rows,
              std::vector<float>& out, float& lse) const;

 private:
  using Heads = std::vector<std::vector<uint16_t>>;  // [layers, kv_heads]
  const uint16_t* At(const Heads& heads, Layer layer, KvHead head) const;
  size_t IndexOf(Layer layer, KvHead head) const {
    return static_cast<size_t>(layer.value()) * spec_.shape.kv_heads + head.value();
  }

  const RandomContextSpec spec_;
  std::vector<TokenId> token_ids_;
  Heads keys_, values_;
  std::vector<std::string> blobs_, summaries_;
  std::vector<std::vector<float>> query_drift_;
};

// A store in a fresh folder of the running test, holding these contexts.
std::unique_ptr<Store> MakeStore(const std::string& folder,
                                 const std::vector<const RandomContext*>& contexts);

// Flips one bit inside `bytes` where they lie in a file below the folder; false if they lie
// nowhere.
bool FlipBitOf(const std::string& folder, const std::string& bytes);

// A reply taken wholly: the pieces of each token and head joined.
struct CollectedHead {
  std::vector<Position> ids;
  std::vector<std::vector<float>> scores;  // [group][rows]
  std::string k, v;
  std::vector<float> out, lse, zone_lse, rest;
  int64_t pieces = 0;
  bool operator==(const CollectedHead&) const = default;
};
struct Collected {
  std::vector<CollectedHead> heads;  // [tokens, kv_heads]
  QueryStatistics statistics;
};

absl::StatusOr<Collected> Collect(Reply& reply, int64_t tokens, int64_t kv_heads,
                                  int64_t part_bytes = 4096);

// Submits and waits.
absl::StatusOr<std::unique_ptr<Reply>> Ask(Session& session, uint64_t request_id,
                                           QueryRequest request);
absl::StatusOr<std::unique_ptr<Reply>> Ask(Session& session, uint64_t request_id,
                                           FetchRequest request);
absl::StatusOr<Collected> AskAndCollect(Session& session, uint64_t request_id,
                                        const QueryRequest& request);

// Occupies this many engine threads from construction until destruction.
class Blockade {
 public:
  Blockade(Engine& engine, int threads);
  ~Blockade();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace carrel::kvstore
