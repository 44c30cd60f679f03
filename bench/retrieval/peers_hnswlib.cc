// hnswlib (Debian's libhnswlib-dev): inner products of fp32 copies, one search per q head.
#include <hnswlib/hnswlib.h>

#include <algorithm>
#include <exception>

#include "absl/strings/str_cat.h"
#include "bench/retrieval/method.h"
#include "common/status.h"

namespace carrel::bench {
namespace {

constexpr size_t kLinks = 16;
constexpr size_t kBuildBeam = 100;  // ef_construction of our hnsw

class Hnswlib : public Method {
 public:
  explicit Hnswlib(const kvstore::Rows& keys)
      : d_(keys.head_dim()),
        space_(static_cast<size_t>(d_)),
        index_(&space_, static_cast<size_t>(keys.count()), kLinks, kBuildBeam),
        rows_(CopyRows(keys)) {
    for (int64_t i = 0; i < keys.count(); ++i) {
      index_.addPoint(&rows_[i * d_], static_cast<hnswlib::labeltype>(i));
    }
  }
  absl::Status Find(const Question& q, std::vector<Position>& ids) const override {
    const int64_t outside = static_cast<int64_t>(rows_.size()) / d_ - q.zone.rows();
    // ef is a field of the index: the same for all threads at any time.
    auto& index = const_cast<hnswlib::HierarchicalNSW<float>&>(index_);
    index.setEf(static_cast<size_t>(std::max<int64_t>(q.effort, q.top_k)));
    ids.clear();
    for (int64_t h = 0; h < q.group; ++h) {
      auto found = index.searchKnn(q.queries + h * d_, static_cast<size_t>(q.top_k + outside));
      const size_t first = ids.size();
      for (; !found.empty(); found.pop()) {  // the farthest first
        const auto id = static_cast<Position>(found.top().second);
        if (id >= q.zone.begin && id < q.zone.end) ids.push_back(id);
      }
      const auto own = ids.size() - first, wanted = static_cast<size_t>(q.top_k);
      if (own > wanted) {
        ids.erase(ids.begin() + static_cast<int64_t>(first),
                  ids.begin() + static_cast<int64_t>(first + own - wanted));
      }
    }
    JoinHeads(q, rows_.data(), d_, ids);
    return absl::OkStatus();
  }
  int64_t bytes() const override {
    const auto count = static_cast<int64_t>(rows_.size()) / d_;
    return count * static_cast<int64_t>(index_.size_data_per_element_ + sizeof(void*) +
                                        kLinks * sizeof(unsigned) / (kLinks - 1));
  }

 private:
  const int64_t d_;
  hnswlib::InnerProductSpace space_;
  hnswlib::HierarchicalNSW<float> index_;
  const std::vector<float> rows_;
};

}  // namespace

std::vector<MethodKind> HnswlibPeers() {
  MethodKind kind{.name = "hnswlib", .peer = true, .slow_build = true, .effort_name = "ef"};
  kind.efforts = [](int64_t k) {
    return std::vector<int32_t>{static_cast<int32_t>(k), static_cast<int32_t>(2 * k),
                                static_cast<int32_t>(4 * k)};
  };
  kind.build = [](const kvstore::Rows& keys,
                  const kvstore::SampledQueries&) -> absl::StatusOr<std::unique_ptr<Method>> {
    try {
      return std::make_unique<Hnswlib>(keys);
    } catch (const std::exception& error) {
      return absl::InternalError(absl::StrCat("hnswlib: ", error.what()));
    }
  };
  return {kind};
}

}  // namespace carrel::bench
