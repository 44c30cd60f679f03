// In place of lab/positions.
#include "common/lab.h"
#include "decoder/zone/repositioned_attention.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<RepositionedAttention>> RepositionedAttention::Create(
    const OpenedContext&, const model::ModelConfig&, const Window&) {
  return CheckLab("rope=infinitehip");
}

}  // namespace carrel::decoder
