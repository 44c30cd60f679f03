// The bytes of a store: SST files, segments, manifests, index blobs, summaries, drift, sampled queries. CRCs
// are no authentication: where one stands in the way of mutation, the target puts the right one in.
#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/dtype.h"
#include "common/thread_pool.h"
#include "google/protobuf/stubs/logging.h"
#include "kvstore/engine/index_cache.h"
#include "kvstore/engine/layer_loader.h"
#include "kvstore/engine/open_context.h"
#include "kvstore/engine/resident_budget.h"
#include "kvstore/engine/validate.h"
#include "kvstore/format/keys.h"
#include "kvstore/format/manifest.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/format/segment.h"
#include "kvstore/index/index.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/index_test_util.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/sst_blocks.h"
#include "kvstore/storage/store.h"
#include "tests/fuzz/target.h"

namespace carrel::fuzz {
namespace {

using namespace carrel::kvstore;  // NOLINT: all of this file is about it

// Protobuf writes a line about every string that is no UTF-8.
[[maybe_unused]] const bool quiet = (google::protobuf::SetLogHandler(nullptr), true);

const ContextId kContext = *ContextId::FromBytes("\x80 sixteen bytes ");
constexpr int64_t kRows = 96, kDim = 16, kGroup = 2;

template <typename T>
void Put(std::string& bytes, size_t offset, T value) {
  if (bytes.size() >= offset + sizeof(value))
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
}

const KeySet& Keys() {
  static const KeySet keys = [] {
    std::mt19937_64 rng(7);
    return MakeKeys(rng, kRows, kDim);
  }();
  return keys;
}

// Index blobs: the first byte says of which kind, the rest is the blob.
struct KindUnderTest {
  IndexParams params;
  size_t rows_crc_offset;
  int64_t checked_rows;
};

const std::vector<KindUnderTest>& Kinds() {
  static const std::vector<KindUnderTest> kinds = {
      {{.kind = IndexKind::kHnsw, .m = 4, .ef_construction = 16}, 36, 64},
      {{.kind = IndexKind::kIvf, .ivf_lists = 6}, 28, 64},
      {{.kind = IndexKind::kCode, .code_bits = 64}, 28, 8},
      {{.kind = IndexKind::kInt8}, 20, 8},
      {{.kind = IndexKind::kGraph, .m = 4}, 36, 64},
  };
  return kinds;
}

void SearchAll(const Index& index) {
  std::vector<float> queries(static_cast<size_t>(kGroup * kDim));
  for (size_t i = 0; i < queries.size(); ++i) queries[i] = 0.25f * static_cast<float>(i % 7) - 0.5f;
  SearchScratch scratch;
  for (const RowRange zone : {RowRange{0, kRows}, RowRange{4, kRows - 9}}) {
    for (const int64_t top_k : {int64_t{1}, int64_t{9}, kRows}) {
      for (const int32_t effort : {0, 3}) {
        SearchResult result;
        const auto status = index.Search({.queries = queries.data(),
                                          .group = kGroup,
                                          .scale = 0.25f,
                                          .zone = zone,
                                          .top_k = std::min(top_k, zone.rows()),
                                          .effort = effort},
                                         scratch, result);
        if (!status.ok()) continue;
        for (const Position id : result.ids) CARREL_FUZZ_CHECK(id >= zone.begin && id < zone.end);
      }
    }
  }
}

void RunIndex(absl::string_view bytes) {
  if (bytes.empty()) return;
  const KindUnderTest& kind = Kinds()[static_cast<unsigned char>(bytes[0]) % Kinds().size()];
  std::string blob(bytes.substr(1));
  static const std::vector<uint32_t> crcs = [] {
    std::vector<uint32_t> all;
    for (const KindUnderTest& each : Kinds()) {
      uint32_t crc = 0;
      for (int64_t i = 0; i < each.checked_rows; ++i) {
        const uint16_t* row = Keys().Row(i * kRows / each.checked_rows);
        crc = ExtendCrc32c(crc, {reinterpret_cast<const char*>(row), kDim * 2});
      }
      all.push_back(crc);
    }
    return all;
  }();
  Put(blob, kind.rows_crc_offset, crcs[static_cast<unsigned char>(bytes[0]) % Kinds().size()]);
  if (blob.size() >= 64) Put(blob, 60, Crc32c(absl::string_view(blob).substr(0, 60)));
  const auto index = OpenIndex(kind.params, Blob(std::move(blob)), Keys().AsRows());
  if (index.ok()) SearchAll(**index);
}

std::vector<std::string> IndexSeeds() {
  SampledQueries sampled{
      .group = kGroup, .head_dim = kDim, .positions = {20, 40, 60, 80, 95}, .queries = {}};
  std::mt19937_64 rng(3);
  for (size_t i = 0; i < sampled.positions.size(); ++i) {
    const std::vector<float> queries = MakeQueries(rng, Keys(), kGroup);
    sampled.queries.insert(sampled.queries.end(), queries.begin(), queries.end());
  }
  std::vector<std::string> seeds;
  for (size_t i = 0; i < Kinds().size(); ++i) {
    const auto blob = BuildIndex(Kinds()[i].params, Keys().AsRows(), &sampled);
    CARREL_FUZZ_CHECK(blob.ok());
    CARREL_FUZZ_CHECK(OpenIndex(Kinds()[i].params, Blob(*blob), Keys().AsRows()).ok());
    seeds.push_back(static_cast<char>(i) + *blob);
  }
  return seeds;
}

CARREL_FUZZ_TARGET(index, RunIndex, IndexSeeds);

void RunSummaries(absl::string_view bytes) {
  std::string blob(bytes);
  uint32_t head_dim = 0;
  if (blob.size() >= 64) std::memcpy(&head_dim, blob.data() + 16, 4);
  if (blob.size() >= 64 + 4 * static_cast<size_t>(head_dim)) {
    const std::string covered = blob.substr(0, 60) + blob.substr(64, size_t{4} * head_dim);
    Put(blob, 60, Crc32c(covered));
  }
  const auto summaries = Summaries::Open(Blob(std::move(blob)), kRows, kDim);
  if (!summaries.ok()) return;
  CARREL_FUZZ_CHECK(summaries->rows() == kRows && summaries->head_dim() == kDim);
  const std::vector<float> queries(static_cast<size_t>(kGroup * kDim), 0.125f);
  std::vector<float> out(queries.size()), lse(kGroup);
  const Rows values = Keys().AsRows();
  EstimateScratch scratch;
  (void)EstimateRest(*summaries, values,
                     {.queries = queries.data(),
                      .group = kGroup,
                      .scale = 0.25f,
                      .zone = {4, kRows - 4},
                      .selected = {},
                      .out = out.data(),
                      .lse = lse.data()},
                     scratch);
}

std::vector<std::string> SummariesSeeds() {
  const auto blob = BuildSummaries(8, Keys().AsRows(), Keys().AsRows(), nullptr);
  CARREL_FUZZ_CHECK(blob.ok());
  return {*blob};
}

CARREL_FUZZ_TARGET(summaries, RunSummaries, SummariesSeeds);

void RunSampledQueries(absl::string_view bytes) {
  const auto sampled = DecodeSampledQueries(bytes);
  if (!sampled.ok()) return;
  const auto again = EncodeSampledQueries(*sampled);
  CARREL_FUZZ_CHECK(again.ok() && *again == bytes);
}

std::vector<std::string> SampledQueriesSeeds() {
  const auto bytes = EncodeSampledQueries(
      {.group = 2, .head_dim = 3, .positions = {1, 5}, .queries = std::vector<float>(12, 0.5f)});
  CARREL_FUZZ_CHECK(bytes.ok());
  return {*bytes};
}

CARREL_FUZZ_TARGET(sampled_queries, RunSampledQueries, SampledQueriesSeeds);

// One value under a key, its last CRC made right: chunk table, lengths and payload are the input's.
const std::string& ValueKey() {
  static const std::string key = EncodeKey({kContext, 0, Kind::kKeyRows, KvHead(0), 0});
  return key;
}

void RunSegment(absl::string_view bytes) {
  // A copy of exactly these bytes: reading behind them is noticed.
  const std::unique_ptr<char[]> exact(new char[bytes.size() + 1]);
  std::memcpy(exact.get(), bytes.data(), bytes.size());
  const auto view = SegmentView::Open(ValueKey(), absl::string_view(exact.get(), bytes.size()));
  if (!view.ok()) return;
  const auto payload = static_cast<int64_t>((*view)->payload().size());
  CARREL_FUZZ_CHECK(payload <= static_cast<int64_t>(bytes.size()));
  (void)(*view)->Verify(0, payload);
  CARREL_FUZZ_CHECK(!(*view)->Verify(0, payload + 1).ok());
}

std::vector<std::string> SegmentSeeds() {
  return {EncodeSegment(ValueKey(), "", kDTypeBytes),
          EncodeSegment(ValueKey(), std::string(5000, 'p'), 1)};
}

CARREL_FUZZ_TARGET(segment, RunSegment, SegmentSeeds);

void RunSst(absl::string_view bytes) {
  const auto check = [&](const SstEntries& found) {
    for (const SstEntry& entry : found.entries) {
      CARREL_FUZZ_CHECK(entry.value.data() >= bytes.data() &&
                        entry.value.data() + entry.value.size() <= bytes.data() + bytes.size());
      CARREL_FUZZ_CHECK(entry.key.size() <= static_cast<size_t>(kKeyBytes));
    }
  };
  check(WalkToKey(bytes, ValueKey()));
  check(WalkToOffset(bytes, bytes.size()));
  check(WalkToOffset(bytes, bytes.size() / 2));
}

std::vector<std::string> SstSeeds() {
  // Data blocks as sst_blocks.h has them.
  std::string blocks;
  for (uint32_t segment = 0; segment < 3; ++segment) {
    const std::string key = EncodeKey({kContext, 0, Kind::kKeyRows, KvHead(0), segment});
    const std::string value = EncodeSegment(key, std::string(40, 'v'), 1);
    blocks +=
        std::string({'\0', static_cast<char>(key.size() + 8), static_cast<char>(value.size())}) +
        key;
    blocks += std::string({1, 0, 0, 0, 0, 0, 0, 0}) + value;
    blocks += std::string({0, 0, 0, 0, 1, 0, 0, 0, 0}) + "crc!";
  }
  return {blocks};
}

CARREL_FUZZ_TARGET(sst, RunSst, SstSeeds);

// A context whose manifest is the input, and whose layers have drift and sampled queries of any bytes.
class HostileContext : public StoredContext {
 public:
  HostileContext(v1::Manifest manifest, std::string payload)
      : manifest_(std::move(manifest)), payload_(std::move(payload)) {}
  const v1::Manifest& manifest() const override { return manifest_; }
  absl::StatusOr<std::shared_ptr<const PinnedSegment>> Segment(int32_t, Kind kind, KvHead,
                                                               uint32_t segment) const override {
    if ((kind != Kind::kQueryDrift && kind != Kind::kSampledQueries) || segment != 0) {
      return absl::NotFoundError("no such segment");
    }
    return std::make_shared<OneSegment>(payload_);
  }
  absl::StatusOr<uint32_t> SegmentCount(int32_t, Kind kind, KvHead) const override {
    return kind == Kind::kQueryDrift || kind == Kind::kSampledQueries ? 1u : 0u;
  }

