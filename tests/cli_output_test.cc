// What the program prints: help that names every flag, JSON that is JSON and holds real values.
#include <cmath>
#include <filesystem>

#include "absl/strings/str_split.h"
#include "kvstore/storage/store_test_util.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

using CliOutputTest = StoreTest;

constexpr int kFailed = 1;
constexpr int kBad = 2;
using nlohmann::json;

const Args kRetrievalFlags = {
    "--model",      "--context",      "--store",   "--server",      "--top-k",    "--max-tokens",
    "--threads",    "--stats",        "--json",    "--temperature", "--top-p",    "--seed",
    "--zone",       "--plan",         "--adapter", "--lab",         "--fidelity", "--missing-bytes",
    "--content-id", "--target-error", "--device"};

const Args kRetrievalLab = {"sink",      "local",  "dense-layers",   "budget",        "prefetch",
                            "want",      "effort", "oversample",     "select",        "max-rows",
                            "estimate",  "method", "bank-bytes",     "bank-map",      "bank-ahead",
                            "row-cache", "rope",   "beyond-trained", "gpu-new-tokens"};

TEST(HelpTest, EveryCommand_NamesItsFlags) {
  const struct {
    Args command;
    Texts mentioned;
  } cases[] = {
      {{},
       {"prefill", "reindex", "synth", "serve", "ask", "eval", "audit", "stats", "ls", "inspect",
        "rm", "verify", "upgrade", "export", "import", "--version"}},
      {{"prefill"},
       {"--model", "--adapter", "--missing-bytes", "--input", "--tokens", "--store", "--name",
        "--index", "--threads", "--restart", "--quiet", "--json", "flat", "hnsw", "--lab"}},
      {{"reindex"},
       {"NAME", "--store", "--as", "--index", "--summaries", "--threads", "--quiet", "--json",
        "--lab"}},
      {{"synth"},
       {"--like", "--store", "--from-store", "--name", "--tokens", "--layers", "--kv-heads",
        "--q-heads", "--head-dim", "--rope-theta", "--index", "--segment-tokens",
        "--sampled-queries", "--seed", "--threads", "--quiet", "--json"}},
      {{"stats"}, {"--server", "unix:PATH", "--json"}},
      {{"serve"}, {"--store", "--listen", "unix:PATH", "HOST:PORT", "--threads"}},
      {{"ask"}, With(kRetrievalFlags, {"PROMPT", "--prompt-tokens"})},
      {{"eval"},
       With(kRetrievalFlags, {"--questions", "--compare", "--html", "--measure", "--match"})},
      {{"audit"},
       {"NAME", "--store", "--sample", "--want-recall", "--top-k", "--effort", "--sink", "--local",
        "--threads", "--json", "--html"}},
      {{"ls"}, {"--store", "--server", "--json"}},
      {{"inspect"},
       {"NAME", "--store", "--server", "--rows", "--content-id", "--json", "--plan", "--model"}},
      {{"doctor"}, {"--store", "--model", "--context", "--device", "--json"}},
      {{"verify"}, {"NAME", "--store", "--server", "--deep", "--json"}},
      {{"upgrade"}, {"NAME", "--store", "--quiet", "--json"}},
      {{"export"}, {"NAME", "FILE", "--store", "--quiet", "--json"}},
      {{"import"}, {"FILE", "--store", "--as", "--quiet", "--json"}},
      {{"rm"}, {"NAME", "--store", "--server", "--json"}},
  };
  for (const auto& c : cases) {
    const Outcome outcome = Carrel(With(c.command, {"--help"}));
    EXPECT_THAT(outcome, Succeeds());
    EXPECT_EQ(outcome.err, "");
    for (const std::string& text : c.mentioned) {
      EXPECT_THAT(outcome.out, testing::HasSubstr(text))
          << "help of " << (c.command.empty() ? "carrel" : c.command[0]);
    }
  }
  const Outcome version = Carrel({"--version"});
  EXPECT_THAT(version, Succeeds());
  EXPECT_THAT(version.out, testing::StartsWith("carrel "));
}

TEST(HelpTest, Ask_FitsAScreen) {
  const Outcome help = Carrel({"ask", "--help"});
  ASSERT_THAT(help, Succeeds());
  const std::vector<std::string> lines = absl::StrSplit(help.out, '\n');
  EXPECT_LE(lines.size(), 43u) << "with the empty piece behind the last line";
  for (const std::string& line : lines) EXPECT_LE(line.size(), 100u) << line;
}

