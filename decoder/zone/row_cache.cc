#include "decoder/zone/row_cache.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "common/status.h"

namespace carrel::decoder {
namespace {

// Of a slot, beside its row: links, the row's number, its entry in the table, its bit.
constexpr int64_t kSlotOverheadBytes = 64;

}  // namespace

absl::StatusOr<std::vector<int64_t>> RowCache::Slots(
    const RetrievalConfig& config, const AttentionShape& shape,
    const std::vector<select::Selection>& selections, int64_t zone_rows) {
  std::vector<int64_t> slots(selections.size(), 0);
  if (config.row_cache_bytes == 0) return slots;
  int64_t layers = 0, most = 1;
  for (const select::Selection& selection : selections) {
    if (select::IsAll(selection)) continue;
    ++layers;
    const double ahead = config.prefetch == Prefetch::kOff ? 1.0 : config.oversample;
    const int64_t rows = std::llround(ahead * static_cast<double>(select::TopKRows(selection)));
    most = std::max(most, std::min(rows, zone_rows));
  }
  if (layers == 0) return slots;
  const int64_t slot_bytes =
      layers * shape.kv_heads * (int64_t{shape.head_dim} * 2 * 2 + kSlotOverheadBytes);
  const int64_t each = std::min(zone_rows, config.row_cache_bytes / slot_bytes);
  if (each < most) {
    return absl::InvalidArgumentError(
        absl::StrCat("row_cache=", config.row_cache_bytes, " bytes hold ", each,
                     " rows per KV head and layer, a query brings ", most, ": at least ",
                     most * slot_bytes, " bytes are needed, or 0 for no cache"));
  }
  for (size_t l = 0; l < slots.size(); ++l) slots[l] = select::IsAll(selections[l]) ? 0 : each;
  return slots;
}

RowCache::RowCache(const AttentionShape& shape, const std::vector<int64_t>& slots)
    : shape_(shape), row_bytes_(int64_t{shape.head_dim} * 2), slots_(slots) {
  for (const int64_t count : slots_) {
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      heads_.push_back({.bank = kernels::RowBank(count),
                        .row_in = std::vector<int32_t>(static_cast<size_t>(count), -1),
                        .held = {},
                        .rows = std::vector<char>(static_cast<size_t>(count * 2 * row_bytes_))});
    }
  }
}

std::vector<std::vector<Position>> RowCache::Held(Layer layer) const {
  std::vector<std::vector<Position>> rows;
  if (!keeps(layer)) return rows;
  rows.resize(static_cast<size_t>(shape_.kv_heads));
  for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next()) {
    const std::vector<uint64_t>& held = heads_[Index(layer, head)].held;
    for (size_t word = 0; word < held.size(); ++word) {
      for (uint64_t left = held[word]; left != 0; left &= left - 1) {
        rows[static_cast<size_t>(head.value())].push_back(static_cast<Position>(64 * word) +
                                                          std::countr_zero(left));
      }
    }
  }
  return rows;
}

const char* RowCache::Find(Layer layer, KvHead head, Position id) const {
  const Head& cache = heads_[Index(layer, head)];
  const int32_t slot = cache.bank.Find(static_cast<int32_t>(id));
  return slot < 0 ? nullptr : cache.rows.data() + slot * 2 * row_bytes_;
}

void RowCache::Keep(Layer layer, KvHead head, absl::Span<const Position> ids,
                    absl::Span<const void* const> k, absl::Span<const void* const> v) {
  if (static_cast<int64_t>(ids.size()) > slots(layer)) return;
  Head& cache = heads_[Index(layer, head)];
  const char* const begin = cache.rows.data();
  std::vector<int32_t> named;
  std::vector<size_t> from;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto* bytes = static_cast<const char*>(k[i]);
    const bool was_here = bytes >= begin && bytes < begin + cache.rows.size();
    if (was_here && Find(layer, head, ids[i]) != bytes) continue;  // pushed out since
    named.push_back(static_cast<int32_t>(ids[i]));
    from.push_back(i);
  }
  const kernels::RowBankUse use = cache.bank.Use(named);
  for (const int32_t miss : use.misses) {
    const auto m = static_cast<size_t>(miss);
    const auto slot = static_cast<size_t>(use.slots[m]);
    const auto bit = [&](int32_t row) -> uint64_t& {
      const auto word = static_cast<size_t>(row / 64);
      if (word >= cache.held.size()) cache.held.resize(word + 1, 0);
      return cache.held[word];
    };
    if (cache.row_in[slot] >= 0)
      bit(cache.row_in[slot]) &= ~(uint64_t{1} << cache.row_in[slot] % 64);
    cache.row_in[slot] = named[m];
    bit(named[m]) |= uint64_t{1} << named[m] % 64;
    char* to = cache.rows.data() + slot * 2 * row_bytes_;
    std::memcpy(to, k[from[m]], static_cast<size_t>(row_bytes_));
    std::memcpy(to + row_bytes_, v[from[m]], static_cast<size_t>(row_bytes_));
  }
}

}  // namespace carrel::decoder
