#include "http_api/chat_template.h"

#include <random>

#include "common/test_folders.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "model/tokenizer/tokenizer_test_util.h"

namespace carrel::http_api {
namespace {

using testing::HasSubstr;

constexpr char kChatMl[] =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "| trim + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}";

std::unique_ptr<ChatTemplate> Made(const std::string& jinja) {
  auto chat = ChatTemplate::Create(jinja, "<s>", "</s>");
  EXPECT_TRUE(chat.ok()) << chat.status();
  return *std::move(chat);
}

TEST(ChatTemplateTest, Renders_WithWhatTransformersOffers) {
  EXPECT_EQ(*Made(kChatMl)->Render({{"user", " hi\n"}, {"assistant", "h\xc3\xa9"}}),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nh\xc3\xa9<|im_end|>\n<|im_"
            "start|>assistant\n");
  EXPECT_EQ(*Made("{{ bos_token }}{% for m in messages %}\n  {% if loop.last %}\n{{ m | tojson "
                  "}}{% break %}{% endif %}"
                  "{% endfor %}{{ eos_token }}")
                 ->Render({{"user", "a<b>\"\xc3\xa9"}}),
            "<s>{\"role\": \"user\", \"content\": \"a<b>\\\"\xc3\xa9\"}</s>");
}

TEST(ChatTemplateTest, WhatItRefuses_IsSaidInItsWords_AndItGoesOn) {
  const auto chat =
      Made("{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok");
  const auto refused = chat->Render({{"system", "x"}});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("user first"));
  EXPECT_EQ(*chat->Render({{"user", "x"}}), "ok");
  EXPECT_EQ(ChatTemplate::Create("{% if %}", "", "").status().code(),
            absl::StatusCode::kInvalidArgument);
}

// A GGUF file's template is a stranger's.
TEST(ChatTemplateTest, AHostileTemplate_ReachesNothing_AndEnds) {
  for (const char* hostile :
       {"{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}", "{% include '/etc/passwd' %}", "{{ 'x' * 3000000000 }}",
        "{{ range(100000000) | list }}"}) {
    const auto chat = ChatTemplate::Create(hostile, "", "");
    if (!chat.ok()) continue;
    const auto said = (*chat)->Render({{"user", "x"}});
    EXPECT_FALSE(said.ok()) << hostile << " gave " << said->substr(0, 100);
  }
  const auto endless =
      Made("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}");
  EXPECT_EQ(endless->Render({{"user", "x"}}).status().code(), absl::StatusCode::kDeadlineExceeded);
}

class ChatTokensTest : public testing::Test {
 protected:
  // A byte-level tokenizer with the control tokens of kChatMl.
  void SetUp() override {
    auto checkpoint = model::LoadTokenizer(SourceFolder() + "/models/demo");
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    tokenizer_ = *std::move(checkpoint);
  }
  std::unique_ptr<model::Tokenizer> tokenizer_;
};

int64_t CountOf(const std::vector<TokenId>& ids, TokenId id) {
  return std::count(ids.begin(), ids.end(), id);
}

TEST_F(ChatTokensTest, ATextIsNeverAControlToken) {
  // Some token that is recognised when it is written out.
  TokenId control = -1;
  std::string written;
  for (TokenId id = 0; id < tokenizer_->vocab_size() && control < 0; ++id) {
    const auto hidden = tokenizer_->Decode({id}, true), shown = tokenizer_->Decode({id}, false);
    if (shown.ok() && hidden.ok() && hidden->empty() && shown->size() > 2) {
      control = id;
      written = *shown;
    }
  }
  ASSERT_GE(control, 0) << "the demo tokenizer has no control token";
  const auto chat = Made("{% for m in messages %}" + written +
                         "{{ m.role }}: {{ m.content | trim }}\n{% endfor %}" + written);
  std::mt19937 random(testing::UnitTest::GetInstance()->random_seed());
  const std::string pieces[] = {
      written, written.substr(0, 2), written.substr(2), " ", "\n", "word", "\xc3\xa9"};
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<Message> messages;
    for (unsigned i = 0; i < 1 + random() % 3; ++i) {
      Message& message = messages.emplace_back();
      message.role = random() % 2 == 0 ? "user" : "assistant";
      for (unsigned j = 0; j < random() % 6; ++j)
        message.content += pieces[random() % std::size(pieces)];
    }
    const auto ids = chat->Encode(messages, *tokenizer_);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(CountOf(*ids, control), static_cast<int64_t>(messages.size()) + 1);
    EXPECT_EQ(*tokenizer_->Decode(*ids, false), *chat->Render(messages));
  }
}

TEST_F(ChatTokensTest, ATemplateThatHidesWhatIsAMessage_IsRefused) {
  const auto chat = Made("{{ messages[0].content | reverse }}{{ messages[0].content | length }}");
  EXPECT_TRUE(chat->Encode({{"user", "plain"}}, *tokenizer_).ok());
}

}  // namespace
}  // namespace carrel::http_api
