#include "library/embedded_client.h"

#include <spdlog/spdlog.h>

#include <atomic>
#include <deque>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/metrics.h"
#include "common/shown.h"
#include "common/status.h"
#include "common/thrown.h"
#include "decoder/client/wire.h"
#include "kvstore/engine/engine.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/service/convert.h"
#include "retrieval/errors.h"

namespace carrel::library {
namespace {

using kvstore::Reply;
using kvstore::Session;
using retrieval::RequestId;

// Of one request, made and not yet taken.
constexpr size_t kPartsAhead = 3;

absl::Status Refusal(const absl::Status& status, const retrieval::OpenRequest& open) {
  if (!absl::IsNotFound(status)) return status;
  return absl::NotFoundError(absl::StrCat("context ", Shown(open.context), " is not in the store"));
}

Counter& ReplyBytes() {
  static Counter& total = CounterOf("carrel_reply_bytes_total", "Bytes of replies, as messages.");
  return total;
}

// What a client and the engine's tasks for it share.
//
// Invariants
//   1. A request's task is run by whoever takes it from there, under mu_; its parts are made by
//      whoever set `making`.
//   2. requests_ holds what was sent and is neither taken to its last part nor forgotten, and what
//      was forgotten before the candidates were found that it keeps.
//   3. What a request holds is destroyed without mu_: others may be waiting for its candidates.
class Conversation : public std::enable_shared_from_this<Conversation> {
 public:
  explicit Conversation(kvstore::Engine* engine) : engine_(engine) {}

  absl::StatusOr<retrieval::Opened> Open(const retrieval::OpenRequest& open);
  // later: nobody waits for it now: an engine thread answers it.
  absl::Status Send(RequestId id, retrieval::Query query, bool later);
  absl::Status Send(RequestId id, retrieval::Fetch fetch);
  absl::StatusOr<retrieval::Part> Next(RequestId id, ThreadPool* pool);
  absl::Status Attend(RequestId id, retrieval::Query query, retrieval::AttendReply& reply,
                      ThreadPool& pool);
  void Forget(RequestId id);
  void Close();

  bool ended() const {
    absl::MutexLock lock(&mu_);
    return !end_.ok();
  }
  int64_t bytes_sent() const { return bytes_sent_; }
  int64_t bytes_received() const { return bytes_received_; }

 private:
  struct Part {
    absl::StatusOr<retrieval::Part> part;
    ByteBudget::Charge charge;
    bool last() const { return !part.ok() || part->last; }
  };
  struct Request {
    std::string what;
    RequestId among = 0;           // whose candidates it needs
    bool keeps = false;            // candidates, for requests to come
    Session::Task task;            // not begun
    std::unique_ptr<Reply> reply;  // parts of it are to be made
    bool making = false;
    bool forgotten = false;
    std::deque<Part> parts;
  };

