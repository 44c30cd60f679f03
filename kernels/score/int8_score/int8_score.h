// What:   inner products of a group's queries with rows kept in 8 bits, one scale per row.
// Math:   row j ~ scale[j] n[j], n integers in -127 .. 127, scale[j] = max_c |row[c]| / 127: each
//         number is off by at most scale[j] / 2. A query is kept in 16 bits (of the largest factor
//         with which no sum leaves 32 bits) and counts as exact.
//         out[h, j] = f32(sum_c m[h, c] n[j, c]) * scale[j] * query_scale[h]
// Shapes: a block holds 16 rows in 64 + 64 ceil(dim / 4) bytes: f32 scale[16], then for each four
//         numbers of a row (zeros behind the last) 64 bytes, row r's at 4r. Any byte address.
//         out [group, stride >= count * 16] f32.
// Source: ours; rows side by side, as in fast scans of codes, so that no sum crosses lanes.
// Threads: reentrant; splitting blocks changes no bit, and all versions give the same bits.
// Cost:   reads dim + 4 bytes per row once for all queries on AMX's tiles (from 8 queries on), else from
//         memory once and from the cache once per four queries.
#pragma once

#include <cstdint>
#include <vector>

namespace carrel::kernels {

inline constexpr int64_t kInt8BlockRows = 16;

inline int64_t Int8BlockBytes(int64_t dim) { return 64 + (dim + 3) / 4 * 64; }

// Largest l2 norms over rows, at least: of what a kept row differs from the row, and of the row.
struct Int8Error {
  float residual = 0;
  float norm = 0;

  // Of these rows and of those.
  void Add(const Int8Error& other) {
    residual = residual < other.residual ? other.residual : residual;
    norm = norm < other.norm ? other.norm : norm;
  }
};

// Packs rows [count <= 16, dim] f32, finite; the rows that are left are zeros. Halves are rounded to
// even numbers. Both versions give the same bytes; the errors differ by rounding that they allow for.
Int8Error PackInt8(const float* rows, int64_t count, int64_t dim, void* block);
Int8Error RefPackInt8(const float* rows, int64_t count, int64_t dim, void* block);

struct Int8Queries {
  int64_t group = 0;
  int64_t dim = 0;
  std::vector<int16_t> values;  // [group, dim rounded up to 4]
  // The same in bytes, value = 256 high + low, for machines that multiply bytes: of each four
  // values the low ones (0 .. 255), then the high ones (-128 .. 127).
  std::vector<uint8_t> bytes;     // [group, dim rounded up to 4, 2]
  std::vector<int32_t> high_sum;  // [group]: of the high ones
  // The same as AMX's tiles (int8_score_amx.h), where they are used.
  struct alignas(64) TileRow {
    uint8_t bytes[64];
  };
  std::vector<TileRow> tiles;
  std::vector<float> scale;  // [group]
};

// How far a score of a query of l2 norm `norm` may lie from scale * <query, row>, at most: by Cauchy
// and Schwarz, what the rows and the query lose by being kept in fewer bits, and f32's rounding.
float Int8ScoreError(const Int8Error& of_rows, float norm, int64_t dim, float scale);

// The same for this query, [dim] f32.
float Int8ScoreError(const Int8Error& of_rows, const float* q, int64_t dim, float scale);

// q [group, dim] f32; `scale` is multiplied into the scores.
void MakeInt8Queries(const float* q, int64_t group, int64_t dim, float scale, Int8Queries& queries);

void Int8Score(const Int8Queries& queries, const void* blocks, int64_t count, float* out,
               int64_t stride);
void RefInt8Score(const Int8Queries& queries, const void* blocks, int64_t count, float* out,
                  int64_t stride);

}  // namespace carrel::kernels
