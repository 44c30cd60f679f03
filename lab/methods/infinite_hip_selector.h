// What:   modular hierarchical pruning: stages that each keep the best chunks of what the stage
//         before kept.
// Math:   stage i cuts its candidates into chunks of l_i tokens. In each chunk a descent picks a
//         representative: split in two, compare the middle keys of the halves (max over the
//         request's queries: block and group), go into the better, until one token is left. The
//         chunks with the k_i / l_i best representatives go on. The rows of the last stage are
//         attended.
// Source: InfiniteHiP (docs/methods.md): section 3, appendix A algorithms 2 to 4; presets of
//         appendix F. Differs: the candidates that a descent compares are the middles of the halves
//         (the review that we have does not say which); RoPE is as stored; a budget below the last
//         chunk makes that chunk smaller.
// State:  the survivors of each stage, evaluated again every `refresh` generated tokens.
// Edge:   candidates that are no more than the survivors wanted all go on, unscored.
// Cost:   2 log2(l_i) keys per chunk and stage; the first stage is linear in the zone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace carrel::decoder {

struct InfiniteHipStage {
  int64_t chunk = 0;      // tokens (l_c)
  int64_t survivors = 0;  // tokens that go on (k)
  int64_t multiple = 0;   // if > 0: survivors = multiple * budget instead; 1 in the last stage
  int64_t refresh = 1;    // generated tokens per evaluation; a stage before it that is evaluated
                          // brings this one along

  // A later stage can only keep what an earlier one let through.
  int64_t Wanted(int64_t budget) const {
    return std::max(multiple > 0 ? multiple * budget : survivors, budget);
  }
};
// infinitehip:preset=default|fast|flash,survivors=published|scaled,block_q=,mask=kv-head|q-head
//   scaled: 16, 4 and 1 times the budget, the published ratio, instead of 32k, 8k and the budget
// infinitehip:stages=CHUNK:SURVIVORS:REFRESH/..,block_q=,mask=   SURVIVORS: tokens, or Nx: N budgets
struct InfiniteHipConfig {
  int64_t block_q = 1;  // as HipConfig (hip_selector.h)
  // Paper: chunks 256, 32, 8; survivors 32k, 8k, then the budget; refresh 16/8/4.
  std::vector<InfiniteHipStage> stages = {{256, 32768, 0, 16}, {32, 8192, 0, 8}, {8, 0, 1, 4}};
};

}  // namespace carrel::decoder