TEST(LabTest, Names_AreInItsPageAndNotInHelp) {
  const Outcome help = Carrel({"ask", "--help"}), lab = Carrel({"ask", "--lab", "help"});
  ASSERT_THAT(lab, Succeeds());
  for (const std::string& name : With(kRetrievalLab, {"logits", "ignore-eos"})) {
    EXPECT_THAT(lab.out, testing::HasSubstr("\n  " + name));
    EXPECT_THAT(help.out, testing::Not(testing::HasSubstr("--" + name + " ")));
  }
  const Outcome prefill = Carrel({"prefill", "--lab=help"});
  for (const char* name : {"hnsw-m", "effort", "segment-tokens", "sampled-queries", "attention"}) {
    EXPECT_THAT(prefill.out, testing::HasSubstr(std::string("\n  ") + name));
  }
}

TEST(LabTest, NamesThatItDoesNotHave_AreRefused) {
  const Outcome outcome = Carrel({"ask", "--model", "x", "--lab", "wnat=rows"});
  EXPECT_EQ(outcome.exit_code, kBad);
  EXPECT_THAT(outcome.err, testing::AllOf(testing::HasSubstr("wnat"), testing::HasSubstr("want")));
  EXPECT_EQ(Carrel({"ask", "--model", "x", "--lab", "seed=1"}).exit_code, kBad);  // not of the lab
  EXPECT_EQ(Carrel({"ask", "--model", "x", "--lab"}).exit_code, kBad);
}

TEST_F(CliOutputTest, Lab_IsTheFlag_WhichWarns) {
  const Args ask = {"ask",    "--model", DemoModel(), "--store",      store_, "--context", kKept,
                    "--json", "--top-k", "16",        "--max-tokens", "2",    "Where?"};
  const Outcome of_lab = Carrel(With(ask, {"--lab", "want=rows", "--lab=ignore-eos"}));
  const Outcome directly = Carrel(With(ask, {"--want", "rows", "--ignore-eos"}));
  ASSERT_THAT(of_lab, Succeeds());
  ASSERT_THAT(directly, Succeeds());
  EXPECT_EQ(JsonOf(of_lab)["ids"], JsonOf(directly)["ids"]);
  EXPECT_EQ(of_lab.err, "");
  EXPECT_THAT(directly.err, testing::HasSubstr("--want is of the lab"));
  // A value of the lab's is checked as the flag's is.
  EXPECT_EQ(Carrel(With(ask, {"--lab", "want=everything"})).exit_code, kBad);
}

TEST_F(CliOutputTest, Ls_Json_IsTheSameFromFolderAndServer) {
  const json local = JsonOf(Carrel({"ls", "--store", store_, "--json"}));
  ASSERT_EQ(local["contexts"].size(), 1u);
  const json& context = local["contexts"][0];
  EXPECT_EQ(context["name"], kKept);
  EXPECT_EQ(context["tokens"], kept_tokens_);
  EXPECT_EQ(context["layers"], 8);
  EXPECT_EQ(context["kv_heads"], 2);
  EXPECT_EQ(context["head_dim"], 64);
  EXPECT_EQ(context["index"], "flat");
  EXPECT_GE(context["bytes"], kept_tokens_ * 8 * 2 * 64 * 2 * 2);
  const std::string address = "unix:" + SocketPath();
  const Server server(store_, address);
  EXPECT_EQ(JsonOf(Carrel({"ls", "--server", address, "--json"})), local);
  EXPECT_EQ(JsonOf(Carrel({"inspect", kKept, "--server", address, "--json"})),
            JsonOf(Carrel({"inspect", kKept, "--store", store_, "--json"})));
}

TEST_F(CliOutputTest, Ls_OfAnEmptyStore_IsAnEmptyList) {
  ASSERT_THAT(Carrel({"rm", kKept, "--store", store_}), Succeeds());
  EXPECT_EQ(JsonOf(Carrel({"ls", "--store", store_, "--json"}))["contexts"], json::array());
  EXPECT_THAT(Carrel({"ls", "--store", store_}).out, testing::HasSubstr("no contexts"));
}

