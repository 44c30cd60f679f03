#include "kvstore/index/summaries/summaries.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/status.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/summary_attention/summary_attention.h"
#include "kernels/select/sort_words/sort_words.h"
#include "kvstore/format/keys.h"
#include "kvstore/index/summaries/summaries_header.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kLongestSegmentRows = 8192;
constexpr int64_t kMaxClusters = 256;  // of a segment: a row's cluster is one byte
constexpr int64_t kPadding = 64;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::DataLossError(absl::StrCat("summaries: ", parts...));
}

template <typename T>
void Take(const char*& bytes, int64_t count, std::vector<T>& values) {
  values.resize(static_cast<size_t>(count));
  std::memcpy(values.data(), bytes, values.size() * sizeof(T));
  bytes += values.size() * sizeof(T);
}

double Dot(const float* a, const float* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double{a[i]} * b[i];
  return sum;
}

// A selected row as a word, of which many are sorted at once: its id, and its index among the
// selected below it.
uint64_t SelectedRow(Position id, size_t index) { return static_cast<uint64_t>(id) << 32 | index; }
Position IdOf(uint64_t row) { return static_cast<Position>(row >> 32); }
int64_t IndexOf(uint64_t row) { return static_cast<uint32_t>(row); }

// One segment's share of the rest.
class SegmentEstimate {
 public:
  SegmentEstimate(const Summaries& summaries, const EstimateParams& params,
                  absl::Span<const float> shares, int64_t segment, EstimateScratch& scratch)
      : summaries_(summaries),
        p_(params),
        s_(scratch),
        shares_(shares),
        segment_(segment),
        d_(summaries.head_dim()),
        clusters_(summaries.layout().ClustersOf(segment)),
        rows_(summaries.layout().RowsOf(segment)),
        inside_{std::max(rows_.begin, params.zone.begin), std::min(rows_.end, params.zone.end)} {}

  // selected: those of the segment, by id. out, lse: of every share.
  absl::Status Compute(absl::Span<const uint64_t> selected, float* out, float* lse) {
    ASSIGN_OR_RETURN(bytes_, summaries_.Segment(segment_));
    RETURN_IF_ERROR(ReadClusters());
    row_clusters_ =
        reinterpret_cast<const uint8_t*>(bytes_ + summaries_.layout().RowClustersOffset(clusters_));
    s_.v.clear();
    s_.row_cluster.clear();
    s_.row_weight.clear();
    // What differs from whole clusters is read row by row: the fewer of both sides.
    if (inside_.rows() < rows_.rows() - inside_.rows()) {
      RETURN_IF_ERROR(AddRowsInside(selected));
    } else {
      RETURN_IF_ERROR(Push({rows_.begin, inside_.begin}, -1));
      RETURN_IF_ERROR(Push({inside_.end, rows_.end}, -1));
      RETURN_IF_ERROR(RemoveRows(selected));
      for (int64_t c = 0; c < clusters_; ++c) {
        if (s_.rests[c] < 0) return Refuse("segment ", segment_, ": cluster ", c, " lost rows");
      }
    }
    const int64_t scores = p_.group * clusters_;
    s_.scores.resize(shares_.size() * static_cast<size_t>(scores));
    for (size_t i = 0; i < shares_.size(); ++i) {
      ScoreClusters(shares_[i], selected, &s_.scores[i * static_cast<size_t>(scores)]);
    }
    Attend(out, lse);
    return absl::OkStatus();
  }

 private:
  absl::Status ReadClusters() {
    const char* at = bytes_;
    Take(at, clusters_, s_.sizes);
    Take(at, clusters_, s_.key_scale);
    Take(at, clusters_, s_.value_scale);
    Take(at, clusters_, s_.spread);
    int64_t rows = 0;
    bool all_bounded = true;
    // Not larger than any bf16 is: no product with it overflows into NaN by itself.
    const auto bounded = [this](int64_t c) {
      const auto fits = [](float x) { return (x >= 0) & (x <= 1e18f); };
      return fits(s_.key_scale[c]) & fits(s_.value_scale[c]) & fits(s_.spread[c]);
    };
    for (int64_t c = 0; c < clusters_; ++c) {
      rows += s_.sizes[c];
      all_bounded &= bounded(c);
    }
    for (int64_t c = 0; !all_bounded && c < clusters_; ++c) {
      if (!bounded(c)) {
        return Refuse("segment ", segment_, " cluster ", c, ": scales ", s_.key_scale[c], " ",
                      s_.value_scale[c], " spread ", s_.spread[c]);
      }
    }
    if (rows != rows_.rows()) {
      return Refuse("segment ", segment_, ": clusters of ", rows, " rows instead of ",
                    rows_.rows());
    }
    s_.counts.assign(s_.sizes.begin(), s_.sizes.end());
    s_.rests = s_.counts;
    return absl::OkStatus();
  }

