// What:      pinned memory for the rows of several layers: the GPU copies a layer there, and
//            whoever reads the rows holds it until they are written.
// Invariants: 1. Take waits until one of the `layers` places is free. 2. A place is free again when
//             the last copy of what Take gave is gone, on whatever thread, also after the object
//             went.
// Errors:    ResourceExhausted pinned memory.
// Threads:   any.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace carrel::prefill {

class PinnedRows {
 public:
  static absl::StatusOr<std::unique_ptr<PinnedRows>> Create(int layers, int64_t layer_bytes);
  std::shared_ptr<void> Take();

 private:
  struct Places;
  explicit PinnedRows(std::shared_ptr<Places> places) : places_(std::move(places)) {}
  std::shared_ptr<Places> places_;
};

}  // namespace carrel::prefill