TEST_F(CliOutputTest, Inspect_Json_HoldsSizesAndMeasuredStatistics) {
  ASSERT_THAT(Carrel(Prefill("graph", {"--index", "hnsw", "--hnsw-m", "8"})), Succeeds());
  for (const std::string& name : {std::string(kKept), std::string("graph")}) {
    const json manifest = JsonOf(Carrel({"inspect", name, "--store", store_, "--json"}));
    EXPECT_EQ(manifest["name"], name);
    EXPECT_EQ(manifest["tokens"], kept_tokens_);
    EXPECT_EQ(manifest["kv_dtype"], "bf16");
    EXPECT_EQ(manifest["key_position"], "after_rope");
    for (const char* field : {"weights_sha256", "tokenizer_sha256", "rope_theta"}) {
      EXPECT_NE(manifest["fingerprint"].value(field, ""), "") << field;
    }
    EXPECT_EQ(manifest["token_ids_sha256"].get<std::string>().size(), 64u);
    const int64_t row_bytes = kept_tokens_ * 8 * 2 * 64 * 2;
    EXPECT_EQ(manifest["bytes"]["keys"], row_bytes);
    EXPECT_EQ(manifest["bytes"]["values"], row_bytes);
    EXPECT_GT(manifest["bytes"]["sampled_queries"], 0);
    EXPECT_EQ(manifest["layer_bytes"].size(), 8u);
    if (name == "graph") {
      EXPECT_EQ(manifest["index"]["kind"], "hnsw");
      EXPECT_EQ(manifest["index"]["m"], 8);
      EXPECT_GT(manifest["bytes"]["index"], kept_tokens_ * 8 * 2 * 8 * 4);
    } else {
      EXPECT_EQ(manifest["index"], (json{{"kind", "flat"}}));
      EXPECT_EQ(manifest["bytes"]["index"], 0);
    }
    ASSERT_EQ(manifest["head_statistics"].size(), 8u * 8u);
    double entropy_sum = 0;
    for (const json& head : manifest["head_statistics"]) {
      const double entropy = head["entropy_nats"];
      EXPECT_GE(entropy, 0) << head;
      EXPECT_LE(entropy, std::log(static_cast<double>(kept_tokens_))) << head;
      EXPECT_GE(head["keys_for_75_mass"], 1) << head;
      EXPECT_LE(head["keys_for_75_mass"], kept_tokens_) << head;
      EXPECT_GE(head["samples"], 1) << head;
      entropy_sum += entropy;
    }
    EXPECT_GT(entropy_sum, 0);
  }
}

TEST_F(CliOutputTest, Prefill_Json_AgreesWithInspect) {
  const json report =
      JsonOf(Carrel(Prefill("new", {"--index", "hnsw", "--sampled-queries", "16", "--json"})));
  const json manifest = JsonOf(Carrel({"inspect", "new", "--store", store_, "--json"}));
  EXPECT_EQ(report["name"], "new");
  EXPECT_EQ(report["tokens"], manifest["tokens"]);
  EXPECT_EQ(report["resumed_layers"], 0);
  EXPECT_EQ(report["index"], "hnsw");
  EXPECT_EQ(report["index_bytes"], manifest["bytes"]["index"]);
  int64_t stored = 0;
  for (const auto& [kind, bytes] : manifest["bytes"].items()) stored += bytes.get<int64_t>();
  EXPECT_EQ(report["stored_bytes"], stored);
  EXPECT_EQ(manifest["sampled_queries"], 16);
  EXPECT_GT(report["seconds"], 0);
  EXPECT_GT(report["tokens_per_s"], 0);
  EXPECT_GT(report["peak_memory_bytes"], 1 << 20);
  const Outcome removed = Carrel({"rm", "new", "--store", store_, "--json"});
  EXPECT_EQ(JsonOf(removed), (json{{"removed", "new"}}));
}

TEST_F(CliOutputTest, Ask_Json_HoldsTextIdsAndMeasuredStatistics) {
  const Outcome plain = Carrel(Ask(kKept, {"--top-k", "32", "--dense-layers", "2"}));
  ASSERT_THAT(plain, Succeeds());
  for (const char* want : {"rows", "values", "attend"}) {
    for (const char* prefetch : {"off", "speculative", "verified"}) {
      SCOPED_TRACE(absl::StrCat(want, " ", prefetch));
      const Args args = Ask(kKept, {"--top-k", "32", "--dense-layers", "2", "--want", want,
                                    "--prefetch", prefetch, "--stats", "--json"});
      const json answer = JsonOf(Carrel(args));
      EXPECT_EQ(answer["context_tokens"], kept_tokens_ - 1);  // the prompt says one anew
      EXPECT_EQ(answer["ids"].empty(), answer["text"] == "");
      if (std::string(prefetch) == "off") {
        EXPECT_EQ(answer["text"].get<std::string>() + "\n", plain.out);
      }
      ASSERT_EQ(answer["stats"]["layers"].size(), 8u);
      int64_t bytes = 0;
      for (const json& layer : answer["stats"]["layers"]) {
        const bool dense = layer["layer"] < 2;
        EXPECT_EQ(layer["top_k"], dense ? json("all") : json(32)) << layer;
        EXPECT_GT(layer["tokens"], 0) << layer;
        EXPECT_GT(layer["bytes"], 0) << layer;
        EXPECT_GE(layer["exposed_wait_us"], 0) << layer;
        bytes += layer["bytes"].get<int64_t>();
        if (dense) continue;
        EXPECT_GE(layer["candidates"], 32) << layer;
        EXPECT_EQ(layer["estimated"], std::string(want) == "attend") << layer;
        EXPECT_GT(layer["mass"], 0) << layer;
        EXPECT_LE(layer["mass"], 1.0001) << layer;
        if (std::string(prefetch) == "off") continue;
        const int64_t ahead = layer["prefetched_tokens"], again = layer["verified_again_tokens"];
        EXPECT_EQ(ahead + again, layer["tokens"].get<int64_t>()) << layer;
        EXPECT_GT(layer["prefetch_hit_rate"], 0) << layer;
        EXPECT_LE(layer["prefetch_hit_rate"], 1) << layer;
        EXPECT_EQ(layer["prefetch_kept_rate"].is_null(), std::string(want) == "rows") << layer;
      }
      EXPECT_GE(answer["stats"]["bytes_received"], bytes);
      EXPECT_GT(answer["stats"]["window_bytes"], 0);
    }
  }
}

