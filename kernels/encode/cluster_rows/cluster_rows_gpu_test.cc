#include "kernels/encode/cluster_rows/cluster_rows.h"
#include "kernels/gpu_test_data.h"

namespace carrel::kernels {
namespace {

std::vector<float> Widened(const std::vector<uint16_t>& x) {
  std::vector<float> wide;
  for (uint16_t bits : x) wide.push_back(Bf16ToFloat(bits));
  return wide;
}

struct Shape {
  int64_t rows, head_dim, cluster_rows, query_count;
  bool transform;
};

// Inputs on both sides, and what the steps make of them on each. Rows are clustered around a mean
// that is not zero.
class Batch {
 public:
  Batch(std::mt19937_64& rng, const Shape& shape, float query_sigma)
      : host{.rows = shape.rows,
             .head_dim = shape.head_dim,
             .segment_rows =
                 std::min(kMaxClusterSegmentRows, kMaxSegmentClusters * shape.cluster_rows),
             .cluster_rows = shape.cluster_rows,
             .query_count = shape.query_count},
        keys(Clustered(rng)),
        values(RandomBf16(rng, shape.rows * shape.head_dim)),
        centre(Widened(RandomBf16(rng, shape.head_dim))),
        transform(RandomBf16(rng, shape.head_dim * shape.head_dim, 0.1f)),
        queries(RandomBf16(rng, shape.query_count * shape.head_dim, query_sigma)),
        query_norm(query_sigma * std::sqrt(static_cast<double>(shape.head_dim))),
        weights(WeightsOf(queries)),
        x(keys.size(), 0xffff),
        means(static_cast<size_t>(Clusters() * shape.head_dim), 0xffff),
        bias(static_cast<size_t>(Clusters()), NAN),
        device_keys(keys),
        device_values(values),
        device_centre(centre),
        device_transform(transform),
        device_queries(queries),
        device_weights(weights),
        device_x(static_cast<int64_t>(x.size())),
        device_means(static_cast<int64_t>(means.size())),
        device_bias(static_cast<int64_t>(bias.size())),
        device_segments(host.segment_count() * Stride()) {
    segments.assign(static_cast<size_t>(host.segment_count() * Stride()), 255);
    host.segment_stride = Stride();
    device = host;
    host.keys = keys.data();
    host.values = values.data();
    host.centre = centre.data();
    host.transform = shape.transform ? transform.data() : nullptr;
    host.queries = queries.data();
    host.weights = weights.data();
    host.x = x.data();
    host.means = means.data();
    host.bias = bias.data();
    host.segments = segments.data();
    device.keys = device_keys.data();
    device.values = device_values.data();
    device.centre = device_centre.data();
    device.transform = shape.transform ? device_transform.data() : nullptr;
    device.queries = device_queries.data();
    device.weights = device_weights.data();
    device.x = device_x.data();
    device.means = device_means.data();
    device.bias = device_bias.data();
    device.segments = device_segments.data();
  }

  int64_t Rows(int64_t segment) const {
    return std::min(host.segment_rows, host.rows - segment * host.segment_rows);
  }
  int64_t Clusters(int64_t segment) const {
    return (Rows(segment) + host.cluster_rows - 1) / host.cluster_rows;
  }
  // Where the cluster of the segment's first row is.
  int64_t RowClusters(int64_t segment) const {
    return segment * Stride() + (16 + 2 * host.head_dim) * Clusters(segment);
  }
  double ScoreOf(int64_t segment, int64_t row, int64_t cluster) const {
    const int64_t d = host.head_dim, mean = segment * host.max_clusters() + cluster;
    double score = bias[mean];
    for (int64_t i = 0; i < d; ++i) {
      score += double{Bf16ToFloat(x[(segment * host.segment_rows + row) * d + i])} *
               Bf16ToFloat(means[mean * d + i]);
    }
    return score;
  }
  // sum over rows of |x - nearest mean|^2 for the clusters in `of`.
  double Distance(const std::vector<uint8_t>& of) const {
    double sum = 0;
    for (int64_t s = 0; s < host.segment_count(); ++s) {
      for (int64_t row = 0; row < Rows(s); ++row) {
        sum -= 2 * ScoreOf(s, row, of[RowClusters(s) + row]);
        for (int64_t i = 0; i < host.head_dim; ++i) {
          const double v = Bf16ToFloat(x[(s * host.segment_rows + row) * host.head_dim + i]);
          sum += v * v;
        }
      }
    }
    return sum;
  }
  // What the host has becomes what the device has.
  void Upload() {
    Copy(device.x, x);
    Copy(device.means, means);
    Copy(device.bias, bias);
    Copy(device.segments, segments);
  }
  // Every row in a random cluster; some clusters stay empty.
  void AssignAtRandom(std::mt19937_64& rng) {
    for (int64_t s = 0; s < host.segment_count(); ++s) {
      for (int64_t row = 0; row < Rows(s); ++row) {
        const auto cluster = static_cast<int64_t>(rng() % static_cast<uint64_t>(Clusters(s)));
        segments[RowClusters(s) + row] = static_cast<uint8_t>(cluster % 7 == 3 ? 0 : cluster);
      }
    }
  }

