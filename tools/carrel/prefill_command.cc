#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/freed_memory.h"
#include "common/mapped_file.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/remote/push_ahead.h"
#include "kvstore/service/context_client.h"
#include "kvstore/storage/files_ahead.h"
#include "kvstore/storage/store.h"
#include "library/document_text.h"
#include "library/move_context.h"
#include "prefill/prefill.h"
#include "serving/chat_probe.h"
#include "serving/jobs/job_board.h"
#include "tools/carrel/bucket_flags.h"
#include "tools/carrel/chat_text.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/given_files.h"
#include "tools/carrel/index_flags.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/lab.h"
#include "tools/carrel/retrieval_flags.h"
#include "tools/carrel/store_flags.h"
#include "tools/carrel/token_file.h"

namespace carrel::tools {
namespace {

struct PrefillFlags {
  std::string model_dir;
  std::string adapter_dir;
  std::string missing_bytes = "refuse";
  std::string input;
  bool raw = false;
  std::string tokens;
  StoreFlags served;  // no server: the context stays in the folder
  BucketFlags bucket;
  std::string
      bucket_uri;  // --store s3://..: where the context goes; config.store_folder is --staging then
  std::string staging;
  IndexFlags index;
  int threads = 0;
  std::string device = "cpu";
  std::string attention = "dense";
  std::string key_position = "rotated";
  std::string rope = "trained";
  bool summaries_given = false;
  bool quiet = false;
  bool json = false;
  prefill::PrefillConfig config;
};

absl::StatusOr<std::vector<TokenId>> ReadDocument(const PrefillFlags& flags,
                                                  const model::Checkpoint& checkpoint,
                                                  const Chat& chat) {
  if (!flags.tokens.empty()) return ReadTokenFile(flags.tokens);
  ASSIGN_OR_RETURN(const std::string text,
                   ReadDocumentFile(flags.input, "carrel prefill --input -"));
  std::string turn_head;
  if (chat != nullptr) {
    ASSIGN_OR_RETURN(turn_head, chat->TurnHead());
  }
  absl::StatusOr<std::vector<TokenId>> ids =
      EncodeText(flags.missing_bytes, flags.input, [&](model::Tokenizer::Dropped* dropped) {
        return flags.raw || checkpoint.tokenizer == nullptr
                   ? checkpoint.EncodeDocument(text, dropped)
                   : library::EncodeGivenText(*checkpoint.tokenizer, turn_head, text, dropped);
      });
  if (!ids.ok()) return Annotate(ids.status(), flags.input);
  return ids;
}

// Of a document that is given as tokens a chat is known only for the probe, which does without.
absl::StatusOr<Chat> LoadChatOf(const PrefillFlags& flags, const model::Checkpoint& checkpoint) {
  if (flags.tokens.empty()) return LoadChatUnlessRaw(flags.raw, flags.model_dir, checkpoint);
  absl::StatusOr<Chat> chat = LoadChat(flags.model_dir, checkpoint);
  return chat.ok() ? std::move(chat) : Chat();
}

// Of the seconds from begin to end: what the GPU did, one after the other, and what it waited for.
// Copies, indexing and writing that went on beside it count in their own seconds only.
nlohmann::json Shares(const prefill::PrefillReport& report) {
  return {{"attention", report.times.attention / report.seconds},
          {"products", report.times.projections / report.seconds},
          {"copy_out_wait", report.times.copy_out_wait / report.seconds},
          {"indexing_and_writing_wait", report.index_wait_seconds / report.seconds},
          {"publication", report.publish_seconds / report.seconds}};
}

void Print(const PrefillFlags& flags, const prefill::PrefillReport& report) {
  if (flags.json) {
    const nlohmann::json json = {{"name", flags.config.name},
                                 {"tokens", report.tokens},
                                 {"probe_tokens", report.probe_tokens},
                                 {"index", flags.index.kind},
                                 {"seconds", report.seconds},
                                 {"tokens_per_s", report.tokens_per_s},
                                 {"resumed_layers", report.resumed_layers},
                                 {"peak_memory_bytes", report.peak_memory_bytes},
                                 {"stored_bytes", report.stored_bytes},
                                 {"index_bytes", report.index_bytes},
                                 {"summary_bytes", report.summary_bytes},
                                 {"attention", prefill::AttentionText(flags.config.attention)},
                                 {"device", flags.device},
                                 {"device_bytes", report.device_bytes},
                                 {"compute_seconds", report.compute_seconds},
                                 {"index_wait_seconds", report.index_wait_seconds},
                                 {"gpu_projections_seconds", report.times.projections},
                                 {"gpu_attention_seconds", report.times.attention},
                                 {"gpu_copy_out_seconds", report.times.copy_out},
                                 {"copy_out_wait_seconds", report.times.copy_out_wait},
                                 {"indexing_thread_seconds", report.writer.indexing},
                                 {"statistics_thread_seconds", report.writer.statistics},
                                 {"writing_thread_seconds", report.writer.writing},
                                 {"recheck_tokens", report.recheck_tokens},
                                 {"recheck_seed", report.recheck_seed},
                                 {"recheck_seconds", report.recheck_seconds},
                                 {"recheck_worst", report.recheck_worst},
                                 {"publish_seconds", report.publish_seconds},
                                 {"shares", Shares(report)}};
    PrintJson(json);
    return;
  }
  absl::PrintF(
      "%s: %d tokens in %.1f s (%.0f tokens/s), %s stored of which %s index, peak memory %s\n",
      flags.config.name, report.tokens, report.seconds, report.tokens_per_s,
      FormatBytes(report.stored_bytes), FormatBytes(report.index_bytes),
      FormatBytes(report.peak_memory_bytes));
  if (flags.config.device == model::Device::kCuda) {
    absl::PrintF(
        "on the GPU: %.2f s of attention, %.2f s of everything else; waited %.2f s for copies, "
        "%.2f s for indexes and files, %.2f s for publication; %s of its memory\n",
        report.times.attention, report.times.projections, report.times.copy_out_wait,
        report.index_wait_seconds, report.publish_seconds, FormatBytes(report.device_bytes));
  }
  if (report.recheck_tokens > 0) {
    absl::PrintF("checked: %d of its tokens, computed again, are right (%.2f s)\n",
                 report.recheck_tokens, report.recheck_seconds);
  } else {
    absl::PrintF("not checked: no token was computed again (--lab recheck=%d, attention=%s)\n",
                 flags.config.recheck_tokens, prefill::AttentionText(flags.config.attention));
  }
  if (report.resumed_layers > 0)
    absl::PrintF("went on after %d finished layers of an interrupted job\n", report.resumed_layers);
}

// Whether an earlier run of the command computed the context already, and was interrupted while it
// was being sent.
bool IsComputed(const absl::StatusOr<v1::Manifest>& found, const model::Checkpoint& checkpoint,
                const std::vector<TokenId>& tokens) {
  auto fingerprint = checkpoint.fingerprint;
  std::erase_if(fingerprint, [](const auto& field) { return field.first == "key_position"; });
  const absl::string_view bytes(reinterpret_cast<const char*>(tokens.data()),
                                tokens.size() * sizeof(TokenId));
  return found.ok() && serving::IsOf(*found, Sha256Hex(bytes), fingerprint);
}

// Says how it went, unless a report as JSON comes at the end: of a context that stays here it is this one.
absl::Status PrefillHere(const PrefillFlags& flags, const model::Checkpoint& checkpoint,
                         const std::vector<TokenId>& tokens, kvstore::Store& store,
                         ThreadPool* pool, Progress& progress) {
  const absl::StatusOr<prefill::PrefillReport> report =
      prefill::RunPrefill(flags.config, checkpoint, tokens, store, pool, progress);
  progress.Clear();
  if (!report.ok())
    return Annotate(report.status(), absl::StrCat("prefill of \"", flags.config.name, "\""));
  if (!flags.json || flags.config.sealed == nullptr) Print(flags, *report);
  return absl::OkStatus();
}

// What gives the files of layers to who sends them ahead.
template <typename Ahead>
std::function<void(const prefill::SealedLayer&)> AddingTo(Ahead& ahead) {
  return [&ahead](const prefill::SealedLayer& layer) {
    const auto id = kvstore::ContextId::FromBytes(layer.context_id);
    for (size_t i = 0; id.has_value() && i < layer.paths.size(); ++i) {
      ahead.Add(*id, layer.first_file + static_cast<int64_t>(i), layer.paths[i]);
    }
  };
}

// The GPU is left while what was computed is sent on, which a slow network makes long: somebody else can have it.
std::jthread LeavingGpu(const PrefillFlags& flags) {
  if (flags.config.device != model::Device::kCuda) return {};
  return std::jthread(prefill::LeaveGpu);
}

// Prefills in the folder, unless that is done, and moves the context from there to the server.
absl::Status PrefillIntoServer(PrefillFlags& flags, const model::Checkpoint& checkpoint,
                               const std::vector<TokenId>& tokens, kvstore::Store& store,
                               ThreadPool* pool) {
  ASSIGN_OR_RETURN(const ConnectedStore served,
                   flags.served.Connect(kvstore::StoreMode::kReadOnly));
  const absl::StatusOr<v1::Manifest> found = store.GetManifest(flags.config.name);
  const bool computed = IsComputed(found, checkpoint, tokens);
  RETURN_IF_ERROR(library::CheckNameIsFreeAt(*served.client, flags.config.name,
                                             computed ? found->content_id() : ""));
  Progress progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  int64_t bytes_ahead = 0;
  std::jthread leaving;
  if (!computed) {
    kvstore::FilesAhead ahead([&](const kvstore::FilesAhead::File& file,
                                  const std::function<bool()>& wanted) -> absl::Status {
      ASSIGN_OR_RETURN(const int64_t sent,
                       served.client->SendAhead(flags.config.name, file.id, file.file,
                                                file.bytes->bytes(), wanted));
      bytes_ahead += sent;
      return absl::OkStatus();
    });
    flags.config.sealed = AddingTo(ahead);
    RETURN_IF_ERROR(PrefillHere(flags, checkpoint, tokens, store, pool, progress));
    leaving = LeavingGpu(flags);
    progress.Update(1, "sending layers");
    if (const absl::Status sent = ahead.Finish(); !sent.ok()) {
      spdlog::warn("layers were not sent ahead: {}", sent.ToString());
    }
    flags.config.sealed = nullptr;
  }
  const absl::StatusOr<v1::ImportReply> moved =
      library::MoveContext(store, flags.config.name, *served.client, progress);
  progress.Clear();
  if (!moved.ok()) {
    return Annotate(moved.status(),
                    absl::StrCat("sending \"", flags.config.name, "\" to ", flags.served.server,
                                 "; the same command goes on"));
  }
  return Report(flags.json,
                {{"name", moved->name()},
                 {"tokens", tokens.size()},
                 {"server", flags.served.server},
                 {"content_id", moved->content_id()},
                 {"bytes", moved->bytes()},
                 {"bytes_ahead", bytes_ahead}},
                absl::StrFormat(
                    "sent to %s: %s, of which %s while later layers were computed, content id %s\n",
                    flags.served.server, FormatBytes(moved->bytes()), FormatBytes(bytes_ahead),
                    moved->content_id()));
}

// Prefills in the staging folder, unless that is done, while finished layers go into the bucket; the context is
// visible there once all of it is, and then leaves the folder.
absl::Status PrefillIntoBucket(PrefillFlags& flags, const kvstore::Bucket& bucket,
                               const model::Checkpoint& checkpoint,
                               const std::vector<TokenId>& tokens, kvstore::Store& store,
                               ThreadPool* pool) {
  const std::string& name = flags.config.name;
  const absl::StatusOr<v1::Manifest> found = store.GetManifest(name);
  const bool computed = IsComputed(found, checkpoint, tokens);
  RETURN_IF_ERROR(kvstore::Pusher::CheckName(bucket, name, computed ? found->content_id() : ""));
  Progress progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  kvstore::PushAhead ahead(bucket);
  std::jthread leaving;
  if (!computed) {
    flags.config.sealed = AddingTo(ahead);
    const absl::Status done = PrefillHere(flags, checkpoint, tokens, store, pool, progress);
    flags.config.sealed = nullptr;
    RETURN_IF_ERROR(done);
    leaving = LeavingGpu(flags);
  }
  absl::StatusOr<kvstore::Pushed> pushed;
  {
    ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextExport> from, store.Export(name));
    pushed = ahead.Publish(name, *from, [&](int64_t bytes, int64_t all) {
      progress.Update(static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(1, all)),
                      "sending");
    });
  }
  progress.Clear();
  if (const absl::Status sent = ahead.ahead_status(); !sent.ok()) {
    spdlog::warn("layers were not sent ahead: {}", sent.ToString());
  }
  if (!pushed.ok()) {
    return Annotate(pushed.status(), absl::StrCat("sending \"", name, "\" to ", flags.bucket_uri,
                                                  "; the same command goes on"));
  }
  RETURN_IF_ERROR(store.Delete(name));
  return Report(
      flags.json,
      {{"name", name},
       {"tokens", tokens.size()},
       {"store", flags.bucket_uri},
       {"content_id", pushed->content_id},
       {"bytes", pushed->bytes},
       {"sent_bytes", pushed->sent_bytes},
       {"bytes_ahead", ahead.sent_ahead()}},
      absl::StrFormat("sent to %s: %s, of which %s while layers were computed, content id %s\n",
                      flags.bucket_uri, FormatBytes(pushed->bytes), FormatBytes(ahead.sent_ahead()),
                      pushed->content_id));
}

