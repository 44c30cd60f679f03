// What:   how concentrated attention is, exactly, on sampled queries: what `inspect` shows and
//         budgets are judged by.
// Math:   p = softmax_{j <= position}(scale * <q, k[j]>) on the stored bf16 keys;
//         entropy = -sum p ln p (nats);
//         keys_for_75_mass = the least number of keys whose p sum to 0.75.
//         Both are means over the samples.
// Source: top-k decoding (docs/methods.md), the attention statistics of its section on choosing k;
//         per q head here.
// Cost:   samples * q_heads * tokens / 2 scores.
#pragma once

#include <vector>

#include "prefill/layer_rows.h"

namespace carrel::prefill {

struct HeadStatistics {
  QHead q_head;
  double entropy_nats = 0;
  double keys_for_75_mass = 0;
  int64_t samples = 0;
};

// Of one KV head: statistics [group]. At most max_samples of the rows' sampled queries, evenly
// chosen.
void DescribeHead(const LayerRows& rows, const AttentionShape& shape, KvHead head,
                  int64_t max_samples, HeadStatistics* statistics);

}  // namespace carrel::prefill
