#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/index/index_type.h"
#include "lab/kinds/graph/graph.h"
#include "lab/kinds/links/link_index.h"

namespace carrel::kvstore {
namespace {

class GraphType final : public IndexType {
 public:
  absl::string_view name() const override { return "graph"; }
  bool lab() const override { return true; }
  bool automatic() const override { return true; }
  std::string Describe(const IndexParams& params) const override {
    return absl::StrCat("m ", params.m);
  }
  std::vector<IndexField> Fields(const IndexParams& params) const override {
    return {{"m", params.m}};
  }
  absl::Status Validate(const IndexParams& params) const override {
    return CheckIndexField("m", params.m, 4, kMaxHnswM);
  }

  absl::StatusOr<std::string> Build(const IndexParams& params, const Rows& keys,
                                    const SampledQueries* queries,
                                    Accelerator* accelerator) const override {
    return BuildGraph(params, keys, queries, accelerator);
  }
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams& params, Blob blob,
                                              Rows keys) const override {
    ASSIGN_OR_RETURN(std::string bytes, blob.Read());
    ASSIGN_OR_RETURN(HnswLinks links, HnswLinks::Open(std::move(bytes)));
    const HnswLinks::Header& header = links.header();
    if (header.m != params.m || header.ef_construction != 0 || header.levels > 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "graph blob was built with m=", header.m, " ef_construction=", header.ef_construction,
          " levels=", header.levels, ", not m=", params.m, " ef_construction=0 levels=1"));
    }
    return OpenLinkIndex(params, std::move(links), std::move(keys));
  }
  bool learns(const IndexParams&) const override { return true; }

  absl::string_view effort_word() const override { return "beam width"; }
  int64_t DefaultEffort(const IndexParams&, int64_t top_k, int64_t) const override {
    return std::max<int64_t>(128, 3 * top_k);
  }

  double SearchNs(const IndexParams&, const SearchResult& result, int64_t, int64_t) const override {
    return kWalkedNs * static_cast<double>(result.visited);
  }
  int64_t BytesPerKey(const IndexParams& params, int64_t) const override {
    return int64_t{4} * 2 * params.m + 1;
  }
};

}  // namespace

const IndexType& GraphIndexType() {
  static const GraphType type;
  return type;
}

}  // namespace carrel::kvstore
