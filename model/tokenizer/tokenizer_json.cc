// tokenizer.json; see tokenizer_files.h.
#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/tokenizer/byte_alphabet.h"
#include "model/tokenizer/tokenizer_fields.h"
#include "model/tokenizer/tokenizer_files.h"

namespace carrel::model {
namespace {

std::string TypeOf(const Json& component) {
  const Json* type = FindField(component, "type");
  return type != nullptr && type->is_string() ? type->get<std::string>() : std::string();
}

// The components of a Sequence, or the one component itself; none if it is null.
std::vector<const Json*> Flatten(const Json* component, const char* list_key) {
  std::vector<const Json*> flat;
  std::vector<const Json*> open = {component};
  while (!open.empty()) {
    const Json* one = open.back();
    open.pop_back();
    if (one == nullptr) continue;
    const Json* list = TypeOf(*one) == "Sequence" ? FindField(*one, list_key) : nullptr;
    if (list == nullptr || !list->is_array()) {
      flat.push_back(one);
      continue;
    }
    for (auto inner = list->rbegin(); inner != list->rend(); ++inner) open.push_back(&*inner);
  }
  return flat;
}

class Parser {
 public:
  Parser(const std::string& path, const Json& document, bool characters)
      : path_(path), document_(document) {
    result_.characters = characters;
  }

  absl::StatusOr<TokenizerJson> Run() {
    const Json* model = FindField(document_, "model");
    if (model == nullptr || !model->is_object()) return Invalid("model is missing");
    result_.other_kind = OtherKind(*model);
    if (!result_.other_kind.empty()) return std::move(result_);
    RETURN_IF_ERROR(ReadModel(*model));
    RETURN_IF_ERROR(ReadVocab(*model));
    RETURN_IF_ERROR(ReadMerges(*model));
    RETURN_IF_ERROR(ReadNormalizer());
    RETURN_IF_ERROR(ReadPretokenizer());
    RETURN_IF_ERROR(ReadPostprocessor());
    RETURN_IF_ERROR(ReadDecoder());
    RETURN_IF_ERROR(ReadAddedTokens());
    return std::move(result_);
  }

