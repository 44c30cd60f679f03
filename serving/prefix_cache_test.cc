#include "serving/prefix_cache.h"

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <random>
#include <sstream>
#include <thread>

#include "common/test_folders.h"
#include "common/test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::serving {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Tokens = std::vector<TokenId>;

const SequenceOwner kMine = {"document", "content", "me"};

Conversation Made(const SequenceOwner& owner, std::vector<TokenId> tokens, int64_t prompt_tokens,
                  float value = 1) {
  Conversation made{owner, {}, prompt_tokens};
  made.sequence.rows.assign(tokens.size() * 1000, value);
  made.sequence.tokens = std::move(tokens);
  return made;
}

TEST(PrefixCacheTest, APromptGoesOn_WithAllOfAnEarlierOne) {
  EXPECT_TRUE(GoesOn({1, 2, 3, 4}, {1, 2, 3}, 2));
  EXPECT_TRUE(GoesOn({1, 2, 9}, {1, 2, 3}, 2));      // another answer than the one that was given
  EXPECT_FALSE(GoesOn({1, 2}, {1, 2, 3}, 2));        // the same question again
  EXPECT_FALSE(GoesOn({1, 9, 3, 4}, {1, 2, 3}, 2));  // another question
  EXPECT_FALSE(GoesOn({1, 2, 3}, {}, 0));
}

TEST(PrefixCacheTest, TheOneThatIsGoneOnWith_IsTakenOut_ByWhoseItIs) {
  const absl::Time now = absl::UnixEpoch();
  PrefixCache kept((PrefixCacheConfig()));
  kept.Put(Made(kMine, {1, 2, 3}, 2, 1), now);
  kept.Put(Made(kMine, {1, 2, 3, 4, 5}, 4, 2), now);
  const std::vector<TokenId> prompt = {1, 2, 3, 4, 5, 6};
  EXPECT_FALSE(kept.Take({"document", "content", "another"}, prompt).has_value());
  EXPECT_FALSE(kept.Take({"document", "other content", "me"}, prompt).has_value());
  EXPECT_FALSE(kept.Take({"another", "content", "me"}, prompt).has_value());
  const auto longest = kept.Take(kMine, prompt);
  ASSERT_TRUE(longest.has_value());
  EXPECT_EQ(longest->sequence.rows, std::vector<float>(5000, 2));
  const auto shorter = kept.Take(kMine, prompt);
  ASSERT_TRUE(shorter.has_value());
  EXPECT_EQ(shorter->prompt_tokens, 2);
  EXPECT_FALSE(kept.Take(kMine, prompt).has_value());
  kept.Put(Made(kMine, {1, 2, 3}, 2), now);
  kept.Forget("document");
  EXPECT_FALSE(kept.Take(kMine, prompt).has_value());
}

TEST(PrefixCacheTest, WhatIsIdleOrTooMuch_IsWrittenOut_AndComesBack) {
  const absl::Time now = absl::UnixEpoch();
  PrefixCacheConfig config;
  config.folder = testing::TempDir();
  config.idle = absl::Seconds(10);
  config.memory_bytes = 50000;
  PrefixCache kept(config);
  kept.Put(Made(kMine, {1, 2, 3}, 2, 1), now);
  kept.Sweep(now + absl::Seconds(9));
  EXPECT_EQ(kept.in_files(), 0);
  kept.Sweep(now + absl::Seconds(11));
  EXPECT_EQ(kept.in_files(), 1);
  for (int i = 2; i <= 10; ++i) {  // 12,000 bytes each
    EXPECT_EQ(kept.Put(Made(kMine, {i, i, i}, 2, static_cast<float>(i)), now), i >= 6) << i;
  }
  EXPECT_EQ(kept.in_memory(), 9);  // nobody waited for the disk
  EXPECT_TRUE(kept.TakeFromMemory(kMine, {1, 2, 3, 4}).in_file);
  kept.Sweep(now);
  EXPECT_EQ(kept.in_memory(), 4);
  EXPECT_EQ(kept.in_files(), 6);
  for (int i = 10; i >= 2; --i) {
    const auto back = kept.Take(kMine, {i, i, 7});
    ASSERT_TRUE(back.has_value()) << i;
    EXPECT_EQ(back->sequence.rows, std::vector<float>(3000, static_cast<float>(i)));
  }
  EXPECT_EQ(kept.Take(kMine, {1, 2, 3, 4})->sequence.rows, std::vector<float>(3000, 1));
}

TEST(PrefixCacheTest, InMemory_IsTakenWithoutTheDisk) {
  const absl::Time now = absl::UnixEpoch();
  PrefixCache kept((PrefixCacheConfig()));
  EXPECT_FALSE(kept.TakeFromMemory(kMine, {1, 2, 3}).in_file);
  kept.Put(Made(kMine, {1, 2}, 2, 5), now);
  const PrefixCache::Taken taken = kept.TakeFromMemory(kMine, {1, 2, 3});
  EXPECT_FALSE(taken.in_file);
  ASSERT_TRUE(taken.conversation.has_value());
  EXPECT_EQ(taken.conversation->sequence.rows, std::vector<float>(2000, 5));
  EXPECT_EQ(kept.in_memory(), 0);
}

