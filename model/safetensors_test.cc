#include "model/safetensors.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <utility>

#include "common/file.h"
#include "common/test_util.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;

std::string Framed(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header + data;
}

json Entry(const char* dtype, std::vector<int64_t> shape, int64_t begin, int64_t end) {
  return {{"dtype", dtype}, {"shape", std::move(shape)}, {"data_offsets", {begin, end}}};
}

std::string WriteBytes(const std::string& name, const std::string& bytes) {
  const std::string path = FreshTempDir() + "/" + name;
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

absl::StatusOr<Safetensors> OpenBytes(const std::string& bytes) {
  return Safetensors::OpenFile(WriteBytes("t.safetensors", bytes));
}

NamedTensor Named(const std::string& name, DType dtype, std::vector<int64_t> shape,
                  absl::string_view bytes) {
  return {name, {dtype, std::move(shape), bytes}};
}

// What a reader would do with an accepted file.
int64_t TouchAll(const Safetensors& file) {
  int64_t sum = 0;
  for (const auto& [name, view] : file.tensors()) {
    int64_t elements = 1;
    for (int64_t extent : view.shape) elements *= extent;
    EXPECT_EQ(elements, view.elements()) << name;
    for (char c : view.bytes) sum += c;
  }
  return sum;
}

TEST(SafetensorsTest, EveryDtypeAndShape_RoundTrips) {
  const std::string path = FreshTempDir() + "/a.safetensors";
  std::string data(64, '\0');
  std::iota(data.begin(), data.end(), 1);
  const absl::string_view bytes = data;
  CARREL_ASSERT_OK(
      WriteSafetensors(path, {Named("b", DType::kF32, {2, 3}, bytes.substr(0, 24)),
                              Named("a \"quoted\" \n name", DType::kBf16, {3}, bytes.substr(0, 6)),
                              Named("scalar", DType::kI64, {}, bytes.substr(8, 8)),
                              Named("empty", DType::kF16, {0, 5}, bytes.substr(0, 0)),
                              Named("ids", DType::kI32, {4}, bytes.substr(1, 16)),
                              Named("half", DType::kF16, {1, 1, 1}, bytes.substr(0, 2))}));
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
  const auto file = Safetensors::OpenFile(path);
  CARREL_ASSERT_OK(file);
  EXPECT_EQ(file->tensors().size(), 6u);
  const auto b = file->Get("b");
  CARREL_ASSERT_OK(b);
  EXPECT_EQ(b->dtype, DType::kF32);
  EXPECT_THAT(b->shape, ElementsAre(2, 3));
  EXPECT_EQ(b->elements(), 6);
  EXPECT_EQ(b->bytes, bytes.substr(0, 24));
  EXPECT_EQ(file->Get("ids")->bytes, bytes.substr(1, 16));
  EXPECT_EQ(file->Get("scalar")->elements(), 1);
  EXPECT_EQ(file->Get("empty")->elements(), 0);
  EXPECT_TRUE(file->Has("a \"quoted\" \n name"));
  EXPECT_FALSE(file->Has("c"));
  EXPECT_THAT(file->Get("c"), StatusIs(absl::StatusCode::kNotFound, "no tensor \"c\" among the 6"));
}

TEST(SafetensorsTest, NoTensors_IsAFile) {
  const auto file = OpenBytes(Framed(R"({"__metadata__": {"format": "pt"}})", ""));
  CARREL_ASSERT_OK(file);
  EXPECT_TRUE(file->tensors().empty());
}

TEST(SafetensorsTest, TrailingSpacesInHeader_AreAllowed) {
  const json header = {{"a", Entry("F32", {1}, 0, 4)}};
  CARREL_EXPECT_OK(OpenBytes(Framed(header.dump() + "     ", "abcd")));
}

TEST(SafetensorsTest, EachMalformation_IsRefusedNamingFileAndTensor) {
  const std::string d8(8, 'x');
  struct Case {
    std::string bytes;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"", "truncated: 0 bytes"},
      {"1234567", "truncated: 7 bytes"},
      {Framed("{}", "").substr(0, 9), "truncated: the header takes 2 bytes and only 1 follow"},
      {std::string(16, '\xff'), "header length 18446744073709551615 exceeds 100000000"},
      {Framed("", ""), "header: not valid JSON"},
      {Framed("[]", ""), "header: a JSON array where an object"},
      {Framed("{\"a\":", ""), "header: not valid JSON at byte"},
      {Framed("{\"\xff\":1}", ""), "header: not valid JSON at byte"},
      {Framed(std::string(200000, '['), ""), "header: JSON nests deeper than 64 levels"},
      {Framed(json{{"__metadata__", 3}}.dump(), ""), "__metadata__ is not an object"},
      {Framed(json{{"a", 1}}.dump(), ""), "tensor \"a\": its header entry is not an object"},
      {Framed(json{{"a", {{"shape", {1}}}}}.dump(), ""), "tensor \"a\": dtype is not a string"},
      {Framed(json{{"a", Entry("F8_E4M3", {8}, 0, 8)}}.dump(), d8),
       "tensor \"a\": dtype \"F8_E4M3\" is not one of"},
      {Framed(json{{"a", {{"dtype", "F32"}}}}.dump(), ""), "tensor \"a\": shape is not an array"},
      {Framed(json{{"a", Entry("F32", {-2}, 0, 8)}}.dump(), d8), "tensor \"a\": shape holds"},
      {Framed(json{{"a", {{"dtype", "F32"}, {"shape", {1.5}}, {"data_offsets", {0, 8}}}}}.dump(),
              d8),
       "tensor \"a\": shape holds something that is not a count"},
      {Framed(json{{"a", Entry("F32", {1, 1, 1, 1, 1, 1, 1, 1, 2}, 0, 8)}}.dump(), d8),
       "tensor \"a\": shape has 9 dimensions"},
      {Framed(json{{"a", {{"dtype", "F32"}, {"shape", {2}}}}}.dump(), d8),
       "tensor \"a\": data_offsets is not an array"},
      {Framed(json{{"a", {{"dtype", "F32"}, {"shape", {2}}, {"data_offsets", {8}}}}}.dump(), d8),
       "tensor \"a\": data_offsets [8] is not [begin, end]"},
      {Framed(json{{"a", Entry("F32", {2}, 8, 0)}}.dump(), d8), "data_offsets [8, 0] is not"},
      {Framed(json{{"a",
                    {{"dtype", "F32"},
                     {"shape", {2}},
                     {"data_offsets", std::vector<int64_t>(100000, 7)}}}}
                  .dump(),
              d8),
       "data_offsets [7, 7, 7, 7, 7, 7, 7, 7, ..] is not"},
      {Framed(json{{"a", Entry("F32", {3}, 0, 8)}}.dump(), d8),
       "tensor \"a\": data_offsets [0, 8) span 8 bytes, F32 [3] takes 12"},
      {Framed(json{{"a", Entry("F32", {int64_t{1} << 62, 4}, 0, 8)}}.dump(), d8),
       "takes more than fits 63 bits"},
      {Framed(json{{"a", Entry("F32", {int64_t{1} << 62, int64_t{1} << 62, 0}, 0, 0)}}.dump(), ""),
       "takes more than fits 63 bits"},
      {Framed(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})", d8),
       "tensor \"a\": shape holds something that is not a count"},
      {Framed(json{{"a", Entry("F32", {4}, 0, 16)}}.dump(), d8),
       "tensor \"a\": truncated: it ends at byte 16 of the data and the file holds 8"},
      {Framed(json{{"a", Entry("F32", {2}, 0, 8)}, {"b", Entry("F32", {1}, 4, 8)}}.dump(), d8),
       "tensor \"b\": begins at byte 4 and overlaps \"a\", which ends at 8"},
      {Framed(json{{"b", Entry("F32", {1}, 4, 8)}}.dump(), d8),
       "tensor \"b\": begins at byte 4; the 4 bytes before it belong to no tensor"},
      {Framed(json{{"a", Entry("F32", {1}, 0, 4)}}.dump(), d8),
       "4 bytes after the last tensor, \"a\", belong to no tensor"},
      {Framed(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
              R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
              d8),
       "header: the name \"a\" occurs twice"},
  };
  for (const Case& c : cases) {
    const auto file = OpenBytes(c.bytes);
    EXPECT_THAT(file, StatusIs(absl::StatusCode::kInvalidArgument, c.message));
    EXPECT_THAT(file, StatusIs(absl::StatusCode::kInvalidArgument, "t.safetensors: "));
  }
}

