#include "serving/waiting_documents.h"

#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/escaping.h"
#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/resource_status.h"
#include "common/test_util.h"
#include "serving/status_details.h"

namespace carrel::serving {
namespace {

using absl::StatusCode;

WaitingDocument Document(const std::string& name) {
  return {.name = name,
          .who = "alice",
          .tokens = {1, 70000, 3},
          .fingerprint = {{"kv_dtype", "bf16"}, {"weights_sha256", "5eed"}},
          .created_unix_s = 1764000000};
}

void Write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

TEST(WaitingDocumentsTest, WhatIsPut_ComesBackInOrder_UntilItIsRemoved) {
  const WaitingDocuments waiting(FreshTempDir());
  EXPECT_TRUE(waiting.Read()->empty());
  CARREL_EXPECT_OK(waiting.Remove("b"));
  for (const char* name : {"b", "a.tmp", "c.document"})
    CARREL_ASSERT_OK(waiting.Put(Document(name)));
  const auto found = waiting.Read();
  CARREL_ASSERT_OK(found);
  ASSERT_EQ(found->size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const WaitingDocuments::Found& one = (*found)[i];
    CARREL_ASSERT_OK(one.document);
    EXPECT_EQ(one.name, (std::vector<std::string>{"b", "a.tmp", "c.document"})[i]);
    EXPECT_EQ(one.document->name, one.name);
    EXPECT_EQ(one.document->who, "alice");
    EXPECT_EQ(one.document->tokens, Document("").tokens);
    EXPECT_EQ(one.document->fingerprint, Document("").fingerprint);
    EXPECT_EQ(one.document->created_unix_s, 1764000000);
  }
  CARREL_EXPECT_OK(waiting.Remove("b"));
  EXPECT_EQ(waiting.Read()->front().name, "a.tmp");
  EXPECT_THAT(waiting.Put(Document("../x")), StatusIs(StatusCode::kInvalidArgument, "../x"));
  EXPECT_THAT(waiting.Remove("../x"), StatusIs(StatusCode::kInvalidArgument, "../x"));
}

TEST(WaitingDocumentsTest, OfOneThatFailed_ItsErrorStays_UntilItIsBroughtAgainOrRemoved) {
  const std::string store = FreshTempDir();
  const WaitingDocuments waiting(store);
  // Names may end as the files do.
  for (const char* name : {"a", "b.failed", "c.document"})
    CARREL_ASSERT_OK(waiting.Put(Document(name)));
  CARREL_ASSERT_OK(
      waiting.PutFailure("a", absl::ResourceExhaustedError("disk full: No space left")));
  CARREL_ASSERT_OK(waiting.PutFailure("c.document", absl::DataLossError(std::string(100000, 'x'))));
  std::map<std::string, absl::Status> found;
  const auto all = waiting.Read();
  CARREL_ASSERT_OK(all);
  for (const WaitingDocuments::Found& one : *all) found[one.name] = one.document.status();
  ASSERT_EQ(found.size(), 3u);
  EXPECT_THAT(found["a"], StatusIs(StatusCode::kResourceExhausted, "No space left"));
  EXPECT_TRUE(IsOfMachine(found["a"]) && IsDiskFull(found["a"]));
  CARREL_EXPECT_OK(found["b.failed"]);
  EXPECT_EQ(found["c.document"].code(), StatusCode::kDataLoss);
  EXPECT_LT(found["c.document"].message().size(), 5000u);
  CARREL_ASSERT_OK(waiting.Put(Document("a")));
  CARREL_EXPECT_OK(waiting.Remove("c.document"));
  EXPECT_EQ(waiting.Read()->size(), 2u);
  const auto left = waiting.Read();
  CARREL_ASSERT_OK(left);
  for (const WaitingDocuments::Found& one : *left) CARREL_EXPECT_OK(one.document);
  // A file that somebody changed is an error, whatever it says.
  CARREL_EXPECT_OK(waiting.Remove("a"));
  CARREL_EXPECT_OK(waiting.Remove("b.failed"));
  for (const char* bytes : {"", "{", "[]", "{\"code\": 0}", "{\"code\": \"x\", \"message\": 5}",
                            "{\"code\": 1000000}"}) {
    Write(store + "/waiting/a.failed", bytes);
    ASSERT_EQ(waiting.Read()->size(), 1u);
    EXPECT_FALSE(waiting.Read()->front().document.ok()) << bytes;
  }
}

// Of memory, too: neither is a matter of how often somebody comes.
TEST(WaitingDocumentsTest, WhatTheMachineLacked_IsTheServersError) {
  const WaitingDocuments waiting(FreshTempDir());
  CARREL_ASSERT_OK(waiting.Put(Document("a")));
  CARREL_ASSERT_OK(waiting.PutFailure("a", absl::ResourceExhaustedError("x: out of memory")));
  EXPECT_TRUE(IsOfMachine(waiting.Read()->front().document.status()));
}

TEST(WaitingDocumentsTest, Version1_IsRead_AndIsNobodysInParticular) {
  const std::string store = FreshTempDir();
  std::filesystem::create_directories(store + "/waiting");
  Write(store + "/waiting/a.document",
        absl::HexStringToBytes(
            "080112016118808292c906222a0a100a086b765f64747970651204626631360a160a0e7765696768"
            "74735f7368613235361204356565642a0c0100000070110100030000003240373539346236373035"
            "63386165313961306263666331373464323365333165353962386238666235343739393236376164"
            "613832343338313734313935313538"));
  const auto found = WaitingDocuments(store).Read();
  CARREL_ASSERT_OK(found);
  ASSERT_EQ(found->size(), 1u);
  CARREL_ASSERT_OK(found->front().document);
  EXPECT_EQ(found->front().document->who, "");
  EXPECT_EQ(found->front().document->tokens, Document("").tokens);
}

TEST(WaitingDocumentsTest, FilesThatAreOthers_AreRefusedByName) {
  const std::string store = FreshTempDir(), file = store + "/waiting/a.document";
  const WaitingDocuments waiting(store);
  CARREL_ASSERT_OK(waiting.Put(Document("a")));
  const std::string good = *ReadFile(file);
  EXPECT_EQ(absl::BytesToHexString(good),  // golden: version 2
            "080212016118808292c906222a0a100a086b765f64747970651204626631360a160a0e7765696768"
            "74735f7368613235361204356565642a0c0100000070110100030000003240643432663365363364"
            "32336163666639306365326631616532383735343165353439646530366636373166346265663061"
            "3965343637333035616636636531353a05616c696365");
  const auto status = [&] { return waiting.Read()->front().document.status(); };
  const auto changed = [&](auto edit) {
    v1::WaitingDocument message;
    EXPECT_TRUE(message.ParseFromString(good));
    edit(message);
    return message.SerializeAsString();
  };
  for (size_t bytes = 0; bytes < good.size(); ++bytes) {
    Write(file, good.substr(0, bytes));
    EXPECT_FALSE(status().ok()) << bytes;
  }
  Write(file, changed([](auto& message) { message.set_format_version(3); }));
  EXPECT_THAT(status(), StatusIs(StatusCode::kFailedPrecondition, "version 3, must be 1 to 2"));
  Write(file, changed([](auto& message) { message.set_format_version(0); }));
  EXPECT_THAT(status(), StatusIs(StatusCode::kFailedPrecondition, "version 0"));
  for (const char* who : {"", "bob"}) {
    Write(file, changed([&](auto& message) { message.set_who(who); }));
    EXPECT_THAT(status(), StatusIs(StatusCode::kDataLoss, file)) << who;
  }
  Write(file, changed([](auto& message) { (*message.mutable_token_ids())[1] ^= 1; }));
  EXPECT_THAT(status(), StatusIs(StatusCode::kDataLoss, file));
  Write(file, changed([](auto& message) { message.set_name("b"); }));
  EXPECT_THAT(status(), StatusIs(StatusCode::kDataLoss, file));
  // What a write left that was interrupted goes.
  Write(file, good);
  Write(file + ".tmp", "x");
  CARREL_EXPECT_OK(status());
  EXPECT_FALSE(std::filesystem::exists(file + ".tmp"));
}

}  // namespace
}  // namespace carrel::serving
