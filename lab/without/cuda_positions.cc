// In place of the GPU's half of lab/positions.
#include "common/lab.h"
#include "decoder/runner/runner.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaRepositioned(const model::Checkpoint&,
                                                               const OpenedContext&) {
  return CheckLab("rope=infinitehip");
}

}  // namespace carrel::decoder
