// What:   work that a stream was given once, to be enqueued again in one call.
// Edge:   pointers and sizes are those of the capture; what changes between launches lies in memory
//         that the work reads.
// Errors: those of the work while it is captured; Internal work that cannot be captured.
// Threads: one at a time.
// Cost:   a launch costs the host some microseconds, whatever it holds.
#pragma once

#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/cuda/runtime.h"
#include "common/cuda/stream.h"

namespace carrel::cuda {

class Graph {
 public:
  // enqueue() gives its work to the stream; none of it runs.
  static absl::StatusOr<Graph> Capture(const Stream& stream,
                                       absl::FunctionRef<absl::Status()> enqueue);
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(executable_, other.executable_);
    return *this;
  }

  absl::Status Launch(const Stream& stream) const;

 private:
  explicit Graph(cudaGraphExec_t executable) : executable_(executable) {}
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace carrel::cuda
