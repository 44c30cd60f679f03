#include "decoder/client/resuming_client.h"

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "common/routing.h"
#include "common/status.h"
#include "retrieval/errors.h"

namespace carrel::decoder {
namespace {

using retrieval::Fetch;
using retrieval::Opened;
using retrieval::OpenRequest;
using retrieval::Part;
using retrieval::Query;
using retrieval::RequestId;

constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(2);
constexpr absl::Duration kLongestConnect = absl::Seconds(10);

// Pauses that double, each up to half longer or shorter: clients of one store do not come back all
// at once.
class Backoff {
 public:
  absl::Duration Next() {
    const absl::Duration pause = pause_ * std::uniform_real_distribution<>(0.5, 1.5)(random_);
    pause_ = std::min(2 * pause_, kLongestPause);
    return pause;
  }

 private:
  std::mt19937_64 random_{std::random_device()()};
  absl::Duration pause_ = kFirstPause;
};

// What a store that restarts, drains or still counts the old session answers.
bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsResourceExhausted(status) ||
         absl::IsDeadlineExceeded(status);
}

// Invariants
//   1. requests_ holds what was sent and is neither forgotten nor taken to its last part, and
//      candidates_ the speculative queries that the store keeps candidates of; by our ids, ascending.
//   2. Each of requests_ was sent on client_, or client_ is broken.
class ResumingClient final : public retrieval::Session {
 public:
  explicit ResumingClient(ResumeConfig config) : config_(std::move(config)) {}

  absl::StatusOr<Opened> Open(const OpenRequest& open) override {
    open_ = open;
    const bool retry = config_.retry_for > absl::ZeroDuration();
    const absl::Time until = absl::Now() + config_.open_within;
    Backoff backoff;
    absl::Status status = ConnectAndOpen(config_.open_within);
    // What the store answered stands: it asked for the context elsewhere for as long as that makes sense.
    while (!status.ok() && retry && absl::IsUnavailable(status) && !Answered(status)) {
      const absl::Duration pause = backoff.Next();
      if (absl::Now() + pause >= until) break;
      absl::SleepFor(pause);
      status = ConnectAndOpen(until - absl::Now());
    }
    RETURN_IF_ERROR(status);
    is_open_ = true;
    // Whatever the store comes back with must be this.
    if (!opened_.context.content_id.empty()) open_.content_id = opened_.context.content_id;
    return opened_;
  }

  absl::StatusOr<RequestId> Send(Query query) override {
    Request request;
    request.query = std::move(query);
    return Add(std::move(request));
  }

  absl::StatusOr<RequestId> Send(Fetch fetch) override {
    Request request;
    request.fetch = std::move(fetch);
    return Add(std::move(request));
  }

  absl::StatusOr<Part> Next(RequestId id) override {
    const auto it = requests_.find(id);
    if (it == requests_.end()) {
      return retrieval::NothingToCome(id);
    }
    Request& request = it->second;
    for (;;) {
      absl::StatusOr<Part> reply = client_ == nullptr ? absl::UnavailableError("the store is gone")
                                                      : client_->Next(request.sent_as);
      if (!reply.ok()) {
        // An answer that is an error, also of a store that has died since, stands.
        if (!broken() || !absl::IsUnavailable(reply.status())) {
          requests_.erase(it);
          return reply.status();
        }
        RETURN_IF_ERROR(Resume(reply.status()));
        continue;
      }
      const int64_t bytes = reply->bytes;
      if (request.skip > 0) {
        const int64_t before = request.taken[request.taken.size() - request.skip--];
        if (bytes == before && !reply->last) continue;
        return absl::DataLossError(absl::StrCat(
            "request ", id, ": the store that came back answers in other parts: ", bytes,
            " bytes where there were ", before));
      }
      request.taken.push_back(bytes);
      if (reply->last) requests_.erase(it);
      return reply;
    }
  }

  void Forget(RequestId id) override {
    candidates_.erase(id);
    const auto it = requests_.find(id);
    if (it == requests_.end()) return;
    if (client_ != nullptr) client_->Forget(it->second.sent_as);
    requests_.erase(it);
  }

  bool broken() const override { return client_ == nullptr || client_->broken(); }
  int64_t bytes_sent() const override {
    return sent_before_ + (client_ == nullptr ? 0 : client_->bytes_sent());
  }
  int64_t bytes_received() const override {
    return received_before_ + (client_ == nullptr ? 0 : client_->bytes_received());
  }

 private:
  struct Request {
    Query query;
    std::optional<Fetch> fetch;  // instead of query
    RequestId sent_as = 0;       // on client_
    std::vector<int64_t> taken;  // bytes of each part that was handed out
    size_t skip = 0;             // of the parts to come, those that were
  };

