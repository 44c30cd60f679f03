#include "kvstore/service/transfer_reactors.h"

#include <grpcpp/alarm.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/service/convert.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {

class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void EndIfOver(std::chrono::steady_clock::time_point now,
                         const ServiceLimits& limits) = 0;
};

namespace {

using Clock = std::chrono::steady_clock;

// K and V in bf16.
int64_t RowBytes(const v1::Manifest& manifest) {
  const double bytes = 4.0 * static_cast<double>(manifest.tokens()) * manifest.layers() *
                       manifest.kv_heads() * manifest.head_dim();
  return static_cast<int64_t>(std::min(bytes, 0x1p62));
}

// How often what a tenant has stored is looked at again while an import arrives.
constexpr int64_t kQuotaEveryBytes = int64_t{64} << 20;

// What both directions share: who calls, the place, and the end of the call. `Reactor` is gRPC's.
//
// Invariants
//   1. Finish is called once, and nothing is started on the stream afterwards.
//   2. The visit is written by one piece of work at a time, and not after told_ is set.
template <typename Reactor>
class TransferReactor : public Reactor,
                        public Transfer,
                        public std::enable_shared_from_this<TransferReactor<Reactor>> {
 public:
  TransferReactor(Engine* engine, TransferRegistry* registry, grpc::CallbackServerContext* context,
                  absl::StatusOr<Visit> visit)
      : engine_(engine), visit_(std::move(visit)), registry_(registry), context_(context) {}

  void Start() {
    self_ = this->shared_from_this();
    absl::Status status = visit_.status();
    if (status.ok()) status = registry_->Add(self_);
    if (status.ok()) {
      absl::StatusOr<std::shared_ptr<void>> place = visit_->TakeSession();
      status = place.status();
      absl::MutexLock lock(&mu_);
      if (place.ok()) place_ = *std::move(place);
    }
    if (status.ok()) status = Begin();
    if (!status.ok()) End(status);
  }

  void EndIfOver(Clock::time_point now, const ServiceLimits& limits) override {
    {
      absl::MutexLock lock(&mu_);
      const absl::Duration quiet = absl::FromChrono(now - waits_since_);
      const bool stalled = waiting_ && quiet >= TimeOf(limits);
      if (finished_) {
        // The status waits behind a piece that nobody takes.
        if (stalled && !done_) context_->TryCancel();
        return;
      }
      if (stalled) {
        EndLocked(absl::UnavailableError(absl::StrCat("transfer: its client did nothing for ",
                                                      absl::FormatDuration(TimeOf(limits)))));
        context_->TryCancel();
        return;
      }
      if (!told_) return;
    }
    if (const absl::Status status = visit_->StillAllowed(); !status.ok()) End(status);
  }

  void OnDone() override {
    registry_->Remove(this);
    const std::shared_ptr<Transfer> last = std::move(self_);
    absl::MutexLock lock(&mu_);
    done_ = true;
  }

 protected:
  virtual absl::Status Begin() = 0;
  // How long the client may take for what it is waited for.
  virtual absl::Duration TimeOf(const ServiceLimits& limits) const = 0;

  // From here on visit_ is only read.
  void SetTold() {
    absl::MutexLock lock(&mu_);
    told_ = true;
  }
  void End(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    EndLocked(status);
  }
  void EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (finished_) return;
    finished_ = true;
    later_.Cancel();
    place_.reset();  // whoever hears of the end may begin again at once
    this->Finish(ToGrpc(status));
  }
  // Starts reading or writing, unless the call is over.
  template <typename Operation>
  void Wait(const Operation& operation) {
    absl::MutexLock lock(&mu_);
    if (finished_) return;
    waiting_ = true;
    waits_since_ = Clock::now();
    operation();
  }
  // What was waited for has come. False: the call is over.
  bool Waited() {
    absl::MutexLock lock(&mu_);
    if (!finished_) waiting_ = false;
    return !finished_;
  }
  // Runs `next` now, or once the rate of the key allows it.
  void AfterSpending(int64_t bytes, std::function<void()> next) {
    const absl::Time now = absl::Now();
    const absl::Duration wait = visit_->principal().Spend(1, bytes, now);
    if (wait == absl::ZeroDuration()) return next();
    absl::MutexLock lock(&mu_);
    if (finished_) return;
    // An alarm keeps its function when it has run, and is ours: it must not keep us.
    later_.Set(absl::ToChronoTime(now + wait),
               [weak = this->weak_from_this(), next = std::move(next)](bool ok) {
                 const std::shared_ptr<Transfer> self = weak.lock();
                 if (ok && self != nullptr) next();
               });
  }

  Engine* const engine_;
  absl::StatusOr<Visit> visit_;

