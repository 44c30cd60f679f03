#include "kvstore/storage/store_test_util.h"

#include <algorithm>
#include <filesystem>
#include <random>

#include "common/dtype.h"
#include "common/status.h"
#include "kvstore/format/segment.h"
#include "kvstore/storage/catalog.h"
#include "kvstore/storage/rocks.h"

namespace carrel::kvstore {
namespace {

int64_t SegmentsOf(const TestContextSpec& spec) {
  return (spec.tokens + spec.segment_tokens - 1) / spec.segment_tokens;
}

uint8_t TestDType(Kind kind) {
  return static_cast<uint8_t>(kind == Kind::kTokenIds ? DType::kI32 : DType::kBf16);
}

}  // namespace

v1::Manifest TestManifest(const TestContextSpec& spec, ContextId id) {
  v1::Manifest manifest;
  manifest.set_format_version(kManifestFormatVersion);
  manifest.set_name(spec.name);
  manifest.set_context_id(id.Bytes());
  manifest.set_tokens(spec.tokens);
  manifest.set_layers(static_cast<uint32_t>(spec.layers));
  manifest.set_q_heads(static_cast<uint32_t>(spec.kv_heads * 2));
  manifest.set_kv_heads(static_cast<uint32_t>(spec.kv_heads));
  manifest.set_head_dim(static_cast<uint32_t>(spec.head_dim));
  manifest.set_kv_dtype("bf16");
  manifest.set_key_position("after_rope");
  manifest.set_segment_tokens(spec.segment_tokens);
  manifest.mutable_index()->set_kind("flat");
  return manifest;
}

std::string TestPayload(const TestContextSpec& spec, const SegmentKey& key) {
  const int64_t rows = std::min<int64_t>(spec.segment_tokens,
                                         spec.tokens - int64_t{key.segment} * spec.segment_tokens);
  const int64_t row_bytes = key.kind == Kind::kTokenIds ? 4 : spec.head_dim * 2;
  std::seed_seq seed{spec.seed, uint64_t(key.layer + 1), uint64_t(key.kind),
                     uint64_t(key.kv_head.value()), uint64_t{key.segment}};
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::string payload(static_cast<size_t>(rows * row_bytes), '\0');
  for (size_t at = 0; at < payload.size(); at += 2) {
    const uint16_t value = FloatToBf16(normal(rng));
    std::memcpy(payload.data() + at, &value, 2);
  }
  return payload;
}

std::vector<SegmentKey> TestKeys(const TestContextSpec& spec, ContextId id) {
  std::vector<SegmentKey> keys;
  const auto add = [&](int32_t layer, Kind kind, int32_t head, int64_t segments) {
    for (int64_t segment = 0; segment < segments; ++segment) {
      keys.push_back({id, layer, kind, KvHead(head), static_cast<uint32_t>(segment)});
    }
  };
  add(-1, Kind::kTokenIds, 0, SegmentsOf(spec));
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    for (const Kind kind : {Kind::kKeyRows, Kind::kValueRows}) {
      for (int32_t head = 0; head < spec.kv_heads; ++head) add(layer, kind, head, SegmentsOf(spec));
    }
  }
  return keys;
}

absl::StatusOr<std::vector<std::string>> WriteTestFiles(const TestContextSpec& spec, ContextId id,
                                                        const std::string& folder) {
  std::filesystem::create_directories(folder);
  std::vector<std::string> files;
  std::unique_ptr<SstWriter> writer;
  int32_t layer = -2;
  for (const SegmentKey& key : TestKeys(spec, id)) {
    if (key.layer != layer) {
      if (writer != nullptr) RETURN_IF_ERROR(writer->Finish());
      layer = key.layer;
      files.push_back(absl::StrCat(folder, "/", id.ToString(), "-", layer, ".sst"));
      ASSIGN_OR_RETURN(writer, SstWriter::Create(files.back()));
    }
    RETURN_IF_ERROR(writer->Add(key, TestPayload(spec, key), TestDType(key.kind)));
  }
  RETURN_IF_ERROR(writer->Finish());
  return files;
}

absl::StatusOr<ContextId> PublishTestContext(Store& store, const std::string& folder,
                                             const TestContextSpec& spec) {
  const ContextId id = ContextId::Random();
  ASSIGN_OR_RETURN(const std::vector<std::string> files, WriteTestFiles(spec, id, folder));
  RETURN_IF_ERROR(store.Publish(TestManifest(spec, id), files));
  return id;
}

absl::Status CheckTestContext(const Store& store, const TestContextSpec& spec) {
  ASSIGN_OR_RETURN(const auto context, store.OpenContext(spec.name));
  return CheckTestContext(*context, spec);
}