TEST(SafetensorsTest, AbsentFile_IsNotFound) {
  EXPECT_THAT(Safetensors::OpenFile(FreshTempDir() + "/none.safetensors"),
              StatusIs(absl::StatusCode::kNotFound, "none.safetensors"));
}

// A valid file of several tensors.
std::string ValidFile() {
  const std::string path = FreshTempDir() + "/valid.safetensors";
  const std::string data(48, 'd');
  const absl::string_view bytes = data;
  EXPECT_EQ(absl::OkStatus(),
            WriteSafetensors(path, {Named("model.a", DType::kF32, {2, 3}, bytes.substr(0, 24)),
                                    Named("model.b", DType::kBf16, {4, 2}, bytes.substr(0, 16)),
                                    Named("model.c", DType::kI64, {1}, bytes.substr(0, 8))}));
  return *ReadFile(path);
}

TEST(SafetensorsTest, EveryTruncation_IsRefused) {
  const std::string valid = ValidFile();
  const std::string path = WriteBytes("t.safetensors", valid);
  CARREL_ASSERT_OK(Safetensors::OpenFile(path));
  for (int64_t size = static_cast<int64_t>(valid.size()) - 1; size >= 0; --size) {
    std::filesystem::resize_file(path, size);
    EXPECT_THAT(Safetensors::OpenFile(path),
                StatusIs(absl::StatusCode::kInvalidArgument, "t.safetensors"))
        << size;
  }
}

