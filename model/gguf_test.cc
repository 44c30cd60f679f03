#include "model/gguf.h"

#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "common/test_util.h"
#include "model/gguf_writer.h"

namespace carrel::model {
namespace {

using kernels::GgufType;
using testing::ElementsAre;
using Code = absl::StatusCode;

constexpr uint32_t kArray = static_cast<uint32_t>(GgufValueType::kArray);
constexpr uint32_t kU8 = static_cast<uint32_t>(GgufValueType::kU8);

std::string Data(size_t bytes) {
  std::string data(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 7 + 1);
  return data;
}

GgufWriter Sample() {
  GgufWriter writer;
  writer.String("general.architecture", "llama").U32("a.count", 7).F32("a.eps", 1e-5f);
  writer.Strings("a.words", {"one", "", "three"}).Ints("a.ints", {1, -2, 3});
  writer.Floats("a.floats", {0.5f, -1.0f});
  writer.Tensor("x", GgufType::kF32, {2, 3}, Data(24));
  writer.Tensor("y.weight", GgufType::kQ8_0, {2, 64}, Data(136));
  return writer;
}

absl::StatusOr<std::shared_ptr<const Gguf>> OpenBytes(const std::string& bytes) {
  return Gguf::Open(WriteGguf(bytes));
}

absl::Status OpenError(const GgufWriter& writer) { return OpenBytes(writer.Bytes()).status(); }

// Everything a reader could do with an accepted file.
int64_t TouchAll(const Gguf& gguf) {
  int64_t sum = 0;
  for (const auto& [key, value] : gguf.metadata().values()) {
    for (const char c : value.bytes) sum += c;
    const GgufMetadata& m = gguf.metadata();
    sum += m.IntOr(key, 0, INT64_MIN, INT64_MAX).value_or(1);
    sum += m.BoolOr(key, false).value_or(true);
    sum += m.NumberOr(key, 0, -1e300, 1e300).ok();
    if (const auto text = m.String(key); text.ok()) sum += static_cast<int64_t>(text->size());
    if (const auto texts = m.Strings(key); texts.ok()) {
      for (const absl::string_view text : *texts) {
        for (const char c : text) sum += c;
      }
    }
    if (const auto ints = m.Ints(key); ints.ok()) sum += static_cast<int64_t>(ints->size());
    if (const auto floats = m.Floats(key); floats.ok()) sum += static_cast<int64_t>(floats->size());
    sum += static_cast<int64_t>(m.Invalid(key, "").message().size());
  }
  for (const auto& [name, tensor] : gguf.tensors()) {
    EXPECT_EQ(static_cast<int64_t>(tensor.bytes.size()),
              kernels::GgufBytes(tensor.type, tensor.elements()));
    for (const char c : tensor.bytes) sum += c;
  }
  return sum;
}

TEST(GgufTest, MetadataAndTensors_AreThoseWritten) {
  const auto gguf = OpenBytes(Sample().Bytes());
  CARREL_ASSERT_OK(gguf);
  const GgufMetadata& m = (*gguf)->metadata();
  EXPECT_EQ(*m.String("general.architecture"), "llama");
  EXPECT_EQ(*m.Int("a.count", 0, 10), 7);
  EXPECT_EQ(*m.Number("a.eps", 0, 1), 1e-5);  // not 9.999999747e-06
  EXPECT_THAT(*m.Strings("a.words"), ElementsAre("one", "", "three"));
  EXPECT_THAT(*m.Ints("a.ints"), ElementsAre(1, -2, 3));
  EXPECT_THAT(*m.Floats("a.floats"), ElementsAre(0.5f, -1.0f));
  EXPECT_EQ(*m.IntOr("absent", 5, 0, 9), 5);
  const GgufTensor* x = (*gguf)->Find("x");
  ASSERT_NE(x, nullptr);
  EXPECT_THAT(x->shape, ElementsAre(2, 3));
  EXPECT_EQ(x->bytes, Data(24));
  const GgufTensor* y = (*gguf)->Find("y.weight");
  ASSERT_NE(y, nullptr);
  EXPECT_EQ(y->type, GgufType::kQ8_0);
  EXPECT_EQ(y->bytes, Data(136));
  EXPECT_EQ((*gguf)->Find("z"), nullptr);
}

TEST(GgufTest, NumbersOfEveryType_AreRead) {
  GgufWriter writer;
  writer.Raw("u8", 0, EncodeNumber(uint8_t{200})).Raw("i8", 1, EncodeNumber(int8_t{-3}));
  writer.Raw("u16", 2, EncodeNumber(uint16_t{60000})).Raw("i16", 3, EncodeNumber(int16_t{-4}));
  writer.Raw("u32", 4, EncodeNumber(uint32_t{4000000000})).Raw("i32", 5, EncodeNumber(int32_t{-5}));
  writer.Raw("u64", 10, EncodeNumber(uint64_t{1} << 40)).Raw("i64", 11, EncodeNumber(int64_t{-6}));
  writer.Raw("f64", 12, EncodeNumber(0.1)).Raw("huge", 10, EncodeNumber(~uint64_t{0}));
  writer.Bool("yes", true).Raw("maybe", 7, EncodeNumber(uint8_t{2}));
  const auto gguf = OpenBytes(writer.Bytes());
  CARREL_ASSERT_OK(gguf);
  const GgufMetadata& m = (*gguf)->metadata();
  const auto integer = [&](const char* key) { return *m.Int(key, INT64_MIN, INT64_MAX); };
  EXPECT_EQ(integer("u8"), 200);
  EXPECT_EQ(integer("i8"), -3);
  EXPECT_EQ(integer("u16"), 60000);
  EXPECT_EQ(integer("i16"), -4);
  EXPECT_EQ(integer("u32"), 4000000000);
  EXPECT_EQ(integer("i32"), -5);
  EXPECT_EQ(integer("u64"), int64_t{1} << 40);
  EXPECT_EQ(integer("i64"), -6);
  EXPECT_EQ(*m.Number("f64", 0, 1), 0.1);
  EXPECT_TRUE(*m.BoolOr("yes", false));
  EXPECT_THAT(m.BoolOr("maybe", false), StatusIs(Code::kInvalidArgument, "maybe"));
  EXPECT_THAT(m.Int("huge", 0, INT64_MAX),
              StatusIs(Code::kInvalidArgument, "18446744073709551615"));
}

TEST(GgufTest, WrongTypeOrRange_NamesFileKeyValueAndBound) {
  const std::string path = WriteGguf(Sample().Bytes());
  const auto gguf = Gguf::Open(path);
  CARREL_ASSERT_OK(gguf);
  const GgufMetadata& m = (*gguf)->metadata();
  EXPECT_THAT(m.Int("a.count", 0, 6), StatusIs(Code::kInvalidArgument, path + ": a.count=7"));
  EXPECT_THAT(m.Int("a.count", 0, 6), StatusIs(Code::kInvalidArgument, "[0, 6]"));
  EXPECT_THAT(m.Int("absent", 0, 6), StatusIs(Code::kInvalidArgument, "absent is missing"));
  EXPECT_THAT(m.Int("a.eps", 0, 6), StatusIs(Code::kInvalidArgument, "not an integer"));
  EXPECT_THAT(m.String("a.count"), StatusIs(Code::kInvalidArgument, "not a string"));
  EXPECT_THAT(m.Strings("a.ints"), StatusIs(Code::kInvalidArgument, "strings"));
  EXPECT_THAT(m.Ints("a.words"), StatusIs(Code::kInvalidArgument, "integers"));
  EXPECT_THAT(m.Floats("a.count"), StatusIs(Code::kInvalidArgument, "not an array"));
}

TEST(GgufTest, HeaderThatIsNotOne_IsRefused) {
  EXPECT_THAT(Gguf::Open(FreshTempDir() + "/none.gguf"), StatusIs(Code::kNotFound, "none.gguf"));
  const std::string pipe = FreshTempDir() + "/pipe.gguf";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(Gguf::Open(pipe), StatusIs(Code::kInvalidArgument, "is not a regular file"));
  EXPECT_THAT(OpenBytes(""), StatusIs(Code::kInvalidArgument, "not a GGUF file"));
  EXPECT_THAT(OpenBytes("GGML1234"), StatusIs(Code::kInvalidArgument, "not a GGUF file"));
  EXPECT_THAT(OpenBytes("GGUF"), StatusIs(Code::kInvalidArgument, "truncated"));
  GgufWriter writer = Sample();
  writer.version = 1;
  EXPECT_THAT(OpenError(writer), StatusIs(Code::kInvalidArgument, "version 1 is not read"));
  writer.version = 4;
  EXPECT_THAT(OpenError(writer), StatusIs(Code::kInvalidArgument, "version 4 is not read"));
  writer.version = 0x03000000;
  EXPECT_THAT(OpenError(writer), StatusIs(Code::kInvalidArgument, "big-endian"));
  writer.version = 2;
  CARREL_EXPECT_OK(OpenBytes(writer.Bytes()));
}

TEST(GgufTest, EveryTruncation_IsRefused) {
  const std::string whole = Sample().Bytes();
  // The last tensor's padding may be missing.
  const size_t needed = whole.size() - 24;
  CARREL_EXPECT_OK(OpenBytes(whole.substr(0, needed)));
  for (size_t size = 0; size < needed; size += size < 500 ? 1 : 7) {
    EXPECT_THAT(OpenBytes(whole.substr(0, size)), StatusIs(Code::kInvalidArgument, ""))
        << "cut at " << size << " of " << needed;
  }
}

TEST(GgufTest, CountsBeyondTheFile_AreRefusedBeforeMemoryIsTaken) {
  GgufWriter keys = Sample();
  keys.extra_keys = int64_t{1} << 60;
  EXPECT_THAT(OpenError(keys), StatusIs(Code::kInvalidArgument, "metadata keys do not fit"));
  GgufWriter tensors = Sample();
  tensors.extra_tensors = int64_t{1} << 60;
  EXPECT_THAT(OpenError(tensors), StatusIs(Code::kInvalidArgument, "tensors do not fit"));
  for (const uint32_t element : {0u, 8u, 9u, 12u}) {
    GgufWriter array = Sample();
    array.Raw("long", kArray, EncodeArray(element, uint64_t{1} << 61, ""));
    EXPECT_THAT(OpenError(array), StatusIs(Code::kInvalidArgument, "\"long\": truncated"));
  }
  GgufWriter string = Sample();
  string.Raw("text", 8, EncodeNumber(~uint64_t{0}));
  EXPECT_THAT(OpenError(string), StatusIs(Code::kInvalidArgument, "\"text\""));
}

TEST(GgufTest, KeysThatContradictTheFormat_AreRefused) {
  GgufWriter type = Sample();
  type.Raw("odd", 13, "");
  EXPECT_THAT(OpenError(type), StatusIs(Code::kInvalidArgument, "value type 13 does not exist"));
  GgufWriter element = Sample();
  element.Raw("odd", kArray, EncodeArray(77, 0, ""));
  EXPECT_THAT(OpenError(element), StatusIs(Code::kInvalidArgument, "value type 77"));
  GgufWriter empty = Sample();
  empty.U32("", 1);
  EXPECT_THAT(OpenError(empty), StatusIs(Code::kInvalidArgument, "0 bytes"));
  GgufWriter doubled;
  doubled.U32("ab", 1).U32("ac", 2);
  std::string bytes = doubled.Bytes();
  bytes[bytes.find("ac") + 1] = 'b';
  EXPECT_THAT(OpenBytes(bytes), StatusIs(Code::kInvalidArgument, "\"ab\": occurs twice"));
}

TEST(GgufTest, NestedArrays_AreReadToABound) {
  const auto nested = [](int depth) {
    std::string encoded = EncodeArray(kU8, 1, "x");
    for (int i = 1; i < depth; ++i) encoded = EncodeArray(kArray, 1, encoded);
    return GgufWriter(Sample()).Raw("deep", kArray, encoded);
  };
  CARREL_EXPECT_OK(OpenBytes(nested(4).Bytes()));
  EXPECT_THAT(OpenError(nested(5)), StatusIs(Code::kInvalidArgument, "nested deeper than 4"));
  EXPECT_THAT(OpenError(nested(1000)), StatusIs(Code::kInvalidArgument, "nested deeper"));
}

TEST(GgufTest, TensorsThatContradictTheFormat_AreRefused) {
  const auto with = [](absl::string_view name, uint32_t type, std::vector<int64_t> shape,
                       size_t bytes) {
    return OpenError(GgufWriter(Sample()).Tensor(name, type, std::move(shape), Data(bytes)));
  };
  EXPECT_THAT(with("t", 99, {2}, 8), StatusIs(Code::kInvalidArgument, "type 99 does not exist"));
  EXPECT_THAT(with("t", 16, {256}, 66), StatusIs(Code::kUnimplemented, "type IQ2_XXS"));
  EXPECT_THAT(with("t", 0, {}, 4), StatusIs(Code::kInvalidArgument, "0 dimensions"));
  EXPECT_THAT(with("t", 0, {1, 1, 1, 1, 1}, 4), StatusIs(Code::kInvalidArgument, "5 dimensions"));
  EXPECT_THAT(with("t", 0, {2, 0}, 0), StatusIs(Code::kInvalidArgument, "[2, 0] is empty"));
  EXPECT_THAT(with("t", 0, {2, -1}, 0), StatusIs(Code::kInvalidArgument, "[2, -1]"));
  const int64_t huge = int64_t{1} << 62;
  EXPECT_THAT(with("t", 0, {huge, huge}, 0), StatusIs(Code::kInvalidArgument, "beyond 63 bits"));
  EXPECT_THAT(with("t", 0, {huge}, 0), StatusIs(Code::kInvalidArgument, "beyond 63 bits"));
  EXPECT_THAT(with("t", 0, {1 << 20}, 4), StatusIs(Code::kInvalidArgument, "truncated: it takes"));
  EXPECT_THAT(with("t", 8, {33}, 34), StatusIs(Code::kInvalidArgument, "whole blocks of 32"));
  EXPECT_THAT(with("x", 0, {1}, 4), StatusIs(Code::kInvalidArgument, "\"x\": occurs twice"));
  EXPECT_THAT(with("", 0, {1}, 4), StatusIs(Code::kInvalidArgument, "0 bytes, not 1 to"));
  EXPECT_THAT(with(std::string(2000, 'n'), 0, {1}, 4),
              StatusIs(Code::kInvalidArgument, "2000 bytes"));
}

TEST(GgufTest, OffsetsAndAlignment_AreChecked) {
  GgufWriter shifted = Sample();
  shifted.offset_shift = 32;
  EXPECT_THAT(OpenError(shifted), StatusIs(Code::kInvalidArgument, "not at 0"));
  shifted.offset_shift = -1;
  EXPECT_THAT(OpenError(shifted), StatusIs(Code::kInvalidArgument, "18446744073709551615"));
  for (const uint32_t alignment : {1u, 8u, 4096u}) {
    GgufWriter aligned = Sample();
    aligned.U32("general.alignment", alignment).alignment = alignment;
    const auto gguf = OpenBytes(aligned.Bytes());
    CARREL_ASSERT_OK(gguf);
    EXPECT_EQ((*gguf)->Find("y.weight")->bytes, Data(136));
  }
  for (const uint32_t alignment : {0u, 3u, 33u, 1u << 31}) {
    GgufWriter odd = Sample();
    odd.U32("general.alignment", alignment);
    EXPECT_THAT(OpenError(odd), StatusIs(Code::kInvalidArgument, "general.alignment"));
  }
}

// Three parts with a tensor each.
class SplitGgufTest : public testing::Test {
 protected:
  SplitGgufTest() : folder_(FreshTempDir()) {
    for (int i = 0; i < 3; ++i) Write(i, Part(i));
  }
  static GgufWriter Part(int i) {
    GgufWriter writer;
    writer.U16("split.no", static_cast<uint16_t>(i)).U16("split.count", 3);
    writer.Raw("split.tensors.count", 5, EncodeNumber(int32_t{3}));
    if (i == 0) writer.String("general.architecture", "llama");
    writer.Tensor(absl::StrCat("t", i), GgufType::kF32, {1}, EncodeNumber(1.0f + i));
    return writer;
  }
  std::string Path(int i, const char* stem = "m") const {
    return absl::StrCat(folder_, "/", stem, "-0000", i + 1, "-of-00003.gguf");
  }
  void Write(int i, const GgufWriter& writer) const {
    std::ofstream(Path(i), std::ios::binary) << writer.Bytes();
  }
  const std::string folder_;
};

TEST_F(SplitGgufTest, AnyPart_OpensTheWhole) {
  for (int named = 0; named < 3; ++named) {
    const auto gguf = Gguf::Open(Path(named));
    CARREL_ASSERT_OK(gguf);
    EXPECT_EQ((*gguf)->tensors().size(), 3u);
    EXPECT_EQ(*(*gguf)->metadata().String("general.architecture"), "llama");
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ((*gguf)->Find(absl::StrCat("t", i))->bytes, EncodeNumber(1.0f + i));
    }
  }
}

TEST_F(SplitGgufTest, PartsThatDisagree_AreRefused) {
  Write(1, Part(2));
  EXPECT_THAT(Gguf::Open(Path(0)), StatusIs(Code::kInvalidArgument, "split.no=2 is not 1"));
  Write(1, GgufWriter(Part(1)).U16("split.count", 4));
  EXPECT_THAT(Gguf::Open(Path(0)), StatusIs(Code::kInvalidArgument, "split.count=4 is not 3"));
  Write(1, GgufWriter(Part(1)).Drop("split.no"));
  EXPECT_THAT(Gguf::Open(Path(0)), StatusIs(Code::kInvalidArgument, "split.no is missing"));
  Write(1, GgufWriter(Part(1)).DropTensor("t1").Tensor("t0", GgufType::kF32, {1}, "abcd"));
  EXPECT_THAT(Gguf::Open(Path(0)), StatusIs(Code::kInvalidArgument, "an earlier part has it too"));
  Write(1, GgufWriter(Part(1)).DropTensor("t1"));
  EXPECT_THAT(Gguf::Open(Path(0)), StatusIs(Code::kInvalidArgument, "the parts hold 2"));
  std::filesystem::remove(Path(1));
  EXPECT_THAT(Gguf::Open(Path(0)), StatusIs(Code::kInvalidArgument, "00002-of-00003.gguf is miss"));
}

TEST_F(SplitGgufTest, NameWithoutNumbers_IsRefused) {
  std::filesystem::rename(Path(0), folder_ + "/whole.gguf");
  EXPECT_THAT(Gguf::Open(folder_ + "/whole.gguf"),
              StatusIs(Code::kInvalidArgument, "-NNNNN-of-NNNNN.gguf"));
}

TEST(GgufTest, RandomMutations_AreReadOrRefused) {
  std::mt19937_64 rng(TestSeed());
  const std::string whole = Sample().Bytes();
  const size_t header = whole.size() - 192;
  const std::string path = WriteGguf(whole);
  int opened = 0, refused = 0;
  for (int round = 0; round < 1000; ++round) {
    const std::string bytes = Mutate(whole, header, rng);
    std::ofstream(path, std::ios::binary) << bytes;
    const auto gguf = Gguf::Open(path);
    if (gguf.ok()) {
      ++opened;
      TouchAll(**gguf);
      continue;
    }
    ++refused;
    const Code code = gguf.status().code();
    EXPECT_TRUE(code == Code::kInvalidArgument || code == Code::kUnimplemented) << gguf.status();
    EXPECT_LT(gguf.status().message().size(), 2000u);
  }
  EXPECT_GT(opened, 30);
  EXPECT_GT(refused, 100);
}

TEST(GgufTest, Path_IsAFileOrEndsInGguf) {
  const std::string folder = FreshTempDir() + "/folder.gguf";
  std::filesystem::create_directory(folder);
  EXPECT_FALSE(IsGgufPath(folder));
  EXPECT_FALSE(IsGgufPath(folder + "/nothing"));
  EXPECT_TRUE(IsGgufPath(folder + "/nothing.gguf"));
  EXPECT_TRUE(IsGgufPath(WriteGguf("x", "blob")));
}

}  // namespace
}  // namespace carrel::model
