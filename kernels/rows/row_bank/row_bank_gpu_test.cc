#include <algorithm>
#include <memory>

#include "kernels/rows/packed_rows/packed_rows_gpu_test_data.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"

namespace carrel::kernels {
namespace {

class RowBankGpuTest : public GpuKernelTest {
 protected:
  // Rows that were named lately come back more often than others.
  std::vector<int32_t> Draw(const std::vector<int32_t>& last, int64_t rows, int64_t count) {
    std::vector<bool> named(static_cast<size_t>(rows), false);
    std::vector<int32_t> ids;
    while (static_cast<int64_t>(ids.size()) < count) {
      const bool again = !last.empty() && Below(2) == 0;
      const auto id = static_cast<int32_t>(
          again ? last[static_cast<size_t>(Below(static_cast<int64_t>(last.size())))]
                : Below(rows));
      if (named[static_cast<size_t>(id)]) continue;
      named[static_cast<size_t>(id)] = true;
      ids.push_back(id);
    }
    return ids;
  }
};

// A bank on the device beside one reference per KV head.
class Bank {
 public:
  Bank(std::mt19937_64& rng, const RowBankShape& shape, bool packed = false)
      : shape_(shape),
        state_(static_cast<size_t>(RowBankLayout(shape).bytes)),
        counters_(sizeof(RowBankCounters)),
        bank_k_(shape.kv_heads * shape.slots * shape.head_dim),
        bank_v_(shape.kv_heads * shape.slots * shape.head_dim),
        references_(static_cast<size_t>(shape.kv_heads), RefRowBank(shape.slots)) {
    const int64_t elements = shape.kv_heads * shape.rows * shape.head_dim;
    for (uint16_t** rows : {&k_, &v_}) {
      const std::vector<uint16_t> values = RandomBf16(rng, elements);
      CARREL_EXPECT_CUDA(cudaMallocHost(reinterpret_cast<void**>(rows), values.size() * 2));
      if (*rows == nullptr) return;
      std::copy(values.begin(), values.end(), *rows);
    }
    if (packed) {
      packed_ = std::make_unique<PackedInput>(k_, v_, shape.kv_heads, shape.rows, shape.head_dim);
    }
    CARREL_EXPECT_CUDA(RowBankReset(shape, state_.data(), nullptr));
  }
  ~Bank() {
    CARREL_EXPECT_CUDA(cudaFreeHost(k_));
    CARREL_EXPECT_CUDA(cudaFreeHost(v_));
  }

  // One use that is to come: ids [kv_heads][count].
  struct Use {
    Use(const Bank& bank, const std::vector<std::vector<int32_t>>& of_heads, RowBankPurpose why)
        : ids(of_heads),
          count(static_cast<int64_t>(ids[0].size())),
          purpose(why),
          device_ids(Flat(ids)),
          slots(bank.shape_.kv_heads * count),
          workspace(RowBankWorkspaceBytes(bank.shape_.kv_heads, count)),
          params(bank.Params(device_ids.data(), count, slots.data(), purpose, workspace.data())) {}
    static std::vector<int32_t> Flat(const std::vector<std::vector<int32_t>>& ids) {
      std::vector<int32_t> flat;
      for (const auto& head : ids) flat.insert(flat.end(), head.begin(), head.end());
      return flat;
    }
    const std::vector<std::vector<int32_t>> ids;
    const int64_t count;
    const RowBankPurpose purpose;
    const DeviceInput<int32_t> device_ids;
    const DeviceOutput<int32_t> slots;
    const DeviceWorkspace workspace;
    const RowBankParams params;
  };

  void UseAndCompare(const std::vector<std::vector<int32_t>>& ids, RowBankPurpose purpose) {
    const Use use(*this, ids, purpose);
    ASSERT_EQ(cudaSuccess, UseRowBank(use.params, nullptr));
    Compare(use);
  }

