#include "http_api/api_error.h"

#include <nlohmann/json.hpp>

#include "common/resource_status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;
using serving::OfMachine;

TEST(ApiErrorTest, WhatTravelsWithAStatus_IsSaid_AndTheInnermostCounts) {
  const absl::Status plain = absl::ResourceExhaustedError("later");
  EXPECT_EQ(ErrorOf(plain).status, 429);
  EXPECT_EQ(json::parse(ErrorOf(plain).body)["error"], (json{{"message", "later"},
                                                             {"type", "rate_limit_error"},
                                                             {"param", nullptr},
                                                             {"code", nullptr}}));
  absl::Status told =
      WithCode(WithParam(absl::InvalidArgumentError("long"), "prompt"), kContextLengthExceeded);
  told = WithParam(told, "another");
  const json error = json::parse(ErrorOf(told).body)["error"];
  EXPECT_EQ(error["param"], "prompt");
  EXPECT_EQ(error["code"], "context_length_exceeded");
  EXPECT_EQ(ErrorOf(told).status, 400);
  const HttpError full = ErrorOf(WithHttpStatus(plain, 507));
  EXPECT_EQ(full.status, 507);
  EXPECT_EQ(json::parse(full.body)["error"]["type"], "server_error");
  EXPECT_EQ(ErrorOf(WithHttpStatus(absl::InvalidArgumentError("a picture"), 415)).status, 415);
  const HttpError wait = ErrorOf(WithRetryAfter(absl::UnavailableError("40%"), absl::Seconds(3)));
  ASSERT_EQ(wait.fields.size(), 1u);
  EXPECT_EQ(wait.fields[0], (std::pair<std::string, std::string>("Retry-After", "3")));
  EXPECT_TRUE(WithParam(absl::OkStatus(), "x").ok());
}

TEST(ApiErrorTest, WhatTheMachineLacks_IsItsOwnError) {
  const absl::Status memory = absl::ResourceExhaustedError("a document: out of memory");
  EXPECT_EQ(ErrorOf(OfMachine(memory)).status, 503);
  EXPECT_EQ(json::parse(ErrorOf(OfMachine(memory)).body)["error"]["type"], "server_error");
  EXPECT_EQ(ErrorOf(OfMachine(MakeDiskFull("no room"))).status, 507);
  EXPECT_EQ(ErrorOf(OfMachine(absl::DataLossError("x"))).status, 500);
  EXPECT_TRUE(OfMachine(absl::OkStatus()).ok());
}

TEST(ApiErrorTest, BytesThatAreNoUtf8_AreStillJson) {
  const std::string event = ErrorEvent(absl::InternalError("a\xff\nb"));
  EXPECT_EQ(event.substr(0, 6), "data: ");
  EXPECT_EQ(event.find('\n'), event.size() - 2);
  EXPECT_TRUE(json::accept(event.substr(6)));
}

}  // namespace
}  // namespace carrel::http_api