 private:
  TransferRegistry* const registry_;
  grpc::CallbackServerContext* const context_;
  std::shared_ptr<Transfer> self_;  // until OnDone
  grpc::Alarm later_;
  absl::Mutex mu_;
  std::shared_ptr<void> place_ ABSL_GUARDED_BY(mu_);
  bool told_ ABSL_GUARDED_BY(mu_) = false;     // visit_ knows what the call is about
  bool waiting_ ABSL_GUARDED_BY(mu_) = false;  // for the client
  Clock::time_point waits_since_ ABSL_GUARDED_BY(mu_) = Clock::now();
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;  // gRPC is: context_ is gone
};

class ExportReactor final : public TransferReactor<grpc::ServerWriteReactor<v1::ExportPiece>> {
 public:
  using TransferReactor::TransferReactor;

  void OnWriteDone(bool ok) override {
    if (!Waited()) return;
    if (!ok) return End(absl::CancelledError("export: the reader is gone"));
    AfterSpending(static_cast<int64_t>(piece_.data().size()), [this] {
      engine_->ContinueBackground([self = shared_from_this(), this] { SendNext(); });
    });
  }

 private:
  absl::Status Begin() override {
    SetTold();
    return engine_->SubmitBackground([self = shared_from_this(), this] { SendFirst(); });
  }
  absl::Duration TimeOf(const ServiceLimits& limits) const override { return limits.stall_timeout; }

  void SendFirst() {
    absl::StatusOr<std::unique_ptr<ContextExport>> from =
        engine_->store().Export(visit_->lookup_name());
    const absl::Status status = visit_->Told(from.status());
    visit_->Log("export", status);
    if (!status.ok()) return End(status);
    from_ = *std::move(from);
    SendNext();
  }
  void SendNext() {
    if (const absl::Status still = visit_->StillAllowed(); !still.ok()) return End(still);
    const absl::StatusOr<absl::string_view> next = from_->Next();
    if (!next.ok() || next->empty()) return End(next.status());
    piece_.set_data(next->data(), next->size());
    Wait([this] { StartWrite(&piece_); });
  }

  std::unique_ptr<ContextExport> from_;
  v1::ExportPiece piece_;
};

