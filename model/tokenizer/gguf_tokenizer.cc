#include "model/tokenizer/gguf_tokenizer.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "model/tokenizer/bpe_tokenizer.h"
#include "model/tokenizer/sentencepiece_tokenizer.h"
#include "model/tokenizer/tokenizer_files.h"

namespace carrel::model {
namespace {

constexpr char kModel[] = "tokenizer.ggml.model";
constexpr char kPre[] = "tokenizer.ggml.pre";
constexpr char kTokens[] = "tokenizer.ggml.tokens";
constexpr char kScores[] = "tokenizer.ggml.scores";
constexpr char kTypes[] = "tokenizer.ggml.token_type";
constexpr char kMerges[] = "tokenizer.ggml.merges";
constexpr char kBosId[] = "tokenizer.ggml.bos_token_id";

enum TokenType : int64_t {
  kUndefined = 0,
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// What tokenizer.ggml.pre stands for.
struct Pre {
  std::vector<const char*> names;
  std::vector<const char*> patterns;  // each an isolating Split of the pieces before
  bool whole_words = false;           // ignore_merges
  bool nfc = false;                   // where the models' own tokenizer.json is known to have it
  bool adds_bos = false;              // where add_bos_token is absent
};

const std::vector<Pre>& Pres() {
  // A word may take one character before it; numbers by `digits`; then marks, line ends, spaces.
  static constexpr char kLlama3[] =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  static constexpr char kQwen2[] =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  // Letters with their marks.
  static constexpr char kQwen35[] =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  static constexpr char kTekken[] =
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  static constexpr char kGpt4o[] =
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  static constexpr char kSeedCoder[] =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+)";
  // Marks with the Latin letters behind them, words, marks.
  static constexpr char kDeepSeek3[] =
      R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  // llama.cpp's own: marks first, then words, numbers, and numbers by three.
  static constexpr char kMarks[] = R"([\p{P}$+<=>^~|]+)";
  static constexpr char kWords[] =
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S))";
  static const auto* const pres = new std::vector<Pre>{
      {{"default"}, {kMarks, kWords, R"(\p{N}+)", "[0-9][0-9][0-9]"}},
      {{"gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "olmo", "jais", "trillion",
        "granite-docling"},
       {kGpt2Pattern}},
      {{"smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"},
       {R"(\p{N})", kGpt2Pattern}},
      {{"command-r"}, {R"(\p{N})", kGpt2Pattern}, false, /*nfc=*/true},
      {{"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"},
       {kLlama3},
       /*whole_words=*/true,
       false,
       /*adds_bos=*/true},
      {{"dbrx", "smaug-bpe"}, {kLlama3}},
      {{"qwen2", "deepseek-r1-qwen"}, {kQwen2}, false, /*nfc=*/true},
      {{"megrez", "kormo", "hunyuan", "solar-open", "grok-2"}, {kQwen2}},
      {{"qwen35"}, {kQwen35}, false, /*nfc=*/true},
      {{"tekken"}, {kTekken}, /*whole_words=*/true, false, /*adds_bos=*/true},
      {{"gpt-4o", "llama4"}, {kGpt4o}},
      {{"seed-coder"}, {kSeedCoder}},
      {{"deepseek-coder"},
       {R"([\r\n])", R"(\s?\p{L}+)", R"(\s?\p{P}+)",
        "[\\u4E00-\\u9FA5\\u0800-\\u4E00\\uAC00-\\uD7FF]+", R"(\p{N})"}},
      {{"deepseek-v3", "hunyuan-dense"},
       {R"(\p{N}{1,3})", "[\\u4E00-\\u9FA5\\u3040-\\u309F\\u30A0-\\u30FF]+", kDeepSeek3}},
  };
  return *pres;
}

absl::StatusOr<const Pre*> FindPre(const GgufMetadata& metadata) {
  std::string name = "default", known;
  if (metadata.Has(kPre)) {
    ASSIGN_OR_RETURN(name, metadata.String(kPre));
  } else {
    spdlog::warn(
        "{}: has no {}: words are taken apart as by default, which few models were trained with; "
        "convert the model again",
        metadata.where(), kPre);
  }
  for (const Pre& pre : Pres()) {
    if (std::find(pre.names.begin(), pre.names.end(), name) != pre.names.end()) return &pre;
    absl::StrAppend(&known, known.empty() ? "" : ", ", absl::StrJoin(pre.names, ", "));
  }
  return metadata.Unsupported(kPre, "is not one of " + known);
}

struct Vocabulary {
  std::vector<absl::string_view> tokens;  // by id; all differ
  std::vector<int64_t> types;             // TokenType of each
};

