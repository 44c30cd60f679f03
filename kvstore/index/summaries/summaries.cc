#include "kvstore/index/summaries/summaries.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/status.h"
#include "common/thread_pool.h"
#include "common/thrown.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/summary_attention/summary_attention.h"
#include "kernels/select/sort_words/sort_words.h"
#include "kvstore/format/keys.h"
#include "kvstore/index/summaries/summaries_header.h"

namespace carrel::kvstore {
namespace {

using retrieval::EstimateRequest;

constexpr int64_t kLongestSegmentRows = 8192;
constexpr int64_t kMaxClusters = kernels::kMaxSummaryClusters;  // of a segment: a row's is one byte
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

// Of scales and spreads. Not larger than any bf16 is: no product with it overflows into NaN by itself.
constexpr float kLargest = 1e18f;

// False only if all values are in [0, kLargest]. The bits of such floats are ordered as they are.
bool MayExceedLargest(const std::vector<float>& values) {
  constexpr auto kLargestBits = std::bit_cast<uint32_t>(kLargest);
  uint32_t above = 0;
  for (const float x : values) {
    const auto bits = std::bit_cast<uint32_t>(x);
    above |= bits | (kLargestBits - bits);  // the top bit: a sign, or less than nothing
  }
  return above >> 31 != 0;
}

// In four sums: one would wait for each addition.
double Dot(const float* a, const float* b, int64_t n) {
  double sum[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int64_t j = 0; j < 4; ++j) sum[j] += double{a[i + j]} * b[i + j];
  }
  for (; i < n; ++i) sum[0] += double{a[i]} * b[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Selected rows by id, and their scores [group, stride], or null.
struct SelectedRows {
  absl::Span<const Position> ids;
  const float* scores = nullptr;
  int64_t stride = 0;

  // Takes those below `end` away from the front.
  SelectedRows TakeBelow(Position end) {
    const auto n = std::lower_bound(ids.begin(), ids.end(), end) - ids.begin();
    const SelectedRows taken{ids.first(static_cast<size_t>(n)), scores, stride};
    ids.remove_prefix(static_cast<size_t>(n));
    if (scores != nullptr) scores += n;
    return taken;
  }
};

// q heads of a group and columns of their sums: all of them, or a slice that a thread takes.
struct Slice {
  int64_t head = 0, heads = 0;
  int64_t column = 0, columns = 0;
};

// One segment's share of the rest, of a slice.
class SegmentEstimate {
 public:
  // prepared: by PrepareHeads.
  SegmentEstimate(const Summaries& summaries, const Rows& values, const EstimateRequest& params,
                  Slice slice, absl::Span<const float> shares, int64_t segment,
                  const EstimateScratch& prepared, EstimateScratch& scratch)
      : summaries_(summaries),
        values_(values),
        p_(params),
        slice_(slice),
        prepared_(prepared),
        s_(scratch),
        shares_(shares),
        segment_(segment),
        d_(summaries.head_dim()),
        clusters_(summaries.layout().ClustersOf(segment)),
        rows_(summaries.layout().RowsOf(segment)),
        inside_{std::max(rows_.begin, params.zone.begin), std::min(rows_.end, params.zone.end)} {}

  // selected: those of the segment. out [shares, heads, head_dim], of which the slice's columns are written;
  // lse [shares, heads], written by the slices with the first column.
  absl::Status Compute(const SelectedRows& selected, float* out, float* lse) {
    ASSIGN_OR_RETURN(bytes_, summaries_.Segment(segment_));
    RETURN_IF_ERROR(ReadClusters());
    RETURN_IF_ERROR(ReadSelected(selected.ids));
    const size_t selected_rows = s_.v.size();
    // What differs from whole clusters is read row by row: the fewer of both sides.
    const bool few_inside = inside_.rows() < rows_.rows() - inside_.rows();
    RETURN_IF_ERROR(few_inside ? AddRowsInside(selected.ids) : RemoveRowsOutside());
    const int64_t scores = slice_.heads * clusters_;
    s_.scores.resize(shares_.size() * static_cast<size_t>(scores));
    for (size_t i = 0; i < shares_.size(); ++i) {
      ScoreClusters(shares_[i], selected, &s_.scores[i * static_cast<size_t>(scores)]);
    }
    if (few_inside) {
      std::fill(s_.value_scale.begin(), s_.value_scale.end(), 0.0f);  // no mean counts
      Attend(selected_rows, 1, out, lse);
    } else {
      Attend(0, -1, out, lse);
    }
    return absl::OkStatus();
  }

 private:
  using Counts = std::array<int32_t, kMaxClusters>;

  absl::Status ReadClusters() {
    const char* at = bytes_;
    Take(at, clusters_, s_.sizes);
    Take(at, clusters_, s_.key_scale);
    Take(at, clusters_, s_.value_scale);
    Take(at, clusters_, s_.spread);
    int64_t rows = 0;
    for (const uint32_t size : s_.sizes) rows += size;
    if (MayExceedLargest(s_.key_scale) || MayExceedLargest(s_.value_scale) ||
        MayExceedLargest(s_.spread)) {
      RETURN_IF_ERROR(CheckScales());
    }
    if (rows != rows_.rows()) {
      return Refuse("segment ", segment_, ": clusters of ", rows, " rows instead of ",
                    rows_.rows());
    }
    s_.counts.assign(s_.sizes.begin(), s_.sizes.end());
    row_clusters_ =
        reinterpret_cast<const uint8_t*>(bytes_ + summaries_.layout().RowClustersOffset(clusters_));
    return absl::OkStatus();
  }

  absl::Status CheckScales() const {
    const auto fits = [](float x) { return x >= 0 && x <= kLargest; };
    for (int64_t c = 0; c < clusters_; ++c) {
      if (fits(s_.key_scale[c]) && fits(s_.value_scale[c]) && fits(s_.spread[c])) continue;
      return Refuse("segment ", segment_, " cluster ", c, ": scales ", s_.key_scale[c], " ",
                    s_.value_scale[c], " spread ", s_.spread[c]);
    }
    return absl::OkStatus();
  }

  // Of the rows from `first` on that were read, how many each cluster has.
  absl::Status Count(size_t first, Counts& counts) const {
    counts.fill(0);
    for (size_t i = first; i < s_.row_cluster.size(); ++i) ++counts[s_.row_cluster[i]];
    if (std::all_of(counts.begin() + clusters_, counts.end(), [](int32_t n) { return n == 0; })) {
      return absl::OkStatus();
    }
    while (s_.row_cluster[first] < clusters_) ++first;
    return Refuse("segment ", segment_, ": a row of cluster ", s_.row_cluster[first], " of ",
                  clusters_);
  }

  // The selected rows come first of all that are read.
  absl::Status ReadSelected(absl::Span<const Position> ids) {
    s_.v.resize(ids.size());
    s_.row_cluster.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) s_.v[i] = values_.Address(ids[i]);
    std::transform(
        ids.begin(), ids.end(), s_.row_cluster.begin(),
        [of = row_clusters_, first = rows_.begin](Position id) { return of[id - first]; });
    Counts selected;
    RETURN_IF_ERROR(Count(0, selected));
    s_.left.resize(s_.counts.size());
    for (int64_t c = 0; c < clusters_; ++c) {
      s_.left[c] = s_.counts[c] - static_cast<float>(selected[c]);
    }
    return absl::OkStatus();
  }

  absl::Status Push(RowRange range) {
    if (range.rows() <= 0) return absl::OkStatus();
    RETURN_IF_ERROR(values_.Verify(range));
    const uint8_t* const clusters = row_clusters_ + (range.begin - rows_.begin);
    s_.row_cluster.insert(s_.row_cluster.end(), clusters, clusters + range.rows());
    values_.ForEachPiece(range, [this](Position, const void* address, int64_t rows) {
      const auto* row = static_cast<const char*>(address);
      for (int64_t i = 0; i < rows; ++i) s_.v.push_back(row + i * values_.row_bytes());
    });
    return absl::OkStatus();
  }

  absl::Status RemoveRowsOutside() {
    const size_t first = s_.v.size();
    RETURN_IF_ERROR(Push({rows_.begin, inside_.begin}));
    RETURN_IF_ERROR(Push({inside_.end, rows_.end}));
    Counts outside;
    RETURN_IF_ERROR(Count(first, outside));
    s_.rests.resize(s_.left.size());
    for (int64_t c = 0; c < clusters_; ++c) {
      s_.rests[c] = s_.left[c] - static_cast<float>(outside[c]);
      if (s_.rests[c] < 0) return Refuse("segment ", segment_, ": cluster ", c, " lost rows");
    }
    return absl::OkStatus();
  }

  absl::Status AddRowsInside(absl::Span<const Position> selected) {
    const size_t first = s_.v.size();
    Position from = inside_.begin;
    for (const Position id : selected) {
      RETURN_IF_ERROR(Push({from, id}));
      from = id + 1;
    }
    RETURN_IF_ERROR(Push({from, inside_.end}));
    Counts inside;
    RETURN_IF_ERROR(Count(first, inside));
    s_.rests.assign(inside.begin(), inside.begin() + clusters_);
    return absl::OkStatus();
  }

  // With this share of the spreads; [group, clusters]. Rows are selected because they score high:
  // those that remain of their clusters score lower than a cluster's mean says.
  void ScoreClusters(float share, const SelectedRows& selected, float* scores) {
    kernels::SummaryScoreParams params;
    params.q = p_.queries + slice_.head * d_;
    params.group = slice_.heads;
    params.head_dim = d_;
    params.scale = p_.scale;
    params.keys = bytes_ + summaries_.layout().KeysOffset(clusters_);
    params.key_scale = s_.key_scale.data();
    params.spread = s_.spread.data();
    params.share = share;
    params.clusters = clusters_;
    params.row_cluster = s_.row_cluster.data();
    if (selected.scores != nullptr) {
      params.row_scores = selected.scores + slice_.head * selected.stride;
      params.row_score_stride = selected.stride;
      params.rows = static_cast<int64_t>(selected.ids.size());
    }
    params.base = prepared_.base.data() + slice_.head;
    params.counts = s_.counts.data();
    params.left = s_.left.data();
    params.scores = scores;
    kernels::ScoreSummaries(params);
  }

  // The rows that were read, from `first` on, correct the clusters' sums.
  void Attend(size_t first, float row_weight, float* out, float* lse) {
    kernels::SummaryAttentionParams params;
    params.scores = s_.scores.data();
    params.bound = p_.bound == nullptr ? nullptr : prepared_.bound.data() + slice_.head;
    params.group = slice_.heads * static_cast<int64_t>(shares_.size());
    params.head_dim = d_;
    params.values = bytes_ + summaries_.layout().ValuesOffset(clusters_);
    params.value_scale = s_.value_scale.data();
    params.counts = s_.counts.data();
    params.rests = s_.rests.data();
    params.clusters = clusters_;
    params.v = s_.v.data() + first;
    params.row_cluster = s_.row_cluster.data() + first;
    params.row_weight = row_weight;
    params.rows = static_cast<int64_t>(s_.v.size() - first);
    params.first_column = slice_.column;
    params.columns = slice_.columns;
    params.out = out;
    params.lse = lse;
    if (slice_.column > 0) {
      s_.lse.resize(static_cast<size_t>(params.group));
      params.lse = s_.lse.data();
    }
    s_.weights.resize(static_cast<size_t>(kernels::SummaryAttentionScratchFloats(params)));
    kernels::AttendSummaries(params, s_.weights.data());
  }

  const Summaries& summaries_;
  const Rows& values_;
  const EstimateRequest& p_;
  const Slice slice_;  // all of it where there are several shares
  const EstimateScratch& prepared_;
  EstimateScratch& s_;
  const absl::Span<const float> shares_;
  const int64_t segment_, d_, clusters_;
  const RowRange rows_, inside_;
  const char* bytes_ = nullptr;
  const uint8_t* row_clusters_ = nullptr;
};

SelectedRows SortSelected(const EstimateRequest& p, EstimateScratch& scratch) {
  const size_t n = p.selected.size();
  const auto stride = static_cast<int64_t>(n);
  if (std::is_sorted(p.selected.begin(), p.selected.end())) return {p.selected, p.scores, stride};
  // As words, of which many are sorted at once: the id, and below it the index among the selected.
  scratch.selected.clear();
  for (size_t i = 0; i < n; ++i) {
    scratch.selected.push_back(static_cast<uint64_t>(p.selected[i]) << 32 | i);
  }
  kernels::SortWords(scratch.selected.data(), stride);
  scratch.ids.clear();
  for (const uint64_t row : scratch.selected)
    scratch.ids.push_back(static_cast<Position>(row >> 32));
  if (p.scores == nullptr) return {scratch.ids, nullptr, stride};
  scratch.selected_scores.clear();
  for (int64_t h = 0; h < p.group; ++h) {
    for (const uint64_t row : scratch.selected) {
      scratch.selected_scores.push_back(p.scores[h * stride + static_cast<uint32_t>(row)]);
    }
  }
  return {scratch.ids, scratch.selected_scores.data(), stride};
}

// What is the same for every segment.
void PrepareHeads(const Summaries& summaries, const EstimateRequest& p, int64_t shares,
                  EstimateScratch& scratch) {
  const int64_t d = summaries.head_dim();
  scratch.base.clear();
  scratch.bound.clear();
  for (int64_t h = 0; h < p.group; ++h) {
    const double product = Dot(p.queries + h * d, summaries.centre().data(), d);
    scratch.base.push_back(static_cast<float>(p.scale * product));
  }
  for (int64_t i = 0; p.bound != nullptr && i < shares * p.group; ++i) {
    const int64_t h = i % p.group;
    scratch.bound.push_back(p.bound[h] - scratch.base[static_cast<size_t>(h)]);
  }
}

// Where segments are few beside the threads, each is cut by heads and columns, too: a head and a column have
// the bits that they have beside others. What all of them need is then computed for each slice, which pays
// where threads have nothing to do; of KV heads there are two at least, as a rule.
constexpr int64_t kSliceHeads = 4, kColumnsAlike = 16, kLeastHeads = 2;

std::vector<Slice> SlicesOf(const EstimateRequest& p, int64_t d, int64_t shares, int64_t segments) {
  const int64_t threads = p.pool == nullptr || shares > 1 ? 1 : p.pool->threads() + 1;
  const int64_t wanted = std::max<int64_t>(1, threads / (kLeastHeads * segments));
  const int64_t parts = std::min(CeilDiv(p.group, kSliceHeads), wanted);
  const int64_t half = CeilDiv(d, 2 * kColumnsAlike) * kColumnsAlike;
  const bool halves = wanted >= 2 * parts && half < d;
  std::vector<Slice> slices;
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t head = p.group * i / parts, heads = p.group * (i + 1) / parts - head;
    slices.push_back({head, heads, 0, halves ? half : d});
    if (halves) slices.push_back({head, heads, half, d - half});
  }
  return slices;
}

// Merges the segments' states in order, whoever computed them.
absl::Status AddSegments(const Summaries& summaries, const Rows& values, const EstimateRequest& p,
                         absl::Span<const float> shares, SelectedRows selected,
                         EstimateScratch& scratch) {
  if (p.zone.rows() <= 0) return absl::OkStatus();
  const int64_t d = summaries.head_dim(), segment_rows = summaries.layout().segment_rows();
  const int64_t states = static_cast<int64_t>(shares.size()) * p.group, floats = states * (d + 1);
  const int64_t first = p.zone.begin / segment_rows;
  const int64_t segments = CeilDiv(p.zone.end, segment_rows) - first;
  const std::vector<Slice> slices = SlicesOf(p, d, static_cast<int64_t>(shares.size()), segments);
  const auto units = segments * static_cast<int64_t>(slices.size());
  const auto compute = [&](int64_t i, const Slice& slice, const SelectedRows& of_segment,
                           EstimateScratch& own, float* state) {
    return SegmentEstimate(summaries, values, p, slice, shares, first + i, scratch, own)
        .Compute(of_segment, state + slice.head * d, state + states * d + slice.head);
  };
  const auto end_of = [&](int64_t i) {
    return std::min(p.zone.end, (first + i + 1) * segment_rows);
  };
  const auto merge = [&](const float* state) {
    kernels::MergeStates(p.out, p.lse, state, state + states * d, states, d);
  };
  if (p.pool == nullptr || p.pool->threads() == 0 || units < 2) {
    scratch.state.resize(static_cast<size_t>(floats));
    float* const state = scratch.state.data();
    for (int64_t i = 0; i < segments; ++i) {
      RETURN_IF_ERROR(compute(i, slices[0], selected.TakeBelow(end_of(i)), scratch, state));
      merge(state);
    }
    return absl::OkStatus();
  }
  scratch.state.resize(static_cast<size_t>(segments * floats));
  float* const state = scratch.state.data();
  std::vector<SelectedRows> of_segments;
  for (int64_t i = 0; i < segments; ++i) of_segments.push_back(selected.TakeBelow(end_of(i)));
  std::vector<absl::Status> statuses(static_cast<size_t>(units));
  p.pool->ParallelFor(units, [&](int64_t unit) {
    thread_local EstimateScratch own;
    const int64_t i = unit % segments;
    const Slice& slice = slices[static_cast<size_t>(unit / segments)];
    statuses[static_cast<size_t>(unit)] = CatchThrown("estimate", [&] {
      return compute(i, slice, of_segments[static_cast<size_t>(i)], own, state + i * floats);
    });
  });
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  for (int64_t i = 0; i < segments; ++i) merge(state + i * floats);
  return absl::OkStatus();
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

absl::Status EstimateRest(const Summaries& summaries, const Rows& values, const EstimateRequest& p,
                          EstimateScratch& scratch) {
  const int64_t d = summaries.head_dim();
  const float own = summaries.fit().spread_share;
  const absl::Span<const float> shares =
      p.spread_shares.empty() ? absl::MakeConstSpan(&own, 1) : p.spread_shares;
  const int64_t states = static_cast<int64_t>(shares.size()) * p.group;
  std::fill_n(p.out, states * d, 0.0f);
  std::fill_n(p.lse, states, -INFINITY);
  if (summaries.fit().left_out && p.spread_shares.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(values.VerifyRows(p.selected.data(), static_cast<int64_t>(p.selected.size())));
  SelectedRows selected = SortSelected(p, scratch);
  PrepareHeads(summaries, p, static_cast<int64_t>(shares.size()), scratch);
  RETURN_IF_ERROR(AddSegments(summaries, values, p, shares, selected, scratch));
  for (int64_t i = 0; i < states; ++i) p.lse[i] += scratch.base[static_cast<size_t>(i % p.group)];
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