TEST_F(CliOutputTest, Ask_MeasuredBudgets_FollowTheContextsOwnEntropy) {
  const json manifest = JsonOf(Carrel({"inspect", kKept, "--store", store_, "--json"}));
  std::vector<double> entropy(8, 0);
  for (const json& head : manifest["head_statistics"]) {
    entropy[head["layer"].get<size_t>()] += head["entropy_nats"].get<double>() / 8;
  }
  double weights = 0;
  for (int layer = 2; layer < 8; ++layer) weights += std::exp(-entropy[layer] / 4);
  const json answer = JsonOf(Carrel(Ask(kKept, {"--top-k", "32", "--dense-layers", "2", "--budget",
                                                "measured", "--stats", "--json"})));
  for (int layer = 2; layer < 8; ++layer) {
    EXPECT_NEAR(answer["stats"]["layers"][layer]["top_k"].get<double>(),
                32 * 6 * std::exp(-entropy[layer] / 4) / weights, 0.51)
        << "layer " << layer;
  }
}

TEST_F(CliOutputTest, Ask_TextIdsAndLogits_AgreeWithEachOther) {
  const std::string logits = path("logits.safetensors");
  const json answer = JsonOf(Carrel(Ask(kKept, {"--json", "--logits", logits})));
  EXPECT_EQ(answer["text"].get<std::string>() + "\n", answer_);
  const TensorFile file = TensorFile::Read(logits);
  EXPECT_EQ(file.header["logits"]["dtype"], "F32");
  const size_t positions = file.header["logits"]["shape"][0];
  EXPECT_EQ(file.header["logits"]["shape"][1], 2048);
  // Every prompt token and every generated one that was fed back; at the end of text, all were.
  EXPECT_EQ(answer["stop"], "eos");
  const size_t prompt = answer["prompt_tokens"], generated = answer["ids"].size();
  ASSERT_EQ(positions, prompt + generated);
  const absl::string_view bytes = file.Tensor("logits");
  const float* values = reinterpret_cast<const float*>(bytes.data());
  for (size_t i = 0; i < generated; ++i) {
    const float* row = values + (prompt - 1 + i) * 2048;
    EXPECT_EQ(std::max_element(row, row + 2048) - row, answer["ids"][i].get<int64_t>());
  }
}

TEST_F(CliOutputTest, Ask_ShortContextInsideTheWindow_Answers) {
  // All of it is sink and local: nothing is left to retrieve.
  const std::string tokens = WriteFile("tokens.json", "[0, 100, 200, 300]");
  ASSERT_THAT(Carrel(Prefill("short", {"--tokens", tokens})), Succeeds());
  for (const char* want : {"rows", "values", "attend"}) {
    const json answer =
        JsonOf(Carrel(Ask("short", {"--want", want, "--json", "--max-tokens", "4"})));
    EXPECT_EQ(answer["context_tokens"], 4);
  }
}

TEST_F(CliOutputTest, Prefill_FromStandardInput_IsTheSameContext) {
  Command command;
  command.args = Prefill("piped", {"--input", "-"});
  command.input = ReadBytes(document_);
  EXPECT_THAT(Carrel(command), Succeeds());
  const json kept = JsonOf(Carrel({"inspect", kKept, "--store", store_, "--json"}));
  const json piped = JsonOf(Carrel({"inspect", "piped", "--store", store_, "--json"}));
  EXPECT_EQ(piped["token_ids_sha256"], kept["token_ids_sha256"]);
  EXPECT_EQ(piped["head_statistics"], kept["head_statistics"]);
}

