// Exact search: scores every row of the zone. The oracle of the other kinds.
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/index/index_type.h"
#include "kvstore/index/search_util.h"

namespace carrel::kvstore {
namespace {

class FlatIndex : public Index {
 public:
  explicit FlatIndex(Rows keys) : keys_(std::move(keys)) {}

  IndexKind kind() const override { return IndexKind::kFlat; }
  int64_t resident_bytes() const override { return 0; }

  absl::Status Search(const SearchRequest& request, SearchScratch& scratch,
                      SearchResult& result) const override {
    RETURN_IF_ERROR(ValidateRequest(request, keys_));
    return ScanZone(request, keys_, scratch, result);
  }

 private:
  const Rows keys_;
};

class FlatType final : public ExactIndexType {
 public:
  absl::string_view name() const override { return "flat"; }
  std::string Describe(const IndexParams&) const override { return "exact, every row scored"; }
  absl::StatusOr<std::string> Build(const IndexParams&, const Rows&, const SampledQueries*,
                                    Accelerator*) const override {
    return std::string();
  }
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams&, Blob blob,
                                              Rows keys) const override {
    if (blob.empty()) return std::make_unique<FlatIndex>(std::move(keys));
    return absl::InvalidArgumentError(
        absl::StrCat("index: flat has no blob, ", blob.size(), " bytes were given"));
  }
  bool automatic() const override { return true; }
};

}  // namespace

const IndexType& FlatIndexType() {
  static const FlatType type;
  return type;
}

}  // namespace carrel::kvstore
