#include "kernels/rows/packed_rows/packed_rows.h"

#include <cstring>
#include <thread>

#include "common/test_util.h"
#include "kernels/rows/packed_rows/packed_rows_test_data.h"

namespace carrel::kernels {
namespace {

constexpr int64_t kDims[] = {16, 64, 80, 128};

struct Packed {
  PackedHead head = {};
  std::vector<uint8_t> rows;
  ExceptionPieces exceptions;
};

void ChooseTops(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v, int64_t head_dim,
                PackedHead* head) {
  const int64_t rows = static_cast<int64_t>(k.size()) / head_dim;
  ChooseTopExponents(k.data(), rows, head_dim, head->top_exponent[0]);
  ChooseTopExponents(v.data(), rows, head_dim, head->top_exponent[1]);
}

// Packs, unpacks and compares the bits; rows to pack lie at an odd address.
void ExpectSameBits(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                    int64_t head_dim, Packed* packed) {
  const int64_t rows = static_cast<int64_t>(k.size()) / head_dim;
  std::vector<char> odd_k(k.size() * 2 + 1), odd_v(v.size() * 2 + 1);
  std::memcpy(odd_k.data() + 1, k.data(), k.size() * 2);
  std::memcpy(odd_v.data() + 1, v.data(), v.size() * 2);
  packed->rows.assign(static_cast<size_t>(rows * PackedRowBytes(head_dim)) + 1, 0xab);
  PackRows(packed->head, odd_k.data() + 1, odd_v.data() + 1, rows, head_dim, packed->rows.data(),
           &packed->exceptions);
  EXPECT_EQ(packed->rows.back(), 0xab) << "written beyond the rows";
  for (const bool is_v : {false, true}) {
    std::vector<uint16_t> got(k.size());
    UnpackRows(packed->head, is_v, packed->rows.data(), packed->exceptions.all().data(), rows,
               head_dim, got.data());
    EXPECT_TRUE(got == (is_v ? v : k)) << (is_v ? "V" : "K") << " of " << head_dim;
  }
}

TEST(PackedRowsTest, NormalRows_SameBits_FewExceptions) {
  std::mt19937_64 rng(TestSeed());
  for (const int64_t d : kDims) {
    const int64_t rows = 3000;
    const std::vector<uint16_t> k = NormalRows(rng, rows, d), v = NormalRows(rng, rows, d);
    Packed packed;
    ChooseTops(k, v, d, &packed.head);
    ExpectSameBits(k, v, d, &packed);
    const auto pieces = static_cast<double>(2 * rows * d / kPackedPiece);
    // 2^-13 of a channel's width and less: 1e-4 of its elements, 8 times as many of its pieces.
    EXPECT_LT(static_cast<double>(packed.exceptions.all().size()), 0.004 * pieces);
  }
}

TEST(PackedRowsTest, TopsOfOtherRows_SameBits) {
  std::mt19937_64 rng(TestSeed());
  for (const int64_t d : kDims) {
    const std::vector<uint16_t> k = NormalRows(rng, 500, d), v = NormalRows(rng, 500, d);
    Packed packed;
    ChooseTops(NormalRows(rng, 1, d), NormalRows(rng, 1, d), d, &packed.head);
    ExpectSameBits(k, v, d, &packed);
    EXPECT_GT(packed.exceptions.all().size(), 0u);
  }
}

TEST(PackedRowsTest, AnyBits_AnyTops_SameBits) {
  std::mt19937_64 rng(TestSeed());
  for (const int64_t d : kDims) {
    for (const int top : {0, 1, 14, 15, 120, 254, 255}) {
      const std::vector<uint16_t> k = AnyBits(rng, 200 * d), v = AnyBits(rng, 200 * d);
      Packed packed;
      std::memset(&packed.head, top, sizeof(packed.head));
      ExpectSameBits(k, v, d, &packed);
    }
  }
}

// Every bf16 there is, beside neighbours that fit.
TEST(PackedRowsTest, EveryElement_SameBits) {
  const int64_t d = 16, rows = 65536;
  std::vector<uint16_t> k(rows * d, 0x3f80), v(rows * d, 0xbf80);
  for (int64_t i = 0; i < rows; ++i) {
    k[i * d + i % d] = static_cast<uint16_t>(i);
    v[i * d + (i + 5) % d] = static_cast<uint16_t>(i);
  }
  Packed packed;
  ChooseTops(k, v, d, &packed.head);
  ExpectSameBits(k, v, d, &packed);
}

TEST(PackedRowsTest, ZerosOfBothSigns_AreNoExceptions) {
  const int64_t d = 64;
  std::vector<uint16_t> k(10 * d, 0), v(10 * d, 0x8000);
  k[3] = 0x3f81;  // a channel whose zeros lie far below its top
  Packed packed;
  ChooseTops(k, v, d, &packed.head);
  ExpectSameBits(k, v, d, &packed);
  EXPECT_EQ(packed.exceptions.all().size(), 0u);
}

TEST(PackedRowsTest, ChosenTops_LoseTheFewest) {
  std::mt19937_64 rng(TestSeed());
  for (int trial = 0; trial < 50; ++trial) {
    const int64_t d = 16, rows = 1 + static_cast<int64_t>(rng() % 60);
    std::vector<uint16_t> x = NormalRows(rng, rows, d);
    for (uint16_t& value : x) {  // exponents spread over more than 15
      if (rng() % 3 == 0) value = static_cast<uint16_t>(value ^ (rng() % 32) << 7);
      if (rng() % 20 == 0) value &= 0x8000;
    }
    uint8_t top[d];
    ChooseTopExponents(x.data(), rows, d, top);
    const auto lost = [&](int64_t c, int t) {
      int64_t count = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const uint16_t value = x[static_cast<size_t>(r * d + c)];
        const int exponent = value >> 7 & 255;
        count += (value & 0x7fff) != 0 && (exponent > t || exponent < t - 14);
      }
      return count;
    };
    for (int64_t c = 0; c < d; ++c) {
      int64_t fewest = rows;
      for (int t = 0; t < 256; ++t) fewest = std::min(fewest, lost(c, t));
      EXPECT_EQ(lost(c, top[c]), fewest) << "channel " << c;
    }
  }
}

TEST(PackedRowsTest, PackedByManyThreads_SameBits) {
  std::mt19937_64 rng(TestSeed());
  const int64_t d = 64, rows = 400, threads = 4;
  const std::vector<uint16_t> k = AnyBits(rng, rows * d), v = AnyBits(rng, rows * d);
  Packed packed;
  ChooseTops(k, v, d, &packed.head);
  packed.rows.resize(static_cast<size_t>(rows * PackedRowBytes(d)));
  std::vector<std::thread> workers;
  for (int64_t t = 0; t < threads; ++t) {
    workers.emplace_back([&, begin = t * rows / threads] {
      PackRows(packed.head, k.data() + begin * d, v.data() + begin * d, rows / threads, d,
               packed.rows.data() + begin * PackedRowBytes(d), &packed.exceptions);
    });
  }
  for (std::thread& worker : workers) worker.join();
  std::vector<uint16_t> got(k.size());
  UnpackRows(packed.head, true, packed.rows.data(), packed.exceptions.all().data(), rows, d,
             got.data());
  EXPECT_TRUE(got == v);
}

}  // namespace
}  // namespace carrel::kernels
