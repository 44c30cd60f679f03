#include "prefill/reindex.h"

#include <cstring>

#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "common/version.h"
#include "kvstore/format/context_name.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/rows.h"
#include "kvstore/index/summaries.h"
#include "kvstore/storage/store.h"
#include "prefill/layer_writer.h"
#include "prefill/staging.h"

namespace carrel::prefill {
namespace {

using kvstore::Kind;
using kvstore::Rows;
using kvstore::StoredContext;

absl::StatusOr<std::vector<uint16_t>> CopyRows(const Rows& rows) {
  std::vector<uint16_t> to;
  rows.AdviseSequential({0, rows.count()});
  RETURN_IF_ERROR(rows.Verify({0, rows.count()}));
  to.reserve(static_cast<size_t>(rows.count() * rows.head_dim()));
  rows.ForEachPiece({0, rows.count()}, [&](Position, const void* address, int64_t count) {
    const size_t before = to.size();
    to.resize(before + static_cast<size_t>(count * rows.head_dim()));
    std::memcpy(&to[before], address, static_cast<size_t>(count * rows.row_bytes()));
  });
  return to;
}

absl::StatusOr<kvstore::SampledQueries> ReadQueries(const StoredContext& context, Layer layer,
                                                    KvHead head) {
  ASSIGN_OR_RETURN(const uint32_t segments,
                   context.SegmentCount(layer.value(), Kind::kSampledQueries, head));
  std::string payload;
  for (uint32_t i = 0; i < segments; ++i) {
    ASSIGN_OR_RETURN(const auto segment,
                     context.Segment(layer.value(), Kind::kSampledQueries, head, i));
    RETURN_IF_ERROR(segment->Verify(0, static_cast<int64_t>(segment->payload().size())));
    payload.append(segment->payload().data(), segment->payload().size());
  }
  return kvstore::DecodeSampledQueries(payload);
}

absl::StatusOr<LayerRows> ReadLayer(const StoredContext& context, Layer layer, int32_t kv_heads) {
  LayerRows rows;
  rows.layer = layer;
  rows.k.resize(kv_heads);
  rows.v.resize(kv_heads);
  rows.queries.resize(kv_heads);
  for (int32_t h = 0; h < kv_heads; ++h) {
    ASSIGN_OR_RETURN(const Rows keys, Rows::OpenKeys(context, layer, KvHead(h)));
    ASSIGN_OR_RETURN(const Rows values, Rows::OpenValues(context, layer, KvHead(h)));
    ASSIGN_OR_RETURN(rows.k[h], CopyRows(keys));
    ASSIGN_OR_RETURN(rows.v[h], CopyRows(values));
    ASSIGN_OR_RETURN(kvstore::SampledQueries queries, ReadQueries(context, layer, KvHead(h)));
    rows.queries[h] = std::move(queries.queries);
    rows.sample_positions = std::move(queries.positions);
  }
  return rows;
}

absl::Status CopyTokenIds(const StoredContext& from, ContextId to, const std::string& path) {
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::SstWriter> sst, kvstore::SstWriter::Create(path));
  ASSIGN_OR_RETURN(const uint32_t segments, from.SegmentCount(-1, Kind::kTokenIds, KvHead(0)));
  for (uint32_t i = 0; i < segments; ++i) {
    ASSIGN_OR_RETURN(const auto segment, from.Segment(-1, Kind::kTokenIds, KvHead(0), i));
    RETURN_IF_ERROR(segment->Verify(0, static_cast<int64_t>(segment->payload().size())));
    kvstore::SegmentKey key;
    key.context = to;
    key.kind = Kind::kTokenIds;
    key.segment = i;
    RETURN_IF_ERROR(sst->Add(key, std::string(segment->payload()), segment->dtype()));
  }
  return sst->Finish();
}

}  // namespace

absl::StatusOr<PrefillReport> Reindex(const ReindexConfig& config, kvstore::Store& store,
                                      ThreadPool* pool, Progress& progress) {
  const absl::Time start = absl::Now();
  RETURN_IF_ERROR(kvstore::ValidateContextName(config.name));
  RETURN_IF_ERROR(kvstore::ValidateSummaryRows(config.summary_rows));
  ASSIGN_OR_RETURN(const std::shared_ptr<const StoredContext> from, store.OpenContext(config.from));
  const absl::StatusOr<v1::Manifest> taken = store.GetManifest(config.name);
  if (taken.ok()) {
    return absl::AlreadyExistsError(absl::StrCat("context \"", config.name, "\" exists already in ",
                                                 config.store_folder));
  }
  if (!absl::IsNotFound(taken.status())) return taken.status();
  ASSIGN_OR_RETURN(Staging staging, Staging::Open(config.store_folder, config.name));
  if (const absl::StatusOr<v1::Manifest> job = staging.ReadJob(); !absl::IsNotFound(job.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("an interrupted prefill of \"", config.name, "\" is in ", staging.folder()));
  }
  // Without a job nothing there is anyone's.
  RETURN_IF_ERROR(staging.Remove());
  ASSIGN_OR_RETURN(staging, Staging::Open(config.store_folder, config.name));
  const absl::Cleanup remove = [&staging] { (void)staging.Remove(); };

  v1::Manifest manifest = from->manifest();
  manifest.set_name(config.name);
  manifest.clear_head_indexes();
  manifest.clear_layer_sizes();
  manifest.clear_head_statistics();
  SetIndexPlan(config.index, config.auto_index, config.summary_rows, manifest);
  ASSIGN_OR_RETURN(const ContextId id, store.AllocateContextId());
  manifest.set_context_id(id.value());
  const AttentionShape shape = {.layers = static_cast<int32_t>(manifest.layers()),
                                .q_heads = static_cast<int32_t>(manifest.q_heads()),
                                .kv_heads = static_cast<int32_t>(manifest.kv_heads()),
                                .head_dim = static_cast<int32_t>(manifest.head_dim())};
  {
    LayerWriter writer(&staging, id, shape, manifest.segment_tokens(), config.index,
                       config.auto_index, config.summary_rows, pool);
    for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
      progress.Update(static_cast<double>(layer.value()) / shape.layers,
                      absl::StrFormat("layer %d/%d", layer.value() + 1, shape.layers));
      ASSIGN_OR_RETURN(LayerRows rows, ReadLayer(*from, layer, shape.kv_heads));
      RETURN_IF_ERROR(writer.Submit(std::move(rows)));
    }
    RETURN_IF_ERROR(writer.Finish());
  }
  RETURN_IF_ERROR(CopyTokenIds(*from, id, staging.ContextSstPath()));
  std::vector<std::string> files = {staging.ContextSstPath()};
  PrefillReport report;
  for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
    ASSIGN_OR_RETURN(const v1::Manifest fragment, staging.ReadFragment(layer));
    manifest.MergeFrom(fragment);
    files.push_back(staging.SstPath(layer));
  }
  manifest.set_created_unix_s(absl::ToUnixSeconds(absl::Now()));
  manifest.set_program_version(kVersion);
  RETURN_IF_ERROR(store.Publish(manifest, files));
  progress.Step(1, "published");
  report.tokens = manifest.tokens();
  report.seconds = absl::ToDoubleSeconds(absl::Now() - start);
  report.tokens_per_s = static_cast<double>(report.tokens) / report.seconds;
  CountBytes(manifest, report);
  return report;
}

}  // namespace carrel::prefill
