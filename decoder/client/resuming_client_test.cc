#include "decoder/client/resuming_client.h"

#include <deque>
#include <map>

#include "absl/time/clock.h"
#include "common/status.h"
#include "common/test_util.h"

namespace carrel::decoder {
namespace {

using absl::StatusCode;
using retrieval::RequestId;

// What stores were asked, in order, as text.
using Log = std::vector<std::string>;

// One stream to a store: answers as told until it breaks.
class FakeStream : public retrieval::Session {
 public:
  struct Script {
    std::string content_id = "c0ffee";
    int answers = 1000;  // parts that are given before the stream breaks
    int parts = 2;       // of each reply
    int64_t longer = 0;  // bytes of each part
    absl::Status open = absl::OkStatus();
  };
  FakeStream(Script script, Log* log) : script_(std::move(script)), log_(log) {}

  absl::StatusOr<retrieval::Opened> Open(const retrieval::OpenRequest& open) override {
    log_->push_back(absl::StrCat("open ", open.context, " ", open.content_id));
    RETURN_IF_ERROR(script_.open);
    retrieval::Opened opened;
    opened.context.tokens = 100;
    opened.context.content_id = opened.manifest = script_.content_id;
    opened.limits.max_candidate_sets = 2;
    return opened;
  }
  absl::StatusOr<RequestId> Send(retrieval::Query query) override {
    const std::string among =
        query.among_candidates_of == 0 ? "" : absl::StrCat(" among ", query.among_candidates_of);
    return Sent(absl::StrCat("query ", query.layer.value(), among), query.layer.value());
  }
  absl::StatusOr<RequestId> Send(retrieval::Fetch fetch) override {
    return Sent(absl::StrCat("fetch ", fetch.layer.value()), fetch.layer.value());
  }
  absl::StatusOr<retrieval::Part> Next(RequestId id) override {
    if (given_ == script_.answers) return Gone();
    ++given_;
    retrieval::Part part;
    part.statistics.candidates = layers_[id];
    part.statistics.rows = ++parts_[id];
    part.last = parts_[id] == script_.parts;
    part.bytes = 100 + script_.longer;
    return part;
  }
  void Forget(RequestId id) override { log_->push_back(absl::StrCat("forget ", id)); }
  bool broken() const override { return broken_; }
  int64_t bytes_sent() const override { return static_cast<int64_t>(layers_.size()) * 10; }
  int64_t bytes_received() const override { return given_ * 7; }

 private:
  absl::Status Gone() {
    broken_ = true;
    return absl::UnavailableError("the store is gone");
  }
  absl::StatusOr<RequestId> Sent(const std::string& what, int32_t layer) {
    if (given_ == script_.answers) return Gone();
    const RequestId id = ++last_id_;
    log_->push_back(absl::StrCat(what, " as ", id));
    layers_[id] = layer;
    return id;
  }
  const Script script_;
  Log* const log_;
  bool broken_ = false;
  int given_ = 0;
  RequestId last_id_ = 0;
  std::map<RequestId, int> parts_;
  std::map<RequestId, int32_t> layers_;
};

class ResumingClientTest : public testing::Test {
 protected:
  // Streams in the order in which they are connected; afterwards there is no store.
  std::unique_ptr<retrieval::Session> Client(std::deque<FakeStream::Script> scripts,
                                             absl::Duration retry_for = absl::Seconds(20)) {
    auto left = std::make_shared<std::deque<FakeStream::Script>>(std::move(scripts));
    return MakeResumingClient({.connect = [this, left](absl::Duration, const std::string& context)
                                   -> absl::StatusOr<std::unique_ptr<retrieval::Session>> {
                                 EXPECT_EQ(context, MakeOpen().context);
                                 ++connects_;
                                 if (left->empty()) return absl::UnavailableError("no server");
                                 auto stream = std::make_unique<FakeStream>(left->front(), &log_);
                                 left->pop_front();
                                 return stream;
                               },
                               .retry_for = retry_for,
                               .open_within = absl::Milliseconds(300),
                               .tell = [this](const std::string& what) { told_.push_back(what); }});
  }
  static retrieval::OpenRequest MakeOpen() { return {.context = "report"}; }
  static retrieval::Query Query(int32_t layer, bool speculative = false, RequestId among = 0) {
    retrieval::Query query;
    query.layer = Layer(layer);
    query.want = speculative ? retrieval::Want::kIds : retrieval::Want::kAttend;
    query.speculative = speculative;
    query.among_candidates_of = among;
    return query;
  }
  // "layer:part"
  static std::string Next(retrieval::Session& client, RequestId id) {
    const auto part = client.Next(id);
    if (!part.ok()) return part.status().ToString();
    return absl::StrCat(part->statistics.candidates, ":", part->statistics.rows,
                        part->last ? " last" : "");
  }

