// Right answers on the demo documents: every row retrieved reproduces dense decoding; a small share
// of the rows nearly does.
#include "common/test_util.h"
#include "tests/world.h"

namespace carrel {
namespace {

using testing_world::Question;

struct Share {
  int64_t equal = 0, questions = 0;
};

// Answers equal to dense decoding.
Share EqualToDense(const std::string& folder, const std::string& context,
                   const std::string& document, const decoder::RetrievalConfig& config) {
  Share share;
  const auto questions = testing_world::Questions(document);
  CARREL_EXPECT_OK(questions);
  auto decoder = testing_world::EmbeddedDecoder::Open(folder, context, config);
  CARREL_EXPECT_OK(decoder);
  if (!questions.ok() || !decoder.ok()) return share;
  const auto answers = testing_world::AnswerAll(*(*decoder)->operator->(), *questions);
  CARREL_EXPECT_OK(answers);
  if (!answers.ok()) return share;
  share.questions = static_cast<int64_t>(questions->size());
  for (size_t i = 0; i < questions->size(); ++i)
    share.equal += (*answers)[i] == (*questions)[i].dense_ids;
  std::cout << document << " " << context << ": " << share.equal << " of " << share.questions
            << " equal to dense" << std::endl;
  return share;
}

decoder::RetrievalConfig All() {
  decoder::RetrievalConfig config;
  config.selection = select::All();
  return config;
}

decoder::RetrievalConfig Top128() {
  decoder::RetrievalConfig config;
  config.selection = select::TopK{128};
  config.dense_layers = 2;
  return config;
}

kvstore::IndexParams Kind(kvstore::IndexKind kind) {
  kvstore::IndexParams params;
  params.kind = kind;
  return params;
}

// Prefills the document as "flat" (its rows are "hnsw", too) into a fresh store; false if the document is
// not here.
bool Prefill(const std::string& folder, const std::string& document, bool hnsw) {
  const auto tokens = testing_world::DocumentTokens(document);
  if (absl::IsNotFound(tokens.status())) return false;
  CARREL_EXPECT_OK(tokens);
  CARREL_EXPECT_OK(
      testing_world::PrefillContext(folder, "flat", *tokens, Kind(kvstore::IndexKind::kFlat)));
  if (hnsw) {
    CARREL_EXPECT_OK(
        testing_world::ReindexContext(folder, "flat", "hnsw", Kind(kvstore::IndexKind::kHnsw)));
  }
  return true;
}

TEST(AnswersTest, Registry512And2k_AllRowsReproduceDense) {
  for (const std::string document : {"registry-512", "registry-2k"}) {
    const std::string folder = FreshTempDir();
    ASSERT_TRUE(Prefill(folder, document, false));
    const Share share = EqualToDense(folder, "flat", document, All());
    EXPECT_EQ(share.equal, share.questions);
    EXPECT_GT(share.questions, 0);
  }
}

TEST(AnswersSlowTest, Registry8k_AllRowsAndTop128) {
#ifdef CARREL_SANITIZED
  GTEST_SKIP()
      << "takes a quarter of an hour under a sanitizer, and does what the shorter documents do";
#endif
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-8k", true));
  EXPECT_GE(EqualToDense(folder, "flat", "registry-8k", All()).equal, 47);
  EXPECT_GE(EqualToDense(folder, "flat", "registry-8k", Top128()).equal, 46);
  EXPECT_GE(EqualToDense(folder, "hnsw", "registry-8k", Top128()).equal, 45);
  for (const decoder::Prefetch prefetch :
       {decoder::Prefetch::kSpeculative, decoder::Prefetch::kVerified}) {
    for (const decoder::Want want : {decoder::Want::kRows, decoder::Want::kAttend}) {
      decoder::RetrievalConfig config = Top128();
      config.prefetch = prefetch;
      config.want = want;
      EXPECT_GE(EqualToDense(folder, "flat", "registry-8k", config).equal, 45);
    }
  }
}

TEST(AnswersSlowTest, Registry32k_Top128) {
#ifdef CARREL_SANITIZED
  GTEST_SKIP() << "takes an hour under a sanitizer, and does what the shorter documents do";
#endif
  const std::string folder = FreshTempDir();
  if (!Prefill(folder, "registry-32k", true))
    GTEST_SKIP() << "registry-32k is not here: set CARREL_SHARED to the folder that has demo/docs";
  EXPECT_GE(EqualToDense(folder, "flat", "registry-32k", Top128()).equal, 46);
  EXPECT_GE(EqualToDense(folder, "hnsw", "registry-32k", Top128()).equal, 45);
}

}  // namespace
}  // namespace carrel