// Whoever takes, puts and forgets while others write: what is taken is what was put.
TEST(PrefixCacheTest, WhileFilesAreWritten_EachIsTakenOnceAndWhole) {
  PrefixCacheConfig config;
  config.folder = testing::TempDir();
  config.memory_bytes = 0;
  config.most = 1000;
  PrefixCache kept(config);
  const absl::Time now = absl::UnixEpoch();
  std::atomic<bool> over{false};
  std::vector<std::thread> writers;
  for (int i = 0; i < 2; ++i) {
    writers.emplace_back([&] {
      while (!over) kept.Sweep(now);
    });
  }
  std::vector<std::thread> users;
  for (TokenId user = 1; user <= 4; ++user) {
    users.emplace_back([&, user] {
      const SequenceOwner owner = {"document", "content", std::string(1, 'a' + user)};
      for (TokenId i = 1; i <= 50; ++i) {
        kept.Put(Made(owner, {user, i}, 2, static_cast<float>(user * 1000 + i)), now);
        PrefixCache::Taken taken = kept.TakeFromMemory(owner, {user, i, 1});
        if (taken.in_file) taken.conversation = kept.Take(owner, {user, i, 1});
        ASSERT_TRUE(taken.conversation.has_value());
        EXPECT_EQ(taken.conversation->sequence.rows,
                  std::vector<float>(2000, static_cast<float>(user * 1000 + i)));
        EXPECT_FALSE(kept.Take(owner, {user, i, 1}).has_value());
        kept.Put(Made(owner, {user, 99}, 2), now);
      }
      kept.Forget("document " + owner.who);
    });
  }
  for (std::thread& user : users) user.join();
  over = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(kept.in_memory() + kept.in_files(), 200);
  kept.Forget("document");
  EXPECT_EQ(kept.in_memory() + kept.in_files(), 0);
}

// The descriptors of this process that are files without a name.
std::vector<int> FilesWithoutName() {
  std::vector<int> found;
  for (int fd = 3; fd < 1024; ++fd) {
    struct stat status;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 0)
      found.push_back(fd);
  }
  return found;
}