TEST_F(CliOutputTest, Audit_Json_HoldsWhatWasMeasuredPerHead) {
  const std::string page = path("page.html");
  const Outcome outcome =
      Carrel({"audit", kKept, "--store", store_, "--top-k", "8", "--sample", "12", "--want-recall",
              "1", "--local", "16", "--html", page, "--json"});
  ASSERT_THAT(outcome, Succeeds());  // flat finds everything
  EXPECT_EQ(outcome.err, "");
  const json audit = JsonOf(outcome);
  EXPECT_EQ(audit["context"], kKept);
  EXPECT_EQ(audit["tokens"], kept_tokens_);
  EXPECT_EQ(audit["index"], "flat");
  EXPECT_EQ(audit["top_k"], 8);
  // One query of 16 tokens is stored; of a short document no more are behind its window.
  EXPECT_EQ(audit["queries"]["used"], audit["queries"]["positions"].size());
  EXPECT_GE(audit["queries"]["used"], 8);
  for (const json& head : audit["heads"]) {
    const json& term = head["estimation_term"];
    EXPECT_EQ(term["rows"], 8);
    EXPECT_LE(term["error"].get<double>(), term["error_without"].get<double>() * 1.0001) << head;
    EXPECT_LE(term["spread_share"].get<double>(), 1);
  }
  EXPECT_EQ(audit["below"], json::array());
  ASSERT_EQ(audit["heads"].size(), 8u * 2u);
  ASSERT_EQ(audit["by_layer"].size(), 8u);
  for (const json& head : audit["heads"]) {
    EXPECT_EQ(head["measured"]["recall"], 1) << head;
    EXPECT_EQ(head["measured"]["output_error_to_exact"], 0) << head;
    EXPECT_EQ(head["measured"]["mass"], head["exact"]["mass"]) << head;
    EXPECT_GT(head["measured"]["mass"], 0) << head;
    EXPECT_LE(head["measured"]["mass"], 1.0001) << head;
    EXPECT_GT(head["measured"]["search_us"], 0) << head;
    EXPECT_EQ(head["curve"].size(), 1u) << head;
  }
  EXPECT_EQ(audit["totals"]["recall"]["mean"], 1);
  const std::string html = ReadBytes(page);
  EXPECT_THAT(html, testing::StartsWith("<!doctype html>"));
  EXPECT_THAT(html, testing::HasSubstr("Audit of kept"));
  EXPECT_THAT(html, testing::EndsWith("</html>\n"));
}

TEST_F(CliOutputTest, Audit_Tables_NameEveryLayerAndTheQueries) {
  const Outcome outcome = Carrel({"audit", kKept, "--store", store_, "--top-k", "8"});
  ASSERT_THAT(outcome, Succeeds());
  for (const char* text : {"kept: ", "index flat", "positions ", "1.0000", "\n    7 ", "\n  all ",
                           "per token, one thread", "estimation term at 8 rows"}) {
    EXPECT_THAT(outcome.out, testing::HasSubstr(text));
  }
}

TEST_F(CliOutputTest, ContentId_IsShownAndPinned) {
  const json list = JsonOf(Carrel({"ls", "--store", store_, "--json"}));
  const std::string content_id = list["contexts"][0]["content_id"];
  EXPECT_EQ(content_id.size(), 64u);
  EXPECT_EQ(JsonOf(Carrel({"inspect", kKept, "--store", store_, "--json"}))["content_id"],
            content_id);
  EXPECT_THAT(Carrel({"ls", "--store", store_}).out, testing::HasSubstr(content_id.substr(0, 12)));
  EXPECT_THAT(Carrel({"inspect", kKept, "--store", store_}).out,
              testing::HasSubstr("content id " + content_id));
  const Args ask = Ask(kKept);
  const Args inspect = {"inspect", kKept, "--store", store_};
  for (const Args& command : {ask, inspect}) {
    EXPECT_THAT(Carrel(With(command, {"--content-id", content_id.substr(0, 12)})), Succeeds());
    EXPECT_THAT(Carrel(With(command, {"--content-id", std::string(64, '0')})),
                FailsWith(kFailed, Texts{"has content id " + content_id, "wanted is 000000"}));
    EXPECT_THAT(Carrel(With(command, {"--content-id", "latest"})),
                FailsWith(kBad, Texts{"latest", "12 to 64 digits"}));
  }
  CARREL_ASSERT_OK(kvstore::MakeUnbound(store_, kKept));
  EXPECT_THAT(Carrel({"ls", "--store", store_}).out, testing::HasSubstr("unbound"));
  EXPECT_THAT(Carrel({"inspect", kKept, "--store", store_}).out,
              testing::HasSubstr("unbound: files of format 2"));
  EXPECT_THAT(Carrel(ask), Succeeds());
  EXPECT_THAT(Carrel(With(ask, {"--content-id", content_id})),
              FailsWith(kFailed, Texts{"has no content id", "carrel upgrade"}));
}

// What an older program stored is read; what is made of it is of this one's format.
TEST_F(CliOutputTest, Reindex_OfAnOlderFormat_WritesThisOne) {
  CARREL_ASSERT_OK(kvstore::MakeUnbound(store_, kKept, kvstore::kOldestManifestFormatVersion));
  EXPECT_EQ(JsonOf(Carrel({"inspect", kKept, "--store", store_, "--json"}))["format_version"],
            kvstore::kOldestManifestFormatVersion);
  EXPECT_THAT(Carrel({"reindex", kKept, "--store", store_, "--as", "newer"}), Succeeds());
  EXPECT_EQ(JsonOf(Carrel({"inspect", "newer", "--store", store_, "--json"}))["format_version"],
            kvstore::kManifestFormatVersion);
}

