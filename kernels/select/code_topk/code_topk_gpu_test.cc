#include <memory>

#include "kernels/gpu_test_data.h"
#include "kernels/select/code_topk/code_topk.h"

namespace carrel::kernels {
namespace {

class CodeTopKGpuTest : public GpuKernelTest {
 protected:
  struct Shape {
    int64_t kv_heads, group, head_dim, bits, rows, k;
    float sigma = 1;  // of the decoder: how far scores lie apart
  };
  struct Inputs {
    std::vector<uint16_t> q, decoder;
    std::vector<uint32_t> codes;
  };

  Inputs Random(const Shape& s) {
    return {RandomBf16(rng_, s.kv_heads * s.group * s.head_dim),
            RandomBf16(rng_, s.kv_heads * s.bits * s.head_dim, s.sigma),
            RandomWords(rng_, s.kv_heads * s.rows * s.bits / 32)};
  }
  static CodeTopKParams ParamsOf(const Shape& s) {
    return {.kv_heads = s.kv_heads,
            .group = s.group,
            .head_dim = s.head_dim,
            .bits = s.bits,
            .rows = s.rows,
            .code_stride = s.rows,
            .k = s.k,
            .scale = 0.1f};
  }

  // The first k by the reference's scores, but for rows that lie within three steps of the k-th: two
  // products that fp32 and fp64 round to different weights may differ by a step each.
  static void ExpectBest(const float* scores, int64_t n, int64_t k, const int32_t* ids) {
    const float near = 3.0f / kCodeTopKSteps;
    const int64_t count = std::min(k, n);
    std::vector<float> limited(scores, scores + n);
    const float most = kCodeTopKLeast + (kCodeTopKBins - 1) / kCodeTopKSteps;
    for (float& x : limited) x = std::clamp(x, kCodeTopKLeast, most);
    std::vector<float> sorted(limited);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const float last = sorted[static_cast<size_t>(count - 1)];
    std::vector<bool> chosen(limited.size());
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_TRUE(ids[i] >= 0 && ids[i] < n) << ids[i];
      ASSERT_FALSE(chosen[static_cast<size_t>(ids[i])]) << "twice: " << ids[i];
      chosen[static_cast<size_t>(ids[i])] = true;
    }
    for (size_t j = 0; j < limited.size(); ++j) {
      ASSERT_GE(chosen[j] ? limited[j] - last : last - limited[j], -near) << "row " << j;
    }
    for (int64_t i = count; i < k; ++i) ASSERT_EQ(ids[i], -1) << "written beyond the rows";
  }

