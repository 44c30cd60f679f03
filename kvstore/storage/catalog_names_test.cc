#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "kvstore/storage/catalog.h"

namespace carrel::kvstore {
namespace {

CatalogEntry Readable(ContextId id, const std::string& name) {
  return {.id = id, .name = name, .manifest = v1::Manifest()};
}

TEST(CatalogNamesTest, FindsEachContextByItsNameAndId) {
  const ContextId one = ContextId::Random(), other = ContextId::Random();
  CatalogNames names({Readable(one, "one"), Readable(other, "other")});
  EXPECT_EQ(names.Find("one"), one);
  EXPECT_EQ(*names.NameOf(other), "other");
  EXPECT_EQ(names.Find("third"), std::nullopt);
  EXPECT_EQ(names.NameOf(ContextId::Random()), nullptr);
  EXPECT_TRUE(names.complete());
}

TEST(CatalogNamesTest, FollowsWhatIsPublishedAndDeleted) {
  const ContextId first = ContextId::Random(), second = ContextId::Random();
  CatalogNames names({Readable(first, "a")});
  names.Remove(first);
  EXPECT_EQ(names.Find("a"), std::nullopt);
  EXPECT_EQ(names.NameOf(first), nullptr);
  names.Add("a", second);
  EXPECT_EQ(names.Find("a"), second);
}

TEST(CatalogNamesTest, ADeletedContextHasAnIdAndNoName) {
  const ContextId id = ContextId::Random();
  const CatalogNames names({{.id = id, .name = "#1", .hidden = true, .manifest = v1::Manifest()}});
  EXPECT_EQ(names.Find("#1"), std::nullopt);
  EXPECT_NE(names.NameOf(id), nullptr);
  EXPECT_TRUE(names.complete());
}

TEST(CatalogNamesTest, IsIncompleteOnlyWhereANameCannotBeRead) {
  const auto with = [](const absl::Status& status) {
    return CatalogNames({{.id = ContextId::Random(), .name = "a", .manifest = status}});
  };
  EXPECT_TRUE(with(absl::FailedPreconditionError("format version 99")).complete());
  EXPECT_FALSE(with(absl::DataLossError("missing")).complete());
}

}  // namespace
}  // namespace carrel::kvstore