// One request is read, worked on and answered before the next is read: the memory of an import is
// that of one piece.
class ImportReactor final
    : public TransferReactor<grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>> {
 public:
  using TransferReactor::TransferReactor;

  void OnReadDone(bool ok) override {
    if (!Waited()) return;
    if (!ok) return EndImport(ended_);  // what has arrived is kept
    engine_->ContinueBackground([self = shared_from_this(), this] { Answer(Handle()); });
  }
  void OnWriteDone(bool ok) override {
    if (!Waited()) return;
    if (!ok) return EndImport(absl::CancelledError("import: nobody reads"));
    AfterSpending(static_cast<int64_t>(request_.data().size()), [this] { ReadNext(); });
  }

 private:
  absl::Status Begin() override {
    ReadNext();
    return absl::OkStatus();
  }
  absl::Duration TimeOf(const ServiceLimits& limits) const override { return limits.idle_timeout; }
  void ReadNext() {
    Wait([this] { StartRead(&request_); });
  }

  absl::Status Handle() {
    if (published_) return absl::FailedPreconditionError("import: the context is published");
    if (to_ == nullptr) {
      RETURN_IF_ERROR(visit_->AllowNew(request_.name()));
      SetTold();
      ASSIGN_OR_RETURN(to_, engine_->store().Import(request_.name(), Guard()));
      if (request_.has_ahead()) RETURN_IF_ERROR(BeginAhead(request_.ahead()));
    } else if (!request_.name().empty()) {
      return absl::InvalidArgumentError("import: the name belongs into the first request");
    }
    RETURN_IF_ERROR(visit_->StillAllowed());
    RETURN_IF_ERROR(to_->Take(request_.data()));
    if (ahead_ && to_->position() == to_->bytes()) ended_ = absl::OkStatus();
    if (quota_ != nullptr && to_->position() - checked_at_ >= kQuotaEveryBytes) {
      RETURN_IF_ERROR(CheckQuota());
    }
    if (request_.publish()) RETURN_IF_ERROR(Publish());
    reply_.set_position(to_->position());
    reply_.set_bytes(to_->bytes());
    return absl::OkStatus();
  }

  absl::Status BeginAhead(const v1::FileAhead& ahead) {
    const std::optional<ContextId> id = ContextId::FromBytes(ahead.context_id());
    if (!id.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("import: a context id of ", ahead.context_id().size(), " bytes"));
    }
    ahead_ = true;
    return to_->BeginAhead(*id, ahead.file(), ahead.bytes());
  }

  absl::Status Publish() {
    RETURN_IF_ERROR(CheckQuota());
    ASSIGN_OR_RETURN(const v1::Manifest manifest, to_->Publish());
    quota_ = nullptr;  // it is stored
    visit_->Log("import", absl::OkStatus(), FactsOf(manifest));
    reply_.set_name(manifest.name());
    reply_.set_content_id(manifest.content_id());
    published_ = true;
    ended_ = absl::OkStatus();
    return absl::OkStatus();
  }

  // The store asks within Take and Publish: while this lives.
  ImportGuard Guard() {
    Principal& who = visit_->principal();
    ImportGuard guard;
    guard.owner = !who.tenant_name().empty() ? absl::StrCat("tenant ", who.tenant_name())
                  : who.SeesAll()            ? ""
                                             : absl::StrCat("key ", who.name());
    guard.sees = [&who](const std::string& name) { return who.Sees(name); };
    guard.admit = [this, &who](const std::string& name, int64_t bytes) -> absl::Status {
      if (!who.OfTenant(name)) return absl::OkStatus();
      ASSIGN_OR_RETURN(const Stored stored, StoredOfTenant());
      ASSIGN_OR_RETURN(quota_, visit_->TakeImport(stored.contexts, stored.bytes, bytes));
      if (quota_ != nullptr) room_for_remains_ = quota_->RoomForRemains(stored.bytes);
      return absl::OkStatus();
    };
    guard.most_remains = [this] { return room_for_remains_; };
    return guard;
  }

  struct Stored {
    int64_t contexts = 0, bytes = 0;
  };
  absl::StatusOr<Stored> StoredOfTenant() const {
    std::vector<absl::Status> unreadable;
    ASSIGN_OR_RETURN(const std::vector<v1::Manifest> manifests, engine_->List(&unreadable));
    Stored stored;
    for (const v1::Manifest& manifest : manifests) {
      if (!visit_->principal().OfTenant(manifest.name())) continue;
      ++stored.contexts;
      // What a manifest says of sizes is its maker's word; rows are there, or it would not be.
      stored.bytes += std::max(FactsOf(manifest).bytes, RowBytes(manifest));
    }
    return stored;
  }
  absl::Status CheckQuota() {
    if (quota_ == nullptr) return absl::OkStatus();
    checked_at_ = to_->position();
    ASSIGN_OR_RETURN(const Stored stored, StoredOfTenant());
    return quota_->CheckImports(stored.contexts, stored.bytes);
  }

  void Answer(const absl::Status& status) {
    if (!status.ok()) visit_->Log("import", status);
    if (!status.ok()) return EndImport(status);
    Wait([this] { StartWrite(&reply_); });
  }

  // Whoever hears of the end may begin again at once: nothing of this import is held any more, and
  // its place in the quotas is given back. Where no work goes on.
  void EndImport(const absl::Status& status) {
    to_.reset();
    quota_.reset();
    End(status);
  }

  std::unique_ptr<ContextImport> to_;
  std::shared_ptr<TenantState> quota_;  // null: of no tenant
  int64_t checked_at_ = 0;
  int64_t room_for_remains_ = std::numeric_limits<int64_t>::max();
  v1::ImportRequest request_;
  v1::ImportReply reply_;
  bool published_ = false;
  bool ahead_ = false;
  absl::Status ended_ = absl::CancelledError("import: the call ended before publish");
};

}  // namespace

absl::Status TransferRegistry::Add(std::shared_ptr<Transfer> transfer) {
  absl::MutexLock lock(&mu_);
  if (static_cast<int64_t>(transfers_.size()) >= limits_.max_transfers) {
    CountRefusal("transfers");
    return absl::ResourceExhaustedError(absl::StrCat(
        transfers_.size(),
        " exports and imports are going on (max_transfers=", limits_.max_transfers, ")"));
  }
  transfers_.insert(std::move(transfer));
  return absl::OkStatus();
}

void TransferRegistry::Remove(const Transfer* transfer) {
  decltype(transfers_)::node_type last;  // destroyed without the lock
  absl::MutexLock lock(&mu_);
  last = transfers_.extract(transfer);
}

void TransferRegistry::EndThoseThatAreOver() {
  std::vector<std::shared_ptr<Transfer>> all;
  {
    absl::MutexLock lock(&mu_);
    all.assign(transfers_.begin(), transfers_.end());
  }
  const auto now = std::chrono::steady_clock::now();
  for (const std::shared_ptr<Transfer>& transfer : all) transfer->EndIfOver(now, limits_);
}

int64_t TransferRegistry::size() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(transfers_.size());
}

grpc::ServerWriteReactor<v1::ExportPiece>* StartExport(Engine* engine, TransferRegistry* registry,
                                                       grpc::CallbackServerContext* context,
                                                       absl::StatusOr<Visit> visit) {
  const auto reactor = std::make_shared<ExportReactor>(engine, registry, context, std::move(visit));
  reactor->Start();
  return reactor.get();
}

grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* StartImport(
    Engine* engine, TransferRegistry* registry, grpc::CallbackServerContext* context,
    absl::StatusOr<Visit> visit) {
  const auto reactor = std::make_shared<ImportReactor>(engine, registry, context, std::move(visit));
  reactor->Start();
  return reactor.get();
}

}  // namespace carrel::kvstore
