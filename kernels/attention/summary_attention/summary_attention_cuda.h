// What:   the estimation term on the GPU: attention of one token to the rows of a zone that were not
//         selected, as summaries of their clusters tell it, joined with attention to those that were.
// Math:   as kvstore/index/summaries/summaries.h and summary_attention.h say, per KV head g, q head h of its
//         group and cluster c, without what the centre adds (scale <q[h], centre[g]>):
//           mean[h, c] = scale key_scale <q[h], keys[c]>, var[h, c] = spread scale^2 |q[h]|^2
//         Of the rows of c some are selected; with their number gone, their scores above the mean
//         (sum and squares of them), and rows - gone left:
//           shift = min(-sum / left, 0), rest = clamp((rows var - squares) / left - shift^2, 0, var)
//           score[h, c] = mean + shift + rest / 2      (no row gone: mean + var / 2)
//         and where `base` is given, no score is above t[g] + base[h], t[g] the least of the selected
//         rows' max over h of (score - base[h]): what a selection by group score leaves.
//         e = exp(score): lse = ln sum_c left e; out = sum_c e (rows value_scale values[c] - V rows
//         of c that are selected) / exp(lse). (out, lse) of the params is then joined with it.
// Shapes: q [kv_heads * group, head_dim] bf16; k, v [kv_heads, row_stride, head_dim] bf16, where
//         selected row j of head g lies at places[g, j]; ids [kv_heads, ids_stride] its row in the
//         zone; table as SummaryTable, for each KV head one behind the other. out [kv_heads * group,
//         head_dim], lse [kv_heads * group] f32, read and written. head_dim 64 or 128; group 1 .. 16.
// Units:  scale > 0 includes 1/sqrt(head_dim); natural logarithms.
// Edge:   nothing is left over => out and lse stay. Rows are selected once each.
// Order:  sums over selected rows are integers: the same result whichever block comes first.
//         The q heads' products with the means are of queries rounded to 15 bits.
// Errors: InvalidValue for a shape that is not served, more KV heads than SMs hold blocks included;
//         nothing is enqueued then.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads the clusters once, 2 head_dim + 16 bytes each, and the selected rows once more; one
//         cooperative launch, which may be captured in a graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/attention/summary_attention/summary_table.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

// In device memory.
struct SummaryTableCuda {
  SummarySegments segments;
  int64_t clusters = 0;                               // of each KV head
  int64_t rows = 0;                                   // of the zone
  const int8_t* keys = nullptr;                       // [kv_heads, clusters, head_dim]
  const int8_t* values = nullptr;                     // [kv_heads, clusters, head_dim]
  const SummaryTable::Cluster* of_cluster = nullptr;  // [kv_heads, clusters]
  const uint8_t* row_cluster = nullptr;               // [kv_heads, rows]
  const float* centre = nullptr;                      // [kv_heads, head_dim]
};

struct SummaryAttentionCudaParams {
  const Bf16* q = nullptr;
  KvView kv;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  const int32_t* ids = nullptr;
  int64_t ids_stride = 0;
  const int32_t* places = nullptr;  // [kv_heads, places_stride]; null: the ids
  int64_t places_stride = 0;
  bool gathered = false;               // instead of places: selected row j lies at j
  int64_t selected = 0;                // of each KV head, or the most of any
  const int32_t* row_count = nullptr;  // [kv_heads], or null: `selected`
  const float* base = nullptr;         // [kv_heads * group]: what rows were selected by; or null
  SummaryTableCuda table;
  float scale = 0;
  float* out = nullptr;
  float* lse = nullptr;
  void* workspace = nullptr;  // SummaryWorkspaceBytes
};

// Zeroed once before its first use; every call leaves it ready for the next. One call at a time.
size_t SummaryWorkspaceBytes(int64_t kv_heads, int64_t group, int64_t head_dim, int64_t clusters);
cudaError_t AttendSummariesCuda(const SummaryAttentionCudaParams& params, cudaStream_t stream);
// Host pointers, fp64; needs no workspace.
void RefAttendSummariesCuda(const SummaryAttentionCudaParams& params);

}  // namespace carrel::kernels