 private:
  template <typename... Args>
  absl::Status Invalid(const Args&... what) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": ", what...));
  }
  template <typename... Args>
  absl::Status NotRun(const Args&... what) const {
    return absl::UnimplementedError(absl::StrCat(path_, ": ", what..., " is not supported"));
  }

  std::string OtherKind(const Json& model) const {
    const std::string type = TypeOf(model);
    // Early files do not name the type; only BPE has merges.
    if (type != "BPE" && !(FindField(model, "type") == nullptr && FindField(model, "merges"))) {
      return absl::StrCat("model.type ", FindField(model, "type") == nullptr
                                             ? "missing"
                                             : ShortJson(*FindField(model, "type")));
    }
    const Json* pretokenizer = FindField(document_, "pre_tokenizer");
    for (const Json* step : Flatten(pretokenizer, "pretokenizers")) {
      if (TypeOf(*step) == "ByteLevel") return {};
    }
    if (result_.characters) return {};
    return absl::StrCat("model.type BPE without a ByteLevel pre_tokenizer (",
                        pretokenizer == nullptr ? "null" : ShortJson(*pretokenizer), ")");
  }

  absl::Status ReadModel(const Json& model) {
    if (const Json* dropout = FindField(model, "dropout");
        dropout != nullptr && !(dropout->is_number() && dropout->get<double>() == 0)) {
      return NotRun("model.dropout ", ShortJson(*dropout));
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json* affix = FindField(model, key);
      if (affix != nullptr && *affix != "") return NotRun("model.", key, " ", ShortJson(*affix));
    }
    ASSIGN_OR_RETURN(result_.ignore_merges, BoolField(model, "ignore_merges", false, path_));
    ASSIGN_OR_RETURN(result_.byte_fallback, BoolField(model, "byte_fallback", false, path_));
    ASSIGN_OR_RETURN(result_.fuse_unk, BoolField(model, "fuse_unk", false, path_));
    if (FindField(model, "unk_token") != nullptr) {
      ASSIGN_OR_RETURN(result_.unk_token,
                       StringField(model, "unk_token", absl::StrCat(path_, ": model")));
    }
    return absl::OkStatus();
  }

  absl::Status ReadVocab(const Json& model) {
    const Json* vocab = FindField(model, "vocab");
    if (vocab == nullptr || !vocab->is_object()) return Invalid("model.vocab is not an object");
    absl::flat_hash_map<TokenId, absl::string_view> tokens;
    for (const auto& [token, value] : vocab->items()) {
      ASSIGN_OR_RETURN(
          const TokenId id,
          ParseTokenId(value, absl::StrCat(path_, ": model.vocab: ", ShownJson(Json(token)))));
      const auto [entry, fresh] = tokens.try_emplace(id, token);
      if (!fresh) {
        return Invalid("model.vocab: id ", id, " belongs to \"", Shown(entry->second),
                       "\" and to \"", Shown(token), "\"");
      }
      result_.vocab.emplace_back(token, id);
    }
    return absl::OkStatus();
  }

  absl::Status ReadMerges(const Json& model) {
    const Json* merges = FindField(model, "merges");
    if (merges == nullptr || !merges->is_array()) return Invalid("model.merges is not an array");
    result_.merges.reserve(merges->size());
    for (const Json& merge : *merges) {
      if (merge.is_string()) {
        const std::string& text = merge.get_ref<const std::string&>();
        if (absl::StartsWith(text, "#version")) continue;  // the first line of a merges.txt
        const size_t space = text.find(' ');
        if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
          result_.merges.emplace_back(text.substr(0, space), text.substr(space + 1));
          continue;
        }
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                 merge[1].is_string()) {
        result_.merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
        continue;
      }
      return Invalid("model.merges[", result_.merges.size(), "] is ", ShortJson(merge),
                     ", not a pair of tokens");
    }
    return absl::OkStatus();
  }

  absl::Status ReadNormalizer() {
    for (const Json* step : Flatten(FindField(document_, "normalizer"), "normalizers")) {
      const std::string type = TypeOf(*step);
      if (type == "NFC") {
        result_.normalizer.push_back(NormalizerStep::kNfc);
      } else if (type == "Prepend" && result_.characters && Is(*step, "prepend", kSpaceSymbol)) {
        result_.normalizer.push_back(NormalizerStep::kPrependSpace);
      } else if (result_.characters && IsReplace(*step, " ", kSpaceSymbol)) {
        result_.normalizer.push_back(NormalizerStep::kReplaceSpaces);
      } else {
        return NotRun("normalizer ", ShortJson(*step));
      }
    }
    return absl::OkStatus();
  }

  static bool Is(const Json& object, const char* key, const char* text) {
    const Json* field = FindField(object, key);
    return field != nullptr && *field == text;
  }
  static bool IsReplace(const Json& step, const char* from, const char* to) {
    const Json* pattern = FindField(step, "pattern");
    return TypeOf(step) == "Replace" && pattern != nullptr && Is(*pattern, "String", from) &&
           Is(step, "content", to);
  }

  absl::Status ReadPretokenizer() {
    bool bytes = false;  // past ByteLevel, other steps would see the byte alphabet
    for (const Json* step : Flatten(FindField(document_, "pre_tokenizer"), "pretokenizers")) {
      const std::string type = TypeOf(*step);
      if (bytes) return NotRun("pre_tokenizer ", ShortJson(*step), " after ByteLevel");
      if (type == "ByteLevel") {
        bytes = true;
        ASSIGN_OR_RETURN(const bool prefix, BoolField(*step, "add_prefix_space", {}, path_));
        ASSIGN_OR_RETURN(const bool regex, BoolField(*step, "use_regex", true, path_));
        if (prefix) result_.pretokenizer.push_back({.kind = PretokenStep::Kind::kPrefixSpace});
        if (regex) result_.pretokenizer.push_back({.pattern = kGpt2Pattern});
      } else if (type == "Digits") {
        ASSIGN_OR_RETURN(const bool single, BoolField(*step, "individual_digits", {}, path_));
        result_.pretokenizer.push_back({.pattern = single ? "\\p{N}" : "\\p{N}+"});
      } else if (type == "Split") {
        RETURN_IF_ERROR(ReadSplit(*step));
      } else if (type == "Metaspace" && result_.characters) {
        RETURN_IF_ERROR(ReadMetaspace(*step));
      } else {
        return NotRun("pre_tokenizer ", ShortJson(*step));
      }
    }
    return absl::OkStatus();
  }

  absl::Status ReadMetaspace(const Json& json) {
    const std::string where = path_ + ": pre_tokenizer Metaspace";
    PretokenStep step;
    step.kind = PretokenStep::Kind::kMetaspace;
    if (!Is(json, "replacement", kSpaceSymbol)) return NotRun("pre_tokenizer ", ShortJson(json));
    // Files of before prepend_scheme say add_prefix_space, which is "always", and mean to split.
    ASSIGN_OR_RETURN(const bool add, BoolField(json, "add_prefix_space", true, where));
    std::string scheme = add ? "always" : "never";
    if (FindField(json, "prepend_scheme") != nullptr) {
      ASSIGN_OR_RETURN(scheme, StringField(json, "prepend_scheme", where));
    }
    if (scheme == "first") {
      step.prepend = PretokenStep::Prepend::kFirst;
    } else if (scheme == "always") {
      step.prepend = PretokenStep::Prepend::kAlways;
    } else if (scheme != "never") {
      return NotRun("pre_tokenizer Metaspace prepend_scheme ", Shown(scheme));
    }
    ASSIGN_OR_RETURN(step.split, BoolField(json, "split", true, where));
    result_.pretokenizer.push_back(std::move(step));
    return absl::OkStatus();
  }

  absl::Status ReadSplit(const Json& json) {
    static const auto* const kBehaviors = new absl::flat_hash_map<std::string, SplitBehavior>{
        {"Removed", SplitBehavior::kRemoved},
        {"Isolated", SplitBehavior::kIsolated},
        {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
        {"MergedWithNext", SplitBehavior::kMergedWithNext},
        {"Contiguous", SplitBehavior::kContiguous}};
    PretokenStep step;
    const Json* pattern = FindField(json, "pattern");
    if (pattern == nullptr) return Invalid("pre_tokenizer Split: pattern is missing");
    step.literal = FindField(*pattern, "String") != nullptr;
    ASSIGN_OR_RETURN(step.pattern, StringField(*pattern, step.literal ? "String" : "Regex",
                                               absl::StrCat(path_, ": pre_tokenizer Split")));
    if (step.pattern.empty()) return Invalid("pre_tokenizer Split: pattern is empty");
    ASSIGN_OR_RETURN(const std::string behavior,
                     StringField(json, "behavior", absl::StrCat(path_, ": pre_tokenizer Split")));
    const auto known = kBehaviors->find(behavior);
    if (known == kBehaviors->end()) return NotRun("pre_tokenizer Split behavior ", Shown(behavior));
    step.behavior = known->second;
    ASSIGN_OR_RETURN(step.invert, BoolField(json, "invert", false, path_));
    result_.pretokenizer.push_back(std::move(step));
    return absl::OkStatus();
  }

  // Post-processors add special tokens or trim offsets; Encode does neither, but documents begin
  // with what a template puts before a text. What it puts after one does not belong there: a
  // document goes on.
  absl::Status ReadPostprocessor() {
    for (const Json* step : Flatten(FindField(document_, "post_processor"), "processors")) {
      const std::string type = TypeOf(*step);
      if (type == "TemplateProcessing") {
        RETURN_IF_ERROR(ReadTemplate(*step));
      } else if (type != "ByteLevel") {
        return NotRun("post_processor ", ShortJson(*step));
      }
    }
    return absl::OkStatus();
  }

  absl::Status ReadTemplate(const Json& step) {
    const Json* single = FindField(step, "single");
    if (single == nullptr || !single->is_array()) {
      return Invalid("post_processor TemplateProcessing: single is not a list of pieces");
    }
    for (const Json& piece : *single) {
      if (FindField(piece, "Sequence") != nullptr) break;  // the text
      const Json* special = FindField(piece, "SpecialToken");
      if (special == nullptr) return NotRun("post_processor piece ", ShortJson(piece));
      ASSIGN_OR_RETURN(
          const std::string name,
          StringField(*special, "id", absl::StrCat(path_, ": post_processor SpecialToken")));
      const Json* tokens = FindField(step, "special_tokens");
      const Json* token = tokens == nullptr ? nullptr : FindField(*tokens, name.c_str());
      const Json* ids = token == nullptr ? nullptr : FindField(*token, "ids");
      if (ids == nullptr || !ids->is_array()) {
        return Invalid("post_processor: special_tokens has no ids of \"", Shown(name), "\"");
      }
      if (ids->size() != 1 || result_.template_bos >= 0) {
        return NotRun("post_processor TemplateProcessing with several tokens before the text (",
                      ShortJson(*single), ")");
      }
      ASSIGN_OR_RETURN(
          result_.template_bos,
          ParseTokenId((*ids)[0], absl::StrCat(path_, ": post_processor: ", Shown(name))));
    }
    return absl::OkStatus();
  }

  absl::Status ReadDecoder() {
    const Json* decoder = FindField(document_, "decoder");
    const std::vector<const Json*> steps = Flatten(decoder, "decoders");
    const auto other = [&] {
      return NotRun("decoder ", decoder == nullptr ? "null" : ShortJson(*decoder));
    };
    if (!result_.characters) {
      return steps.size() == 1 && TypeOf(*steps[0]) == "ByteLevel" ? absl::OkStatus() : other();
    }
    // U+2581 is a space again, <0x0A> is a byte, and the first space goes.
    if (steps.size() < 3 || steps.size() > 4) return other();
    if (!IsReplace(*steps[0], kSpaceSymbol, " ") || TypeOf(*steps[1]) != "ByteFallback" ||
        TypeOf(*steps[2]) != "Fuse") {
      return other();
    }
    result_.drops_first_space = steps.size() == 4;
    if (!result_.drops_first_space) return absl::OkStatus();
    const Json* start = FindField(*steps[3], "start");
    const Json* stop = FindField(*steps[3], "stop");
    const bool one = start != nullptr && *start == 1 && stop != nullptr && *stop == 0;
    return one && TypeOf(*steps[3]) == "Strip" && Is(*steps[3], "content", " ") ? absl::OkStatus()
                                                                                : other();
  }

  absl::Status ReadAddedTokens() {
    const Json* list = FindField(document_, "added_tokens");
    if (list == nullptr) return absl::OkStatus();
    if (!list->is_array()) return Invalid("added_tokens is not an array");
    absl::flat_hash_set<TokenId> ids;
    absl::flat_hash_set<std::string> contents;
    for (const Json& object : *list) {
      const std::string where =
          absl::StrCat(path_, ": added_tokens[", result_.added_tokens.size(), "]");
      ASSIGN_OR_RETURN(AddedToken token, ParseAddedToken(object, where));
      const Json* id = FindField(object, "id");
      if (id == nullptr) return Invalid("added token \"", Shown(token.content), "\" has no id");
      ASSIGN_OR_RETURN(token.id, ParseTokenId(*id, where));
      if (!ids.insert(token.id).second || !contents.insert(token.content).second) {
        return Invalid("added token \"", Shown(token.content), "\" with id ", token.id,
                       ": its id or content is listed twice");
      }
      result_.added_tokens.push_back(std::move(token));
    }
    return absl::OkStatus();
  }

  const std::string& path_;
  const Json& document_;
  TokenizerJson result_;
};

}  // namespace

absl::StatusOr<TokenizerJson> ParseTokenizerJson(const std::string& path, absl::string_view bytes,
                                                 bool characters) {
  ASSIGN_OR_RETURN(const Json document, ParseJsonObject(bytes, path));
  return Parser(path, document, characters).Run();
}

}  // namespace carrel::model
