#include "prefill/cuda_accelerator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/cuda/stream.h"
#include "common/status.h"
#include "kernels/encode/code_encode/code_encode.h"
#include "kernels/score/code_score/code_score.h"
#include "kvstore/index/building/faiss_gpu.h"
#include "prefill/cuda_summaries.h"

namespace carrel::prefill {
namespace {

using cuda::PinnedBuffer;
using cuda::Stream;

constexpr int kLanes = 8;
constexpr int64_t kMaxBits = kernels::kMaxCodeBits;
constexpr int64_t kMaxMapFloats = 32768 + kMaxBits + kMaxBits * kMaxBits;

// What one call at a time works with.
struct Lane {
  Stream stream;
  cuda::Event done;
  float* map = nullptr;
  PinnedBuffer<float> host_map;
  PinnedBuffer<uint8_t> blocks;
  CudaSummaries summaries;
};

using Lanes = std::array<Lane, kLanes>;

// Their device memory: plans it, or lays it out.
void Lay(int64_t tokens, bool summaries, Lanes& lanes, cuda::DeviceArena& arena) {
  for (Lane& lane : lanes) {
    lane.map = arena.Take<float>(kMaxMapFloats);
    if (summaries) lane.summaries = CudaSummaries(tokens, arena);
  }
}

// Faiss is made at the first call that wants it: an index of codes does without its memory.
class CudaAccelerator final : public kvstore::Accelerator {
 public:
  absl::Status Allocate(int64_t tokens, bool summaries) {
    const int64_t blocks = (tokens + kernels::kCodeBlockKeys - 1) / kernels::kCodeBlockKeys;
    ASSIGN_OR_RETURN(arena_, cuda::DeviceArena::Of([&](cuda::DeviceArena& arena) {
                       Lay(tokens, summaries, lanes_, arena);
                     }));
    absl::MutexLock lock(&mu_);
    for (Lane& lane : lanes_) {
      // Before the forward pass, whose kernels fill the chip for milliseconds; what is done here is
      // short. The thread sleeps meanwhile: the cores have work.
      ASSIGN_OR_RETURN(lane.stream, Stream::Create(Stream::Priority::kHigh));
      ASSIGN_OR_RETURN(lane.done,
                       cuda::Event::Create(cuda::Event::Timing::kOff, cuda::Event::Wait::kAsleep));
      ASSIGN_OR_RETURN(lane.host_map, PinnedBuffer<float>::Create(kMaxMapFloats));
      ASSIGN_OR_RETURN(lane.blocks,
                       PinnedBuffer<uint8_t>::Create(blocks * kernels::CodeBlockBytes(kMaxBits)));
      if (summaries) RETURN_IF_ERROR(lane.summaries.Allocate());
      free_.push_back(&lane);
    }
    return absl::OkStatus();
  }

  absl::Status EncodeKeys(const kvstore::CodeMap& map, const kvstore::Rows& keys,
                          char* blocks) override {
    const int64_t count = (keys.count() + kernels::kCodeBlockKeys - 1) / kernels::kCodeBlockKeys;
    const int64_t bytes = count * kernels::CodeBlockBytes(map.bits);
    if (!kernels::CodeEncodeHas(map.head_dim, map.bits) || bytes > lanes_[0].blocks.bytes() ||
        (!map.feedback.empty() && map.bits % map.stage_bits != 0)) {
      return absl::UnimplementedError(absl::StrCat("codes of ", map.bits, " bits in stages of ",
                                                   map.stage_bits, " of ", keys.count(),
                                                   " keys of ", map.head_dim, " on the GPU"));
    }
    if (keys.count() == 0) return absl::OkStatus();
    Lane* const lane = Take();
    const absl::Status status = EncodeWith(*lane, map, keys, bytes, blocks);
    GiveBack(lane);
    return status;
  }

  absl::StatusOr<kvstore::NearestKeys> FindNearest(const std::vector<float>& queries,
                                                   const std::vector<Position>& limits,
                                                   const kvstore::Rows& keys, int64_t k) override {
    ASSIGN_OR_RETURN(kvstore::FaissGpu* const faiss, Faiss());
    return faiss->FindNearest(queries, limits, keys, k);
  }