// Where the work is done, and where the context goes.
absl::Status ResolvePlaces(PrefillFlags& flags) {
  std::string& folder = flags.config.store_folder;
  if (!kvstore::BucketAddress::IsOne(folder)) {
    if (!flags.staging.empty()) {
      return absl::InvalidArgumentError(
          "--staging is of --store s3://..: with a folder, --store is where the work is done");
    }
    return flags.bucket.RefuseWithoutBucket();
  }
  RETURN_IF_ERROR(kvstore::BucketAddress::Parse(folder).status());
  if (!flags.served.server.empty()) {
    return absl::InvalidArgumentError(
        "--server with --store s3://..: the context goes to one of them; carrel push moves it on");
  }
  if (flags.staging.empty()) {
    return absl::InvalidArgumentError(
        "--store s3://.. needs --staging FOLDER, where the work is done; it holds the context "
        "until "
        "all of it is sent");
  }
  if (kvstore::BucketAddress::IsOne(flags.staging)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--staging ", flags.staging, " is a bucket: it must be a folder"));
  }
  flags.bucket_uri = std::exchange(folder, flags.staging);
  return absl::OkStatus();
}

absl::Status RunPrefillCommand(PrefillFlags& flags) {
  RETURN_IF_ERROR(ResolvePlaces(flags));
  if (flags.input.empty() == flags.tokens.empty()) {
    return absl::InvalidArgumentError(
        "prefill needs one of --input FILE (text, - for standard input) and --tokens FILE.json");
  }
  if (!flags.tokens.empty() && (flags.raw || flags.missing_bytes != "refuse")) {
    return absl::InvalidArgumentError(absl::StrCat(
        flags.raw ? "--raw" : "--missing-bytes", " is of a text: --tokens are taken as they are"));
  }
  ASSIGN_OR_RETURN(const int threads, ResolveThreads(flags.threads));
  RETURN_IF_ERROR(flags.index.Resolve());
  ASSIGN_OR_RETURN(flags.config.device, model::ParseDevice(flags.device));
  ASSIGN_OR_RETURN(flags.config.attention, prefill::ParseAttention(flags.attention));
  ASSIGN_OR_RETURN(flags.config.attention.key_position,
                   prefill::ParseKeyPosition(flags.key_position));
  ASSIGN_OR_RETURN(flags.config.attention.rope, model::ParseRope(flags.rope));
  if (flags.config.attention.key_position == prefill::KeyPosition::kNone && !flags.summaries_given)
    flags.config.summary_rows = 0;     // there is nothing to summarise them by
  flags.config.keep_when_full = true;  // who typed the command is there to make room
  flags.config.index = flags.index.params;
  flags.config.auto_index = flags.index.auto_index;
  const bool gpu = flags.config.device == model::Device::kCuda;
  if (gpu) KeepFreedMemory();  // before there are threads
  // Beside a GPU some threads sleep at any time, until it has encoded their keys; with two per core
  // those that do not are in one another's way.
  ThreadPool pool((gpu && flags.threads == 0 ? threads + threads / 4 : threads) - 1);
  const model::DigestCache cache(model::DigestCache::DefaultFolder());
  ASSIGN_OR_RETURN(const model::Checkpoint checkpoint,
                   model::LoadCheckpoint(flags.model_dir, &pool, flags.adapter_dir, &cache));
  ASSIGN_OR_RETURN(const Chat chat, LoadChatOf(flags, checkpoint));
  ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, ReadDocument(flags, checkpoint, chat));
  if (chat != nullptr) {
    flags.config.probe = serving::ChatProbe(chat.get(), *checkpoint.tokenizer, tokens);
  }
  std::unique_ptr<kvstore::Bucket> bucket;
  if (!flags.bucket_uri.empty()) {
    ASSIGN_OR_RETURN(bucket, flags.bucket.Open(flags.bucket_uri));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(flags.config.store_folder, kvstore::StoreMode::kReadWrite));
  if (bucket != nullptr)
    return PrefillIntoBucket(flags, *bucket, checkpoint, tokens, *store, &pool);
  if (!flags.served.server.empty())
    return PrefillIntoServer(flags, checkpoint, tokens, *store, &pool);
  Progress progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  return PrefillHere(flags, checkpoint, tokens, *store, &pool, progress);
}

