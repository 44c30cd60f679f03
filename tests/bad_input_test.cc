// Documents, tokens, names and flags that the program must refuse: each with an exit code, a
// message that names the thing, and everything that was there still there.
#include <sys/stat.h>

#include <filesystem>

#include "audit/audit_test_util.h"
#include "kvstore/storage/store.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

constexpr int kBad = 2;     // wrong usage or bad input
constexpr int kFailed = 1;  // everything else

using BadInputTest = StoreTest;

TEST_F(BadInputTest, Document_Empty_IsRefused) {
  const std::string empty = WriteFile("empty.txt", "");
  EXPECT_THAT(Carrel(Prefill("new", {"--input", empty})),
              FailsWith(kBad, Texts{"empty.txt", "empty"}));
  EXPECT_THAT(Carrel(Prefill("new", {"--input", "-"})), FailsWith(kBad, Texts{"empty"}));
  const std::string none = WriteFile("none.json", "[]");
  EXPECT_THAT(Carrel(Prefill("new", {"--tokens", none})), FailsWith(kBad, Texts{"empty"}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, Device_UnknownOrUnfit_IsRefused) {
  const std::string document = DemoDocument("registry-512");
  EXPECT_THAT(Carrel(Prefill("new", {"--input", document, "--device", "tpu"})),
              FailsWith(kBad, Texts{"device=tpu", "cpu, cuda"}));
  EXPECT_THAT(Carrel(Args{"ask", "--model", DemoModel(), "--zone", "device", "hi"}),
              FailsWith(kBad, Texts{"zone=device", "cuda"}));
  EXPECT_THAT(Carrel(Args{"ask", "--model", DemoModel(), "--zone", "here", "hi"}),
              FailsWith(kBad, Texts{"zone=here", "store, host, device"}));
  EXPECT_THAT(
      Carrel(Args{"ask", "--model", DemoModel(), "--device", "cuda", "--gpu-memory", "1MB", "hi"}),
      FailsWith(kFailed, Texts{"cuda"}));  // no CUDA, no GPU, or too little of it
  ExpectNothingLost();
}

TEST_F(BadInputTest, Document_NotReadable_IsRefused) {
  EXPECT_THAT(Carrel(Prefill("new", {"--input", path("absent.txt")})),
              FailsWith(kFailed, Texts{"absent.txt", "No such file"}));
  EXPECT_THAT(Carrel(Prefill("new", {"--input", folder_})),
              FailsWith(kBad, Texts{folder_, "not a regular file"}));
  EXPECT_THAT(Carrel(Prefill("new", {"--tokens", path("absent.json")})),
              FailsWith(kFailed, Texts{"absent.json", "No such file"}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, Document_InvalidUtf8_NamesFileAndByteOffset) {
  const struct {
    std::string bytes;
    int offset;
  } documents[] = {
      {"abc\xff", 3},            // no lead byte
      {"\x80 abc", 0},           // a continuation without a beginning
      {"caf\xc3", 3},            // ends inside a character
      {"a\xe2\x82z", 1},         // broken off inside
      {"ab\xc0\xaf", 2},         // overlong
      {"abcd\xed\xa0\x80", 4},   // a surrogate
      {"a\xf4\x90\x80\x80", 1},  // above U+10FFFF
      {std::string(70000, 'x') + "\xff", 70000},
  };
  for (const auto& document : documents) {
    const std::string file = WriteFile("invalid.txt", document.bytes);
    EXPECT_THAT(
        Carrel(Prefill("new", {"--input", file})),
        FailsWith(kBad, Texts{"invalid.txt", "UTF-8", absl::StrCat("offset ", document.offset)}));
  }
  ExpectNothingLost();
}

TEST_F(BadInputTest, Prompt_InvalidUtf8_NamesByteOffset) {
  Args args = Ask(kKept, {"--prompt-tokens", "replaced"});
  args.resize(args.size() - 2);
  EXPECT_THAT(Carrel(With(args, {"ab\xff"})), FailsWith(kBad, Texts{"UTF-8", "offset 2"}));
}

TEST_F(BadInputTest, ByteWithoutToken_IsRefusedWithItsOffset_OrDroppedAndCounted) {
  ModelCopy model(path("bytes"));
  model.EditJson("tokenizer.json", [](auto& json) {
    ASSERT_EQ(json["model"]["vocab"].erase("\u00f1"), 1u);  // spells 0xf1: no merge holds it
  });
  const std::string document = WriteFile("plane4.txt", "The registry \xf1\x80\x80\x80 is open.");
  const Args of_model = {"--model", model.folder(), "--input", document};
  EXPECT_THAT(Carrel(Prefill("new", of_model)),
              FailsWith(kBad, Texts{"plane4.txt", "byte 0xf1", "offset 13", "--missing-bytes"}));
  EXPECT_THAT(Carrel(Prefill("new", With(of_model, {"--missing-bytes", "ignore"}))),
              FailsWith(kBad, Texts{"--missing-bytes", "ignore"}));
  ExpectNothingLost();
  const Outcome dropped =
      Carrel(Prefill("new", With(of_model, {"--missing-bytes", "drop", "--quiet"})));
  EXPECT_THAT(dropped, Succeeds());
  EXPECT_THAT(dropped.err, testing::HasSubstr("left out 1 bytes without a token, the first 0xf1 "
                                              "at offset 13"));
  Args ask = Ask("new", {"--model", model.folder(), "--prompt-tokens", "replaced"});
  ask.resize(ask.size() - 2);
  EXPECT_THAT(Carrel(With(ask, {"a\xf1\x80\x80\x80"})), FailsWith(kBad, Texts{"offset 1"}));
  EXPECT_THAT(Carrel(With(ask, {"a\xf1\x80\x80\x80", "--missing-bytes", "drop"})), Succeeds());
}

TEST_F(BadInputTest, Document_LongerThanMaxPositionEmbeddings_IsRefused) {
  ModelCopy model(path("short-model"));
  model.EditJson("config.json", [](auto& config) { config["max_position_embeddings"] = 64; });
  EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})),
              FailsWith(kBad, Texts{absl::StrCat(kept_tokens_, " tokens"),
                                    "max_position_embeddings=64", "split it"}));
  // One that fills it leaves no room for a question.
  model.EditJson("config.json",
                 [&](auto& config) { config["max_position_embeddings"] = kept_tokens_; });
  EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})),
              FailsWith(kBad, Texts{absl::StrCat("max_position_embeddings=", kept_tokens_)}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, Prompt_BeyondMaxPositionEmbeddings_IsRefused) {
  ModelCopy model(path("short-model"));
  model.EditJson("config.json",
                 [&](auto& config) { config["max_position_embeddings"] = kept_tokens_ + 3; });
  // One of the document's tokens is said anew by the prompt.
  EXPECT_THAT(Carrel(Ask(kKept, {"--model", model.folder()})),
              FailsWith(kBad, Texts{absl::StrCat("max_position_embeddings=", kept_tokens_ + 3),
                                    "a prompt may have 4 tokens"}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, Fifo_IsRefusedNotWaitedFor) {
  const std::string fifo = path("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const Texts message = {fifo, "not a regular file"};
  EXPECT_THAT(Carrel(Prefill("new", {"--input", fifo})), FailsWith(kBad, message));
  EXPECT_THAT(Carrel(Prefill("new", {"--tokens", fifo})), FailsWith(kBad, message));
  for (const char* file : {"model.safetensors", "config.json", "tokenizer.json"}) {
    ModelCopy model(path(absl::StrCat("with-", file)));
    model.Remove(file);
    ASSERT_EQ(mkfifo(model.path(file).c_str(), 0600), 0);
    EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})),
                FailsWith(kBad, Texts{model.path(file), "not a regular file"}));
  }
  ExpectNothingLost();
}