  // What one use did with the references: slots, rows in them, counters.
  void Compare(const Use& used) {
    const auto& ids = used.ids;
    const int64_t count = used.count;
    const RowBankPurpose purpose = used.purpose;
    const std::vector<int32_t> got = used.slots.Get();
    const std::vector<uint16_t> bank_k = bank_k_.Get(), bank_v = bank_v_.Get();
    const int64_t d = shape_.head_dim;
    for (int64_t g = 0; g < shape_.kv_heads; ++g) {
      const std::vector<int32_t>& rows = ids[static_cast<size_t>(g)];
      const RowBankUse use = references_[static_cast<size_t>(g)].Use(rows);
      const std::vector<int32_t> head_slots(got.begin() + g * count, got.begin() + (g + 1) * count);
      ASSERT_EQ(head_slots, use.slots) << "head " << g;
      for (size_t i = 0; i < rows.size(); ++i) {
        const int64_t from = (g * shape_.rows + rows[i]) * d;
        const int64_t at = (g * shape_.slots + use.slots[i]) * d;
        ASSERT_TRUE(std::equal(k_ + from, k_ + from + d, bank_k.begin() + at)) << "K, row " << i;
        ASSERT_TRUE(std::equal(v_ + from, v_ + from + d, bank_v.begin() + at)) << "V, row " << i;
      }
      Count(static_cast<size_t>(g), rows, use, purpose);
    }
    const RowBankCounters counters = Counters();
    EXPECT_EQ(counters.wanted, expected_.wanted);
    EXPECT_EQ(counters.hits, expected_.hits);
    EXPECT_EQ(counters.expected, expected_.expected);
    EXPECT_EQ(counters.foreseen, expected_.foreseen);
    EXPECT_EQ(counters.ahead, expected_.ahead);
    EXPECT_EQ(counters.ahead_hits, expected_.ahead_hits);
  }

  RowBankParams Params(const int32_t* ids, int64_t count, int32_t* slots, RowBankPurpose purpose,
                       void* workspace) const {
    RowBankParams params;
    params.shape = shape_;
    if (packed_ != nullptr) {
      params.packed = packed_->get();
    } else {
      params.kv = {k_, v_, shape_.rows};
    }
    params.bank = {bank_k_.data(), bank_v_.data(), shape_.slots};
    params.state = state_.data();
    params.ids = ids;
    params.ids_stride = params.count = count;
    params.slots = slots;
    params.purpose = purpose;
    params.counters = static_cast<RowBankCounters*>(counters_.data());
    params.workspace = workspace;
    return params;
  }

  RowBankCounters Counters() const {
    RowBankCounters counters;
    CARREL_EXPECT_CUDA(
        cudaMemcpy(&counters, counters_.data(), sizeof(counters), cudaMemcpyDeviceToHost));
    return counters;
  }

 private:
  void Count(size_t head, const std::vector<int32_t>& rows, const RowBankUse& use,
             RowBankPurpose purpose) {
    const uint64_t hits = rows.size() - use.misses.size();
    ahead_rows_.resize(references_.size());
    if (purpose == RowBankPurpose::kAhead) {
      expected_.ahead += rows.size();
      expected_.ahead_hits += hits;
      ahead_rows_[head] = rows;
      std::sort(ahead_rows_[head].begin(), ahead_rows_[head].end());
      return;
    }
    expected_.wanted += rows.size();
    expected_.hits += hits;
    if (purpose != RowBankPurpose::kNowAfterAhead) return;
    expected_.expected += rows.size();
    const std::vector<int32_t>& ahead = ahead_rows_[head];
    for (const int32_t row : rows)
      expected_.foreseen += std::binary_search(ahead.begin(), ahead.end(), row);
  }

