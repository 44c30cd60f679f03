// include/carrel on the demo model: what a program outside would do, and do wrong.

#include <bit>
#include <cmath>
#include <numeric>
#include <random>

#include "carrel/c.h"
#include "carrel/engine.h"
#include "carrel/prefill.h"
#include "carrel/reader.h"
#include "carrel/retrieval.h"
#include "carrel/server.h"
#include "common/file.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

extern "C" int CarrelCTest_BadInput(void);
extern "C" int CarrelCTest_Ask(const char* model_path, const char* folder, const char* context,
                               const char* prompt);

namespace carrel {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::SizeIs;

constexpr char kName[] = "part";
constexpr char kPrompt[] = "\n\nQuestion: What is the badge number of Hilgia Sheesko?\nAnswer:";
constexpr char kAnswer[] = "249381";

std::string ModelPath() { return SourceFolder() + "/models/demo"; }

std::shared_ptr<Model> DemoModel() {
  static const auto model = [] {
    auto loaded = Model::Load(ModelPath(), {.threads = 2});
    EXPECT_TRUE(loaded.ok()) << loaded.status().message();
    return *std::move(loaded);
  }();
  return model;
}

// The demo document's first 5,000 bytes, with the fact that kPrompt asks for.
std::vector<Token> Document() {
  const auto text = ReadFile(SourceFolder() + "/models/demo/docs/registry-8k.txt");
  EXPECT_TRUE(text.ok());
  auto tokens = DemoModel()->EncodeDocument(text->substr(0, 5000));
  EXPECT_TRUE(tokens.ok());
  return *tokens;
}

// A path of this process alone: the tests run beside one another.
std::string Path(const std::string& name) {
  static const std::string folder = FreshTempDir();
  return folder + "/" + name;
}
std::string SocketAddress() { return "unix:" + SocketPath("library"); }

// A store with the context kName, made once.
const std::string& Folder() {
  static const std::string folder = [] {
    const std::string path = Path("store");
    const auto store = Store::Open(path, StoreMode::kReadWrite);
    EXPECT_TRUE(store.ok()) << store.status().message();
    double last = -1;
    PrefillOptions options;
    options.index = "code";
    options.progress = [&](double share, const std::string&) { last = share; };
    const auto report = Prefill(*DemoModel(), Document(), **store, kName, options);
    EXPECT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->context.name, kName);
    EXPECT_GE(last, 0);
    return path;
  }();
  return folder;
}

std::shared_ptr<Store> Opened(StoreMode mode = StoreMode::kRead) {
  auto store = Store::Open(Folder(), mode);
  EXPECT_TRUE(store.ok()) << store.status().message();
  return *store;
}

TEST(LibraryTest, Reader_AnswersTheSameFromStoreAndHost_AndFromAServer) {
  const auto ask = [](std::shared_ptr<Store> store, Zone zone) {
    ReaderOptions options;
    options.zone = zone;
    options.top_k = kAllRows;
    auto reader = Reader::Open(DemoModel(), std::move(store), kName, options);
    EXPECT_TRUE(reader.ok()) << reader.status().message();
    std::string streamed;
    GenerateOptions generate;
    generate.on_text = [&](std::string_view piece) {
      streamed += piece;
      return true;
    };
    auto answer = (*reader)->Generate(kPrompt, generate);
    EXPECT_TRUE(answer.ok()) << answer.status().message();
    EXPECT_EQ(streamed, answer->text);
    EXPECT_GT((*reader)->statistics().rows_attended, 100);
    return answer->text;
  };
  EXPECT_THAT(ask(Opened(), Zone::kStore), HasSubstr(kAnswer));
  EXPECT_THAT(ask(Opened(), Zone::kHost), HasSubstr(kAnswer));
  const std::string socket = SocketAddress();
  auto server = Server::Start(Folder(), {.listen = {socket}, .read_only = true});
  ASSERT_TRUE(server.ok()) << server.status().message();
  const auto connected = Store::Connect((*server)->addresses().front());
  ASSERT_TRUE(connected.ok());
  EXPECT_THAT(ask(*connected, Zone::kStore), HasSubstr(kAnswer));
  const auto refused = Reader::Open(DemoModel(), *connected, kName, {.zone = Zone::kHost});
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  (*server)->Stop(5);
}

