#include <utility>

#include "absl/strings/str_cat.h"
#include "kvstore/index/flat/flat.h"
#include "kvstore/index/index_type.h"

namespace carrel::kvstore {
namespace {

class FlatType final : public IndexType {
 public:
  absl::string_view name() const override { return "flat"; }
  std::string Describe(const IndexParams&) const override { return "exact, every row scored"; }
  std::vector<IndexField> Fields(const IndexParams&) const override { return {}; }
  absl::Status Validate(const IndexParams&) const override { return absl::OkStatus(); }

  absl::StatusOr<std::string> Build(const IndexParams&, const Rows&, const SampledQueries*,
                                    Accelerator*) const override {
    return std::string();
  }
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams&, Blob blob,
                                              Rows keys) const override {
    if (blob.empty()) return MakeFlatIndex(std::move(keys));
    return absl::InvalidArgumentError(
        absl::StrCat("index: flat has no blob, ", blob.size(), " bytes were given"));
  }
  bool exact() const override { return true; }
  bool automatic() const override { return true; }

  absl::string_view effort_word() const override { return "every row scored"; }
  int64_t DefaultEffort(const IndexParams&, int64_t, int64_t) const override { return 0; }
  int64_t LeastEffort(int64_t) const override { return 0; }
  int64_t FirstEffort(int64_t) const override { return 0; }

  double SearchNs(const IndexParams&, const SearchResult& result, int64_t, int64_t) const override {
    return kInOrderNs * static_cast<double>(result.visited);
  }
  int64_t BytesPerKey(const IndexParams&, int64_t) const override { return 0; }
  int64_t HeapBytes(int64_t) const override { return 0; }
};

}  // namespace

const IndexType& FlatIndexType() {
  static const FlatType type;
  return type;
}

}  // namespace carrel::kvstore
