#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvstore/index/index_type.h"
#include "lab/kinds/ivf/ivf.h"

namespace carrel::kvstore {
namespace {

class IvfType final : public IndexType {
 public:
  absl::string_view name() const override { return "ivf"; }
  bool lab() const override { return true; }
  bool automatic() const override { return true; }
  std::string Describe(const IndexParams& params) const override {
    return absl::StrCat(params.ivf_lists == 0 ? "4 sqrt(rows)" : absl::StrCat(params.ivf_lists),
                        " lists");
  }
  std::vector<IndexField> Fields(const IndexParams& params) const override {
    return {{"ivf_lists", params.ivf_lists}};
  }
  absl::Status Validate(const IndexParams& params) const override {
    return CheckIndexField("ivf_lists", params.ivf_lists, 0, 65536);
  }

  absl::StatusOr<std::string> Build(const IndexParams& params, const Rows& keys,
                                    const SampledQueries* queries,
                                    Accelerator* accelerator) const override {
    return BuildIvf(params, keys, queries, accelerator);
  }
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams& params, Blob blob,
                                              Rows keys) const override {
    return OpenIvf(params, blob, std::move(keys));
  }

  absl::string_view effort_word() const override { return "lists probed"; }
  int64_t DefaultEffort(const IndexParams& params, int64_t, int64_t rows) const override {
    return std::max<int64_t>(64, IvfLists(params.ivf_lists, rows) / 4);
  }
  int64_t LeastEffort(int64_t) const override { return 1; }
  int64_t FirstEffort(int64_t) const override { return 4; }

  double SearchNs(const IndexParams&, const SearchResult& result, int64_t, int64_t) const override {
    return kAtRandomNs * static_cast<double>(result.visited);
  }
  int64_t BytesPerKey(const IndexParams&, int64_t) const override { return 12; }
};

}  // namespace

const IndexType& IvfIndexType() {
  static const IvfType type;
  return type;
}

}  // namespace carrel::kvstore