  absl::Status CheckClusters(size_t first) const {
    for (size_t i = first; i < s_.row_cluster.size(); ++i) {
      if (s_.row_cluster[i] < clusters_) continue;
      return Refuse("segment ", segment_, ": a row of cluster ", s_.row_cluster[i], " of ",
                    clusters_);
    }
    return absl::OkStatus();
  }

  absl::Status Push(RowRange range, float weight) {
    if (range.rows() <= 0) return absl::OkStatus();
    RETURN_IF_ERROR(p_.values->Verify(range));
    const size_t first = s_.v.size();
    const uint8_t* const clusters = row_clusters_ + (range.begin - rows_.begin);
    s_.row_cluster.insert(s_.row_cluster.end(), clusters, clusters + range.rows());
    RETURN_IF_ERROR(CheckClusters(first));
    s_.row_weight.resize(s_.row_cluster.size(), weight);
    p_.values->ForEachPiece(range, [this](Position, const void* address, int64_t rows) {
      const auto* row = static_cast<const char*>(address);
      for (int64_t i = 0; i < rows; ++i) s_.v.push_back(row + i * p_.values->row_bytes());
    });
    for (int64_t i = 0; i < range.rows(); ++i) s_.rests[clusters[i]] += weight;
    return absl::OkStatus();
  }

  absl::Status RemoveRows(absl::Span<const uint64_t> selected) {
    const size_t first = s_.v.size();
    s_.v.resize(first + selected.size());
    s_.row_cluster.resize(s_.v.size());
    s_.row_weight.resize(s_.v.size(), -1);
    for (size_t i = 0; i < selected.size(); ++i) {
      const Position id = IdOf(selected[i]);
      s_.v[first + i] = p_.values->Address(id);
      s_.row_cluster[first + i] = row_clusters_[id - rows_.begin];
    }
    RETURN_IF_ERROR(CheckClusters(first));
    for (size_t i = first; i < s_.v.size(); ++i) s_.rests[s_.row_cluster[i]] -= 1;
    return absl::OkStatus();
  }

  absl::Status AddRowsInside(absl::Span<const uint64_t> selected) {
    std::fill(s_.counts.begin(), s_.counts.end(), 0.0f);
    std::fill(s_.rests.begin(), s_.rests.end(), 0.0f);
    Position from = inside_.begin;
    for (const uint64_t row : selected) {
      RETURN_IF_ERROR(Push({from, IdOf(row)}, 1));
      from = IdOf(row) + 1;
    }
    return Push({from, inside_.end}, 1);
  }

  // With this share of the spreads; [group, clusters].
  void ScoreClusters(float share, absl::Span<const uint64_t> selected, float* scores) {
    s_.share_of_spread.resize(s_.spread.size());
    for (size_t c = 0; c < s_.spread.size(); ++c) s_.share_of_spread[c] = share * s_.spread[c];
    kernels::SummaryScoreParams params;
    params.q = p_.queries;
    params.group = p_.group;
    params.head_dim = d_;
    params.scale = p_.scale;
    params.keys = bytes_ + summaries_.layout().KeysOffset(clusters_);
    params.key_scale = s_.key_scale.data();
    params.spread = s_.share_of_spread.data();
    params.clusters = clusters_;
    params.scores = scores;
    kernels::ScoreSummaries(params);
    if (p_.scores != nullptr && !selected.empty()) AdjustScores(selected, scores);
  }

  // Rows are selected because they score high: those that remain of their clusters score lower
  // than a cluster's mean says. Their mean and variance follow from the cluster's and the scores
  // of those that went.
  void AdjustScores(absl::Span<const uint64_t> selected, float* all_scores) {
    CountGone(selected);
    const auto wanted = static_cast<int64_t>(p_.selected.size());
    float* const sum = s_.sums.data();
    float* const squares = sum + clusters_;
    for (int64_t h = 0; h < p_.group; ++h) {
      const double base = s_.base[static_cast<size_t>(h)];
      const float half = s_.half[static_cast<size_t>(h)];
      float* scores = all_scores + h * clusters_;
      for (const uint8_t c : s_.touched) sum[c] = squares[c] = 0;
      for (const uint64_t row : selected) {
        const uint8_t c = row_clusters_[IdOf(row) - rows_.begin];
        if (c >= clusters_) continue;
        const float mean = scores[c] - s_.share_of_spread[c] * half;
        const auto above = static_cast<float>(p_.scores[h * wanted + IndexOf(row)] - base - mean);
        sum[c] += above;
        squares[c] += above * above;
      }
      for (const uint8_t c : s_.touched) {
        const auto size = static_cast<float>(s_.sizes[c]);
        const float left = size - s_.gone[c];
        if (left <= 0) continue;
        const float variance = 2 * s_.share_of_spread[c] * half;
        const float mean = scores[c] - variance / 2;
        const float shift = std::min(-sum[c] / left, 0.0f);
        const float rest = (size * variance - squares[c]) / left - shift * shift;
        scores[c] = mean + shift + std::clamp(rest, 0.0f, variance) / 2;
      }
    }
  }

