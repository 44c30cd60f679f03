#include "decoder/zone/cuda_zone_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/status.h"
#include "decoder/client/row_stream.h"
#include "decoder/select/cuda_methods.h"

namespace carrel::decoder {
namespace {

constexpr int64_t kUnitRows = 4096;    // of a thread's unit of work
constexpr int64_t kSampleRows = 2048;  // that choose a head's top exponents

kernels::PackedHead* LayHeads(const AttentionShape& shape, cuda::DeviceArena& arena) {
  return arena.Take<kernels::PackedHead>(int64_t{shape.layers} * shape.kv_heads);
}

}  // namespace

int64_t CudaZoneRows::DeviceBytes(const AttentionShape& shape) {
  return cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) { LayHeads(shape, arena); });
}

absl::StatusOr<CudaZoneRows> CudaZoneRows::Create(const OpenedContext& context,
                                                  std::vector<bool> packed) {
  const AttentionShape& shape = context.shape;
  const RowRange zone = context.zone;
  CudaZoneRows out;
  ASSIGN_OR_RETURN(out.arena_, cuda::DeviceArena::Of([&](cuda::DeviceArena& arena) {
                     out.device_heads_ = LayHeads(shape, arena);
                   }));
  out.shape_ = shape;
  out.zone_ = zone;
  out.packed_ = std::move(packed);
  out.layer_elements_ = int64_t{shape.kv_heads} * zone.rows() * shape.head_dim;
  out.heads_.resize(static_cast<size_t>(shape.layers * shape.kv_heads));
  out.adding_ = std::make_unique<kernels::ExceptionPieces>();
  int64_t bytes = 0;
  for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
    out.at_.push_back(bytes);
    bytes += shape.kv_heads * zone.rows() * out.row_bytes(layer);
  }
  ASSIGN_OR_RETURN(out.bytes_, cuda::PinnedBuffer<uint8_t>::Create(bytes));
  if (context.rows != nullptr) {
    out.CopyFrom(*context.rows, context.pool);
  } else {
    RETURN_IF_ERROR(out.ReadFromStore(context));
  }
  RETURN_IF_ERROR(CopyToDevice(out.device_heads_, out.heads_));
  const std::vector<kernels::RowPiece>& exceptions = out.adding_->all();
  ASSIGN_OR_RETURN(out.exceptions_, cuda::PinnedBuffer<kernels::RowPiece>::Create(
                                        static_cast<int64_t>(exceptions.size())));
  std::copy(exceptions.begin(), exceptions.end(), out.exceptions_.data());
  out.adding_.reset();
  return out;
}

kernels::KvView CudaZoneRows::kv(Layer layer) const {
  CARREL_CHECK(!is_packed(layer));
  const auto* const k = reinterpret_cast<const kernels::Bf16*>(
      bytes_.data() + at_[static_cast<size_t>(layer.value())]);
  return {k, k + layer_elements_, zone_.rows()};
}

kernels::PackedRows CudaZoneRows::packed(Layer layer) const {
  CARREL_CHECK(is_packed(layer));
  return {bytes_.data() + at_[static_cast<size_t>(layer.value())],
          device_heads_ + HeadIndex(layer, KvHead(0)), exceptions_.data(), zone_.rows()};
}

int64_t CudaZoneRows::row_bytes(Layer layer) const {
  return is_packed(layer) ? kernels::PackedRowBytes(shape_.head_dim)
                          : int64_t{shape_.head_dim} * 2 * 2;
}

void CudaZoneRows::UnpackKeys(Layer layer, ThreadPool* pool, uint16_t* keys) const {
  const kernels::PackedRows from = packed(layer);
  const int64_t units = (zone_.rows() + kUnitRows - 1) / kUnitRows;
  pool->ParallelFor(shape_.kv_heads * units, [&](int64_t i) {
    const KvHead head(static_cast<int32_t>(i / units));
    const int64_t first = i % units * kUnitRows, rows = std::min(kUnitRows, zone_.rows() - first);
    const int64_t at = head.value() * zone_.rows() + first;
    kernels::UnpackRows(heads_[HeadIndex(layer, head)], false, from.rows + at * row_bytes(layer),
                        from.exceptions, rows, shape_.head_dim, keys + at * shape_.head_dim);
  });
}

