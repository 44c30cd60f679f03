#include "tests/world.h"

#include <cstdio>
#include <filesystem>

#include "common/file.h"
#include "common/status.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "decoder/client/store_client_grpc.h"
#include "eval/questions.h"
#include "kvstore/storage/store.h"
#include "library/mapped_rows.h"
#include "library/store_access.h"
#include "prefill/prefill.h"
#include "prefill/reindex.h"
#include "tests/demo_gguf.h"
#include "tests/tensor_file.h"

namespace carrel::testing_world {
namespace {

namespace fs = std::filesystem;

const std::string& DemoFolder() {
  static const std::string folder = SourceFolder() + "/models/demo";
  return folder;
}

absl::StatusOr<std::string> ReadPacked(const std::string& path) {
  FILE* pipe = popen(absl::StrCat("gzip -dc '", path, "'").c_str(), "r");
  if (pipe == nullptr) return ErrnoStatus(errno, "gzip");
  std::string text;
  char buffer[65536];
  for (size_t n; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, n);
  if (pclose(pipe) != 0) return absl::DataLossError(absl::StrCat("gzip -dc ", path, " failed"));
  return text;
}

const model::Checkpoint* Load(const std::string& path) {
  absl::StatusOr<model::Checkpoint> loaded = model::LoadCheckpoint(path, Pool());
  if (!loaded.ok()) std::fprintf(stderr, "%s\n", loaded.status().ToString().c_str());
  CARREL_CHECK(loaded.ok());
  return new model::Checkpoint(*std::move(loaded));
}

}  // namespace

ThreadPool* Pool() {
  static ThreadPool* pool = new ThreadPool(1);
  return pool;
}

const model::Checkpoint& DemoCheckpoint() {
  static const model::Checkpoint* const checkpoint = Load(DemoFolder());
  return *checkpoint;
}

const model::Checkpoint& QuantizedCheckpoint() {
  static const model::Checkpoint* const checkpoint = [] {
    const std::string folder = FreshTempDir();
    WriteBytes(folder + "/demo.gguf", DemoGguf(kernels::GgufType::kQ8_0).Bytes());
    const model::Checkpoint* const loaded = Load(folder + "/demo.gguf");  // mapped from here on
    fs::remove_all(folder);
    return loaded;
  }();
  return *checkpoint;
}

std::string SharedFolder() {
  const std::string folder = carrel::SharedFolder();
  return fs::exists(folder + "/demo/golden") ? folder : "";
}

absl::StatusOr<std::vector<TokenId>> DocumentTokens(const std::string& name) {
  const std::string plain = absl::StrCat(DemoFolder(), "/docs/", name, ".txt");
  const std::string packed = absl::StrCat(SharedFolder(), "/demo/docs/", name, ".txt.gz");
  absl::StatusOr<std::string> text;
  if (fs::exists(plain)) {
    text = ReadFile(plain);
  } else if (!SharedFolder().empty() && fs::exists(packed)) {
    text = ReadPacked(packed);
  } else {
    text = absl::NotFoundError(absl::StrCat(
        name, " is neither in models/demo/docs nor in a shared folder (CARREL_SHARED)"));
  }
  if (!text.ok()) return text.status();
  return DemoCheckpoint().EncodeDocument(*text);
}

absl::StatusOr<std::vector<Question>> Questions(const std::string& document) {
  std::string path = absl::StrCat(DemoFolder(), "/docs/", document, ".questions.jsonl");
  if (!fs::exists(path))
    path = absl::StrCat(SharedFolder(), "/demo/docs/", document, ".questions.jsonl");
  ASSIGN_OR_RETURN(const std::vector<eval::Question> texts, eval::ReadQuestions(path));
  std::vector<Question> questions;
  for (const eval::Question& text : texts) {
    Question question;
    ASSIGN_OR_RETURN(question.prompt, DemoCheckpoint().EncodePrompt(text.prompt));
    question.dense_ids = text.dense_ids;
    questions.push_back(std::move(question));
  }
  return questions;
}

absl::Status PrefillContext(const std::string& store_folder, const std::string& name,
                            const std::vector<TokenId>& tokens, const kvstore::IndexParams& index,
                            int64_t segment_tokens, model::Device device,
                            const model::Checkpoint& checkpoint) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(store_folder, kvstore::StoreMode::kReadWrite));
  prefill::PrefillConfig config;
  config.store_folder = store_folder;
  config.name = name;
  config.index = index;
  config.segment_tokens = segment_tokens;
  config.device = device;
  Progress progress(Progress::Mode::kQuiet);
  return prefill::RunPrefill(config, checkpoint, tokens, *store, Pool(), progress).status();
}

