#include "kernels/gpu_test_data.h"
#include "kernels/select/hamming_topk/hamming_topk.h"
#include "kernels/select/topk/topk.h"

namespace carrel::kernels {
namespace {

class HammingTopKGpuTest : public GpuKernelTest {};

struct Shape {
  int64_t kv_heads, group, bits, rows, k;
};

// The chosen of the first `checked` KV heads, in the order that the header gives.
void ExpectChosen(const Shape& s, const std::vector<uint32_t>& queries,
                  const std::vector<uint32_t>& codes, const std::vector<int32_t>& ids,
                  int64_t checked) {
  std::vector<uint16_t> scores(static_cast<size_t>(checked * s.rows));
  RefHammingScores({.queries = queries.data(),
                    .codes = codes.data(),
                    .kv_heads = checked,
                    .group = s.group,
                    .bits = s.bits,
                    .rows = s.rows,
                    .code_stride = s.rows},
                   scores.data());
  const int64_t count = std::min(s.k, s.rows);
  for (int64_t g = 0; g < checked; ++g) {
    const std::vector<float> wide(scores.begin() + g * s.rows, scores.begin() + (g + 1) * s.rows);
    std::vector<int64_t> expected(static_cast<size_t>(count));
    RefTopK(wide.data(), s.rows, s.k, expected.data());
    if (count > 0) {
      const float last = wide[static_cast<size_t>(expected.back())];
      const auto ties = std::find_if(expected.begin(), expected.end(), [&](int64_t j) {
        return wide[static_cast<size_t>(j)] == last;
      });
      std::sort(expected.begin(), ties);
    }
    const std::vector<int64_t> out(ids.begin() + g * s.k, ids.begin() + g * s.k + count);
    ASSERT_EQ(out, expected) << "head " << g;
    for (int64_t i = count; i < s.k; ++i) ASSERT_EQ(ids[static_cast<size_t>(g * s.k + i)], -1);
  }
}

enum class Keys { kRandom, kAlike, kBetterAndBetter, kWorseAndWorse };

// Keys in order of likeness differ from the first query in ever fewer, or more, bits.
std::vector<uint32_t> MakeKeys(std::mt19937_64& rng, const Shape& s, Keys keys,
                               const std::vector<uint32_t>& queries) {
  const int64_t words = s.bits / 32;
  if (keys == Keys::kRandom) return RandomWords(rng, s.kv_heads * s.rows * words);
  std::vector<uint32_t> codes(static_cast<size_t>(s.kv_heads * s.rows * words), 0x5a5a1234u);
  if (keys == Keys::kAlike) return codes;
  for (int64_t g = 0; g < s.kv_heads; ++g) {
    for (int64_t j = 0; j < s.rows; ++j) {
      const int64_t place = keys == Keys::kBetterAndBetter ? s.rows - 1 - j : j;
      const int64_t flipped = place * (s.bits + 1) / s.rows;
      for (int64_t w = 0; w < words; ++w) {
        const int64_t here = std::clamp<int64_t>(flipped - 32 * w, 0, 32);
        const uint32_t mask = here == 32 ? ~0u : (1u << here) - 1;
        codes[static_cast<size_t>((g * s.rows + j) * words + w)] =
            queries[static_cast<size_t>(g * s.group * words + w)] ^ mask;
      }
    }
  }
  return codes;
}

void ExpectEqualsReference(std::mt19937_64& rng, const Shape& s, int64_t checked,
                           Keys keys = Keys::kRandom) {
  SCOPED_TRACE("kv_heads " + std::to_string(s.kv_heads) + " group " + std::to_string(s.group) +
               " bits " + std::to_string(s.bits) + " rows " + std::to_string(s.rows) + " k " +
               std::to_string(s.k));
  const int64_t words = s.bits / 32;
  const std::vector<uint32_t> queries = RandomWords(rng, s.kv_heads * s.group * words);
  const std::vector<uint32_t> codes = MakeKeys(rng, s, keys, queries);
  const DeviceInput<uint32_t> device_queries(queries), device_codes(codes);
  DeviceOutput<int32_t> ids(s.kv_heads * s.k);
  HammingTopKParams params{.queries = device_queries.data(),
                           .codes = device_codes.data(),
                           .kv_heads = s.kv_heads,
                           .group = s.group,
                           .bits = s.bits,
                           .rows = s.rows,
                           .code_stride = s.rows,
                           .k = s.k,
                           .ids = ids.data()};
  const DeviceWorkspace workspace(HammingTopKWorkspaceBytes(params));
  params.workspace = workspace.data();
  for (int call = 0; call < 2; ++call) {  // the first leaves the workspace ready for the second
    ids.Poison();
    ASSERT_EQ(cudaSuccess, HammingTopK(params, nullptr));
    ExpectChosen(s, queries, codes, ids.Get(), checked);
  }
}

TEST_F(HammingTopKGpuTest, RandomShapes_EqualReference) {
  for (int64_t trial = 0; trial < 48; ++trial) {
    const int64_t rows = Below(trial % 6 == 0 ? 60000 : 3000);
    const Shape shape{.kv_heads = 1 + Below(5),
                      .group = 1 + trial % 16,
                      .bits = int64_t{64} << trial % 3,
                      .rows = rows,
                      .k = Below(trial % 4 == 0 ? rows + 10 : 600)};
    ExpectEqualsReference(rng_, shape, shape.kv_heads);
  }
}

TEST_F(HammingTopKGpuTest, EverySmallCount_EqualsReference) {
  for (int64_t rows = 0; rows < 40; ++rows) {
    ExpectEqualsReference(rng_, {2, 4, 128, rows, 1 + Below(40)}, 2);
  }
}

TEST_F(HammingTopKGpuTest, AllKeysAlike_FirstAreChosen) {
  ExpectEqualsReference(rng_, {2, 4, 128, 50001, 2048}, 2, Keys::kAlike);
}

TEST_F(HammingTopKGpuTest, KeysOrderedByLikeness_EqualReference) {
  for (Keys keys : {Keys::kBetterAndBetter, Keys::kWorseAndWorse, Keys::kAlike}) {
    ExpectEqualsReference(rng_, {40, 1, 128, 40'000, 300}, 2, keys);
    ExpectEqualsReference(rng_, {40, 4, 64, 40'000, 299}, 2, keys);
  }
}

TEST_F(HammingTopKGpuTest, MoreKeysThanSharedMemoryHolds_EqualsReference) {
  ExpectEqualsReference(rng_, {140, 2, 64, 61'003, 300}, 3);
}

TEST_F(HammingTopKGpuTest, Largest_2048Of1M_EightHeads_EqualsReference) {
  ExpectEqualsReference(rng_, {8, 4, 128, 1 << 20, 2048}, 8);
}

TEST_F(HammingTopKGpuTest, CapturedInAGraph_EqualsDirectCall) {
  const std::vector<uint32_t> queries = RandomWords(rng_, 2 * 4 * 4);
  const std::vector<uint32_t> codes = RandomWords(rng_, 2 * 30000 * 4);
  const DeviceInput<uint32_t> device_queries(queries), device_codes(codes);
  DeviceOutput<int32_t> ids(2 * 100);
  HammingTopKParams params{
      device_queries.data(), device_codes.data(), 2, 4, 128, 30000, 30000, 100, ids.data()};
  const DeviceWorkspace workspace(HammingTopKWorkspaceBytes(params));
  params.workspace = workspace.data();
  CARREL_ASSERT_CUDA(HammingTopK(params, nullptr));
  const std::vector<int32_t> direct = ids.Get();
  ids.Poison();
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CARREL_ASSERT_CUDA(cudaStreamCreate(&stream));
  CARREL_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CARREL_ASSERT_CUDA(HammingTopK(params, stream));
  CARREL_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  CARREL_ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) CARREL_ASSERT_CUDA(cudaGraphLaunch(exec, stream));
  CARREL_ASSERT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(ids.Get(), direct);
  CARREL_EXPECT_CUDA(cudaGraphExecDestroy(exec));
  CARREL_EXPECT_CUDA(cudaGraphDestroy(graph));
  CARREL_EXPECT_CUDA(cudaStreamDestroy(stream));
}

TEST_F(HammingTopKGpuTest, UnservedShapes_AreRefused) {
  HammingTopKParams params{
      .kv_heads = 1, .group = 4, .bits = 128, .rows = 8, .code_stride = 8, .k = 2};
  EXPECT_EQ(HammingTopK(params, nullptr), cudaErrorInvalidValue) << "no workspace";
  params.bits = 32;
  EXPECT_EQ(HammingTopK(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace carrel::kernels