  // Takes note of what is sent. False: the session has ended by it, and whoever waits hears of it.
  absl::StatusOr<bool> Note(RequestId id, const std::string& what, int64_t bytes);
  // What came of accepting a request: its task, which is left to the engine if nobody waits for it.
  absl::Status Take(RequestId id, const char* what, bool later,
                    absl::FunctionRef<absl::StatusOr<Session::Task>(Session::Done)> accept);
  void Run(RequestId id, ThreadPool& pool);  // its task, if nobody has
  void Answered(RequestId id, absl::StatusOr<std::unique_ptr<Reply>> reply);
  // Makes parts until `ahead` of them wait.
  void MakeParts(RequestId id, size_t ahead);
  Part MakePart(Reply& reply) const;
  static void CountFailure(const absl::Status& status);
  static Part ErrorPart(const absl::Status& status);
  void Add(Request& request, Part part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  kvstore::Engine* const engine_;
  std::shared_ptr<Session> session_;  // written by Open

  mutable absl::Mutex mu_;
  absl::CondVar changed_;
  absl::flat_hash_map<RequestId, Request> requests_ ABSL_GUARDED_BY(mu_);
  absl::Status end_ ABSL_GUARDED_BY(mu_);
  std::atomic<int64_t> bytes_sent_{0}, bytes_received_{0};
};

absl::StatusOr<retrieval::Opened> Conversation::Open(const retrieval::OpenRequest& open) {
  const std::string what = Describe(open);
  {
    absl::MutexLock lock(&mu_);
    if (!end_.ok()) return retrieval::AnnotateOnce(end_, what);
  }
  if (session_ != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": open: the session is open already"));
  }
  const auto enter = [&]() -> absl::StatusOr<std::shared_ptr<Session>> {
    if (open.context.empty()) return absl::InvalidArgumentError("open: context is empty");
    return engine_->OpenSession({open});
  };
  absl::StatusOr<std::shared_ptr<Session>> session = CatchThrown("open", enter);
  if (!session.ok()) {
    absl::MutexLock lock(&mu_);
    end_ = Refusal(session.status(), open);
    return retrieval::AnnotateOnce(end_, what);
  }
  session_ = *std::move(session);
  v1::SessionReply reply;
  kvstore::OpenReplyToWire(*session_, engine_->config(), &reply);
  return decoder::OpenedFromWire(reply.open());
}

absl::StatusOr<bool> Conversation::Note(RequestId id, const std::string& what, int64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (!end_.ok()) return retrieval::AnnotateOnce(end_, what);
  requests_[id].what = what;
  bytes_sent_ += bytes;
  if (session_ == nullptr)
    end_ = absl::FailedPreconditionError("the first request of a session must be open");
  return end_.ok();
}

absl::Status Conversation::Send(RequestId id, retrieval::Query query, bool later) {
  ASSIGN_OR_RETURN(const bool goes_on,
                   Note(id, retrieval::DescribeQuery(query.layer), query.bytes()));
  if (!goes_on) return absl::OkStatus();
  {
    absl::MutexLock lock(&mu_);
    requests_[id].among = query.among_candidates_of;
    requests_[id].keeps = query.keeps_candidates();
  }
  return Take(id, "query", later, [&](Session::Done done) {
    return session_->Accept(id, kvstore::QueryRequest{std::move(query)}, std::move(done));
  });
}

absl::Status Conversation::Send(RequestId id, retrieval::Fetch fetch) {
  ASSIGN_OR_RETURN(const bool goes_on, Note(id, Describe(fetch), fetch.bytes()));
  if (!goes_on) return absl::OkStatus();
  return Take(id, "fetch rows", /*later=*/true, [&](Session::Done done) {
    return session_->Accept(id, kvstore::FetchRequest{std::move(fetch)}, std::move(done));
  });
}

// Whoever answers may outlive the client, but not the engine.
absl::Status Conversation::Take(
    RequestId id, const char* what, bool later,
    absl::FunctionRef<absl::StatusOr<Session::Task>(Session::Done)> accept) {
  const absl::Status status = CatchThrown("request", [&]() -> absl::Status {
    ASSIGN_OR_RETURN(Session::Task task, accept([self = shared_from_this(),
                                                 id](absl::StatusOr<std::unique_ptr<Reply>> reply) {
                       self->Answered(id, std::move(reply));
                     }));
    {
      absl::MutexLock lock(&mu_);
      requests_[id].task = std::move(task);
    }
    if (!later) return absl::OkStatus();
    return session_->Enqueue(
        what, id, [self = shared_from_this(), id](ThreadPool& pool) { self->Run(id, pool); });
  });
  if (status.ok()) return absl::OkStatus();
  Part error = ErrorPart(status);
  Session::Task refused;
  absl::MutexLock lock(&mu_);
  Request& pending = requests_[id];
  pending.task.swap(refused);
  Add(pending, std::move(error));
  return absl::OkStatus();
}

void Conversation::Run(RequestId id, ThreadPool& pool) {
  Session::Task task;
  {
    absl::MutexLock lock(&mu_);
    const auto it = requests_.find(id);
    if (it == requests_.end()) return;
    task.swap(it->second.task);
  }
  if (task) task(pool);
}

void Conversation::Answered(RequestId id, absl::StatusOr<std::unique_ptr<Reply>> reply) {
  Part error;
  if (!reply.ok()) error = ErrorPart(reply.status());
  {
    absl::MutexLock lock(&mu_);
    const auto it = requests_.find(id);
    if (it == requests_.end()) return;
    if (it->second.forgotten) {
      requests_.erase(it);
      return;
    }
    if (!reply.ok()) return Add(it->second, std::move(error));
    it->second.reply = *std::move(reply);
  }
  MakeParts(id, kPartsAhead);
}

void Conversation::MakeParts(RequestId id, size_t ahead) {
  for (;;) {
    std::unique_ptr<Reply> reply;
    {
      absl::MutexLock lock(&mu_);
      const auto it = requests_.find(id);
      if (it == requests_.end() || it->second.making || it->second.reply == nullptr ||
          it->second.parts.size() >= ahead) {
        return;
      }
      it->second.making = true;
      reply = std::move(it->second.reply);
    }
    Part part = MakePart(*reply);
    const bool last = part.last();
    if (last) reply.reset();  // gives its slot back
    absl::MutexLock lock(&mu_);
    const auto it = requests_.find(id);
    if (it == requests_.end()) return;  // forgotten
    it->second.making = false;
    it->second.reply = std::move(reply);
    Add(it->second, std::move(part));
    if (last) return;
  }
}

Conversation::Part Conversation::MakePart(Reply& reply) const {
  retrieval::Part part;
  const int64_t most = engine_->request_budget().PartBytes(engine_->config().reply_part_bytes);
  const absl::Status status =
      CatchThrown("reply", [&] { return kvstore::TakePart(reply, most, part); });
  if (!status.ok()) return ErrorPart(status);
  ReplyBytes().Add(part.bytes);
  ByteBudget::Charge charge = engine_->request_budget().TakePart(part.bytes);
  return {std::move(part), std::move(charge)};
}

void Conversation::CountFailure(const absl::Status& status) {
  kvstore::CountError(absl::StatusCodeToString(status.code()));
  // As a server does with what is the store's fault.
  if (absl::IsDataLoss(status) || absl::IsInternal(status) || absl::IsUnknown(status)) {
    spdlog::error("embedded store: {}", status.ToString());
  }
}

Conversation::Part Conversation::ErrorPart(const absl::Status& status) {
  CountFailure(status);
  return {status, {}};
}

void Conversation::Add(Request& request, Part part) {
  if (part.part.ok()) bytes_received_ += part.part->bytes;
  request.parts.push_back(std::move(part));
  changed_.SignalAll();
}

absl::StatusOr<retrieval::Part> Conversation::Next(RequestId id, ThreadPool* pool) {
  ThreadPool& helpers = pool != nullptr ? *pool : engine_->pool();
  for (;;) {
    RequestId among = 0;
    {
      absl::MutexLock lock(&mu_);
      auto it = requests_.find(id);
      if (it == requests_.end() || it->second.forgotten) return retrieval::NothingToCome(id);
      Request* request = &it->second;
      // Until there is a part, or something to do.
      while (request->parts.empty() && end_.ok() && !request->task &&
             (request->reply == nullptr || request->making)) {
        changed_.Wait(&mu_);
        request = &requests_.find(id)->second;
      }
      if (!request->parts.empty()) {
        Part next = std::move(request->parts.front());
        request->parts.pop_front();
        const std::string what = request->what;
        if (next.last()) {
          requests_.erase(id);
        } else if (request->reply != nullptr && !request->making) {
          engine_->Continue([self = shared_from_this(), id] { self->MakeParts(id, kPartsAhead); });
        }
        if (!next.part.ok()) return Annotate(next.part.status(), what);
        return std::move(next.part);
      }
      if (!end_.ok()) return retrieval::AnnotateOnce(end_, request->what);
      among = request->task ? request->among : 0;
    }
    if (among != 0) Run(among, helpers);
    Run(id, helpers);
    MakeParts(id, /*ahead=*/1);
  }
}

absl::Status Conversation::Attend(RequestId id, retrieval::Query query,
                                  retrieval::AttendReply& reply, ThreadPool& pool) {
  const Layer layer = query.layer;
  {
    absl::MutexLock lock(&mu_);
    if (end_.ok() && session_ == nullptr) {
      end_ = absl::FailedPreconditionError("the first request of a session must be open");
    }
    if (!end_.ok()) return retrieval::AnnotateOnce(end_, retrieval::DescribeQuery(layer));
  }
  const AttentionShape& shape = session_->context()->shape();
  const int64_t heads = query.tokens * shape.q_heads, sent = query.bytes();
  const absl::Status status = CatchThrown("query", [&]() -> absl::Status {
    kvstore::QueryRequest request{std::move(query)};
    request.out = reply.out;
    request.lse = reply.lse;
    ASSIGN_OR_RETURN(reply.statistics, session_->Attend(id, std::move(request), pool));
    return absl::OkStatus();
  });
  if (!status.ok()) {
    CountFailure(status);
    return Annotate(status, retrieval::DescribeQuery(layer));
  }
  reply.bytes = heads * (shape.head_dim + 1) * static_cast<int64_t>(sizeof(float));
  ReplyBytes().Add(reply.bytes);
  bytes_sent_ += sent;
  bytes_received_ += reply.bytes;
  return absl::OkStatus();
}

void Conversation::Forget(RequestId id) {
  Request last;  // destroyed without the lock
  absl::MutexLock lock(&mu_);
  const auto it = requests_.find(id);
  if (it == requests_.end()) return;
  // Candidates are wanted by those who name them: erased by whoever finds them.
  if (it->second.keeps && it->second.task) {
    it->second.forgotten = true;
    return;
  }
  last = std::move(it->second);
  requests_.erase(it);
}

void Conversation::Close() {
  absl::flat_hash_map<RequestId, Request> last;
  if (session_ != nullptr) session_->Cancel();
  absl::MutexLock lock(&mu_);
  if (end_.ok()) end_ = absl::CancelledError("session cancelled");
  last.swap(requests_);
}

class EmbeddedClient final : public retrieval::Session {
 public:
  EmbeddedClient(kvstore::Engine* engine, ThreadPool* pool)
      : pool_(pool), conversation_(std::make_shared<Conversation>(engine)) {}
  ~EmbeddedClient() override { conversation_->Close(); }