  void ExpectMatchesReference(const Shape& s) { ExpectMatchesReference(s, Random(s)); }
  void ExpectMatchesReference(const Shape& s, const Inputs& in) {
    SCOPED_TRACE("kv_heads " + std::to_string(s.kv_heads) + " group " + std::to_string(s.group) +
                 " head_dim " + std::to_string(s.head_dim) + " bits " + std::to_string(s.bits) +
                 " rows " + std::to_string(s.rows) + " k " + std::to_string(s.k));
    const DeviceInput<uint16_t> q(in.q), decoder(in.decoder);
    const DeviceInput<uint32_t> codes(in.codes);
    DeviceOutput<int32_t> ids(s.kv_heads * s.k);
    CodeTopKParams params = ParamsOf(s);
    const DeviceWorkspace workspace(CodeTopKWorkspaceBytes(params));
    params.q = in.q.data();
    params.decoder = in.decoder.data();
    params.codes = in.codes.data();
    std::vector<float> scores(static_cast<size_t>(s.kv_heads * s.rows));
    RefCodeTopKScores(params, scores.data());
    params.q = q.data();
    params.decoder = decoder.data();
    params.codes = codes.data();
    params.ids = ids.data();
    params.workspace = workspace.data();
    for (int call = 0; call < 2; ++call) {  // the first leaves the workspace ready for the second
      ids.Poison();
      ASSERT_EQ(cudaSuccess, CodeTopK(params, nullptr));
      const std::vector<int32_t> found = ids.Get();
      for (int64_t g = 0; g < s.kv_heads; ++g) {
        ASSERT_NO_FATAL_FAILURE(ExpectBest(scores.data() + g * s.rows, s.rows, s.k,
                                           &found[static_cast<size_t>(g * s.k)]));
      }
    }
  }
};

TEST_F(CodeTopKGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 48; ++trial) {
    const int64_t rows = 1 + Below(trial % 6 == 0 ? 60'000 : 3000);
    ExpectMatchesReference({.kv_heads = 1 + Below(5),
                            .group = 1 + trial % 16,
                            .head_dim = trial % 2 == 0 ? 64 : 128,
                            .bits = int64_t{64} << trial % 3,
                            .rows = rows,
                            .k = 1 + Below(trial % 4 == 0 ? rows + 10 : 600),
                            .sigma = 0.1f + 0.05f * static_cast<float>(trial % 7)});
    if (HasFatalFailure()) return;
  }
}

TEST_F(CodeTopKGpuTest, EverySmallCount_MatchesReference) {
  for (int64_t rows = 1; rows < 40; ++rows) {
    ExpectMatchesReference({2, 4, 128, 128, rows, 1 + Below(40), 0.2f});
    if (HasFatalFailure()) return;
  }
}

TEST_F(CodeTopKGpuTest, QueriesOfZeros_FirstAreChosen) {
  const Shape s{2, 3, 64, 128, 20'001, 2048};
  Inputs in = Random(s);
  std::fill(in.q.begin(), in.q.end(), uint16_t{0});
  const DeviceInput<uint16_t> q(in.q), decoder(in.decoder);
  const DeviceInput<uint32_t> codes(in.codes);
  DeviceOutput<int32_t> ids(s.kv_heads * s.k);
  CodeTopKParams params = ParamsOf(s);
  const DeviceWorkspace workspace(CodeTopKWorkspaceBytes(params));
  params.q = q.data();
  params.decoder = decoder.data();
  params.codes = codes.data();
  params.ids = ids.data();
  params.workspace = workspace.data();
  ASSERT_EQ(cudaSuccess, CodeTopK(params, nullptr));
  const std::vector<int32_t> found = ids.Get();
  for (int64_t i = 0; i < 2 * s.k; ++i) ASSERT_EQ(found[static_cast<size_t>(i)], i % s.k);
}

// The one row whose bits all agree with what the query makes of them, for a head that is not the first.
TEST_F(CodeTopKGpuTest, OneRowThatAgreesInEveryBit_IsTheBest) {
  for (const int64_t bits : {64, 128, 256}) {
    for (const int64_t head : {0, 5, 9, 15}) {
      const Shape s{1, 16, 64, bits, 5000, 1, 0.2f};
      Inputs in = Random(s);
      const int64_t row = Below(s.rows);
      for (int64_t b = 0; b < bits; ++b) {
        double dot = 0;
        for (int64_t c = 0; c < s.head_dim; ++c) {
          dot += double{Bf16ToFloat(in.q[static_cast<size_t>(head * s.head_dim + c)])} *
                 Bf16ToFloat(in.decoder[static_cast<size_t>(b * s.head_dim + c)]);
        }
        uint32_t& word = in.codes[static_cast<size_t>(row * bits / 32 + b / 32)];
        word = (word & ~(1u << b % 32)) | static_cast<uint32_t>(dot > 0) << b % 32;
      }
      const DeviceInput<uint16_t> q(in.q), decoder(in.decoder);
      const DeviceInput<uint32_t> codes(in.codes);
      DeviceOutput<int32_t> ids(1);
      CodeTopKParams params = ParamsOf(s);
      const DeviceWorkspace workspace(CodeTopKWorkspaceBytes(params));
      params.q = q.data();
      params.decoder = decoder.data();
      params.codes = codes.data();
      params.ids = ids.data();
      params.workspace = workspace.data();
      params.scale = 0.02f;  // the best lies within what is told apart
      ASSERT_EQ(cudaSuccess, CodeTopK(params, nullptr));
      EXPECT_EQ(ids.Get()[0], row) << "bits " << bits << " head " << head;
    }
  }
}

// What a launch for several chooses is what launches for each choose, in the same order, whatever the others'
// rows, k and bits. Two rounds: the first leaves the workspaces ready for the second.
class CodeTopKTogetherGpuTest : public CodeTopKGpuTest {
 protected:
  struct One {
    One(const Shape& s, const Inputs& in)
        : q(in.q),
          decoder(in.decoder),
          codes(in.codes),
          ids(s.kv_heads * s.k),
          params(ParamsOf(s)) {
      workspace = std::make_unique<DeviceWorkspace>(CodeTopKWorkspaceBytes(params));
      params.q = q.data();
      params.decoder = decoder.data();
      params.codes = codes.data();
      params.ids = ids.data();
      params.workspace = workspace->data();
    }
    const DeviceInput<uint16_t> q, decoder;
    const DeviceInput<uint32_t> codes;
    DeviceOutput<int32_t> ids;
    CodeTopKParams params;
    std::unique_ptr<DeviceWorkspace> workspace;
  };
  void ExpectAsAlone(const std::vector<Shape>& shapes) {
    std::vector<std::unique_ptr<One>> ones;
    std::vector<CodeTopKParams> all;
    std::vector<std::vector<int32_t>> alone;
    for (const Shape& s : shapes) {
      ones.push_back(std::make_unique<One>(s, Random(s)));
      all.push_back(ones.back()->params);
      ASSERT_EQ(cudaSuccess, CodeTopK(all.back(), nullptr));
      alone.push_back(ones.back()->ids.Get());
    }
    for (int round = 0; round < 2; ++round) {
      for (auto& one : ones) one->ids.Poison();
      ASSERT_EQ(cudaSuccess, CodeTopK(all, nullptr));
      for (size_t i = 0; i < ones.size(); ++i) {
        ASSERT_EQ(ones[i]->ids.Get(), alone[i]) << "sequence " << i << " round " << round;
      }
    }
  }
};

TEST_F(CodeTopKTogetherGpuTest, RowsAndBudgetsOfTheirOwn_AsAlone) {
  for (int trial = 0; trial < 6; ++trial) {
    std::vector<Shape> shapes;
    for (int64_t i = 0; i < 1 + Below(40); ++i) {
      const int64_t rows = 1 + Below(i % 5 == 0 ? 50'000 : 5000);
      shapes.push_back({2, 4, 128, i % 11 == 10 ? 64 : 128, rows, 1 + Below(700), 0.2f});
    }
    ExpectAsAlone(shapes);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CodeTopKTogetherGpuTest, ManyOfAn8BShape_AsAlone) {
  std::vector<Shape> shapes(19, Shape{8, 4, 128, 128, 130'932, 512, 0.2f});
  shapes[3].rows = 1500;
  shapes[7].k = 4096;
  ExpectAsAlone(shapes);
}

TEST_F(CodeTopKTogetherGpuTest, OneAndManyTooLargeForSharedMemory_AsAlone) {
  ExpectAsAlone({{8, 4, 128, 128, 3'000'000, 512, 0.2f}, {8, 4, 128, 128, 900'000, 512, 0.2f}});
}

TEST_F(CodeTopKGpuTest, MoreRowsThanSharedMemoryHolds_MatchesReference) {
  ExpectMatchesReference({140, 2, 64, 64, 61'003, 300, 0.2f});
}

TEST_F(CodeTopKGpuTest, Largest_8192Of1M_MatchesReference) {
  ExpectMatchesReference({2, 4, 128, 128, 1 << 20, 8192, 0.2f});
}

TEST_F(CodeTopKGpuTest, UnservedShapes_AreRefused) {
  CodeTopKParams params{.kv_heads = 1,
                        .group = 4,
                        .head_dim = 64,
                        .bits = 128,
                        .rows = 8,
                        .code_stride = 8,
                        .k = 2,
                        .scale = 1};
  EXPECT_EQ(CodeTopK(params, nullptr), cudaErrorInvalidValue) << "no workspace";
  params.bits = 32;
  EXPECT_EQ(CodeTopK(params, nullptr), cudaErrorInvalidValue);
  params.bits = 128;
  params.head_dim = 96;
  EXPECT_EQ(CodeTopK(params, nullptr), cudaErrorInvalidValue);
  params.head_dim = 64;
  params.k = 0;
  EXPECT_EQ(CodeTopK(params, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace carrel::kernels
