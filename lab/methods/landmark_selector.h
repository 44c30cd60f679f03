// What:   chunks of consecutive rows by the mean of their keys, the chunk's landmark.
// Math:   a query's score of a chunk is <q, mean of its keys> / sqrt(head_dim); the softmax over chunks, of each q head,
//         and its largest over the q heads of a group decide, which is their group score
//         (kernels/score/group_score). outliers: so many chunks that their mean stands for worst (the least
//         cosine between a key and the mean) are chosen whatever they score, within the budget, and at most half of it.
// Source: ShadowKV (docs/methods.md): section 4.1, algorithms 1 (landmarks of keys after RoPE, outliers) and 2
//         (softmax over chunks, the maximum over the q heads of a KV head); chunks of 8 as in section 5.1. Differs: rows are attended as they are stored, not rebuilt from a low rank; means are bf16.
// Edge:   a zone of at most `budget` rows: all of them. A budget below a chunk: the first rows of the best one.
// Cost:   head_dim bf16 per chunk, made when the zone is opened and read for every choice.
#pragma once

#include <cstdint>

namespace carrel::decoder {

// landmarks:chunk=,outliers=,mask=kv-head|q-head
struct LandmarkConfig {
  int64_t chunk = 8;     // rows that a mean stands for (paper): 1 .. 1024
  int64_t outliers = 0;  // chunks that are always chosen; 0 .. 65536
};

}  // namespace carrel::decoder