  absl::StatusOr<std::vector<float>> TrainLists(const std::vector<float>& x, int64_t head_dim,
                                                int64_t lists) override {
    ASSIGN_OR_RETURN(kvstore::FaissGpu* const faiss, Faiss());
    return faiss->TrainLists(x, head_dim, lists);
  }

  absl::StatusOr<std::vector<float>> Summarise(const kvstore::SummaryPlan& plan,
                                               const kvstore::SummaryLayout& layout,
                                               const kvstore::Rows& keys,
                                               const kvstore::Rows& values, char* blob) override {
    Lane* const lane = Take();
    absl::StatusOr<std::vector<float>> centre =
        lane->summaries.Summarise(plan, layout, keys, values, lane->stream, lane->done, blob);
    GiveBack(lane);
    return centre;
  }

 private:
  absl::StatusOr<kvstore::FaissGpu*> Faiss() {
    absl::MutexLock lock(&mu_);
    if (faiss_ == nullptr) {
      ASSIGN_OR_RETURN(faiss_, kvstore::FaissGpu::Create());
    }
    return faiss_.get();
  }

  Lane* Take() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(
        +[](CudaAccelerator* a) ABSL_NO_THREAD_SAFETY_ANALYSIS { return !a->free_.empty(); },
        this));
    Lane* const lane = free_.back();
    free_.pop_back();
    return lane;
  }

  void GiveBack(Lane* lane) {
    absl::MutexLock lock(&mu_);
    free_.push_back(lane);
  }

  static absl::Status EncodeWith(Lane& lane, const kvstore::CodeMap& map, const kvstore::Rows& keys,
                                 int64_t bytes, char* blocks) {
    const cuda::Range range("encode keys");
    int64_t floats = 0;
    const auto put = [&](const std::vector<float>& values) {
      const float* const at = lane.map + floats;
      std::copy(values.begin(), values.end(), lane.host_map.data() + floats);
      floats += static_cast<int64_t>(values.size());
      return at;
    };
    kernels::CodeEncodeParams params;
    params.matrix = put(map.matrix);
    params.offset = put(map.offset);
    params.feedback = map.feedback.empty() ? nullptr : put(map.feedback);
    CARREL_CHECK(floats <= kMaxMapFloats);
    params.x = static_cast<const uint16_t*>(keys.Address(0));  // of builders: one piece
    params.blocks = lane.blocks.data();
    params.rows = keys.count();
    params.head_dim = map.head_dim;
    params.bits = map.bits;
    params.stage_bits = map.stage_bits;
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(lane.map, lane.host_map.data(),
                                         static_cast<size_t>(floats) * sizeof(float),
                                         cudaMemcpyHostToDevice, lane.stream.get()));
    RETURN_IF_CUDA_ERROR(kernels::CodeEncode(params, lane.stream.get()));
    RETURN_IF_ERROR(lane.done.Record(lane.stream));
    RETURN_IF_ERROR(lane.done.Synchronize());
    std::memcpy(blocks, lane.blocks.data(), static_cast<size_t>(bytes));
    return absl::OkStatus();
  }

  absl::Mutex mu_;
  cuda::DeviceArena arena_;
  Lanes lanes_;
  std::vector<Lane*> free_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<kvstore::FaissGpu> faiss_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<kvstore::Accelerator>> MakeCudaAccelerator(int64_t tokens,
                                                                          bool summaries) {
  auto accelerator = std::make_unique<CudaAccelerator>();
  RETURN_IF_ERROR(accelerator->Allocate(tokens, summaries));
  return accelerator;
}

int64_t CudaAcceleratorBytes(int64_t tokens, bool summaries) {
  Lanes lanes;
  return cuda::DeviceArena::BytesOf(
      [&](cuda::DeviceArena& arena) { Lay(tokens, summaries, lanes, arena); });
}

}  // namespace carrel::prefill
