// A prompt that says the document's last tokens anew: with every row, decoding is dense attention over the
// tokens of the whole text, whatever is given up, in turn, together, and when a sequence is gone on with.
#include <cstring>
#include <random>

#include "common/test_folders.h"
#include "common/test_util.h"
#include "decoder/generation.h"
#include "kvstore/index/index.h"
#include "tests/tensor_file.h"
#include "tests/world.h"

namespace carrel {
namespace {

using decoder::GenerateOptions;
using testing_world::EmbeddedDecoder;
using Tokens = std::vector<TokenId>;

class SeamTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = FreshTempDir();
    const auto tokens = testing_world::DocumentTokens("registry-512");
    CARREL_ASSERT_OK(tokens);
    document_ = *tokens;
    kvstore::IndexParams index;
    index.kind = kvstore::IndexKind::kFlat;
    CARREL_ASSERT_OK(testing_world::PrefillContext(folder_, "doc", document_, index, 256));
    CARREL_ASSERT_OK(testing_world::PrefillContext(folder_, "short", Short(), index, 256));
    auto dense = EmbeddedDecoder::ModelOnly();
    CARREL_ASSERT_OK(dense);
    dense_ = *std::move(dense);
  }

  Tokens Short() const { return {document_.begin(), document_.begin() + 20}; }

  static decoder::RetrievalConfig EveryRow() {
    decoder::RetrievalConfig config;
    config.selection = select::All();
    config.dense_layers = 0;
    return config;
  }

  Tokens RandomPrompt() {
    Tokens prompt(3 + rng_() % 12);
    for (TokenId& token : prompt) token = static_cast<TokenId>(100 + rng_() % 1900);
    return prompt;
  }

  static GenerateOptions WithLogits(int64_t give_up) {
    GenerateOptions options;
    options.give_up = give_up;
    options.keep_logits = true;
    options.max_tokens = 3;
    options.ignore_eos = true;
    return options;
  }

  // Of the prompt, and of what is generated, behind the document without its last tokens.
  std::vector<float> Dense(const Tokens& document, int64_t give_up, const Tokens& prompt) {
    Tokens whole(document.begin(), document.end() - give_up);
    const size_t before = whole.size() * kVocabulary;
    whole.insert(whole.end(), prompt.begin(), prompt.end());
    const auto result = (*dense_)->Generate(whole, WithLogits(0));
    CARREL_CHECK(result.ok());
    return {result->logits.begin() + static_cast<std::ptrdiff_t>(before), result->logits.end()};
  }

  static constexpr size_t kVocabulary = 2048;
  std::mt19937_64 rng_{TestSeed()};
  std::string folder_;
  Tokens document_;
  std::unique_ptr<EmbeddedDecoder> dense_;
};

// Rows of a context are rounded to bf16, those of the whole text, read at once, are not.
constexpr double kRounding = 2e-2;

TEST_F(SeamTest, EveryRow_IsDenseAttentionOverTheWholeText) {
  for (const bool host : {false, true}) {
    for (const auto prefetch : {decoder::Prefetch::kOff, decoder::Prefetch::kSpeculative}) {
      if (host && prefetch != decoder::Prefetch::kOff) continue;
      decoder::RetrievalConfig config = EveryRow();
      config.prefetch = prefetch;
      if (host) config.zone = decoder::HostZoneOptions{decoder::UsualSelector(false)};
      auto decoder = EmbeddedDecoder::Open(folder_, "doc", config);
      CARREL_ASSERT_OK(decoder);
      EXPECT_EQ((**decoder)->most_given_up(), decoder::kMostGivenUp);
      for (const int64_t give_up : {0, 1, 32, 0, 7}) {
        SCOPED_TRACE(absl::StrCat("host ", host, " prefetch ", static_cast<int>(prefetch),
                                  " give up ", give_up));
        const Tokens prompt = RandomPrompt();
        const auto result = (**decoder)->Generate(prompt, WithLogits(give_up));
        CARREL_ASSERT_OK(result);
        EXPECT_LE(RelativeError(result->logits, Dense(document_, give_up, prompt)), kRounding);
      }
    }
  }
}

