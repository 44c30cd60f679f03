#include "decoder/decoder.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/status.h"
#include "decoder/retrieval_attention.h"
#include "model/transformer.h"

namespace carrel::decoder {
namespace {

// Shows the observer what passes through an attention.
class ObservedAttention : public model::Attention {
 public:
  ObservedAttention(model::Attention& attention, const Decoder::Observer& observer) : attention_(attention), observer_(observer) {}
  absl::Status Attend(const model::AttentionInput& input, float* attended) override {
    RETURN_IF_ERROR(attention_.Attend(input, attended));
    if (observer_) observer_(input, attended);
    return absl::OkStatus();
  }

 private:
  model::Attention& attention_;
  const Decoder::Observer& observer_;
};

// Tokens of a prompt that pass together: as many as one Query may carry, and whose reply the store is ready to hold.
int64_t BlockTokens(const RetrievalConfig& config, const AttentionShape& shape, const std::vector<int64_t>& budgets, const v1::OpenReply& opened) {
  int64_t rows = 0;  // the most of any layer, per token and KV head
  for (int64_t budget : budgets) {
    const bool attend_all = budget == kAllRows && config.want != Want::kValues;  // nothing per row is held: partial attention, or rows as they lie
    if (attend_all || (budget == kAsSelected && config.want == Want::kAttend)) continue;
    const int64_t zone_rows = opened.zone_end() - opened.zone_begin();
    const int64_t bound = config.max_rows > 0 ? config.max_rows : opened.limits().max_top_k();
    rows = std::max(rows, budget == kAllRows ? zone_rows : budget == kAsSelected ? std::min(zone_rows, bound) : budget);
  }
  const int64_t bytes = shape.kv_heads * std::max<int64_t>(1, rows) * (8 + 4 * shape.group());  // ids and scores
  return std::clamp<int64_t>(opened.limits().max_result_bytes() / 4 / bytes, 1, std::max<int64_t>(1, opened.limits().max_query_tokens()));
}

}  // namespace

Decoder::Decoder(const model::Checkpoint& checkpoint, const RetrievalConfig& config, ThreadPool* pool)
    : checkpoint_(checkpoint),
      config_(config),
      pool_(pool),
      backend_(model::MakeCpuBackend(checkpoint.config, checkpoint.weights, pool)) {}

Decoder::~Decoder() = default;

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Open(const model::Checkpoint& checkpoint, std::unique_ptr<StoreClient> client,
                                                       const std::string& context, const RetrievalConfig& config, ThreadPool* pool) {
  RETURN_IF_ERROR(ValidateRetrievalConfig(config, checkpoint.config.shape.layers));
  std::unique_ptr<Decoder> decoder(new Decoder(checkpoint, config, pool));
  decoder->client_ = std::move(client);
  v1::Open open;
  open.set_context(context);
  for (const auto& [name, value] : checkpoint.fingerprint) {
    v1::Fingerprint::Field& field = *open.mutable_fingerprint()->add_fields();
    field.set_name(name);
    field.set_value(value);
  }
  open.set_sink(config.sink);
  open.set_local(config.local);
  ASSIGN_OR_RETURN(const v1::OpenReply opened, decoder->client_->Open(open));
  decoder->context_tokens_ = opened.tokens();
  if (config.select == Select::kTopK && config.top_k != kAllRows && config.top_k > opened.tokens()) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k=", config.top_k, " exceeds the ", opened.tokens(), " tokens of context \"", context, "\"; use \"all\" for every row"));
  }
  const std::vector<int64_t> budgets = LayerBudgets(config, checkpoint.config.shape.layers, opened.zone_end() - opened.zone_begin());
  if (const int64_t largest = *std::max_element(budgets.begin(), budgets.end()); largest > opened.limits().max_top_k()) {
    return absl::InvalidArgumentError(absl::StrCat("top_k=", config.top_k, ": a layer's budget of ", largest, " rows exceeds the store's max_top_k=",
                                                   opened.limits().max_top_k(), "; use \"all\" for every row"));
  }
  decoder->max_block_ = BlockTokens(config, checkpoint.config.shape, budgets, opened);
  ASSIGN_OR_RETURN(decoder->attention_, RetrievalAttention::Create(config, checkpoint.config.shape, opened, decoder->client_.get(), pool));
  return decoder;
}

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::OpenModelOnly(const model::Checkpoint& checkpoint, ThreadPool* pool) {
  constexpr int64_t kBlockTokens = 256;
  std::unique_ptr<Decoder> decoder(new Decoder(checkpoint, RetrievalConfig(), pool));
  decoder->max_block_ = kBlockTokens;
  ASSIGN_OR_RETURN(decoder->attention_,
                   RetrievalAttention::Create(decoder->config_, checkpoint.config.shape, v1::OpenReply(), /*client=*/nullptr, pool));
  return decoder;
}