  const RowBankShape shape_;
  const DeviceWorkspace state_, counters_;
  DeviceOutput<uint16_t> bank_k_, bank_v_;
  std::vector<RefRowBank> references_;
  RowBankCounters expected_;
  std::vector<std::vector<int32_t>> ahead_rows_;
  uint16_t *k_ = nullptr, *v_ = nullptr;
  std::unique_ptr<PackedInput> packed_;  // instead of them
};

TEST_F(RowBankGpuTest, RandomUses_EqualReference) {
  for (int trial = 0; trial < 24; ++trial) {
    RowBankShape shape;
    shape.kv_heads = 1 + Below(4);
    shape.head_dim = trial % 2 == 0 ? 64 : 128;
    shape.slots = 1 + Below(trial % 3 == 0 ? 9000 : 300);
    shape.rows = shape.slots + Below(3 * shape.slots);
    shape.map = trial % 4 < 2 ? RowMap::kVector : RowMap::kHash;
    SCOPED_TRACE("kv_heads " + std::to_string(shape.kv_heads) + " slots " +
                 std::to_string(shape.slots) + " rows " + std::to_string(shape.rows) + " map " +
                 std::to_string(static_cast<int>(shape.map)));
    Bank bank(rng_, shape, trial % 8 >= 4);
    if (HasFailure()) return;
    std::vector<std::vector<int32_t>> ids(static_cast<size_t>(shape.kv_heads));
    bool after_ahead = false;
    for (int step = 0; step < 16; ++step) {
      const int64_t count = step % 5 == 4 ? shape.slots : 1 + Below(shape.slots);
      for (auto& head : ids) head = Draw(head, shape.rows, count);
      const RowBankPurpose purpose = after_ahead     ? RowBankPurpose::kNowAfterAhead
                                     : Below(2) == 0 ? RowBankPurpose::kAhead
                                                     : RowBankPurpose::kNow;
      after_ahead = purpose == RowBankPurpose::kAhead;
      bank.UseAndCompare(ids, purpose);
      if (HasFatalFailure()) return;
    }
  }
}

// Banks that differ in slots, rows, maps, what they are for, and whether their rows are packed.
TEST_F(RowBankGpuTest, BanksTogether_EqualReferences) {
  std::vector<std::unique_ptr<Bank>> banks;
  std::vector<RowBankShape> shapes;
  for (int i = 0; i < 37; ++i) {
    RowBankShape shape;
    shape.kv_heads = i % 10 == 9 ? 3 : 2;
    shape.head_dim = 128;
    shape.slots = 1 + Below(i % 7 == 0 ? 5000 : 400);
    shape.rows = shape.slots + Below(3 * shape.slots);
    shape.map = i % 13 == 12 ? RowMap::kHash : RowMap::kVector;
    shapes.push_back(shape);
    banks.push_back(std::make_unique<Bank>(rng_, shape, i % 8 < 6));
    if (HasFailure()) return;
  }
  std::vector<std::vector<std::vector<int32_t>>> last(banks.size());
  for (int step = 0; step < 6; ++step) {
    std::vector<std::unique_ptr<Bank::Use>> uses;
    std::vector<RowBankParams> all;
    for (size_t i = 0; i < banks.size(); ++i) {
      last[i].resize(static_cast<size_t>(shapes[i].kv_heads));
      const int64_t count = 1 + Below(shapes[i].slots);
      for (auto& head : last[i]) head = Draw(head, shapes[i].rows, count);
      uses.push_back(std::make_unique<Bank::Use>(
          *banks[i], last[i], Below(4) == 0 ? RowBankPurpose::kAhead : RowBankPurpose::kNow));
      all.push_back(uses.back()->params);
    }
    ASSERT_EQ(cudaSuccess, UseRowBanks(all, nullptr));
    for (size_t i = 0; i < banks.size(); ++i) {
      SCOPED_TRACE("bank " + std::to_string(i) + " step " + std::to_string(step));
      banks[i]->Compare(*uses[i]);
      if (HasFatalFailure()) return;
    }
  }
}

// More slots than bits in 48 KiB of shared memory, and uses longer than a block's step.
TEST_F(RowBankGpuTest, ManySlots_EqualReference) {
  for (const RowMap map : {RowMap::kVector, RowMap::kHash}) {
    const RowBankShape shape{
        .kv_heads = 1, .head_dim = 64, .slots = 500'000, .rows = 600'000, .map = map};
    Bank bank(rng_, shape);
    std::vector<std::vector<int32_t>> ids(1);
    for (int step = 0; step < 3; ++step) {
      ids[0] = Draw(ids[0], shape.rows, 6000);
      std::sort(ids[0].begin(), ids[0].end());
      bank.UseAndCompare(ids, RowBankPurpose::kNow);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RowBankGpuTest, SlotForEveryRow_EverythingHitsOnceSeen) {
  for (const RowMap map : {RowMap::kVector, RowMap::kHash}) {
    const RowBankShape shape{
        .kv_heads = 2, .head_dim = 128, .slots = 1000, .rows = 1000, .map = map};
    Bank bank(rng_, shape);
    const std::vector<std::vector<int32_t>> all(2, Draw({}, 1000, 1000));
    bank.UseAndCompare(all, RowBankPurpose::kNow);
    EXPECT_EQ(bank.Counters().hits, 0u);
    for (int step = 0; step < 4; ++step) {
      bank.UseAndCompare({Draw({}, 1000, 300), Draw({}, 1000, 300)}, RowBankPurpose::kNow);
    }
    EXPECT_EQ(bank.Counters().hits, 4u * 2 * 300);
  }
}

TEST_F(RowBankGpuTest, CountsOfTheirOwnPerHead_EqualReference) {
  const RowBankShape shape{
      .kv_heads = 3, .head_dim = 64, .slots = 70, .rows = 300, .map = RowMap::kHash};
  Bank bank(rng_, shape);
  std::vector<RefRowBank> references(3, RefRowBank(70));
  constexpr int64_t kMost = 60, kStride = 64;
  const DeviceWorkspace workspace(RowBankWorkspaceBytes(3, kMost));
  for (int step = 0; step < 12; ++step) {
    std::vector<int32_t> flat(3 * kStride, -7), counts, expected(3 * kMost, -1);
    for (size_t g = 0; g < 3; ++g) {
      const std::vector<int32_t> rows = Draw({}, 300, g == 1 ? step % 3 : Below(kMost + 1));
      counts.push_back(static_cast<int32_t>(rows.size()));
      std::copy(rows.begin(), rows.end(), flat.begin() + static_cast<int64_t>(g) * kStride);
      const RowBankUse use = references[g].Use(rows);
      std::copy(use.slots.begin(), use.slots.end(),
                expected.begin() + static_cast<int64_t>(g) * kMost);
    }
    const DeviceInput<int32_t> ids(flat), row_count(counts);
    DeviceOutput<int32_t> slots(3 * kMost);
    RowBankParams params =
        bank.Params(ids.data(), kMost, slots.data(), RowBankPurpose::kNow, workspace.data());
    params.ids_stride = kStride;
    params.row_count = row_count.data();
    CARREL_ASSERT_CUDA(UseRowBank(params, nullptr));
    ASSERT_EQ(slots.Get(), expected) << "step " << step;
  }
}

TEST_F(RowBankGpuTest, Reset_ForgetsEverything) {
  const RowBankShape shape{.kv_heads = 1, .head_dim = 64, .slots = 64, .rows = 100};
  const std::vector<std::vector<int32_t>> ids(1, Draw({}, 100, 20));
  Bank bank(rng_, shape);
  bank.UseAndCompare(ids, RowBankPurpose::kNow);
  const RowBankParams params = bank.Params(nullptr, 0, nullptr, RowBankPurpose::kNow, nullptr);
  CARREL_ASSERT_CUDA(RowBankReset(shape, params.state, nullptr));
  const DeviceInput<int32_t> device_ids(ids[0]);
  DeviceOutput<int32_t> slots(20);
  const DeviceWorkspace workspace(RowBankWorkspaceBytes(1, 20));
  CARREL_ASSERT_CUDA(UseRowBank(
      bank.Params(device_ids.data(), 20, slots.data(), RowBankPurpose::kNow, workspace.data()),
      nullptr));
  EXPECT_EQ(slots.Get(), RefRowBank(64).Use(ids[0]).slots);
  EXPECT_EQ(bank.Counters().hits, 0u);
}

TEST_F(RowBankGpuTest, CapturedInAGraph_EqualsDirectCalls) {
  const RowBankShape shape{
      .kv_heads = 2, .head_dim = 64, .slots = 200, .rows = 1000, .map = RowMap::kHash};
  Bank bank(rng_, shape);
  std::vector<RefRowBank> references(2, RefRowBank(200));
  DeviceInput<int32_t> ids(std::vector<int32_t>(2 * 100));
  DeviceOutput<int32_t> slots(2 * 100);
  const DeviceWorkspace workspace(RowBankWorkspaceBytes(2, 100));
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CARREL_ASSERT_CUDA(cudaDeviceSynchronize());
  CARREL_ASSERT_CUDA(cudaStreamCreate(&stream));
  CARREL_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CARREL_ASSERT_CUDA(UseRowBank(
      bank.Params(ids.data(), 100, slots.data(), RowBankPurpose::kNow, workspace.data()), stream));
  CARREL_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  CARREL_ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<std::vector<int32_t>> rows(2);
  for (int step = 0; step < 30; ++step) {
    std::vector<int32_t> flat, expected;
    for (size_t g = 0; g < 2; ++g) {
      rows[g] = Draw(rows[g], 1000, 100);
      flat.insert(flat.end(), rows[g].begin(), rows[g].end());
      const RowBankUse use = references[g].Use(rows[g]);
      expected.insert(expected.end(), use.slots.begin(), use.slots.end());
    }
    ids.Set(flat);
    CARREL_ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    CARREL_ASSERT_CUDA(cudaStreamSynchronize(stream));
    ASSERT_EQ(slots.Get(), expected) << "step " << step;
  }
  CARREL_EXPECT_CUDA(cudaGraphExecDestroy(exec));
  CARREL_EXPECT_CUDA(cudaGraphDestroy(graph));
  CARREL_EXPECT_CUDA(cudaStreamDestroy(stream));
}

TEST_F(RowBankGpuTest, UnservedShapes_AreRefused) {
  const RowBankShape shape{.kv_heads = 1, .head_dim = 64, .slots = 8, .rows = 100};
  Bank bank(rng_, shape);
  const DeviceWorkspace workspace(RowBankWorkspaceBytes(1, 9));
  EXPECT_EQ(
      UseRowBank(bank.Params(nullptr, 9, nullptr, RowBankPurpose::kNow, workspace.data()), nullptr),
      cudaErrorInvalidValue)
      << "more rows than slots";
  EXPECT_EQ(UseRowBank(bank.Params(nullptr, 0, nullptr, RowBankPurpose::kNow, nullptr), nullptr),
            cudaSuccess);
  RowBankParams params = bank.Params(nullptr, 1, nullptr, RowBankPurpose::kNow, workspace.data());
  params.shape.head_dim = 96;
  EXPECT_EQ(UseRowBank(params, nullptr), cudaErrorInvalidValue);
  params.shape.head_dim = 64;
  params.shape.slots = kMaxBankSlots + 1;
  EXPECT_EQ(UseRowBank(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace carrel::kernels