// Layers with a window see rows from before it, for those that are given up at its end.
TEST_F(SeamTest, SlidingWindows_SeeAsFarBackAsTransformersDo) {
  const std::string model = SourceFolder() + "/model/testdata/families/gemma3";
  const auto checkpoint = model::LoadCheckpoint(model, testing_world::Pool());
  CARREL_ASSERT_OK(checkpoint);
  const TensorFile golden = TensorFile::Read(model + "/golden.safetensors");
  const auto numbers = [&](const char* name, auto zero) {
    const absl::string_view bytes = golden.Tensor(name);
    std::vector<decltype(zero)> values(bytes.size() / sizeof(zero));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  };
  const std::vector<int32_t> ids = numbers("input_ids", int32_t{});
  const std::vector<float> all = numbers("logits", float{});
  const auto width = static_cast<size_t>(checkpoint->config.vocab_size);
  for (const int64_t give_up : {1, 6, 32}) {
    const auto end = static_cast<std::ptrdiff_t>(ids.size() * 7 / 10);
    const std::string name = absl::StrCat("d", give_up);
    CARREL_ASSERT_OK(testing_world::PrefillContext(folder_, name, {ids.begin(), ids.begin() + end},
                                                   {}, 65536, model::Device::kCpu, *checkpoint));
    decoder::RetrievalConfig config = EveryRow();
    config.sink = 2;
    config.local = give_up + 2;
    auto decoder = EmbeddedDecoder::Open(folder_, name, config, {}, nullptr, *checkpoint);
    CARREL_ASSERT_OK(decoder);
    GenerateOptions options = WithLogits(give_up);
    options.max_tokens = 1;
    const Tokens prompt(ids.begin() + end - give_up, ids.end());
    const auto result = (**decoder)->Generate(prompt, options);
    CARREL_ASSERT_OK(result);
    ASSERT_EQ(result->logits.size(), prompt.size() * width);
    // The reference has the last tokens' alone.
    const auto tail = static_cast<std::ptrdiff_t>(std::min(result->logits.size(), all.size()));
    const std::vector<float> got(result->logits.end() - tail, result->logits.end());
    const std::vector<float> want(all.end() - tail, all.end());
    EXPECT_LE(RelativeError(got, want), kRounding) << give_up;
  }
}

// What the rounding of rows hides: the numbers are those of a context that ends there, but for the order of sums in
// two prefills of different lengths.
TEST_F(SeamTest, GivenUp_IsAsIfTheContextEndedThere) {
  kvstore::IndexParams index;
  index.kind = kvstore::IndexKind::kFlat;
  for (const int64_t give_up : {1, 9}) {
    const std::string name = absl::StrCat("less", give_up);
    CARREL_ASSERT_OK(testing_world::PrefillContext(
        folder_, name, {document_.begin(), document_.end() - give_up}, index, 256));
    decoder::RetrievalConfig config = EveryRow();
    auto whole = EmbeddedDecoder::Open(folder_, "doc", config);
    CARREL_ASSERT_OK(whole);
    config.local -= give_up;  // the same zone
    auto shorter = EmbeddedDecoder::Open(folder_, name, config);
    CARREL_ASSERT_OK(shorter);
    const Tokens prompt = RandomPrompt();
    const auto got = (**whole)->Generate(prompt, WithLogits(give_up));
    const auto want = (**shorter)->Generate(prompt, WithLogits(0));
    CARREL_ASSERT_OK(got);
    CARREL_ASSERT_OK(want);
    EXPECT_LE(RelativeError(got->logits, want->logits), 1e-5);
    EXPECT_EQ(got->ids, want->ids);
  }
}

