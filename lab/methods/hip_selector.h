// What:   hierarchically pruned attention: rows found by halving chunks, block by block.
// Math:   the zone is cut into C = budget / block_k equal chunks of key blocks. Each round splits
//         every chunk in two, scores each branch by its middle block (max over the block's keys and
//         the request's queries) and keeps the best C branches; it ends when branches are blocks.
//         ensemble > 1: as many masks, the first as above, the others with representatives up to
//         `jitter` of half a branch away from the middle; blocks with at least `votes` votes stay,
//         the most votes first, at most C. widen: C = budget / widen, and each block found brings
//         the aligned `widen` tokens around it. refresh: a mask serves so many generated tokens.
// Source: HiP (docs/methods.md): section 3 and its algorithm 1; ensemble appendix C.5;
//         middle representative section 4. Differs: one mask per KV head, by the maximum over the
//         group's q heads, since rows are fetched per KV head; jitter acts in every round of
//         branches longer than a block, where the paper perturbs one middle round.
// Edge:   zone of at most `budget` rows: all of them, nothing is scored. A budget below a block or
//         `widen` tokens is one block or neighbourhood, cut to the budget.
// Cost:   O(budget log(zone / budget)) keys per mask and member of the ensemble.
#pragma once

#include <cstdint>

namespace carrel::decoder {

// hip:block_q=,block_k=,refresh=,ensemble=,votes=,jitter=,widen=,seed=,mask=kv-head|q-head
struct HipConfig {
  int64_t block_q = 1;   // prompt tokens that share a mask: 1 .. 1024
  int64_t block_k = 2;   // keys per block (paper): 1 .. 1024
  int64_t refresh = 1;   // generated tokens per estimate of the mask (r_m): 1 .. 1024
  int64_t ensemble = 1;  // masks with randomised branchings that vote; 1: none. 1 .. 64
  int64_t votes = 1;  // least votes of a block (tau): 1 is their union, `ensemble` the intersection
  double jitter = 0.5;  // ensemble: how far a representative may lie from the middle of its branch,
                        // as a share of half the branch; 0 .. 1
  int64_t widen = 0;  // tokens kept around a selected block, within the budget; 0: the block alone
  uint64_t seed = 0;  // ensemble
};

}  // namespace carrel::decoder
