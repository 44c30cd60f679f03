// What:   k-means of rows within segments on the GPU, and what its clusters say of their keys and V
//         rows: the work behind kvstore/index/summaries/summaries.h, one step per call, whole segments at a
//         time.
// Math:   of a segment of n rows and k = ceil(n / cluster_rows) clusters:
//         CentreRows:  x = bf16(transform bf16(key - centre)); no transform: bf16(key - centre).
//         StartMeans:  mean c is row (2c + 1) n / (2k), rounded down, of x.
//         AssignRows:  a row's cluster is arg max_c <x, mean_c> + bias_c, the first of several,
//                      where bias_c = -|mean_c|^2 / 2: the nearest mean.
//         UpdateMeans: mean_c = bf16(mean of its rows of x); without rows it stays.
//         DescribeClusters: n_c, the number of rows of a cluster; m_c = mean key - centre and u_c =
//           mean of V, in int8 with a scale each, largest magnitude / 127, rounded to even; with
//           m_c as int8 says it, its spread
//             w_c = max(0, sum_j weight_j ln mean_{key in c} exp(min(<query_j, key - centre - m_c>,
//                                                                     80))),
//           or without queries the mean square of a coordinate of key - centre - m_c. A cluster
//           without rows is 0 throughout.
//         Products are of bf16, sums fp32 in an order that the shape gives: the same input gives
//         the same bytes.
// Shapes: keys, values, x [rows, head_dim] bf16; centre [head_dim] f32; transform [head_dim,
//         head_dim] bf16; queries [query_count, head_dim] bf16, scale included; weights
//         [query_count] f32. Segments are of segment_rows rows, the last shorter; with K the number
//         of clusters of a full one, means [segments, K, head_dim] bf16, bias [segments, K] f32.
//         segments: one every segment_stride bytes, of its k clusters: n_c u32 [k] | scale of m f32
//         [k] | scale of u f32 [k] | w f32 [k] | m i8 [k, head_dim] | u i8 [k, head_dim] | cluster
//         of each row u8 [n]; what follows up to the stride may be anything. Device memory at
//         multiples of 16 bytes. head_dim 64 or 128; segment_rows up to 8,192; K up to 256;
//         query_count up to 128; segment_stride a multiple of 16.
// Edge:   no rows: nothing is enqueued.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant.
// Cost:   AssignRows: 2 K head_dim operations a row, on tensor cores. Each other step reads rows
//         once, and UpdateMeans and DescribeClusters the segment's clusters once per cluster. One
//         launch each, of short blocks of threads.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

inline constexpr int64_t kMaxClusterSegmentRows = 8192;
inline constexpr int64_t kMaxSegmentClusters = 256;
inline constexpr int64_t kMaxClusterQueries = 128;

struct ClusterRowsParams {
  const Bf16* keys = nullptr;
  const Bf16* values = nullptr;
  const float* centre = nullptr;
  const Bf16* transform = nullptr;  // null: none
  const Bf16* queries = nullptr;
  const float* weights = nullptr;
  int64_t rows = 0;
  int64_t head_dim = 0;
  int64_t segment_rows = 0;
  int64_t cluster_rows = 0;
  int64_t query_count = 0;  // 0: none
  Bf16* x = nullptr;
  Bf16* means = nullptr;
  float* bias = nullptr;
  uint8_t* segments = nullptr;
  int64_t segment_stride = 0;

  int64_t segment_count() const { return (rows + segment_rows - 1) / segment_rows; }
  int64_t max_clusters() const { return (segment_rows + cluster_rows - 1) / cluster_rows; }
};

// Each takes the fields that its line under Math names, and leaves the others alone.
cudaError_t CentreRows(const ClusterRowsParams& params, cudaStream_t stream);
cudaError_t StartMeans(const ClusterRowsParams& params, cudaStream_t stream);   // and bias
cudaError_t AssignRows(const ClusterRowsParams& params, cudaStream_t stream);   // in segments
cudaError_t UpdateMeans(const ClusterRowsParams& params, cudaStream_t stream);  // and bias
cudaError_t DescribeClusters(const ClusterRowsParams& params, cudaStream_t stream);

// Host pointers; fp64 sums, and of what is rounded to bf16 only what is stored.
void RefCentreRows(const ClusterRowsParams& params);
void RefStartMeans(const ClusterRowsParams& params);
void RefAssignRows(const ClusterRowsParams& params);
void RefUpdateMeans(const ClusterRowsParams& params);
void RefDescribeClusters(const ClusterRowsParams& params);

}  // namespace carrel::kernels
