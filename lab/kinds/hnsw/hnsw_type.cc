#include <string>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/index/index_type.h"
#include "lab/kinds/hnsw/hnsw.h"
#include "lab/kinds/links/link_index.h"

namespace carrel::kvstore {
namespace {

class HnswType final : public LinkType {
 public:
  HnswType() : LinkType("hnsw", 2) {}
  std::string Describe(const IndexParams& params) const override {
    return absl::StrCat("m ", params.m, ", built with beam width ", params.ef_construction);
  }
  std::vector<IndexField> Fields(const IndexParams& params) const override {
    return {{"m", params.m}, {"ef_construction", params.ef_construction}};
  }
  absl::Status Validate(const IndexParams& params) const override {
    RETURN_IF_ERROR(CheckIndexField("m", params.m, 4, kMaxHnswM));
    return CheckIndexField("ef_construction", params.ef_construction, params.m, 4096);
  }

  absl::StatusOr<std::string> Build(const IndexParams& params, const Rows& keys,
                                    const SampledQueries*, Accelerator*) const override {
    return BuildHnsw(params, keys);
  }
  int64_t BytesPerKey(const IndexParams& params, int64_t) const override {
    return int64_t{4} * 3 * params.m;
  }
};

}  // namespace

const IndexType& HnswIndexType() {
  static const HnswType type;
  return type;
}

}  // namespace carrel::kvstore
