#include "kvstore/index/summaries/summary_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/dtype.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

using kernels::SummaryTable;

// Adds one segment's clusters and rows to a table.
class SegmentTable {
 public:
  SegmentTable(const Summaries& summaries, const Rows& values, RowRange zone, int64_t segment,
               SummaryTable& table)
      : summaries_(summaries),
        values_(values),
        segment_(segment),
        d_(summaries.head_dim()),
        clusters_(summaries.layout().ClustersOf(segment)),
        rows_(summaries.layout().RowsOf(segment)),
        inside_{std::max(rows_.begin, zone.begin), std::min(rows_.end, zone.end)},
        table_(table) {}

  absl::Status Add() {
    ASSIGN_OR_RETURN(bytes_, summaries_.Segment(segment_));
    const SummaryLayout& layout = summaries_.layout();
    const size_t first = table_.clusters.size();
    const auto all = static_cast<size_t>(layout.max_clusters());
    table_.clusters.resize(first + all, {0, 0, 0, 0});
    table_.keys.resize((first + all) * static_cast<size_t>(d_));
    table_.values.resize((first + all) * static_cast<size_t>(d_));
    const auto means = static_cast<size_t>(clusters_ * d_);
    std::memcpy(&table_.keys[first * static_cast<size_t>(d_)],
                bytes_ + layout.KeysOffset(clusters_), means);
    std::memcpy(&table_.values[first * static_cast<size_t>(d_)],
                bytes_ + layout.ValuesOffset(clusters_), means);
    of_segment_ = &table_.clusters[first];
    values_of_segment_ = &table_.values[first * static_cast<size_t>(d_)];
    RETURN_IF_ERROR(CopyClusters());
    RETURN_IF_ERROR(CopyRowClusters());
    if (inside_.rows() < rows_.rows()) RETURN_IF_ERROR(KeepRowsInside());
    if (summaries_.fit().left_out) {
      for (int64_t c = 0; c < clusters_; ++c) of_segment_[c].rows = 0;
    }
    return absl::OkStatus();
  }

 private:
  template <typename T>
  T Part(int64_t part, int64_t cluster) const {  // the four lists before the means
    T x;
    std::memcpy(&x, bytes_ + 4 * (part * clusters_ + cluster), sizeof(T));
    return x;
  }

  absl::Status CopyClusters() {
    const float share = summaries_.fit().spread_share;
    for (int64_t c = 0; c < clusters_; ++c) {
      const auto rows = static_cast<float>(Part<uint32_t>(0, c));
      SummaryTable::Cluster& cluster = of_segment_[c];
      cluster = {Part<float>(1, c), share * Part<float>(3, c), Part<float>(2, c), rows};
      const auto bounded = [](float x) { return x >= 0 && x <= 1e18f; };
      if (!bounded(cluster.key_scale) || !bounded(cluster.value_scale) ||
          !bounded(cluster.spread) || rows > static_cast<float>(rows_.rows())) {
        return absl::DataLossError(absl::StrCat("summaries: segment ", segment_, " cluster ", c,
                                                ": scales or rows out of bounds"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CopyRowClusters() {
    const char* of_rows = bytes_ + summaries_.layout().RowClustersOffset(clusters_);
    for (Position row = inside_.begin; row < inside_.end; ++row) {
      const auto cluster = static_cast<uint8_t>(of_rows[row - rows_.begin]);
      if (cluster >= clusters_) {
        return absl::DataLossError(
            absl::StrCat("summaries: row ", row, ": cluster ", cluster, " of ", clusters_));
      }
      table_.row_cluster.push_back(cluster);
    }
    return absl::OkStatus();
  }

  absl::Status KeepRowsInside() {
    RETURN_IF_ERROR(values_.Verify(inside_));
    const auto d = static_cast<size_t>(d_);
    std::vector<double> sums(static_cast<size_t>(clusters_) * d);
    std::vector<float> row(d), counts(static_cast<size_t>(clusters_));
    const uint8_t* cluster =
        table_.row_cluster.data() + table_.row_cluster.size() - static_cast<size_t>(inside_.rows());
    for (Position at = inside_.begin; at < inside_.end; ++at, ++cluster) {
      WidenToFloat(DType::kBf16, values_.Address(at), d_, row.data());
      counts[*cluster] += 1;
      for (size_t i = 0; i < d; ++i) sums[*cluster * d + i] += row[i];
    }
    for (size_t c = 0; c < counts.size(); ++c) {
      of_segment_[c].rows = counts[c];
      if (counts[c] > 0) Quantise(&sums[c * d], counts[c], of_segment_[c].value_scale, c);
    }
    return absl::OkStatus();
  }

  void Quantise(const double* sum, double count, float& scale, size_t cluster) {
    double largest = 0;
    for (int64_t i = 0; i < d_; ++i) largest = std::max(largest, std::abs(sum[i] / count));
    scale = static_cast<float>(largest / 127);
    int8_t* out = values_of_segment_ + static_cast<int64_t>(cluster) * d_;
    for (int64_t i = 0; i < d_; ++i) {
      out[i] = largest == 0 ? 0 : static_cast<int8_t>(std::lround(sum[i] / count / largest * 127));
    }
  }

  const Summaries& summaries_;
  const Rows& values_;
  const int64_t segment_, d_, clusters_;
  const RowRange rows_, inside_;
  SummaryTable& table_;
  const char* bytes_ = nullptr;
  SummaryTable::Cluster* of_segment_ = nullptr;
  int8_t* values_of_segment_ = nullptr;
};

}  // namespace

kernels::SummarySegments SummarySegmentsOf(const SummaryLayout& layout, RowRange zone) {
  return {zone.begin % layout.segment_rows(), layout.segment_rows(), layout.max_clusters()};
}

absl::StatusOr<SummaryTable> MakeSummaryTable(const Summaries& summaries, const Rows& values,
                                              RowRange zone) {
  const SummaryLayout& layout = summaries.layout();
  SummaryTable table;
  table.segments = SummarySegmentsOf(layout, zone);
  table.centre = summaries.centre();
  const int64_t segment_rows = layout.segment_rows();
  for (int64_t s = zone.begin / segment_rows; s * segment_rows < zone.end; ++s) {
    RETURN_IF_ERROR(SegmentTable(summaries, values, zone, s, table).Add());
  }
  return table;
}

}  // namespace carrel::kvstore
