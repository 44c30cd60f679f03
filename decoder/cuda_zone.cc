#include "decoder/cuda_zone.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "common/cuda/status.h"
#include "common/dtype.h"
#include "common/status.h"
#include "decoder/context_rows.h"
#include "kernels/hamming_topk/hamming_topk.h"
#include "kernels/hash_encode/hash_encode.h"
#include "kernels/sparse_attention/sparse_attention_cuda.h"
#include "kernels/window_attention/window_attention_cuda.h"

namespace carrel::decoder {
namespace {

constexpr int64_t kBits = 128;
constexpr int64_t kWords = kBits / 32;

// Zeroed, as the kernels want their workspaces.
absl::StatusOr<cuda::DeviceBuffer<uint8_t>> Zeroed(size_t bytes) {
  ASSIGN_OR_RETURN(auto buffer, cuda::DeviceBuffer<uint8_t>::Create(static_cast<int64_t>(bytes)));
  RETURN_IF_CUDA_ERROR(cudaMemset(buffer.data(), 0, bytes));
  return buffer;
}

kernels::HammingTopKParams SelectionOf(const AttentionShape& shape, int64_t rows) {
  kernels::HammingTopKParams params;
  params.kv_heads = shape.kv_heads;
  params.group = shape.group();
  params.bits = kBits;
  params.rows = rows;
  params.code_stride = rows;
  return params;
}

}  // namespace

int64_t CudaZone::Bytes(const AttentionShape& shape, int64_t rows) {
  const int64_t codes = int64_t{shape.layers} * shape.kv_heads * rows * kBits / 8;
  const int64_t splits = kernels::DecodeSplits(std::max<int64_t>(1, rows), shape.kv_heads);
  return CudaWindow::Bytes(shape, rows) + codes + shape.kv_heads * rows * 4 +
         int64_t{shape.kv_heads} * kBits * shape.head_dim * 2 + shape.q_heads * kBits / 8 +
         static_cast<int64_t>(
             kernels::DecodeWorkspaceBytes(shape.kv_heads, shape.group(), shape.head_dim, splits) +
             kernels::HammingTopKWorkspaceBytes(SelectionOf(shape, rows)));
}

absl::StatusOr<CudaZone> CudaZone::Create(const RetrievalConfig& config,
                                          const AttentionShape& shape, RowRange zone,
                                          int64_t max_fetch_rows, StoreClient* client,
                                          const cuda::Stream& stream) {
  CudaZone out;
  out.shape_ = shape;
  out.rows_ = zone.rows();
  out.scale_ = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  for (const int64_t budget : LayerBudgets(config, shape.layers, zone.rows())) {
    const auto wanted =
        static_cast<int64_t>(std::llround(config.oversample * static_cast<double>(budget)));
    out.attended_.push_back(budget == kAllRows ? zone.rows() : std::min(wanted, zone.rows()));
  }
  ASSIGN_OR_RETURN(out.values_, CudaWindow::Create(shape, zone.rows()));
  ASSIGN_OR_RETURN(out.codes_, cuda::DeviceBuffer<uint32_t>::Create(
                                   int64_t{shape.layers} * shape.kv_heads * zone.rows() * kWords));
  ASSIGN_OR_RETURN(out.query_codes_, cuda::DeviceBuffer<uint32_t>::Create(shape.q_heads * kWords));
  ASSIGN_OR_RETURN(out.ids_, cuda::DeviceBuffer<int32_t>::Create(shape.kv_heads * zone.rows()));
  out.splits_ = kernels::DecodeSplits(zone.rows(), shape.kv_heads);
  ASSIGN_OR_RETURN(out.attention_workspace_,
                   Zeroed(kernels::DecodeWorkspaceBytes(shape.kv_heads, shape.group(),
                                                        shape.head_dim, out.splits_)));
  ASSIGN_OR_RETURN(out.selection_workspace_,
                   Zeroed(kernels::HammingTopKWorkspaceBytes(SelectionOf(shape, zone.rows()))));
  RETURN_IF_ERROR(
      ReadContextRows(client, shape, {&zone, 1}, max_fetch_rows, [&](const ContextRows& block) {
        return out.values_.CopyRows(block.layer, block.head, block.first - zone.begin, block.rows,
                                    block.k, block.v);
      }));
  RETURN_IF_ERROR(out.Encode(stream));
  return out;
}

absl::Status CudaZone::Encode(const cuda::Stream& stream) {
  // One set of random directions serves every layer and head.
  const int64_t d = shape_.head_dim, head_elements = kBits * d;
  std::mt19937_64 rng(20250611);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> directions(static_cast<size_t>(shape_.kv_heads * head_elements));
  for (int64_t i = 0; i < head_elements; ++i) directions[i] = FloatToBf16(normal(rng));
  for (int32_t head = 1; head < shape_.kv_heads; ++head) {
    std::copy_n(directions.begin(), head_elements, directions.begin() + head * head_elements);
  }
  ASSIGN_OR_RETURN(directions_,
                   cuda::DeviceBuffer<uint16_t>::Create(static_cast<int64_t>(directions.size())));
  RETURN_IF_CUDA_ERROR(cudaMemcpy(directions_.data(), directions.data(), directions.size() * 2,
                                  cudaMemcpyHostToDevice));
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    kernels::HashEncodeParams params;
    params.x = values_.k(layer);
    params.matrix = directions_.data();
    params.codes = codes_.data() + layer.value() * shape_.kv_heads * rows_ * kWords;
    params.kv_heads = shape_.kv_heads;
    params.rows = params.row_stride = params.code_stride = rows_;
    params.head_dim = d;
    params.bits = kBits;
    RETURN_IF_CUDA_ERROR(kernels::HashEncode(params, stream.get()));
  }
  return stream.Synchronize();
}

