// What:   one use of a bank in device memory: looks rows up, gives slots to those that are missing,
//         and copies these from pinned host memory straight into their slots.
// Math:   kernels/rows/row_bank/row_bank.h, exactly: the same slots and misses as RefRowBank.
// Shapes: kv: rows 0 .. rows - 1 of each KV head, bf16, pinned host or device memory, or instead of them
//         `packed` rows (packed_rows_cuda.h), which are unpacked into their slots; bank: the
//         slots of each KV head alike, device memory; ids [kv_heads, ids_stride] int32, of
//         which the first `count`, or row_count[head], count: distinct in a head, 0 .. rows - 1;
//         slots [kv_heads, count] int32 out, in the order of ids, so that attention over slots adds
//         in the order of attention over ids. All but ids and slots at multiples of 16 bytes;
//         head_dim 64 or 128.
// Edge:   count == 0: nothing is enqueued.
// Errors: InvalidValue for a shape that is not served, count > slots included.
// Threads: uses of one bank one after the other; each stream with a workspace of its own.
// Cost:   two launches for up to kMostTogether banks alike in KV heads, head_dim, map and purpose, which may be captured
//         in a graph: O(slots) by one block per KV head, then the misses at the bus's speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/row_bank/row_bank.h"

namespace carrel::kernels {

// Sums over KV heads and uses.
struct RowBankCounters {
  uint64_t wanted = 0;      // rows named by uses of kNow
  uint64_t hits = 0;        // of them, held already
  uint64_t expected = 0;    // of kNow after kAhead: rows named
  uint64_t foreseen = 0;    // of them, named by that kAhead
  uint64_t ahead = 0;       // rows named by uses of kAhead
  uint64_t ahead_hits = 0;  // of them, held already
};

enum class RowBankPurpose : uint8_t {
  kNow = 0,           // the rows are attended next
  kAhead = 1,         // rows that the next use will probably name
  kNowAfterAhead = 2  // kNow, the use before was kAhead
};

struct RowBankParams {
  RowBankShape shape;
  KvView kv;
  PackedRows packed;
  KvRows bank;
  void* state = nullptr;  // RowBankLayout(shape).bytes, made by RowBankReset
  const int32_t* ids = nullptr;
  int64_t ids_stride = 0;
  int64_t count = 0;                   // of each KV head, or the most of any
  const int32_t* row_count = nullptr;  // [kv_heads], device memory, each <= count; null: `count`
  int32_t* slots = nullptr;
  RowBankPurpose purpose = RowBankPurpose::kNow;
  RowBankCounters* counters = nullptr;  // device memory
  void* workspace = nullptr;            // RowBankWorkspaceBytes
};

size_t RowBankWorkspaceBytes(int64_t kv_heads, int64_t count);
// Empties the bank.
cudaError_t RowBankReset(const RowBankShape& shape, void* state, cudaStream_t stream);
// Uses of different banks, one of each.
cudaError_t UseRowBanks(std::span<const RowBankParams> all, cudaStream_t stream);
inline cudaError_t UseRowBank(const RowBankParams& params, cudaStream_t stream) {
  return UseRowBanks({&params, 1}, stream);
}

}  // namespace carrel::kernels
