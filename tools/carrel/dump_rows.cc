#include "tools/carrel/dump_rows.h"

#include <memory>
#include <vector>

#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/storage/store.h"
#include "model/safetensors.h"

namespace carrel::tools {
namespace {

absl::Status AppendRows(const kvstore::Rows& rows, std::string& bytes) {
  const RowRange all{0, rows.count()};
  RETURN_IF_ERROR(rows.Verify(all));
  rows.ForEachPiece(all, [&](Position, const void* address, int64_t count) {
    bytes.append(static_cast<const char*>(address), static_cast<size_t>(count * rows.row_bytes()));
  });
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadTokenIds(const kvstore::StoredContext& context) {
  ASSIGN_OR_RETURN(const uint32_t segments,
                   context.SegmentCount(-1, kvstore::Kind::kTokenIds, KvHead(0)));
  std::string bytes;
  for (uint32_t i = 0; i < segments; ++i) {
    ASSIGN_OR_RETURN(const std::shared_ptr<const kvstore::PinnedSegment> segment,
                     context.Segment(-1, kvstore::Kind::kTokenIds, KvHead(0), i));
    RETURN_IF_ERROR(segment->Verify(0, static_cast<int64_t>(segment->payload().size())));
    bytes.append(segment->payload().data(), segment->payload().size());
  }
  return bytes;
}

}  // namespace

absl::Status DumpRows(const std::string& store_folder, const std::string& context,
                      const std::string& path) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(store_folder, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::shared_ptr<const kvstore::StoredContext> stored,
                   store->OpenContext(context));
  const v1::Manifest& manifest = stored->manifest();
  std::vector<std::string> bytes;
  std::vector<model::NamedTensor> tensors;
  ASSIGN_OR_RETURN(std::string token_ids, ReadTokenIds(*stored));
  bytes.push_back(std::move(token_ids));
  tensors.push_back({"token_ids", {DType::kI32, {manifest.tokens()}, {}}});
  for (Layer layer(0); layer.value() < static_cast<int32_t>(manifest.layers());
       layer = layer.next()) {
    for (const bool keys : {true, false}) {
      std::string tensor;
      for (KvHead head(0); head.value() < static_cast<int32_t>(manifest.kv_heads());
           head = head.next()) {
        ASSIGN_OR_RETURN(const kvstore::Rows rows,
                         keys ? kvstore::Rows::OpenKeys(*stored, layer, head)
                              : kvstore::Rows::OpenValues(*stored, layer, head));
        RETURN_IF_ERROR(AppendRows(rows, tensor));
      }
      bytes.push_back(std::move(tensor));
      tensors.push_back(
          {absl::StrCat(keys ? "k." : "v.", layer.value()),
           {DType::kBf16, {manifest.kv_heads(), manifest.tokens(), manifest.head_dim()}, {}}});
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].view.bytes = bytes[i];
  return model::WriteSafetensors(path, tensors);
}

}  // namespace carrel::tools
