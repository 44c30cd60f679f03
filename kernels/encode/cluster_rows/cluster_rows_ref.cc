#include <cstring>

#include "kernels/encode/cluster_rows/cluster_rows.h"
#include "kernels/reference.h"

namespace carrel::kernels {
namespace {

struct Segment {
  int64_t index, first, rows, clusters;
  uint8_t* bytes;
  uint8_t* row_clusters;
};

template <typename Fn>
void ForEachSegment(const ClusterRowsParams& p, const Fn& fn) {
  for (int64_t i = 0; i < p.segment_count(); ++i) {
    Segment s{.index = i, .first = i * p.segment_rows};
    s.rows = std::min(p.segment_rows, p.rows - s.first);
    s.clusters = (s.rows + p.cluster_rows - 1) / p.cluster_rows;
    s.bytes = p.segments + i * p.segment_stride;
    s.row_clusters = s.bytes + (16 + 2 * p.head_dim) * s.clusters;
    fn(s);
  }
}

// Mean c of a segment, and its bias.
void StoreMean(const ClusterRowsParams& p, const Segment& s, int64_t c,
               const std::vector<double>& mean) {
  const int64_t cluster = s.index * p.max_clusters() + c;
  uint16_t* const stored = p.means + cluster * p.head_dim;
  for (int64_t i = 0; i < p.head_dim; ++i) stored[i] = FloatToBf16(static_cast<float>(mean[i]));
  p.bias[cluster] = static_cast<float>(-RefDot(stored, stored, p.head_dim) / 2);
}

// Of the rows of cluster c; zeros if there are none. count: how many there are.
std::vector<double> MeanOf(const ClusterRowsParams& p, const Segment& s, int64_t c,
                           const uint16_t* rows, int64_t& count) {
  std::vector<double> mean(static_cast<size_t>(p.head_dim));
  count = std::count(s.row_clusters, s.row_clusters + s.rows, c);
  for (int64_t row = 0; row < s.rows; ++row) {
    if (s.row_clusters[row] != c) continue;
    for (int64_t i = 0; i < p.head_dim; ++i) {
      mean[i] +=
          double{Bf16ToFloat(rows[(s.first + row) * p.head_dim + i])} / static_cast<double>(count);
    }
  }
  return mean;
}

// Of one cluster: int8, and what it says in place of the mean.
float Quantise(std::vector<double>& mean, uint8_t* out) {
  float largest = 0;
  for (double x : mean) largest = std::max(largest, std::abs(static_cast<float>(x)));
  const float scale = largest / 127;
  for (size_t i = 0; i < mean.size(); ++i) {
    const float x = scale == 0 ? 0.0f : std::nearbyint(static_cast<float>(mean[i]) / scale);
    out[i] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(x, -127.0f, 127.0f)));
    mean[i] = double{scale} * x;
  }
  return scale;
}

// Of the rows of cluster c about `mean`, which is relative to the centre.
double SpreadOf(const ClusterRowsParams& p, const Segment& s, int64_t c, int64_t count,
                const std::vector<double>& mean) {
  std::vector<double> exponentials(static_cast<size_t>(p.query_count));
  double squares = 0;
  for (int64_t row = 0; row < s.rows; ++row) {
    if (s.row_clusters[row] != c) continue;
    std::vector<double> away;
    for (int64_t i = 0; i < p.head_dim; ++i) {
      away.push_back(double{Bf16ToFloat(p.keys[(s.first + row) * p.head_dim + i])} - p.centre[i] -
                     mean[i]);
      squares += away[i] * away[i];
    }
    for (int64_t j = 0; j < p.query_count; ++j) {
      double above = 0;
      for (int64_t i = 0; i < p.head_dim; ++i) {
        above += double{Bf16ToFloat(p.queries[j * p.head_dim + i])} * away[i];
      }
      exponentials[j] += std::exp(std::min(above, 80.0));
    }
  }
  const auto n = static_cast<double>(count);
  if (p.query_count == 0) return squares / (n * static_cast<double>(p.head_dim));
  double spread = 0;
  for (int64_t j = 0; j < p.query_count; ++j) {
    spread += p.weights[j] * std::log(exponentials[j] / n);
  }
  return std::max(0.0, spread);
}

}  // namespace

void RefCentreRows(const ClusterRowsParams& p) {
  const int64_t d = p.head_dim;
  std::vector<float> centred(static_cast<size_t>(d));
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t i = 0; i < d; ++i) {
      centred[i] = Bf16ToFloat(FloatToBf16(Bf16ToFloat(p.keys[row * d + i]) - p.centre[i]));
    }
    for (int64_t i = 0; i < d; ++i) {
      double sum = p.transform == nullptr ? centred[i] : 0;
      for (int64_t j = 0; p.transform != nullptr && j < d; ++j) {
        sum += double{Bf16ToFloat(p.transform[i * d + j])} * centred[j];
      }
      p.x[row * d + i] = FloatToBf16(static_cast<float>(sum));
    }
  }
}

void RefStartMeans(const ClusterRowsParams& p) {
  ForEachSegment(p, [&](const Segment& s) {
    for (int64_t c = 0; c < s.clusters; ++c) {
      const int64_t row = s.first + (2 * c + 1) * s.rows / (2 * s.clusters);
      std::vector<double> mean;
      for (int64_t i = 0; i < p.head_dim; ++i) {
        mean.push_back(Bf16ToFloat(p.x[row * p.head_dim + i]));
      }
      StoreMean(p, s, c, mean);
    }
  });
}

void RefAssignRows(const ClusterRowsParams& p) {
  const int64_t d = p.head_dim;
  ForEachSegment(p, [&](const Segment& s) {
    for (int64_t row = 0; row < s.rows; ++row) {
      double best = -INFINITY;
      for (int64_t c = 0; c < s.clusters; ++c) {
        const int64_t cluster = s.index * p.max_clusters() + c;
        const double score =
            p.bias[cluster] + RefDot(p.x + (s.first + row) * d, p.means + cluster * d, d);
        if (score > best) {
          best = score;
          s.row_clusters[row] = static_cast<uint8_t>(c);
        }
      }
    }
  });
}

void RefUpdateMeans(const ClusterRowsParams& p) {
  ForEachSegment(p, [&](const Segment& s) {
    for (int64_t c = 0; c < s.clusters; ++c) {
      int64_t count = 0;
      const std::vector<double> mean = MeanOf(p, s, c, p.x, count);
      if (count > 0) StoreMean(p, s, c, mean);
    }
  });
}

void RefDescribeClusters(const ClusterRowsParams& p) {
  const int64_t d = p.head_dim;
  ForEachSegment(p, [&](const Segment& s) {
    uint8_t* const key_means = s.bytes + 16 * s.clusters;
    for (int64_t c = 0; c < s.clusters; ++c) {
      const auto put = [&](int64_t part, auto value) {
        static_assert(sizeof(value) == 4);
        std::memcpy(s.bytes + 4 * (part * s.clusters + c), &value, sizeof(value));
      };
      int64_t count = 0;
      std::vector<double> key = MeanOf(p, s, c, p.keys, count);
      std::vector<double> value = MeanOf(p, s, c, p.values, count);
      for (int64_t i = 0; count > 0 && i < d; ++i) key[i] -= p.centre[i];
      put(0, static_cast<uint32_t>(count));
      put(1, Quantise(key, key_means + c * d));
      put(2, Quantise(value, key_means + (s.clusters + c) * d));
      put(3, count == 0 ? 0.0f : static_cast<float>(SpreadOf(p, s, c, count, key)));
    }
  });
}

}  // namespace carrel::kernels