  // The clusters of which rows are selected, and how many of each.
  void CountGone(absl::Span<const uint64_t> selected) {
    s_.sums.resize(static_cast<size_t>(2 * clusters_));
    s_.gone.assign(static_cast<size_t>(clusters_), 0.0f);
    s_.touched.clear();
    for (const uint64_t row : selected) {
      const uint8_t c = row_clusters_[IdOf(row) - rows_.begin];  // checked when it was removed
      if (c >= clusters_) continue;
      if (s_.gone[c] == 0) s_.touched.push_back(c);
      s_.gone[c] += 1;
    }
  }

  void Attend(float* out, float* lse) {
    kernels::SummaryAttentionParams params;
    params.scores = s_.scores.data();
    params.bound = p_.bound == nullptr ? nullptr : s_.bound.data();
    params.group = p_.group * static_cast<int64_t>(shares_.size());
    params.head_dim = d_;
    params.values = bytes_ + summaries_.layout().ValuesOffset(clusters_);
    params.value_scale = s_.value_scale.data();
    params.counts = s_.counts.data();
    params.rests = s_.rests.data();
    params.clusters = clusters_;
    params.v = s_.v.data();
    params.row_cluster = s_.row_cluster.data();
    params.row_weight = s_.row_weight.data();
    params.rows = static_cast<int64_t>(s_.v.size());
    params.out = out;
    params.lse = lse;
    s_.weights.resize(static_cast<size_t>(kernels::SummaryAttentionScratchFloats(params)));
    kernels::AttendSummaries(params, s_.weights.data());
  }

  const Summaries& summaries_;
  const EstimateParams& p_;
  EstimateScratch& s_;
  const absl::Span<const float> shares_;
  const int64_t segment_, d_, clusters_;
  const RowRange rows_, inside_;
  const char* bytes_ = nullptr;
  const uint8_t* row_clusters_ = nullptr;
};

void SortSelected(const EstimateParams& p, EstimateScratch& scratch) {
  scratch.selected.resize(p.selected.size());
  for (size_t i = 0; i < p.selected.size(); ++i) {
    scratch.selected[i] = SelectedRow(p.selected[i], i);
  }
  if (!std::is_sorted(scratch.selected.begin(), scratch.selected.end())) {
    kernels::SortWords(scratch.selected.data(), static_cast<int64_t>(scratch.selected.size()));
  }
}

// What is the same for every segment.
void PrepareHeads(const Summaries& summaries, const EstimateParams& p, int64_t shares,
                  EstimateScratch& scratch) {
  const int64_t d = summaries.head_dim();
  scratch.base.clear();
  scratch.half.clear();
  scratch.bound.clear();
  for (int64_t h = 0; h < p.group; ++h) {
    const float* q = p.queries + h * d;
    scratch.base.push_back(p.scale * Dot(q, summaries.centre().data(), d));
    scratch.half.push_back(static_cast<float>(Dot(q, q, d) * p.scale * p.scale / 2));
  }
  for (int64_t i = 0; p.bound != nullptr && i < shares * p.group; ++i) {
    const int64_t h = i % p.group;
    scratch.bound.push_back(static_cast<float>(p.bound[h] - scratch.base[static_cast<size_t>(h)]));
  }
}

}  // namespace

absl::Status ValidateSummaryRows(int64_t cluster_rows) {
  if (cluster_rows == 0 || (cluster_rows >= kMinSummaryRows && cluster_rows <= kMaxSummaryRows)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("summaries=", cluster_rows,
                                                 " rows per cluster: must be 0 or in [",
                                                 kMinSummaryRows, ", ", kMaxSummaryRows, "]"));
}

int64_t SummaryBytesPerKey(int64_t cluster_rows, int64_t head_dim) {
  return CeilDiv(2 * head_dim + 16, cluster_rows) + 2;
}

SummaryLayout::SummaryLayout(int64_t rows, int64_t head_dim, int64_t cluster_rows)
    : rows_(rows),
      head_dim_(head_dim),
      cluster_rows_(cluster_rows),
      segment_rows_(std::min(kLongestSegmentRows, kMaxClusters * cluster_rows)),
      first_offset_(SummaryFirstOffset(head_dim)),
      chunk_segments_((kIndexChunkBytes - first_offset_) / Padded(max_clusters(), segment_rows_)) {}

