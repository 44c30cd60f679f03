#include <algorithm>
#include <cmath>

#include "kernels/attention/summary_attention/summary_attention_cuda.h"
#include "kernels/gpu_test_data.h"

namespace carrel::kernels {
namespace {

struct Shape {
  int64_t kv_heads, group, head_dim, rows, cluster_rows, selected;
  bool bounded = false, counted = false, gathered = false, placed = false;
  int64_t first = 0;
};

class SummaryAttentionGpuTest : public GpuKernelTest {
 protected:
  void ExpectMatchesReference(const Shape& s);
  float Uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(rng_);
  }
  std::vector<int8_t> RandomInt8(int64_t count) {
    std::vector<int8_t> out(static_cast<size_t>(count));
    for (int8_t& x : out) x = static_cast<int8_t>(Below(255) - 127);
    return out;
  }
};

void SummaryAttentionGpuTest::ExpectMatchesReference(const Shape& s) {
  SCOPED_TRACE("kv_heads " + std::to_string(s.kv_heads) + " group " + std::to_string(s.group) +
               " head_dim " + std::to_string(s.head_dim) + " rows " + std::to_string(s.rows) +
               " selected " + std::to_string(s.selected));
  SummarySegments segments{s.first, 256 * s.cluster_rows, 256};
  segments.segment_rows = std::min<int64_t>(segments.segment_rows, 8192);
  segments.segment_clusters = segments.segment_rows / s.cluster_rows;
  const int64_t clusters =
      (s.first + s.rows - 1) / segments.segment_rows * segments.segment_clusters +
      segments.segment_clusters;
  const int64_t q_heads = s.kv_heads * s.group, stride = s.selected + Below(3);
  std::vector<uint8_t> row_cluster;
  std::vector<SummaryTable::Cluster> of_cluster(static_cast<size_t>(s.kv_heads * clusters));
  for (SummaryTable::Cluster& c : of_cluster) {
    c = {Uniform(0.002f, 0.01f), Uniform(0, 0.5f), Uniform(0.002f, 0.01f), 0};
  }
  for (int64_t g = 0; g < s.kv_heads; ++g) {
    for (int64_t r = 0; r < s.rows; ++r) {
      row_cluster.push_back(static_cast<uint8_t>(Below(segments.segment_clusters)));
      const int64_t segment = (s.first + r) / segments.segment_rows;
      of_cluster[static_cast<size_t>(g * clusters + segment * segments.segment_clusters +
                                     row_cluster.back())]
          .rows += 1;
    }
  }
  std::vector<int32_t> ids, places, counts;
  for (int64_t g = 0; g < s.kv_heads; ++g) {
    std::vector<int32_t> all(static_cast<size_t>(s.rows));
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
    std::shuffle(all.begin(), all.end(), rng_);
    for (int64_t j = 0; j < stride; ++j) {
      ids.push_back(j < s.selected ? all[static_cast<size_t>(j)] : -1);
      places.push_back(j < s.selected ? static_cast<int32_t>(s.selected - 1 - j) : -1);
    }
    counts.push_back(static_cast<int32_t>(s.selected == 0 ? 0 : Below(s.selected) + 1));
  }
  const int64_t stored = s.gathered || s.placed ? s.selected : s.rows;
  const auto q = RandomBf16(rng_, q_heads * s.head_dim, 2.0f);
  const auto k = RandomBf16(rng_, s.kv_heads * stored * s.head_dim);
  const auto v = RandomBf16(rng_, s.kv_heads * stored * s.head_dim);
  const auto keys = RandomInt8(s.kv_heads * clusters * s.head_dim);
  const auto values = RandomInt8(s.kv_heads * clusters * s.head_dim);
  std::vector<float> centre, base, out, lse;
  for (int64_t i = 0; i < s.kv_heads * s.head_dim; ++i) centre.push_back(Uniform(-0.3f, 0.3f));
  for (int64_t h = 0; h < q_heads; ++h) {
    base.push_back(Uniform(4, 6));
    lse.push_back(h == 1 ? -INFINITY : Uniform(5, 8));
  }
  for (int64_t i = 0; i < q_heads * s.head_dim; ++i) out.push_back(Uniform(-1, 1));

  SummaryAttentionCudaParams p;
  p.kv_heads = s.kv_heads;
  p.group = s.group;
  p.head_dim = s.head_dim;
  p.ids_stride = p.places_stride = stride;
  p.gathered = s.gathered;
  p.selected = s.selected;
  p.table.segments = segments;
  p.table.clusters = clusters;
  p.table.rows = s.rows;
  p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  SummaryAttentionCudaParams host = p;
  host.q = q.data(), host.kv = {k.data(), v.data(), stored}, host.ids = ids.data();
  host.places = s.placed ? places.data() : nullptr;
  host.row_count = s.counted ? counts.data() : nullptr;
  host.base = s.bounded ? base.data() : nullptr;
  host.table.keys = keys.data(), host.table.values = values.data();
  host.table.of_cluster = of_cluster.data(), host.table.row_cluster = row_cluster.data();
  host.table.centre = centre.data();
  std::vector<float> expected_out = out, expected_lse = lse;
  host.out = expected_out.data(), host.lse = expected_lse.data();
  RefAttendSummariesCuda(host);

  const DeviceInput<uint16_t> device_q(q), device_k(k), device_v(v);
  const DeviceInput<int32_t> device_ids(ids), device_places(places), device_counts(counts);
  const DeviceInput<int8_t> device_keys(keys), device_values(values);
  const DeviceInput<SummaryTable::Cluster> device_clusters(of_cluster);
  const DeviceInput<uint8_t> device_row_cluster(row_cluster);
  const DeviceInput<float> device_centre(centre), device_base(base);
  DeviceInput<float> device_out(out), device_lse(lse);
  const size_t bytes = SummaryWorkspaceBytes(s.kv_heads, s.group, s.head_dim, clusters);
  const DeviceInput<uint8_t> workspace{std::vector<uint8_t>(bytes)};
  p.q = device_q.data(), p.kv = {device_k.data(), device_v.data(), stored},
  p.ids = device_ids.data();
  p.places = s.placed ? device_places.data() : nullptr;
  p.row_count = s.counted ? device_counts.data() : nullptr;
  p.base = s.bounded ? device_base.data() : nullptr;
  p.table.keys = device_keys.data(), p.table.values = device_values.data();
  p.table.of_cluster = device_clusters.data(), p.table.row_cluster = device_row_cluster.data();
  p.table.centre = device_centre.data();
  p.out = device_out.data(), p.lse = device_lse.data();
  p.workspace = workspace.data();
  std::vector<float> first_out, got_out(out.size()), got_lse(lse.size());
  for (int run = 0; run < 2; ++run) {  // the workspace is left as it was found
    device_out.Set(out);
    device_lse.Set(lse);
    CARREL_ASSERT_CUDA(AttendSummariesCuda(p, nullptr));
    CARREL_ASSERT_CUDA(cudaMemcpy(got_out.data(), p.out, out.size() * 4, cudaMemcpyDeviceToHost));
    CARREL_ASSERT_CUDA(cudaMemcpy(got_lse.data(), p.lse, lse.size() * 4, cudaMemcpyDeviceToHost));
    for (size_t h = 0; h < lse.size(); ++h) {
      if (got_lse[h] == expected_lse[h]) continue;  // -inf
      ASSERT_NEAR(got_lse[h], expected_lse[h], 2e-3) << "q head " << h << " run " << run;
    }
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(got_out[i], expected_out[i], 4e-3) << "element " << i << " run " << run;
    }
    if (run == 0) first_out = got_out;
    EXPECT_EQ(first_out, got_out) << "the same call gave other bits";
  }
}

