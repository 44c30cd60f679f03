// What:   int8_score on AMX's tiles, for many queries. Called by int8_score.cc alone.
// Math:   a query's low bytes (unsigned) and high ones (signed) meet the numbers of 16 rows, which lie as
//         the right operand wants them: the same integers as without tiles, and the same bits.
// Threads: reentrant.
// Cost:   two products of tiles for 16 queries, 16 rows and up to 64 numbers of each, however many of
//         the queries there are; blocks are read once per 64 queries.
#pragma once

#include <cstdint>

#include "kernels/score/int8_score/int8_score.h"

namespace carrel::kernels {

// Whether tiles are there, and pay for so many queries.
bool Int8TakesTiles(int64_t group);

// queries.tiles of the rest.
void PackInt8Tiles(Int8Queries& queries);

void Int8ScoreByTiles(const Int8Queries& queries, const void* blocks, int64_t count, float* out,
                      int64_t stride);

}  // namespace carrel::kernels