absl::Status Decoder::Forward(absl::Span<const TokenId> tokens, Position first_position) {
  const model::ModelConfig& config = checkpoint_.config;
  const int64_t n = static_cast<int64_t>(tokens.size());
  hidden_.resize(static_cast<size_t>(n * config.hidden_size));
  RETURN_IF_ERROR(backend_->Embed(tokens, hidden_.data()));
  model::Transformer transformer(backend_.get());
  ObservedAttention attention(*attention_, observer_);
  for (Layer layer(0); layer.value() < config.shape.layers; layer = layer.next()) {
    const Layer next = layer.next();
    if (config_.prefetch != Prefetch::kOff && next.value() < config.shape.layers) {
      // What enters this layer, seen through the next layer's query projection, is close to that layer's true query.
      approximate_q_.resize(static_cast<size_t>(n) * config.shape.q_heads * config.shape.head_dim);
      RETURN_IF_ERROR(backend_->ProjectQuery(next, hidden_.data(), n, first_position, approximate_q_.data()));
      RETURN_IF_ERROR(attention_->Prefetch(next, approximate_q_.data(), n));
    }
    RETURN_IF_ERROR(transformer.ForwardLayer(layer, n, first_position, hidden_.data(), attention));
  }
  return absl::OkStatus();
}

absl::StatusOr<GenerateResult> Decoder::Generate(const std::vector<TokenId>& prompt, const GenerateOptions& options) {
  const model::ModelConfig& config = checkpoint_.config;
  RETURN_IF_ERROR(ValidateSamplingConfig(options.sampling));
  if (prompt.empty()) return absl::InvalidArgumentError("the prompt is empty: it has no tokens");
  if (options.max_tokens < 0) return absl::InvalidArgumentError(absl::StrCat("max_tokens=", options.max_tokens, " is negative"));
  RETURN_IF_ERROR(model::ValidateTokenIds(prompt, config));
  const int64_t prompt_tokens = static_cast<int64_t>(prompt.size());
  if (context_tokens_ + prompt_tokens > config.max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat("context of ", context_tokens_, " and prompt of ", prompt_tokens,
                                                   " tokens exceed the model's max_position_embeddings=", config.max_position_embeddings));
  }

  attention_->StartSequence();
  GenerateResult result;
  std::vector<float> logits(static_cast<size_t>(config.vocab_size));
  const absl::Time start = absl::Now();
  attention_->set_reading_prompt(true);
  int64_t n = 0;
  for (int64_t at = 0; at < prompt_tokens; at += n) {
    n = std::min(max_block_, prompt_tokens - at);
    RETURN_IF_ERROR(Forward(absl::MakeConstSpan(prompt).subspan(at, n), context_tokens_ + at));
    if (!options.keep_logits) continue;
    const size_t before = result.logits.size();
    result.logits.resize(before + static_cast<size_t>(n * config.vocab_size));
    RETURN_IF_ERROR(backend_->Logits(hidden_.data(), n, &result.logits[before]));
  }
  RETURN_IF_ERROR(backend_->Logits(&hidden_[(n - 1) * config.hidden_size], 1, logits.data()));
  attention_->set_reading_prompt(false);
  const absl::Time prompt_end = absl::Now();
  result.prompt_seconds = absl::ToDoubleSeconds(prompt_end - start);

  Sampler sampler(options.sampling);
  while (static_cast<int64_t>(result.ids.size()) < options.max_tokens) {
    ASSIGN_OR_RETURN(const TokenId token, sampler.Sample(logits));
    if (!options.ignore_eos && std::find(config.eos_token_ids.begin(), config.eos_token_ids.end(), token) != config.eos_token_ids.end()) {
      result.stop = StopReason::kEos;
      break;
    }
    result.ids.push_back(token);
    if (options.on_token) RETURN_IF_ERROR(options.on_token(token));
    if (static_cast<int64_t>(result.ids.size()) == options.max_tokens) break;
    const Position position = context_tokens_ + prompt_tokens + static_cast<int64_t>(result.ids.size()) - 1;
    if (position >= config.max_position_embeddings) {
      result.stop = StopReason::kContextLength;
      break;
    }
    RETURN_IF_ERROR(Forward({&token, 1}, position));
    RETURN_IF_ERROR(backend_->Logits(hidden_.data(), 1, logits.data()));
    if (options.keep_logits) result.logits.insert(result.logits.end(), logits.begin(), logits.end());
  }
  result.generate_seconds = absl::ToDoubleSeconds(absl::Now() - prompt_end);
  return result;
}

Statistics Decoder::statistics() const { return attention_->statistics(); }

}  // namespace carrel::decoder
