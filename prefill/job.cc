#include "prefill/job.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/dtype.h"
#include "common/progress.h"
#include "common/resource_status.h"
#include "common/status.h"
#include "common/version.h"
#include "kvstore/index/auto_index.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/index_type.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/store.h"
#include "prefill/staging.h"

namespace carrel::prefill {

namespace {

// Beside what they hold, about: of a file its index and properties; of a segment its key, footer,
// table of chunks, and its digest in the manifest; the header of a blob of summaries, or of an index.
constexpr int64_t kFileOverhead = 2048, kSegmentOverhead = 256, kBlobPage = 4096;

absl::string_view BytesOf(const std::vector<TokenId>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(TokenId)};
}

}  // namespace

absl::Status ValidateSegmentTokens(int64_t s) {
  if (s >= 16 && s <= (int64_t{1} << 24) && (s & (s - 1)) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("segment_tokens=", s, " is not a power of two in [16, 16777216]"));
}

v1::Manifest NewManifest(const std::string& name, const std::vector<TokenId>& tokens,
                         const AttentionShape& shape, int64_t segment_tokens) {
  v1::Manifest job;
  job.set_format_version(kvstore::kManifestFormatVersion);
  job.set_name(name);
  job.set_program_version(kVersion);
  job.set_tokens(static_cast<int64_t>(tokens.size()));
  job.set_token_ids_sha256(Sha256Hex(BytesOf(tokens)));
  job.set_layers(shape.layers);
  job.set_q_heads(shape.q_heads);
  job.set_kv_heads(shape.kv_heads);
  job.set_head_dim(shape.head_dim);
  job.set_kv_dtype("bf16");
  job.set_segment_tokens(segment_tokens);
  return job;
}

void AddFingerprint(const std::string& name, const std::string& value, v1::Manifest& job) {
  v1::Fingerprint::Field& field = *job.mutable_fingerprint()->add_fields();
  field.set_name(name);
  field.set_value(value);
}

absl::Status CheckNameIsFree(const kvstore::Store& store, const std::string& store_folder,
                             const std::string& name) {
  const absl::StatusOr<v1::Manifest> taken = store.GetManifest(name);
  if (taken.ok()) {
    return absl::AlreadyExistsError(
        absl::StrCat("context \"", name, "\" exists already in ", store_folder,
                     "; remove it first (carrel rm) or choose another name"));
  }
  return absl::IsNotFound(taken.status()) ? absl::OkStatus() : taken.status();
}

int64_t StoredBytes(const v1::Manifest& job, int32_t layers) {
  kvstore::IndexParams index;
  index.kind = kvstore::LargestAutomaticKind(job.head_dim());
  if (const auto planned = kvstore::IndexParamsOf(job.index()); planned.ok()) index = *planned;
  const int64_t d = job.head_dim(), heads = job.kv_heads();
  int64_t row = 2 * 2 * d + kvstore::IndexTypeOf(index.kind).BytesPerKey(index, d);
  // Of a head: what its blobs have beside their keys, and its sampled queries.
  int64_t head = int64_t{job.sampled_queries()} * (4 * d * job.q_heads() / heads + 8);
  if (job.summary_rows() > 0) {
    row += kvstore::SummaryBytesPerKey(job.summary_rows(), d);
    head += kBlobPage;
  }
  head += kvstore::IndexTypeOf(index.kind).FixedBytes(index, d);
  const int64_t segments = 4 + 2 * (job.tokens() / std::max<int64_t>(1, job.segment_tokens()) + 1);
  head += segments * kSegmentOverhead;
  const int64_t layer = heads * (job.tokens() * row + head) + 4 * d * job.q_heads() + kFileOverhead;
  return layers * layer + 4 * job.tokens() + kFileOverhead;
}

absl::Status CheckRoom(const std::string& folder, int64_t bytes, absl::string_view what) {
  struct statvfs info;
  if (statvfs(folder.c_str(), &info) != 0) return absl::OkStatus();  // a write will tell
  const int64_t available =
      static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
  if (available >= bytes) return absl::OkStatus();
  return MakeDiskFull(absl::StrCat("disk of ", folder, ": ", FormatBytes(available), " free, ",
                                   what, " needs ", FormatBytes(bytes)));
}

absl::Status PublishStaged(v1::Manifest& job, const Staging& staging,
                           const std::vector<TokenId>& tokens, kvstore::Store& store) {
  std::vector<std::string> files;
  ASSIGN_OR_RETURN(const kvstore::ContextId id, kvstore::ContextIdOf(job));
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::SstWriter> sst,
                   kvstore::SstWriter::Create(staging.ContextSstPath()));
  const absl::string_view bytes = BytesOf(tokens);
  const size_t segment_bytes = static_cast<size_t>(kvstore::kTokenIdsPerSegment) * sizeof(TokenId);
  for (size_t at = 0, segment = 0; at < bytes.size(); at += segment_bytes, ++segment) {
    kvstore::SegmentKey key;
    key.context = id;
    key.kind = kvstore::Kind::kTokenIds;
    key.segment = static_cast<uint32_t>(segment);
    RETURN_IF_ERROR(sst->Add(key, std::string(bytes.substr(at, segment_bytes)),
                             static_cast<uint8_t>(DType::kI32)));
  }
  RETURN_IF_ERROR(sst->Finish());
  files.push_back(staging.ContextSstPath());
  for (Layer layer(0); layer.value() < static_cast<int32_t>(job.layers()); layer = layer.next()) {
    ASSIGN_OR_RETURN(const v1::Manifest fragment, staging.ReadFragment(layer));
    job.MergeFrom(fragment);
    for (std::string& path : staging.SstPaths(layer)) files.push_back(std::move(path));
  }
  job.set_created_unix_s(absl::ToUnixSeconds(absl::Now()));
  RETURN_IF_ERROR(store.Publish(job, files));
  return staging.Remove();
}

}  // namespace carrel::prefill
