#include "bench/retrieval/cold.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/storage/store.h"

namespace carrel::bench {
namespace {

namespace fs = std::filesystem;
using kvstore::Kind;
using kvstore::StoredContext;

// The segments of one context, with the index of another.
class Overlay : public StoredContext {
 public:
  Overlay(std::shared_ptr<const StoredContext> rows, std::shared_ptr<const StoredContext> blobs)
      : rows_(std::move(rows)), blobs_(std::move(blobs)) {}
  const v1::Manifest& manifest() const override { return rows_->manifest(); }
  absl::StatusOr<std::shared_ptr<const kvstore::PinnedSegment>> Segment(
      int32_t layer, Kind kind, KvHead kv_head, uint32_t segment) const override {
    return Of(kind).Segment(layer, kind, kv_head, segment);
  }
  absl::StatusOr<uint32_t> SegmentCount(int32_t layer, Kind kind, KvHead kv_head) const override {
    return Of(kind).SegmentCount(layer, kind, kv_head);
  }

 private:
  const StoredContext& Of(Kind kind) const { return kind == Kind::kIndex ? *blobs_ : *rows_; }
  const std::shared_ptr<const StoredContext> rows_, blobs_;
};

struct Pages {
  int64_t resident = 0, all = 0;
};

// Drops a file's pages from the page cache and counts those that stay.
void Drop(const fs::path& path, Pages& pages) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  (void)fdatasync(fd);
  (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  std::error_code error;
  const auto bytes = static_cast<size_t>(fs::file_size(path, error));
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (!error && bytes > 0) {
    void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) {
      std::vector<unsigned char> resident((bytes + page - 1) / page);
      if (mincore(mapped, bytes, resident.data()) == 0) {
        pages.all += static_cast<int64_t>(resident.size());
        for (const unsigned char byte : resident) pages.resident += byte & 1;
      }
      munmap(mapped, bytes);
    }
  }
  close(fd);
}

void DropFolder(const std::string& folder, Pages& pages) {
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(folder, error)) {
    if (entry.is_regular_file() && entry.path().extension() == ".sst") Drop(entry.path(), pages);
  }
}

std::string BlobFolder(const std::string& scratch) { return scratch + "/blobs"; }

