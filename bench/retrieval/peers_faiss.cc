// Faiss as top-k decoding uses it: fp32 copies of the keys, one search per q head.
#include <faiss/IndexFlat.h>
#include <faiss/IndexHNSW.h>
#include <faiss/IndexIVFFlat.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>

#include "absl/strings/str_cat.h"
#include "bench/retrieval/method.h"
#include "common/status.h"

namespace carrel::bench {
namespace {

constexpr int kLinks = 16;

// Rows of the zone that each q head finds, joined. search(query, wanted, scores, labels).
template <typename Search>
absl::Status FindByHead(const Question& q, const std::vector<float>& rows, int64_t d,
                        const Search& search, std::vector<Position>& ids) {
  thread_local std::vector<float> scores;
  thread_local std::vector<faiss::Index::idx_t> labels;
  // The few rows outside the zone are not known to the index: so many more are asked for.
  const int64_t outside = static_cast<int64_t>(rows.size()) / d - q.zone.rows();
  const int64_t wanted = q.top_k + outside;
  scores.resize(wanted);
  labels.resize(wanted);
  ids.clear();
  omp_set_num_threads(1);
  for (int64_t h = 0; h < q.group; ++h) {
    try {
      search(q.queries + h * d, wanted, scores.data(), labels.data());
    } catch (const std::exception& error) {
      return absl::InternalError(absl::StrCat("faiss: ", error.what()));
    }
    int64_t kept = 0;
    for (const faiss::Index::idx_t id : labels) {
      if (id < q.zone.begin || id >= q.zone.end || kept == q.top_k) continue;
      ids.push_back(id);
      ++kept;
    }
  }
  JoinHeads(q, rows.data(), d, ids);
  return absl::OkStatus();
}

class FaissHnsw : public Method {
 public:
  explicit FaissHnsw(const kvstore::Rows& keys)
      : d_(keys.head_dim()),
        index_(static_cast<int>(d_), kLinks, faiss::METRIC_INNER_PRODUCT),
        rows_(CopyRows(keys)) {
    omp_set_num_threads(1);
    index_.add(keys.count(), rows_.data());
  }
  absl::Status Find(const Question& q, std::vector<Position>& ids) const override {
    return FindByHead(
        q, rows_, d_,
        [&](const float* query, int64_t wanted, float* scores, faiss::Index::idx_t* labels) {
          // efSearch is a field of the index: the same for all threads at any time.
          const_cast<faiss::IndexHNSWFlat&>(index_).hnsw.efSearch =
              static_cast<int>(std::max<int64_t>(q.effort, q.top_k));
          index_.search(1, query, wanted, scores, labels);
        },
        ids);
  }
  int64_t bytes() const override {  // the copy once: JoinHeads could read the index's own
    const faiss::HNSW& hnsw = index_.hnsw;
    return static_cast<int64_t>(rows_.size() * sizeof(float) +
                                hnsw.neighbors.size() * sizeof(hnsw.neighbors[0]) +
                                hnsw.offsets.size() * sizeof(hnsw.offsets[0]) +
                                hnsw.levels.size() * sizeof(hnsw.levels[0]));
  }

 private:
  const int64_t d_;
  faiss::IndexHNSWFlat index_;
  const std::vector<float> rows_;
};

class FaissIvf : public Method {
 public:
  explicit FaissIvf(const kvstore::Rows& keys)
      : d_(keys.head_dim()),
        quantizer_(d_, faiss::METRIC_INNER_PRODUCT),
        index_(&quantizer_, d_, Lists(keys.count()), faiss::METRIC_INNER_PRODUCT),
        rows_(CopyRows(keys)) {
    omp_set_num_threads(1);
    index_.train(keys.count(), rows_.data());
    index_.add(keys.count(), rows_.data());
  }
  static size_t Lists(int64_t rows) {
    return std::max<size_t>(1, std::lround(4 * std::sqrt(static_cast<double>(rows))));
  }
  absl::Status Find(const Question& q, std::vector<Position>& ids) const override {
    return FindByHead(
        q, rows_, d_,
        [&](const float* query, int64_t wanted, float* scores, faiss::Index::idx_t* labels) {
          const_cast<faiss::IndexIVFFlat&>(index_).nprobe =
              std::min<size_t>(static_cast<size_t>(q.effort), index_.nlist);
          index_.search(1, query, wanted, scores, labels);
        },
        ids);
  }
  int64_t bytes() const override {
    return static_cast<int64_t>(rows_.size() * sizeof(float) +
                                index_.ntotal * sizeof(faiss::Index::idx_t) +
                                index_.nlist * d_ * sizeof(float));
  }

 private:
  const int64_t d_;
  faiss::IndexFlat quantizer_;
  faiss::IndexIVFFlat index_;
  const std::vector<float> rows_;
};

template <typename T>
absl::StatusOr<std::unique_ptr<Method>> Build(const kvstore::Rows& keys,
                                              const kvstore::SampledQueries&) {
  try {
    return std::make_unique<T>(keys);
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("faiss: ", error.what()));
  }
}

}  // namespace

std::vector<MethodKind> FaissPeers() {
  MethodKind hnsw{
      .name = "faiss-hnsw", .peer = true, .slow_build = true, .effort_name = "efSearch"};
  hnsw.efforts = [](int64_t k) {
    return std::vector<int32_t>{static_cast<int32_t>(k), static_cast<int32_t>(2 * k),
                                static_cast<int32_t>(4 * k)};
  };
  hnsw.build = Build<FaissHnsw>;
  MethodKind ivf{.name = "faiss-ivf", .peer = true, .effort_name = "nprobe"};
  ivf.efforts = [](int64_t) { return std::vector<int32_t>{8, 32, 128}; };
  ivf.exact_effort = 1 << 20;
  ivf.build = Build<FaissIvf>;
  return {hnsw, ivf};
}

}  // namespace carrel::bench