  absl::Status ConnectAndOpen(absl::Duration within) {
    Disconnect();
    ASSIGN_OR_RETURN(client_, config_.connect(std::min(within, kLongestConnect), open_.context));
    ASSIGN_OR_RETURN(Opened opened, client_->Open(open_));
    if (!is_open_) {
      opened_ = std::move(opened);
      return absl::OkStatus();
    }
    if (opened.manifest != opened_.manifest || opened.context.tokens != opened_.context.tokens ||
        opened.zone != opened_.zone) {
      return absl::FailedPreconditionError(absl::StrCat(
          "context ", open_.context, ": the store came back with another one of this name"));
    }
    return absl::OkStatus();
  }

  absl::Status SendOne(Request& request) {
    request.skip = request.taken.size();
    absl::StatusOr<RequestId> sent;
    if (request.fetch.has_value()) {
      sent = client_->Send(*request.fetch);
    } else {
      Query query = request.query;
      if (query.among_candidates_of != 0) {
        const auto of = candidates_.find(query.among_candidates_of);
        if (of == candidates_.end()) {
          return absl::InvalidArgumentError(
              absl::StrCat("query: among_candidates_of=", query.among_candidates_of,
                           " keeps no candidates (any more)"));
        }
        query.among_candidates_of = of->second.sent_as;
      }
      sent = client_->Send(std::move(query));
    }
    if (!sent.ok()) return sent.status();
    request.sent_as = *sent;
    return absl::OkStatus();
  }

  absl::StatusOr<RequestId> Add(Request request) {
    const RequestId id = next_id_++;
    absl::Status status =
        client_ == nullptr ? absl::UnavailableError("the store is gone") : SendOne(request);
    if (!status.ok() && !broken()) return status;
    const bool keeps = !request.fetch.has_value() && request.query.keeps_candidates();
    if (keeps) {
      candidates_[id] = request;
      // The store keeps no more either.
      const auto most =
          static_cast<size_t>(std::max<int64_t>(1, opened_.limits.max_candidate_sets));
      while (candidates_.size() > most) candidates_.erase(candidates_.begin());
    }
    requests_[id] = std::move(request);
    if (!status.ok()) status = Resume(status);
    if (!status.ok()) {
      requests_.erase(id);
      candidates_.erase(id);
      return status;
    }
    return id;
  }

  // In the order in which they were sent first: a query may name an earlier one's candidates.
  absl::Status SendAllAgain() {
    auto request = requests_.begin();
    for (auto& [id, candidates] : candidates_) {
      for (; request != requests_.end() && request->first < id; ++request) {
        RETURN_IF_ERROR(SendOne(request->second));
      }
      RETURN_IF_ERROR(SendOne(candidates));
      if (request != requests_.end() && request->first == id) {
        request->second.sent_as = candidates.sent_as;
        request->second.skip = request->second.taken.size();
        ++request;
      } else {
        client_->Forget(candidates.sent_as);  // its reply was read
      }
    }
    for (; request != requests_.end(); ++request) RETURN_IF_ERROR(SendOne(request->second));
    return absl::OkStatus();
  }

  void Disconnect() {
    if (client_ == nullptr) return;
    sent_before_ += client_->bytes_sent();
    received_before_ += client_->bytes_received();
    client_.reset();
  }

  // The stream broke by `why`.
  absl::Status Resume(const absl::Status& why) {
    if (config_.retry_for <= absl::ZeroDuration()) return why;
    Tell(absl::StrCat(std::string(why.message()), "; trying again for ",
                      absl::FormatDuration(config_.retry_for)));
    const absl::Time begin = absl::Now(), until = begin + config_.retry_for;
    Backoff backoff;
    absl::Status last = why;
    for (;;) {
      const absl::Duration pause = backoff.Next();
      if (absl::Now() + pause >= until) break;
      absl::SleepFor(pause);
      absl::Status status = ConnectAndOpen(until - absl::Now());
      if (status.ok()) status = SendAllAgain();
      if (status.ok()) {
        Tell(absl::StrCat(
            "the store is back after ",
            absl::FormatDuration(absl::Trunc(absl::Now() - begin, absl::Milliseconds(1)))));
        return absl::OkStatus();
      }
      if (!MayPass(status)) return status;
      last = status;
    }
    Disconnect();
    return absl::Status(last.code(), absl::StrCat(last.message(), "; the store was gone for ",
                                                  absl::FormatDuration(config_.retry_for)));
  }

  void Tell(const std::string& what) const {
    if (config_.tell) config_.tell(what);
  }

  const ResumeConfig config_;
  std::unique_ptr<retrieval::Session> client_;  // null before Open, and while there is no store
  OpenRequest open_;
  Opened opened_;
  bool is_open_ = false;
  RequestId next_id_ = 1;
  std::map<RequestId, Request> requests_;
  std::map<RequestId, Request> candidates_;
  int64_t sent_before_ = 0, received_before_ = 0;  // by earlier clients
};

}  // namespace

std::unique_ptr<retrieval::Session> MakeResumingClient(ResumeConfig config) {
  return std::make_unique<ResumingClient>(std::move(config));
}

}  // namespace carrel::decoder
