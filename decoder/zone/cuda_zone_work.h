// What:   what the zones of several sequences enqueue for one layer and one token of each, stage by stage: each
//         stage is one launch for all instead of one for each, which leaves most of the chip idle.
// Math:   what each would get from its Attend, bit for bit: launches together do what they do alone.
// Ownership: of nothing: what params point to is the sequences' own and outlives the launch.
// Threads: one. Launch only enqueues and can be captured.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "common/cuda/stream.h"
#include "decoder/select/cuda_choices.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"

namespace carrel::decoder {

struct CudaZoneWork {
  CudaChoices choices;
  std::vector<kernels::RowBankParams> banks;
  std::vector<kernels::GatherPackedRowsParams> gathers;
  // To rows by their places, and to rows that lie together.
  std::vector<kernels::SparseAttentionCudaParams> to_chosen;
  std::vector<kernels::WindowAttentionCudaParams> to_all;

  absl::Status Launch(const cuda::Stream& stream) const;
};

}  // namespace carrel::decoder
