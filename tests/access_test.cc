// Keys, TLS and the audit log as an operator and his users meet them.
#include <signal.h>
#include <sys/stat.h>

#include <filesystem>

#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/certificate_test_util.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFailed = 1, kUsage = 2;

class AccessTest : public StoreTest {
 protected:
  // A new key: its file, and its entry of the keys file.
  std::pair<std::string, json> NewKey(const std::string& name, const Args& more) const {
    const json made = JsonOf(Carrel(With({"keys", "new", name, "--json"}, more)));
    const std::string file = WriteFile(name + ".key", std::string(made["key"]) + "\n");
    EXPECT_EQ(chmod(file.c_str(), 0600), 0);
    return {file, made["entry"]};
  }
  std::string WriteKeys(const std::vector<json>& entries) const {
    return WriteFile("keys.json", json{{"keys", entries}}.dump());
  }
  // A TCP address as the server that runs has printed it.
  static std::string AddressOf(Process& process) {
    EXPECT_TRUE(WaitUntil([&] { return process.err().find("ready on ") != std::string::npos; }));
    const std::string text = process.err();
    const size_t from = text.find("ready on ") + 9;
    return text.substr(from, text.find_first_of("; \n", from) - from);
  }
  std::unique_ptr<Process> Serve(const Args& more) const {
    return Process::Start({.args = With({"serve", "--store", store_}, more)});
  }
};

// Every call presents it, those that take long as well.
TEST_F(AccessTest, Keys_MoveContextsAndVerifyThem) {
  const auto [mover, all] = NewKey("mover", {"--rights", "list,open,import,admin"});
  const std::string keys = WriteKeys({all}), address = "unix:" + SocketPath(),
                    file = path("stream");
  const auto server = Serve({"--listen", address, "--keys", keys});
  AddressOf(*server);
  const Args at = {"--server", address, "--key-file", mover};
  EXPECT_THAT(Carrel({"export", kKept, file, "--server", address}),
              FailsWith(kFailed, Texts{"UNAUTHENTICATED"}));
  EXPECT_THAT(Carrel(With({"export", kKept, file}, at)), Succeeds());
  EXPECT_THAT(Carrel(With({"verify", kKept, "--deep"}, at)), Succeeds());
  const std::string other = path("other");
  ASSERT_THAT(Carrel({"prefill", "--model", DemoModel(), "--input", document_, "--store", other,
                      "--name", "theirs", "--quiet"}),
              Succeeds());
  ASSERT_THAT(Carrel({"export", "theirs", path("theirs"), "--store", other}), Succeeds());
  EXPECT_THAT(Carrel({"import", path("theirs"), "--server", address}),
              FailsWith(kFailed, Texts{"UNAUTHENTICATED"}));
  EXPECT_THAT(Carrel(With({"import", path("theirs")}, at)), Succeeds());
  const Args prefill = {"prefill", "--model",    DemoModel(), "--input", document_,
                        "--store", path("work"), "--name",    "new",     "--quiet"};
  EXPECT_THAT(Carrel(With(prefill, {"--server", address})),
              FailsWith(kFailed, Texts{"UNAUTHENTICATED"}));
  EXPECT_THAT(Carrel(With(prefill, at)), Succeeds());
  EXPECT_EQ(Carrel(Ask("new", at)).out, answer_);
}

TEST_F(AccessTest, Keys_OpenWhatTheyAreForAndNothingElse) {
  const auto [reader, read] = NewKey("reader", {});
  const auto [admin, all] = NewKey("admin", {"--rights", "list,open,delete"});
  const auto [other, none] = NewKey("other", {"--contexts", "other-*"});
  const std::string keys = WriteKeys({read, all, none}), log = path("audit.jsonl");
  const std::string address = "unix:" + SocketPath();
  EXPECT_THAT(Carrel({"keys", "check", keys}), Succeeds());
  const auto server = Serve({"--listen", address, "--keys", keys, "--audit-log", log});
  AddressOf(*server);
  const Args at = {"--server", address};
  EXPECT_THAT(Carrel(With({"ls"}, at)),
              FailsWith(kFailed, Texts{"UNAUTHENTICATED", "--key-file", "CARREL_KEY_FILE"}));
  EXPECT_EQ(Carrel(Ask(kKept, With(at, {"--key-file", reader}))).out, answer_);
  EXPECT_EQ(Carrel({.args = Ask(kKept, at), .environment = {{"CARREL_KEY_FILE", reader}}}).out,
            answer_);
  EXPECT_THAT(Carrel(With({"rm", kKept, "--key-file", reader}, at)),
              FailsWith(kFailed, Texts{"PERMISSION_DENIED", "key reader lacks the right delete"}));
  EXPECT_THAT(Carrel(Ask(kKept, With(at, {"--key-file", other}))),
              FailsWith(kFailed, Texts{"NOT_FOUND", "context kept is not in the store"}));
  const Outcome nothing = Carrel(With({"ls", "--json", "--key-file", other}, at));
  EXPECT_THAT(nothing, Succeeds());
  EXPECT_EQ(nothing.out.find(kKept), std::string::npos) << nothing.out;

  // The log is rotated, and the keys are read, on SIGHUP.
  fs::rename(log, log + ".1");
  WriteKeys({all});
  server->Signal(SIGHUP);
  ASSERT_TRUE(WaitUntil([&] { return fs::exists(log); }));
  EXPECT_THAT(Carrel(With({"ls", "--key-file", reader}, at)),
              FailsWith(kFailed, Texts{"UNAUTHENTICATED", "not valid"}));
  EXPECT_THAT(Carrel(With({"ls", "--key-file", admin}, at)), Succeeds());
  const std::string before = ReadBytes(log + ".1"), after = ReadBytes(log);
  EXPECT_NE(before.find(R"("event":"open","key":"reader")"), std::string::npos) << before;
  EXPECT_NE(after.find(R"("event":"denied")"), std::string::npos) << after;
  server->Signal(SIGTERM);
  EXPECT_THAT(server->Wait(), Succeeds());
  ExpectNothingLost();
}

