// Documents of a store in this process, with the demo model.
#include "serving/documents.h"

#include <atomic>
#include <filesystem>
#include <map>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/status.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "kvstore/access/kept_name.h"
#include "kvstore/service/context_client.h"
#include "model/checkpoint.h"
#include "retrieval/session.h"
#include "serving/status_details.h"

namespace carrel::serving {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr char kText[] = "The badge number of Ada is 4711. The badge number of Ben is 1234.";

std::shared_ptr<library::LoadedModel> Demo() {
  static const auto model =
      *library::LoadedModel::Load(SourceFolder() + "/models/demo", "", /*threads=*/2);
  return model;
}

// A store of which every other thread than the test's own has what the test plants.
class TriedStore final : public library::StoreAccess {
 public:
  explicit TriedStore(std::unique_ptr<library::StoreAccess> real) : real_(std::move(real)) {}

  absl::StatusOr<std::unique_ptr<retrieval::Session>> NewClient(ThreadPool* pool) override {
    return real_->NewClient(pool);
  }
  absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> NewContextClient(
      const std::string& context) override {
    if (std::this_thread::get_id() != test_ && plant) plant();
    ++looks;
    return real_->NewContextClient(context);
  }
  absl::StatusOr<std::vector<TokenId>> DocumentTokens(const std::string& context,
                                                      const std::string& content_id) override {
    return real_->DocumentTokens(context, content_id);
  }
  kvstore::Store* store() override { return real_->store(); }

  std::function<void()> plant;
  std::atomic<int> looks{0};  // at what it holds

 private:
  const std::unique_ptr<library::StoreAccess> real_;
  const std::thread::id test_ = std::this_thread::get_id();
};

class DocumentsTest : public testing::Test {
 protected:
  void Start() {
    documents_ = nullptr;
    scheduler_ = nullptr;
    store_ = nullptr;
    config_.address.folder = folder_;
    config_.writable = true;
    auto opened = library::StoreAccess::Open(config_.address, kvstore::StoreMode::kReadWrite);
    CARREL_ASSERT_OK(opened.status());
    store_ = std::make_shared<TriedStore>(*std::move(opened));
    store_->plant = plant_;
    scheduler_ = Scheduler::Create({}, Demo(), store_);
    auto documents = Documents::Create(config_, Demo(), store_, scheduler_.get());
    CARREL_ASSERT_OK(documents.status());
    documents_ = *std::move(documents);
  }

  static std::vector<TokenId> Tokens(const std::string& text) {
    return *Demo()->checkpoint().EncodeDocument(text);
  }
  // Takes some seconds to be read.
  static std::vector<TokenId> LongTokens(const std::string& begin) {
    return Tokens(begin + *ReadFile(SourceFolder() + "/models/demo/docs/registry-8k.txt"));
  }
  static bool All(const std::string&) { return true; }

  void Add(const std::string& name, std::vector<TokenId> tokens, Documents::Bringer by = {}) {
    by.sees = All;
    CARREL_ASSERT_OK(documents_->Add(name, std::move(tokens), std::move(by)).status());
  }
  absl::StatusOr<Documents::Added> Keep(const std::string& name, const std::string& text) {
    return documents_->Keep(name, Tokens(text), {.sees = All});
  }
  // The state that it comes to; kQueued: there is none.
  DocumentState StateOf(const std::string& name) {
    const auto now = documents_->Get(name);
    return now.ok() ? now->state : DocumentState::kQueued;
  }
  static bool Until(const std::function<bool()>& done) {
    const absl::Time until = absl::Now() + absl::Seconds(60);
    while (!done() && absl::Now() < until) absl::SleepFor(absl::Milliseconds(2));
    return done();
  }
  bool IsReady(const std::string& name) {
    return Until([&] { return StateOf(name) == DocumentState::kReady; });
  }
  bool IsGone(const std::string& name) {
    return Until([&] { return absl::IsNotFound(documents_->Get(name).status()); });
  }
  // Of a document and of its prefill.
  bool HasFiles(const std::string& name) const {
    return fs::exists(absl::StrCat(folder_, "/waiting/", name, ".document")) ||
           fs::exists(absl::StrCat(folder_, "/prefill/", name));
  }