 private:
  int64_t Clusters() const { return host.segment_count() * host.max_clusters(); }
  int64_t Stride() const {
    return ((16 + 2 * host.head_dim) * host.max_clusters() + host.segment_rows + 15) / 16 * 16;
  }
  std::vector<uint16_t> Clustered(std::mt19937_64& rng) const {
    constexpr int64_t kCentres = 50;
    const int64_t d = host.head_dim;
    const std::vector<float> centres = Widened(RandomBf16(rng, kCentres * d));
    std::vector<uint16_t> rows = RandomBf16(rng, host.rows * d, 0.5f);
    for (int64_t i = 0; i < host.rows; ++i) {
      const auto of = static_cast<int64_t>(rng() % kCentres);
      for (int64_t c = 0; c < d; ++c) {
        uint16_t& value = rows[i * d + c];
        value = FloatToBf16(Bf16ToFloat(value) + centres[of * d + c] + (c % 9 == 0 ? 4.0f : 0.0f));
      }
    }
    return rows;
  }
  // Least squares of w |q|^2 / 2.
  std::vector<float> WeightsOf(const std::vector<uint16_t>& of) const {
    std::vector<float> halves(static_cast<size_t>(host.query_count));
    float squares = 0;
    for (int64_t j = 0; j < host.query_count; ++j) {
      for (int64_t c = 0; c < host.head_dim; ++c) {
        const float v = Bf16ToFloat(of[j * host.head_dim + c]);
        halves[j] += v * v / 2;
      }
      squares += halves[j] * halves[j];
    }
    for (float& half : halves) half /= squares;
    return halves;
  }
  template <typename T>
  static void Copy(T* to, const std::vector<T>& from) {
    CARREL_EXPECT_CUDA(
        cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }

 public:
  ClusterRowsParams host, device;
  std::vector<uint16_t> keys, values;
  std::vector<float> centre;
  std::vector<uint16_t> transform, queries;
  double query_norm;  // about
  std::vector<float> weights;
  std::vector<uint16_t> x, means;
  std::vector<float> bias;
  std::vector<uint8_t> segments;
  DeviceInput<uint16_t> device_keys, device_values;
  DeviceInput<float> device_centre;
  DeviceInput<uint16_t> device_transform, device_queries;
  DeviceInput<float> device_weights;
  DeviceOutput<uint16_t> device_x, device_means;
  DeviceOutput<float> device_bias;
  DeviceOutput<uint8_t> device_segments;
};

class ClusterRowsGpuTest : public GpuKernelTest {
 protected:
  // Tiny, odd and long ones; of 1 to 256 clusters; several segments, the last shorter.
  template <typename Fn>
  void ForEachShape(const Fn& fn) {
    const Shape fixed[] = {
        {1, 64, 40, 1, false},         {1, 128, 4, 128, true},     {39, 128, 40, 0, true},
        {41, 64, 40, 17, true},        {8192, 128, 40, 128, true}, {8191, 64, 32, 5, false},
        {3000, 128, 8192, 128, false}, {2500, 64, 4, 0, true},     {16385, 128, 40, 16, true}};
    for (const Shape& shape : fixed) Try(shape, fn);
    for (int trial = 0; trial < 12; ++trial) {
      const int64_t cluster_rows[] = {4, 5, 31, 40, 100, 1000};
      Try({.rows = 1 + Below(trial % 4 == 0 ? 10000 : 700),
           .head_dim = Below(2) == 0 ? 64 : 128,
           .cluster_rows = cluster_rows[Below(6)],
           .query_count = Below(3) == 0 ? 0 : 1 + Below(kMaxClusterQueries),
           .transform = Below(2) == 0},
          fn);
    }
  }

