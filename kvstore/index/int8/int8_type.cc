#include <algorithm>
#include <utility>

#include "kvstore/index/index_type.h"
#include "kvstore/index/int8/int8.h"

namespace carrel::kvstore {
namespace {

class Int8Type final : public IndexType {
 public:
  absl::string_view name() const override { return "int8"; }
  std::string Describe(const IndexParams&) const override { return "every row scored in 8 bits"; }
  std::vector<IndexField> Fields(const IndexParams&) const override { return {}; }
  absl::Status Validate(const IndexParams&) const override { return absl::OkStatus(); }

  absl::StatusOr<std::string> Build(const IndexParams& params, const Rows& keys,
                                    const SampledQueries*, Accelerator*) const override {
    return BuildInt8(params, keys);
  }
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams& params, Blob blob,
                                              Rows keys) const override {
    return OpenInt8(params, std::move(blob), std::move(keys));
  }

  absl::string_view effort_word() const override { return "rows scored exactly"; }
  int64_t DefaultEffort(const IndexParams&, int64_t top_k, int64_t) const override {
    return std::max<int64_t>(64, 2 * top_k);
  }

  double SearchNs(const IndexParams&, const SearchResult& result, int64_t group,
                  int64_t zone_rows) const override {
    const auto scanned = static_cast<double>(group * zone_rows);
    return kInOrder8BitNs * scanned + kAtRandomNs * (static_cast<double>(result.visited) - scanned);
  }
  int64_t BytesPerKey(const IndexParams&, int64_t head_dim) const override { return head_dim + 4; }
  int64_t HeapBytes(int64_t blob_bytes) const override {
    return std::min(blob_bytes, kMaxInt8HeapBytes);
  }

 private:
  static constexpr double kInOrder8BitNs = 1.2;  // as kInOrderNs
};

}  // namespace

const IndexType& Int8IndexType() {
  static const Int8Type type;
  return type;
}

}  // namespace carrel::kvstore