int64_t SummaryLayout::segments() const { return CeilDiv(rows_, segment_rows_); }
int64_t SummaryLayout::max_clusters() const { return CeilDiv(segment_rows_, cluster_rows_); }

RowRange SummaryLayout::RowsOf(int64_t segment) const {
  return {segment * segment_rows_, std::min(rows_, (segment + 1) * segment_rows_)};
}

int64_t SummaryLayout::ClustersOf(int64_t segment) const {
  return CeilDiv(RowsOf(segment).rows(), cluster_rows_);
}

int64_t SummaryLayout::Offset(int64_t segment) const {
  return segment / chunk_segments_ * kIndexChunkBytes + first_offset_ +
         segment % chunk_segments_ * Padded(max_clusters(), segment_rows_);
}

int64_t SummaryLayout::SegmentBytes(int64_t segment) const {
  return Padded(ClustersOf(segment), RowsOf(segment).rows());
}

int64_t SummaryLayout::Padded(int64_t clusters, int64_t rows) const {
  return CeilDiv(RowClustersOffset(clusters) + rows, kPadding) * kPadding;
}

int64_t SummaryLayout::blob_bytes() const {
  if (rows_ == 0) return first_offset_;
  return Offset(segments() - 1) + SegmentBytes(segments() - 1);
}

absl::StatusOr<Summaries> Summaries::Open(Blob blob, int64_t rows, int64_t head_dim) {
  Summaries summaries;
  ASSIGN_OR_RETURN(const SummaryHeader header, DecodeSummaryHeader(blob, summaries.centre_));
  if (header.rows != rows || header.head_dim != head_dim) {
    return Refuse("of ", header.rows, " rows of ", header.head_dim, ", not ", rows, " of ",
                  head_dim);
  }
  summaries.rows_ = rows;
  summaries.cluster_rows_ = header.cluster_rows;
  summaries.fit_ = header.fit;
  summaries.layout_ = SummaryLayout(rows, head_dim, header.cluster_rows);
  if (blob.size() != summaries.layout_.blob_bytes()) {
    return Refuse(blob.size(), " bytes instead of ", summaries.layout_.blob_bytes());
  }
  summaries.blob_ = std::move(blob);
  return summaries;
}

absl::StatusOr<const char*> Summaries::Segment(int64_t segment) const {
  const int64_t at = layout_.Offset(segment), end = at + layout_.SegmentBytes(segment);
  RETURN_IF_ERROR(blob_.Verify(at, end));
  return blob_.Address(at);
}

absl::Status EstimateRest(const Summaries& summaries, const EstimateParams& p,
                          EstimateScratch& scratch) {
  const int64_t d = summaries.head_dim();
  const float own = summaries.fit().spread_share;
  const absl::Span<const float> shares =
      p.spread_shares.empty() ? absl::MakeConstSpan(&own, 1) : p.spread_shares;
  const int64_t states = static_cast<int64_t>(shares.size()) * p.group;
  std::fill_n(p.out, states * d, 0.0f);
  std::fill_n(p.lse, states, -INFINITY);
  if (summaries.fit().left_out && p.spread_shares.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(p.values->VerifyRows(p.selected.data(), static_cast<int64_t>(p.selected.size())));
  SortSelected(p, scratch);
  PrepareHeads(summaries, p, static_cast<int64_t>(shares.size()), scratch);
  scratch.state.resize(static_cast<size_t>(states * (d + 1)));
  float* const out = scratch.state.data();
  float* const lse = out + states * d;
  const int64_t segment_rows = summaries.layout().segment_rows();
  auto from = scratch.selected.begin();
  for (Position at = p.zone.begin; at < p.zone.end;) {
    const int64_t segment = at / segment_rows;
    const Position end = std::min(p.zone.end, (segment + 1) * segment_rows);
    auto to = from;
    while (to != scratch.selected.end() && IdOf(*to) < end) ++to;
    SegmentEstimate estimate(summaries, p, shares, segment, scratch);
    const auto* const first = scratch.selected.data() + (from - scratch.selected.begin());
    RETURN_IF_ERROR(estimate.Compute({first, static_cast<size_t>(to - from)}, out, lse));
    kernels::MergeStates(p.out, p.lse, out, lse, states, d);
    from = to;
    at = end;
  }
  for (int64_t i = 0; i < states; ++i) {
    p.lse[i] += static_cast<float>(scratch.base[static_cast<size_t>(i % p.group)]);
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
