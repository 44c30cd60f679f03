#include "kvstore/service/transfer_reactors.h"

#include <utility>

#include "common/status.h"
#include "kvstore/service/convert.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

class ExportReactor final : public grpc::ServerWriteReactor<v1::ExportPiece> {
 public:
  ExportReactor(Engine* engine, std::string name) : engine_(engine), name_(std::move(name)) {}

  void Start() {
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
    absl::StatusOr<std::unique_ptr<ContextExport>> from = engine_->Export(name_);
    if (!from.ok()) return Finish(ToGrpc(from.status()));
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
  const std::string name_;
  std::unique_ptr<ContextExport> from_;
  v1::ExportPiece piece_;
};

// One request is read, worked on and answered before the next is read: the memory of an import is
// that of one piece.
class ImportReactor final : public grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply> {
 public:
  explicit ImportReactor(Engine* engine) : engine_(engine) {}

  void Start() { StartRead(&request_); }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(ended_);  // what has arrived is kept
    engine_->ContinueBackground([this] { Answer(Handle()); });
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status(grpc::StatusCode::CANCELLED, "import: nobody reads"));
    StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Handle() {
    if (published_) return absl::FailedPreconditionError("import: the context is published");
    if (to_ == nullptr) {
      ASSIGN_OR_RETURN(to_, engine_->Import(request_.name()));
    } else if (!request_.name().empty()) {
      return absl::InvalidArgumentError("import: the name belongs into the first request");
    }
    RETURN_IF_ERROR(to_->Take(request_.data()));
    if (request_.publish()) {
      ASSIGN_OR_RETURN(const v1::Manifest manifest, to_->Publish());
      reply_.set_name(manifest.name());
      reply_.set_content_id(manifest.content_id());
      published_ = true;
      ended_ = grpc::Status::OK;
    }
    reply_.set_position(to_->position());
    reply_.set_bytes(to_->bytes());
    return absl::OkStatus();
  }

  void Answer(const absl::Status& status) {
    if (!status.ok()) return Finish(ToGrpc(status));
    StartWrite(&reply_);
  }

  Engine* const engine_;
  std::unique_ptr<ContextImport> to_;
  v1::ImportRequest request_;
  v1::ImportReply reply_;
  bool published_ = false;
  grpc::Status ended_{grpc::StatusCode::CANCELLED, "import: the call ended before publish"};
};

}  // namespace

grpc::ServerWriteReactor<v1::ExportPiece>* StartExport(Engine* engine, const std::string& name) {
  auto* reactor = new ExportReactor(engine, name);
  reactor->Start();
  return reactor;
}

grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* StartImport(Engine* engine) {
  auto* reactor = new ImportReactor(engine);
  reactor->Start();
  return reactor;
}

}  // namespace carrel::kvstore