TEST_F(SeamTest, AShortDocument_MayBeGivenUpWhole) {
  auto decoder = EmbeddedDecoder::Open(folder_, "short", EveryRow());
  CARREL_ASSERT_OK(decoder);
  EXPECT_EQ((**decoder)->most_given_up(), 20);
  for (const int64_t give_up : {20, 3, 18}) {
    const Tokens prompt = RandomPrompt();
    const auto result = (**decoder)->Generate(prompt, WithLogits(give_up));
    CARREL_ASSERT_OK(result);
    EXPECT_LE(RelativeError(result->logits, Dense(Short(), give_up, prompt)), kRounding);
  }
  EXPECT_THAT((**decoder)->Generate({5}, WithLogits(21)),
              StatusIs(absl::StatusCode::kInvalidArgument, "give_up=21"));
  decoder::RetrievalConfig config = EveryRow();
  config.local = 2;
  auto narrow = EmbeddedDecoder::Open(folder_, "doc", config);
  CARREL_ASSERT_OK(narrow);
  EXPECT_THAT((**narrow)->Generate({5}, WithLogits(3)),
              StatusIs(absl::StatusCode::kInvalidArgument, "not 0 to 2"));
}

TEST_F(SeamTest, DecodersThatGiveUpDifferently_GoTogether) {
  std::vector<std::unique_ptr<EmbeddedDecoder>> decoders;
  std::vector<decoder::Generation> together;
  std::vector<std::vector<float>> alone;
  std::vector<decoder::Generation*> going;
  for (const int64_t give_up : {0, 2, 2, 5}) {
    auto decoder = EmbeddedDecoder::Open(folder_, "doc", EveryRow());
    CARREL_ASSERT_OK(decoder);
    decoders.push_back(*std::move(decoder));
    const Tokens prompt = RandomPrompt();
    const auto result = (*decoders.back())->Generate(prompt, WithLogits(give_up));
    CARREL_ASSERT_OK(result);
    alone.push_back(result->logits);
    auto generation =
        decoder::Generation::Begin(*decoders.back()->operator->(), prompt, WithLogits(give_up));
    CARREL_ASSERT_OK(generation);
    together.push_back(*std::move(generation));
  }
  for (;;) {
    going.clear();
    for (decoder::Generation& one : together) {
      if (!one.done()) going.push_back(&one);
    }
    if (going.empty()) break;
    for (const absl::Status& status : decoder::Generation::Step(going)) {
      CARREL_ASSERT_OK(status);
    }
  }
  for (size_t i = 0; i < together.size(); ++i) {
    EXPECT_TRUE(together[i].TakeResult().logits == alone[i]) << "sequence " << i;
  }
}

// The same tokens behind another part of the document are another sequence.
TEST_F(SeamTest, ASequenceIsGoneOnWithOnlyWhereAsMuchIsGivenUp) {
  auto decoder = EmbeddedDecoder::Open(folder_, "doc", EveryRow());
  CARREL_ASSERT_OK(decoder);
  const Tokens first = RandomPrompt();
  Tokens second = first;
  second.push_back(300);
  GenerateOptions options;
  options.max_tokens = 2;
  options.ignore_eos = true;
  const auto ask = [&](const Tokens& prompt, int64_t give_up, bool resume) {
    options.give_up = give_up;
    options.resume = resume;
    return *(**decoder)->Generate(prompt, options);
  };
  const Tokens want1 = ask(second, 1, false).ids, want4 = ask(second, 4, false).ids;
  ask(first, 4, false);
  EXPECT_EQ(ask(second, 1, true).ids, want1);
  EXPECT_EQ((**decoder)->resumed_tokens(), 0);
  EXPECT_EQ((**decoder)->sequence().given_up(), 1);
  ask(first, 4, false);
  const decoder::SavedSequence kept = (**decoder)->sequence().Save();
  EXPECT_EQ(kept.given_up, 4);
  EXPECT_EQ(ask(second, 4, true).ids, want4);
  EXPECT_EQ((**decoder)->resumed_tokens(), static_cast<int64_t>(first.size()));
  ask(first, 1, false);
  CARREL_ASSERT_OK((**decoder)->sequence().Restore(kept));
  EXPECT_EQ(ask(second, 4, true).ids, want4);
  EXPECT_EQ((**decoder)->resumed_tokens(), static_cast<int64_t>(first.size()));
}

}  // namespace
}  // namespace carrel