TEST_F(SummaryAttentionGpuTest, RandomShapes_MatchReference) {
  ExpectMatchesReference({1, 1, 64, 100, 16, 5});
  ExpectMatchesReference({3, 3, 64, 7432, 40, 122});
  ExpectMatchesReference({2, 4, 128, 9000, 40, 300});
  ExpectMatchesReference({2, 8, 128, 5000, 16, 64});
  ExpectMatchesReference({1, 16, 128, 3000, 8, 100});
  ExpectMatchesReference({8, 4, 128, 20000, 40, 256});
}

TEST_F(SummaryAttentionGpuTest, Bound_CountsPlacesAndSegments_MatchReference) {
  ExpectMatchesReference({3, 3, 64, 7432, 40, 122, true});
  ExpectMatchesReference({2, 4, 128, 9000, 40, 300, true, true});
  ExpectMatchesReference({2, 4, 64, 900, 40, 30, false, true, true, false, 7000});
  ExpectMatchesReference({2, 5, 128, 16000, 32, 700, true, false, false, true, 4});
}

TEST_F(SummaryAttentionGpuTest, NothingSelected_IsTheSumOfAllClusters) {
  ExpectMatchesReference({2, 4, 64, 500, 20, 0});
  ExpectMatchesReference({2, 4, 128, 500, 20, 0, true});
}

TEST_F(SummaryAttentionGpuTest, EverythingSelected_ChangesNothing) {
  ExpectMatchesReference({2, 4, 64, 500, 20, 500});
  ExpectMatchesReference({2, 4, 128, 300, 20, 300, true});
}

TEST_F(SummaryAttentionGpuTest, ShapesNotServed_AreRefused) {
  SummaryAttentionCudaParams p;
  p.kv_heads = p.group = 1;
  p.head_dim = 96;
  p.scale = 1;
  EXPECT_EQ(AttendSummariesCuda(p, nullptr), cudaErrorInvalidValue);
  p.head_dim = 64;
  p.group = 17;
  EXPECT_EQ(AttendSummariesCuda(p, nullptr), cudaErrorInvalidValue);
  p.group = 1;
  p.selected = 2;
  EXPECT_EQ(AttendSummariesCuda(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace carrel::kernels
