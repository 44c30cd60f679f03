// export, import, verify and upgrade as users start them.
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "kvstore/storage/store_test_util.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFailed = 1;
constexpr int kBad = 2;

class TransferTest : public StoreTest {
 protected:
  std::string ContentId(const std::string& store, const std::string& name) const {
    return JsonOf(Carrel({"inspect", name, "--store", store, "--json"}))["content_id"];
  }
  std::string AnswerOf(const std::string& store, const std::string& name) const {
    Args ask = Ask(name);
    std::replace(ask.begin(), ask.end(), store_, store);
    const Outcome outcome = Carrel(ask);
    EXPECT_THAT(outcome, Succeeds());
    return outcome.out;
  }
  const std::string& other_store() const { return other_; }

 private:
  void SetUp() override {
    StoreTest::SetUp();
    other_ = path("other");
  }
  std::string other_;
};

TEST_F(TransferTest, ExportAndImport_GiveTheSameAnswersUnderAnyName) {
  const std::string file = path("kept.carrel");
  const json exported = JsonOf(Carrel({"export", kKept, file, "--store", store_, "--json"}));
  EXPECT_EQ(exported["content_id"], ContentId(store_, kKept));
  EXPECT_EQ(exported["bytes"], fs::file_size(file));
  const json imported =
      JsonOf(Carrel({"import", file, "--store", other_store(), "--as", "theirs", "--json"}));
  EXPECT_EQ(imported["content_id"], exported["content_id"]);
  EXPECT_EQ(imported["name"], "theirs");
  EXPECT_EQ(ContentId(other_store(), "theirs"), exported["content_id"]);
  EXPECT_EQ(AnswerOf(other_store(), "theirs"), answer_);
  EXPECT_THAT(Carrel({"import", file, "--store", other_store()}),
              FailsWith(kFailed, Texts{"ALREADY_EXISTS", "is published as theirs"}));
  EXPECT_THAT(Carrel({"import", file, "--store", store_}),
              FailsWith(kFailed, Texts{"ALREADY_EXISTS", kKept}));
  EXPECT_THAT(Carrel({"export", kKept, file, "--store", store_}),
              FailsWith(kFailed, Texts{"ALREADY_EXISTS", file}));
  EXPECT_THAT(Carrel({"export", "none", path("none"), "--store", store_}),
              FailsWith(kFailed, Texts{"NOT_FOUND", "none"}));
  EXPECT_FALSE(fs::exists(path("none"))) << "nor a part of it";
  ExpectNothingLost();
}

TEST_F(TransferTest, ThroughAPipe_TheStreamIsTheSame) {
  const std::string file = path("kept.carrel");
  ASSERT_THAT(Carrel({"export", kKept, file, "--store", store_}), Succeeds());
  const Outcome piped = Carrel({"export", kKept, "-", "--store", store_, "--quiet"});
  ASSERT_THAT(piped, Succeeds());
  EXPECT_TRUE(piped.out == ReadBytes(file)) << "another stream";
  // A pipe that broke half way, and one that brings all of it again.
  Command half{.args = {"import", "-", "--store", other_store(), "--quiet"},
               .input = piped.out.substr(0, piped.out.size() / 2)};
  EXPECT_THAT(Carrel(half), FailsWith(kFailed, Texts{"DATA_LOSS", "the stream ends at"}));
  EXPECT_EQ(JsonOf(Carrel({"ls", "--store", other_store(), "--json"}))["contexts"], json::array());
  EXPECT_FALSE(fs::is_empty(other_store() + "/importing"));
  half.input = piped.out;
  EXPECT_THAT(Carrel(half), Succeeds());
  EXPECT_EQ(AnswerOf(other_store(), kKept), answer_);
  EXPECT_TRUE(fs::is_empty(other_store() + "/importing"));
}