TEST(SafetensorsTest, RandomMutations_AreReadableOrRefused) {
  std::mt19937_64 rng(TestSeed());
  const std::string valid = ValidFile();
  const std::string folder = FreshTempDir();
  const std::string digits = "0123456789-[]{}\",:.";
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string mutated = valid;
    const int changes = 1 + static_cast<int>(rng() % 4);
    for (int i = 0; i < changes; ++i) {
      const size_t at = rng() % mutated.size();
      switch (rng() % 5) {
        case 0:
          mutated[at] = static_cast<char>(rng());
          break;
        case 1:
          mutated[at] ^= static_cast<char>(1 << (rng() % 8));
          break;
        case 2:
          mutated[at] = digits[rng() % digits.size()];
          break;
        case 3:
          mutated.insert(at, 1 + rng() % 3, digits[rng() % digits.size()]);
          break;
        case 4:
          mutated.erase(at, 1 + rng() % 3);
          break;
      }
      if (mutated.empty()) mutated = "x";
    }
    const std::string path = folder + "/m.safetensors";
    std::ofstream(path, std::ios::binary | std::ios::trunc) << mutated;
    const auto file = Safetensors::OpenFile(path);
    if (file.ok()) {
      TouchAll(*file);
    } else {
      ++refused;
      EXPECT_THAT(file, StatusIs(absl::StatusCode::kInvalidArgument, "m.safetensors"));
    }
  }
  EXPECT_GT(refused, 0);
}

class ShardedModelTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = FreshTempDir();
    WriteShard("s1.safetensors", {"a", "b"});
    WriteShard("s2.safetensors", {"c"});
    index_ = {{"weight_map",
               {{"a", "s1.safetensors"}, {"b", "s1.safetensors"}, {"c", "s2.safetensors"}}}};
    WriteIndex(index_.dump());
  }

  void WriteShard(const std::string& name, const std::vector<std::string>& tensors) {
    std::vector<NamedTensor> named;
    for (const std::string& tensor : tensors) {
      named.push_back(Named(tensor, DType::kF32, {1}, "1234"));
    }
    CARREL_ASSERT_OK(WriteSafetensors(folder_ + "/" + name, named));
  }
  void WriteIndex(const std::string& text) {
    CARREL_ASSERT_OK(WriteFileAtomically(folder_ + "/model.safetensors.index.json", text));
  }

  std::string folder_;
  json index_;
};

TEST_F(ShardedModelTest, Complete_HoldsTheUnion) {
  const auto model = Safetensors::OpenModel(folder_);
  CARREL_ASSERT_OK(model);
  EXPECT_EQ(model->tensors().size(), 3u);
  EXPECT_EQ(model->Get("c")->bytes, "1234");
}

TEST_F(ShardedModelTest, SingleFileBesideIndex_IsPreferred) {
  WriteShard("model.safetensors", {"only"});
  const auto model = Safetensors::OpenModel(folder_);
  CARREL_ASSERT_OK(model);
  EXPECT_TRUE(model->Has("only"));
  EXPECT_FALSE(model->Has("a"));
}