TEST_F(CliOutputTest, Reindex_Auto_InspectShowsTheChoicePerHead) {
  const json report =
      JsonOf(Carrel({"reindex", kKept, "--store", store_, "--as", "chosen", "--index", "auto",
                     "--auto-rows", "8", "--summaries", "16", "--json"}));
  EXPECT_EQ(report["from"], kKept);
  EXPECT_EQ(report["index"], "auto");
  EXPECT_EQ(report["tokens"], kept_tokens_);
  EXPECT_GT(report["summary_bytes"], 0);
  const json kept = JsonOf(Carrel({"inspect", kKept, "--store", store_, "--json"}));
  const json chosen = JsonOf(Carrel({"inspect", "chosen", "--store", store_, "--json"}));
  EXPECT_EQ(kept["head_indexes"], json::array());
  EXPECT_EQ(chosen["index"]["kind"], "auto");
  EXPECT_EQ(chosen["index"]["wanted"], 8);
  EXPECT_EQ(chosen["bytes"]["keys"], kept["bytes"]["keys"]);
  EXPECT_EQ(chosen["bytes"]["index"], report["index_bytes"]);
  // Of the queries that are stored; prefill had more.
  EXPECT_EQ(chosen["head_statistics"].size(), kept["head_statistics"].size());
  EXPECT_EQ(kept["bytes"]["query_drift"], 7 * 8 * 64 * 4);  // of every layer but the first
  EXPECT_EQ(chosen["bytes"]["query_drift"], kept["bytes"]["query_drift"]);
  ASSERT_EQ(chosen["head_indexes"].size(), 8u * 2u);
  for (const json& head : chosen["head_indexes"]) {
    EXPECT_GE(head["recall"], 0.95) << head;
    EXPECT_GT(head["mass"], 0) << head;
    EXPECT_GT(head["cost_us"], 0) << head;
    EXPECT_GT(head["exact_us"], 0) << head;
    EXPECT_NE(head["index"]["kind"], "auto") << head;
  }
  const Outcome text = Carrel({"inspect", "chosen", "--store", store_});
  EXPECT_THAT(text.out, testing::HasSubstr("index by layer and KV head"));
  EXPECT_THAT(text.out, testing::HasSubstr("drift of predicted queries: 14.0 KiB"));
  const Outcome asked = Carrel(Ask("chosen"));
  EXPECT_EQ(asked.out, answer_);
}

TEST_F(CliOutputTest, Synth_Json_HoldsTheShapeAndHowNearItCame) {
  ASSERT_THAT(Carrel(Prefill("longer", {"--input", DemoDocument("registry-512")})), Succeeds());
  const json report = JsonOf(
      Carrel({"synth",    "--like",     "longer",   "--store", store_,       "--name", "made",
              "--tokens", "3000",       "--layers", "2",       "--kv-heads", "3",      "--q-heads",
              "6",        "--head-dim", "32",       "--index", "code",       "--json"}));
  EXPECT_EQ(report["tokens"], 3000);
  EXPECT_EQ(report["fit"].size(), 2u);
  const json made = JsonOf(Carrel({"inspect", "made", "--store", store_, "--json"}));
  EXPECT_EQ(made["tokens"], 3000);
  EXPECT_EQ(made["bytes"]["query_drift"], 0);
  EXPECT_EQ(made["layers"], 2);
  EXPECT_EQ(made["q_heads"], 6);
  EXPECT_EQ(made["kv_heads"], 3);
  EXPECT_EQ(made["head_dim"], 32);
  EXPECT_EQ(made["index"]["kind"], "code");
  EXPECT_EQ(made["bytes"]["keys"], 3000 * 2 * 3 * 32 * 2);
}

TEST_F(CliOutputTest, Stats_Json_CountsWhatTheServerDid) {
  const std::string address = "unix:" + SocketPath();
  const Server server(store_, address);
  const json before = JsonOf(Carrel({"stats", "--server", address, "--json"}));
  EXPECT_EQ(before["latencies"], json::array());
  EXPECT_EQ(before["open_contexts"], 0);
  Args ask = {"ask", "--model", DemoModel(), "--context", kKept, "--server", address, kQuestion};
  ASSERT_THAT(Carrel(With(ask, {"--want", "attend", "--top-k", "16"})), Succeeds());
  const json after = JsonOf(Carrel({"stats", "--server", address, "--json"}));
  ASSERT_GE(after["latencies"].size(), 1u);
  int64_t requests = 0;
  for (const json& latency : after["latencies"]) {
    requests += latency["count"].get<int64_t>();
    EXPECT_LE(latency["searched_us"]["p50"], latency["searched_us"]["max"]) << latency;
  }
  EXPECT_GE(requests, 8);
  EXPECT_EQ(after["refused"], 0);
  EXPECT_GT(after["memory_budget_bytes"], 0);
  EXPECT_THAT(Carrel({"stats", "--server", address}).out, testing::HasSubstr("attend"));
}