TEST(LibraryTest, Engine_AnswersManyAtOnce_EachAsAReaderDoes_AndSaysWhatTheyRestOn) {
  const auto reader = Reader::Open(DemoModel(), Opened(), kName);
  const auto alone = (*reader)->Generate(kPrompt);
  ASSERT_TRUE(alone.ok()) << alone.status().message();
  const auto engine = Engine::Start(DemoModel(), Opened(), {.answers = 3});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  std::vector<Question> questions(5, {.context = kName, .prompt = kPrompt, .sources = 2});
  questions[1].context = "none";
  questions[2].stop = {alone->text.substr(3, 2)};
  questions[3].options.on_text = [](std::string_view) { return false; };
  const auto replies = (*engine)->AskMany(questions);
  ASSERT_THAT(replies, SizeIs(5));
  for (const size_t i : {0, 4}) {
    ASSERT_TRUE(replies[i].ok()) << replies[i].status().message();
    EXPECT_EQ(replies[i]->tokens, alone->tokens);
    EXPECT_EQ(replies[i]->text, alone->text);
    EXPECT_EQ(replies[i]->stop, alone->stop);
    ASSERT_FALSE(replies[i]->sources.empty());
    EXPECT_THAT(replies[i]->sources[0].text, HasSubstr(kAnswer));
    EXPECT_GT(replies[i]->context_tokens, 900);
  }
  EXPECT_EQ(replies[1].status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(replies[2].ok()) << replies[2].status().message();
  EXPECT_EQ(replies[2]->text, alone->text.substr(0, alone->text.find(questions[2].stop[0])));
  EXPECT_EQ(replies[2]->stop, StopReason::kEos);
  EXPECT_EQ(replies[3].status().code(), StatusCode::kCancelled);
}

TEST(LibraryTest, Engine_KnowsAChatsLastTurn) {
  const auto engine = Engine::Start(DemoModel(), Opened());
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  Question question = {.context = kName};
  question.messages = {{"user", "What is the badge number of Hilgia Sheesko?"}};
  const auto first = (*engine)->Ask(question);
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_THAT(first->text, HasSubstr(kAnswer));
  EXPECT_EQ(first->known_tokens, 0);
  question.messages.push_back({"assistant", first->text});
  question.messages.push_back({"user", "Who lives in the north?"});
  const auto second = (*engine)->Ask(question);
  ASSERT_TRUE(second.ok()) << second.status().message();
  EXPECT_GE(second->known_tokens, first->prompt_tokens);
  EXPECT_GT(second->prompt_tokens, second->known_tokens);
}

TEST(LibraryTest, Engine_QuestionsAndOptionsOutOfBounds_AreRefused) {
  const auto start = [](const EngineOptions& options) {
    return Engine::Start(DemoModel(), Opened(), options).status();
  };
  EXPECT_THAT(start({.answers = 0}).message(), HasSubstr("answers=0"));
  EXPECT_EQ(start({.open_contexts = 1025}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(start({.reading = {.top_k = 0}}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(start({.reading = {.content_id = "000000000000"}}).code(),
            StatusCode::kInvalidArgument);
  const auto engine = Engine::Start(DemoModel(), Opened());
  EXPECT_EQ((*engine)->Ask({.context = kName}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ((*engine)->Ask({.context = kName, .prompt = "a", .tokens = {1}}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ((*engine)
                ->Ask({.context = kName, .content_id = "000000000000", .prompt = "a"})
                .status()
                .code(),
            StatusCode::kFailedPrecondition);
  EXPECT_TRUE((*engine)->AskMany({}).empty());
}

TEST(LibraryTest, Reader_OptionsOutOfBounds_AreRefused) {
  const auto open = [](const ReaderOptions& options) {
    return Reader::Open(DemoModel(), Opened(), kName, options).status();
  };
  EXPECT_THAT(open({.top_k = 0}).message(), HasSubstr("top_k=0"));
  EXPECT_EQ(open({.target_error = 0.1, .top_k = 5}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(open({.target_error = -1}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(open({.zone = Zone::kDevice}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(open({.content_id = "000000000000"}).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Reader::Open(DemoModel(), Opened(), "none").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Reader::Open(nullptr, Opened(), kName).status().code(), StatusCode::kInvalidArgument);
}

TEST(LibraryTest, Reader_WhoseCallerEndsTheAnswer_IsCancelledAndGoesOn) {
  auto reader = Reader::Open(DemoModel(), Opened(), kName);
  ASSERT_TRUE(reader.ok());
  GenerateOptions options;
  options.on_text = [](std::string_view) { return false; };
  EXPECT_EQ((*reader)->Generate(kPrompt, options).status().code(), StatusCode::kCancelled);
  const auto answer = (*reader)->Generate(kPrompt);
  ASSERT_TRUE(answer.ok());
  EXPECT_THAT(answer->text, HasSubstr(kAnswer));
}

std::unique_ptr<Session> PinnedSession() {
  const std::shared_ptr<Store> store = Opened();
  const auto info = store->Get(kName);
  EXPECT_TRUE(info.ok());
  auto session = Session::OpenPinned(store, kName, info->content_id, {.sink = 4, .local = 64});
  EXPECT_TRUE(session.ok()) << session.status().message();
  return *std::move(session);
}

std::vector<float> Queries(const ContextInfo& context, int64_t tokens) {
  std::mt19937 random(7);
  std::vector<float> queries(static_cast<size_t>(tokens * context.q_heads * context.head_dim));
  for (float& x : queries) x = std::normal_distribution<float>()(random);
  return queries;
}

float Widen(uint16_t bf16) { return std::bit_cast<float>(uint32_t{bf16} << 16); }

// Every kind of answer is that of attention computed here, from rows that were fetched.
TEST(LibraryTest, Session_AnswersAreThoseOfItsRows) {
  const std::unique_ptr<Session> session = PinnedSession();
  const ContextInfo& context = session->context();
  const int64_t d = context.head_dim, group = context.q_heads / context.kv_heads, tokens = 2;
  const std::vector<float> queries = Queries(context, tokens);
  const auto all = session->Ask({.layer = 1, .queries = queries, .select = All()});
  ASSERT_TRUE(all.ok()) << all.status().message();
  ASSERT_THAT(*all, SizeIs(tokens * context.kv_heads));
  std::vector<int64_t> ids(static_cast<size_t>(session->zone_end() - session->zone_begin()));
  std::iota(ids.begin(), ids.end(), session->zone_begin());
  const auto rows = session->Fetch(1, ids);
  ASSERT_TRUE(rows.ok()) << rows.status().message();
  const auto top =
      session->Send({.layer = 1, .queries = queries, .select = TopK{5}, .want = Want::kValues});
  const auto keys =
      session->Send({.layer = 1, .queries = queries, .select = TopK{5}, .want = Want::kRows});
  ASSERT_TRUE(top.ok() && keys.ok());
  const auto found_keys = session->Wait(*keys);  // in any order
  const auto found = session->Wait(*top);
  ASSERT_TRUE(found.ok() && found_keys.ok());
  for (size_t i = 0; i < all->size(); ++i) {
    const HeadResult& head = (*all)[i];
    const size_t first = static_cast<size_t>(head.kv_head) * ids.size();
    for (int64_t h = 0; h < group; ++h) {
      const float* q = &queries[static_cast<size_t>(
          (head.token * context.q_heads + head.kv_head * group + h) * d)];
      std::vector<double> scores(ids.size());
      double sum = 0;
      for (size_t row = 0; row < ids.size(); ++row) {
        for (int64_t j = 0; j < d; ++j) {
          scores[row] +=
              q[j] *
              Widen(rows->k[(first + row) * static_cast<size_t>(d) + static_cast<size_t>(j)]);
        }
        scores[row] /= std::sqrt(static_cast<double>(d));
        sum += std::exp(scores[row]);
      }
      EXPECT_NEAR(head.lse[static_cast<size_t>(h)], std::log(sum), 1e-3);
      double out = 0;
      for (size_t row = 0; row < ids.size(); ++row) {
        out += std::exp(scores[row]) / sum * Widen(rows->v[(first + row) * static_cast<size_t>(d)]);
      }
      EXPECT_NEAR(head.out[static_cast<size_t>(h * d)], out, 1e-3);
      const HeadResult& best = (*found)[i];
      ASSERT_THAT(best.ids, SizeIs(5));
      ASSERT_THAT(best.scores, SizeIs(5 * group));
      for (size_t j = 0; j < 5; ++j) {
        const auto row = static_cast<size_t>(best.ids[j] - session->zone_begin());
        EXPECT_NEAR(best.scores[static_cast<size_t>(h) * 5 + j], scores[row], 1e-3);
        EXPECT_EQ(best.v[j * static_cast<size_t>(d)],
                  rows->v[(first + row) * static_cast<size_t>(d)]);
      }
      EXPECT_EQ((*found_keys)[i].ids, best.ids);
      EXPECT_EQ((*found_keys)[i].k.size(), static_cast<size_t>(5 * d));
    }
  }
}

TEST(LibraryTest, Session_BadInput_IsRefusedAndTheSessionGoesOn) {
  const std::unique_ptr<Session> session = PinnedSession();
  const std::vector<float> queries = Queries(session->context(), 1);
  const auto code = [&](const Query& query) { return session->Ask(query).status().code(); };
  EXPECT_EQ(code({.layer = -1, .queries = queries}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.layer = session->context().layers, .queries = queries}),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.layer = 0, .queries = std::span(queries).subspan(1)}),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.layer = 0, .queries = queries, .select = TopK{0}}),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.layer = 0, .queries = queries, .select = Mass{2}}),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(session->Wait(12345).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(session->Fetch(0, std::vector<int64_t>{1 << 30}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.layer = 0, .queries = queries}), StatusCode::kOk);
  const auto of_model = Session::Open(Opened(), kName, *DemoModel());
  EXPECT_TRUE(of_model.ok()) << of_model.status().message();
  EXPECT_EQ(Session::OpenPinned(Opened(), kName, "0123").status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Session::OpenPinned(Opened(), kName, std::string(64, '0')).status().code(),
            StatusCode::kFailedPrecondition);
}

TEST(LibraryTest, Store_ExportedAndImported_HasTheSameContentId) {
  const std::shared_ptr<Store> from = Opened();
  std::string stream;
  ASSERT_TRUE(from->Export(kName,
                           [&](std::string_view piece) {
                             stream += piece;
                             return Status();
                           })
                  .ok());
  const auto to = Store::Open(Path("imported"), StoreMode::kReadWrite);
  ASSERT_TRUE(to.ok());
  const auto imported = (*to)->Import("copy", [&](int64_t offset) -> Result<std::string_view> {
    return std::string_view(stream).substr(static_cast<size_t>(offset), 1 << 20);
  });
  ASSERT_TRUE(imported.ok()) << imported.status().message();
  EXPECT_EQ(imported->name, "copy");
  EXPECT_EQ(imported->content_id, from->Get(kName)->content_id);
  const auto verified = (*to)->Verify("copy", /*deep=*/true);
  ASSERT_TRUE(verified.ok());
  EXPECT_THAT(verified->errors, SizeIs(0));
  EXPECT_GT(verified->bytes, 0);
  const auto listed = (*to)->List();
  ASSERT_TRUE(listed.ok());
  EXPECT_THAT(*listed, SizeIs(1));
  EXPECT_TRUE((*to)->Delete("copy").ok());
  EXPECT_EQ((*to)->Get("copy").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(from->Delete(kName).code(), StatusCode::kFailedPrecondition);  // opened for reading
}

TEST(LibraryTest, Prefill_IntoAServer_IsServed) {
  const std::string socket = SocketAddress();
  auto server = Server::Start(Path("served"), {.listen = {socket}});
  ASSERT_TRUE(server.ok()) << server.status().message();
  const auto store = Store::Connect(socket);
  ASSERT_TRUE(store.ok());
  EXPECT_EQ(Prefill(*DemoModel(), Document(), **store, kName).status().code(),
            StatusCode::kInvalidArgument);  // no staging
  PrefillOptions options;
  options.staging = Path("staging");
  const auto report = Prefill(*DemoModel(), Document(), **store, kName, options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  const auto reader = Reader::Open(DemoModel(), *store, kName);
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  EXPECT_THAT((*reader)->Generate(kPrompt)->text, HasSubstr(kAnswer));
  EXPECT_EQ(Prefill(*DemoModel(), Document(), **store, kName, options).status().code(),
            StatusCode::kAlreadyExists);
  options.index = "nonsense";
  EXPECT_EQ(Prefill(*DemoModel(), Document(), **store, "other", options).status().code(),
            StatusCode::kInvalidArgument);
}

// A server of this machine without keys lets nobody import over TCP: that is said before the first layer.
// What is of this machine is not sent through a proxy, which here nobody is.
TEST(LibraryTest, Prefill_IntoAServerThatDoesNotLetIt_IsRefusedAtOnce_AndNoProxyIsAsked) {
  for (const char* variable : {"http_proxy", "https_proxy", "grpc_proxy"}) {
    setenv(variable, "http://127.0.0.1:9", 1);
  }
  auto server = Server::Start(Path("closed"), {.listen = {"127.0.0.1:0"}});
  ASSERT_TRUE(server.ok()) << server.status().message();
  const auto store = Store::Connect((*server)->addresses().front());
  ASSERT_TRUE(store.ok());
  EXPECT_TRUE((*store)->List().ok()) << (*store)->List().status().message();
  PrefillOptions options;
  options.staging = Path("staging-closed");
  int told = 0;
  options.progress = [&](double, const std::string&) { ++told; };
  const auto report = Prefill(*DemoModel(), Document(), **store, kName, options);
  EXPECT_EQ(report.status().code(), StatusCode::kPermissionDenied) << report.status().message();
  EXPECT_THAT(report.status().message(), HasSubstr("import"));
  EXPECT_EQ(told, 0);
  for (const char* variable : {"http_proxy", "https_proxy", "grpc_proxy"}) unsetenv(variable);
}

// What is said of many documents holds for short ones.
TEST(LibraryTest, Reader_OfAShortDocument_TakesAnyNumberOfRowsAndAnyFidelity) {
  const auto store = Store::Open(Path("short"), StoreMode::kReadWrite);
  ASSERT_TRUE(store.ok());
  for (const size_t tokens : {5, 68, 69, 184}) {
    const std::string name = "d" + std::to_string(tokens);
    const std::vector<Token> document = Document();
    const auto made = Prefill(*DemoModel(), std::span(document).first(tokens), **store, name);
    ASSERT_TRUE(made.ok()) << made.status().message();
    const auto answer = [&](const ReaderOptions& options) {
      auto reader = Reader::Open(DemoModel(), *store, name, options);
      EXPECT_TRUE(reader.ok()) << tokens << ": " << reader.status().message();
      return reader.ok() ? (*reader)->Generate(kPrompt)->tokens : std::vector<Token>();
    };
    const std::vector<Token> all = answer({.top_k = kAllRows});
    EXPECT_EQ(answer({.top_k = 512}), all);
    EXPECT_EQ(answer({.top_k = int64_t{1} << 40}), all);
    for (const Fidelity fidelity : {Fidelity::kFast, Fidelity::kFaithful}) {
      EXPECT_EQ(answer({.fidelity = fidelity}), all);  // short zones are attended whole
    }
    EXPECT_EQ(answer({.target_error = 0.001}), all);
  }
}

TEST(LibraryTest, Prefill_ThatNobodyWantsAnyMore_IsCancelled_AndGoesOnOrIsDiscarded) {
  const auto store = Store::Open(Path("cancelled"), StoreMode::kReadWrite);
  ASSERT_TRUE(store.ok());
  const std::vector<Token> document = Document();
  PrefillOptions options;
  double share = 0;
  options.progress = [&](double now, const std::string&) { share = now; };
  options.wanted = [&] { return share < 0.4; };  // of eight layers, after the third
  const auto cancelled = Prefill(*DemoModel(), document, **store, kName, options);
  EXPECT_EQ(cancelled.status().code(), StatusCode::kCancelled);
  EXPECT_THAT(cancelled.status().message(), HasSubstr(kName));
  EXPECT_EQ((*store)->Get(kName).status().code(), StatusCode::kNotFound);
  // Discarded, another document may take the name; it was refused before.
  const std::span<const Token> other = std::span(document).subspan(1);
  EXPECT_EQ(Prefill(*DemoModel(), other, **store, kName).status().code(),
            StatusCode::kFailedPrecondition);
  const auto unfinished = ListUnfinished(**store);
  ASSERT_TRUE(unfinished.ok());
  ASSERT_THAT(*unfinished, SizeIs(1));
  EXPECT_EQ(unfinished->front().name, kName);
  EXPECT_GT(unfinished->front().bytes, 100000);
  EXPECT_FALSE(unfinished->front().running);
  EXPECT_TRUE(DiscardPrefill(**store, kName).ok());
  EXPECT_THAT(*ListUnfinished(**store), SizeIs(0));
  EXPECT_TRUE(DiscardPrefill(**store, "nothing").ok());
  EXPECT_EQ(DiscardPrefill(**store, "../x").code(), StatusCode::kInvalidArgument);
  const auto made = Prefill(*DemoModel(), other, **store, kName);
  ASSERT_TRUE(made.ok()) << made.status().message();
  EXPECT_EQ(made->resumed_layers, 0);
}

TEST(LibraryTest, DocumentTokens_AreThoseThatWerePrefilled_AlsoOfAServer) {
  const auto tokens = Opened()->DocumentTokens(kName);
  ASSERT_TRUE(tokens.ok()) << tokens.status().message();
  EXPECT_EQ(*tokens, Document());
  EXPECT_EQ(Opened()->DocumentTokens("none").status().code(), StatusCode::kNotFound);
  auto server = Server::Start(Folder(), {.listen = {SocketAddress()}, .read_only = true});
  ASSERT_TRUE(server.ok()) << server.status().message();
  const auto connected = Store::Connect((*server)->addresses().front());
  ASSERT_TRUE(connected.ok());
  const auto told = (*connected)->DocumentTokens(kName);
  ASSERT_TRUE(told.ok()) << told.status().message();
  EXPECT_EQ(*told, Document());
  EXPECT_EQ((*connected)->DocumentTokens("none").status().code(), StatusCode::kNotFound);
}

TEST(LibraryTest, C_BadInput_IsAnswered) { EXPECT_EQ(CarrelCTest_BadInput(), 0); }

TEST(LibraryTest, C_AsksWithOptionsOfAnOlderHeader_AndEndsAnAnswer) {
  EXPECT_EQ(CarrelCTest_Ask(ModelPath().c_str(), Folder().c_str(), kName, kPrompt), 0);
}

}  // namespace
}  // namespace carrel
