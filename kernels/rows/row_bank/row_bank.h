// What:   a bounded bank of rows: which slot holds which row, and which row leaves for another.
// Math:   least recently used first. A use names distinct rows. Those that the bank holds are hits;
//         the others, in the order in which they are named, take the slots that were not used for
//         longest and are not hits of this use. Of rows used together the one named earlier is the
//         older. Slots that were never used come first, by number. So hits, slots and evictions are
//         the same wherever and however they are computed.
// Source: the banks of HiP and InfiniteHiP (docs/methods.md), with exact least-recently-used order.
// Shapes: a bank per layer; each KV head has `slots` slots of its own, and rows 0 .. rows - 1.
// Edge:   a use of more rows than there are slots is not served: there would be no place for them.
// Cost:   page table: kVector, a slot number per row of the zone, one read per look-up; kHash, a
//         table of 4 to 8 places per slot, mostly one read, whatever the zone's size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace carrel::kernels {

enum class RowMap : uint8_t { kVector = 0, kHash = 1 };

inline constexpr int64_t kMaxBankSlots = int64_t{1} << 20;  // of a KV head

struct RowBankShape {
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t slots = 0;  // of a KV head; 1 .. kMaxBankSlots
  int64_t rows = 0;   // of a KV head that may be asked for
  RowMap map = RowMap::kVector;
};

// Places of a head's table under kHash: a power of two, at least half of them free after any use.
constexpr int64_t RowBankPlaces(int64_t slots) {
  int64_t places = 64;
  while (places < 4 * slots) places *= 2;
  return places;
}

// Where the parts of a bank's state begin, in bytes.
struct RowBankLayout {
  explicit constexpr RowBankLayout(const RowBankShape& s) {
    const int64_t all_slots = s.kv_heads * s.slots;
    const int64_t words = (s.slots + 31) / 32;
    held = Up(all_slots * 4);
    ahead = held + Up(all_slots * 4);
    entries = ahead + Up(s.kv_heads * words * 4);
    map = entries + Up(s.kv_heads * 4);
    bytes =
        map + Up(s.kv_heads * (s.map == RowMap::kVector ? s.rows * 4 : RowBankPlaces(s.slots) * 8));
  }

  int64_t order = 0;    // [kv_heads, slots] int32: slots, least recently used first
  int64_t held = 0;     // [kv_heads, slots] int32: row in a slot, -1: none
  int64_t ahead = 0;    // [kv_heads, words] a bit per slot: asked for ahead of the last use
  int64_t entries = 0;  // [kv_heads] int32: places taken, under kHash
  int64_t map = 0;  // [kv_heads, rows] int32, or [kv_heads, places] of (row, slot); what it says
                    // of a row holds only if the slot holds that row
  int64_t bytes = 0;

 private:
  static constexpr int64_t Up(int64_t bytes) { return (bytes + 255) / 256 * 256; }
};

// Of K and V in the bank.
constexpr int64_t RowBankRowBytes(const RowBankShape& s) {
  return s.kv_heads * s.slots * s.head_dim * 2 * 2;
}

// What one use found.
struct RowBankUse {
  std::vector<int32_t> slots;   // of each row named
  std::vector<int32_t> misses;  // which of them were not held: indices, ascending
};

// One KV head, on the CPU.
// Cost: O(rows named) per use.   Threads: one at a time.
class RowBank {
 public:
  explicit RowBank(int64_t slots);
  // rows are distinct, >= 0, and at most as many as there are slots.
  RowBankUse Use(const std::vector<int32_t>& rows);
  // The slot of a row, or -1.
  int32_t Find(int32_t row) const;
  int64_t slots() const { return static_cast<int64_t>(held_.size()); }

 private:
  void Unlink(int32_t slot);
  void Append(int32_t slot);

  // A ring of slots, least recently used first, through the place `slots` that is none.
  std::vector<int32_t> next_, previous_;
  std::vector<int32_t> held_;  // the row in each slot, or -1
  std::unordered_map<int32_t, int32_t> slot_of_;
};

// The same by plain loops, O(slots) per use.
class RefRowBank {
 public:
  explicit RefRowBank(int64_t slots);
  // rows are distinct and at most as many as there are slots.
  RowBankUse Use(const std::vector<int32_t>& rows);

 private:
  std::vector<int32_t> order_, held_;  // slots, least recently used first; the row in each
  std::unordered_map<int32_t, int32_t> slot_of_;
};

}  // namespace carrel::kernels
