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
#include "kvstore/index/rows/blob.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/store.h"
#include "model/fingerprint.h"
#include "prefill/job.h"
#include "prefill/layer_writer.h"
#include "prefill/staging.h"

namespace carrel::prefill {
namespace {

using kvstore::Kind;
using kvstore::Rows;
using kvstore::StoredContext;

absl::StatusOr<std::vector<uint16_t>> CopyRows(const Rows& rows) {
  std::vector<uint16_t> to;
  RETURN_IF_ERROR(rows.Verify({0, rows.count()}));
  to.reserve(static_cast<size_t>(rows.count() * rows.head_dim()));
  rows.ForEachPiece({0, rows.count()}, [&](Position, const void* address, int64_t count) {
    const size_t before = to.size();
    to.resize(before + static_cast<size_t>(count * rows.head_dim()));
    std::memcpy(&to[before], address, static_cast<size_t>(count * rows.row_bytes()));
  });
  return to;
}

// with_summaries: as they are, too.
absl::StatusOr<LayerRows> ReadLayer(const StoredContext& context, Layer layer, int32_t kv_heads,
                                    bool with_summaries) {
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
    ASSIGN_OR_RETURN(kvstore::SampledQueries queries,
                     kvstore::ReadSampledQueries(context, layer, KvHead(h)));
    rows.queries[h] = std::move(queries.queries);
    rows.sample_positions = std::move(queries.positions);
    if (!with_summaries) continue;
    ASSIGN_OR_RETURN(const kvstore::Blob summaries,
                     kvstore::Blob::Open(context, layer, Kind::kSummaries, KvHead(h)));
    ASSIGN_OR_RETURN(rows.summaries.emplace_back(), summaries.Read());
  }
  ASSIGN_OR_RETURN(rows.query_drift, kvstore::ReadQueryDrift(context, layer));
  return rows;
}

absl::StatusOr<std::vector<TokenId>> ReadTokenIds(const StoredContext& context) {
  std::vector<TokenId> tokens;
  ASSIGN_OR_RETURN(const uint32_t segments, context.SegmentCount(-1, Kind::kTokenIds, KvHead(0)));
  for (uint32_t i = 0; i < segments; ++i) {
    ASSIGN_OR_RETURN(const auto segment, context.Segment(-1, Kind::kTokenIds, KvHead(0), i));
    const absl::string_view bytes = segment->payload();
    RETURN_IF_ERROR(segment->Verify(0, static_cast<int64_t>(bytes.size())));
    const size_t before = tokens.size();
    tokens.resize(before + bytes.size() / sizeof(TokenId));
    std::memcpy(tokens.data() + before, bytes.data(), (tokens.size() - before) * sizeof(TokenId));
  }
  if (static_cast<int64_t>(tokens.size()) == context.manifest().tokens()) return tokens;
  return absl::DataLossError(absl::StrCat("context ", context.manifest().name(), ": ",
                                          tokens.size(), " token ids instead of ",
                                          context.manifest().tokens()));
}

}  // namespace

absl::StatusOr<PrefillReport> Reindex(const ReindexConfig& config, kvstore::Store& store,
                                      ThreadPool* pool, Progress& progress) {
  const absl::Time start = absl::Now();
  RETURN_IF_ERROR(kvstore::ValidateContextName(config.name));
  RETURN_IF_ERROR(kvstore::ValidateSummaryRows(config.summary_rows));
  ASSIGN_OR_RETURN(const std::shared_ptr<const StoredContext> from, store.OpenContext(config.from));
  if (from->manifest().key_position() == model::kKeyPositionNone) {
    return absl::FailedPreconditionError(
        absl::StrCat("context ", config.from,
                     " stores its keys before RoPE (key_position=none): no index is made of them"));
  }
  RETURN_IF_ERROR(CheckNameIsFree(store, config.store_folder, config.name));
  ASSIGN_OR_RETURN(Staging staging, Staging::Open(config.store_folder, config.name));
  if (const absl::StatusOr<v1::Manifest> job = staging.ReadJob(); !absl::IsNotFound(job.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("an interrupted prefill of \"", config.name, "\" is in ", staging.folder()));
  }
  RETURN_IF_ERROR(staging.Empty());  // without a job nothing there is anyone's
  const absl::Cleanup remove = [&staging] { (void)staging.Remove(); };

  v1::Manifest manifest = from->manifest();
  manifest.set_name(config.name);
  manifest.set_format_version(kvstore::kManifestFormatVersion);  // whatever that of `from` is
  manifest.clear_number();
  manifest.clear_content_id();
  manifest.clear_segment_digests();
  manifest.clear_head_indexes();
  manifest.clear_layer_sizes();
  // Summaries of the same kind, and what was measured with them, stay: prefill had more queries for
  // them than it kept.
  const bool measured = manifest.head_fidelity_size() > 0 && manifest.head_statistics_size() > 0 &&
                        int64_t{manifest.summary_rows()} == config.summary_rows;
  if (!measured) {
    manifest.clear_head_statistics();
    manifest.clear_head_fidelity();
    manifest.clear_probe();  // its queries are not kept: what is measured now is the document's own
  }
  SetIndexPlan(config.index, config.auto_index, config.summary_rows, manifest);
  manifest.set_program_version(kVersion);
  RETURN_IF_ERROR(CheckRoom(config.store_folder,
                            StoredBytes(manifest, static_cast<int32_t>(manifest.layers())),
                            absl::StrCat("reindex of ", manifest.tokens(), " tokens")));
  ASSIGN_OR_RETURN(const int64_t changes, from->LookAtAll());
  ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, ReadTokenIds(*from));
  const kvstore::ContextId id = kvstore::ContextId::Random();
  manifest.set_context_id(id.Bytes());
  const AttentionShape shape = {.layers = static_cast<int32_t>(manifest.layers()),
                                .q_heads = static_cast<int32_t>(manifest.q_heads()),
                                .kv_heads = static_cast<int32_t>(manifest.kv_heads()),
                                .head_dim = static_cast<int32_t>(manifest.head_dim())};
  {
    LayerWriterOptions options;
    if (measured) options.statistics_samples = 0;
    LayerWriter writer(&staging, id, shape, manifest.segment_tokens(), config.index,
                       config.auto_index, config.summary_rows, pool, options);
    for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
      progress.Update(static_cast<double>(layer.value()) / shape.layers,
                      absl::StrFormat("layer %d/%d", layer.value() + 1, shape.layers));
      ASSIGN_OR_RETURN(LayerRows rows, ReadLayer(*from, layer, shape.kv_heads,
                                                 measured && config.summary_rows > 0));
      RETURN_IF_ERROR(writer.Submit(std::move(rows)));
    }
    RETURN_IF_ERROR(writer.Finish());
  }
  ASSIGN_OR_RETURN(const int64_t changes_now, from->LookAtAll());
  if (changes_now != changes) {
    return absl::DataLossError(absl::StrCat("reindex of ", from->manifest().name(),
                                            ": its files changed while they were read; nothing is "
                                            "published"));
  }
  RETURN_IF_ERROR(PublishStaged(manifest, staging, tokens, store));
  progress.Step(1, "published");
  PrefillReport report;
  report.tokens = manifest.tokens();
  report.probe_tokens = manifest.probe().token_ids_size();
  report.seconds = absl::ToDoubleSeconds(absl::Now() - start);
  report.tokens_per_s = static_cast<double>(report.tokens) / report.seconds;
  CountBytes(manifest, report);
  return report;
}

}  // namespace carrel::prefill
