#include "decoder/zone/cuda_summaries.h"

#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_methods.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
namespace {

int64_t ClustersOf(const kernels::SummarySegments& segments, int64_t rows) {
  return ((segments.first + rows - 1) / segments.segment_rows + 1) * segments.segment_clusters;
}

}  // namespace

CudaSummaries::CudaSummaries(const CudaZoneShape& shape, const HostRows& rows,
                             cuda::DeviceArena& arena)
    : shape_(shape),
      segments_(rows.SummarySegmentsOf(shape.zone)),
      clusters_(ClustersOf(segments_, shape.zone.rows())) {
  const AttentionShape& heads = shape.heads;
  workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(
      kernels::SummaryWorkspaceBytes(heads.kv_heads, heads.group(), heads.head_dim, clusters_)));
  for (Layer layer(0); layer.value() < heads.layers; layer = layer.next()) {
    const int64_t kept = shape.dense(layer) ? 0 : heads.kv_heads;
    LayerTable& table = layers_.emplace_back();
    table.keys = arena.Take<int8_t>(kept * clusters_ * heads.head_dim);
    table.values = arena.Take<int8_t>(kept * clusters_ * heads.head_dim);
    table.clusters = arena.Take<kernels::SummaryTable::Cluster>(kept * clusters_);
    table.row_cluster = arena.Take<uint8_t>(kept * shape.zone.rows());
    table.centre = arena.Take<float>(kept * heads.head_dim);
  }
}

absl::Status CudaSummaries::Load(const HostRows& rows, ThreadPool* pool) const {
  for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
    if (!shape_.dense(layer)) RETURN_IF_ERROR(Upload(layer, rows, pool));
  }
  return absl::OkStatus();
}

absl::Status CudaSummaries::Upload(Layer layer, const HostRows& rows, ThreadPool* pool) const {
  const int64_t heads = shape_.heads.kv_heads;
  const LayerTable& table = layers_[static_cast<size_t>(layer.value())];
  std::vector<absl::StatusOr<kernels::SummaryTable>> of_heads(static_cast<size_t>(heads));
  pool->ParallelFor(heads, [&](int64_t h) {
    of_heads[static_cast<size_t>(h)] =
        rows.SummaryTableOf(layer, KvHead(static_cast<int32_t>(h)), shape_.zone);
  });
  for (int64_t h = 0; h < heads; ++h) {
    RETURN_IF_ERROR(of_heads[static_cast<size_t>(h)].status());
    const kernels::SummaryTable& of_head = *of_heads[static_cast<size_t>(h)];
    CARREL_CHECK(static_cast<int64_t>(of_head.clusters.size()) == clusters_);
    const auto copy = [h](auto* to, const auto& from) {
      return CopyToDevice(to + h * static_cast<int64_t>(from.size()), from);
    };
    RETURN_IF_ERROR(copy(table.keys, of_head.keys));
    RETURN_IF_ERROR(copy(table.values, of_head.values));
    RETURN_IF_ERROR(copy(table.clusters, of_head.clusters));
    RETURN_IF_ERROR(copy(table.row_cluster, of_head.row_cluster));
    RETURN_IF_ERROR(copy(table.centre, of_head.centre));
  }
  return absl::OkStatus();
}

kernels::SummaryAttentionCudaParams CudaSummaries::ToRest(Layer layer, const uint16_t* q,
                                                          const CudaSelection& selection,
                                                          const SelectedRows& selected, float* out,
                                                          float* lse) const {
  const LayerTable& table = layers_[static_cast<size_t>(layer.value())];
  auto params = kernels::OfHeads<kernels::SummaryAttentionCudaParams>(shape_.heads);
  params.q = q;
  params.kv = selected.kv;
  params.ids = selection.ids;
  params.ids_stride = selection.stride;
  params.places = selected.places;
  params.places_stride = selected.places_stride;
  params.gathered = selected.gathered;
  params.selected = selection.rows;
  params.row_count = selection.row_count;
  params.base = selection.base;
  params.table = {segments_,    clusters_,      shape_.zone.rows(), table.keys,
                  table.values, table.clusters, table.row_cluster,  table.centre};
  params.out = out;
  params.lse = lse;
  params.workspace = workspace_;
  return params;
}

}  // namespace carrel::decoder
