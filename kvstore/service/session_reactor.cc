#include "kvstore/service/session_reactor.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/server_context.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/time/clock.h"
#include "common/metrics.h"
#include "common/routing.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/service/convert.h"

namespace carrel::kvstore {

namespace {

constexpr char kRpc[] = "RetrievalService.Session";

// The first request holds a name and a fingerprint.
constexpr int64_t kMostOpenBytes = int64_t{1} << 20;

absl::Status Parse(grpc::ByteBuffer* bytes, v1::SessionRequest* request) {
  const size_t size = bytes->Length();
  if (grpc::SerializationTraits<v1::SessionRequest>::Deserialize(bytes, request).ok()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("request: ", size, " bytes that are no SessionRequest"));
}

// SessionReply's own serialisation cannot fail: all of its strings are UTF-8 or bytes.
grpc::ByteBuffer ToBytes(const v1::SessionReply& reply) {
  grpc::ByteBuffer bytes;
  bool own = false;
  const grpc::Status status =
      grpc::SerializationTraits<v1::SessionReply>::Serialize(reply, &bytes, &own);
  CARREL_CHECK(status.ok());
  return bytes;
}

// Of a request that is here.
absl::StatusOr<Deadline> DeadlineOf(const v1::SessionRequest& request) {
  constexpr int64_t kMostUs = int64_t{1} << 50;  // 35 years
  const int64_t timeout_us = request.timeout_us();
  if (timeout_us == 0) return kNoDeadline;
  if (timeout_us < 0 || timeout_us > kMostUs) {
    return absl::InvalidArgumentError(
        absl::StrCat("request: timeout_us=", timeout_us, " is outside 0 .. ", kMostUs));
  }
  return std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us);
}

std::string NewSessionId() {
  thread_local absl::BitGen random;
  return absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

// What a person who reads the error must be able to find in the log.
bool IsOurs(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsInternal(status) || absl::IsUnknown(status);
}

}  // namespace

SessionReactor::SessionReactor(Engine* engine, ContextSource* source, SessionRegistry* registry,
                               grpc::CallbackServerContext* context, absl::StatusOr<Visit> visit)
    : engine_(engine),
      source_(source),
      registry_(registry),
      id_(NewSessionId()),
      context_(context),
      visit_(std::move(visit)) {
  context->AddInitialMetadata("carrel-session", id_);
}

SessionReactor* SessionReactor::Start(Engine* engine, ContextSource* source,
                                      SessionRegistry* registry, Admission* admission,
                                      grpc::CallbackServerContext* context) {
  std::shared_ptr<SessionReactor> reactor(new SessionReactor(
      engine, source, registry, context, admission->Admit(CallerOf(*context), kRpc)));
  reactor->self_ = reactor;
  const absl::Status accepted = reactor->visit_.ok()
                                    ? registry->Add(reactor, HostOfPeer(context->peer()))
                                    : reactor->visit_.status();
  absl::MutexLock lock(&reactor->mu_);
  spdlog::debug("session={} began peer={}", reactor->id_, context->peer());
  if (accepted.ok()) {
    reactor->StartSendInitialMetadata();  // tells the client at once that somebody is here
    reactor->Read();
  } else {
    reactor->FinishWith(accepted);
  }
  return reactor.get();
}

void SessionReactor::Cut(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  FinishWith(status);
}

void SessionReactor::EndIfOverdue(std::chrono::steady_clock::time_point now,
                                  const ServiceLimits& limits, EndedSessions& ended) {
  absl::MutexLock lock(&mu_);
  if (finished_) {
    // The status waits behind a part that nobody takes.
    const bool stuck =
        writing_ && !done_ && absl::FromChrono(now - write_began_) >= limits.stall_timeout;
    if (stuck) context_->TryCancel();
    return;
  }
  const absl::Duration quiet = absl::FromChrono(now - active_);
  if (session_ == nullptr) {
    if (!reading_ || opening_ || quiet < limits.open_timeout) return;
    ++ended.not_opened;
    FinishWith(absl::DeadlineExceededError(absl::StrCat(
        "session: no open request within ", absl::FormatDuration(limits.open_timeout))));
    return;
  }
  if (writing_) {
    // Not `active_`: who goes on asking and takes nothing is no better.
    if (absl::FromChrono(now - write_began_) < limits.stall_timeout) return;
    ++ended.stalled;
    FinishWith(absl::UnavailableError(absl::StrCat("session: its client took nothing for ",
                                                   absl::FormatDuration(limits.stall_timeout))));
    // What waits to be written would keep the status from leaving.
    context_->TryCancel();
    return;
  }
  if (in_engine_ > 0 || making_ || !answers_.empty() || quiet < limits.idle_timeout) return;
  ++ended.idle;
  FinishWith(absl::UnavailableError(
      absl::StrCat("session: idle for ", absl::FormatDuration(limits.idle_timeout))));
}

void SessionReactor::EndIfWithdrawn(EndedSessions& ended) {
  {
    absl::MutexLock lock(&mu_);
    if (finished_ || session_ == nullptr) return;  // visit_ stays as it is from here on
  }
  const absl::Status status = visit_->StillAllowed();
  if (status.ok()) return;
  ++ended.withdrawn;  // before the client hears of it
  Cut(status);
}

void SessionReactor::OnCancel() { Cut(absl::CancelledError("session cancelled")); }

void SessionReactor::OnDone() {
  registry_->Remove(this);
  const std::shared_ptr<SessionReactor> last = std::move(self_);
  std::shared_ptr<Session> session;
  std::shared_ptr<void> place, bringing;
  absl::MutexLock lock(&mu_);
  done_ = true;
  bringing = std::move(bringing_);
  session = std::move(session_);
  place = std::move(place_);
  if (session == nullptr) return;
  ContextFacts facts = FactsOf(session->context()->manifest());
  facts.bytes = spent_bytes_;
  visit_->Log("close", absl::OkStatus(), facts);
}

void SessionReactor::OnReadDone(bool ok) {
  grpc::ByteBuffer bytes;
  bytes.Swap(&request_);
  int64_t most = kMostOpenBytes;
  bool opened;
  {
    absl::MutexLock lock(&mu_);
    if (finished_) return;
    if (!ok) {
      reading_ = false;
      half_closed_ = true;
      FinishIfIdle();
      return;
    }
    active_ = std::chrono::steady_clock::now();
    opened = session_ != nullptr;
    opening_ = !opened;
    if (opened) most = MostRequestBytes(*session_->context(), engine_->config());
  }
  v1::SessionRequest request;
  absl::Status status;
  const size_t size = bytes.Length();
  if (opened) status = visit_->StillAllowed();
  if (!status.ok()) {
    // his no more
  } else if (static_cast<int64_t>(size) > most) {
    status = absl::ResourceExhaustedError(absl::StrCat(
        "request of ", size, " bytes exceeds ", most,
        opened ? ", the most that one of this context takes" : ", the most that open takes"));
  } else {
    status = CatchThrown("request", [&] { return Parse(&bytes, &request); });
  }
  bytes.Clear();
  if (!status.ok()) return Cut(status);  // nobody knows which request it was
  if (!opened) return Open(request);     // Opened reads on
  status = CatchThrown("request", [&] { return Handle(request); });
  absl::MutexLock lock(&mu_);
  Spend(1, size);
  if (!status.ok()) SendError(request.request_id(), status);
  reading_ = false;
  Read();
}

void SessionReactor::Open(const v1::SessionRequest& wire) {
  absl::Status status;
  if (!wire.has_open()) {
    status = absl::FailedPreconditionError("the first request of a session must be open");
  } else if (wire.request_id() == 0) {
    status = absl::InvalidArgumentError("open: request_id is 0");
  } else {
    status = SubmitOpen(wire);
  }
  absl::MutexLock lock(&mu_);
  if (!status.ok()) FinishWith(status);
}

absl::Status SessionReactor::SubmitOpen(const v1::SessionRequest& wire) {
  ASSIGN_OR_RETURN(OpenRequest request, FromWire(wire.open()));
  ASSIGN_OR_RETURN(request.deadline, DeadlineOf(wire));
  RETURN_IF_ERROR(visit_->Allow(kRpc, request.context));
  ASSIGN_OR_RETURN(std::shared_ptr<void> place, visit_->TakeSession());
  {
    absl::MutexLock lock(&mu_);
    place_ = std::move(place);
  }
  request.context = visit_->lookup_name();
  request.tenant = visit_->turn();
  const uint64_t id = wire.request_id();
  if (source_ == nullptr) return OpenHere(id, std::move(request));
  const std::string name = request.context;
  const auto begun = std::chrono::steady_clock::now();
  ContextWaiter waiter;
  waiter.progress = [weak = weak_from_this(), id](const ContextComes& comes) {
    if (const auto self = weak.lock(); self != nullptr) self->Fetching(id, comes);
  };
  waiter.done = [weak = weak_from_this(), id, request = std::move(request),
                 begun](const absl::Status& status) mutable {
    const auto self = weak.lock();
    if (self == nullptr) return;
    // The time that its bytes took is not that of the request.
    if (request.deadline != kNoDeadline) {
      request.deadline += std::chrono::steady_clock::now() - begun;
    }
    absl::Status opens = status.ok() ? self->OpenHere(id, std::move(request)) : status;
    // Nobody is to ask again at once: the source was asked for as long as that makes sense.
    if (!status.ok() && !absl::IsCancelled(status)) opens.SetPayload(kAnsweredUrl, absl::Cord("1"));
    if (!opens.ok()) self->Opened(id, opens);
  };
  std::shared_ptr<void> bringing = source_->Bring(name, std::move(waiter));
  absl::MutexLock lock(&mu_);
  if (!finished_) bringing_ = std::move(bringing);
  return absl::OkStatus();
}

absl::Status SessionReactor::OpenHere(uint64_t request_id, OpenRequest request) {
  const void* const tenant = request.tenant.get();
  return Annotate(
      engine_->Submit(
          [self = shared_from_this(), engine = engine_, request = std::move(request), request_id] {
            self->Opened(request_id,
                         CatchThrown("open", [&] { return engine->OpenSession(request); }));
          },
          tenant),
      "open");
}

void SessionReactor::Fetching(uint64_t request_id, const ContextComes& comes) {
  absl::MutexLock lock(&mu_);
  if (finished_ || session_ != nullptr || !has_room()) return;
  v1::SessionReply reply;
  reply.set_request_id(request_id);
  reply.mutable_fetching()->set_bytes(comes.bytes);
  reply.mutable_fetching()->set_of(comes.of);
  reply.mutable_fetching()->set_waits_for_room(comes.waits_for_room);
  Send(reply);
}

void SessionReactor::Spend(int64_t requests, size_t bytes) {
  spent_bytes_ += static_cast<int64_t>(bytes);
  const absl::Time now = absl::Now();
  not_before_ = std::max(
      not_before_, now + visit_->principal().Spend(requests, static_cast<int64_t>(bytes), now));
}

void SessionReactor::Opened(uint64_t request_id,
                            const absl::StatusOr<std::shared_ptr<Session>>& session) {
  std::shared_ptr<void> bringing;  // goes without the lock
  const absl::Status status = visit_->Told(session.status());
  visit_->Log("open", status,
              session.ok() ? FactsOf((*session)->context()->manifest()) : ContextFacts());
  absl::MutexLock lock(&mu_);
  bringing = std::move(bringing_);
  if (finished_) return;
  if (!status.ok()) {
    FinishWith(status);
    return;
  }
  session_ = *session;
  opening_ = false;
  spdlog::info("session={} opened context={}", id_, session_->context()->name());
  v1::SessionReply reply;
  reply.set_request_id(request_id);
  OpenReplyToWire(*session_, engine_->config(), &reply);
  Send(reply);
  reading_ = false;
  Read();
}

absl::Status SessionReactor::Handle(const v1::SessionRequest& request) {
  ASSIGN_OR_RETURN(const Deadline deadline, DeadlineOf(request));
  const OpenContext* context;
  {
    absl::MutexLock lock(&mu_);
    if (session_ == nullptr) return absl::OkStatus();
    context = session_->context().get();
  }
  switch (request.request_case()) {
    case v1::SessionRequest::kQuery:
      return Submit(request.request_id(), deadline, FromWire(request.query(), *context));
    case v1::SessionRequest::kFetchRows:
      return Submit(request.request_id(), deadline, FromWire(request.fetch_rows(), *context));
    case v1::SessionRequest::kOpen:
      return absl::FailedPreconditionError("open: the session is open already");
    default:
      return absl::InvalidArgumentError("request holds neither query nor fetch_rows");
  }
}

template <typename Request>
absl::Status SessionReactor::Submit(uint64_t request_id, Deadline deadline,
                                    absl::StatusOr<Request> request) {
  RETURN_IF_ERROR(request.status());
  request->deadline = deadline;
  std::shared_ptr<Session> session;
  {
    absl::MutexLock lock(&mu_);
    session = session_;
    if (finished_ || session == nullptr) return absl::OkStatus();
    ++in_engine_;
  }
  const absl::Status status = session->Submit(
      request_id, *std::move(request),
      [self = shared_from_this(), request_id](absl::StatusOr<std::unique_ptr<Reply>> reply) {
        self->Answered(request_id, std::move(reply));
      });
  if (!status.ok()) {
    absl::MutexLock lock(&mu_);
    --in_engine_;
  }
  return status;
}

void SessionReactor::Answered(uint64_t request_id, absl::StatusOr<std::unique_ptr<Reply>> reply) {
  {
    absl::MutexLock lock(&mu_);
    --in_engine_;
    if (finished_) return;
    if (!reply.ok()) return SendError(request_id, reply.status());
    answers_.push_back({request_id, *std::move(reply)});
    if (!ClaimMaking()) return;
  }
  MakeParts();
}

absl::Status SessionReactor::Logged(uint64_t request_id, const absl::Status& status) const {
  const auto level = IsOurs(status) ? spdlog::level::err : spdlog::level::debug;
  spdlog::log(level, "session={} request={} {}", id_, request_id, status.ToString());
  if (!IsOurs(status)) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), " [session ", id_, " request ",
                                                  request_id, "]"));
}

