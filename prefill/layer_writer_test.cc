#include "prefill/layer_writer.h"

#include <filesystem>
#include <new>

#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/storage/store.h"
#include "prefill/job.h"

namespace carrel::prefill {
namespace {

constexpr AttentionShape kShape = {.layers = 9, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
constexpr int64_t kTokens = 300;

LayerRows RandomLayer(int32_t layer) {
  std::mt19937_64 rng(static_cast<uint64_t>(layer));
  LayerRows rows;
  rows.layer = Layer(layer);
  rows.sample_positions = SamplePositions(kTokens, 10);
  for (int32_t head = 0; head < kShape.kv_heads; ++head) {
    for (std::vector<RowArray>* heads : {&rows.k, &rows.v}) {
      RowArray& values = heads->emplace_back(static_cast<size_t>(kTokens * kShape.head_dim));
      FloatToBf16(RandomNormal(rng, kTokens * kShape.head_dim), values.data());
    }
    rows.queries.push_back(RandomNormal(rng, 10 * kShape.group() * kShape.head_dim));
  }
  if (layer > 0) rows.query_drift = RandomNormal(rng, kShape.q_heads * kShape.head_dim);
  return rows;
}

const kvstore::ContextId kId = kvstore::ContextId::Random();

absl::StatusOr<Staging> WriteLayers(const std::string& folder, int32_t first, int writers,
                                    int row_files = 0, int last_row_files = 0) {
  auto staging = Staging::Open(folder, "job");
  if (!staging.ok()) return staging;
  ThreadPool pool(2);
  LayerWriter writer(&*staging, kId, kShape, 128, {}, std::nullopt, 0, &pool,
                     {.statistics_samples = 4,
                      .writers = writers,
                      .row_files = row_files,
                      .last_row_files = last_row_files});
  for (int32_t layer = first; layer < kShape.layers; ++layer) {
    CARREL_EXPECT_OK(writer.Submit(RandomLayer(layer)));
    EXPECT_LE(writer.written(), layer + 1);
  }
  CARREL_EXPECT_OK(writer.Finish());
  EXPECT_EQ(writer.written(), kShape.layers);
  return staging;
}

TEST(LayerWriterTest, AnyWriters_SameBytes) {
  const std::string folder = FreshTempDir();
  const auto one = WriteLayers(folder + "/one", 0, 1);
  const auto four = WriteLayers(folder + "/four", 0, 4);
  CARREL_ASSERT_OK(one);
  CARREL_ASSERT_OK(four);
  EXPECT_EQ(four->FinishedLayers(kShape.layers), kShape.layers);
  for (Layer layer(0); layer.value() < kShape.layers; layer = layer.next()) {
    const auto a = ReadFile(one->folder() + absl::StrCat("/layer-000", layer.value()));
    const auto b = ReadFile(four->folder() + absl::StrCat("/layer-000", layer.value()));
    CARREL_ASSERT_OK(a);
    CARREL_ASSERT_OK(b);
    EXPECT_EQ(*a, *b) << "fragment of layer " << layer;
    EXPECT_EQ(std::filesystem::file_size(one->SstPath(layer)),
              std::filesystem::file_size(four->SstPath(layer)));
  }
}

// The rows of a published context, layer by layer, K before V, head by head.
std::vector<std::string> PublishedRows(const std::string& folder, const Staging& staging) {
  std::vector<std::string> rows;
  const auto store = kvstore::Store::Open(folder, kvstore::StoreMode::kReadWrite);
  CARREL_EXPECT_OK(store);
  v1::Manifest job;
  job.set_format_version(kvstore::kManifestFormatVersion);
  job.set_name("doc");
  job.set_context_id(kId.Bytes());
  job.set_segment_tokens(128);
  job.set_tokens(kTokens);
  job.set_layers(kShape.layers);
  job.set_kv_heads(kShape.kv_heads);
  job.set_q_heads(kShape.q_heads);
  job.set_head_dim(kShape.head_dim);
  CARREL_EXPECT_OK(PublishStaged(job, staging, std::vector<TokenId>(kTokens), **store));
  const auto context = (*store)->OpenContext("doc");
  CARREL_EXPECT_OK(context);
  if (!context.ok()) return rows;
  for (int32_t layer = 0; layer < kShape.layers; ++layer) {
    for (const auto kind : {kvstore::Kind::kKeyRows, kvstore::Kind::kValueRows}) {
      for (int32_t head = 0; head < kShape.kv_heads; ++head) {
        for (uint32_t i = 0; i < (kTokens + 127) / 128; ++i) {
          const auto segment = (*context)->Segment(layer, kind, KvHead(head), i);
          CARREL_EXPECT_OK(segment);
          if (segment.ok())
            rows.emplace_back((*segment)->payload().data(), (*segment)->payload().size());
        }
      }
    }
  }
  return rows;
}

TEST(LayerWriterTest, FilesPerLayer_StoreTheSameRows) {
  const std::string folder = FreshTempDir();
  const auto one = WriteLayers(folder + "/one", 0, 1, 0);
  const auto five = WriteLayers(folder + "/five", 0, 2, 4, 2);
  CARREL_ASSERT_OK(one);
  CARREL_ASSERT_OK(five);
  EXPECT_EQ(one->SstPaths(Layer(3)).size(), 1u);
  EXPECT_EQ(five->SstPaths(Layer(3)).size(), 5u);
  EXPECT_EQ(five->SstPaths(Layer(kShape.layers - 1)).size(), 3u);
  const auto fragment = [](const Staging& staging) {
    return ReadFile(staging.folder() + "/layer-0003").value_or("");
  };
  EXPECT_EQ(fragment(*one), fragment(*five));
  const std::vector<std::string> rows = PublishedRows(folder + "/one", *one);
  EXPECT_EQ(rows.size(), size_t{kShape.layers} * 2 * kShape.kv_heads * 3);
  EXPECT_TRUE(rows == PublishedRows(folder + "/five", *five));
}

TEST(LayerWriterTest, ResumedJob_CountsFromItsFirstLayer) {
  const auto staging = WriteLayers(FreshTempDir(), 4, 3);
  CARREL_ASSERT_OK(staging);
  EXPECT_EQ(staging->FinishedLayers(kShape.layers), 0);  // layers 0 .. 3 were another run's
}

// Memory that ends where a layer is written, say, is the error of who submitted it.
TEST(LayerWriterTest, WhatAWriterThrows_IsTheJobsError) {
  const auto staging = Staging::Open(FreshTempDir(), "job");
  CARREL_ASSERT_OK(staging);
  ThreadPool pool(2);
  for (const int writers : {1, 2}) {
    LayerWriter writer(&*staging, kId, kShape, 128, {}, std::nullopt, 0, &pool,
                       {.statistics_samples = 4,
                        .writers = writers,
                        .still_right = []() -> absl::Status { throw std::bad_alloc(); }});
    absl::Status status = writer.Submit(RandomLayer(0));
    if (status.ok()) status = writer.Finish();
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, "out of memory"));
  }
}

TEST(LayerWriterTest, FolderGone_FirstFailureStopsIt) {
  auto staging = Staging::Open(FreshTempDir(), "job");
  CARREL_ASSERT_OK(staging);
  CARREL_ASSERT_OK(staging->Remove());
  ThreadPool pool(0);
  LayerWriter writer(&*staging, kId, kShape, 128, {}, std::nullopt, 0, &pool,
                     {.statistics_samples = 4, .writers = 2});
  absl::Status status;
  for (int32_t layer = 0; layer < kShape.layers && status.ok(); ++layer)
    status = writer.Submit(RandomLayer(layer));
  EXPECT_FALSE(writer.Finish().ok());
}

}  // namespace
}  // namespace carrel::prefill