 private:
  struct OneSegment : PinnedSegment {
    explicit OneSegment(const std::string& bytes) : bytes(bytes) {}
    absl::string_view payload() const override { return bytes; }
    uint8_t dtype() const override { return static_cast<uint8_t>(DType::kF32); }
    absl::Status Verify(int64_t, int64_t) const override { return absl::OkStatus(); }
    bool fully_verified() const override { return true; }
    const std::string bytes;
  };
  const v1::Manifest manifest_;
  const std::string payload_;
};

void RunManifest(absl::string_view bytes) {
  // The first two bytes are the length of what stands where drift and sampled queries are.
  if (bytes.size() < 2) return;
  const size_t want =
      static_cast<unsigned char>(bytes[0]) + 256u * static_cast<unsigned char>(bytes[1]);
  const std::string payload(bytes.substr(2, want));
  v1::Manifest manifest;
  const absl::string_view rest = bytes.substr(std::min(bytes.size(), 2 + payload.size()));
  if (!manifest.ParseFromArray(rest.data(), static_cast<int>(rest.size()))) return;
  (void)SegmentDigests::Of(manifest);
  if (!CheckManifest(manifest).ok()) return;  // as the store does
  const auto stored = std::make_shared<const HostileContext>(manifest, payload);
  static auto* indexes = new IndexCache(1 << 20);
  static auto* budget = new ResidentBudget(int64_t{1} << 40);
  static auto* loader = new LayerLoader(budget);
  const auto context = OpenContext::Create(stored, indexes, budget, loader);
  if (!context.ok()) return;
  const AttentionShape& shape = (*context)->shape();
  (void)ZoneOf(**context, 4, 60);
  (void)(*context)->Head(Layer(shape.layers - 1), KvHead(shape.kv_heads - 1));
  (void)(*context)->CheckSummaries();
  if (shape.layers > 256) return;  // the rest is of each layer
  (void)(*context)->ReadDrift();
  (void)ReadSampledQueries(*stored, Layer(0), KvHead(0));
}

std::vector<std::string> ManifestSeeds() {
  v1::Manifest m;
  m.set_format_version(kManifestFormatVersion);
  m.set_name("report");
  m.set_context_id(kContext.Bytes());
  m.set_tokens(700);
  m.set_layers(2);
  m.set_q_heads(4);
  m.set_kv_heads(2);
  m.set_head_dim(4);
  m.set_kv_dtype("bf16");
  m.set_key_position("after_rope");
  m.set_segment_tokens(128);
  m.set_sampled_queries(2);
  m.mutable_index()->set_kind("hnsw");
  m.mutable_index()->set_m(16);
  m.mutable_index()->set_ef_construction(24);
  v1::LayerSizes& sizes = *m.add_layer_sizes();
  sizes.set_layer(1);
  sizes.set_query_drift_bytes(64);
  v1::Manifest own = m;  // an index per head
  own.mutable_index()->set_kind("auto");
  for (uint32_t i = 0; i < 4; ++i) {
    v1::HeadIndex& head = *own.add_head_indexes();
    head.set_layer(i / 2);
    head.set_kv_head(i % 2);
    head.mutable_index()->set_kind("flat");
  }
  const std::string drift(64, '\0');
  std::vector<std::string> seeds;
  for (const v1::Manifest& manifest : {m, own}) {
    seeds.push_back(std::string({64, 0}) + drift + manifest.SerializeAsString());
  }
  return seeds;
}

CARREL_FUZZ_TARGET(manifest, RunManifest, ManifestSeeds);

}  // namespace
}  // namespace carrel::fuzz
