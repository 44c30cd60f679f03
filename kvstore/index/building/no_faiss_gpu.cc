// In place of faiss_gpu.cc where Faiss has no GPU half, or there is no CUDA.
#include "kvstore/index/building/faiss_gpu.h"

namespace carrel::kvstore {

absl::StatusOr<std::unique_ptr<FaissGpu>> FaissGpu::Create() {
  return absl::UnimplementedError("built without Faiss's GPU half (tools/gpu/build-faiss)");
}

}  // namespace carrel::kvstore