void SessionReactor::SendError(uint64_t request_id, const absl::Status& status) {
  if (finished_) return;
  CountError(absl::StatusCodeToString(status.code()));
  v1::SessionReply reply;
  reply.set_request_id(request_id);
  ErrorToWire(Logged(request_id, status), &reply);
  Send(reply);
}

void SessionReactor::Send(const v1::SessionReply& reply) {
  unsent_.push_back(ToUnsent(reply));
  Write();
}

SessionReactor::Unsent SessionReactor::ToUnsent(const v1::SessionReply& reply) const {
  Unsent unsent;
  unsent.bytes = ToBytes(reply);
  unsent.charge = engine_->request_budget().TakePart(static_cast<int64_t>(unsent.bytes.Length()));
  return unsent;
}

v1::SessionReply SessionReactor::MakePart(Answer& answer) const {
  v1::SessionReply part;
  const int64_t most = engine_->request_budget().PartBytes(engine_->config().reply_part_bytes);
  const absl::Status status =
      CatchThrown("reply", [&] { return NextPartToWire(*answer.reply, most, &part); });
  if (!status.ok()) {
    CountError(absl::StatusCodeToString(status.code()));
    part.Clear();
    ErrorToWire(Logged(answer.request_id, status), &part);
  }
  part.set_request_id(answer.request_id);
  static Counter& bytes = CounterOf("carrel_reply_bytes_total", "Bytes of replies, as messages.");
  bytes.Add(static_cast<int64_t>(part.ByteSizeLong()));
  return part;
}

