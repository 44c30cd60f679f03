// What:      the zone's part of a sequence's attention where a GPU runs the model, wherever the zone
//            lives: cuda_store_zone.cc asks a store, cuda_held_zone.cc holds the rows on the GPU
//            or in pinned memory of this host. The base class implements an empty zone.
//            Per layer and slice of tokens: TakeQueries, Predict, TakeWindow, Add, Attend enqueue only and
//            can be captured; where asks_host(), Ask and Answer run between them, each time, in this
//            host. Of several sequences all may ask before the first is answered.
// Shapes:    queries [n, q_heads, head_dim] after RoPE, f32 and rounded to bf16; out
//            [n, q_heads, head_dim], lse [n, q_heads] f32. All on the device.
// Errors:    ResourceExhausted device or pinned memory; those of the store.
// Threads:   one.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/statistics.h"
#include "decoder/zone/zone_attention.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/summary_attention/summary_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"

namespace carrel::decoder {

struct CudaQueries {
  const float* exact = nullptr;
  const uint16_t* rounded = nullptr;
  int64_t n = 0;
  float* room = nullptr;  // for parts of attention to many rows (kernels::PrefillAttentionRoom)
};

using CudaPartial = CudaAttendSelected;

// Where the rows of a selection lie.
struct CudaPlaces {
  kernels::KvView kv;
  const int32_t* places = nullptr;  // [kv_heads, stride]; null: at their ids
  int64_t stride = 0;
  bool gathered = false;  // instead: in the order of the selection
};

// What the zones of some sequences enqueue for one layer and one token of each, stage by stage. A stage is one launch for
// all whose kernels take several, which alone would leave most of the chip idle; what has no such kernel is launched one
// by one, here and nowhere else. Each gets what it gets alone, bit for bit. What params point to is the sequences' own
// and outlives the launch, which only enqueues and can be captured.
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

// The device memory that Load takes if none of it is shared; of it, what other sequences over the same context share
// (shared.h), and whether one does now.
struct CudaZoneBytes {
  int64_t all = 0, shareable = 0;
  bool shared_now = false;
};

class CudaZoneAttention : public Zone {
 public:
  using Zone::Zone;

  virtual absl::StatusOr<CudaZoneBytes> Bytes() { return CudaZoneBytes(); }
  // block: tokens at once, at most.
  virtual absl::Status Load(int64_t, const cuda::Stream&) { return absl::OkStatus(); }
  // Forgets what the tokens so far have left behind: they counted for nothing.
  virtual absl::Status Reset(const cuda::Stream&) { return absl::OkStatus(); }

  // Whether every layer waits for an answer of this host; otherwise a token is one graph, one for
  // each phase of what chooses the rows.
  virtual bool asks_host() const { return false; }
  virtual int64_t phases() const { return 1; }
  virtual int64_t PhaseOf(int64_t) const { return 0; }

  // How many tokens' queries Predict may be given at once, of a block of so many; 0: none ever.
  virtual int64_t predicted_tokens(int64_t) const { return 0; }
  // Whether it is given those of n tokens for the layer, which is not the first.
  virtual bool predicts(Layer, int64_t) const { return false; }

  virtual absl::Status TakeQueries(Layer, const CudaQueries&, const cuda::Stream&) {
    return absl::OkStatus();
  }
  // What this layer's hidden state says of the next layer's queries. They stay until that layer
  // attends.
  virtual absl::Status Predict(Layer, const CudaQueries&, const cuda::Stream&) {
    return absl::OkStatus();
  }
  // lse [n, q_heads] of the rows that the decoder holds.
  virtual absl::Status TakeWindow(Layer, const float*, int64_t, const cuda::Stream&) {
    return absl::OkStatus();
  }
  // Adds the attention of one token, q rounded, to what is launched for several sequences at once; bool: Predict was
  // given its queries. Both leave `to` as it is where there are no rows.
  virtual void Add(Layer, const uint16_t*, int64_t, bool, const CudaPartial&, CudaZoneWork&) const {
  }
  // Whether part of that is launched for this sequence alone.
  virtual bool adds_alone() const { return false; }
  // Enqueues that of a slice of a prompt, and of what this host answered.
  virtual absl::Status Attend(Layer, const CudaQueries&, int64_t, const CudaPartial&,
                              const cuda::Stream&) {
    return absl::OkStatus();
  }
  // At the end of every block of tokens.
  virtual absl::Status CopyCounters(const cuda::Stream&) { return absl::OkStatus(); }

  // Once what TakeQueries and Predict enqueued is done.
  virtual absl::Status Ask(Layer, int64_t) { return absl::OkStatus(); }
  // Waits for the reply; Attend enqueues it.
  virtual absl::Status Answer(Layer, int64_t, const cuda::Stream&) { return absl::OkStatus(); }

  // Whether tokens attend to every row while a prompt is read, though others choose: what was captured of one token
  // is not what such a prompt's does.
  virtual bool prompt_takes_all() const { return false; }

  // n tokens have passed: adds them and the rows that they attended to, of all KV heads; where blocks
  // or chunks at the zone's end are short, at most.
  virtual void Count(int64_t n) {
    for (LayerStatistics& layer : statistics_) layer.tokens += n;
  }
  // [layers], with what CopyCounters brought.
  virtual std::vector<LayerStatistics> statistics() const { return statistics_; }
};

}  // namespace carrel::decoder