TEST_F(CliOutputTest, Eval_Json_CountsRightAnswers) {
  std::string line = json{{"prompt", kQuestion}, {"answer", answer_}}.dump();
  const std::string questions =
      WriteFile("questions.jsonl",
                line + "\n\n" + json{{"prompt", kQuestion}, {"answer", "no"}}.dump() + "\n");
  const Outcome outcome = Carrel({"eval", "--model", DemoModel(), "--context", kKept, "--store",
                                  store_, "--top-k", "all", "--questions", questions, "--json"});
  EXPECT_THAT(outcome, Succeeds());
  const json report = JsonOf(outcome);
  EXPECT_EQ(report["questions"], 2);
  EXPECT_EQ(report["exact_matches"], 1);
  EXPECT_EQ(report["exact_match"], 0.5);
  EXPECT_EQ(report["agreement"], json());  // no dense_ids given
  EXPECT_GT(report["tokens_per_s"], 0);
  EXPECT_EQ(report["match"], "exact");
  EXPECT_EQ(report["right"], 1);
}

TEST_F(CliOutputTest, EvalMatch_Contains_CountsAnswersThatHoldTheExpectedText) {
  std::string inner = answer_.substr(0, answer_.find_last_not_of("\n ."));
  inner = inner.substr(inner.find_first_not_of(' '));
  ASSERT_GE(inner.size(), 2u);
  const std::string questions = WriteFile(
      "questions.jsonl", json{{"prompt", kQuestion}, {"answer", " " + inner.substr(1)}}.dump() +
                             "\n" + json{{"prompt", kQuestion}, {"answer", "no"}}.dump() + "\n");
  const Args eval = {"eval", "--model", DemoModel(), "--context",   kKept,     "--store",
                     store_, "--top-k", "all",       "--questions", questions, "--json"};
  const auto right = [&](const std::string& match) {
    const json report = JsonOf(Carrel(With(eval, {"--match", match})));
    EXPECT_EQ(report["match"], match);
    EXPECT_EQ(report["exact_matches"], 0);
    return report["right"].get<int>();
  };
  EXPECT_EQ(right("exact"), 0);
  EXPECT_EQ(right("contains"), 1);
  const std::string list =
      WriteFile("compare.json", json::array({{{"name", "dense"}, {"top-k", "all"}}}).dump());
  const json compared =
      JsonOf(Carrel(With(eval, {"--match", "contains", "--compare", list, "--measure", "0"})));
  EXPECT_EQ(compared["match"], "contains");
  EXPECT_EQ(compared["runs"][0]["right"], 1);
  EXPECT_EQ(compared["runs"][0]["exact_matches"], 0);
  EXPECT_THAT(Carrel(With(eval, {"--match", "nearly"})), FailsWith(2, Texts{"match=nearly"}));
  WriteFile("questions.jsonl", json{{"prompt", kQuestion}, {"answer", " "}}.dump());
  EXPECT_THAT(Carrel(With(eval, {"--match", "contains"})),
              FailsWith(2, Texts{"question 1", "empty answer"}));
}

// What was aimed at, what prefill promises, and more rows for less error.
TEST_F(CliOutputTest, Fidelity_SaysWhatItPromisesAndTakesTheRowsForIt) {
  ASSERT_THAT(Carrel(Prefill("long", {"--input", DemoDocument("registry-2k")})), Succeeds());
  const auto stats = [&](const Args& flags) {
    const Outcome outcome = Carrel(
        With({"ask", "--model", DemoModel(), "--context", "long", "--store", store_, "--zone",
              "store", "--sink", "1", "--local", "8", "--max-tokens", "4", "--json", kQuestion},
             flags));
    EXPECT_THAT(outcome, Succeeds());
    return JsonOf(outcome)["stats"];
  };
  double rows = 0;
  for (const auto& [name, target] :
       {std::pair{"fast", 0.05}, {"balanced", 0.03}, {"faithful", 0.016}}) {
    const json of = stats({"--fidelity", name});
    EXPECT_EQ(of["target_error"], target);
    EXPECT_LE(of["promised_error"].get<double>(), target * 1.001) << name;
    EXPECT_GT(of["promised_error"].get<double>(), 0.9 * target) << name;
    EXPECT_EQ(of["promised_on"], "probe") << name;
    EXPECT_GT(of["rows_per_layer_and_token"].get<double>(), rows) << name;
    rows = of["rows_per_layer_and_token"];
    const json same = stats({"--target-error", absl::StrCat(target)});
    EXPECT_EQ(same["rows_per_layer_and_token"], of["rows_per_layer_and_token"]) << name;
  }
  EXPECT_EQ(stats({})["target_error"], 0.03);
}