// From one running server into another, which publishes it while it serves.
TEST_F(TransferTest, BetweenServers_TheContextMovesWhileBothServe) {
  const std::string from = "unix:" + SocketPath("a"), to = "unix:" + SocketPath("b");
  const std::string file = path("kept.carrel");
  ASSERT_THAT(Carrel({"prefill", "--model", DemoModel(), "--input", document_, "--store",
                      other_store(), "--name", "first", "--quiet"}),
              Succeeds());
  {
    const Server a(store_, from), b(other_store(), to);
    const json exported = JsonOf(Carrel({"export", kKept, file, "--server", from, "--json"}));
    EXPECT_EQ(exported["bytes"], fs::file_size(file));
    EXPECT_THAT(Carrel({"export", "none", path("none"), "--server", from}),
                FailsWith(kFailed, Texts{"NOT_FOUND", "none"}));
    const json imported =
        JsonOf(Carrel({"import", file, "--server", to, "--as", "theirs", "--json"}));
    EXPECT_EQ(imported["content_id"], exported["content_id"]);
    EXPECT_EQ(imported["name"], "theirs");
    Args ask = Ask("theirs", {"--server", to});
    EXPECT_EQ(Carrel(ask).out, answer_);
    EXPECT_EQ(JsonOf(Carrel({"ls", "--server", to, "--json"}))["contexts"].size(), 2u);
    EXPECT_THAT(Carrel({"import", file, "--server", to}),
                FailsWith(kFailed, Texts{"ALREADY_EXISTS", "is published as theirs"}));
    // Half of it, and then all.
    EXPECT_THAT(Carrel({"rm", "theirs", "--server", to}), Succeeds());
    const std::string stream = ReadBytes(file);
    Command half{.args = {"import", "-", "--server", to, "--quiet"},
                 .input = stream.substr(0, stream.size() * 2 / 3)};
    EXPECT_THAT(Carrel(half), FailsWith(kFailed, Texts{"DATA_LOSS", "the stream ends at"}));
    EXPECT_EQ(JsonOf(Carrel({"ls", "--server", to, "--json"}))["contexts"].size(), 1u);
    EXPECT_THAT(Carrel({"import", file, "--server", to}), Succeeds());
    ask = Ask(kKept, {"--server", to});
    EXPECT_EQ(Carrel(ask).out, answer_);
  }
  EXPECT_EQ(ContentId(other_store(), kKept), ContentId(store_, kKept));
}

TEST_F(TransferTest, PrefillIntoAServedStore_IsVisibleThereAndNowhereElse) {
  const std::string address = "unix:" + SocketPath(), work = path("work");
  const Server server(store_, address);
  const Args prefill = {"prefill", "--model", DemoModel(), "--input", document_, "--store", work,
                        "--name",  "new",     "--server",  address,   "--quiet", "--json"};
  // Computed here by a run that never sent it.
  ASSERT_THAT(Carrel({"prefill", "--model", DemoModel(), "--input", document_, "--store", work,
                      "--name", "new", "--quiet"}),
              Succeeds());
  const std::string content_id = ContentId(work, "new");
  const json sent = JsonOf(Carrel(prefill));
  EXPECT_EQ(sent["content_id"], content_id);
  EXPECT_EQ(Carrel(Ask("new", {"--server", address})).out, answer_);
  EXPECT_EQ(JsonOf(Carrel({"ls", "--store", work, "--json"}))["contexts"], json::array());
  EXPECT_THAT(Carrel(prefill), FailsWith(kFailed, Texts{"ALREADY_EXISTS", "the server has"}));
  // A run that was killed when the server had published, and the folder still had it.
  const std::string stream = path("stream");
  ASSERT_THAT(Carrel({"export", "new", stream, "--server", address}), Succeeds());
  ASSERT_THAT(Carrel({"import", stream, "--store", work}), Succeeds());
  EXPECT_EQ(JsonOf(Carrel(prefill))["content_id"], content_id);
  EXPECT_EQ(JsonOf(Carrel({"ls", "--store", work, "--json"}))["contexts"], json::array());
  // From the beginning.
  EXPECT_THAT(Carrel({"rm", "new", "--server", address}), Succeeds());
  const json moved = JsonOf(Carrel(prefill));
  EXPECT_NE(moved["content_id"], content_id);
  // All layers went ahead; what was left is the token ids and the manifest.
  EXPECT_EQ(sent["bytes_ahead"], 0);
  EXPECT_GT(moved["bytes_ahead"], moved["bytes"].get<int64_t>() * 4 / 5);
  EXPECT_EQ(Carrel(Ask("new", {"--server", address})).out, answer_);
}