absl::StatusOr<double> FirstToken(const ColdCase& c, const std::string& scratch,
                                  const std::string& name, const kvstore::IndexParams& params,
                                  int64_t top_k, ThreadPool& pool) {
  const absl::Time start = absl::Now();
  ASSIGN_OR_RETURN(const auto store,
                   kvstore::Store::Open(c.store_folder, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(std::shared_ptr<const StoredContext> context, store->OpenContext(c.name));
  std::unique_ptr<kvstore::Store> blob_store;
  if (params.kind != kvstore::IndexKind::kFlat) {
    ASSIGN_OR_RETURN(blob_store,
                     kvstore::Store::Open(BlobFolder(scratch), kvstore::StoreMode::kReadOnly));
    ASSIGN_OR_RETURN(auto blobs, blob_store->OpenContext(name));
    context = std::make_shared<Overlay>(std::move(context), std::move(blobs));
  }
  const double open_ms = absl::ToDoubleMilliseconds(absl::Now() - start);
  std::vector<absl::Status> statuses(c.heads.size());
  const absl::Time search_start = absl::Now();
  pool.ParallelFor(static_cast<int64_t>(c.heads.size()), [&](int64_t i) {
    statuses[i] = [&]() -> absl::Status {
      const auto& [layer, kv_head] = c.heads[i];
      ASSIGN_OR_RETURN(const kvstore::Rows keys, kvstore::Rows::OpenKeys(*context, layer, kv_head));
      kvstore::Blob blob;
      if (params.kind != kvstore::IndexKind::kFlat) {
        ASSIGN_OR_RETURN(blob,
                         kvstore::Blob::Open(*context, layer, kvstore::Kind::kIndex, kv_head));
      }
      ASSIGN_OR_RETURN(const auto index, kvstore::OpenIndex(params, std::move(blob), keys));
      kvstore::SearchScratch search_scratch;
      kvstore::SearchResult result;
      return index->Search({.queries = c.queries[i].data(),
                            .group = c.shape.group(),
                            .scale = c.scale,
                            .zone = c.zone,
                            .top_k = top_k},
                           search_scratch, result);
    }();
  });
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  return open_ms + c.times * absl::ToDoubleMilliseconds(absl::Now() - search_start);
}

}  // namespace

ColdCase MakeCold(const Case& c, const std::string& store_folder) {
  ColdCase cold{store_folder, c.name, c.shape, c.zone, c.scale, c.times(), {}, {}};
  for (const HeadCase& head : c.heads) {
    cold.heads.emplace_back(head.layer, head.kv_head);
    cold.queries.push_back(head.queries[0]);
  }
  return cold;
}

absl::Status StoreBlobs(const ColdCase& c, const std::string& scratch, const std::string& name,
                        const std::vector<std::string>& blobs) {
  const std::string folder = BlobFolder(scratch);
  std::error_code error;
  fs::create_directories(folder, error);
  ASSIGN_OR_RETURN(const auto store, kvstore::Store::Open(folder, kvstore::StoreMode::kReadWrite));
  const absl::Status deleted = store->Delete(name);  // of an earlier run
  if (!deleted.ok() && !absl::IsNotFound(deleted)) return deleted;
  const kvstore::ContextId id = kvstore::ContextId::Random();
  const std::string path = folder + "/new.sst";
  ASSIGN_OR_RETURN(auto sst, kvstore::SstWriter::Create(path));
  for (size_t i = 0; i < blobs.size(); ++i) {  // heads ascend by layer and head
    for (size_t at = 0, chunk = 0; at < blobs[i].size(); at += kvstore::kIndexChunkBytes, ++chunk) {
      kvstore::SegmentKey key{id, c.heads[i].first.value(), Kind::kIndex, c.heads[i].second,
                              static_cast<uint32_t>(chunk)};
      RETURN_IF_ERROR(
          sst->Add(key, blobs[i].substr(at, kvstore::kIndexChunkBytes), kvstore::kDTypeBytes));
    }
  }
  RETURN_IF_ERROR(sst->Finish());
  v1::Manifest manifest;
  manifest.set_format_version(kvstore::kManifestFormatVersion);
  manifest.set_name(name);
  manifest.set_context_id(id.Bytes());
  manifest.set_tokens(c.zone.end + kLocal);
  manifest.set_layers(c.shape.layers);
  manifest.set_q_heads(c.shape.q_heads);
  manifest.set_kv_heads(c.shape.kv_heads);
  manifest.set_head_dim(c.shape.head_dim);
  manifest.set_kv_dtype("bf16");
  manifest.set_segment_tokens(kvstore::kDefaultSegmentTokens);
  return store->Publish(manifest, {path});
}

absl::StatusOr<ColdResult> MeasureCold(const ColdCase& c, const std::string& scratch,
                                       const std::string& name, const kvstore::IndexParams& params,
                                       int64_t top_k, ThreadPool& pool) {
  constexpr int kTimes = 3;
  std::vector<double> ms;
  ColdResult result;
  for (int i = 0; i < kTimes; ++i) {
    Pages pages;
    DropFolder(c.store_folder, pages);
    DropFolder(BlobFolder(scratch), pages);
    if (pages.all > 0) {
      result.resident = std::max(
          result.resident, static_cast<double>(pages.resident) / static_cast<double>(pages.all));
    }
    ASSIGN_OR_RETURN(ms.emplace_back(), FirstToken(c, scratch, name, params, top_k, pool));
  }
  std::sort(ms.begin(), ms.end());
  result.ms = ms[kTimes / 2];
  return result;
}

}  // namespace carrel::bench
