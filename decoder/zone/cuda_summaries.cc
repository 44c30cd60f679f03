#include "decoder/zone/cuda_summaries.h"

#include <cmath>

#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_methods.h"

namespace carrel::decoder {
namespace {

int64_t ClustersOf(const kernels::SummarySegments& segments, int64_t rows) {
  return ((segments.first + rows - 1) / segments.segment_rows + 1) * segments.segment_clusters;
}

}  // namespace

int64_t CudaSummaries::Bytes(const CudaZoneShape& shape, const HostRows& rows) {
  const AttentionShape& heads = shape.heads;
  const int64_t clusters = ClustersOf(rows.SummarySegmentsOf(shape.zone), shape.zone.rows());
  const int64_t of_head =
      clusters * (2 * heads.head_dim + 16) + shape.zone.rows() + 4 * heads.head_dim;
  int64_t bytes = static_cast<int64_t>(
      kernels::SummaryWorkspaceBytes(heads.kv_heads, heads.group(), heads.head_dim, clusters));
  for (Layer layer(0); layer.value() < heads.layers; layer = layer.next()) {
    if (!shape.dense(layer)) bytes += heads.kv_heads * of_head;
  }
  return bytes;
}

absl::StatusOr<CudaSummaries> CudaSummaries::Create(const CudaZoneShape& shape,
                                                    const HostRows& rows, ThreadPool* pool) {
  CudaSummaries out;
  const AttentionShape& heads = shape.heads;
  out.shape_ = shape;
  out.segments_ = rows.SummarySegmentsOf(shape.zone);
  out.clusters_ = ClustersOf(out.segments_, shape.zone.rows());
  out.layers_.resize(static_cast<size_t>(heads.layers));
  ASSIGN_OR_RETURN(out.workspace_,
                   ZeroedDeviceBytes(kernels::SummaryWorkspaceBytes(
                       heads.kv_heads, heads.group(), heads.head_dim, out.clusters_)));
  for (Layer layer(0); layer.value() < heads.layers; layer = layer.next()) {
    if (!shape.dense(layer)) RETURN_IF_ERROR(out.Upload(layer, rows, pool));
  }
  return out;
}

absl::Status CudaSummaries::Upload(Layer layer, const HostRows& rows, ThreadPool* pool) {
  const int64_t heads = shape_.heads.kv_heads, d = shape_.heads.head_dim;
  LayerTable& table = layers_[static_cast<size_t>(layer.value())];
  ASSIGN_OR_RETURN(table.keys, cuda::DeviceBuffer<int8_t>::Create(heads * clusters_ * d));
  ASSIGN_OR_RETURN(table.values, cuda::DeviceBuffer<int8_t>::Create(heads * clusters_ * d));
  ASSIGN_OR_RETURN(table.clusters,
                   cuda::DeviceBuffer<kernels::SummaryTable::Cluster>::Create(heads * clusters_));
  ASSIGN_OR_RETURN(table.row_cluster,
                   cuda::DeviceBuffer<uint8_t>::Create(heads * shape_.zone.rows()));
  ASSIGN_OR_RETURN(table.centre, cuda::DeviceBuffer<float>::Create(heads * d));
  std::vector<absl::StatusOr<kernels::SummaryTable>> of_heads(static_cast<size_t>(heads));
  pool->ParallelFor(heads, [&](int64_t h) {
    of_heads[static_cast<size_t>(h)] =
        rows.SummaryTableOf(layer, KvHead(static_cast<int32_t>(h)), shape_.zone);
  });
  for (int64_t h = 0; h < heads; ++h) {
    RETURN_IF_ERROR(of_heads[static_cast<size_t>(h)].status());
    const kernels::SummaryTable& of_head = *of_heads[static_cast<size_t>(h)];
    CARREL_CHECK(static_cast<int64_t>(of_head.clusters.size()) == clusters_);
    const auto copy = [h](auto& to, const auto& from) {
      return CopyToDevice(to.data() + h * static_cast<int64_t>(from.size()), from.data(),
                          from.size() * sizeof(from[0]));
    };
    RETURN_IF_ERROR(copy(table.keys, of_head.keys));
    RETURN_IF_ERROR(copy(table.values, of_head.values));
    RETURN_IF_ERROR(copy(table.clusters, of_head.clusters));
    RETURN_IF_ERROR(copy(table.row_cluster, of_head.row_cluster));
    RETURN_IF_ERROR(copy(table.centre, of_head.centre));
  }
  return absl::OkStatus();
}

absl::Status CudaSummaries::Attend(Layer layer, const uint16_t* q, const CudaSelection& selection,
                                   const SelectedRows& selected, float* out, float* lse,
                                   const cuda::Stream& stream) const {
  const LayerTable& table = layers_[static_cast<size_t>(layer.value())];
  kernels::SummaryAttentionCudaParams params;
  params.q = q;
  params.kv = selected.kv;
  params.kv_heads = shape_.heads.kv_heads;
  params.group = shape_.heads.group();
  params.head_dim = shape_.heads.head_dim;
  params.ids = selection.ids;
  params.ids_stride = selection.stride;
  params.places = selected.places;
  params.places_stride = selected.places_stride;
  params.gathered = selected.gathered;
  params.selected = selection.rows;
  params.row_count = selection.row_count;
  params.base = selection.base;
  params.table = {segments_,
                  clusters_,
                  shape_.zone.rows(),
                  table.keys.data(),
                  table.values.data(),
                  table.clusters.data(),
                  table.row_cluster.data(),
                  table.centre.data()};
  params.scale = 1.0f / std::sqrt(static_cast<float>(shape_.heads.head_dim));
  params.out = out;
  params.lse = lse;
  params.workspace = workspace_.data();
  RETURN_IF_CUDA_ERROR(kernels::AttendSummariesCuda(params, stream.get()));
  return absl::OkStatus();
}

}  // namespace carrel::decoder