  const std::string folder_ = FreshTempDir() + "/store";
  DocumentsConfig config_;
  std::function<void()> plant_;
  std::shared_ptr<TriedStore> store_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Documents> documents_;
};

TEST_F(DocumentsTest, WhatAWatcherThrows_IsNoMatterOfTheDocument) {
  Start();
  int calls = 0;  // under the documents' lock
  Add("doc", Tokens(kText));
  CARREL_EXPECT_OK(documents_->Watch("doc", [&](const Document&) -> bool {
    if (++calls > 1) throw std::runtime_error("planted");
    return true;
  }));
  EXPECT_TRUE(IsReady("doc"));
  EXPECT_LE(calls, 2);  // it is not told again
}

// Who waits for so long and no longer is told while nothing is read, too.
TEST_F(DocumentsTest, AWatcherLooksAtTheClock_AlsoWhereReadingStalls) {
  absl::Notification stalls, go_on;
  plant_ = [&] {
    if (!stalls.HasBeenNotified()) stalls.Notify();
    go_on.WaitForNotification();
  };
  Start();
  std::atomic<int> calls{0};
  Add("doc", Tokens(kText));
  CARREL_EXPECT_OK(documents_->Watch("doc", [&](const Document&) {
    ++calls;
    return true;
  }));
  stalls.WaitForNotification();
  const int before = calls;
  EXPECT_TRUE(Until([&] { return calls >= before + 3; }));
  go_on.Notify();
  EXPECT_TRUE(IsReady("doc"));
  documents_ = nullptr;
}

TEST_F(DocumentsTest, WhoseBringerIsWithdrawn_End_AndLeaveNothing) {
  Start();
  std::atomic<bool> withdrawn{false};
  const auto brought = [&] {
    Documents::Bringer by;
    by.who = "alice";
    by.still = [&](const std::string& name) -> absl::Status {
      if (!withdrawn) return absl::OkStatus();
      return absl::PermissionDeniedError("planted: " + name);
    };
    return by;
  };
  Add("read", LongTokens("one "), brought());
  Add("waits", LongTokens("two "), brought());
  Add("others", Tokens(kText));
  absl::Status told;  // under the documents' lock
  CARREL_EXPECT_OK(documents_->Watch("waits", [&](const Document& now) {
    told = now.error;
    return true;
  }));
  ASSERT_TRUE(Until([&] { return StateOf("read") == DocumentState::kPrefilling; }));
  EXPECT_TRUE(HasFiles("waits"));
  withdrawn = true;
  EXPECT_TRUE(IsGone("read"));
  EXPECT_TRUE(IsGone("waits"));
  EXPECT_EQ(told.code(), absl::StatusCode::kFailedPrecondition) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("the key that brought it"));
  EXPECT_TRUE(IsReady("others"));  // which waited behind them
  EXPECT_FALSE(HasFiles("read"));
  EXPECT_FALSE(HasFiles("waits"));
  documents_ = nullptr;
}

TEST_F(DocumentsTest, ThatComeBack_AreTheirKeysAsLongAsItIsThere) {
  std::atomic<bool> withdrawn{false};
  config_.still_may = [&](const std::string& who, const std::string&) -> absl::Status {
    if (who != "alice" || !withdrawn) return absl::OkStatus();
    return absl::PermissionDeniedError("planted");
  };
  const auto of = [](const std::string& who) {
    Documents::Bringer by;
    by.who = who;
    return by;
  };
  Start();
  Add("read", LongTokens("one "), of("alice"));
  Add("waits", LongTokens("two "), of("alice"));
  Add("bobs", Tokens(kText), of("bob"));
  Add("nobodys", Tokens(absl::StrCat(kText, " Cleo's is 9.")), of(""));
  ASSERT_TRUE(Until([&] { return fs::exists(folder_ + "/prefill/read"); }));
  Start();  // with all keys, all come back
  EXPECT_EQ(documents_->List()->size(), 4u);
  documents_ = nullptr;
  withdrawn = true;
  Start();
  for (const char* name : {"read", "waits"}) {
    EXPECT_TRUE(absl::IsNotFound(documents_->Get(name).status())) << name;
    EXPECT_FALSE(HasFiles(name)) << name;
  }
  EXPECT_TRUE(IsReady("bobs"));
  EXPECT_TRUE(IsReady("nobodys"));
  documents_ = nullptr;
}