absl::Status ReindexContext(const std::string& store_folder, const std::string& from,
                            const std::string& name, const kvstore::IndexParams& index) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(store_folder, kvstore::StoreMode::kReadWrite));
  const prefill::ReindexConfig config = {
      .store_folder = store_folder, .from = from, .name = name, .index = index};
  Progress progress(Progress::Mode::kQuiet);
  return prefill::Reindex(config, *store, Pool(), progress).status();
}

struct EmbeddedDecoder::Access {
  std::unique_ptr<library::StoreAccess> store;
};

EmbeddedDecoder::EmbeddedDecoder() : access_(std::make_unique<Access>()) {}
EmbeddedDecoder::~EmbeddedDecoder() { decoder_.reset(); }

absl::StatusOr<std::unique_ptr<EmbeddedDecoder>> EmbeddedDecoder::Open(
    const std::string& store_folder, const std::string& context,
    const decoder::RetrievalConfig& config, const decoder::DeviceConfig& device,
    const StoreClientWrapper& wrap, const model::Checkpoint& checkpoint) {
  std::unique_ptr<EmbeddedDecoder> opened(new EmbeddedDecoder());
  library::StoreAddress flags;
  flags.folder = store_folder;
  ASSIGN_OR_RETURN(opened->access_->store,
                   library::StoreAccess::Open(flags, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(std::unique_ptr<retrieval::Session> client,
                   opened->access_->store->NewClient(Pool()));
  if (wrap != nullptr) client = wrap(std::move(client));
  std::shared_ptr<const decoder::HostRows> rows;
  if (decoder::TakesHostRows(config, device)) {
    ASSIGN_OR_RETURN(rows, library::MapContextRows(store_folder, context, Pool()));
  }
  ASSIGN_OR_RETURN(opened->decoder_,
                   decoder::Decoder::Open(checkpoint, std::move(client), context, config, Pool(),
                                          device, std::move(rows)));
  return opened;
}

absl::StatusOr<std::unique_ptr<EmbeddedDecoder>> EmbeddedDecoder::Connect(
    const std::string& address, const std::string& context,
    const decoder::RetrievalConfig& config) {
  std::unique_ptr<EmbeddedDecoder> opened(new EmbeddedDecoder());
  ASSIGN_OR_RETURN(std::unique_ptr<retrieval::Session> client,
                   decoder::ConnectToStore(address, absl::Seconds(30)));
  ASSIGN_OR_RETURN(opened->decoder_, decoder::Decoder::Open(DemoCheckpoint(), std::move(client),
                                                            context, config, Pool()));
  return opened;
}

absl::StatusOr<std::unique_ptr<EmbeddedDecoder>> EmbeddedDecoder::ModelOnly(
    const decoder::DeviceConfig& device) {
  std::unique_ptr<EmbeddedDecoder> opened(new EmbeddedDecoder());
  ASSIGN_OR_RETURN(opened->decoder_,
                   decoder::Decoder::OpenModelOnly(DemoCheckpoint(), Pool(), device));
  return opened;
}

absl::StatusOr<std::vector<std::vector<TokenId>>> AnswerAll(
    decoder::Decoder& decoder, const std::vector<Question>& questions,
    const decoder::GenerateOptions& options) {
  std::vector<std::vector<TokenId>> answers;
  for (const Question& question : questions) {
    ASSIGN_OR_RETURN(decoder::GenerateResult result, decoder.Generate(question.prompt, options));
    answers.push_back(std::move(result.ids));
  }
  return answers;
}

}  // namespace carrel::testing_world
