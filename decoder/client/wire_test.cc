#include "decoder/client/wire.h"

#include <cstring>
#include <functional>

#include "carrel/v1/retrieval.pb.h"
#include "common/test_util.h"

namespace carrel::decoder {
namespace {

using absl::StatusCode;

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 2};

template <typename T>
void Set(v1::Tensor::DType dtype, std::vector<int64_t> shape, const std::vector<T>& numbers,
         v1::Tensor& tensor) {
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(numbers.data(), numbers.size() * sizeof(T));
}

TEST(WireTest, FloatsSet_AreChecked) {
  v1::Tensor tensor;
  Set<float>(v1::Tensor::F32, {2, 3}, {1, 2, 3, 4, 5, 6}, tensor);
  CARREL_EXPECT_OK(CheckFloats(tensor, {2, 3}, "x"));
  CARREL_EXPECT_OK(CheckFloats(tensor, {-1, 3}, "x"));
  EXPECT_THAT(
      CheckFloats(tensor, {3, 2}, "scores"),
      StatusIs(StatusCode::kDataLoss, "scores is F32 [2, 3] of 24 bytes, expected F32 [3, 2]"));
  tensor.set_dtype(v1::Tensor::BF16);
  EXPECT_THAT(CheckFloats(tensor, {2, 3}, "k"), StatusIs(StatusCode::kDataLoss, "expected F32"));
}

TEST(WireTest, LyingShapes_AreRefused) {
  v1::Tensor tensor;
  tensor.add_shape(int64_t{1} << 40);
  tensor.add_shape(int64_t{1} << 40);
  EXPECT_THAT(CheckFloats(tensor, {-1, -1}, "x"), StatusIs(StatusCode::kDataLoss, "x is"));
  tensor.clear_shape();
  tensor.add_shape(-1);
  EXPECT_THAT(CheckFloats(tensor, {-1}, "x"), StatusIs(StatusCode::kDataLoss, "x is"));
  tensor.set_shape(0, 2);
  tensor.set_data("1234567");
  EXPECT_THAT(CheckFloats(tensor, {2}, "x"), StatusIs(StatusCode::kDataLoss, "of 7 bytes"));
}

TEST(WireTest, AQuery_SaysAllThatItAsks) {
  retrieval::Query query;
  query.layer = Layer(1);
  query.tokens = 1;
  query.queries = {1, 2, 3, 4, 5, 6, 7, 8};
  query.selection = select::TopK{9, {9, 4}};
  query.want = retrieval::Want::kRows;
  query.speculative = query.measure_mass = true;
  query.effort = 3;
  query.held = {{}, {4, 5, 200}};
  v1::Query wire;
  ToWire(query, kShape, wire);
  EXPECT_EQ(wire.ShortDebugString().substr(0, 9), "layer: 1 ");
  EXPECT_THAT(wire.queries().shape(), testing::ElementsAre(1, 4, 2));
  EXPECT_EQ(wire.queries().data().size(), 32u);
  EXPECT_EQ(wire.select().top_k(), 9);
  EXPECT_THAT(wire.head_top_k(), testing::ElementsAre(9, 4));
  EXPECT_EQ(wire.want(), v1::ROWS);
  EXPECT_TRUE(wire.speculative() && wire.measure_mass() && !wire.estimate());
  EXPECT_EQ(wire.effort(), 3u);
  ASSERT_EQ(wire.held_size(), 1);
  EXPECT_EQ(wire.held(0).kv_head(), 1u);
  EXPECT_THAT(wire.held(0).steps(), testing::ElementsAre(4, 1, 195));
}

// Of two rows, with everything that a head may have.
v1::SessionReply Reply() {
  v1::SessionReply reply;
  reply.set_request_id(7);
  reply.set_last(true);
  v1::HeadResult& head = *reply.mutable_query()->add_heads();
  head.set_token(3);
  head.set_kv_head(1);
  Set<int64_t>(v1::Tensor::I64, {2}, {11, 12}, *head.mutable_ids());
  Set<float>(v1::Tensor::F32, {2, 2}, {1, 2, 3, 4}, *head.mutable_scores());
  Set<uint16_t>(v1::Tensor::BF16, {2, 2}, {1, 2, 3, 4}, *head.mutable_k());
  Set<uint16_t>(v1::Tensor::BF16, {1, 2}, {5, 6}, *head.mutable_v());
  Set<float>(v1::Tensor::F32, {2, 2}, {5, 6, 7, 8}, *head.mutable_out());
  Set<float>(v1::Tensor::F32, {2}, {9, 10}, *head.mutable_lse());
  Set<float>(v1::Tensor::F32, {2}, {-1, -2}, *head.mutable_zone_lse());
  Set<float>(v1::Tensor::F32, {2, 3}, {1, 1, 1, 2, 2, 2}, *head.mutable_rest());
  reply.mutable_query()->mutable_statistics()->set_visited(99);
  return reply;
}

TEST(WireTest, APart_HasTheNumbersOfItsMessageWhereverItGoes) {
  absl::StatusOr<retrieval::Part> read = PartFromWire(Reply(), kShape, "query");
  CARREL_ASSERT_OK(read);
  const retrieval::Part part = *std::move(read);
  EXPECT_TRUE(part.last);
  EXPECT_EQ(part.statistics.visited, 99);
  v1::SessionReply unnamed = Reply();
  unnamed.clear_request_id();
  EXPECT_EQ(part.bytes, static_cast<int64_t>(unnamed.ByteSizeLong()));
  ASSERT_EQ(part.pieces.size(), 1u);
  const retrieval::Piece& piece = part.pieces[0];
  EXPECT_EQ(piece.token, 3);
  EXPECT_EQ(piece.kv_head, KvHead(1));
  EXPECT_THAT(piece.ids, testing::ElementsAre(11, 12));
  EXPECT_THAT(piece.scores, testing::ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(piece.out, testing::ElementsAre(5, 6, 7, 8));
  EXPECT_THAT(piece.lse, testing::ElementsAre(9, 10));
  EXPECT_THAT(piece.zone_lse, testing::ElementsAre(-1, -2));
  EXPECT_THAT(piece.rest, testing::ElementsAre(1, 1, 1, 2, 2, 2));
  ASSERT_EQ(piece.k.size(), 2u);
  ASSERT_EQ(piece.v.size(), 1u);
  EXPECT_EQ(static_cast<const char*>(piece.k[1]) - static_cast<const char*>(piece.k[0]), 4);
  EXPECT_EQ(std::memcmp(piece.k[1], "\3\0\4\0", 4), 0);
  EXPECT_EQ(std::memcmp(piece.v[0], "\5\0\6\0", 4), 0);
}

TEST(WireTest, WrongTensors_AreDataLossThatNamesThem) {
  using Spoil = std::function<void(v1::HeadResult&)>;
  const std::pair<const char*, Spoil> spoils[] = {
      {"ids", [](v1::HeadResult& head) { head.mutable_ids()->mutable_data()->pop_back(); }},
      {"scores", [](v1::HeadResult& head) { head.mutable_scores()->set_shape(1, 3); }},
      {"K rows", [](v1::HeadResult& head) { head.mutable_k()->set_dtype(v1::Tensor::F32); }},
      {"V rows", [](v1::HeadResult& head) { head.mutable_v()->set_shape(0, 2); }},
      {"out", [](v1::HeadResult& head) { head.mutable_out()->mutable_data()->append("x"); }},
      {"lse", [](v1::HeadResult& head) { head.mutable_lse()->add_shape(1); }},
      {"zone_lse", [](v1::HeadResult& head) { head.mutable_zone_lse()->clear_shape(); }},
      {"rest", [](v1::HeadResult& head) { head.mutable_rest()->set_shape(1, 2); }},
  };
  for (const auto& [what, spoil] : spoils) {
    v1::SessionReply reply = Reply();
    spoil(*reply.mutable_query()->mutable_heads(0));
    EXPECT_THAT(PartFromWire(reply, kShape, "query"),
                StatusIs(StatusCode::kDataLoss, absl::StrCat("reply: ", what, " is")));
  }
}

TEST(WireTest, AnError_KeepsItsCode) {
  v1::SessionReply reply;
  reply.mutable_error()->set_code(static_cast<int>(StatusCode::kResourceExhausted));
  reply.mutable_error()->set_message("full");
  EXPECT_THAT(PartFromWire(reply, kShape, "query layer 2"),
              StatusIs(StatusCode::kResourceExhausted, "query layer 2: full"));
  reply.mutable_error()->set_code(0);
  EXPECT_THAT(PartFromWire(reply, kShape, "query"), StatusIs(StatusCode::kUnknown, "full"));
}

}  // namespace
}  // namespace carrel::decoder
