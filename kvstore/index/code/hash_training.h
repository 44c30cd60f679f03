// What:   HATA's learned hash of one head: directions W such that the signs of W q and of W k agree
//         where q scores k high.
// Math:   h(x) = 2 sigmoid(sigma W x) - 1 stands for the sign. Over a batch of queries q_j and keys
//         k_i with labels s_ji, minimised by SGD with momentum:
//           eps mean_ji s_ji |h(q_j) - h(k_i)|^2 + eta |mean_i h(k_i)|^2 + lambda |W W^T - I|_F
//         Labels: of the batch's keys that a query may see, the best tenth by score 20 .. 1,
//         falling linearly, the others -1; 0 for a key that it may not see.
// Source: HATA (2025), section 3.1, equation 9, appendix B. What differs: means where the paper
//         writes sums over pairs whose number it does not say (with sums over 32k pairs the balance
//         term alone would leave nothing of W at this learning rate); the keys' mean is taken off
//         by the caller; every step draws pairs of its own (the paper reuses a chunk for an epoch).
// Shapes: W [bits, d]; keys and queries rows of d.
// Threads: reentrant.
// Cost:   steps() steps over some 32k pairs; each 4 products of [bits, d] with 1,024 keys.
#pragma once

#include <cstdint>

#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/building/small_matrices.h"

namespace carrel::kvstore {

struct HashTrainingConfig {
  int64_t bits = 128;
  // The paper's, table 13.
  float sigma = 0.1f, eps = 0.01f, lambda = 1.0f, eta = 2.0f;
  float learning_rate = 0.1f, momentum = 0.9f, weight_decay = 1e-6f;
  int64_t epochs = 15, iterations = 20;
  // Of a step: queries (all heads of as many samples as make about so many) and keys.
  int64_t step_queries = 32, step_keys = 1024;
  uint64_t seed = 20251121;

  int64_t steps() const { return epochs * iterations; }
};

struct HashBatch {
  int64_t queries = 0, keys = 0, d = 0;
  Floats q, k;    // [queries, d], [keys, d]
  Floats labels;  // [queries, keys]
};

// The loss of W; gradient [bits, d] gets its derivative.
double HashLoss(const HashTrainingConfig& config, const HashBatch& batch, const Floats& w,
                Floats& gradient);

// Labels of one query: scores [keys], of which those with visible[i] != 0 count.
void LabelKeys(const float* scores, const uint8_t* visible, int64_t keys, float* labels);

// W [bits, d]. Keys are taken less `centre` [d]; samples from the later half of the document are
// preferred, as the paper's. The same input gives the same W. At least one sample and one key.
Floats TrainHash(const HashTrainingConfig& config, const Rows& keys, const Floats& centre,
                 const SampledQueries& queries);

}  // namespace carrel::kvstore