TEST_F(BadInputTest, DeeplyNestedJson_IsRefusedByName) {
  const std::string deep = std::string(100000, '[') + "1" + std::string(100000, ']');
  const Texts message = {"nests deeper than 64"};
  const std::string tokens = WriteFile("tokens.json", deep);
  EXPECT_THAT(Carrel(Prefill("new", {"--tokens", tokens})),
              FailsWith(kBad, With(message, {"tokens.json"})));
  std::string objects = "1";
  for (int i = 0; i < 70; ++i) objects = "{\"a\":" + objects + "}";
  WriteFile("tokens.json", "[1," + objects + "]");
  EXPECT_THAT(Carrel(Prefill("new", {"--tokens", tokens})), FailsWith(kBad, message));
  for (const char* field : {"hidden_act", "eos_token_id", "rope_scaling", "architectures"}) {
    ModelCopy model(path(absl::StrCat("nested-", field)));
    std::string config = nlohmann::json::parse(ReadBytes(model.path("config.json"))).dump();
    config = "{\"" + std::string(field) + "\":" + deep + "," + config.substr(1);
    model.Replace("config.json", config);
    EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})),
                FailsWith(kBad, With(message, {model.path("config.json")})));
  }
  const std::string questions = WriteFile("questions.jsonl", "\n{\"prompt\":" + deep + "}");
  const Args eval = {"eval", "--model", DemoModel(), "--context",   kKept,    "--store",
                     store_, "--top-k", "all",       "--questions", questions};
  EXPECT_THAT(Carrel(eval), FailsWith(kBad, With(message, {"questions.jsonl:2"})));
  WriteFile("questions.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n");
  const std::string compare = WriteFile("compare.json", deep);
  EXPECT_THAT(Carrel(With(eval, {"--compare", compare})),
              FailsWith(kBad, With(message, {"compare.json"})));
  ExpectNothingLost();
}