TEST_F(ShardedModelTest, EachDisagreement_IsNamed) {
  using Code = absl::StatusCode;
  std::filesystem::remove(folder_ + "/s2.safetensors");
  EXPECT_THAT(Safetensors::OpenModel(folder_),
              StatusIs(Code::kInvalidArgument,
                       "index.json: names the shard \"s2.safetensors\", which is missing"));
  WriteShard("s2.safetensors", {"d"});
  EXPECT_THAT(Safetensors::OpenModel(folder_),
              StatusIs(Code::kInvalidArgument, "tensor \"d\": the index does not name it"));
  WriteShard("s2.safetensors", {"b", "c"});
  EXPECT_THAT(Safetensors::OpenModel(folder_),
              StatusIs(Code::kInvalidArgument,
                       "s2.safetensors: tensor \"b\": the index places it in \"s1.safetensors\""));
  WriteShard("s2.safetensors", {});
  EXPECT_THAT(Safetensors::OpenModel(folder_),
              StatusIs(Code::kInvalidArgument,
                       "tensor \"c\": the shard \"s2.safetensors\" does not hold it"));
  std::filesystem::resize_file(folder_ + "/s2.safetensors", 5);
  EXPECT_THAT(Safetensors::OpenModel(folder_),
              StatusIs(Code::kInvalidArgument, "s2.safetensors: truncated"));
}

TEST_F(ShardedModelTest, MalformedIndex_IsNamed) {
  using Code = absl::StatusCode;
  for (const char* text : {"", "[]", "{}", "{\"weight_map\": []}", "{\"weight_map\": {}}",
                           "{\"weight_map\": {\"a\": 1}}"}) {
    WriteIndex(text);
    EXPECT_THAT(Safetensors::OpenModel(folder_), StatusIs(Code::kInvalidArgument, "index.json"))
        << text;
  }
  for (const char* shard :
       {"../s1.safetensors", "/etc/passwd", "", "..", "s1.safetensors\\u0000"}) {
    WriteIndex(absl::StrCat("{\"weight_map\": {\"a\": \"", shard, "\"}}"));
    EXPECT_THAT(Safetensors::OpenModel(folder_),
                StatusIs(Code::kInvalidArgument, "is not a plain file name"))
        << shard;
  }
}

TEST(SafetensorsTest, EmptyModelFolder_IsNotFound) {
  EXPECT_THAT(Safetensors::OpenModel(FreshTempDir()),
              StatusIs(absl::StatusCode::kNotFound,
                       "neither model.safetensors nor model.safetensors.index.json is there"));
}

TEST(WriteSafetensorsTest, BadInput_IsRefusedAndLeavesTheOldFile) {
  const std::string path = FreshTempDir() + "/a.safetensors";
  CARREL_ASSERT_OK(WriteSafetensors(path, {Named("old", DType::kF32, {1}, "1234")}));
  using Code = absl::StatusCode;
  EXPECT_THAT(WriteSafetensors(path, {Named("x", DType::kF32, {2}, "1234")}),
              StatusIs(Code::kInvalidArgument, "tensor \"x\" has 4 bytes, its shape takes 8"));
  EXPECT_THAT(WriteSafetensors(path, {Named("x", DType::kF32, {int64_t{1} << 62, 4}, "1234")}),
              StatusIs(Code::kInvalidArgument, "no valid number"));
  EXPECT_THAT(WriteSafetensors(path, {Named("x", DType::kF32, {1}, "1234"),
                                      Named("x", DType::kF32, {1}, "1234")}),
              StatusIs(Code::kInvalidArgument, "reserved or used twice"));
  EXPECT_THAT(WriteSafetensors(path, {Named("__metadata__", DType::kF32, {1}, "1234")}),
              StatusIs(Code::kInvalidArgument, "reserved or used twice"));
  EXPECT_THAT(WriteSafetensors("/nonexistent/folder/x", {}),
              StatusIs(Code::kNotFound, "/nonexistent/folder/x"));
  const auto file = Safetensors::OpenFile(path);
  CARREL_ASSERT_OK(file);
  EXPECT_TRUE(file->Has("old"));
}

}  // namespace
}  // namespace carrel::model
