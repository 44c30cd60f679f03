// What:   summaries of the clusters into which a head's rows were cut, and attention to rows that
//         were not selected, as these summaries tell it: the estimation term.
// Math:   a cluster c of n_c rows has the mean of its keys m_c, the mean of its V rows u_c, and a
//         spread w_c such that
//           mean_{k in c} exp(scale <q, k>) ~ exp(scale <q, m_c> + s w_c scale^2 |q|^2 / 2).
//         s, the share of the spread that counts, is the head's own, fitted to queries that were
//         held out (fidelity.h): s = 1 overestimates heads whose attention is sharp, s = 0 is a
//         lower bound (Jensen). Of its rows in the zone that are not selected, R_c, and their number
//         r_c:
//           lse[h] = ln sum_c r_c e_hc,  out[h] = sum_c e_hc (n_c u_c - removed V) / exp(lse[h]),
//         where e_hc is the exponential above. Where rows of c are selected and their scores are
//         given, mean and variance are first those of the rows that remain. Where a bound is given,
//         which no row that was not selected exceeds, e_hc is at most its exponential: rows chosen
//         by group score (kernels/score/group_score), the last of which has t, leave none with a score
//         above t + base[h].
// Bytes:  little-endian, unaligned:
//         header of 64 bytes: magic "CSUM" | version u16 = 2 | left out u16: 1 where the head's
//           term does not help it, and is not to be counted | rows u64 | head_dim u32 |
//           cluster_rows u32 | s f32 | reserved 32 bytes = 0 | crc32c u32 of the header and the
//           centre, without this field. Version 1 had neither: s is kDefaultSpreadShare
//         centre f32 [head_dim]: mean of all keys | zeros up to a multiple of 4096
//         segments of s = min(8192, 256 cluster_rows) rows, the last shorter: of n rows and
//           k = ceil(n / cluster_rows) clusters (some may be empty):
//           rows of each cluster u32 [k] | key scale f32 [k] | V scale f32 [k] | spread f32 [k] |
//           (mean of keys - centre) / key scale, i8 [k, head_dim] |
//           mean of V / V scale, i8 [k, head_dim] | cluster of each row u8 [n] |
//           zeros up to a multiple of 64
//         No segment crosses a multiple of kIndexChunkBytes: before one that would, there are zeros
//         up to it and as many bytes again as before the first segment.
// Errors: DataLoss for bytes that are no such blob, or that contradict themselves: names what.
// Threads: any; a scratch belongs to one.
// Cost:   reads every cluster of the zone once for the group: 2 head_dim + 16 bytes of each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "kvstore/index/rows/blob.h"
#include "kvstore/index/rows/rows.h"
#include "retrieval/estimate.h"

namespace carrel::kvstore {

class Accelerator;
struct SampledQueries;

inline constexpr int64_t kMinSummaryRows = 4;
inline constexpr int64_t kMaxSummaryRows = 8192;
// Where no query was held out; best or next to it for all documents measured (decision 017).
inline constexpr float kDefaultSpreadShare = 0.2f;

absl::Status ValidateSummaryRows(int64_t cluster_rows);  // 0: no summaries
// At most, for planning disk space.
int64_t SummaryBytesPerKey(int64_t cluster_rows, int64_t head_dim);

// A blob of clusters of about `cluster_rows` keys. pool: who else takes segments, or null; the same
// rows and queries give the same bytes. queries: of the head's group; clusters are then such that these queries score their
// keys alike, and spreads are learned from them. null: all directions are alike. accelerator
// (accelerator.h), if not null, does it where it serves the shape: then other bytes, as good.
absl::StatusOr<std::string> BuildSummaries(int64_t cluster_rows, const Rows& keys,
                                           const Rows& values, const SampledQueries* queries,
                                           Accelerator* accelerator = nullptr,
                                           ThreadPool* pool = nullptr);

// The samples from whose queries BuildSummaries learns spreads, ascending: the others are held out.
std::vector<int64_t> LearnedSamples(const SampledQueries& sampled);

// How the term of a built blob counts: the share of its spreads, in [0, 1], or not at all.
struct EstimateFit {
  float spread_share = kDefaultSpreadShare;
  bool left_out = false;
};
void SetEstimateFit(const EstimateFit& fit, std::string& blob);

// What is where in a blob.
class SummaryLayout {
 public:
  SummaryLayout() = default;
  SummaryLayout(int64_t rows, int64_t head_dim, int64_t cluster_rows);

  int64_t segments() const;
  int64_t segment_rows() const { return segment_rows_; }
  int64_t cluster_rows() const { return cluster_rows_; }
  int64_t max_clusters() const;  // of a segment
  RowRange RowsOf(int64_t segment) const;
  int64_t ClustersOf(int64_t segment) const;
  // Offsets: of a segment in the blob, and of its parts in the segment.
  int64_t Offset(int64_t segment) const;
  int64_t SegmentBytes(int64_t segment) const;
  int64_t KeysOffset(int64_t clusters) const { return 16 * clusters; }
  int64_t ValuesOffset(int64_t clusters) const { return (16 + head_dim_) * clusters; }
  int64_t RowClustersOffset(int64_t clusters) const { return (16 + 2 * head_dim_) * clusters; }
  int64_t blob_bytes() const;

 private:
  int64_t Padded(int64_t clusters, int64_t rows) const;

  int64_t rows_ = 0, head_dim_ = 0, cluster_rows_ = 0;
  int64_t segment_rows_ = 0;
  int64_t first_offset_ = 0;
  int64_t chunk_segments_ = 0;  // whole ones between two multiples of kIndexChunkBytes
};

class Summaries {
 public:
  // Reads the header only.
  static absl::StatusOr<Summaries> Open(Blob blob, int64_t rows, int64_t head_dim);

  int64_t rows() const { return rows_; }
  int64_t head_dim() const { return static_cast<int64_t>(centre_.size()); }
  int64_t cluster_rows() const { return cluster_rows_; }
  const EstimateFit& fit() const { return fit_; }
  const std::vector<float>& centre() const { return centre_; }
  const SummaryLayout& layout() const { return layout_; }
  // The verified bytes of a segment.
  absl::StatusOr<const char*> Segment(int64_t segment) const;

 private:
  Blob blob_;
  int64_t rows_ = 0, cluster_rows_ = 0;
  EstimateFit fit_;
  std::vector<float> centre_;
  SummaryLayout layout_;
};

// Memory of one thread, reused; grows to what was needed.
struct EstimateScratch {
  // Where the selected are not sorted: as words to sort, then by id.
  std::vector<uint64_t> selected;
  std::vector<Position> ids;
  std::vector<float> selected_scores;
  // Of clusters.
  std::vector<uint32_t> sizes;
  std::vector<float> key_scale, value_scale, spread;
  std::vector<float> counts, left, rests;  // rows: all, those not selected, of them in the zone
  // Of heads.
  std::vector<float> base, bound;  // what the centre adds to every score; the bound without it
  std::vector<float> scores, weights, state, lse;
  // Of rows: the selected, then others that correct the clusters' sums.
  std::vector<const void*> v;
  std::vector<uint8_t> row_cluster;
};

// values: the head's V rows.
absl::Status EstimateRest(const Summaries& summaries, const Rows& values,
                          const retrieval::EstimateRequest& request, EstimateScratch& scratch);

}  // namespace carrel::kvstore
