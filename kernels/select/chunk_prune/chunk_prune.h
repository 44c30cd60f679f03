// What:   hierarchical pruning of candidate rows by a few probed keys, as HiP and InfiniteHiP do
//         it. The caller scores the probes: which keys, whose queries and at which positions they
//         stand is its own affair.
// Math:   KeepBestChunks: candidates are cut into chunks of `chunk` rows; in each a descent picks a
//         representative (split in two, compare the middle keys of the halves, go into the better,
//         until one row is left); the wanted / chunk chunks with the best representatives stay.
//         HalveChunks: the n blocks of `block_rows` rows of a zone are cut into C = min(n, wanted) equal
//         chunks; each round splits every chunk in two, scores each branch by the best key of one of its
//         blocks and keeps the best C; it ends when branches are blocks.
// Source: KeepBestChunks: InfiniteHiP, section 3 and algorithms 2 to 4 (docs/methods.md).
//         HalveChunks: HiP, section 3 and algorithm 1 (docs/methods.md).
// Shapes: ranges are ascending and disjoint; so are the ranges that stay.
// Edge:   candidates of no more than `wanted` rows (HalveChunks: blocks, with score 0) all stay,
//         unscored. A chunk longer than what is wanted is halved until it is not.
// Threads: reentrant.
// Cost:   KeepBestChunks: 2 log2(chunk) probes per chunk. HalveChunks: 2 C log2(n / C) probes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "common/ids.h"

namespace carrel::kernels {

struct ChunkProbe {
  Position row = 0;
  int64_t chunks_back = 0;  // chunks from this one to the last candidate: the last has 0
  bool right = false;       // of the two halves that are compared, the later one
};

// scores[i] of probes[i]; scores has their size already.
using ScoreProbes =
    absl::FunctionRef<void(absl::Span<const ChunkProbe> probes, std::vector<float>& scores)>;

std::vector<RowRange> KeepBestChunks(const std::vector<RowRange>& candidates, int64_t chunk,
                                     int64_t wanted, ScoreProbes score);

struct ScoredBlock {
  int64_t block = 0;
  float score = 0;
};
// Which block of a branch [begin, end) of blocks stands for it: in round `round` the `number`-th
// branch. HiP takes the middle one.
using ChooseBlock = absl::FunctionRef<int64_t(RowRange branch, int64_t round, int64_t number)>;
inline int64_t MiddleBlock(RowRange branch, int64_t, int64_t) {
  return (branch.begin + branch.end) / 2;
}

inline RowRange RowsOfBlock(RowRange zone, int64_t block_rows, int64_t block) {
  const Position begin = zone.begin + block * block_rows;
  return {begin, std::min(zone.end, begin + block_rows)};
}

// By block, ascending. score: of all rows of the blocks that stand for branches.
std::vector<ScoredBlock> HalveChunks(RowRange zone, int64_t block_rows, int64_t wanted,
                                     ChooseBlock choose, ScoreProbes score);

}  // namespace carrel::kernels