// What came back is looked at as what was just brought.
TEST_F(DocumentsTest, ThatCameBack_EndWhenTheirKeyIsWithdrawnLater) {
  std::atomic<bool> withdrawn{false};
  config_.still_may = [&](const std::string&, const std::string&) -> absl::Status {
    return withdrawn ? absl::PermissionDeniedError("planted") : absl::OkStatus();
  };
  Start();
  Documents::Bringer by;
  by.who = "alice";
  Add("doc", LongTokens(""), std::move(by));
  Start();
  CARREL_EXPECT_OK(documents_->Get("doc").status());
  withdrawn = true;
  EXPECT_TRUE(IsGone("doc"));
  EXPECT_TRUE(Until([&] { return !HasFiles("doc"); }));
  documents_ = nullptr;
}

// Where there is no place in the queue for the new one, the old one stays.
TEST_F(DocumentsTest, WhatIsKept_GoesOnceAnotherIsTaken) {
  config_.keep = 1;
  config_.max_queued = 1;
  Start();
  const auto name = [](const std::string& text) {
    return kvstore::KeptName("", "alice", DigestOf(Tokens(text)));
  };
  const std::string first = absl::StrCat(kText, " One."), second = absl::StrCat(kText, " Two.");
  CARREL_ASSERT_OK(Keep(name(first), first).status());
  ASSERT_TRUE(IsReady(name(first)));
  Add("read", LongTokens("one "));
  ASSERT_TRUE(Until([&] { return StateOf("read") == DocumentState::kPrefilling; }));
  Add("waits", LongTokens("two "));
  EXPECT_EQ(Keep(name(second), second).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(StateOf(name(first)), DocumentState::kReady);
  CARREL_EXPECT_OK(documents_->Delete("waits"));
  CARREL_EXPECT_OK(documents_->Delete("read"));
  ASSERT_TRUE(Until([&] { return documents_->queued() == 0; }));
  CARREL_ASSERT_OK(Keep(name(second), second).status());
  EXPECT_TRUE(IsReady(name(second)));
  EXPECT_TRUE(IsGone(name(first)));
}

// No memory is the server's matter: no caller comes too often.
TEST_F(DocumentsTest, WhereMemoryEnds_ItIsTheServersError) {
  plant_ = [] { throw std::bad_alloc(); };
  Start();
  Add("doc", Tokens(kText));
  ASSERT_TRUE(Until([&] { return StateOf("doc") == DocumentState::kFailed; }));
  const absl::Status error = documents_->Get("doc")->error;
  EXPECT_TRUE(IsOfMachine(error)) << error;
  EXPECT_THAT(std::string(error.message()), HasSubstr("memory"));
}

// As opening compares them: a decoder that gives positions itself reads keys before RoPE alone.
TEST_F(DocumentsTest, TheStore_IsListedOncePerSecond_ForThoseThatOnlyLook) {
  Start();
  Add("doc", Tokens(kText));
  ASSERT_TRUE(IsReady("doc"));
  const absl::Time start = absl::Now();
  const int before = store_->looks;
  for (int i = 0; i < 50; ++i) {
    CARREL_EXPECT_OK(documents_->Get("doc").status());
    EXPECT_EQ(documents_->List()->size(), 1u);
  }
  EXPECT_LE(store_->looks - before, 1 + absl::ToDoubleSeconds(absl::Now() - start));
}

TEST_F(DocumentsTest, WhatOthersDoToTheStore_IsSeen) {
  Start();
  Add("doc", Tokens(kText));
  ASSERT_TRUE(IsReady("doc"));
  const auto client = *store_->NewContextClient("");
  CARREL_EXPECT_OK(client->Delete("doc"));
  EXPECT_TRUE(IsGone("doc"));  // within a second
  const int before = store_->looks;
  EXPECT_TRUE(absl::IsNotFound(documents_->Get("other").status()));
  EXPECT_GT(store_->looks, before);  // it might have come since the last look
}

TEST_F(DocumentsTest, Usable_IsWhatCanBeOpened) {
  Start();
  Add("doc", Tokens(kText));
  ASSERT_TRUE(IsReady("doc"));
  EXPECT_TRUE(documents_->Get("doc")->usable);
  config_.retrieval.rope = decoder::Rope::kInfiniteHip;
  Start();
  EXPECT_FALSE(documents_->Get("doc")->usable);
}

}  // namespace
}  // namespace carrel::serving
