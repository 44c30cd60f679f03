// Documents of a store in this process, with the demo model.
#include "http_api/documents.h"

#include <filesystem>
#include <stdexcept>

#include "absl/time/clock.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/checkpoint.h"

namespace carrel::http_api {
namespace {

TEST(DocumentsTest, WhatAWatcherThrows_IsNoMatterOfTheDocument) {
  const auto model =
      *library::LoadedModel::Load(SourceFolder() + "/models/demo", "", /*threads=*/2);
  int calls = 0;  // under the documents' lock
  DocumentsConfig config;
  config.address.folder = FreshTempDir() + "/store";
  config.writable = true;
  auto opened = library::StoreAccess::Open(config.address, kvstore::StoreMode::kReadWrite);
  CARREL_ASSERT_OK(opened.status());
  const std::shared_ptr<library::StoreAccess> store = *std::move(opened);
  const auto answerer = Answerer::Create({}, model, store);
  const auto documents = Documents::Create(config, model, store, answerer.get());
  CARREL_ASSERT_OK(documents.status());
  const auto sees = [](const std::string&) { return true; };
  const auto tokens = model->checkpoint().EncodeDocument(
      "The badge number of Ada is 4711. The badge number of Ben is 1234.");
  CARREL_ASSERT_OK(tokens.status());
  const auto added = (*documents)->Add("doc", *tokens, nullptr, sees);
  CARREL_ASSERT_OK(added.status());
  CARREL_EXPECT_OK((*documents)->Watch("doc", [&](const Document&) -> bool {
    if (++calls > 1) throw std::runtime_error("planted");
    return true;
  }));
  const absl::Time until = absl::Now() + absl::Seconds(60);
  DocumentState state = DocumentState::kQueued;
  while (state != DocumentState::kReady && absl::Now() < until) {
    const auto now = (*documents)->Get("doc");
    CARREL_ASSERT_OK(now.status());
    state = now->state;
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(state, DocumentState::kReady);
  EXPECT_LE(calls, 2);  // it is not told again
}

}  // namespace
}  // namespace carrel::http_api
