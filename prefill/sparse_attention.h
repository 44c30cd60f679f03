// What:   attention of prefill over part of what came before: block-sparse, for long documents on
//         small machines, and for documents longer than the model was trained for.
// Math:   a block of block_q tokens attends to the first `sink` tokens, to at most `rows` chosen
//         ones, to the `window` tokens before it and, causally, to itself: one choice per KV head,
//         by the largest score that any q head of every stride_q-th token gives a probed key
//         (kernels/select/chunk_prune).
//         infinitehip: chunks of 256, 32 and 8 tokens; 32,768, then 8,192, then `rows` survive.
//         hip: blocks of block_k keys, rows / block_k of them.
//         rope infinitehip: what a block attends to stands at consecutive positions from 0 on, in
//         the order of the document, and its tokens after that (StreamingLLM-style); while rows are
//         chosen keys stand as model/rope_mode.h says.
// Source: HiP, section 3; InfiniteHiP, section 3 and appendix F (docs/methods.md).
//         Differs: one choice per KV head (decision 004); stride_q asks fewer queries.
// Edge:   while there are no more than `rows` tokens to choose from, all of them are attended:
//         dense attention up to rounding.
// Threads: units of (KV head, block): bits do not depend on the pool.
// Cost:   per block and KV head, attention over sink + rows + window + block_q tokens, and scores
//         of tokens / 16 + some 16,000 probed keys.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "prefill/attention_config.h"
#include "prefill/layer_attention.h"

namespace carrel::prefill {

// With rope infinitehip q and k come before RoPE. trained_tokens: the model's max_position_embeddings.
std::unique_ptr<LayerAttention> MakeSparseAttention(const AttentionConfig& config,
                                                    const AttentionShape& shape, int64_t tokens,
                                                    std::vector<Position> sample_positions,
                                                    std::vector<float> undo_rope,
                                                    const std::vector<float>& inv_freq,
                                                    int64_t trained_tokens, ThreadPool* pool);

}  // namespace carrel::prefill
