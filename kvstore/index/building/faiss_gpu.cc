#include "kvstore/index/building/faiss_gpu.h"

#include <faiss/gpu/GpuDistance.h>
#include <faiss/gpu/GpuIndexFlat.h>
#include <faiss/gpu/StandardGpuResources.h>

#include <exception>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/cuda/buffer.h"
#include "common/cuda/status.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kvstore/index/building/partition.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kScratchBytes = int64_t{256} << 20;

class FaissGpuImpl final : public FaissGpu {
 public:
  absl::Status Start() {
    try {
      resources_ = std::make_unique<faiss::gpu::StandardGpuResources>();
      resources_->setTempMemory(kScratchBytes);
    } catch (const std::exception& error) {
      return absl::InternalError(absl::StrCat("Faiss on the GPU: ", error.what()));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<NearestKeys> FindNearest(const std::vector<float>& queries,
                                          const std::vector<Position>& limits, const Rows& keys,
                                          int64_t k) override {
    const int64_t d = keys.head_dim();
    NearestKeys nearest;
    nearest.products.resize(limits.size() * static_cast<size_t>(k));
    nearest.ids.assign(nearest.products.size(), -1);
    if (limits.empty() || keys.count() == 0) return nearest;
    std::vector<float> wide(static_cast<size_t>(keys.count() * d));
    keys.ForEachPiece({0, keys.count()}, [&](Position first, const void* rows, int64_t count) {
      WidenToFloat(DType::kBf16, rows, count * d, &wide[static_cast<size_t>(first * d)]);
    });
    ASSIGN_OR_RETURN(const auto device,
                     cuda::DeviceBuffer<float>::Create(static_cast<int64_t>(wide.size())));
    RETURN_IF_CUDA_ERROR(cudaMemcpy(device.data(), wide.data(), wide.size() * sizeof(float),
                                    cudaMemcpyHostToDevice));
    absl::MutexLock lock(&mu_);
    for (size_t at = 0, end; at < limits.size(); at = end) {
      end = at + 1;
      while (end < limits.size() && limits[end] == limits[at]) ++end;
      if (limits[at] == 0) continue;
      faiss::gpu::GpuDistanceParams params;
      params.metric = faiss::METRIC_INNER_PRODUCT;
      params.k = static_cast<int>(k);
      params.dims = static_cast<int>(d);
      params.vectors = device.data();
      params.numVectors = static_cast<int>(limits[at]);
      params.queries = &queries[at * static_cast<size_t>(d)];
      params.numQueries = static_cast<int>(end - at);
      params.outDistances = &nearest.products[at * static_cast<size_t>(k)];
      params.outIndices = &nearest.ids[at * static_cast<size_t>(k)];
      try {
        faiss::gpu::bfKnn(resources_.get(), params);
      } catch (const std::exception& error) {
        return absl::InternalError(absl::StrCat("nearest ", k, " of ", limits[at],
                                                " keys by Faiss on the GPU: ", error.what()));
      }
    }
    return nearest;
  }

  absl::StatusOr<std::vector<float>> TrainLists(const std::vector<float>& x, int64_t head_dim,
                                                int64_t lists) override {
    absl::MutexLock lock(&mu_);
    try {
      faiss::gpu::GpuIndexFlatL2 nearest(resources_.get(), static_cast<int>(head_dim));
      return TrainCentroids(x, lists, nearest);
    } catch (const std::exception& error) {
      return absl::InternalError(
          absl::StrCat("k-means into ", lists, " lists by Faiss on the GPU: ", error.what()));
    }
  }

 private:
  absl::Mutex mu_;
  std::unique_ptr<faiss::gpu::StandardGpuResources> resources_;  // used under mu_
};

}  // namespace

absl::StatusOr<std::unique_ptr<FaissGpu>> FaissGpu::Create() {
  int devices = 0;
  RETURN_IF_CUDA_ERROR(cudaGetDeviceCount(&devices));
  auto made = std::make_unique<FaissGpuImpl>();
  RETURN_IF_ERROR(made->Start());
  return made;
}

}  // namespace carrel::kvstore
