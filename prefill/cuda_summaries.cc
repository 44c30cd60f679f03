#include "prefill/cuda_summaries.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/encode/cluster_rows/cluster_rows.h"
#include "kernels/encode/row_sum/row_sum.h"

namespace carrel::prefill {
namespace {

using cuda::PinnedBuffer;

constexpr int64_t kMaxHeadDim = 128;
// A batch: enough to fill the chip, few enough launches and waits for a head.
constexpr int64_t kBatchSegments = 4;
constexpr int64_t kBatchRows = kBatchSegments * kernels::kMaxClusterSegmentRows;
constexpr int64_t kBatchClusters = kBatchSegments * kernels::kMaxSegmentClusters;
constexpr int64_t kSumParts = 32;  // of the rows of a batch

int64_t Batches(int64_t rows) { return (rows + kBatchRows - 1) / kBatchRows; }
int64_t BufferElements(int64_t tokens) { return std::min(tokens, kBatchRows) * kMaxHeadDim; }
// From one segment to the next.
int64_t Stride(int64_t clusters, int64_t head_dim, int64_t rows) {
  return ((16 + 2 * head_dim) * clusters + rows + 15) / 16 * 16;
}
constexpr int64_t kMaxStride =
    (16 + 2 * kMaxHeadDim) * kernels::kMaxSegmentClusters + kernels::kMaxClusterSegmentRows;

absl::Status CopyRows(const kvstore::Rows& rows, int64_t first, int64_t count, uint16_t* to,
                      const cuda::Stream& stream) {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, rows.Address(first),  // of builders: one piece
                                       static_cast<size_t>(count * rows.row_bytes()),
                                       cudaMemcpyHostToDevice, stream.get()));
  return absl::OkStatus();
}

absl::Status Wait(const cuda::Stream& stream, const cuda::Event& done) {
  RETURN_IF_ERROR(done.Record(stream));
  return done.Synchronize();
}

}  // namespace

// What the kernels take beside rows; each array has its own shape from its beginning.
struct CudaSummaries::Inputs {
  float centre[kMaxHeadDim];
  float weights[kernels::kMaxClusterQueries];
  uint16_t transform[kMaxHeadDim * kMaxHeadDim];
  uint16_t queries[kernels::kMaxClusterQueries * kMaxHeadDim];
};

CudaSummaries::CudaSummaries(int64_t tokens, cuda::DeviceArena& arena)
    : tokens_(tokens),
      keys_(arena.Take<uint16_t>(BufferElements(tokens))),
      x_(arena.Take<uint16_t>(BufferElements(tokens))),
      means_(arena.Take<uint16_t>(kBatchClusters * kMaxHeadDim)),
      bias_(arena.Take<float>(kBatchClusters)),
      segments_(arena.Take<uint8_t>(kBatchSegments * kMaxStride)),
      inputs_(arena.Take<Inputs>(1)) {}

absl::Status CudaSummaries::Allocate() {
  ASSIGN_OR_RETURN(host_inputs_, PinnedBuffer<Inputs>::Create(1));
  ASSIGN_OR_RETURN(sums_, PinnedBuffer<float>::Create(Batches(tokens_) * kSumParts * kMaxHeadDim));
  ASSIGN_OR_RETURN(host_segments_, PinnedBuffer<uint8_t>::Create(kBatchSegments * kMaxStride));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> CudaSummaries::MeanOf(const kvstore::Rows& keys,
                                                         const cuda::Stream& stream,
                                                         const cuda::Event& done) {
  const int64_t d = keys.head_dim(), parts = Batches(keys.count()) * kSumParts;
  for (int64_t first = 0; first < keys.count(); first += kBatchRows) {
    const int64_t rows = std::min(kBatchRows, keys.count() - first);
    RETURN_IF_ERROR(CopyRows(keys, first, rows, keys_, stream));
    RETURN_IF_CUDA_ERROR(
        kernels::RowSum({.x = keys_,
                         .kv_heads = 1,
                         .rows = rows,
                         .row_stride = rows,
                         .head_dim = d,
                         .parts = kSumParts,
                         .sums = sums_.data() + first / kBatchRows * kSumParts * d},
                        stream.get()));
  }
  RETURN_IF_ERROR(Wait(stream, done));
  std::vector<double> sum(static_cast<size_t>(d));
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t c = 0; c < d; ++c) sum[c] += sums_.data()[part * d + c];
  }
  std::vector<float> mean;
  for (double s : sum) mean.push_back(static_cast<float>(s / static_cast<double>(keys.count())));
  return mean;
}