void CudaZoneRows::Take(Layer layer, KvHead head, int64_t first, int64_t rows, const void* k,
                        const void* v) {
  const int64_t at = head.value() * zone_.rows() + first;
  uint8_t* const to = bytes_.data() + at_[static_cast<size_t>(layer.value())];
  if (is_packed(layer)) {
    kernels::PackRows(heads_[HeadIndex(layer, head)], k, v, rows, shape_.head_dim,
                      to + at * row_bytes(layer), adding_.get());
    return;
  }
  const int64_t half_row = row_bytes(layer) / 2;
  std::memcpy(to + at * half_row, k, static_cast<size_t>(rows * half_row));
  std::memcpy(to + layer_elements_ * 2 + at * half_row, v, static_cast<size_t>(rows * half_row));
}

void CudaZoneRows::ChooseTops(Layer layer, KvHead head, int64_t rows, const void* k,
                              const void* v) {
  kernels::PackedHead& tops = heads_[HeadIndex(layer, head)];
  kernels::ChooseTopExponents(k, rows, shape_.head_dim, tops.top_exponent[0]);
  kernels::ChooseTopExponents(v, rows, shape_.head_dim, tops.top_exponent[1]);
}

absl::Status CudaZoneRows::ReadFromStore(const OpenedContext& context) {
  constexpr int64_t kPartRows = 512;
  return ReadContextRows(
      context.client, shape_, [&](Layer) { return absl::MakeConstSpan(&zone_, 1); },
      context.max_fetch_rows,
      [&](const ContextRows& block) {
        const int64_t first = block.first - zone_.begin, bytes = int64_t{shape_.head_dim} * 2;
        // A head's first rows speak for all: what they do not foresee becomes an exception.
        if (first == 0 && is_packed(block.layer)) {
          ChooseTops(block.layer, block.head, std::min(block.rows, kSampleRows), block.k, block.v);
        }
        context.pool->ParallelFor((block.rows + kPartRows - 1) / kPartRows, [&](int64_t i) {
          const int64_t begin = i * kPartRows, rows = std::min(kPartRows, block.rows - begin);
          Take(block.layer, block.head, first + begin, rows,
               static_cast<const char*>(block.k) + begin * bytes,
               static_cast<const char*>(block.v) + begin * bytes);
        });
        return absl::OkStatus();
      });
}

void CudaZoneRows::CopyFrom(const HostRows& source, ThreadPool* pool) {
  const auto row_elements = static_cast<size_t>(shape_.head_dim);
  pool->ParallelFor(shape_.layers * shape_.kv_heads, [&](int64_t i) {
    const Layer layer(static_cast<int32_t>(i / shape_.kv_heads));
    const KvHead head(static_cast<int32_t>(i % shape_.kv_heads));
    if (!is_packed(layer)) return;
    const HeadView& from = source.At(layer, head);
    const int64_t sample = std::min(kSampleRows, zone_.rows());
    std::vector<uint16_t> k(static_cast<size_t>(sample) * row_elements), v(k.size());
    for (int64_t s = 0; s < sample; ++s) {
      const Position row = zone_.begin + s * zone_.rows() / sample;
      std::memcpy(k.data() + s * shape_.head_dim, from.Key(row), row_elements * 2);
      std::memcpy(v.data() + s * shape_.head_dim, from.Value(row), row_elements * 2);
    }
    ChooseTops(layer, head, sample, k.data(), v.data());
  });
  const int64_t units = (zone_.rows() + kUnitRows - 1) / kUnitRows;
  pool->ParallelFor(shape_.layers * shape_.kv_heads * units, [&](int64_t i) {
    const Layer layer(static_cast<int32_t>(i / units / shape_.kv_heads));
    const KvHead head(static_cast<int32_t>(i / units % shape_.kv_heads));
    const HeadView& from = source.At(layer, head);
    const Position begin = zone_.begin + i % units * kUnitRows;
    const Position end = std::min(zone_.end, begin + kUnitRows);
    for (Position row = begin; row < end;) {
      const int64_t count = from.Contiguous(row, end);
      Take(layer, head, row - zone_.begin, count, from.Key(row), from.Value(row));
      row += count;
    }
  });
}

}  // namespace carrel::decoder