// What belongs to the lab, beside --summaries.
void DeclareLab(CLI::App& command, PrefillFlags& flags) {
  command.add_option(
      "--attention", flags.attention,
      "dense | hip | infinitehip: what a token attends to, with parameters as "
      "NAME:key=value,key=value (rows, sink, window, block_q, stride_q; hip: block_k)");
  command.add_option("--key-position", flags.key_position,
                     "how keys are stored: rotated (after RoPE, at their position) | none (before "
                     "RoPE, for --rope infinitehip)");
  command.add_option("--rope", flags.rope,
                     "where keys stand in attention: trained (where the document has them) | "
                     "infinitehip (within the trained length, for documents of any length)");
  command.add_flag("--beyond-trained", flags.config.beyond_trained,
                   "rope=trained: take a document longer than the model was trained for");
  command.add_option("--segment-tokens", flags.config.segment_tokens,
                     "rows per stored segment, a power of two");
  command.add_option(
      "--sampled-queries", flags.config.sampled_queries,
      "queries per layer and head that teach indexes and are kept for audits; default: 256 "
      "teach, and one per 16 tokens is kept, 16 to 256");
  command.add_option(
      "--recheck", flags.config.recheck_tokens,
      "tokens of the document that are computed again from the sealed rows before the "
      "context is published; 0: none");
}

}  // namespace