  Log log_, told_;
  int connects_ = 0;
};

TEST_F(ResumingClientTest, BrokenBetweenParts_OutstandingRequestsGoOnWhereTheyWere) {
  const auto client = Client({{.answers = 3}, {.answers = 0}, {}});
  CARREL_ASSERT_OK(client->Open(MakeOpen()));
  const RequestId done = *client->Send(Query(1)), half = *client->Send(Query(2)),
                  fetch = *client->Send(retrieval::Fetch());
  EXPECT_EQ(Next(*client, done), "1:1");
  EXPECT_EQ(Next(*client, done), "1:2 last");
  EXPECT_EQ(Next(*client, half), "2:1");
  log_.clear();
  EXPECT_EQ(Next(*client, half), "2:2 last");  // the stream broke twice meanwhile
  EXPECT_EQ(Next(*client, fetch), "0:1");
  EXPECT_EQ(Next(*client, fetch), "0:2 last");
  EXPECT_EQ(connects_, 3);
  EXPECT_EQ(log_,
            (Log{"open report c0ffee", "open report c0ffee", "query 2 as 1", "fetch 0 as 2"}));
  EXPECT_EQ(told_.size(), 2u);
  EXPECT_GE(client->bytes_sent(), 50);
  EXPECT_THAT(client->Next(done), StatusIs(StatusCode::kFailedPrecondition, "read wholly"));
}

TEST_F(ResumingClientTest, CandidatesAtTheStore_AreAskedForAgainBeforeTheQueryThatNamesThem) {
  const auto client = Client({{.answers = 2}, {}});
  CARREL_ASSERT_OK(client->Open(MakeOpen()));
  const RequestId ahead = *client->Send(Query(5, true));
  EXPECT_EQ(Next(*client, ahead), "5:1");
  EXPECT_EQ(Next(*client, ahead), "5:2 last");
  log_.clear();
  const auto named = client->Send(Query(5, false, ahead));  // finds the stream broken
  CARREL_ASSERT_OK(named);
  EXPECT_EQ(Next(*client, *named), "5:1");
  EXPECT_EQ(log_, (Log{"open report c0ffee", "query 5 as 1", "forget 1", "query 5 among 1 as 2"}));
  client->Forget(ahead);
  EXPECT_THAT(client->Send(Query(5, false, ahead)),
              StatusIs(StatusCode::kInvalidArgument, "no candidates"));
}

TEST_F(ResumingClientTest, ForgottenRequests_AreNotAskedForAgain) {
  const auto client = Client({{.answers = 0}, {}});
  CARREL_ASSERT_OK(client->Open(MakeOpen()));
  // Broken from the first request on: this one comes through on the second stream.
  const RequestId first = *client->Send(Query(1));
  client->Forget(first);
  EXPECT_THAT(client->Next(first), StatusIs(StatusCode::kFailedPrecondition, "forgotten"));
  EXPECT_EQ(Next(*client, *client->Send(Query(2))), "2:1");
}

TEST_F(ResumingClientTest, AnotherContextOfTheName_IsRefused) {
  const auto client = Client({{.answers = 0}, {.content_id = "0ther"}, {}});
  CARREL_ASSERT_OK(client->Open(MakeOpen()));
  EXPECT_THAT(client->Send(Query(1)), StatusIs(StatusCode::kFailedPrecondition, "another one"));
}

TEST_F(ResumingClientTest, OtherParts_AreRefused) {
  const auto client = Client({{.answers = 1}, {.longer = 1}});
  CARREL_ASSERT_OK(client->Open(MakeOpen()));
  const RequestId id = *client->Send(Query(1));
  EXPECT_EQ(Next(*client, id), "1:1");
  EXPECT_THAT(client->Next(id), StatusIs(StatusCode::kDataLoss, "other parts"));
}

TEST_F(ResumingClientTest, NoRetry_TheFirstBreakIsFinal) {
  const auto client = Client({{.answers = 0}, {}}, absl::ZeroDuration());
  CARREL_ASSERT_OK(client->Open(MakeOpen()));
  EXPECT_THAT(client->Send(Query(1)), StatusIs(StatusCode::kUnavailable, "gone"));
  EXPECT_EQ(connects_, 1);
}

TEST_F(ResumingClientTest, NoStoreComesBack_SaysForHowLongItWasWaitedFor) {
  const auto client = Client({{.answers = 0}}, absl::Milliseconds(400));
  CARREL_ASSERT_OK(client->Open(MakeOpen()));
  EXPECT_THAT(client->Send(Query(1)), StatusIs(StatusCode::kUnavailable, "400ms"));
  EXPECT_GE(connects_, 2);
}

TEST_F(ResumingClientTest, Open_TriesAgainWhereAStoreMayCome) {
  FakeStream::Script draining{.open = absl::UnavailableError("draining")};
  FakeStream::Script refusing{.open = absl::NotFoundError("no such context")};
  CARREL_EXPECT_OK(Client({draining, {}})->Open(MakeOpen()));
  EXPECT_THAT(Client({draining, draining, refusing, {}})->Open(MakeOpen()),
              StatusIs(StatusCode::kNotFound, "no such"));
  EXPECT_THAT(Client({})->Open(MakeOpen()), StatusIs(StatusCode::kUnavailable, "no server"));
  const int before = connects_;
  EXPECT_FALSE(Client({draining, {}}, absl::ZeroDuration())->Open(MakeOpen()).ok());
  EXPECT_EQ(connects_, before + 1);
}

}  // namespace
}  // namespace carrel::decoder