  absl::StatusOr<retrieval::Opened> Open(const retrieval::OpenRequest& open) override {
    ++next_id_;  // a request as others are
    return conversation_->Open(open);
  }
  absl::StatusOr<RequestId> Send(retrieval::Query query) override {
    const RequestId id = next_id_++;
    const bool later = pool_ == nullptr || query.speculative;
    RETURN_IF_ERROR(conversation_->Send(id, std::move(query), later));
    return id;
  }
  absl::StatusOr<RequestId> Send(retrieval::Fetch fetch) override {
    const RequestId id = next_id_++;
    RETURN_IF_ERROR(conversation_->Send(id, std::move(fetch)));
    return id;
  }
  absl::StatusOr<retrieval::Part> Next(RequestId id) override {
    return conversation_->Next(id, pool_);
  }
  bool attends() const override { return pool_ != nullptr; }
  absl::Status Attend(retrieval::Query query, retrieval::AttendReply& reply) override {
    if (!attends()) return retrieval::Session::Attend(std::move(query), reply);
    return conversation_->Attend(next_id_++, std::move(query), reply, *pool_);
  }
  void Forget(RequestId id) override { conversation_->Forget(id); }
  bool broken() const override { return conversation_->ended(); }
  int64_t bytes_sent() const override { return conversation_->bytes_sent(); }
  int64_t bytes_received() const override { return conversation_->bytes_received(); }

 private:
  ThreadPool* const pool_;
  const std::shared_ptr<Conversation> conversation_;
  RequestId next_id_ = 1;
};

}  // namespace

std::unique_ptr<retrieval::Session> MakeEmbeddedClient(kvstore::Engine* engine, ThreadPool* pool) {
  return std::make_unique<EmbeddedClient>(engine, pool);
}

}  // namespace carrel::library
