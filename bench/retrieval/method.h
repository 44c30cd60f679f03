// What:   what is compared: ways to find the rows of a zone that a group of queries attends to.
//         One Method is built over one layer and KV head.
// Math:   the truth is kvstore's flat search: largest group score first (kvstore/index/index.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index.h"
#include "kvstore/index/rows/rows.h"

namespace carrel::bench {

struct Question {
  const float* queries = nullptr;  // [group, head_dim]
  int64_t group = 0;
  float scale = 0;
  const float* lse = nullptr;  // [group]: of the zone, exact: given to peers for nothing
  RowRange zone;
  int64_t top_k = 0;
  int32_t effort = 0;
};

class Method {
 public:
  virtual ~Method() = default;
  // At most top_k rows of the zone, distinct.
  virtual absl::Status Find(const Question& question, std::vector<Position>& ids) const = 0;
  virtual int64_t bytes() const = 0;  // beside the stored bf16 rows
  // The index as it would be stored; null if it cannot be.
  virtual const std::string* blob() const { return nullptr; }
};

struct MethodKind {
  std::string name;
  bool peer = false;
  bool slow_build = false;     // graphs: tens of microseconds and more per key
  bool only_if_named = false;  // measured if --kind names it (or, of codes, --kind codes)
  // Meaning of effort, and which are tried for a top_k.
  std::string effort_name;
  std::function<std::vector<int32_t>(int64_t top_k)> efforts;
  // An effort at which the exact rows must come out; -1: there is none.
  int32_t exact_effort = -1;
  std::optional<kvstore::IndexParams> params;  // of ours
  // queries: to build from; not those that are measured. Unimplemented: not there yet.
  std::function<absl::StatusOr<std::unique_ptr<Method>>(const kvstore::Rows& keys,
                                                        const kvstore::SampledQueries& queries)>
      build;
};

std::vector<MethodKind> OurKinds();
std::vector<MethodKind> FaissPeers();
std::vector<MethodKind> HnswlibPeers();
std::vector<MethodKind> ExactPeers();  // BLAS, and Quest-style page bounds

// All rows as fp32, as the peers keep them. [count, head_dim]
std::vector<float> CopyRows(const kvstore::Rows& rows);

// Peers that search for each q head on its own: of the union of what they found, the top_k best by
// group score, with the zone's true lse: what is lost is lost by the search. rows: as the peer
// keeps them.
void JoinHeads(const Question& question, const float* rows, int64_t head_dim,
               std::vector<Position>& ids);

}  // namespace carrel::bench