absl::StatusOr<Vocabulary> ReadVocabulary(const GgufMetadata& metadata) {
  Vocabulary vocabulary;
  ASSIGN_OR_RETURN(vocabulary.tokens, metadata.Strings(kTokens));
  const size_t size = vocabulary.tokens.size();
  if (size == 0 || size > static_cast<size_t>(kMaxTokenId) + 1) {
    return metadata.Invalid(kTokens, absl::StrCat("does not hold 1 to ", kMaxTokenId + 1));
  }
  vocabulary.types.assign(size, kNormal);
  if (metadata.Has(kTypes)) {
    ASSIGN_OR_RETURN(vocabulary.types, metadata.Ints(kTypes));
    if (vocabulary.types.size() != size) {
      return metadata.Invalid(kTypes, absl::StrCat("but there are ", size, " tokens"));
    }
  }
  absl::flat_hash_map<absl::string_view, size_t> ids;
  ids.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    const auto [entry, fresh] = ids.try_emplace(vocabulary.tokens[i], i);
    if (!fresh) {
      return metadata.Invalid(
          kTokens, absl::StrCat("holds \"", absl::CHexEscape(vocabulary.tokens[i].substr(0, 100)),
                                "\" as ", entry->second, " and as ", i));
    }
    if (vocabulary.types[i] < kUndefined || vocabulary.types[i] > kByte) {
      return metadata.Invalid(kTypes, absl::StrCat("holds ", vocabulary.types[i], " for token ", i,
                                                   ", not ", kUndefined, " to ", kByte));
    }
  }
  return vocabulary;
}

bool IsAdded(int64_t type) { return type == kControl || type == kUserDefined; }

std::vector<AddedToken> AddedTokens(const Vocabulary& vocabulary) {
  std::vector<AddedToken> added;
  for (size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    if (!IsAdded(vocabulary.types[i])) continue;
    AddedToken token;
    token.content = std::string(vocabulary.tokens[i]);
    token.id = static_cast<TokenId>(i);
    token.special = vocabulary.types[i] == kControl;
    added.push_back(std::move(token));
  }
  return added;
}

// As tokenizer_config.json would say it.
absl::StatusOr<TokenizerConfig> BosConfig(const GgufMetadata& metadata,
                                          const Vocabulary& vocabulary, int64_t default_id,
                                          bool default_add) {
  constexpr char kAddBos[] = "tokenizer.ggml.add_bos_token";
  ASSIGN_OR_RETURN(const bool add, metadata.BoolOr(kAddBos, default_add));
  RETURN_IF_ERROR(metadata.BoolOr("tokenizer.ggml.add_eos_token", false).status());
  const int64_t last = static_cast<int64_t>(vocabulary.tokens.size()) - 1;
  ASSIGN_OR_RETURN(const int64_t id, metadata.IntOr(kBosId, std::min(default_id, last), 0, last));
  if (id < 0 && add && metadata.Has(kAddBos)) {
    return metadata.Invalid(kAddBos, absl::StrCat("is set, and there is no ", kBosId));
  }
  TokenizerConfig config;
  config.present = config.has_bos = true;
  config.add_bos_token = add && id >= 0;
  if (id >= 0) config.bos_token = std::string(vocabulary.tokens[static_cast<size_t>(id)]);
  return config;
}

