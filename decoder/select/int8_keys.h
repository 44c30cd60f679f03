// What:   a zone's keys a second time, in 8 bits (kernels/score/int8_score): half the bytes to
//         look at every key. A score is off by no more than a bound that is known.
// Shapes: scores [queries, stride()] f32, of row zone.begin + j at [h, j].
// Threads: Score of different heads may run at once; of one head, one at a time.
// Ownership: rows and pool outlive it.
// Cost:   (head_dim + 4) bytes per key, in memory of its own, made of a head's keys when it is asked
//         first; the same bytes read per call.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/select/host_rows.h"
#include "kernels/score/int8_score/int8_score.h"

namespace carrel::decoder {

class Int8Keys {
 public:
  Int8Keys(const AttentionShape& shape, RowRange zone, const HostRows& rows, ThreadPool* pool);
  ~Int8Keys();

  int64_t stride() const { return blocks_ * kernels::kInt8BlockRows; }
  // scores[h, j] ~ scale * <q[h], key of zone.begin + j>; lse [queries]: of the zone's; error
  // [queries]: the most that a score is off by.
  void Score(Layer layer, KvHead head, const float* q, int64_t queries, float scale, float* scores,
             float* lse, float* error);
  int64_t resident_bytes() const;

 private:
  // Both the blocks' place and what is known of them, of a head.
  struct Head {
    bool made = false;
    kernels::Int8Error error;
  };
  uint8_t* Blocks(size_t head) const {
    return memory_ + static_cast<int64_t>(head) * blocks_ * kernels::Int8BlockBytes(head_dim_);
  }
  kernels::Int8Error Make(const HeadView& rows, uint8_t* blocks) const;

  const int64_t head_dim_, kv_heads_;
  const RowRange zone_;
  const int64_t blocks_;  // of a head
  const HostRows& rows_;
  ThreadPool* const pool_;
  std::vector<Head> heads_;  // [layers, kv_heads]
  int64_t bytes_ = 0;
  uint8_t* memory_ = nullptr;
};

}  // namespace carrel::decoder
