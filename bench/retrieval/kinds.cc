// The kvstore's own index kinds.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/retrieval/method.h"
#include "common/status.h"
#include "kvstore/index/index.h"

namespace carrel::bench {
namespace {

using kvstore::CodeScan;
using kvstore::CodeTraining;
using kvstore::IndexKind;

class OurMethod : public Method {
 public:
  OurMethod(std::string blob, std::unique_ptr<kvstore::Index> index)
      : blob_(std::move(blob)), index_(std::move(index)) {}

  absl::Status Find(const Question& q, std::vector<Position>& ids) const override {
    thread_local kvstore::SearchScratch scratch;
    thread_local kvstore::SearchResult result;
    const kvstore::SearchRequest request{.queries = q.queries,
                                         .group = q.group,
                                         .scale = q.scale,
                                         .zone = q.zone,
                                         .top_k = q.top_k,
                                         .effort = q.effort};
    RETURN_IF_ERROR(index_->Search(request, scratch, result));
    ids = result.ids;
    return absl::OkStatus();
  }
  int64_t bytes() const override { return static_cast<int64_t>(blob_.size()); }
  const std::string* blob() const override { return &blob_; }

 private:
  const std::string blob_;
  const std::unique_ptr<kvstore::Index> index_;
};

MethodKind Ours(std::string name, kvstore::IndexParams params, std::string effort_name,
                std::function<std::vector<int32_t>(int64_t)> efforts) {
  MethodKind kind;
  kind.name = std::move(name);
  kind.slow_build = params.kind == IndexKind::kHnsw || params.kind == IndexKind::kGraph;
  kind.effort_name = std::move(effort_name);
  kind.efforts = std::move(efforts);
  kind.exact_effort = params.kind == IndexKind::kFlat ? 0 : -1;
  kind.params = params;
  kind.build =
      [params](const kvstore::Rows& keys,
               const kvstore::SampledQueries& queries) -> absl::StatusOr<std::unique_ptr<Method>> {
    ASSIGN_OR_RETURN(std::string blob, kvstore::BuildIndex(params, keys, &queries));
    auto index = kvstore::OpenIndex(params, kvstore::Blob(blob), keys);
    RETURN_IF_ERROR(index.status());
    return std::make_unique<OurMethod>(std::move(blob), *std::move(index));
  };
  return kind;
}

}  // namespace

std::vector<MethodKind> OurKinds() {
  const auto times = [](std::vector<int32_t> factors) {
    return [factors](int64_t k) {
      std::vector<int32_t> efforts;
      for (const int32_t factor : factors) {
        efforts.push_back(static_cast<int32_t>(std::min<int64_t>(k * factor, kvstore::kMaxEffort)));
      }
      return efforts;
    };
  };
  const auto fixed = [](std::vector<int32_t> efforts) {
    return [efforts](int64_t) { return efforts; };
  };
  std::vector<MethodKind> kinds = {
      Ours("flat", {.kind = IndexKind::kFlat}, "none", fixed({0})),
      Ours("int8", {.kind = IndexKind::kInt8}, "rows scored exactly",
           [](int64_t k) {
             return std::vector<int32_t>{static_cast<int32_t>(k + k / 4),
                                         static_cast<int32_t>(2 * k), static_cast<int32_t>(4 * k)};
           }),
      Ours("code", {.kind = IndexKind::kCode}, "rows scored exactly", times({1, 2, 4, 8, 16})),
      Ours("code-trained", {.kind = IndexKind::kCode, .code_training = CodeTraining::kStaged},
           "rows scored exactly", times({1, 2, 4, 8, 16})),
      Ours("hnsw", {.kind = IndexKind::kHnsw}, "beam width", times({1, 2, 4})),
      Ours("ivf", {.kind = IndexKind::kIvf}, "lists probed", fixed({8, 16, 32, 64})),
      Ours("graph", {.kind = IndexKind::kGraph}, "beam width", times({1, 2, 4})),
  };
  for (const int32_t bits : {64, 128, 256}) {
    for (const auto training : {CodeTraining::kOff, CodeTraining::kStaged, CodeTraining::kHata}) {
      for (const auto scan : {CodeScan::kAsymmetric, CodeScan::kSymmetric}) {
        kinds.push_back(Ours(absl::StrCat("code-", bits, "-", kvstore::CodeTrainingName(training),
                                          "-", kvstore::CodeScanName(scan)),
                             {.kind = IndexKind::kCode,
                              .code_bits = bits,
                              .code_training = training,
                              .code_scan = scan},
                             "rows scored exactly", times({1, 2, 4, 8, 16})));
        kinds.back().only_if_named = true;
      }
    }
  }
  return kinds;
}

}  // namespace carrel::bench