TEST_F(AccessTest, OpenAddress_IsRefusedUnlessItIsGuardedOrWantedSo) {
  EXPECT_THAT(Carrel({"serve", "--store", store_, "--listen", "0.0.0.0:0"}),
              FailsWith(kFailed, Texts{"0.0.0.0:0", "TLS", "--keys", "--insecure"}));
  const auto server = Serve({"--listen", "0.0.0.0:0", "--insecure"});
  const std::string address = AddressOf(*server);
  EXPECT_NE(server->err().find("INSECURE"), std::string::npos) << server->err();
  const std::string local = "127.0.0.1" + address.substr(address.rfind(':'));
  EXPECT_THAT(Carrel({"ls", "--server", local}), Succeeds());
  EXPECT_THAT(Carrel({"rm", kKept, "--server", local}),
              FailsWith(kFailed, Texts{"PERMISSION_DENIED"}));
  // A key is not sent where everybody reads it.
  const auto key = NewKey("k", {}).first;
  EXPECT_THAT(Carrel({"ls", "--server", "192.0.2.1:1", "--key-file", key}),
              FailsWith(kFailed, Texts{"--tls-ca is needed"}));
  ExpectNothingLost();
}

TEST_F(AccessTest, Tls_BothSidesKnowEachOther) {
  const TestAuthority authority, stranger;
  const std::string ours = path("tls"), client = path("client");
  fs::create_directory(ours);
  fs::create_directory(client);
  TestAuthority::Write(ours, authority.Issue({.common_name = "server", .dns = "localhost"}),
                       authority.certificate());
  TestAuthority::Write(client, authority.Issue({.common_name = "me"}), authority.certificate());
  const auto server = Serve({"--listen", "127.0.0.1:0", "--tls-cert", ours + "/certificate.pem",
                             "--tls-key", ours + "/key.pem", "--tls-client-ca", ours + "/ca.pem"});
  const Args at = {"--server", AddressOf(*server)};
  const Args tls = With(at, {"--tls-ca", client + "/ca.pem"});
  const Args mutual =
      With(tls, {"--tls-cert", client + "/certificate.pem", "--tls-key", client + "/key.pem"});
  EXPECT_EQ(Carrel(Ask(kKept, mutual)).out, answer_);
  EXPECT_THAT(Carrel(With({"ls"}, mutual)), Succeeds());
  EXPECT_THAT(Carrel(Ask(kKept, tls)), FailsWith(kFailed, Texts{"UNAVAILABLE"}));
  EXPECT_THAT(Carrel(Ask(kKept, at)), FailsWith(kFailed, Texts{"UNAVAILABLE", "--tls-ca"}));
  WriteBytes(client + "/ca.pem", stranger.certificate());
  EXPECT_THAT(Carrel(Ask(kKept, mutual)), FailsWith(kFailed, Texts{"UNAVAILABLE"}));
  EXPECT_THAT(Carrel(With({"ls", "--tls-cert", "x"}, at)),
              FailsWith(kUsage, Texts{"need --tls-ca"}));
  ExpectNothingLost();
}

TEST_F(AccessTest, KeyFiles_ThatAreWrongAreNamed) {
  const Args at = {"ls", "--server", "unix:" + SocketPath(), "--key-file"};
  const std::string open = WriteFile("open.key", "carrel_x\n"),
                    empty = WriteFile("empty.key", "\nx");
  ASSERT_EQ(chmod(open.c_str(), 0644), 0);
  ASSERT_EQ(chmod(empty.c_str(), 0600), 0);
  EXPECT_THAT(Carrel(With(at, {open})), FailsWith(kUsage, Texts{"open.key", "everybody may read"}));
  EXPECT_THAT(Carrel(With(at, {empty})), FailsWith(kUsage, Texts{"empty.key", "no key"}));
  EXPECT_THAT(Carrel(With(at, {path("none")})), FailsWith(kFailed, Texts{"none"}));
  EXPECT_THAT(Carrel({"keys", "new", "k", "--rights", "everything"}),
              FailsWith(kUsage, Texts{"is no right"}));
  EXPECT_EQ(Carrel({.args = {"keys", "hash"}, .input = "abc\n"}).out,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\n");
}

}  // namespace
}  // namespace carrel::cli
