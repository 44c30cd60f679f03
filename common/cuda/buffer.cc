#include "common/cuda/buffer.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"

namespace carrel::cuda::internal {
namespace {

absl::Status CheckSize(int64_t count, int64_t element_bytes, const char* where) {
  if (count < 0 || count > std::numeric_limits<int64_t>::max() / element_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": ", count, " elements of ", element_bytes, " bytes"));
  }
  return absl::OkStatus();
}

absl::Status AllocationStatus(cudaError_t error, int64_t bytes, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  static_cast<void>(cudaGetLastError());  // a failed allocation must not fail the next launch
  size_t free_bytes = 0, total_bytes = 0;
  static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
  return Annotate(CudaStatus(error, call),
                  absl::StrCat(bytes, " bytes wanted, ", free_bytes, " free on the device"));
}

}  // namespace

absl::StatusOr<void*> AllocateDevice(int64_t count, int64_t element_bytes) {
  RETURN_IF_ERROR(CheckSize(count, element_bytes, "device memory"));
  void* data = nullptr;
  if (count == 0) return data;
  const int64_t bytes = count * element_bytes;
  RETURN_IF_ERROR(
      AllocationStatus(cudaMalloc(&data, static_cast<size_t>(bytes)), bytes, "cudaMalloc"));
  return data;
}

absl::StatusOr<void*> AllocatePinned(int64_t count, int64_t element_bytes) {
  RETURN_IF_ERROR(CheckSize(count, element_bytes, "pinned memory"));
  void* data = nullptr;
  if (count == 0) return data;
  const int64_t bytes = count * element_bytes;
  RETURN_IF_ERROR(AllocationStatus(
      cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped),
      bytes, "cudaHostAlloc"));
  return data;
}

void FreeDevice(void* data) {
  if (data != nullptr) static_cast<void>(cudaFree(data));
}

void FreePinned(void* data) {
  if (data != nullptr) static_cast<void>(cudaFreeHost(data));
}

}  // namespace carrel::cuda::internal