TEST_F(TransferTest, ImportOfSomethingElse_IsRefusedByName) {
  EXPECT_THAT(Carrel({"import", document_, "--store", other_store()}),
              FailsWith(kFailed, Texts{"DATA_LOSS", document_, "CARRELEX"}));
  EXPECT_THAT(Carrel({"import", path("absent"), "--store", other_store()}),
              FailsWith(kFailed, Texts{"NOT_FOUND", "absent"}));
  EXPECT_THAT(Carrel({"import", document_, "--store", other_store(), "--as", "a b"}),
              FailsWith(kBad, Texts{"a b"}));
}

TEST_F(TransferTest, Verify_TellsWhatIsDamagedByItsExitStatus) {
  for (const bool deep : {false, true}) {
    Args verify = {"verify", "--store", store_, "--json"};
    if (deep) verify.push_back("--deep");
    const json verified = JsonOf(Carrel(verify));
    EXPECT_EQ(verified["damaged"], 0);
    EXPECT_EQ(verified["contexts"][0]["name"], kKept);
    EXPECT_EQ(verified["contexts"][0]["content_id"], ContentId(store_, kKept));
    EXPECT_EQ(verified["contexts"][0]["errors"], json::array());
    EXPECT_GE(verified["contexts"][0]["segments"], 1 + 8 * 2 * 3);
    if (deep) {
      EXPECT_GE(verified["contexts"][0]["bytes"], kept_tokens_ * 8 * 2 * 2 * 64 * 2);
    }
  }
  const std::string address = "unix:" + SocketPath();
  {
    const Server server(store_, address);
    EXPECT_EQ(JsonOf(Carrel({"verify", kKept, "--server", address, "--deep", "--json"})),
              JsonOf(Carrel({"verify", kKept, "--store", store_, "--deep", "--json"})));
  }
  EXPECT_THAT(Carrel({"verify", "none", "--store", store_}),
              FailsWith(kFailed, Texts{"NOT_FOUND", "none"}));
  // The largest file is one of rows.
  std::string largest;
  for (const auto& file : fs::directory_iterator(store_ + "/db")) {
    if (file.path().extension() != ".sst") continue;
    if (largest.empty() || fs::file_size(file) > fs::file_size(largest)) largest = file.path();
  }
  FlipBit(largest, static_cast<int64_t>(fs::file_size(largest) / 3), 2);
  EXPECT_THAT(Carrel({"verify", "--store", store_}), Succeeds()) << "bytes are read by --deep";
  EXPECT_THAT(Carrel({"verify", "--store", store_, "--deep"}),
              FailsWith(kFailed, Texts{"DATA_LOSS", "1 contexts are damaged"}));
  const Outcome told = Carrel({"verify", kKept, "--store", store_, "--deep"});
  EXPECT_THAT(told.out, testing::HasSubstr("DAMAGED"));
  EXPECT_THAT(told.out, testing::HasSubstr("context kept: "));
  fs::remove(largest);
  EXPECT_THAT(Carrel({"verify", kKept, "--store", store_}), FailsWith(kFailed, Texts{"DATA_LOSS"}));
}

TEST_F(TransferTest, Upgrade_GivesAContentIdAndTheSameAnswers) {
  CARREL_ASSERT_OK(kvstore::MakeUnbound(store_, kKept));
  EXPECT_EQ(ContentId(store_, kKept), "");
  EXPECT_EQ(AnswerOf(store_, kKept), answer_);
  EXPECT_THAT(Carrel({"export", kKept, path("x"), "--store", store_}),
              FailsWith(kFailed, Texts{"FAILED_PRECONDITION", "carrel upgrade kept"}));
  const json upgraded = JsonOf(Carrel({"upgrade", "--store", store_, "--json"}));
  EXPECT_EQ(upgraded["upgraded"][0]["name"], kKept);
  EXPECT_EQ(upgraded["upgraded"][0]["content_id"], ContentId(store_, kKept));
  EXPECT_EQ(AnswerOf(store_, kKept), answer_);
  EXPECT_THAT(Carrel({"verify", kKept, "--store", store_, "--deep"}), Succeeds());
  EXPECT_EQ(Carrel({"upgrade", "--store", store_}).out, "nothing to upgrade\n");
  EXPECT_THAT(Carrel({"upgrade", kKept, "--store", store_}),
              FailsWith(kFailed, Texts{"is of format version 3 already"}));
  ExpectNothingLost();
}

}  // namespace
}  // namespace carrel::cli
