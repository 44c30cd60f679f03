// What:  decoding over a kvstore, end to end: every index kind, what travels and what is asked
//        ahead, on the same questions in one run. Each line is one JSON object; a speed stands
//        beside the share of answers that equal dense decoding.
// Usage: decode_bench [QUESTIONS]   (default 16)   run from the repository's root; prefills
//        registry-8k into out/bench once.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/progress.h"
#include "common/status.h"
#include "decoder/decoder.h"
#include "eval/questions.h"
#include "kvstore/storage/store.h"
#include "library/store_access.h"
#include "model/checkpoint.h"
#include "prefill/prefill.h"

namespace carrel {
namespace {

constexpr char kModel[] = "models/demo";
constexpr char kStore[] = "out/bench/store";

absl::Status PrefillIfAbsent(const model::Checkpoint& checkpoint, kvstore::IndexKind kind,
                             ThreadPool* pool) {
  std::filesystem::create_directories(kStore);
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(kStore, kvstore::StoreMode::kReadWrite));
  prefill::PrefillConfig config;
  config.store_folder = kStore;
  config.name = std::string(kvstore::IndexKindName(kind));
  config.index.kind = kind;
  if (store->GetManifest(config.name).ok()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string text, ReadFile(std::string(kModel) + "/docs/registry-8k.txt"));
  ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, checkpoint.EncodeDocument(text));
  Progress progress(Progress::ModeFor(stderr));
  ASSIGN_OR_RETURN(const prefill::PrefillReport report,
                   prefill::RunPrefill(config, checkpoint, tokens, *store, pool, progress));
  const nlohmann::json json = {{"prefill", config.name},
                               {"tokens", report.tokens},
                               {"seconds", report.seconds},
                               {"peak_memory_bytes", report.peak_memory_bytes}};
  std::printf("%s\n", json.dump().c_str());
  return absl::OkStatus();
}

struct Case {
  kvstore::IndexKind index;
  decoder::Want want;
  decoder::Prefetch prefetch;
  int64_t top_k;
};

absl::Status Measure(const Case& c, const model::Checkpoint& checkpoint,
                     const std::vector<eval::Question>& questions, ThreadPool* pool) {
  constexpr const char* kWants[] = {"ids", "rows", "values", "attend"};
  constexpr const char* kPrefetches[] = {"off", "speculative", "verified"};
  library::StoreAddress flags;
  flags.folder = kStore;
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(flags, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(std::unique_ptr<retrieval::Session> client, store->NewClient(pool));
  decoder::RetrievalConfig config;
  config.selection = select::TopK{c.top_k};
  if (c.top_k == decoder::kAllRows) config.selection = select::All();
  config.want = c.want;
  config.prefetch = c.prefetch;
  ASSIGN_OR_RETURN(
      const std::unique_ptr<decoder::Decoder> decoder,
      decoder::Decoder::Open(checkpoint, std::move(client),
                             std::string(kvstore::IndexKindName(c.index)), config, pool));
  int64_t equal = 0, tokens = 0;
  double seconds = 0;
  for (const eval::Question& question : questions) {
    ASSIGN_OR_RETURN(const std::vector<TokenId> prompt, checkpoint.EncodePrompt(question.prompt));
    ASSIGN_OR_RETURN(const decoder::GenerateResult result,
                     decoder->Generate(prompt, decoder::GenerateOptions()));
    equal += result.ids == question.dense_ids;
    tokens += static_cast<int64_t>(result.ids.size()) + 1;  // and the EOS
    seconds += result.generate_seconds;
  }
  double wait_us = 0, bytes = 0, passed = 0;
  for (const decoder::LayerStatistics& layer : decoder->statistics().layers) {
    wait_us += layer.exposed_wait_us;
    bytes += static_cast<double>(layer.bytes_received);
    passed = static_cast<double>(layer.tokens);
  }
  const nlohmann::json json = {
      {"index", kvstore::IndexKindName(c.index)},
      {"want", kWants[static_cast<int>(c.want)]},
      {"prefetch", kPrefetches[static_cast<int>(c.prefetch)]},
      {"top_k", c.top_k == decoder::kAllRows ? nlohmann::json("all") : nlohmann::json(c.top_k)},
      {"equal_to_dense", equal},
      {"questions", questions.size()},
      {"ms_per_token", 1000 * seconds / static_cast<double>(tokens)},
      {"exposed_wait_ms_per_token", wait_us / passed / 1000},
      {"bytes_per_token", bytes / passed}};
  std::printf("%s\n", json.dump().c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status Run(size_t count) {
  ThreadPool pool(1);
  ASSIGN_OR_RETURN(const model::Checkpoint checkpoint, model::LoadCheckpoint(kModel, &pool));
  ASSIGN_OR_RETURN(std::vector<eval::Question> questions,
                   eval::ReadQuestions(std::string(kModel) + "/docs/registry-8k.questions.jsonl"));
  if (questions.size() > count) questions.resize(count);
  for (const auto index : {kvstore::IndexKind::kFlat, kvstore::IndexKind::kHnsw}) {
    RETURN_IF_ERROR(PrefillIfAbsent(checkpoint, index, &pool));
    for (const auto want : {decoder::Want::kRows, decoder::Want::kValues, decoder::Want::kAttend}) {
      for (const auto prefetch : {decoder::Prefetch::kOff, decoder::Prefetch::kSpeculative,
                                  decoder::Prefetch::kVerified}) {
        RETURN_IF_ERROR(Measure({index, want, prefetch, 128}, checkpoint, questions, &pool));
      }
    }
  }
  for (const auto want : {decoder::Want::kRows, decoder::Want::kValues, decoder::Want::kAttend}) {
    RETURN_IF_ERROR(
        Measure({kvstore::IndexKind::kFlat, want, decoder::Prefetch::kOff, decoder::kAllRows},
                checkpoint, questions, &pool));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace carrel

int main(int argc, char** argv) {
  const absl::Status status =
      carrel::Run(argc > 1 ? static_cast<size_t>(std::strtoul(argv[1], nullptr, 10)) : 16);
  if (!status.ok()) std::fprintf(stderr, "decode_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