void SessionReactor::MakeParts() {
  for (;;) {
    Answer* answer;
    {
      absl::MutexLock lock(&mu_);
      answer = &answers_.front();  // stays first while making_; push_back does not move it
    }
    Unsent unsent;
    bool last;
    {
      const v1::SessionReply part = MakePart(*answer);
      last = part.last();
      unsent = ToUnsent(part);
    }
    if (last) answer->reply.reset();  // gives its slot back
    absl::MutexLock lock(&mu_);
    making_ = false;
    if (finished_) {
      answers_.clear();
      return;
    }
    if (last) answers_.pop_front();
    unsent_.push_back(std::move(unsent));
    Write();
    if (!ClaimMaking()) return;
  }
}

bool SessionReactor::ClaimMaking() {
  if (making_ || finished_ || answers_.empty() || unsent_.size() >= kPartsAhead) return false;
  making_ = true;
  return true;
}

void SessionReactor::Read() {
  if (reading_ || finished_ || half_closed_ || !has_room()) return;
  reading_ = true;
  if (not_before_ <= absl::Now()) return StartRead(&request_);
  // An alarm keeps its function when it has run, and is ours: it must not keep us.
  later_.Set(absl::ToChronoTime(not_before_), [weak = weak_from_this()](bool) {
    const std::shared_ptr<SessionReactor> self = weak.lock();
    if (self == nullptr) return;
    absl::MutexLock lock(&self->mu_);
    if (!self->finished_) self->StartRead(&self->request_);
  });
}