// Of a text whose zone has fewer rows than 1,024 all are taken, and nothing is lost; a number of rows
// is that number.
TEST_F(CliOutputTest, Fidelity_OfAShortZone_TakesAllRowsAndPromisesNoError) {
  const auto ask = [&](const Args& flags) {
    return Carrel(With({"ask", "--model", DemoModel(), "--context", kKept, "--store", store_,
                        "--max-tokens", "4", "--stats", kQuestion},
                       flags));
  };
  const int64_t zone = kept_tokens_ - 4 - 64;
  for (const char* name : {"fast", "balanced", "faithful"}) {
    const json stats = JsonOf(ask({"--json", "--fidelity", name}))["stats"];
    EXPECT_EQ(stats["promised_error"], 0) << name;
    EXPECT_EQ(stats["promised_on"], "whole zone") << name;
    EXPECT_EQ(stats["rows_per_layer_and_token"], 2 * zone) << name;
  }
  const Outcome shown = ask({"--fidelity", "fast"});
  EXPECT_THAT(shown.out + shown.err,
              testing::HasSubstr("aimed at 0.050, promised 0.000 (all rows of the zone)"));
  const json by_number = JsonOf(ask({"--json", "--top-k", "8", "--dense-layers", "0"}))["stats"];
  EXPECT_EQ(by_number["rows_per_layer_and_token"], 16);
}

// The prompt gives the first token: a rate is of the steps after it.
TEST_F(CliOutputTest, Ask_OneToken_HasNoRate) {
  const auto report = [&](const std::string& tokens) {
    return JsonOf(Carrel(Ask(kKept, {"--json", "--ignore-eos", "--max-tokens", tokens})));
  };
  EXPECT_EQ(report("1")["tokens_per_s"], json());
  const json three = report("3");
  EXPECT_NEAR(three["tokens_per_s"].get<double>() * three["generate_seconds"].get<double>(), 2,
              1e-6);
}

// The store in this process ends its sessions before it ends itself: nothing is cut.
TEST_F(CliOutputTest, AskAndEval_InThisProcess_SayNothingElse) {
  for (int i = 0; i < 5; ++i) {
    const Outcome outcome =
        Carrel(Ask(kKept, {"--max-tokens", "8", "--lab", "prefetch=speculative"}));
    EXPECT_THAT(outcome, Succeeds());
    EXPECT_EQ(outcome.err, "");
  }
}

TEST_F(CliOutputTest, EvalCompare_AllThreeForms_HoldEveryConfiguration) {
  const std::string questions =
      WriteFile("questions.jsonl", json{{"prompt", kQuestion}, {"answer", answer_}}.dump());
  const std::string configurations = WriteFile(
      "compare.json", json::array({{{"name", "dense"}, {"top-k", "all"}},
                                   {{"top-k", 8}, {"zone", "host"}, {"dense-layers", 0}},
                                   {{"top-k", 8}, {"zone", "host"}, {"method", "hip:refresh=2"}},
                                   {{"top-k", 8}, {"want", "rows"}}})
                          .dump());
  const Args eval = {"eval",         "--model",   DemoModel(),   "--context", kKept,
                     "--store",      store_,      "--questions", questions,   "--compare",
                     configurations, "--measure", "1",           "--html",    path("page.html")};
  const Outcome markdown = Carrel(eval);
  EXPECT_THAT(markdown, Succeeds());
  const std::string page = ReadBytes(path("page.html"));
  for (const char* text : {"dense", "method=hip:refresh=2", "output error", "want=rows"}) {
    EXPECT_THAT(markdown.out, testing::HasSubstr(text));
    EXPECT_THAT(page, testing::HasSubstr(text));
  }
  EXPECT_THAT(page, testing::Not(testing::HasSubstr("http")));
  const json report = JsonOf(Carrel(With(eval, {"--json"})));
  ASSERT_EQ(report["runs"].size(), 4u);
  EXPECT_EQ(report["questions"], 1);
  EXPECT_EQ(report["runs"][0]["name"], "dense");
  EXPECT_EQ(report["runs"][0]["exact_matches"], 1);
  EXPECT_EQ(report["runs"][0]["output_error"], 0);
  for (const json& run : report["runs"]) {
    EXPECT_EQ(run["output_error_per_layer"].size(), 8u);
    EXPECT_GT(run["ms_per_token"], 0);
    EXPECT_GT(run["bytes_moved_per_token"], 0);
    EXPECT_LE(run["attended_mass"], 1.001);
  }
  // 8 rows of 2 heads in 8 layers.
  EXPECT_EQ(report["runs"][1]["rows_attended_per_token"], 128);
  EXPECT_GT(report["runs"][1]["output_error"], 0);
  EXPECT_GT(report["runs"][2]["keys_visited_per_token"], 0);
  EXPECT_LT(report["runs"][2]["keys_visited_per_token"],
            report["runs"][1]["keys_visited_per_token"]);
}

}  // namespace
}  // namespace carrel::cli
