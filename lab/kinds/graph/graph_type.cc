#include <string>

#include "absl/strings/str_cat.h"
#include "kvstore/index/index_type.h"
#include "lab/kinds/graph/graph.h"
#include "lab/kinds/links/link_index.h"

namespace carrel::kvstore {
namespace {

class GraphType final : public LinkType {
 public:
  GraphType() : LinkType("graph", 3) {}
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
  bool learns(const IndexParams&) const override { return true; }

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
