// What:   what some sequences' methods enqueue to choose rows of one layer, to be launched at once; what a method's
//         kernels do for one sequence only is launched one by one.
// Math:   what each would choose alone.
// Ownership: of nothing: what params point to is the sequences' own and outlives the launch.
// Threads: one. Launch only enqueues and can be captured.
#pragma once

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/cuda/stream.h"
#include "decoder/select/cuda_row_selector.h"
#include "kernels/select/code_topk/code_topk.h"
#include "kernels/select/rescore_rows/rescore_rows.h"

namespace carrel::decoder {

struct CudaChoices {
  std::vector<kernels::CodeTopKParams> by_codes;
  std::vector<std::pair<const CudaRowSelector*, CudaChoice>> alone;
  std::vector<kernels::RescoreRowsParams> by_keys;  // of what these chose

  absl::Status Launch(const cuda::Stream& stream) const;
};

}  // namespace carrel::decoder