// Whichever byte it is, and a file that was cut.
TEST(PrefixCacheTest, AFileOfOtherBytes_IsNotBelieved_AndTheLogSaysSo) {
  const absl::Time now = absl::UnixEpoch();
  PrefixCacheConfig config;
  config.folder = testing::TempDir();
  std::mt19937_64 random(TestSeed());
  for (int trial = 0; trial < 20; ++trial) {
    PrefixCache kept(config);
    kept.Put(Made(kMine, {1, 2, 3}, 2, 1), now);
    kept.Sweep(now + absl::Hours(1));
    ASSERT_EQ(kept.in_files(), 1);
    const std::vector<int> files = FilesWithoutName();
    ASSERT_EQ(files.size(), 1u);
    const auto at = static_cast<off_t>(random() % 12000);
    char byte = 0;
    ASSERT_EQ(pread(files[0], &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ (1 << (random() % 8)));
    if (trial == 0) {
      ASSERT_EQ(ftruncate(files[0], at), 0);
    } else {
      ASSERT_EQ(pwrite(files[0], &byte, 1, at), 1);
    }
    std::ostringstream log;
    auto& sinks = spdlog::default_logger()->sinks();
    sinks.push_back(std::make_shared<spdlog::sinks::ostream_sink_st>(log));
    EXPECT_FALSE(kept.Take(kMine, {1, 2, 3, 4}).has_value()) << "byte " << at;
    sinks.pop_back();
    EXPECT_THAT(log.str(), testing::HasSubstr("its prompt is read again"));
    EXPECT_EQ(kept.in_memory() + kept.in_files(), 0);
  }
}

TEST(PrefixCacheTest, OfMoreThanMay_TheOldestGoes_AndOneThatCannotBeWritten) {
  const absl::Time now = absl::UnixEpoch();
  PrefixCacheConfig config;
  config.most = 2;
  config.folder = testing::TempDir() + "/there/is/none";
  PrefixCache kept(config);
  for (TokenId i = 1; i <= 3; ++i) kept.Put(Made(kMine, {i, i}, 1), now);
  EXPECT_EQ(kept.in_memory(), 2);
  EXPECT_FALSE(kept.Take(kMine, {1, 1, 1}).has_value());
  EXPECT_TRUE(kept.Take(kMine, {3, 3, 1}).has_value());
  std::ostringstream log;
  auto& sinks = spdlog::default_logger()->sinks();
  sinks.push_back(std::make_shared<spdlog::sinks::ostream_sink_st>(log));
  kept.Sweep(now + absl::Hours(1));
  sinks.pop_back();
  EXPECT_EQ(kept.in_memory() + kept.in_files(), 0);
  EXPECT_THAT(log.str(), testing::HasSubstr(config.folder + ": No such file or directory"));
}

const model::Tokenizer& DemoTokenizer() {
  static const auto tokenizer = *model::LoadTokenizer(SourceFolder() + "/models/demo");
  return *tokenizer;
}

Tokens Random(size_t n, std::mt19937& random) {
  Tokens tokens(n);
  for (TokenId& token : tokens) token = static_cast<TokenId>(100 + random() % 1900);
  return tokens;
}

Tokens Encoded(const std::string& text) { return *DemoTokenizer().Encode(text); }

TEST(PrefixCacheTest, Documents_AreThoseThatThePromptBeginsWith_LongestFirst) {
  std::mt19937 random(TestSeed());
  for (int trial = 0; trial < 50; ++trial) {
    const Tokens prompt = Random(3000, random);
    PrefixCache known((PrefixCacheConfig()));
    const Tokens other = Random(2000, random);
    known.AddDocument("other", other);
    const size_t shorter = 300 + random() % 1000, longer = shorter + 300 + random() % 1000;
    known.AddDocument("shorter", absl::MakeSpan(prompt).first(shorter));
    known.AddDocument("longer", absl::MakeSpan(prompt).first(longer));
    known.AddDocument("small", absl::MakeSpan(prompt).first(200));
    Tokens behind = prompt;
    behind.insert(behind.end(), other.begin(), other.end());
    known.AddDocument("more than the prompt", behind);
    EXPECT_THAT(known.DocumentsOf(prompt), ElementsAre("longer", "shorter"));
    EXPECT_THAT(known.DocumentsOf(absl::MakeSpan(prompt).first(longer - 257 - PrefixCache::kSeam)),
                testing::Not(testing::Contains("longer")));
    known.RemoveDocument("longer");
    EXPECT_THAT(known.DocumentsOf(prompt), ElementsAre("shorter"));
    Tokens changed = prompt;
    changed[random() % 256] += 1;
    EXPECT_THAT(known.DocumentsOf(changed), IsEmpty());
  }
}

TEST(PrefixCacheTest, RestOf_IsThePromptBehindWhatBothBeginWith) {
  std::mt19937 random(TestSeed());
  const Tokens prompt = Random(1000, random);
  const auto begin = absl::MakeConstSpan(prompt);
  const auto expect = [](const std::optional<PrefixRest>& rest, int64_t give_up, Tokens tokens) {
    ASSERT_TRUE(rest.has_value());
    EXPECT_EQ(rest->give_up, give_up);
    EXPECT_EQ(rest->rest, tokens);
  };
  expect(RestOf(prompt, begin.first(900), 32), 0, {prompt.begin() + 900, prompt.end()});
  // Something has to be read for an answer: the document's last token.
  expect(RestOf(prompt, prompt, 32), 1, {prompt.back()});
  expect(RestOf(begin.first(990), prompt, 32), 11, {prompt[989]});
  EXPECT_FALSE(RestOf(prompt, prompt, 0).has_value());
  EXPECT_FALSE(RestOf(begin.first(900), prompt, 32).has_value());
  Tokens changed = prompt;
  changed[897] += 1;
  expect(RestOf(changed, begin.first(900), 3), 3, {changed.begin() + 897, changed.end()});
  EXPECT_FALSE(RestOf(changed, begin.first(900), 2).has_value());
  changed[500] += 1;
  EXPECT_FALSE(RestOf(changed, begin.first(900), 32).has_value());
  EXPECT_FALSE(RestOf({}, begin.first(900), 32).has_value());
}

// However a text is cut in two: the whole, read as a prompt, stays what it is.
TEST(PrefixCacheTest, RestOf_ACutThatChangesTokens_GivesThoseOfTheWhole) {
  std::mt19937 random(TestSeed());
  const std::string words[] = {" the lantern", " crossed", ".", "\n",  "\n\n", " Question:",
                               " 12345",       "é",        " ", "...", "a",    " Zupai Vruskvai"};
  int seams = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string first, second;
    for (int i = 0; i < 40; ++i) first += words[random() % std::size(words)];
    for (int i = 0; i < 5; ++i) second += words[random() % std::size(words)];
    const Tokens document = Encoded(first), prompt = Encoded(first + second);
    const auto rest = RestOf(prompt, document, 32);
    const size_t same = CommonPrefix(prompt, document);
    ASSERT_EQ(rest.has_value(), document.size() - same <= PrefixCache::kSeam)
        << first << "|" << second;
    if (!rest.has_value()) continue;
    seams += rest->give_up > 0;
    Tokens joined(document.begin(), document.end() - rest->give_up);
    joined.insert(joined.end(), rest->rest.begin(), rest->rest.end());
    EXPECT_EQ(joined, prompt);
  }
  EXPECT_GT(seams, 20) << "no cut changed a token: the test tests nothing";
}

}  // namespace
}  // namespace carrel::serving
