// What:    one RetrievalService.Session on the server: reads requests, has the engine answer them,
//          and writes replies part by part.
// Ownership: engine and registry outlive it; the call's context is gRPC's, until OnDone.
// Threads: gRPC's and the engine's; nothing here blocks. A part is made on an engine thread, as it
//          may read the disk.
// Bytes:   messages come and go as gRPC's buffers: what a client sent is counted before it is parsed,
//          and freed when it was handled; a part is kept in the form in which it leaves.
//
// Invariants
//   1. At most kPartsAhead parts are made and unwritten: a client that does not read costs no more.
//      While kMostUnsent replies wait to be written, the stream is not read.
//   2. Finish is called once, and nothing is started on the stream afterwards.
//   3. A request's slot is given back before its last reply is written, so that its id is free when
//      the client has read that.
//   4. The reactor lives until gRPC is done with it and no engine task refers to it.
//   5. Between requests a session holds none of their bytes.
//   6. Who the session belongs to is asked anew for each request, and every second: a key that was
//      withdrawn ends it.
//      Beyond the key's rate the stream is read later; nothing is refused.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <deque>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "carrel/v1/retrieval.pb.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/context_source.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/session_registry.h"

namespace carrel::kvstore {

class SessionReactor : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                       public std::enable_shared_from_this<SessionReactor> {
 public:
  static constexpr size_t kPartsAhead = 3;
  static constexpr size_t kMostUnsent = 64;

  // The reactor owns itself until OnDone. registry and admission outlive it; context until OnDone.
  // source: of contexts that the store lacks; null, or outlives it, too.
  static SessionReactor* Start(Engine* engine, ContextSource* source, SessionRegistry* registry,
                               Admission* admission, grpc::CallbackServerContext* context);

  // Ends the stream from the server's side.
  void Cut(const absl::Status& status);

  // Ends a session that ran out of one of its times.
  void EndIfOverdue(std::chrono::steady_clock::time_point now, const ServiceLimits& limits,
                    EndedSessions& ended);
  // Ends a session that its caller may not have any more (Visit::StillAllowed), and counts it
  // before the client hears of it.
  void EndIfWithdrawn(EndedSessions& ended);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // A part, made; the first is being written.
  struct Unsent {
    grpc::ByteBuffer bytes;
    ByteBudget::Charge charge;
  };
  struct Answer {
    uint64_t request_id = 0;
    std::unique_ptr<Reply> reply;
  };

  SessionReactor(Engine* engine, ContextSource* source, SessionRegistry* registry,
                 grpc::CallbackServerContext* context, absl::StatusOr<Visit> visit);

  void Open(const v1::SessionRequest& request);
  absl::Status SubmitOpen(const v1::SessionRequest& request);
  // Once the store has the context: on an engine thread.
  absl::Status OpenHere(uint64_t request_id, OpenRequest request);
  // While it comes.
  void Fetching(uint64_t request_id, const ContextComes& comes);
  void Spend(int64_t requests, size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Opened(uint64_t request_id, const absl::StatusOr<std::shared_ptr<Session>>& session);
  absl::Status Handle(const v1::SessionRequest& request);  // after Open
  template <typename Request>
  absl::Status Submit(uint64_t request_id, Deadline deadline, absl::StatusOr<Request> request);

  void Answered(uint64_t request_id, absl::StatusOr<std::unique_ptr<Reply>> reply);
  // Writes the error into the log; what is the store's fault gets the ids under which it stands there.
  absl::Status Logged(uint64_t request_id, const absl::Status& status) const;
  void SendError(uint64_t request_id, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MakeParts();  // on an engine thread
  v1::SessionReply MakePart(Answer& answer) const;
  Unsent ToUnsent(const v1::SessionReply& reply) const;
  void Send(const v1::SessionReply& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  bool has_room() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return unsent_.size() + answers_.size() < kMostUnsent;
  }
  void Read() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Write() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // True: the caller must have MakeParts run.
  bool ClaimMaking() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishWith(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishIfIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Engine* const engine_;
  ContextSource* const source_;
  SessionRegistry* const registry_;
  const std::string
      id_;  // in log lines, in what is sent first, and in errors that an operator must see
  grpc::CallbackServerContext* const context_;
  absl::StatusOr<Visit> visit_;           // written by Open alone
  std::shared_ptr<SessionReactor> self_;  // until OnDone
  grpc::ByteBuffer request_;              // owned by the thread that set reading_

  grpc::Alarm later_;  // for the next read

  absl::Mutex mu_;
  std::shared_ptr<void> place_ ABSL_GUARDED_BY(mu_);     // among the key's sessions, from Open on
  std::shared_ptr<void> bringing_ ABSL_GUARDED_BY(mu_);  // source_'s handle, until it told
  absl::Time not_before_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();  // the next read
  int64_t spent_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::shared_ptr<Session> session_ ABSL_GUARDED_BY(mu_);  // after Open
  std::deque<Answer> answers_ ABSL_GUARDED_BY(mu_);        // not yet (wholly) made into parts
  std::deque<Unsent> unsent_ ABSL_GUARDED_BY(mu_);
  int64_t in_engine_ ABSL_GUARDED_BY(mu_) = 0;  // requests not yet answered
  // The start, the last request, or the end of the last write.
  std::chrono::steady_clock::time_point active_ ABSL_GUARDED_BY(mu_) =
      std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point write_began_ ABSL_GUARDED_BY(mu_);
  bool reading_ ABSL_GUARDED_BY(mu_) = false;  // or handling what was read
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool making_ ABSL_GUARDED_BY(mu_) = false;
  bool opening_ ABSL_GUARDED_BY(mu_) = false;      // the first request is here
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;  // the client sends no more
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;  // gRPC is: context_ is gone
};

}  // namespace carrel::kvstore
