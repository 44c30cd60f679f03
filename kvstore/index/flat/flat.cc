#include "kvstore/index/flat/flat.h"

#include <utility>

#include "common/status.h"
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

}  // namespace

std::unique_ptr<Index> MakeFlatIndex(Rows keys) {
  return std::make_unique<FlatIndex>(std::move(keys));
}

}  // namespace carrel::kvstore
