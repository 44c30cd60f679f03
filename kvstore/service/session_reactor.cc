#include "kvstore/service/session_reactor.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "common/status.h"
#include "kvstore/service/convert.h"

namespace carrel::kvstore {

SessionReactor* SessionReactor::Start(Engine* engine, SessionRegistry* registry) {
  std::shared_ptr<SessionReactor> reactor(new SessionReactor(engine, registry));
  reactor->self_ = reactor;
  const bool accepted = registry->Add(reactor);
  absl::MutexLock lock(&reactor->mu_);
  if (accepted) {
    reactor->StartSendInitialMetadata();  // tells the client at once that somebody is here
    reactor->Read();
  } else {
    reactor->FinishWith(absl::UnavailableError("server is draining: no new sessions"));
  }
  return reactor.get();
}

void SessionReactor::Cut(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  FinishWith(status);
}

void SessionReactor::OnCancel() { Cut(absl::CancelledError("session cancelled")); }

void SessionReactor::OnDone() {
  registry_->Remove(this);
  const std::shared_ptr<SessionReactor> last = std::move(self_);
  std::shared_ptr<Session> session;
  absl::MutexLock lock(&mu_);
  session = std::move(session_);
}

void SessionReactor::OnReadDone(bool ok) {
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
    opened = session_ != nullptr;
  }
  if (!opened) return Open();  // Opened reads on
  const absl::Status status = Handle();
  absl::MutexLock lock(&mu_);
  if (!status.ok()) SendError(request_.request_id(), status);
  reading_ = false;
  Read();
}

void SessionReactor::Open() {
  absl::Status status;
  if (!request_.has_open()) {
    status = absl::FailedPreconditionError("the first request of a session must be open");
  } else if (request_.request_id() == 0) {
    status = absl::InvalidArgumentError("open: request_id is 0");
  } else if (absl::StatusOr<OpenRequest> request = FromWire(request_.open()); request.ok()) {
    status =
        Annotate(engine_->Submit([self = shared_from_this(), engine = engine_, request = *request] {
          self->Opened(engine->OpenSession(request));
        }),
                 "open");
  } else {
    status = request.status();
  }
  absl::MutexLock lock(&mu_);
  if (!status.ok()) FinishWith(status);
}

void SessionReactor::Opened(const absl::StatusOr<std::shared_ptr<Session>>& session) {
  absl::MutexLock lock(&mu_);
  if (finished_) return;
  if (!session.ok()) {
    FinishWith(session.status());
    return;
  }
  session_ = *session;
  v1::SessionReply reply;
  reply.set_request_id(request_.request_id());
  OpenReplyToWire(*session_, engine_->config(), &reply);
  unsent_.push_back(std::move(reply));
  Write();
  reading_ = false;
  Read();
}

absl::Status SessionReactor::Handle() {
  const OpenContext* context;
  {
    absl::MutexLock lock(&mu_);
    if (session_ == nullptr) return absl::OkStatus();
    context = session_->context().get();
  }
  switch (request_.request_case()) {
    case v1::SessionRequest::kQuery:
      return Submit(FromWire(request_.query(), *context));
    case v1::SessionRequest::kFetchRows:
      return Submit(FromWire(request_.fetch_rows(), *context));
    case v1::SessionRequest::kOpen:
      return absl::FailedPreconditionError("open: the session is open already");
    default:
      return absl::InvalidArgumentError("request holds neither query nor fetch_rows");
  }
}

template <typename Request>
absl::Status SessionReactor::Submit(absl::StatusOr<Request> request) {
  RETURN_IF_ERROR(request.status());
  const uint64_t request_id = request_.request_id();
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

void SessionReactor::SendError(uint64_t request_id, const absl::Status& status) {
  if (finished_) return;
  if (status.code() == absl::StatusCode::kDataLoss) {
    spdlog::error("data loss: {}", std::string(status.message()));
  }
  v1::SessionReply reply;
  reply.set_request_id(request_id);
  ErrorToWire(status, &reply);
  unsent_.push_back(std::move(reply));
  Write();
}

v1::SessionReply SessionReactor::MakePart(Answer& answer) const {
  v1::SessionReply part;
  const absl::Status status =
      NextPartToWire(*answer.reply, engine_->config().reply_part_bytes, &part);
  if (!status.ok()) {
    spdlog::error("reply: {}", status.ToString());
    part.Clear();
    ErrorToWire(status, &part);
  }
  part.set_request_id(answer.request_id);
  return part;
}

void SessionReactor::MakeParts() {
  for (;;) {
    Answer* answer;
    {
      absl::MutexLock lock(&mu_);
      answer = &answers_.front();  // stays first while making_; push_back does not move it
    }
    v1::SessionReply part = MakePart(*answer);
    if (part.last()) answer->reply.reset();  // gives its slot back
    absl::MutexLock lock(&mu_);
    making_ = false;
    if (finished_) {
      answers_.clear();
      return;
    }
    if (part.last()) answers_.pop_front();
    unsent_.push_back(std::move(part));
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
  StartRead(&request_);
}

void SessionReactor::Write() {
  if (writing_ || finished_ || unsent_.empty()) return;
  writing_ = true;
  StartWrite(&unsent_.front());
}

void SessionReactor::OnWriteDone(bool ok) {
  bool make = false;
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
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
  if (session_ != nullptr) session_->Cancel();
  if (!making_) answers_.clear();
  Finish(ToGrpc(status));
}

}  // namespace carrel::kvstore
