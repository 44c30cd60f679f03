// Questions of the demo model alone, as whoever has one asks them. Contexts, chats and sources: library/api/library_test.cc.
#include "serving/engine.h"

#include "common/test_folders.h"
#include "common/test_util.h"

namespace carrel::serving {
namespace {

using testing::SizeIs;

std::unique_ptr<Engine> Started() {
  static const auto model =
      *library::LoadedModel::Load(SourceFolder() + "/models/demo", "", /*threads=*/2);
  auto engine = Engine::Start({}, model, nullptr);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

AnswerJob Question(Engine& engine, const std::string& text, int64_t max_tokens = 12) {
  const auto prompt = engine.Encode({.text = text}, "", "");
  EXPECT_TRUE(prompt.ok()) << prompt.status();
  AnswerJob job;
  job.prompt = prompt->tokens;
  job.max_tokens = max_tokens;
  return job;
}

TEST(EngineTest, Answer_HasTheTextThatWasTold_AndItsTokens) {
  const auto engine = Started();
  AnswerJob job = Question(*engine, "Who");
  std::string told;
  job.on_text = [&](const std::string& piece) {
    told += piece;
    return true;
  };
  const auto answer = engine->Answer(std::move(job));
  CARREL_ASSERT_OK(answer.status());
  EXPECT_EQ(answer->text, told);
  EXPECT_EQ(*engine->checkpoint().tokenizer->Decode(answer->result.ids, true), told);
  EXPECT_THAT(answer->result.ids, SizeIs(12));
  EXPECT_TRUE(answer->at_max_tokens);
  EXPECT_FALSE(answer->left);
}

TEST(EngineTest, Answer_EndsBeforeAStopText) {
  const auto engine = Started();
  const auto whole = engine->Answer(Question(*engine, "Who"));
  CARREL_ASSERT_OK(whole.status());
  const std::string stop = whole->text.substr(whole->text.size() / 2, 3);
  AnswerJob job = Question(*engine, "Who");
  job.stop = {stop};
  const auto ended = engine->Answer(std::move(job));
  CARREL_ASSERT_OK(ended.status());
  EXPECT_EQ(ended->text, whole->text.substr(0, whole->text.find(stop)));
  EXPECT_EQ(ended->result.stop, decoder::StopReason::kEos);
  EXPECT_FALSE(ended->at_max_tokens);
  EXPECT_LE(ended->result.ids.size(), whole->result.ids.size());
}

TEST(EngineTest, Answer_GoesOnWithItsConversation_UnlessItBeginsAnew) {
  const auto engine = Started();
  const auto first = engine->Answer(Question(*engine, "Who has the badge"));
  CARREL_ASSERT_OK(first.status());
  const std::string next = "Who has the badge" + first->text + ". And who";
  const auto turn = engine->Answer(Question(*engine, next));
  CARREL_ASSERT_OK(turn.status());
  EXPECT_GT(turn->resumed_tokens, 0);
  AnswerJob anew = Question(*engine, next + " else");
  anew.resume = false;
  const auto answer = engine->Answer(std::move(anew));
  CARREL_ASSERT_OK(answer.status());
  EXPECT_EQ(answer->resumed_tokens, 0);
  const auto after = engine->Answer(Question(*engine, next + " else, and"));
  CARREL_ASSERT_OK(after.status());
  EXPECT_EQ(after->resumed_tokens, 0) << "nothing was kept of one that began anew";
}

TEST(EngineTest, Answer_GivesLogitsOfEveryPosition_WhereTheyAreKept) {
  const auto engine = Started();
  AnswerJob job = Question(*engine, "Who has", 3);
  const size_t prompt = job.prompt.size();
  job.keep_logits = job.ignore_eos = true;
  const auto answer = engine->Answer(std::move(job));
  CARREL_ASSERT_OK(answer.status());
  EXPECT_THAT(answer->result.logits,
              SizeIs((prompt + 2) * static_cast<size_t>(engine->checkpoint().config.vocab_size)));
}

TEST(EngineTest, Statistics_AreThoseOfAllDecoders) {
  const auto engine = Started();
  CARREL_EXPECT_OK(engine->Open("", "", 2).status());
  CARREL_EXPECT_OK(engine->Answer(Question(*engine, "Who", 4)).status());
  const int64_t once = engine->statistics().layers[0].tokens;
  EXPECT_GT(once, 0);
  CARREL_EXPECT_OK(engine->Answer(Question(*engine, "Who", 4)).status());  // of the other one
  EXPECT_EQ(engine->statistics().layers[0].tokens, 2 * once);
}

TEST(EngineTest, WithoutAStore_ThereIsNoContext) {
  const auto engine = Started();
  EXPECT_EQ(engine->Find("novel").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine->documents(), nullptr);
}

}  // namespace
}  // namespace carrel::serving
