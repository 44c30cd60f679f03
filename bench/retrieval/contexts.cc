#include "bench/retrieval/contexts.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/storage/store.h"
#include "model/checkpoint.h"
#include "prefill/prefill.h"
#include "synth/synth.h"

namespace carrel::bench {
namespace {

namespace fs = std::filesystem;

constexpr char kModel[] = "models/demo";
constexpr char kLike[] = "registry-8k";  // what synthetic contexts take after

absl::StatusOr<std::string> Unpack(const std::string& path) {
  FILE* pipe = popen(absl::StrCat("gzip -dc '", path, "'").c_str(), "r");
  if (pipe == nullptr) return ErrnoStatus(errno, "gzip");
  std::string text;
  char buffer[65536];
  for (size_t n; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, n);
  if (pclose(pipe) != 0) return absl::DataLossError(absl::StrCat("gzip -dc ", path, " failed"));
  return text;
}

// Empty: the document is nowhere.
std::string PathOf(const std::string& docs, const std::string& name) {
  std::vector<std::string> folders = {docs, std::string(kModel) + "/docs"};
  if (const char* shared = std::getenv("CARREL_SHARED")) {
    folders.push_back(std::string(shared) + "/demo/docs");
  }
  for (const std::string& folder : folders) {
    for (const char* ending : {".txt", ".txt.gz"}) {
      const std::string path = absl::StrCat(folder, "/", name, ending);
      if (fs::exists(path)) return path;
    }
  }
  return "";
}

absl::StatusOr<std::string> ReadDocument(const std::string& docs, const std::string& name) {
  const std::string path = PathOf(docs, name);
  if (path.empty()) return absl::NotFoundError(absl::StrCat("document ", name, " is not here"));
  return fs::path(path).extension() == ".gz" ? Unpack(path) : ReadFile(path);
}

absl::Status Prefill(const WantedContext& wanted, const std::string& text, kvstore::Store& store,
                     ThreadPool& pool) {
  ASSIGN_OR_RETURN(const model::Checkpoint checkpoint, model::LoadCheckpoint(kModel, &pool));
  ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, checkpoint.EncodeDocument(text));
  prefill::PrefillConfig config;
  config.store_folder = wanted.store_folder;
  config.name = wanted.name;
  config.index.kind = kvstore::IndexKind::kCode;
  Progress progress(Progress::ModeFor(stderr));
  return prefill::RunPrefill(config, checkpoint, tokens, store, &pool, progress).status();
}

absl::Status Synth(const WantedContext& wanted, kvstore::Store& store, ThreadPool& pool) {
  ASSIGN_OR_RETURN(const auto source, store.OpenContext(kLike));
  synth::SynthConfig config;
  config.store_folder = wanted.store_folder;
  config.name = wanted.name;
  config.tokens = wanted.tokens;
  config.index.kind = kvstore::IndexKind::kCode;
  if (wanted.layers > 0) {
    config.shape = {.layers = wanted.layers, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  }
  Progress progress(Progress::ModeFor(stderr));
  ASSIGN_OR_RETURN(const synth::SynthReport report,
                   synth::RunSynth(config, *source, store, &pool, progress));
  progress.Clear();
  for (const synth::LayerFit& layer : report.layers) {
    std::fprintf(
        stderr,
        "synth %s layer %d, source / result: query-key gap %.2f / %.2f, entropy %.2f / %.2f, "
        "keys for 75%% mass %.0f / %.0f\n",
        wanted.name.c_str(), layer.layer, layer.source.gap, layer.made.gap, layer.source.entropy,
        layer.made.entropy, layer.source.keys_for_75_mass, layer.made.keys_for_75_mass);
  }
  return absl::OkStatus();
}

}  // namespace

bool HaveDocument(const std::string& docs, const std::string& name) {
  return !PathOf(docs, name).empty();
}

absl::Status MakeIfAbsent(const WantedContext& wanted, const std::string& docs, ThreadPool& pool) {
  if (!wanted.own) return absl::OkStatus();
  std::error_code ignored;
  fs::create_directories(wanted.store_folder, ignored);
  ASSIGN_OR_RETURN(const auto store,
                   kvstore::Store::Open(wanted.store_folder, kvstore::StoreMode::kReadWrite));
  if (store->GetManifest(wanted.name).ok()) return absl::OkStatus();
  std::fprintf(stderr,
               "retrieval: context %s is not in %s yet: it is made first (not part of the "
               "measurement)\n",
               wanted.name.c_str(), wanted.store_folder.c_str());
  if (wanted.demo) {
    ASSIGN_OR_RETURN(const std::string text, ReadDocument(docs, wanted.name));
    return Prefill(wanted, text, *store, pool);
  }
  return Synth(wanted, *store, pool);
}

}  // namespace carrel::bench