absl::Status CudaZone::Attend(Layer layer, const uint16_t* q, float* out, float* lse,
                              const cuda::Stream& stream) const {
  const int64_t count = attended(layer);
  if (count == rows_) {
    kernels::WindowAttentionCudaParams params;
    params.q = q;
    params.k = values_.k(layer);
    params.v = values_.v(layer);
    params.kv_heads = shape_.kv_heads;
    params.group = shape_.group();
    params.head_dim = shape_.head_dim;
    params.row_stride = params.rows = rows_;
    params.scale = scale_;
    params.out = out;
    params.lse = lse;
    params.splits = splits_;
    params.workspace = attention_workspace_.data();
    RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(params, stream.get()));
    return absl::OkStatus();
  }
  kernels::HashEncodeParams encode;
  encode.x = q;
  encode.matrix = directions_.data();
  encode.codes = query_codes_.data();
  encode.kv_heads = shape_.kv_heads;
  encode.rows = encode.row_stride = encode.code_stride = shape_.group();
  encode.head_dim = shape_.head_dim;
  encode.bits = kBits;
  RETURN_IF_CUDA_ERROR(kernels::HashEncode(encode, stream.get()));
  kernels::HammingTopKParams select = SelectionOf(shape_, rows_);
  select.queries = query_codes_.data();
  select.codes = codes_.data() + layer.value() * shape_.kv_heads * rows_ * kWords;
  select.k = count;
  select.ids = ids_.data();
  select.workspace = selection_workspace_.data();
  RETURN_IF_CUDA_ERROR(kernels::HammingTopK(select, stream.get()));
  kernels::SparseAttentionCudaParams params;
  params.q = q;
  params.k = values_.k(layer);
  params.v = values_.v(layer);
  params.ids = ids_.data();
  params.kv_heads = shape_.kv_heads;
  params.group = shape_.group();
  params.head_dim = shape_.head_dim;
  params.row_stride = rows_;
  params.ids_stride = params.rows = count;
  params.scale = scale_;
  params.out = out;
  params.lse = lse;
  params.splits = kernels::DecodeSplits(count, shape_.kv_heads);
  params.workspace = attention_workspace_.data();
  RETURN_IF_CUDA_ERROR(kernels::SparseAttentionCuda(params, stream.get()));
  return absl::OkStatus();
}

}  // namespace carrel::decoder
