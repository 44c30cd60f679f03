#include "kernels/rows/packed_rows/packed_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/status.h"

namespace carrel::kernels {
namespace {

constexpr int kMostOffset = 14, kZero = 15;
constexpr uint8_t kException = 0xff;  // with offset 15

int Exponent(uint16_t x) { return x >> 7 & 255; }

// low, offsets: of the piece.
void PackPiece(const RowPiece& x, const uint8_t* top, uint8_t* low, uint8_t* offsets,
               ExceptionPieces* exceptions) {
  uint8_t code[kPackedPiece];
  bool said = true;
  for (int64_t i = 0; i < kPackedPiece; ++i) {
    const int offset = top[i] - Exponent(x[i]);
    const bool near = offset >= 0 && offset <= kMostOffset, zero = (x[i] & 0x7fff) == 0;
    said &= near || zero;
    code[i] = static_cast<uint8_t>(near ? offset : kZero);
    low[i] = static_cast<uint8_t>((x[i] >> 8 & 0x80) | (x[i] & 0x7f));
  }
  if (!said) {
    const uint32_t number = exceptions->Add(x);
    code[0] = kZero;
    low[0] = kException;
    std::memcpy(low + 4, &number, sizeof(number));
  }
  for (int64_t i = 0; i < kPackedPiece / 2; ++i) {
    offsets[i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
  }
}

RowPiece UnpackPiece(const uint8_t* low, const uint8_t* offsets, const uint8_t* top,
                     const RowPiece* exceptions) {
  if ((offsets[0] & 15) == kZero && (low[0] & 0x7f) != 0) {
    uint32_t number;
    std::memcpy(&number, low + 4, sizeof(number));
    return exceptions[number];
  }
  RowPiece x;
  for (int64_t i = 0; i < kPackedPiece; ++i) {
    const int offset = offsets[i / 2] >> i % 2 * 4 & 15;
    const int exponent = offset == kZero ? 0 : top[i] - offset;
    x[i] = static_cast<uint16_t>((low[i] & 0x80) << 8 | exponent << 7 | (low[i] & 0x7f));
  }
  return x;
}

}  // namespace

uint32_t ExceptionPieces::Add(const RowPiece& piece) {
  const std::scoped_lock lock(mutex_);
  CARREL_CHECK(pieces_.size() < UINT32_MAX);
  pieces_.push_back(piece);
  return static_cast<uint32_t>(pieces_.size() - 1);
}

void ChooseTopExponents(const void* x, int64_t rows, int64_t head_dim, uint8_t* top) {
  // Elements of each channel by exponent; zeros are never exceptions.
  std::vector<std::array<int64_t, 256>> counts(static_cast<size_t>(head_dim));
  std::vector<uint16_t> row(static_cast<size_t>(head_dim));
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(row.data(), static_cast<const char*>(x) + r * head_dim * 2, row.size() * 2);
    for (size_t c = 0; c < row.size(); ++c) {
      if ((row[c] & 0x7fff) != 0) ++counts[c][static_cast<size_t>(Exponent(row[c]))];
    }
  }
  for (size_t c = 0; c < counts.size(); ++c) {
    const auto& count = counts[c];
    int64_t said = std::accumulate(count.begin(), count.begin() + kMostOffset + 1, int64_t{0});
    int64_t most = said;
    int best = kMostOffset;
    // Of equals the highest: larger elements may come that are not among these.
    for (int t = kMostOffset + 1; t < 256; ++t) {
      said += count[t] - count[t - kMostOffset - 1];
      if (said < most || said == 0) continue;
      most = said;
      best = t;
    }
    // Not above what lies just over the largest element: smaller ones may come, too.
    int largest = 255;
    while (largest > 0 && count[largest] == 0) --largest;
    top[c] = static_cast<uint8_t>(std::clamp(best, 0, std::min(255, largest + 1)));
  }
}

void PackRows(const PackedHead& head, const void* k, const void* v, int64_t rows, int64_t head_dim,
              uint8_t* packed, ExceptionPieces* exceptions) {
  for (int64_t row = 0; row < rows; ++row, packed += PackedRowBytes(head_dim)) {
    for (const bool is_v : {false, true}) {
      const char* from = static_cast<const char*>(is_v ? v : k) + row * head_dim * 2;
      uint8_t* low = packed + is_v * head_dim;
      uint8_t* offsets = packed + 2 * head_dim + is_v * head_dim / 2;
      for (int64_t c = 0; c < head_dim; c += kPackedPiece) {
        RowPiece piece;
        std::memcpy(piece.data(), from + c * 2, sizeof(piece));
        PackPiece(piece, head.top_exponent[is_v] + c, low + c, offsets + c / 2, exceptions);
      }
    }
  }
}

void UnpackRows(const PackedHead& head, bool is_v, const uint8_t* packed,
                const RowPiece* exceptions, int64_t rows, int64_t head_dim, uint16_t* x) {
  for (int64_t row = 0; row < rows; ++row, packed += PackedRowBytes(head_dim), x += head_dim) {
    const uint8_t* low = packed + is_v * head_dim;
    const uint8_t* offsets = packed + 2 * head_dim + is_v * head_dim / 2;
    for (int64_t c = 0; c < head_dim; c += kPackedPiece) {
      const RowPiece piece =
          UnpackPiece(low + c, offsets + c / 2, head.top_exponent[is_v] + c, exceptions);
      std::memcpy(x + c, piece.data(), sizeof(piece));
    }
  }
}

}  // namespace carrel::kernels
