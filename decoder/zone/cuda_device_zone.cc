#include "decoder/zone/cuda_device_zone.h"

#include "common/status.h"
#include "decoder/client/context_rows.h"

namespace carrel::decoder {

CudaDeviceZone::CudaDeviceZone(const OpenedContext& context)
    : CudaHeldZone(context,
                   {context.shape, context.zone, Budgets(context.selections),
                    HeadBudgets(context.selections, context.shape.kv_heads)},
                   "device") {}

Shared<const CudaDeviceZone::Rows>::Made CudaDeviceZone::ReadRows() const {
  const RowRange zone = shape().zone;
  auto rows = std::make_shared<Rows>();
  rows->reserved = ReservedIfShared(RowBytes());
  ASSIGN_OR_RETURN(rows->values, CudaWindow::Create(shape().heads, zone.rows()));
  RETURN_IF_ERROR(ReadContextRows(context_.client, shape().heads, {&zone, 1},
                                  context_.max_fetch_rows, [&](const ContextRows& block) {
                                    return rows->values.CopyRows(block.layer, block.head,
                                                                 block.first - zone.begin,
                                                                 block.rows, block.k, block.v);
                                  }));
  return rows;
}

absl::Status CudaDeviceZone::HoldRows() {
  ASSIGN_OR_RETURN(rows_, Shared<const Rows>::Of(key(), [&] { return ReadRows(); }));
  return absl::OkStatus();
}

CudaKeys CudaDeviceZone::Keys(cuda::PinnedBuffer<uint16_t>&) const {
  CudaKeys keys;
  for (Layer layer(0); layer.value() < shape().heads.layers; layer = layer.next()) {
    keys.layers.push_back(AllRows(layer));
  }
  return keys;
}

}  // namespace carrel::decoder
