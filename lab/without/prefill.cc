// In place of lab/prefill: ValidateAttention refuses before this is asked for.
#include "common/status.h"
#include "prefill/sparse_attention.h"

namespace carrel::prefill {

std::unique_ptr<LayerAttention> MakeSparseAttention(const AttentionConfig&, const AttentionShape&,
                                                    int64_t, std::vector<Position>,
                                                    std::vector<float>, const std::vector<float>&,
                                                    int64_t, ThreadPool*) {
  CARREL_CHECK(false);
}

}  // namespace carrel::prefill