absl::Status CheckTestContext(const StoredContext& context, const TestContextSpec& spec) {
  v1::Manifest found = context.manifest();
  ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(found));
  found.clear_content_id();
  found.clear_segment_digests();
  v1::Manifest expected = TestManifest(spec, id);
  if (id.is_number()) {
    expected.set_format_version(found.format_version());
    expected.clear_context_id();
    expected.set_number(id.number());
  }
  if (found.SerializeAsString() != expected.SerializeAsString()) {
    return absl::InternalError("another manifest: " + found.ShortDebugString());
  }
  for (const SegmentKey& key : TestKeys(spec, id)) {
    const auto segment = context.Segment(key.layer, key.kind, key.kv_head, key.segment);
    if (absl::IsNotFound(segment.status())) {
      return absl::InternalError(absl::StrCat("missing: ", segment.status().message()));
    }
    RETURN_IF_ERROR(segment.status());
    const absl::string_view payload = (*segment)->payload();
    RETURN_IF_ERROR((*segment)->Verify(0, static_cast<int64_t>(payload.size())));
    if (payload != TestPayload(spec, key) || (*segment)->dtype() != TestDType(key.kind)) {
      return absl::InternalError("other bytes: " + DescribeKey(key));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ContextId> MakeUnbound(const std::string& folder, const std::string& name,
                                      uint32_t version) {
  const std::string scratch = folder + "/unbound";
  std::vector<std::string> paths;
  v1::Manifest manifest;
  ContextId number(1);
  {
    ASSIGN_OR_RETURN(const auto store, Store::Open(folder, StoreMode::kReadWrite));
    ASSIGN_OR_RETURN(manifest, store->GetManifest(name));
    ASSIGN_OR_RETURN(const auto context, store->OpenContext(name));
    ASSIGN_OR_RETURN(const std::vector<v1::Manifest> all, store->List());
    for (const v1::Manifest& other : all) {
      number = std::max(number, ContextId(other.number() + 1));
    }
    std::filesystem::create_directories(scratch);
    std::unique_ptr<SstWriter> writer;
    uint32_t layer = UINT32_MAX;
    for (const v1::SegmentDigests& of_head : manifest.segment_digests()) {
      if (of_head.layer_plus_one() != layer) {
        if (writer != nullptr) RETURN_IF_ERROR(writer->Finish());
        layer = of_head.layer_plus_one();
        paths.push_back(absl::StrCat(scratch, "/", layer, ".sst"));
        ASSIGN_OR_RETURN(writer, SstWriter::Create(paths.back()));
      }
      SegmentKey key{number, static_cast<int32_t>(layer) - 1, static_cast<Kind>(of_head.kind()),
                     KvHead(static_cast<int32_t>(of_head.kv_head())), 0};
      for (; key.segment < of_head.digests().size() / kDigestBytes; ++key.segment) {
        ASSIGN_OR_RETURN(const auto segment,
                         context->Segment(key.layer, key.kind, key.kv_head, key.segment));
        RETURN_IF_ERROR(writer->Add(key, segment->payload(), segment->dtype()));
      }
    }
    RETURN_IF_ERROR(writer->Finish());
    RETURN_IF_ERROR(store->Delete(name));
  }
  manifest.set_format_version(version);
  manifest.set_number(number.number());
  manifest.clear_context_id();
  manifest.clear_content_id();
  manifest.clear_segment_digests();
  ASSIGN_OR_RETURN(const std::unique_ptr<OpenDb> db, OpenRocks(folder, StoreMode::kReadWrite));
  rocksdb::IngestExternalFileOptions move;
  move.move_files = true;
  move.write_global_seqno = false;
  move.allow_global_seqno = false;
  RETURN_IF_ERROR(FromRocks(db->db->IngestExternalFile(db->segments, paths, move), folder));
  const std::string key = ManifestKey(number);
  RETURN_IF_ERROR(
      FromRocks(db->db->Put(rocksdb::WriteOptions(), db->catalog, key,
                            EncodeSegment(key, manifest.SerializeAsString(), kDTypeBytes)),
                folder));
  return number;
}

absl::Status EditManifest(const std::string& folder, const std::string& name,
                          const std::function<void(v1::Manifest&)>& edit) {
  ASSIGN_OR_RETURN(const std::unique_ptr<OpenDb> db, OpenRocks(folder, StoreMode::kReadWrite));
  ASSIGN_OR_RETURN(const std::vector<CatalogEntry> entries, ReadCatalog(*db));
  for (const CatalogEntry& entry : entries) {
    if (entry.name != name) continue;
    RETURN_IF_ERROR(entry.manifest.status());
    v1::Manifest manifest = *entry.manifest;
    edit(manifest);
    v1::CatalogRecord record;
    record.set_name(manifest.name());
    manifest.clear_name();
    manifest.clear_content_id();
    record.set_manifest(manifest.SerializeAsString());
    if (entry.id.is_number()) manifest.set_name(record.name());
    const std::string key = ManifestKey(entry.id);
    const std::string payload =
        entry.id.is_number() ? manifest.SerializeAsString() : record.SerializeAsString();
    return FromRocks(db->db->Put(rocksdb::WriteOptions(), db->catalog, key,
                                 EncodeSegment(key, payload, kDTypeBytes)),
                     folder);
  }
  return absl::NotFoundError(name);
}

}  // namespace carrel::kvstore
