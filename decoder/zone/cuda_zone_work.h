// What:   what the zones of some sequences enqueue for one layer and one token of each, stage by stage. A stage is
//         one launch for all whose kernels take several, which alone would leave most of the chip idle; what has
//         no such kernel is launched one by one, here and nowhere else.
// Math:   of each sequence what it gets alone, bit for bit: launches together do what they do alone.
// Ownership: of nothing: what params point to is the sequences' own and outlives the launch.
// Threads: one. Launch only enqueues and can be captured.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "decoder/select/cuda_choices.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/summary_attention/summary_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"

namespace carrel::decoder {

struct CudaZoneWork {
  CudaChoices choices;
  std::vector<const cuda::Event*> fetched;  // what banks wait for
  std::vector<kernels::RowBankParams> banks;
  std::vector<kernels::GatherPackedRowsParams> gathers;
  // To rows by their places, and to rows that lie together.
  std::vector<kernels::SparseAttentionCudaParams> to_chosen;
  std::vector<kernels::WindowAttentionCudaParams> to_all;
  // To summaries of what was not chosen, which joins the others' results.
  std::vector<kernels::SummaryAttentionCudaParams> to_rest;

  absl::Status Launch(const cuda::Stream& stream) const;
};

// Of a block of tokens, the first at `first`, to `rows` rows that lie together; first >= rows: to all of them.
absl::Status AttendBlock(const AttentionShape& heads, const CudaQueries& queries,
                         const kernels::KvView& kv, int64_t first, int64_t rows,
                         const CudaPartial& to, const cuda::Stream& stream);

}  // namespace carrel::decoder
