#include "common/cuda/graph.h"

#include "common/cuda/status.h"

namespace carrel::cuda {

absl::StatusOr<Graph> Graph::Capture(const Stream& stream,
                                     absl::FunctionRef<absl::Status()> enqueue) {
  RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  const absl::Status status = enqueue();
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream.get(), &graph);  // also after a failure
  cudaGraphExec_t executable = nullptr;
  cudaError_t made = cudaSuccess;
  if (status.ok() && ended == cudaSuccess) made = cudaGraphInstantiate(&executable, graph, 0);
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  if (!status.ok()) return status;
  RETURN_IF_CUDA_ERROR(ended);
  RETURN_IF_CUDA_ERROR(made);
  return Graph(executable);
}

Graph::~Graph() {
  if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
}

absl::Status Graph::Launch(const Stream& stream) const {
  return CudaStatus(cudaGraphLaunch(executable_, stream.get()), "cudaGraphLaunch");
}

}  // namespace carrel::cuda
