// What:   the exact search that a store makes of a head: every key of the zone is looked at in 8 bits
//         (kernels/score/int8_score), and only those that can be among the best as they are stored.
// Math:   rows that can be among the best k by what a score is off by at most (Int8ScoreError,
//         kernels/select/bounded_topk) are scored from the stored rows, which are verified;
//         result.scores are exact. Of one q head the ids are those of flat. Of a
//         group the lse in the group score is over the scores in 8 bits: what is off is the weight
//         between heads, by at most e. zone_lse is that lse, an estimate: no row that is left out has a
//         larger group score by it. Small zones, large top_k (Int8ScanPays) and who wants the exact lse
//         are scanned as they are stored, as by flat.
//         What is found depends on rows, zone, queries, scale and top_k alone: not on what is kept, not
//         on threads, not on other queries scored together (SearchRequest::int8_scores).
// Shapes: blocks of 16 rows from row 0 on, head_dim rounded up to 4 and 4 bytes per row.
// Errors: of rows in the zone: each scan verifies it, also where blocks are kept. Rows outside are not
//         looked at.
// Ownership: keeps its rows, and its piece of memory until its end.
// Threads: any. One of them adds to what is kept, others meanwhile pack for themselves.
// Cost:   kept: the blocks' bytes read, once for all queries, and rows more than are wanted (a few times
//         as many) at random. Blocks that are not kept are packed from the rows as they are scanned:
//         some 40 ns per row of 64.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/score/int8_score/int8_score.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

// Whether a search scans in 8 bits. By sizes alone: with every other rule answers would depend on it.
bool Int8ScanPays(int64_t zone_rows, int64_t top_k);

// Address space with a piece for the blocks of each head of a context, side by side in pages of 2 MiB
// where the kernel has them. A piece is memory from when it is written until it is given back.
class Int8Memory {
 public:
  // null: the system gives none.
  static std::shared_ptr<Int8Memory> Make(int64_t heads, int64_t rows, int64_t head_dim);
  ~Int8Memory();
  Int8Memory(const Int8Memory&) = delete;

  // A head's, for as long as it lives. Empty: no memory.
  class Piece {
   public:
    Piece() = default;
    Piece(std::shared_ptr<Int8Memory> memory, int64_t head)
        : memory_(std::move(memory)), head_(head) {}
    ~Piece();
    Piece(Piece&&) noexcept = default;
    Piece& operator=(Piece&&) = delete;

    bool empty() const { return memory_ == nullptr; }
    uint8_t* data() const { return memory_->bytes_ + head_ * memory_->piece_bytes_; }

   private:
    std::shared_ptr<Int8Memory> memory_;
    int64_t head_ = 0;
  };
  // Empty while another one has it.
  static Piece Take(const std::shared_ptr<Int8Memory>& memory, int64_t head);

  int64_t piece_bytes() const { return piece_bytes_; }

 private:
  Int8Memory(int64_t heads, int64_t piece_bytes, uint8_t* bytes);

  const int64_t piece_bytes_;
  uint8_t* const bytes_;
  std::vector<std::atomic<bool>> taken_;
};

class Int8Scan : public Index {
 public:
  // piece: where blocks are kept, of keys.count() rows; may be empty.
  Int8Scan(Rows keys, Int8Memory::Piece piece);

  IndexKind kind() const override { return IndexKind::kFlat; }
  int64_t resident_bytes() const override;
  absl::Status Search(const SearchRequest& request, SearchScratch& scratch,
                      SearchResult& result) const override;

  // scores [vectors, Stride(zone)]: of row zone.begin + j at Offset(zone) + j, ~ scale <queries[i], key>;
  // others have no meaning. lse [vectors]: of the zone's scores, added up in parts that depend on the
  // zone alone. error: of the zone's rows. On the pool's threads where there is one.
  absl::Status Score(const float* queries, int64_t vectors, float scale, RowRange zone,
                     ThreadPool* pool, float* scores, float* lse, kernels::Int8Error& error) const;
  static int64_t Stride(RowRange zone) {
    return (LastBlock(zone) - zone.begin / kernels::kInt8BlockRows) * kernels::kInt8BlockRows;
  }
  static int64_t Offset(RowRange zone) { return zone.begin % kernels::kInt8BlockRows; }

 private:
  struct Blocks {
    int64_t begin = 0, end = 0;
    bool Has(int64_t block) const { return begin <= block && block < end; }
  };
  struct Pass;  // one call of Score

  static int64_t LastBlock(RowRange zone) {
    return (zone.end + kernels::kInt8BlockRows - 1) / kernels::kInt8BlockRows;
  }
  Blocks Kept() const {
    const uint64_t kept = kept_.load(std::memory_order_acquire);
    return {static_cast<int64_t>(kept >> 32), static_cast<int64_t>(kept & UINT32_MAX)};
  }
  // Without rows outside the zone.
  Blocks WholeBlocks(RowRange zone) const;
  kernels::Int8Error PackBlock(int64_t block, RowRange zone, float* wide, uint8_t* to) const;
  // Blocks [part.begin, part.end), their rows in the zone verified.
  absl::Status ScorePart(const Pass& pass, Blocks part, kernels::Int8Error& error) const;
  // sums [vectors]: of what ScorePart gave.
  void SumPart(const Pass& pass, Blocks part, kernels::LsePart* sums) const;
  // The best rows by s.errors, from the stored rows of those that can be.
  absl::Status SelectWithin(const Int8ZoneScores& of_zone, const SearchRequest& request,
                            SearchScratch& s, SearchResult& result) const;

  const Rows keys_;
  const int64_t block_bytes_;
  const Int8Memory::Piece piece_;
  // Of what is kept. Who holds adding_ writes outside of kept_, then publishes it.
  mutable std::vector<kernels::Int8Error> errors_;  // [blocks]
  mutable std::atomic<uint64_t> kept_{0};           // first block << 32 | the one behind the last
  mutable std::atomic<bool> adding_{false};
};

}  // namespace carrel::kvstore
