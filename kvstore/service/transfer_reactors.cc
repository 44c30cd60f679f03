#include "kvstore/service/transfer_reactors.h"

#include <optional>
#include <utility>

#include "common/status.h"
#include "kvstore/service/convert.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

class ExportReactor final : public grpc::ServerWriteReactor<v1::ExportPiece> {
 public:
  ExportReactor(Engine* engine, absl::StatusOr<Visit> visit)
      : engine_(engine), visit_(std::move(visit)) {}

  void Start() {
    if (!visit_.ok()) return Finish(ToGrpc(visit_.status()));
    const absl::Status accepted = engine_->SubmitBackground([this] { Begin(); });
    if (!accepted.ok()) Finish(ToGrpc(accepted));
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status(grpc::StatusCode::CANCELLED, "export: the reader is gone"));
    engine_->ContinueBackground([this] { SendNext(); });
  }
  void OnDone() override { delete this; }

 private:
  void Begin() {
    absl::StatusOr<std::unique_ptr<ContextExport>> from = engine_->Export(visit_->lookup_name());
    const absl::Status status = visit_->Told(from.status());
    visit_->Log("export", status);
    if (!status.ok()) return Finish(ToGrpc(status));
    from_ = *std::move(from);
    SendNext();
  }

  void SendNext() {
    const absl::StatusOr<absl::string_view> next = from_->Next();
    if (!next.ok() || next->empty()) return Finish(ToGrpc(next.status()));
    piece_.set_data(next->data(), next->size());
    StartWrite(&piece_);
  }

  Engine* const engine_;
  const absl::StatusOr<Visit> visit_;
  std::unique_ptr<ContextExport> from_;
  v1::ExportPiece piece_;
};

// One request is read, worked on and answered before the next is read: the memory of an import is
// that of one piece.
class ImportReactor final : public grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply> {
 public:
  ImportReactor(Engine* engine, absl::StatusOr<Visit> visit)
      : engine_(engine), visit_(std::move(visit)) {}

  void Start() {
    if (!visit_.ok()) return Finish(ToGrpc(visit_.status()));
    StartRead(&request_);
  }
  void OnReadDone(bool ok) override {
    if (!ok) return End(ended_);  // what has arrived is kept
    engine_->ContinueBackground([this] { Answer(Handle()); });
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return End(grpc::Status(grpc::StatusCode::CANCELLED, "import: nobody reads"));
    StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Handle() {
    if (published_) return absl::FailedPreconditionError("import: the context is published");
    if (to_ == nullptr) {
      RETURN_IF_ERROR(visit_->AllowNew(request_.name()));
      ASSIGN_OR_RETURN(to_, engine_->Import(request_.name()));
      if (request_.has_ahead()) RETURN_IF_ERROR(BeginAhead(request_.ahead()));
    } else if (!request_.name().empty()) {
      return absl::InvalidArgumentError("import: the name belongs into the first request");
    }
    RETURN_IF_ERROR(to_->Take(request_.data()));
    if (ahead_ && to_->position() == to_->bytes()) ended_ = grpc::Status::OK;
    if (request_.publish()) {
      RETURN_IF_ERROR(CheckQuota());
      ASSIGN_OR_RETURN(const v1::Manifest manifest, to_->Publish());
      visit_->Log("import", absl::OkStatus(), FactsOf(manifest));
      reply_.set_name(manifest.name());
      reply_.set_content_id(manifest.content_id());
      published_ = true;
      ended_ = grpc::Status::OK;
    }
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

  // What the tenant has stored, and this.
  absl::Status CheckQuota() const {
    if (visit_->principal().tenant_name().empty()) return absl::OkStatus();
    std::vector<absl::Status> unreadable;
    ASSIGN_OR_RETURN(const std::vector<v1::Manifest> manifests, engine_->List(&unreadable));
    int64_t contexts = 0, bytes = 0;
    for (const v1::Manifest& manifest : manifests) {
      if (!visit_->principal().OfTenant(manifest.name())) continue;
      ++contexts;
      bytes += FactsOf(manifest).bytes;
    }
    return visit_->principal().CheckQuota(contexts, bytes, to_->bytes());
  }

  void Answer(const absl::Status& status) {
    if (!status.ok()) visit_->Log("import", status);
    if (!status.ok()) return End(ToGrpc(status));
    StartWrite(&reply_);
  }

  // Whoever hears of the end may begin again at once: nothing of this import is held any more.
  void End(const grpc::Status& status) {
    to_.reset();
    Finish(status);
  }

  Engine* const engine_;
  absl::StatusOr<Visit> visit_;
  std::unique_ptr<ContextImport> to_;
  v1::ImportRequest request_;
  v1::ImportReply reply_;
  bool published_ = false;
  bool ahead_ = false;
  grpc::Status ended_{grpc::StatusCode::CANCELLED, "import: the call ended before publish"};
};

}  // namespace

grpc::ServerWriteReactor<v1::ExportPiece>* StartExport(Engine* engine,
                                                       absl::StatusOr<Visit> visit) {
  auto* reactor = new ExportReactor(engine, std::move(visit));
  reactor->Start();
  return reactor;
}

grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* StartImport(
    Engine* engine, absl::StatusOr<Visit> visit) {
  auto* reactor = new ImportReactor(engine, std::move(visit));
  reactor->Start();
  return reactor;
}

}  // namespace carrel::kvstore
