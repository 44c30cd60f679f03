// What:    Export and Import of ContextService: a context's stream (kvstore/storage/context_stream.h)
//          in pieces. Disk and digests are worked on by the engine's background threads, a piece at a
//          time, so that searches do not wait for them.
// Rights:  visit: the caller's rights, or why it has none (then the call ends with that). Asked again for
//          each piece and every second (PermissionDenied). A transfer takes a place among the sessions
//          of its key and tenant, and its bytes count against their rates: beyond them the next piece
//          comes later. An import has a place in its tenant's quotas from its header on, and is held
//          against what the tenant has stored again as it arrives.
// Ownership: engine and registry outlive it; a reactor lives until gRPC and the engine are done with it.
#pragma once

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "carrel/v1/context.grpc.pb.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/service_limits.h"

namespace carrel::kvstore {

class Transfer;

// The exports and imports of a server: how many there may be, and which are to end, as they ran out of time
// or their callers may not have them any more. Any thread.
class TransferRegistry {
 public:
  explicit TransferRegistry(const ServiceLimits& limits) : limits_(limits) {}

  // ResourceExhausted names the limit. It is kept until Remove.
  absl::Status Add(std::shared_ptr<Transfer> transfer);
  void Remove(const Transfer* transfer);

  // Call it about every second.
  void EndThoseThatAreOver();

  int64_t size() const;

 private:
  const ServiceLimits limits_;
  mutable absl::Mutex mu_;
  absl::flat_hash_set<std::shared_ptr<Transfer>> transfers_ ABSL_GUARDED_BY(mu_);
};

grpc::ServerWriteReactor<v1::ExportPiece>* StartExport(Engine* engine, TransferRegistry* registry,
                                                       grpc::CallbackServerContext* context,
                                                       absl::StatusOr<Visit> visit);
grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* StartImport(
    Engine* engine, TransferRegistry* registry, grpc::CallbackServerContext* context,
    absl::StatusOr<Visit> visit);

}  // namespace carrel::kvstore