TEST_F(BadInputTest, TokenFile_Malformed_NamesFileAndEntry) {
  const struct {
    std::string bytes;
    Texts message;
  } files[] = {
      {"", {"not valid JSON"}},
      {"[1, 2", {"not valid JSON at byte 6"}},
      {"{\"ids\": [1]}", {"not a JSON array"}},
      {"7", {"not a JSON array"}},
      {"[1, \"2\"]", {"entry 1", "\"2\""}},
      {"[1, 2, 2.5]", {"entry 2", "2.5"}},
      {"[[1]]", {"entry 0"}},
      {"[null]", {"entry 0", "null"}},
      {"[4294967296]", {"entry 0", "4294967296"}},
      {"[18446744073709551615]", {"entry 0", "18446744073709551615"}},
      {"[1e400]", {"not valid JSON"}},
      {std::string(200000, '['), {"nests deeper than 64"}},
  };
  for (const auto& file : files) {
    const std::string name = WriteFile("tokens.json", file.bytes);
    const Texts texts = With({"tokens.json"}, file.message);
    EXPECT_THAT(Carrel(Prefill("new", {"--tokens", name})), FailsWith(kBad, texts));
    EXPECT_THAT(Carrel(Ask(kKept, {"--prompt-tokens", name})), FailsWith(kBad, texts));
  }
  ExpectNothingLost();
}

TEST_F(BadInputTest, WhichRows_OneOfFourWaysAndWithinItsBounds) {
  const Args ask = {"ask", "--model", DemoModel(), "--context", kKept, "--store", store_, "x"};
  EXPECT_THAT(Carrel(With(ask, {"--fidelity", "best"})),
              FailsWith(kBad, Texts{"fidelity=best", "fast, balanced, faithful"}));
  EXPECT_THAT(Carrel(With(ask, {"--fidelity", ""})), FailsWith(kBad, Texts{"fidelity="}));
  for (const char* error : {"0", "-1", "nan", "inf"}) {
    EXPECT_THAT(Carrel(With(ask, {"--target-error", error})),
                FailsWith(kBad, Texts{"target_error=", "(0, infinity)"}));
  }
  const Args ways[] = {{"--fidelity", "fast"},
                       {"--target-error", "0.1"},
                       {"--top-k", "8"},
                       {"--select", "mass:0.5"}};
  for (const Args& one : ways) {
    for (const Args& other : ways) {
      if (one[0] == other[0]) continue;
      EXPECT_THAT(Carrel(With(With(ask, one), other)), FailsWith(kBad, Texts{one[0], other[0]}));
    }
  }
  ExpectNothingLost();
}

