#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/index/index_type.h"
#include "lab/kinds/hnsw/hnsw.h"
#include "lab/kinds/links/link_index.h"

namespace carrel::kvstore {
namespace {

class HnswType final : public IndexType {
 public:
  absl::string_view name() const override { return "hnsw"; }
  bool lab() const override { return true; }
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
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams& params, Blob blob,
                                              Rows keys) const override {
    ASSIGN_OR_RETURN(std::string bytes, blob.Read());
    ASSIGN_OR_RETURN(HnswLinks links, HnswLinks::Open(std::move(bytes)));
    const HnswLinks::Header& header = links.header();
    if (header.m != params.m || header.ef_construction != params.ef_construction) {
      return absl::InvalidArgumentError(absl::StrCat(
          "hnsw blob was built with m=", header.m, " ef_construction=", header.ef_construction,
          ", not m=", params.m, " ef_construction=", params.ef_construction));
    }
    return OpenLinkIndex(params, std::move(links), std::move(keys));
  }

  absl::string_view effort_word() const override { return "beam width"; }
  int64_t DefaultEffort(const IndexParams&, int64_t top_k, int64_t) const override {
    return std::max<int64_t>(128, 2 * top_k);
  }

  double SearchNs(const IndexParams&, const SearchResult& result, int64_t, int64_t) const override {
    return kWalkedNs * static_cast<double>(result.visited);
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