void AddPrefill(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<PrefillFlags>();
  CLI::App& command = *app.add_subcommand(
      "prefill", "Run a document through a model once and keep its K and V as a context");
  command
      .add_option("--model", flags->model_dir,
                  "folder of a Hugging Face checkpoint (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE), "
                  "or a GGUF file")
      ->required();
  DeclareAdapter(command, flags->adapter_dir);
  CLI::Option* const input = command.add_option("--input", flags->input,
                                                "the document, UTF-8 text; - for standard input. "
                                                "Of a model that knows chats it stands inside "
                                                "the first user's turn, as carrel api has it");
  input->multi_option_policy(CLI::MultiOptionPolicy::Join);
  command.add_flag("--raw", flags->raw, "--input as it is, control tokens too; no chat template");
  DeclareMissingBytes(command, flags->missing_bytes);
  command.add_option("--tokens", flags->tokens, "token ids instead of text: a JSON array");
  command
      .add_option("--store", flags->config.store_folder,
                  "folder of the store, created if absent; or s3://BUCKET/PREFIX: layers go there "
                  "while later ones are computed")
      ->required();
  command.add_option(
      "--staging", flags->staging,
      "--store s3://..: folder where the work is done, created if absent; the context "
      "leaves it once all of it is in the bucket");
  flags->bucket.Declare(command);
  flags->served.DeclareServer(command);
  command.get_option("--server")
      ->description(
          "prefill for a store that is being served: --store is where the work is done, and the "
          "context "
          "moves to this address, layer by layer");
  command.add_option("--name", flags->config.name, "name of the new context")->required();
  flags->index.Declare(command);
  CLI::Option* const summaries =
      command.add_option("--summaries", flags->config.summary_rows, kSummariesHelp);
  DeclareLab(command, *flags);
  DeclareDevice(command, flags->device, flags->config.gpu_memory);
  command.add_option(
      "--threads", flags->threads,
      "0: one per core; with --device cuda five for four cores: some wait for the GPU");
  command.add_flag("--restart", flags->config.restart,
                   "discard an interrupted job of this name instead of going on with it");
  command.add_flag("--quiet", flags->quiet, "no progress");
  command.add_flag("--json", flags->json, "report as one JSON object");
  MoveToLab(command, {"summaries", "attention", "key-position", "rope", "beyond-trained",
                      "segment-tokens", "sampled-queries", "recheck"});
  command.callback([flags, &chosen, summaries, input] {
    if (input->count() > 1) {
      throw CLI::ValidationError(
          "--input",
          absl::StrCat("given ", input->count(),
                       " times: a context is of one text; give each file "
                       "a context of its own, or make one text of them: cat A B | carrel prefill "
                       "--input -"));
    }
    flags->summaries_given = summaries->count() > 0;
    chosen = [flags] { return RunPrefillCommand(*flags); };
  });
}

}  // namespace carrel::tools