// What decides the ids of a text, for the digest: key, length, bytes.
std::string Canonical(const GgufMetadata& metadata) {
  std::string text = "gguf tokenizer\n";
  for (const char* key : {kModel, kPre, kTokens, kTypes, kMerges}) {
    const GgufValue* value = metadata.Find(key);
    if (value == nullptr) continue;
    absl::StrAppend(&text, key, " ", value->bytes.size(), "\n", value->bytes, "\n");
  }
  return text;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeBpe(const GgufMetadata& metadata) {
  ASSIGN_OR_RETURN(const Pre* pre, FindPre(metadata));
  ASSIGN_OR_RETURN(const Vocabulary vocabulary, ReadVocabulary(metadata));
  ASSIGN_OR_RETURN(const std::vector<absl::string_view> merges, metadata.Strings(kMerges));
  TokenizerJson json;
  for (size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    // Added tokens are spelled as they are, not in the byte alphabet; in ASCII that is the same,
    // and merges may lead to them.
    const absl::string_view token = vocabulary.tokens[i];
    const bool ascii = std::all_of(token.begin(), token.end(),
                                   [](char c) { return static_cast<uint8_t>(c) < 0x80; });
    if (IsAdded(vocabulary.types[i]) && !ascii) continue;
    json.vocab.emplace_back(vocabulary.tokens[i], static_cast<TokenId>(i));
  }
  json.added_tokens = AddedTokens(vocabulary);
  json.merges.reserve(merges.size());
  for (const absl::string_view merge : merges) {
    // A token may begin with a space if it is spelled out; the halves are not empty.
    const size_t space = merge.find(' ', 1);
    if (space == absl::string_view::npos || space + 1 == merge.size()) {
      return metadata.Invalid(
          kMerges, absl::StrCat("[", json.merges.size(), "] is \"",
                                absl::CHexEscape(merge.substr(0, 100)), "\", not two tokens"));
    }
    json.merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
  }
  json.ignore_merges = pre->whole_words;
  if (pre->nfc) json.normalizer.push_back(NormalizerStep::kNfc);
  for (const char* pattern : pre->patterns) json.pretokenizer.push_back({.pattern = pattern});
  ASSIGN_OR_RETURN(const TokenizerConfig config,
                   BosConfig(metadata, vocabulary, -1, pre->adds_bos));
  return CreateBpeTokenizer(metadata.where(), Canonical(metadata), json, config);
}

// The wire format of protocol buffers, as far as a tokenizer.model needs it.
class WireWriter {
 public:
  void Varint(int field, uint64_t value) {
    Raw(static_cast<uint64_t>(field) << 3);
    Raw(value);
  }
  void Float(int field, float value) {
    Raw(static_cast<uint64_t>(field) << 3 | 5);
    char bytes[4];
    std::memcpy(bytes, &value, sizeof(bytes));
    message_.append(bytes, sizeof(bytes));
  }
  void Bytes(int field, absl::string_view bytes) {
    Raw(static_cast<uint64_t>(field) << 3 | 2);
    Raw(bytes.size());
    message_.append(bytes.data(), bytes.size());
  }
  const std::string& message() const { return message_; }

 private:
  void Raw(uint64_t value) {
    for (; value >= 0x80; value >>= 7) message_.push_back(static_cast<char>(value | 0x80));
    message_.push_back(static_cast<char>(value));
  }
  std::string message_;
};

// sentencepiece_model.proto by field number: ModelProto.pieces (1: piece, score, type),
// trainer_spec (2: model_type 3 = BPE, vocab_size 4, byte_fallback 35), normalizer_spec (3). Token
// types are that format's own.
std::string SentencePieceModel(const Vocabulary& vocabulary, const std::vector<float>& scores,
                               bool add_space_prefix, bool remove_extra_whitespaces) {
  constexpr uint64_t kBpe = 2;
  WireWriter model;
  for (size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    const int64_t type = vocabulary.types[i] == kUndefined ? kNormal : vocabulary.types[i];
    WireWriter piece;
    piece.Bytes(1, vocabulary.tokens[i]);
    piece.Float(2, scores[i]);
    piece.Varint(3, static_cast<uint64_t>(type));
    model.Bytes(1, piece.message());
  }
  const auto& types = vocabulary.types;
  WireWriter trainer;
  trainer.Varint(3, kBpe);
  trainer.Varint(4, vocabulary.tokens.size());
  trainer.Varint(35, std::find(types.begin(), types.end(), kByte) != types.end() ? 1 : 0);
  model.Bytes(2, trainer.message());
  WireWriter normalizer;
  normalizer.Bytes(1, "identity");
  normalizer.Varint(3, add_space_prefix ? 1 : 0);
  normalizer.Varint(4, remove_extra_whitespaces ? 1 : 0);
  normalizer.Varint(5, 1);  // spaces become U+2581
  model.Bytes(3, normalizer.message());
  return model.message();
}

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeSentencePiece(const GgufMetadata& metadata) {
  ASSIGN_OR_RETURN(const Vocabulary vocabulary, ReadVocabulary(metadata));
  if (!metadata.Has(kTypes)) return metadata.Invalid(kTypes, "is missing");
  ASSIGN_OR_RETURN(const std::vector<float> scores, metadata.Floats(kScores));
  if (scores.size() != vocabulary.tokens.size()) {
    return metadata.Invalid(kScores,
                            absl::StrCat("but there are ", vocabulary.tokens.size(), " tokens"));
  }
  for (size_t i = 0; i < scores.size(); ++i) {
    if (!std::isfinite(scores[i])) {
      return metadata.Invalid(kScores, absl::StrCat("holds ", scores[i], " for token ", i));
    }
  }
  if (metadata.Has("tokenizer.ggml.precompiled_charsmap")) {
    return metadata.Unsupported("tokenizer.ggml.precompiled_charsmap", "is not run");
  }
  ASSIGN_OR_RETURN(const bool space, metadata.BoolOr("tokenizer.ggml.add_space_prefix", true));
  ASSIGN_OR_RETURN(const bool remove,
                   metadata.BoolOr("tokenizer.ggml.remove_extra_whitespaces", false));
  constexpr int64_t kLlamaBos = 1;
  ASSIGN_OR_RETURN(TokenizerConfig config, BosConfig(metadata, vocabulary, kLlamaBos, true));
  config.added_tokens = AddedTokens(vocabulary);
  return CreateSentencePieceTokenizer(
      metadata.where(), SentencePieceModel(vocabulary, scores, space, remove), config);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> GgufTokenizer(const Gguf& gguf) {
  constexpr char kChatTemplate[] = "tokenizer.chat_template";
  const GgufMetadata& metadata = gguf.metadata();
  if (!metadata.Has(kModel)) {
    return absl::NotFoundError(absl::StrCat(metadata.where(), ": has no ", kModel));
  }
  ASSIGN_OR_RETURN(const std::string model, metadata.String(kModel));
  if (model != "gpt2" && model != "llama") {
    return metadata.Unsupported(kModel, "is not one of gpt2, llama");
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> tokenizer,
                   model == "gpt2" ? MakeBpe(metadata) : MakeSentencePiece(metadata));
  if (metadata.Has(kChatTemplate)) {
    ASSIGN_OR_RETURN(std::string text, metadata.String(kChatTemplate));
    tokenizer->set_chat_template(std::move(text));
  }
  return tokenizer;
}

}  // namespace carrel::model
