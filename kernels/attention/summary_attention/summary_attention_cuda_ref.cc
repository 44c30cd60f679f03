#include "kernels/attention/summary_attention/summary_attention_cuda.h"
#include "kernels/reference.h"

namespace carrel::kernels {
namespace {

struct Head {  // of one KV head
  const SummaryAttentionCudaParams& p;
  int64_t g;

  int64_t selected() const { return p.row_count == nullptr ? p.selected : p.row_count[g]; }
  int64_t Id(int64_t j) const { return p.ids[g * p.ids_stride + j]; }
  const uint16_t* Row(const uint16_t* rows, int64_t j) const {
    const int64_t place = p.gathered            ? j
                          : p.places == nullptr ? Id(j)
                                                : p.places[g * p.places_stride + j];
    return rows + (g * p.kv.row_stride + place) * p.head_dim;
  }
  int64_t ClusterOf(int64_t j) const {
    const SummarySegments& s = p.table.segments;
    return (s.first + Id(j)) / s.segment_rows * s.segment_clusters +
           p.table.row_cluster[g * p.table.rows + Id(j)];
  }
  const SummaryTable::Cluster& At(int64_t c) const {
    return p.table.of_cluster[g * p.table.clusters + c];
  }
  const int8_t* Mean(const int8_t* means, int64_t c) const {
    return means + (g * p.table.clusters + c) * p.head_dim;
  }
};

double Bound(const Head& head, int64_t h) {
  const SummaryAttentionCudaParams& p = head.p;
  if (p.base == nullptr || head.selected() == 0) return INFINITY;
  double least = INFINITY;
  for (int64_t j = 0; j < head.selected(); ++j) {
    double best = -INFINITY;
    for (int64_t i = head.g * p.group; i < (head.g + 1) * p.group; ++i) {
      const double score = p.scale * RefDot(p.q + i * p.head_dim, head.Row(p.kv.k, j), p.head_dim);
      best = std::max(best, score - p.base[i]);
    }
    least = std::min(least, best);
  }
  return least + p.base[h];
}

void AttendHead(const Head& head, int64_t h) {
  const SummaryAttentionCudaParams& p = head.p;
  const int64_t d = p.head_dim;
  const uint16_t* q = p.q + h * d;
  double of_centre = 0, norm = 0;
  for (int64_t i = 0; i < d; ++i) {
    of_centre += double{p.scale} * Bf16ToFloat(q[i]) * p.table.centre[head.g * d + i];
    norm += double{Bf16ToFloat(q[i])} * Bf16ToFloat(q[i]);
  }
  const double bound = Bound(head, h) - of_centre;
  double total = 0;
  std::vector<double> sums(static_cast<size_t>(d)), of_cluster(sums);
  for (int64_t c = 0; c < p.table.clusters; ++c) {
    const SummaryTable::Cluster& cluster = head.At(c);
    double mean = 0, gone = 0, sum = 0, squares = 0;
    for (int64_t i = 0; i < d; ++i) {
      mean += double{Bf16ToFloat(q[i])} * head.Mean(p.table.keys, c)[i];
      of_cluster[i] = double{cluster.rows} * cluster.value_scale * head.Mean(p.table.values, c)[i];
    }
    mean *= double{p.scale} * cluster.key_scale;
    const double variance = double{cluster.spread} * p.scale * p.scale * norm;
    for (int64_t j = 0; j < head.selected(); ++j) {
      if (head.ClusterOf(j) != c) continue;
      const double above = p.scale * RefDot(q, head.Row(p.kv.k, j), d) - of_centre - mean;
      gone += 1;
      sum += above;
      squares += above * above;
      for (int64_t i = 0; i < d; ++i) of_cluster[i] -= Bf16ToFloat(head.Row(p.kv.v, j)[i]);
    }
    const double left = cluster.rows - gone;
    if (left <= 0) continue;
    double score = mean + variance / 2;
    if (gone > 0) {
      const double shift = std::min(-sum / left, 0.0);
      const double rest = (cluster.rows * variance - squares) / left - shift * shift;
      score = mean + shift + std::clamp(rest, 0.0, variance) / 2;
    }
    const double e = std::exp(std::min(score, bound));
    total += left * e;
    for (int64_t i = 0; i < d; ++i) sums[i] += e * of_cluster[i];
  }
  if (total == 0) return;
  const double lse = of_centre + std::log(total), before = p.lse[h];
  const double both = std::max(before, lse) + std::log1p(std::exp(-std::abs(before - lse)));
  const double of_selected = std::exp(before - both), of_rest = std::exp(lse - both);
  for (int64_t i = 0; i < d; ++i) {
    float& out = p.out[h * d + i];
    out = static_cast<float>(of_selected * out + of_rest * sums[i] / total);
  }
  p.lse[h] = static_cast<float>(both);
}

}  // namespace

void RefAttendSummariesCuda(const SummaryAttentionCudaParams& p) {
  for (int64_t h = 0; h < p.kv_heads * p.group; ++h) AttendHead({p, h / p.group}, h);
}

}  // namespace carrel::kernels
