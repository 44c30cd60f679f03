#include "library/embedded_client.h"

#include <spdlog/spdlog.h>

#include <algorithm>
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
#include "decoder/client/store_client_replies.h"
#include "kvstore/engine/engine.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/service/convert.h"

namespace carrel::library {
namespace {

using decoder::RequestId;
using kvstore::Reply;
using kvstore::Session;

// Of one request, made and not yet taken.
constexpr size_t kPartsAhead = 3;

absl::Status Refusal(const absl::Status& status, const v1::Open& open) {
  if (!absl::IsNotFound(status)) return status;
  return absl::NotFoundError(
      absl::StrCat("context ", Shown(open.context()), " is not in the store"));
}

Counter& ReplyBytes() {
  static Counter& total = CounterOf("carrel_reply_bytes_total", "Bytes of replies, as messages.");
  return total;
}

// The pieces of a reply with want ATTEND.
absl::Status CopyAttended(Reply& reply, const AttentionShape& shape, decoder::AttendReply& to) {
  std::vector<kvstore::Piece> pieces;
  for (int attempt = 0; attempt < kvstore::OpenContext::kMostAttempts; ++attempt) {
    const absl::Status status = reply.Next(INT64_MAX / 2, pieces);
    if (status.ok()) CARREL_CHECK(reply.done());
    for (const kvstore::Piece& piece : pieces) {
      const int64_t q_head =
          piece.token * shape.q_heads + int64_t{piece.kv_head.value()} * shape.group();
      std::copy(piece.out.begin(), piece.out.end(), to.out + q_head * shape.head_dim);
      std::copy(piece.lse.begin(), piece.lse.end(), to.lse + q_head);
    }
    ASSIGN_OR_RETURN(const bool confirmed, reply.Confirm());
    if (confirmed) return status;
  }
  return absl::DataLossError(
      absl::StrCat("layer ", reply.layer().value(), ": the files of the context changed ",
                   kvstore::OpenContext::kMostAttempts, " times while a reply was made of them"));
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

  absl::StatusOr<v1::OpenReply> Open(const v1::Open& open, RequestId id);
  // later: nobody waits for it now: an engine thread answers it.
  absl::Status Send(RequestId id, v1::SessionRequest request, bool later);
  absl::StatusOr<v1::SessionReply> Next(RequestId id, ThreadPool* pool);
  absl::Status Attend(RequestId id, const decoder::AttendQuery& query, decoder::AttendReply& reply,
                      ThreadPool& pool);
  void Forget(RequestId id);
  void Close();

  bool ended() const {
    absl::MutexLock lock(&mu_);
    return !end_.ok();
  }
  int64_t bytes_sent() const {
    absl::MutexLock lock(&mu_);
    return bytes_sent_;
  }
  int64_t bytes_received() const {
    absl::MutexLock lock(&mu_);
    return bytes_received_;
  }

 private:
  struct Part {
    v1::SessionReply reply;
    ByteBudget::Charge charge;
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

  absl::Status Accept(RequestId id, const v1::SessionRequest& request, bool later);
  void Run(RequestId id, ThreadPool& pool);  // its task, if nobody has
  void Answered(RequestId id, absl::StatusOr<std::unique_ptr<Reply>> reply);
  // Makes parts until `ahead` of them wait.
  void MakeParts(RequestId id, size_t ahead);
  Part MakePart(RequestId id, Reply& reply) const;
  static void CountFailure(const absl::Status& status);
  Part ErrorPart(RequestId id, const absl::Status& status) const;
  void Add(Request& request, Part part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  v1::SessionReply Pop(Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  kvstore::Engine* const engine_;
  std::shared_ptr<Session> session_;  // written by Open

  mutable absl::Mutex mu_;
  absl::CondVar changed_;
  absl::flat_hash_map<RequestId, Request> requests_ ABSL_GUARDED_BY(mu_);
  absl::Status end_ ABSL_GUARDED_BY(mu_);
  int64_t bytes_sent_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t bytes_received_ ABSL_GUARDED_BY(mu_) = 0;
};

absl::StatusOr<v1::OpenReply> Conversation::Open(const v1::Open& open, RequestId id) {
  v1::SessionRequest request;
  request.set_request_id(id);
  *request.mutable_open() = open;
  const std::string what = decoder::Describe(request);
  if (session_ != nullptr) {
    RETURN_IF_ERROR(Send(id, std::move(request), /*later=*/false));
    return Next(id, nullptr).status();
  }
  {
    absl::MutexLock lock(&mu_);
    if (!end_.ok()) return decoder::AnnotateOnce(end_, what);
    bytes_sent_ += static_cast<int64_t>(request.ByteSizeLong());
  }
  const auto enter = [&]() -> absl::StatusOr<std::shared_ptr<Session>> {
    ASSIGN_OR_RETURN(const kvstore::OpenRequest converted, kvstore::FromWire(open));
    return engine_->OpenSession(converted);
  };
  absl::StatusOr<std::shared_ptr<Session>> session = CatchThrown("open", enter);
  if (!session.ok()) {
    absl::MutexLock lock(&mu_);
    end_ = Refusal(session.status(), open);
    return decoder::AnnotateOnce(end_, what);
  }
  session_ = *std::move(session);
  v1::SessionReply reply;
  reply.set_request_id(id);
  kvstore::OpenReplyToWire(*session_, engine_->config(), &reply);
  {
    absl::MutexLock lock(&mu_);
    bytes_received_ += static_cast<int64_t>(reply.ByteSizeLong());
  }
  return decoder::TakeOpenReply(std::move(reply), what);
}

absl::Status Conversation::Send(RequestId id, v1::SessionRequest request, bool later) {
  request.set_request_id(id);
  const auto bytes = static_cast<int64_t>(request.ByteSizeLong());
  {
    absl::MutexLock lock(&mu_);
    if (!end_.ok()) return decoder::AnnotateOnce(end_, decoder::Describe(request));
    Request& pending = requests_[id];
    pending.what = decoder::Describe(request);
    pending.among = request.query().among_candidates_of();
    pending.keeps = request.query().speculative() && request.query().want() == v1::IDS;
    bytes_sent_ += bytes;
    if (session_ == nullptr) {
      end_ = absl::FailedPreconditionError("the first request of a session must be open");
      return absl::OkStatus();
    }
    const int64_t most = kvstore::MostRequestBytes(*session_->context(), engine_->config());
    if (bytes > most) {
      end_ =
          absl::ResourceExhaustedError(absl::StrCat("request of ", bytes, " bytes exceeds ", most,
                                                    ", the most that one of this context takes"));
      session_->Cancel();
      return absl::OkStatus();
    }
  }
  const absl::Status status = CatchThrown("request", [&] { return Accept(id, request, later); });
  if (status.ok()) return absl::OkStatus();
  Part error = ErrorPart(id, status);
  Session::Task refused;
  absl::MutexLock lock(&mu_);
  Request& pending = requests_[id];
  pending.task.swap(refused);
  Add(pending, std::move(error));
  return absl::OkStatus();
}

// Whoever answers may outlive the client, but not the engine.
absl::Status Conversation::Accept(RequestId id, const v1::SessionRequest& request, bool later) {
  const auto done = [self = shared_from_this(), id](absl::StatusOr<std::unique_ptr<Reply>> reply) {
    self->Answered(id, std::move(reply));
  };
  absl::StatusOr<Session::Task> task;
  const char* what = "query";
  if (request.has_query()) {
    ASSIGN_OR_RETURN(kvstore::QueryRequest query,
                     kvstore::FromWire(request.query(), *session_->context()));
    task = session_->Accept(id, std::move(query), done);
  } else if (request.has_fetch_rows()) {
    what = "fetch rows";
    ASSIGN_OR_RETURN(kvstore::FetchRequest fetch,
                     kvstore::FromWire(request.fetch_rows(), *session_->context()));
    task = session_->Accept(id, std::move(fetch), done);
  } else {
    return absl::FailedPreconditionError("open: the session is open already");
  }
  RETURN_IF_ERROR(task.status());
  {
    absl::MutexLock lock(&mu_);
    requests_[id].task = *std::move(task);
  }
  if (!later) return absl::OkStatus();
  return session_->Enqueue(
      what, id, [self = shared_from_this(), id](ThreadPool& pool) { self->Run(id, pool); });
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
  if (!reply.ok()) error = ErrorPart(id, reply.status());
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
    Part part = MakePart(id, *reply);
    const bool last = part.reply.last();
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

Conversation::Part Conversation::MakePart(RequestId id, Reply& reply) const {
  Part part;
  const int64_t most = engine_->request_budget().PartBytes(engine_->config().reply_part_bytes);
  const absl::Status status =
      CatchThrown("reply", [&] { return kvstore::NextPartToWire(reply, most, &part.reply); });
  if (!status.ok()) return ErrorPart(id, status);
  part.reply.set_request_id(id);
  const auto bytes = static_cast<int64_t>(part.reply.ByteSizeLong());
  ReplyBytes().Add(bytes);
  part.charge = engine_->request_budget().TakePart(bytes);
  return part;
}

void Conversation::CountFailure(const absl::Status& status) {
  kvstore::CountError(absl::StatusCodeToString(status.code()));
  // As a server does with what is the store's fault.
  if (absl::IsDataLoss(status) || absl::IsInternal(status) || absl::IsUnknown(status)) {
    spdlog::error("embedded store: {}", status.ToString());
  }
}

Conversation::Part Conversation::ErrorPart(RequestId id, const absl::Status& status) const {
  CountFailure(status);
  Part part;
  kvstore::ErrorToWire(status, &part.reply);
  part.reply.set_request_id(id);
  return part;
}

void Conversation::Add(Request& request, Part part) {
  bytes_received_ += static_cast<int64_t>(part.reply.ByteSizeLong());
  request.parts.push_back(std::move(part));
  changed_.SignalAll();
}

v1::SessionReply Conversation::Pop(Request& request) {
  v1::SessionReply reply = std::move(request.parts.front().reply);
  request.parts.pop_front();
  return reply;
}

absl::StatusOr<v1::SessionReply> Conversation::Next(RequestId id, ThreadPool* pool) {
  ThreadPool& helpers = pool != nullptr ? *pool : engine_->pool();
  for (;;) {
    RequestId among = 0;
    {
      absl::MutexLock lock(&mu_);
      auto it = requests_.find(id);
      if (it == requests_.end() || it->second.forgotten) return decoder::NothingToCome(id);
      Request* request = &it->second;
      // Until there is a part, or something to do.
      while (request->parts.empty() && end_.ok() && !request->task &&
             (request->reply == nullptr || request->making)) {
        changed_.Wait(&mu_);
        request = &requests_.find(id)->second;
      }
      if (!request->parts.empty()) {
        v1::SessionReply reply = Pop(*request);
        const std::string what = request->what;
        if (reply.last()) {
          requests_.erase(id);
        } else if (request->reply != nullptr && !request->making) {
          engine_->Continue([self = shared_from_this(), id] { self->MakeParts(id, kPartsAhead); });
        }
        return decoder::TakeReply(std::move(reply), what);
      }
      if (!end_.ok()) return decoder::AnnotateOnce(end_, request->what);
      among = request->task ? request->among : 0;
    }
    if (among != 0) Run(among, helpers);
    Run(id, helpers);
    MakeParts(id, /*ahead=*/1);
  }
}

absl::Status Conversation::Attend(RequestId id, const decoder::AttendQuery& query,
                                  decoder::AttendReply& reply, ThreadPool& pool) {
  const auto what = [&] { return absl::StrCat("query layer ", query.layer.value()); };
  {
    absl::MutexLock lock(&mu_);
    if (end_.ok() && session_ == nullptr) {
      end_ = absl::FailedPreconditionError("the first request of a session must be open");
    }
    if (!end_.ok()) return decoder::AnnotateOnce(end_, what());
  }
  const AttentionShape& shape = session_->context()->shape();
  const int64_t heads = query.n * shape.q_heads, floats = heads * shape.head_dim;
  const auto answer = [&]() -> absl::Status {
    kvstore::QueryRequest request;
    request.layer = query.layer;
    request.tokens = query.n;
    request.queries.assign(query.q, query.q + floats);
    request.selection = *query.selection;
    request.want = kvstore::Want::kAttend;
    request.effort = query.effort;
    request.estimate = query.estimate;
    absl::StatusOr<std::unique_ptr<Reply>> made;
    ASSIGN_OR_RETURN(
        const Session::Task task,
        session_->Accept(id, std::move(request),
                         [&](absl::StatusOr<std::unique_ptr<Reply>> of) { made = std::move(of); }));
    task(pool);
    RETURN_IF_ERROR(made.status());
    RETURN_IF_ERROR(CopyAttended(**made, shape, reply));
    const kvstore::QueryStatistics& statistics = (*made)->statistics();
    reply.candidates = statistics.candidates;
    reply.visited = statistics.visited;
    reply.rows = statistics.rows;
    return absl::OkStatus();
  };
  const absl::Status status = CatchThrown("query", answer);
  if (!status.ok()) {
    CountFailure(status);
    return Annotate(status, what());
  }
  reply.bytes = (floats + heads) * static_cast<int64_t>(sizeof(float));
  ReplyBytes().Add(reply.bytes);
  absl::MutexLock lock(&mu_);
  bytes_sent_ += floats * static_cast<int64_t>(sizeof(float));
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

class EmbeddedClient final : public decoder::StoreClient {
 public:
  EmbeddedClient(kvstore::Engine* engine, ThreadPool* pool)
      : pool_(pool), conversation_(std::make_shared<Conversation>(engine)) {}
  ~EmbeddedClient() override { conversation_->Close(); }

  absl::StatusOr<v1::OpenReply> Open(const v1::Open& open) override {
    return conversation_->Open(open, next_id_++);
  }
  absl::StatusOr<RequestId> Send(v1::Query query) override {
    const bool later = pool_ == nullptr || query.speculative();
    v1::SessionRequest request;
    *request.mutable_query() = std::move(query);
    return Send(std::move(request), later);
  }
  absl::StatusOr<RequestId> Send(v1::FetchRows fetch) override {
    v1::SessionRequest request;
    *request.mutable_fetch_rows() = std::move(fetch);
    return Send(std::move(request), /*later=*/true);
  }
  absl::StatusOr<v1::SessionReply> Next(RequestId id) override {
    return conversation_->Next(id, pool_);
  }
  bool attends() const override { return pool_ != nullptr; }
  absl::Status Attend(const decoder::AttendQuery& query, decoder::AttendReply& reply) override {
    if (!attends()) return StoreClient::Attend(query, reply);
    return conversation_->Attend(next_id_++, query, reply, *pool_);
  }
  void Forget(RequestId id) override { conversation_->Forget(id); }
  bool broken() const override { return conversation_->ended(); }
  int64_t bytes_sent() const override { return conversation_->bytes_sent(); }
  int64_t bytes_received() const override { return conversation_->bytes_received(); }

 private:
  absl::StatusOr<RequestId> Send(v1::SessionRequest request, bool later) {
    const RequestId id = next_id_++;
    RETURN_IF_ERROR(conversation_->Send(id, std::move(request), later));
    return id;
  }

  ThreadPool* const pool_;
  const std::shared_ptr<Conversation> conversation_;
  RequestId next_id_ = 1;
};

}  // namespace

std::unique_ptr<decoder::StoreClient> MakeEmbeddedClient(kvstore::Engine* engine,
                                                         ThreadPool* pool) {
  return std::make_unique<EmbeddedClient>(engine, pool);
}

}  // namespace carrel::library
