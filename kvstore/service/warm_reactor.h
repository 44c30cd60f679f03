// What:    one ContextService.Warm on the server: its client is told how far the context is, and at last that it is
//          here.
// Ownership: engine and source outlive it; the call's context is gRPC's, until OnDone.
// Threads: gRPC's, the source's and the engine's; nothing here blocks.
// Edge:    it takes a session's place of the key and the tenant for as long as it waits. A key that is withdrawn ends
//          it with the next word about the context.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "carrel/v1/context.pb.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/context_source.h"
#include "kvstore/engine/engine.h"

namespace carrel::kvstore {

class WarmReactor : public grpc::ServerWriteReactor<v1::WarmReply>,
                    public std::enable_shared_from_this<WarmReactor> {
 public:
  // The reactor owns itself until OnDone. source: null: what the store has is here, and nothing else.
  static WarmReactor* Start(Engine* engine, ContextSource* source,
                            grpc::CallbackServerContext* context, absl::StatusOr<Visit> visit);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  WarmReactor(grpc::CallbackServerContext* context, absl::StatusOr<Visit> visit)
      : context_(context), visit_(std::move(visit)) {}
  void Say(const ContextComes& comes);
  void End(const absl::Status& status);
  void WriteLast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishWith(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  grpc::CallbackServerContext* const context_;
  const absl::StatusOr<Visit> visit_;
  std::shared_ptr<WarmReactor> self_;  // until OnDone
  absl::Mutex mu_;
  std::shared_ptr<void> place_ ABSL_GUARDED_BY(mu_), bringing_ ABSL_GUARDED_BY(mu_);
  v1::WarmReply reply_ ABSL_GUARDED_BY(mu_);  // gRPC's while writing_
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool here_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace carrel::kvstore
