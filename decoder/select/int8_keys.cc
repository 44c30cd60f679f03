#include "decoder/select/int8_keys.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>

#include "common/dtype.h"
#include "common/status.h"
#include "kernels/score/group_score/group_score.h"

namespace carrel::decoder {
namespace {

using kernels::kInt8BlockRows;

// Blocks that a thread takes at a time: of heads that are few each core is to have a piece, and pieces whose
// sums are merged are not to be many. By the zone alone, for sums follow them.
int64_t PieceBlocks(int64_t blocks) { return std::clamp<int64_t>(blocks / 128, 32, 128); }

}  // namespace

Int8Keys::Int8Keys(const AttentionShape& shape, RowRange zone, const HostRows& rows,
                   ThreadPool* pool)
    : head_dim_(shape.head_dim),
      kv_heads_(shape.kv_heads),
      zone_(zone),
      blocks_((zone.rows() + kInt8BlockRows - 1) / kInt8BlockRows),
      rows_(rows),
      pool_(pool),
      heads_(static_cast<size_t>(shape.layers * shape.kv_heads)) {
  bytes_ = static_cast<int64_t>(heads_.size()) * blocks_ * kernels::Int8BlockBytes(head_dim_);
  if (bytes_ == 0) return;
  // What no head was made of costs no memory.
  void* const memory = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CARREL_CHECK(memory != MAP_FAILED);
  (void)madvise(memory, static_cast<size_t>(bytes_), MADV_HUGEPAGE);  // speed alone
  memory_ = static_cast<uint8_t*>(memory);
}

Int8Keys::~Int8Keys() {
  if (memory_ != nullptr) munmap(memory_, static_cast<size_t>(bytes_));
}

int64_t Int8Keys::resident_bytes() const {
  const auto made =
      std::count_if(heads_.begin(), heads_.end(), [](const Head& head) { return head.made; });
  return heads_.empty() ? 0 : bytes_ / static_cast<int64_t>(heads_.size()) * made;
}

kernels::Int8Error Int8Keys::Make(const HeadView& rows, uint8_t* blocks) const {
  const int64_t piece_blocks = PieceBlocks(blocks_);
  const int64_t pieces = (blocks_ + piece_blocks - 1) / piece_blocks;
  std::vector<kernels::Int8Error> errors(static_cast<size_t>(pieces));
  pool_->ParallelFor(pieces, [&](int64_t piece) {
    std::vector<float> wide(static_cast<size_t>(kInt8BlockRows * head_dim_));
    kernels::Int8Error& worst = errors[static_cast<size_t>(piece)];
    const int64_t last = std::min(blocks_, (piece + 1) * piece_blocks);
    for (int64_t block = piece * piece_blocks; block < last; ++block) {
      const Position first = zone_.begin + block * kInt8BlockRows;
      const Position end = std::min(zone_.end, first + kInt8BlockRows);
      for (Position at = first; at < end;) {
        const int64_t count = rows.Contiguous(at, end);
        WidenToFloat(DType::kBf16, rows.Key(at), count * head_dim_,
                     &wide[static_cast<size_t>((at - first) * head_dim_)]);
        at += count;
      }
      worst.Add(kernels::PackInt8(wide.data(), end - first, head_dim_,
                                  blocks + block * kernels::Int8BlockBytes(head_dim_)));
    }
  });
  kernels::Int8Error worst;
  for (const kernels::Int8Error& error : errors) worst.Add(error);
  return worst;
}

void Int8Keys::Score(Layer layer, KvHead head, const float* q, int64_t queries, float scale,
                     float* scores, float* lse, float* error) {
  thread_local kernels::Int8Queries packed;
  thread_local std::vector<kernels::LsePart> sums;  // [pieces, queries]
  const auto at = static_cast<size_t>(layer.value() * kv_heads_ + head.value());
  Head& of_head = heads_[at];
  uint8_t* const blocks = Blocks(at);
  if (!of_head.made) {
    of_head.error = Make(rows_.At(layer, head), blocks);
    of_head.made = true;
  }
  kernels::MakeInt8Queries(q, queries, head_dim_, scale, packed);
  const int64_t piece_blocks = PieceBlocks(blocks_);
  const int64_t pieces = (blocks_ + piece_blocks - 1) / piece_blocks;
  sums.resize(static_cast<size_t>(pieces * queries));
  pool_->ParallelFor(pieces, [&, &packed = packed, &sums = sums](int64_t piece) {
    const int64_t block = piece * piece_blocks, first = block * kInt8BlockRows;
    const int64_t count = std::min(piece_blocks, blocks_ - block);
    kernels::Int8Score(packed, blocks + block * kernels::Int8BlockBytes(head_dim_), count,
                       scores + first, stride());
    const int64_t rows = std::min(count * kInt8BlockRows, zone_.rows() - first);
    for (int64_t h = 0; h < queries; ++h) {
      sums[static_cast<size_t>(piece * queries + h)] =
          kernels::LsePartOf(scores + h * stride() + first, rows);
    }
  });
  for (int64_t h = 0; h < queries; ++h) {
    lse[h] = kernels::LogSumExp(&sums[static_cast<size_t>(h)], pieces, queries);
    error[h] = kernels::Int8ScoreError(of_head.error, q + h * head_dim_, head_dim_, scale);
  }
}

}  // namespace carrel::decoder
