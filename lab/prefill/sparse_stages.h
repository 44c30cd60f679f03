// What:   InfiniteHiP's stages of prefill, on whatever device: of a block's zone the best chunks go on
//         from stage to stage, and the rows of the last are attended.
// Source: InfiniteHiP, appendix F: chunks of 256, 32 and 8 tokens; 32,768, then 8,192, then `rows`
//         survive, and never fewer than `rows`.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace carrel::prefill {

struct SparseStage {
  int64_t chunk, survivors;
};

inline std::array<SparseStage, 3> SparseStages(int64_t rows) {
  return {{{256, std::max<int64_t>(32768, rows)}, {32, std::max<int64_t>(8192, rows)}, {8, rows}}};
}

}  // namespace carrel::prefill