TEST_F(BadInputTest, TokenFile_IdOutsideVocabulary_NamesIdAndIndex) {
  for (const int64_t id : {int64_t{2048}, int64_t{-1}, int64_t{INT32_MAX}, int64_t{INT32_MIN}}) {
    const std::string file = WriteFile("tokens.json", absl::StrCat("[5, 6, ", id, "]"));
    const Texts texts = {absl::StrCat("token id ", id), "index 2", "[0, 2048)"};
    EXPECT_THAT(Carrel(Prefill("new", {"--tokens", file})), FailsWith(kBad, texts));
    EXPECT_THAT(Carrel(Ask(kKept, {"--prompt-tokens", file})), FailsWith(kBad, texts));
  }
  const std::string none = WriteFile("none.json", "[]");
  EXPECT_THAT(Carrel(Ask(kKept, {"--prompt-tokens", none})),
              FailsWith(kBad, Texts{"prompt", "empty"}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, Name_Exists_IsRefusedAndKept) {
  const std::string other = WriteFile("other.txt", "Another document entirely.");
  EXPECT_THAT(Carrel(Prefill(kKept, {"--input", other})),
              FailsWith(kFailed, Texts{"ALREADY_EXISTS", "kept", store_}));
  EXPECT_THAT(Carrel(Prefill(kKept, {"--input", other, "--restart"})),
              FailsWith(kFailed, Texts{"ALREADY_EXISTS", "kept", store_}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, Name_Malformed_IsRefusedAndCreatesNothing) {
  const Texts names = {"",           "../escaped", "a/b",         "/tmp/x",
                       ".hidden",    ".",          "..",          "-dash",
                       "with space", "new\nline",  "caf\xc3\xa9", std::string(129, 'n')};
  for (const std::string& name : names) {
    EXPECT_THAT(Carrel(Prefill("", {"--name=" + name})), FailsWith(kBad, Texts{"name"}))
        << "name \"" << name << '"';
  }
  EXPECT_FALSE(std::filesystem::exists(path("escaped")));
  EXPECT_FALSE(std::filesystem::exists(store_ + "/escaped"));
  EXPECT_THAT(Carrel(Prefill(std::string(128, 'n'))), Succeeds());
  EXPECT_THAT(Carrel({"rm", std::string(128, 'n'), "--store", store_}), Succeeds());
  ExpectNothingLost();
}

TEST_F(BadInputTest, Context_Unknown_IsNotFoundByName) {
  for (const std::string& name : {std::string("missing"), std::string("../kept")}) {
    for (const Args& args :
         {Ask(name), Args{"inspect", name, "--store", store_},
          Args{"audit", name, "--store", store_}, Args{"rm", name, "--store", store_}}) {
      const Outcome outcome = Carrel(args);
      EXPECT_NE(outcome.exit_code, 0) << outcome;
      EXPECT_EQ(outcome.signal, 0) << outcome;
      EXPECT_THAT(outcome.err, testing::HasSubstr(name));
    }
  }
  EXPECT_THAT(Carrel(Ask("missing")), FailsWith(kFailed, Texts{"NOT_FOUND", "missing"}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, TopK_OutOfRange_NamesValueAndBound) {
  for (const char* value : {"0", "-1"}) {
    EXPECT_THAT(Carrel(Ask(kKept, {"--top-k", value})),
                FailsWith(kBad, Texts{absl::StrCat("top_k=", value), "less than 1"}));
  }
  for (const char* value : {"abc", "", "1.5", "12x", "99999999999999999999", "All"}) {
    EXPECT_THAT(Carrel(Ask(kKept, {"--top-k", value})),
                FailsWith(kBad, Texts{absl::StrCat("top_k=", value), "all"}));
  }
  // Beyond the rows that there are, it means all of them.
  for (const int64_t above : {kept_tokens_, kept_tokens_ + 1, 10 * kept_tokens_}) {
    EXPECT_THAT(Carrel(Ask(kKept, {"--top-k", absl::StrCat(above)})), Succeeds());
  }
}

TEST_F(BadInputTest, AskFlag_OutOfRange_NamesValueAndBound) {
  const struct {
    const char* flag;
    const char* value;
    Texts message;
  } cases[] = {
      {"--dense-layers", "-1", {"dense_layers=-1", "[0, 8]"}},
      {"--dense-layers", "9", {"dense_layers=9", "[0, 8]"}},
      {"--dense-layers", "two", {"--dense-layers", "two"}},
      {"--dense-layers", "99999999999", {"--dense-layers", "99999999999"}},
      {"--sink", "-1", {"sink=-1"}},
      {"--local", "-1", {"local=-1"}},
      {"--want", "everything", {"want=everything", "rows, values, attend"}},
      {"--want", "", {"want="}},
      {"--prefetch", "on", {"prefetch=on", "off, speculative, verified"}},
      {"--budget", "cubic", {"budget=cubic", "uniform, linear, measured"}},
      {"--oversample", "2", {"--oversample changes nothing", "--prefetch speculative"}},
      {"--temperature", "101", {"temperature=101", "[0, 100]"}},
      {"--seed", "3", {"--seed changes nothing", "--temperature"}},
      {"--key-file", "k", {"--key-file changes nothing", "--server"}},
      {"--effort", "-1", {"effort=-1", "[0, 65536]"}},
      {"--threads", "-1", {"threads=-1", "[0, 1024]"}},
      {"--threads", "5000", {"threads=5000", "[0, 1024]"}},
      {"--max-tokens", "-1", {"max_tokens=-1"}},
      {"--max-tokens", "many", {"--max-tokens", "many"}},
      {"--temperature", "-1", {"temperature=-1", "[0, 100]"}},
      {"--top-p", "0", {"top_p=0", "(0, 1]"}},
      {"--top-p", "1.5", {"top_p=1.5", "(0, 1]"}},
      {"--max-rows", "-1", {"max_rows=-1", "[0, infinity)"}},
      {"--estimate", "maybe", {"estimate=maybe", "auto, on, off"}},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(Carrel(Ask(kKept, {c.flag, c.value})), FailsWith(kBad, c.message));
  }
  ExpectNothingLost();
}

TEST_F(BadInputTest, PrefillFlag_OutOfRange_NamesValueAndBound) {
  const struct {
    const char* flag;
    const char* value;
    Texts message;
    const char* index = "flat";
  } cases[] = {
      {"--index", "annoy", {"annoy", "flat", "hnsw"}, nullptr},
      {"--index", "", {"flat", "hnsw"}, nullptr},
      {"--segment-tokens", "100", {"segment_tokens=100", "power of two"}},
      {"--segment-tokens", "0", {"segment_tokens=0", "power of two"}},
      {"--segment-tokens", "-16", {"segment_tokens=-16", "power of two"}},
      {"--sampled-queries", "0", {"sampled_queries=0", "[1, 65536]"}},
      {"--sampled-queries", "100000", {"sampled_queries=100000", "[1, 65536]"}},
      {"--summaries", "3", {"summaries=3", "[4, 8192]"}},
      {"--threads", "-2", {"threads=-2", "[0, 1024]"}},
      {"--hnsw-m", "1", {"m=1"}, "hnsw"},
      {"--hnsw-m", "1000", {"m=1000"}, "hnsw"},
      {"--hnsw-ef-construction", "0", {"ef_construction=0"}, "hnsw"},
      {"--effort", "-1", {"effort=-1"}, "hnsw"},
      {"--effort", "seven", {"--effort", "seven"}, "hnsw"},
  };
  for (const auto& c : cases) {
    Args args = Prefill("new", {c.flag, c.value});
    if (c.index != nullptr) args = With(args, {"--index", c.index});
    EXPECT_THAT(Carrel(args), FailsWith(kBad, c.message));
  }
  ExpectNothingLost();
}

TEST_F(BadInputTest, Select_OutOfRange_NamesValueAndBound) {
  const Args ask = {"ask", "--model", DemoModel(), "--context",
                    kKept, "--store", store_,      kQuestion};
  const struct {
    Args flags;
    Texts message;
  } cases[] = {
      {{"--select", "best:3"}, {"best:3", "top-k:K, range:B, mass:P"}},
      {{"--select", "mass:much"}, {"mass:much", "numbers"}},
      {{"--select", "mass:0"}, {"mass=0", "(0, 1]"}},
      {{"--select", "mass:1.5"}, {"mass=1.5", "(0, 1]"}},
      {{"--select", "range:-1"}, {"range=-1", "not a positive number"}},
      {{"--select", "mass:0.9", "--top-k", "8"}, {"--top-k", "--select"}},
      {{"--select", "mass:0.9", "--prefetch", "speculative"}, {"prefetch=off"}},
      {{"--prefetch", "speculative", "--oversample", "0.5"}, {"oversample=0.5", "[1, 16]"}},
      {{"--prefetch", "speculative", "--oversample", "nan"}, {"oversample=", "[1, 16]"}},
      {{"--select", "top-k:8", "--max-rows", "8"}, {"max_rows=8", "range and mass"}},
      {{"--top-k", "8", "--estimate", "on", "--want", "rows"}, {"estimate", "want=attend"}},
  };
  for (const auto& c : cases) EXPECT_THAT(Carrel(With(ask, c.flags)), FailsWith(kBad, c.message));
  ASSERT_THAT(Carrel(Prefill("bare", {"--summaries", "0"})), Succeeds());
  const Args of_bare = {"ask",  "--model", DemoModel(), "--context", "bare",   "--store",
                        store_, kQuestion, "--top-k",   "8",         "--want", "attend"};
  EXPECT_THAT(Carrel(of_bare), Succeeds());
  EXPECT_THAT(Carrel(With(of_bare, {"--estimate", "on"})),
              FailsWith(kFailed, Texts{"bare", "summaries"}));
}

TEST_F(BadInputTest, Reindex_BadInput_IsNamedAndLeavesNothing) {
  const struct {
    Args flags;
    int exit_code;
    Texts message;
  } cases[] = {
      {{"absent", "--as", "new"}, kFailed, {"absent", "is not in store"}},
      {{kKept, "--as", kKept}, kFailed, {kKept, "exists"}},
      {{kKept, "--as", "a b"}, kBad, {"a b"}},
      {{kKept, "--as", ""}, kBad, {"name"}},
      {{kKept, "--as", "new", "--index", "tree"}, kBad, {"tree", "flat"}},
      {{kKept, "--as", "new", "--index", "code", "--code-bits", "100"}, kBad, {"code_bits=100"}},
      {{kKept, "--as", "new", "--index", "auto", "--auto-recall", "2"},
       kBad,
       {"want_recall=2", "(0, 1]"}},
      {{kKept, "--as", "new", "--index", "auto", "--auto-rows", "0"},
       kBad,
       {"wanted=0", "[1, 65536]"}},
      {{kKept, "--as", "new", "--summaries", "1"}, kBad, {"summaries=1", "[4, 8192]"}},
  };
  for (const auto& c : cases) {
    const Args args = With(With({"reindex"}, c.flags), {"--store", store_});
    EXPECT_THAT(Carrel(args), FailsWith(c.exit_code, c.message));
  }
  ExpectNothingLost();
}

TEST_F(BadInputTest, Synth_BadInput_IsNamedAndLeavesNothing) {
  const struct {
    Args flags;
    int exit_code;
    Texts message;
  } cases[] = {
      {{"--like", "absent", "--tokens", "100"}, kFailed, {"absent"}},
      {{"--like", kKept, "--tokens", "0"}, kBad, {"tokens=0"}},
      {{"--like", kKept, "--tokens", "1000", "--head-dim", "31"}, kBad, {"head_dim=31"}},
      {{"--like", kKept, "--tokens", "1000", "--kv-heads", "3", "--q-heads", "4"},
       kBad,
       {"q_heads=4"}},
      {{"--like", kKept, "--tokens", "1000", "--layers", "-1"}, kBad, {"layers=-1"}},
  };
  for (const auto& c : cases) {
    const Args args = With(With({"synth", "--name", "new"}, c.flags), {"--store", store_});
    EXPECT_THAT(Carrel(args), FailsWith(c.exit_code, c.message));
  }
  ExpectNothingLost();
}

TEST_F(BadInputTest, AuditFlag_OutOfRange_NamesValueAndBound) {
  const struct {
    const char* flag;
    const char* value;
    Texts message;
  } cases[] = {
      {"--want-recall", "0", {"want_recall=0", "(0, 1]"}},
      {"--want-recall", "1.01", {"want_recall=1.01", "(0, 1]"}},
      {"--want-recall", "nan", {"want_recall=nan", "(0, 1]"}},
      {"--want-recall", "most", {"--want-recall", "most"}},
      {"--sample", "0", {"sample=0"}},
      {"--sample", "1000000", {"sample=1000000", "stored"}},
      {"--top-k", "0", {"top_k=0", "[1, 65536]"}},
      {"--effort", "0", {"effort=0", "[1, 65536]"}},
      {"--effort", "70000", {"effort=70000", "[1, 65536]"}},
      {"--sink", "-1", {"sink=-1"}},
      {"--local", "-1", {"local=-1"}},
      {"--threads", "-1", {"threads=-1", "[0, 1024]"}},
      {"--html", "", {"--html"}},
  };
  for (const auto& c : cases) {
    const Outcome outcome = Carrel({"audit", kKept, "--store", store_, c.flag, c.value});
    EXPECT_THAT(outcome, FailsWith(kBad, c.message));
    EXPECT_EQ(outcome.out, "");
  }
  // The default top-k needs zones of 512 rows; this document is shorter.
  EXPECT_THAT(Carrel({"audit", kKept, "--store", store_}),
              FailsWith(kFailed, Texts{"kept", "512 rows", "128"}));
}

TEST_F(BadInputTest, AuditPage_NotWritable_IsNamedBeforeAnythingIsMeasured) {
  const Args audit = {"audit", kKept, "--store", store_, "--top-k", "8", "--html"};
  const std::string absent = path("absent/page.html");
  EXPECT_THAT(Carrel(With(audit, {absent})), FailsWith(kFailed, Texts{absent, "No such file"}));
  EXPECT_THAT(Carrel(With(audit, {folder_})), FailsWith(kBad, Texts{folder_, "is a folder"}));
  EXPECT_EQ(Carrel(With(audit, {absent})).out, "");
  Command tiny;
  tiny.args = With(audit, {path("page.html")});
  tiny.max_file_bytes = 100;
  // The limit cuts the message, too.
  EXPECT_THAT(Carrel(tiny), FailsWith(kFailed, Texts{"RESOURCE_EXHAUSTED", "--html"}));
  EXPECT_FALSE(std::filesystem::exists(path("page.html")));
}

TEST_F(BadInputTest, Audit_RecallBelowWanted_FailsAfterTheTables) {
  // So low an effort that an approximate index cannot find everything.
  const audit::RandomContextSpec spec{
      .name = "codes",
      .shape = {.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 32},
      .tokens = 7000,
      .indexes = {{.kind = kvstore::IndexKind::kCode, .code_bits = 64}}};
  ASSERT_EQ(audit::PublishContext(spec, path("random")).status(), absl::OkStatus());
  const Outcome outcome = Carrel({"audit", "codes", "--store", path("random/store"), "--effort",
                                  "16", "--top-k", "16", "--want-recall", "1"});
  EXPECT_THAT(outcome, FailsWith(kFailed, Texts{"want_recall=1", "codes", "layer=", "kv_head="}));
  EXPECT_THAT(outcome.out, testing::HasSubstr("heads below recall 1"));
  EXPECT_THAT(outcome.out, testing::HasSubstr("least effort"));
}

TEST_F(BadInputTest, AuditOfAContextWithoutSampledQueries_IsRefusedByName) {
  audit::RandomContextSpec spec{.name = "bare", .samples = 0};
  ASSERT_EQ(audit::PublishContext(spec, path("random")).status(), absl::OkStatus());
  EXPECT_THAT(Carrel({"audit", "bare", "--store", path("random/store")}),
              FailsWith(kFailed, Texts{"bare", "no sampled queries", "--sampled-queries"}));
}

TEST_F(BadInputTest, StoreAndServer_BothOrNeither_IsRefused) {
  const std::string questions = WriteFile("q.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n");
  const Args commands[] = {
      {"ls"},
      {"inspect", kKept},
      {"rm", kKept},
      {"ask", "--model", DemoModel(), "--context", kKept, "prompt"},
      {"eval", "--model", DemoModel(), "--context", kKept, "--questions", questions},
  };
  for (const Args& command : commands) {
    EXPECT_THAT(Carrel(command), FailsWith(kBad, Texts{"--store", "--server"}));
    EXPECT_THAT(Carrel(With(command, {"--store", store_, "--server", "127.0.0.1:1"})),
                FailsWith(kBad, Texts{"--store", "--server"}));
  }
  ExpectNothingLost();
}

TEST_F(BadInputTest, TextAndTokens_BothOrNeither_IsRefused) {
  const std::string tokens = WriteFile("tokens.json", "[1, 2, 3]");
  EXPECT_THAT(Carrel(Prefill("new", {"--tokens", tokens, "--input", document_})),
              FailsWith(kBad, Texts{"--input", "--tokens"}));
  const Args prefill = {"prefill", "--model", DemoModel(), "--store", store_, "--name", "new"};
  EXPECT_THAT(Carrel(prefill), FailsWith(kBad, Texts{"--input", "--tokens"}));
  EXPECT_THAT(Carrel(Ask(kKept, {"--prompt-tokens", tokens, "text"})),
              FailsWith(kBad, Texts{"PROMPT", "--prompt-tokens"}));
  const Args ask = {"ask", "--model", DemoModel(), "--context", kKept, "--store", store_};
  EXPECT_THAT(Carrel(ask), FailsWith(kBad, Texts{"PROMPT", "--prompt-tokens"}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, Questions_Malformed_NamesFileAndLine) {
  const Args eval = {"eval",    "--model", DemoModel(), "--context", kKept,
                     "--store", store_,    "--top-k",   "all",       "--questions"};
  const std::string good = "{\"prompt\": \"a\", \"answer\": \"b\"}\n";
  const struct {
    std::string bytes;
    Texts message;
  } files[] = {
      {"", {"questions.jsonl", "no questions"}},
      {"\n \n", {"questions.jsonl", "no questions"}},
      {good + "not json\n", {"questions.jsonl:2"}},
      {good + "\n{\"prompt\": \"a\"}\n", {"questions.jsonl:3", "answer"}},
      {"{\"prompt\": 1, \"answer\": \"b\"}\n", {"questions.jsonl:1", "prompt"}},
      {"{\"prompt\": \"a\", \"answer\": \"b\", \"dense_ids\": [\"x\"]}",
       {"questions.jsonl:1", "dense_ids"}},
      {"{\"prompt\": \"\", \"answer\": \"b\"}\n", {"question 1", "empty"}},
  };
  for (const auto& file : files) {
    const std::string name = WriteFile("questions.jsonl", file.bytes);
    EXPECT_THAT(Carrel(With(eval, {name})), FailsWith(kBad, file.message));
  }
  EXPECT_THAT(Carrel(With(eval, {path("absent.jsonl")})),
              FailsWith(kFailed, Texts{"absent.jsonl"}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, ZoneInThisHost_WhatMakesNoSense_IsRefusedWithTheReason) {
  const Args ask = {"ask", "--model", DemoModel(), "--context", kKept, "x", "--zone", "host"};
  const Args here = With(ask, {"--store", store_});
  EXPECT_THAT(Carrel(With(ask, {"--server", "unix:none"})),
              FailsWith(kBad, Texts{"--store instead of --server"}));
  EXPECT_THAT(Carrel(With(here, {"--prefetch", "speculative"})),
              FailsWith(kBad, Texts{"prefetch must be off"}));
  EXPECT_THAT(Carrel(With(here, {"--want", "rows"})), FailsWith(kBad, Texts{"nothing travels"}));
  EXPECT_THAT(Carrel(With(here, {"--select", "mass:0.9"})), FailsWith(kBad, Texts{"top-k only"}));
  EXPECT_THAT(Carrel(With(here, {"--effort", "9"})), FailsWith(kBad, Texts{"effort must be 0"}));
  EXPECT_THAT(Carrel(With(here, {"--refine", "hippo"})),
              FailsWith(kBad, Texts{"method=hippo is none of"}));
  EXPECT_THAT(Carrel(With(here, {"--device", "cuda", "--method", "hip", "--prefetch", "speculative",
                                 "--bank-bytes", "1MB"})),
              FailsWith(kBad, Texts{"only method=hash"}));
  EXPECT_THAT(Carrel(With(here, {"--bank-bytes", "1MB"})),
              FailsWith(kBad, Texts{"--bank-bytes changes nothing", "--device cuda"}));
  EXPECT_THAT(Carrel(With(here, {"--bank-map", "tree", "--device", "cuda"})),
              FailsWith(kBad, Texts{"bank_map=tree is none of vector, hash"}));
  EXPECT_THAT(Carrel(With(here, {"--row-cache", "1MB"})),
              FailsWith(kBad, Texts{"--row-cache changes nothing", "--want rows"}));
  EXPECT_THAT(Carrel({"ask", "--model", DemoModel(), "--context", kKept, "--store", store_, "x",
                      "--method", "hip"}),
              FailsWith(kBad, Texts{"method=hip needs --zone host"}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, ZoneOnTheGpu_WhatMakesNoSense_IsRefusedWithTheReason) {
  const Args ask = {"ask", "--model", DemoModel(), "x", "--zone", "device", "--device", "cuda"};
  EXPECT_THAT(Carrel(ask), FailsWith(kBad, Texts{"without --context"}));
  const Args there = With(ask, {"--context", kKept});
  EXPECT_THAT(Carrel(With(there, {"--server", "unix:none", "--method", "channels"})),
              FailsWith(kBad, Texts{"method=channels", "--store instead of --server"}));
  const Args here = With(there, {"--store", store_});
  EXPECT_THAT(Carrel(With(here, {"--method", "hip:ensemble=4"})),
              FailsWith(kBad, Texts{"method=hip: ensemble=4 has no CUDA form"}));
  EXPECT_THAT(Carrel(With(here, {"--method", "hash:bits=96"})),
              FailsWith(kBad, Texts{"bits=96", "64, 128 and 256"}));
  EXPECT_THAT(Carrel(With(here, {"--prefetch", "speculative"})),
              FailsWith(kBad, Texts{"prefetch must be off"}));
  EXPECT_THAT(Carrel(With(here, {"--stats"})), FailsWith(kBad, Texts{"does not measure"}));
  ExpectNothingLost();
}

TEST_F(BadInputTest, Configurations_Malformed_NamesFileAndConfiguration) {
  const std::string questions = WriteFile("q.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}");
  const Args eval = {"eval",    "--model", DemoModel(),   "--context", kKept,
                     "--store", store_,    "--questions", questions,   "--compare"};
  const struct {
    const char* bytes;
    Texts message;
  } files[] = {{"", {"c.json", "not valid JSON"}},
               {"[]", {"c.json", "not a list"}},
               {"[{}, 1]", {"configuration 2 of 2", "not an object"}},
               {"[{\"top-k\": [1]}]", {"configuration 1", "\"top-k\" is neither"}},
               {"[{\"top-c\": 1}]", {"configuration 1", "--top-c"}},
               {"[{\"top-k\": 0}]", {"configuration 1", "top_k=0"}},
               {"[{\"method\": \"hip\"}]", {"configuration 1", "needs --zone host"}}};
  for (const auto& file : files) {
    EXPECT_THAT(Carrel(With(eval, {WriteFile("c.json", file.bytes)})),
                FailsWith(kBad, file.message));
  }
  const std::string good = WriteFile("c.json", "[{}]");
  EXPECT_THAT(Carrel(With(eval, {good, "--stats"})), FailsWith(kBad, Texts{"--stats"}));
  EXPECT_THAT(Carrel(With(eval, {good, "--measure", "-1"})), FailsWith(kBad, Texts{"measure=-1"}));
  EXPECT_THAT(Carrel(With(eval, {good, "--html", store_})), FailsWith(kBad, Texts{"is a folder"}));
  ExpectNothingLost();
}

// Nothing is opened, so nothing needs to be there.
TEST(UsageTest, RequiredFlag_Missing_IsNamed) {
  const struct {
    Args all;  // command, then pairs of flag and value
  } commands[] = {
      {{"prefill", "--model", "M", "--store", "S", "--name", "N"}},
      {{"serve", "--store", "S"}},
      {{"ask", "--model", "M"}},
      {{"eval", "--model", "M", "--context", "C", "--questions", "Q"}},
  };
  for (const auto& command : commands) {
    for (size_t i = 1; i < command.all.size(); i += 2) {
      Args args = command.all;
      args.erase(args.begin() + i, args.begin() + i + 2);
      EXPECT_THAT(Carrel(args), FailsWith(kBad, Texts{command.all[i], "required"}));
    }
  }
  for (const char* command : {"inspect", "audit", "rm"}) {
    EXPECT_THAT(Carrel({command, "--store", "S"}), FailsWith(kBad, Texts{"NAME", "required"}));
  }
  EXPECT_THAT(Carrel({"audit", "N"}), FailsWith(kBad, Texts{"--store", "required"}));
}

TEST(UsageTest, Unknown_CommandFlagOrArgument_IsNamed) {
  EXPECT_THAT(Carrel(Args{}), FailsWith(kBad, Texts{"subcommand", "--help"}));
  EXPECT_THAT(Carrel({"frobnicate"}), FailsWith(kBad, Texts{"frobnicate"}));
  EXPECT_THAT(Carrel({"ls", "--store", "S", "--colour"}), FailsWith(kBad, Texts{"--colour"}));
  EXPECT_THAT(Carrel({"ls", "--store", "S", "surplus"}), FailsWith(kBad, Texts{"surplus"}));
  EXPECT_THAT(Carrel({"ls", "--store"}), FailsWith(kBad, Texts{"--store"}));
}

}  // namespace
}  // namespace carrel::cli
