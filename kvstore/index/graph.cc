#include "kvstore/index/graph.h"

#include "common/status.h"

namespace carrel::kvstore {

absl::StatusOr<std::string> BuildGraph(const IndexParams&, const Rows&, const SampledQueries*) {
  return absl::UnimplementedError("graph");
}
absl::StatusOr<std::unique_ptr<Index>> OpenGraph(const IndexParams&, const Blob&, Rows) {
  return absl::UnimplementedError("graph");
}

}  // namespace carrel::kvstore