absl::Status CudaSummaries::PutInputs(const kvstore::SummaryPlan& plan,
                                      const std::vector<float>& centre,
                                      const cuda::Stream& stream) {
  Inputs& inputs = *host_inputs_.data();
  std::copy(centre.begin(), centre.end(), inputs.centre);
  FloatToBf16(plan.transform, inputs.transform);
  FloatToBf16(plan.queries, inputs.queries);
  // Least squares of w |q|^2 / 2 over the queries.
  const auto d = static_cast<int64_t>(centre.size());
  const auto count = static_cast<int64_t>(plan.queries.size()) / d;
  std::vector<double> halves(static_cast<size_t>(count));
  double squares = 0;
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t c = 0; c < d; ++c) {
      halves[j] += double{plan.queries[j * d + c]} * plan.queries[j * d + c] / 2;
    }
    squares += halves[j] * halves[j];
  }
  for (int64_t j = 0; j < count; ++j) {
    inputs.weights[j] = squares > 0 ? static_cast<float>(halves[j] / squares) : 0.0f;
  }
  RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(inputs_, &inputs, sizeof(inputs), cudaMemcpyHostToDevice, stream.get()));
  return absl::OkStatus();
}

absl::Status CudaSummaries::EnqueueSegments(const kvstore::SummaryPlan& plan,
                                            const kvstore::SummaryLayout& layout,
                                            const kvstore::Rows& keys, const kvstore::Rows& values,
                                            int64_t first, int64_t end,
                                            const cuda::Stream& stream) {
  const int64_t d = keys.head_dim();
  const RowRange range{layout.RowsOf(first).begin, layout.RowsOf(end - 1).end};
  const bool keys_are_there = keys.count() <= kBatchRows;  // since their mean was taken
  const Inputs* const inputs = inputs_;
  kernels::ClusterRowsParams params;
  params.keys = keys_ + (keys_are_there ? range.begin * d : 0);
  params.values = x_;
  params.centre = inputs->centre;
  params.transform = plan.transform.empty() ? nullptr : inputs->transform;
  params.queries = inputs->queries;
  params.weights = inputs->weights;
  params.rows = range.rows();
  params.head_dim = d;
  params.segment_rows = layout.segment_rows();
  params.cluster_rows = layout.cluster_rows();
  params.query_count = static_cast<int64_t>(plan.queries.size()) / d;
  params.x = x_;
  params.means = means_;
  params.bias = bias_;
  params.segments = segments_;
  params.segment_stride = Stride(layout.max_clusters(), d, layout.segment_rows());
  const cudaStream_t s = stream.get();
  if (!keys_are_there) {
    RETURN_IF_ERROR(CopyRows(keys, range.begin, range.rows(), keys_, stream));
  }
  RETURN_IF_CUDA_ERROR(kernels::CentreRows(params, s));
  RETURN_IF_CUDA_ERROR(kernels::StartMeans(params, s));
  for (int step = 0; step < plan.lloyd_steps; ++step) {
    if (step > 0) RETURN_IF_CUDA_ERROR(kernels::UpdateMeans(params, s));
    RETURN_IF_CUDA_ERROR(kernels::AssignRows(params, s));
  }
  RETURN_IF_ERROR(CopyRows(values, range.begin, range.rows(), x_, stream));
  RETURN_IF_CUDA_ERROR(kernels::DescribeClusters(params, s));
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_segments_.data(), segments_,
                                       static_cast<size_t>((end - first) * params.segment_stride),
                                       cudaMemcpyDeviceToHost, s));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> CudaSummaries::Summarise(const kvstore::SummaryPlan& plan,
                                                            const kvstore::SummaryLayout& layout,
                                                            const kvstore::Rows& keys,
                                                            const kvstore::Rows& values,
                                                            const cuda::Stream& stream,
                                                            const cuda::Event& done, char* blob) {
  const cuda::Range range("summarise");
  const int64_t d = keys.head_dim();
  if ((d != 64 && d != 128) || keys.count() == 0 || keys.count() > tokens_ ||
      static_cast<int64_t>(plan.queries.size()) > kernels::kMaxClusterQueries * d ||
      plan.lloyd_steps < 1) {
    return absl::UnimplementedError(
        absl::StrCat("summaries of ", keys.count(), " rows of ", d, " on the GPU"));
  }
  ASSIGN_OR_RETURN(std::vector<float> centre, MeanOf(keys, stream, done));
  RETURN_IF_ERROR(PutInputs(plan, centre, stream));
  const int64_t stride = Stride(layout.max_clusters(), d, layout.segment_rows());
  for (int64_t first = 0; first < layout.segments(); first += kBatchSegments) {
    const int64_t end = std::min(first + kBatchSegments, layout.segments());
    RETURN_IF_ERROR(EnqueueSegments(plan, layout, keys, values, first, end, stream));
    RETURN_IF_ERROR(Wait(stream, done));
    for (int64_t i = first; i < end; ++i) {
      const int64_t bytes =
          layout.RowClustersOffset(layout.ClustersOf(i)) + layout.RowsOf(i).rows();
      std::memcpy(blob + layout.Offset(i), host_segments_.data() + (i - first) * stride,
                  static_cast<size_t>(bytes));
    }
  }
  return centre;
}

}  // namespace carrel::prefill