void SessionReactor::Write() {
  if (writing_ || finished_ || unsent_.empty()) return;
  writing_ = true;
  write_began_ = std::chrono::steady_clock::now();
  Spend(0, unsent_.front().bytes.Length());
  StartWrite(&unsent_.front().bytes);
}

void SessionReactor::OnWriteDone(bool ok) {
  bool make = false;
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    active_ = std::chrono::steady_clock::now();
    unsent_.pop_front();
    if (!ok) {
      FinishWith(absl::CancelledError("the client is gone"));
      return;
    }
    Write();
    make = ClaimMaking();
    Read();
    FinishIfIdle();
  }
  if (make) engine_->Continue([self = shared_from_this()] { self->MakeParts(); });
}

void SessionReactor::FinishIfIdle() {
  const bool idle = in_engine_ == 0 && answers_.empty() && unsent_.empty() && !making_;
  if (half_closed_ && idle) FinishWith(absl::OkStatus());
}

void SessionReactor::FinishWith(const absl::Status& status) {
  if (finished_) return;
  finished_ = true;
  if (!status.ok() && !absl::IsCancelled(status))
    CountError(absl::StatusCodeToString(status.code()));
  if (!status.ok() && !absl::IsCancelled(status)) {
    spdlog::info("session={} ended: {}", id_, status.ToString());
  }
  later_.Cancel();
  if (session_ != nullptr) session_->Cancel();
  if (!making_) answers_.clear();
  if (status.GetPayload(kAnsweredUrl).has_value()) {
    context_->AddTrailingMetadata(kAnsweredMetadata, "1");
  }
  Finish(ToGrpc(status));
}

}  // namespace carrel::kvstore