 private:
  template <typename Fn>
  void Try(const Shape& shape, const Fn& fn) {
    SCOPED_TRACE(
        "rows " + std::to_string(shape.rows) + " head_dim " + std::to_string(shape.head_dim) +
        " cluster_rows " + std::to_string(shape.cluster_rows) + " queries " +
        std::to_string(shape.query_count) + " transform " + std::to_string(shape.transform));
    const float sigmas[] = {0.02f, 0.2f, 2.0f};  // alike, as attention has it, peaked
    Batch batch(rng_, shape, sigmas[Below(3)]);
    fn(batch);
  }
};

TEST_F(ClusterRowsGpuTest, CentreRows_MatchesReference) {
  ForEachShape([&](Batch& b) {
    CARREL_ASSERT_CUDA(CentreRows(b.device, nullptr));
    RefCentreRows(b.host);
    // Without a transform there is one rounding, otherwise one that may differ where fp32 does.
    const std::vector<uint16_t> out = b.device_x.Get();
    if (b.host.transform == nullptr) {
      EXPECT_EQ(out, b.x);
    } else {
      EXPECT_LT(RelativeError(Widened(out), Widened(b.x)), 4e-3);
    }
  });
}

TEST_F(ClusterRowsGpuTest, StartMeans_AreRows) {
  ForEachShape([&](Batch& b) {
    RefCentreRows(b.host);
    b.Upload();
    CARREL_ASSERT_CUDA(StartMeans(b.device, nullptr));
    RefStartMeans(b.host);
    EXPECT_EQ(b.device_means.Get(), b.means);  // also: what belongs to no cluster stays
    EXPECT_LT(RelativeError(b.device_bias.Get(), b.bias), 1e-5);
  });
}

TEST_F(ClusterRowsGpuTest, AssignRows_ChoosesTheNearestMean) {
  ForEachShape([&](Batch& b) {
    RefCentreRows(b.host);
    RefStartMeans(b.host);
    b.Upload();
    CARREL_ASSERT_CUDA(AssignRows(b.device, nullptr));
    RefAssignRows(b.host);
    const std::vector<uint8_t> out = b.device_segments.Get();
    int64_t differing = 0;
    for (int64_t s = 0; s < b.host.segment_count(); ++s) {
      for (int64_t row = 0; row < b.Rows(s); ++row) {
        const int64_t at = b.RowClusters(s) + row;
        ASSERT_LT(out[at], b.Clusters(s)) << "segment " << s << " row " << row;
        if (out[at] == b.segments[at]) continue;
        ++differing;
        const double best = b.ScoreOf(s, row, b.segments[at]), got = b.ScoreOf(s, row, out[at]);
        ASSERT_NEAR(got, best, 1e-5 * (std::abs(best) + 1000)) << "segment " << s << " row " << row;
        b.segments[at] = out[at];
      }
    }
    EXPECT_EQ(out, b.segments);  // nothing else was written
    EXPECT_LE(differing, 1 + b.host.rows / 100);
  });
}

TEST_F(ClusterRowsGpuTest, AssignRows_EqualMeans_TheFirst) {
  Batch b(rng_, {.rows = 700, .head_dim = 128, .cluster_rows = 5, .query_count = 0}, 1);
  std::fill(b.keys.begin(), b.keys.end(), FloatToBf16(3));
  RefCentreRows(b.host);
  RefStartMeans(b.host);
  b.Upload();
  CARREL_ASSERT_CUDA(AssignRows(b.device, nullptr));
  const std::vector<uint8_t> out = b.device_segments.Get();
  for (int64_t row = 0; row < 700; ++row) ASSERT_EQ(out[b.RowClusters(0) + row], 0) << row;
}

TEST_F(ClusterRowsGpuTest, UpdateMeans_MatchesReference) {
  ForEachShape([&](Batch& b) {
    RefCentreRows(b.host);
    b.AssignAtRandom(rng_);
    b.Upload();
    CARREL_ASSERT_CUDA(UpdateMeans(b.device, nullptr));
    RefUpdateMeans(b.host);
    // NaN stays where a cluster has no rows.
    EXPECT_LT(RelativeError(Widened(b.device_means.Get()), Widened(b.means)), 4e-3);
    EXPECT_LT(RelativeError(b.device_bias.Get(), b.bias), 8e-3);
  });
}

TEST_F(ClusterRowsGpuTest, DescribeClusters_MatchesReference) {
  ForEachShape([&](Batch& b) {
    b.AssignAtRandom(rng_);
    b.Upload();
    CARREL_ASSERT_CUDA(DescribeClusters(b.device, nullptr));
    RefDescribeClusters(b.host);
    const std::vector<uint8_t> out = b.device_segments.Get();
    for (int64_t s = 0; s < b.host.segment_count(); ++s) {
      const int64_t k = b.Clusters(s), at = s * b.host.segment_stride;
      const auto floats = [&](const std::vector<uint8_t>& of, int64_t part) {
        std::vector<float> values(static_cast<size_t>(k));
        std::memcpy(values.data(), of.data() + at + 4 * part * k, values.size() * sizeof(float));
        return values;
      };
      EXPECT_EQ(std::memcmp(&out[at], &b.segments[at], 4 * k), 0) << "sizes of segment " << s;
      EXPECT_LT(RelativeError(floats(out, 1), floats(b.segments, 1)), 1e-5);
      EXPECT_LT(RelativeError(floats(out, 2), floats(b.segments, 2)), 1e-5);
      // The scores that make spreads are of residuals rounded to bf16.
      const std::vector<float> spreads = floats(out, 3), expected = floats(b.segments, 3);
      double away = 0, norm = 0;
      for (int64_t c = 0; c < k; ++c) {
        away += (spreads[c] - expected[c]) * (spreads[c] - expected[c]);
        norm += expected[c] * expected[c];
      }
      const double rounding =
          b.host.query_count == 0 ? 0 : 0.005 * std::sqrt(static_cast<double>(k)) / b.query_norm;
      EXPECT_LE(std::sqrt(away),
                (b.host.query_count == 0 ? 1e-3 : 0.02) * std::sqrt(norm) + rounding);
      int64_t differing = 0;
      for (int64_t i = at + 16 * k; i < b.RowClusters(s); ++i) {
        const int away = std::abs(static_cast<int8_t>(out[i]) - static_cast<int8_t>(b.segments[i]));
        ASSERT_LE(away, 1) << "byte " << i - at << " of segment " << s;
        differing += away;
      }
      EXPECT_LE(differing, 2 + k * b.host.head_dim / 500);
      EXPECT_TRUE(std::equal(out.begin() + b.RowClusters(s),
                             out.begin() + at + b.host.segment_stride,
                             b.segments.begin() + b.RowClusters(s)))
          << "written after the means of segment " << s;
    }
  });
}

// All steps: other roundings lead to other clusters, which are as near; and to the same ones again.
TEST_F(ClusterRowsGpuTest, FiveSteps_AsNearAsTheReferences) {
  for (const int64_t head_dim : {64, 128}) {
    Batch b(rng_, {9000, head_dim, 40, 128, true}, 0.2f);
    const auto run = [&] {
      CARREL_ASSERT_CUDA(CentreRows(b.device, nullptr));
      CARREL_ASSERT_CUDA(StartMeans(b.device, nullptr));
      for (int step = 0; step < 5; ++step) {
        CARREL_ASSERT_CUDA(AssignRows(b.device, nullptr));
        if (step == 4) break;
        CARREL_ASSERT_CUDA(UpdateMeans(b.device, nullptr));
      }
      CARREL_ASSERT_CUDA(DescribeClusters(b.device, nullptr));
    };
    run();
    const std::vector<uint8_t> once = b.device_segments.Get();
    b.device_x.Poison();
    b.device_means.Poison();
    b.device_bias.Poison();
    b.device_segments.Poison();
    run();
    EXPECT_EQ(once, b.device_segments.Get());

    RefCentreRows(b.host);
    RefStartMeans(b.host);
    RefAssignRows(b.host);
    const double first = b.Distance(b.segments);
    for (int step = 1; step < 5; ++step) {
      RefUpdateMeans(b.host);
      RefAssignRows(b.host);
    }
    const double last = b.Distance(b.segments);
    EXPECT_LT(last, 0.95 * first);
    b.x = b.device_x.Get();
    b.means = b.device_means.Get();
    b.bias = b.device_bias.Get();
    EXPECT_NEAR(b.Distance(once), last, 0.05 * last);
  }
}

TEST_F(ClusterRowsGpuTest, ShapesNotServed_AreInvalid) {
  const ClusterRowsParams served{.rows = 0,
                                 .head_dim = 128,
                                 .segment_rows = 8192,
                                 .cluster_rows = 40,
                                 .segment_stride = 65536};
  const auto all = [](const ClusterRowsParams& p) {
    std::vector<cudaError_t> errors;
    for (auto* step : {CentreRows, StartMeans, AssignRows, UpdateMeans, DescribeClusters}) {
      errors.push_back(step(p, nullptr));
    }
    return errors;
  };
  EXPECT_EQ(all(served), std::vector<cudaError_t>(5, cudaSuccess));  // nothing is enqueued
  const std::vector<cudaError_t> invalid(5, cudaErrorInvalidValue);
  std::vector<ClusterRowsParams> refused(7, served);
  refused[0].head_dim = 96;
  refused[1].segment_rows = 8193;
  refused[2].cluster_rows = 31;  // 265 clusters
  refused[3].cluster_rows = 0;
  refused[4].query_count = 129;
  refused[5].segment_stride = 65535;
  refused[6].segment_stride = 32768;
  for (size_t i = 0; i < refused.size(); ++i) EXPECT_EQ(all(refused[i]), invalid) << i;
}

}  // namespace
}  // namespace carrel::kernels
