// What:   the second look of the methods that choose by codes or labels, on a GPU: they choose
//         oversample x budget candidates, of which the best by their own keys are kept, and
//         attended to in the same launch where that is wanted (kernels/select/rescore_rows).
// Errors: Lay: InvalidArgument more candidates than the kernel serves: names method and bound.
// Ownership: its memory is that of the arena; the keys outlive it.
// Threads: one.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/cuda_row_selector.h"

namespace carrel::decoder {

class CudaCandidates {
 public:
  // Where nothing is oversampled, no keys are read.
  static absl::StatusOr<CudaCandidates> Lay(const char* method, const CudaZoneShape& shape,
                                            int64_t oversample, const CudaKeys& keys,
                                            cuda::DeviceArena& arena);
  CudaCandidates() = default;
  // The same with a place of their own; these outlive them.
  CudaCandidates LayAnother(cuda::DeviceArena& arena) const;
  absl::Status Load() const { return head_budgets_.Load(); }

  // Rows that the method is to choose for each KV head, and where: [kv_heads, count]. chosen: where
  // the layer's rows go.
  int64_t Count(Layer layer) const;
  int32_t* Ids(Layer layer, int32_t* chosen) const;
  // Whether there are more of them than the layer's budget.
  bool rescores(Layer layer) const { return Count(layer) > shape_.budgets[layer.value()]; }
  // Where there are: adds what keeps the best of them in chosen [kv_heads, budget], and attends to them if that
  // is wanted. Nothing where they are as many.
  void AddKept(const CudaChoice& choice, int32_t* chosen, CudaChoices& to) const;
  // What that chose, of a method that put it there.
  CudaSelection selection(Layer layer, const int32_t* chosen) const;

 private:
  // What AddKept writes.
  void LayIds(cuda::DeviceArena& arena);

  CudaZoneShape shape_;
  int64_t oversample_ = 1;
  CudaKeys keys_;
  int32_t* ids_ = nullptr;  // [kv_heads, most of any layer], of the layer in turn
  float* base_ = nullptr;   // [q_heads], likewise: what its scores were taken less of
  CudaHeadBudgets head_budgets_;
};

// What kAutoOversample is for a shape: kOversample, or what the kernel serves of it.
int64_t CudaOversample(int64_t configured, const CudaZoneShape& shape);

}  // namespace carrel::decoder
