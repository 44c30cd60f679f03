#include "decoder/decoder.h"

#include <algorithm>
#include <numeric>

#include "absl/time/clock.h"
#include "common/status.h"
#include "decoder/fidelity.h"
#include "decoder/generation.h"
#include "decoder/runner/query_drift.h"
#include "decoder/select/host_rows.h"
#include "model/fingerprint.h"

namespace carrel::decoder {
namespace {

// Tokens of a prompt that pass together: as many as one Query may carry, and whose reply the store
// is ready to hold.
int64_t BlockTokens(const RetrievalConfig& config, const AttentionShape& shape,
                    const std::vector<select::Selection>& selections,
                    const retrieval::Opened& opened) {
  const int64_t zone_rows = opened.zone.rows();
  int64_t rows = 0;  // the most of any layer, per token and KV head
  for (const select::Selection& selection : selections) {
    // Nothing per row is held of partial attention, nor of rows that come as they lie.
    const bool all = select::IsAll(selection), by_number = select::TopKRows(selection) > 0;
    if (all ? config.want != Want::kValues : !by_number && config.want == Want::kAttend) continue;
    rows = std::max(rows, select::MostRows(selection, zone_rows, opened.limits.max_top_k));
  }
  const int64_t bytes =
      shape.kv_heads * std::max<int64_t>(1, rows) * (8 + 4 * shape.group());  // ids and scores
  return std::clamp<int64_t>(opened.limits.max_result_bytes / 4 / bytes, 1,
                             std::max<int64_t>(1, opened.limits.max_query_tokens));
}

// Rows per KV head, of what prefill measured.
absl::StatusOr<RowPlan> PlanFidelity(const retrieval::Opened& opened,
                                     const model::ModelConfig& model, const RetrievalConfig& config,
                                     double target_error, PromisedOn& on) {
  const retrieval::ContextFacts& facts = opened.context;
  const int64_t zone_rows = opened.zone.rows();
  if (zone_rows < kWholeZoneRows) {  // nothing to gain
    const auto all = static_cast<size_t>(model.shape.layers) * model.shape.kv_heads;
    on = PromisedOn::kWholeZone;
    return RowPlan{std::vector<int64_t>(all, std::max<int64_t>(1, zone_rows)), 0};
  }
  ASSIGN_OR_RETURN(std::vector<HeadErrors> heads,
                   ErrorsOf(facts, Estimates(config, facts.summary_rows > 0)));
  // Layers with a window ask for no rows of the zone, and nothing of theirs is missing.
  for (size_t i = 0; i < heads.size(); ++i) {
    const auto layer = static_cast<int32_t>(i / static_cast<size_t>(model.shape.kv_heads));
    if (model.Window(Layer(layer)) > 0) heads[i].output = 0;
  }
  on = MeasuredOnProbe(facts) ? PromisedOn::kProbe : PromisedOn::kDocument;
  return PlanRows(heads, int64_t{config.dense_layers} * facts.shape.kv_heads, zone_rows,
                  target_error);
}

// What each layer selects. A fidelity gives way to a top_k where that is allowed and nothing was measured;
// promised, on: the error that it promises, and what that was measured on.
absl::StatusOr<std::vector<select::Selection>> SelectionsOf(const retrieval::Opened& opened,
                                                            const model::ModelConfig& model,
                                                            const DeviceConfig& device,
                                                            RetrievalConfig& config,
                                                            double& promised, PromisedOn& on) {
  const int64_t zone_rows = opened.zone.rows();
  std::vector<select::Selection> selections;
  if (const auto* const fidelity = std::get_if<FidelityOptions>(&config.selection)) {
    const absl::StatusOr<RowPlan> plan =
        PlanFidelity(opened, model, config, fidelity->target_error, on);
    if (plan.ok()) {
      promised = plan->error;
      selections = LayerSelections(config, plan->rows, model.shape, zone_rows);
    } else {
      if (!absl::IsFailedPrecondition(plan.status()) || !fidelity->or_top_k.has_value())
        return plan.status();
      config.dense_layers = std::min(fidelity->or_dense_layers, model.shape.layers);
      config.selection = select::TopK{std::min(*fidelity->or_top_k, opened.context.tokens)};
    }
  }
  if (selections.empty()) selections = LayerSelections(config, model.shape.layers, zone_rows);
  if (SelectorOf(config) != nullptr && !ScansHere(config, device)) return selections;
  for (const select::Selection& selection : selections) {
    if (select::TopKRows(selection) <= opened.limits.max_top_k) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("top_k: a layer's budget of ", select::TopKRows(selection),
                     " rows exceeds the store's max_top_k=", opened.limits.max_top_k,
                     "; use \"all\" for every row"));
  }
  return selections;
}

// Positions given here have no summaries, and a GPU takes a zone's from the context's folder.
absl::Status ResolveEstimate(const DeviceConfig& device, const HostRows* host_rows,
                             RetrievalConfig& config) {
  if (config.rope == Rope::kInfiniteHip) {
    config.estimate = Estimate::kOff;
    return absl::OkStatus();
  }
  if (device.device == model::Device::kCpu || SelectorOf(config) == nullptr)
    return absl::OkStatus();
  const bool here = host_rows != nullptr && host_rows->has_summaries();
  if (config.estimate == Estimate::kOn && !here) {
    return absl::FailedPreconditionError(
        "estimate=on: a zone that a GPU attends to takes the context's summaries from its folder: "
        "give --store instead of --server, or carrel reindex --summaries 40 where it has none");
  }
  if (config.estimate == Estimate::kAuto) config.estimate = here ? Estimate::kOn : Estimate::kOff;
  return absl::OkStatus();
}

// What a plan is asked of this context.
absl::StatusOr<PlanQuestion> QuestionOf(const retrieval::Opened& opened,
                                        const model::ModelConfig& model,
                                        const RetrievalConfig& config, const DeviceConfig& device) {
  const PlanOptions& options = *config.plan;
  PlanQuestion question;
  question.shape = model.shape;
  question.zone_rows = opened.zone.rows();
  for (Layer layer(0); layer.value() < model.shape.layers; layer = layer.next())
    question.zone_layers += model.Window(layer) == 0;
  question.unfit = options.unfit;
  if (options.way.has_value()) {
    question.place = options.way->place;
    question.dense = options.way->dense;
  }
  if (device.device != model::Device::kCpu) {
    question.device_bytes = options.device_bytes;
    if (device.gpu_memory != model::kAllGpuMemory)
      question.device_bytes = std::min(question.device_bytes, device.gpu_memory);
    question.model_bytes = GpuModelBytes(model, device, config.sink + config.local);
  }
  question.host_bytes = options.host_bytes;
  const int64_t heads = question.zone_layers * model.shape.kv_heads;
  const auto* const fidelity = std::get_if<FidelityOptions>(&config.selection);
  if (fidelity == nullptr) {  // by number, range or mass
    const auto& selection = std::get<select::Selection>(config.selection);
    if (options.way.has_value() && options.way->dense != select::IsAll(selection)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "plan=", WayName(*options.way), ": ",
          options.way->dense ? "a number of rows was asked for" : "all rows were asked for"));
    }
    question.dense = select::IsAll(selection);
    question.chosen_rows =
        heads * select::MostRows(selection, question.zone_rows, opened.limits.max_top_k);
    return question;
  }
  PromisedOn on = PromisedOn::kNothing;
  const absl::StatusOr<RowPlan> rows =
      PlanFidelity(opened, model, config, fidelity->target_error, on);
  if (rows.ok()) {
    question.chosen_rows = std::accumulate(rows->rows.begin(), rows->rows.end(), int64_t{0});
    question.promised = rows->error;
  } else if (absl::IsFailedPrecondition(rows.status())) {
    question.chosen_rows = fidelity->or_top_k.has_value() ? heads * *fidelity->or_top_k : -1;
    question.promised = -1;
  } else {
    return rows.status();
  }
  return question;
}

RetrievalConfig ConfigOf(Way way, const RetrievalConfig& config) {
  RetrievalConfig taken = config;
  taken.plan = nullptr;
  switch (way.place) {
    case Place::kStore:
      taken.zone = PlainZoneOptions{};
      break;
    case Place::kHost:
      taken.zone = config.plan->host;
      break;
    case Place::kDevice:
      taken.zone = config.plan->device;
      taken.measure = false;  // nothing is measured there
      break;
  }
  if (way.dense) {
    taken.selection = select::All();
    // No row is left for the term.
    if (way.place != Place::kStore) taken.estimate = Estimate::kOff;
  }
  return taken;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> PresentedFingerprint(
    const model::Checkpoint& checkpoint, const RetrievalConfig& config) {
  std::vector<std::pair<std::string, std::string>> fingerprint = checkpoint.fingerprint;
  if (config.rope == Rope::kInfiniteHip) {
    model::SetKeyPosition(model::kKeyPositionNone, fingerprint);
  }
  return fingerprint;
}

Decoder::~Decoder() = default;

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Open(const model::Checkpoint& checkpoint,
                                                       std::unique_ptr<retrieval::Session> client,
                                                       const std::string& context,
                                                       const RetrievalConfig& given,
                                                       ThreadPool* pool, const DeviceConfig& device,
                                                       std::shared_ptr<const HostRows> host_rows) {
  RetrievalConfig config = given;
  RETURN_IF_ERROR(ValidateRetrievalConfig(config, checkpoint.config.shape.layers));
  RETURN_IF_ERROR(ValidateDeviceConfig(device, config));
  std::unique_ptr<Decoder> decoder(new Decoder(checkpoint, device));
  decoder->client_ = std::move(client);
  if (config.rope == Rope::kInfiniteHip || config.beyond_trained) {
    decoder->max_tokens_ = checkpoint.config.MaxTokens(/*beyond_trained=*/true);
  }
  ASSIGN_OR_RETURN(const retrieval::Opened opened,
                   decoder->client_->Open({.context = context,
                                           .fingerprint = PresentedFingerprint(checkpoint, config),
                                           .sink = config.sink,
                                           .local = config.local,
                                           .query_drift = config.prefetch != Prefetch::kOff,
                                           .content_id = config.content_id}));
  if (opened.context.shape != checkpoint.config.shape) {
    return absl::DataLossError(absl::StrCat(
        "context \"", context, "\": the store opened one whose attention is not the model's"));
  }
  decoder->context_tokens_ = opened.context.tokens;
  decoder->content_id_ = opened.context.content_id;
  decoder->limits_ = {opened.zone, opened.limits.max_top_k, opened.limits.max_query_tokens,
                      opened.limits.max_result_bytes};
  if (config.plan != nullptr) {
    RETURN_IF_ERROR(decoder->OpenByPlan(opened, context, config, pool));
  } else {
    RETURN_IF_ERROR(decoder->OpenZone(opened, context, config, pool, std::move(host_rows)));
  }
  return decoder;
}

absl::Status Decoder::OpenZone(const retrieval::Opened& opened, const std::string& context,
                               RetrievalConfig config, ThreadPool* pool,
                               std::shared_ptr<const HostRows> host_rows) {
  most_given_up_ = MostGivenUp(config, device_, opened.context.tokens);
  if (ScansHere(config, device_) && !client_->attends())
    return absl::InvalidArgumentError("zone=host needs the store in this process");
  if (NeedsHostRows(config, device_) && host_rows == nullptr)
    return absl::InvalidArgumentError("method needs the rows in this host's memory");
  if (host_rows != nullptr && !TakesHostRows(config, device_))
    return absl::InvalidArgumentError("rows of this host are given and nothing reads them");
  if (host_rows != nullptr && host_rows->tokens() != opened.context.tokens) {
    return absl::FailedPreconditionError(
        absl::StrCat("context \"", context, "\": ", host_rows->tokens(),
                     " rows are mapped here, the store opened ", opened.context.tokens));
  }
  if (config.budget == Budget::kMeasured) {
    if (static_cast<int32_t>(opened.layer_entropy_nats.size()) != checkpoint_.config.shape.layers) {
      return absl::FailedPreconditionError(absl::StrCat(
          "budget=measured: context \"", context,
          "\" has no statistics of its attention (carrel prefill --sampled-queries makes them)"));
    }
    config.layer_entropy_nats = opened.layer_entropy_nats;
  }
  RETURN_IF_ERROR(ResolveEstimate(device_, host_rows.get(), config));
  ASSIGN_OR_RETURN(
      std::vector<select::Selection> selections,
      SelectionsOf(opened, checkpoint_.config, device_, config, promised_error_, promised_on_));
  if (const auto* const fidelity = std::get_if<FidelityOptions>(&config.selection))
    target_error_ = fidelity->target_error;
  max_block_ = BlockTokens(config, checkpoint_.config.shape, selections, opened);
  RETURN_IF_ERROR(CheckDrift(opened.query_drift, checkpoint_.config.shape));
  return MakeSequence({.config = std::move(config),
                       .selections = std::move(selections),
                       .device = device_,
                       .content_id = opened.context.content_id,
                       .shape = checkpoint_.config.shape,
                       .tokens = opened.context.tokens,
                       .zone = opened.zone,
                       .has_summaries = opened.context.summary_rows > 0,
                       .max_top_k = opened.limits.max_top_k,
                       .max_fetch_rows = opened.limits.max_fetch_rows,
                       .max_block = max_block_,
                       .drift = opened.query_drift,
                       .client = client_.get(),
                       .pool = pool,
                       .rows = std::move(host_rows)});
}

// A way that needs more of the GPU's memory than is there, though nobody else in this process has any, is not one.
absl::Status Decoder::OpenByPlan(const retrieval::Opened& opened, const std::string& context,
                                 const RetrievalConfig& config, ThreadPool* pool) {
  const PlanOptions& options = *config.plan;
  if (const auto* const fidelity = std::get_if<FidelityOptions>(&config.selection))
    target_error_ = fidelity->target_error;
  ASSIGN_OR_RETURN(PlanQuestion question, QuestionOf(opened, checkpoint_.config, config, device_));
  for (;;) {
    ASSIGN_OR_RETURN(plan_, MakePlan(question, *options.rates));
    const Way way = plan_->taken().way;
    RetrievalConfig taken = ConfigOf(way, config);
    RETURN_IF_ERROR(ValidateDeviceConfig(device_, taken));
    std::shared_ptr<const HostRows> rows;
    if (TakesHostRows(taken, device_) && options.map_rows != nullptr) {
      ASSIGN_OR_RETURN(rows, options.map_rows());
    }
    const bool alone = model::GpuReservation::all() == 0;
    absl::Status status = OpenZone(opened, context, std::move(taken), pool, std::move(rows));
    if (way.dense && target_error_ > 0) promised_on_ = PromisedOn::kWholeZone;
    if (!absl::IsResourceExhausted(status) || !alone || options.way.has_value() ||
        way.place == Place::kStore)
      return status;
    question.unfit[static_cast<size_t>(way.place)] = std::string(status.message());
  }
}

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::OpenModelOnly(const model::Checkpoint& checkpoint,
                                                                ThreadPool* pool,
                                                                const DeviceConfig& device) {
  constexpr int64_t kBlockTokens = 256;
  RETURN_IF_ERROR(ValidateDeviceConfig(device, RetrievalConfig()));
  std::unique_ptr<Decoder> decoder(new Decoder(checkpoint, device));
  decoder->max_block_ = kBlockTokens;
  RETURN_IF_ERROR(decoder->MakeSequence(
      {.selections = std::vector<select::Selection>(
           static_cast<size_t>(checkpoint.config.shape.layers), select::All()),
       .device = device,
       .shape = checkpoint.config.shape,
       .pool = pool}));
  return decoder;
}

absl::Status Decoder::MakeSequence(const OpenedContext& context) {
  ASSIGN_OR_RETURN(sequence_, device_.device == model::Device::kCuda
                                  ? OpenCudaSequence(checkpoint_, context)
                                  : OpenCpuSequence(checkpoint_, context));
  max_block_ = std::min(max_block_, sequence_->max_tokens());
  return absl::OkStatus();
}

void Decoder::set_observer(Observer observer) {
  CARREL_CHECK(device_.device == model::Device::kCpu);
  sequence_->set_observer(std::move(observer));
}

absl::Status Decoder::StartTrace(bool trace) {
  trace_.reset();
  if (!trace) return sequence_->set_trace(nullptr);
  trace_ = std::make_unique<QueryTrace>(checkpoint_.config.shape);
  return sequence_->set_trace(trace_.get());
}

absl::StatusOr<std::vector<AttendedRow>> Decoder::AttendedRows() {
  if (trace_ == nullptr) return absl::FailedPreconditionError("sources: no answer was traced");
  std::vector<AttendedRow> rows;
  for (Layer layer(0); layer.value() < checkpoint_.config.shape.layers; layer = layer.next()) {
    RETURN_IF_ERROR(
        AttendedInZone(*trace_, layer, checkpoint_.config.shape, limits_, client_.get(), rows));
    sequence_->AttendedHere(*trace_, layer, rows);
  }
  return rows;
}

absl::Status Decoder::CheckPrompt(const std::vector<TokenId>& prompt,
                                  const GenerateOptions& options) const {
  const model::ModelConfig& config = checkpoint_.config;
  if (prompt.empty()) return absl::InvalidArgumentError("the prompt is empty: it has no tokens");
  if (options.max_tokens < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_tokens=", options.max_tokens, " is negative"));
  }
  if (options.give_up < 0 || options.give_up > most_given_up_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "give_up=", options.give_up, " of the context's last tokens is not 0 to ", most_given_up_));
  }
  RETURN_IF_ERROR(model::ValidateTokenIds(prompt, config));
  const int64_t prompt_tokens = static_cast<int64_t>(prompt.size());
  const int64_t context_tokens = context_tokens_ - options.give_up;
  const int64_t room = std::max<int64_t>(0, max_tokens_ - context_tokens);
  return config.CheckTokens(
      context_tokens + prompt_tokens,
      absl::StrCat("context of ", context_tokens, " and prompt of ", prompt_tokens, " tokens"),
      max_tokens_ > config.MaxTokens(),
      absl::StrCat(context_tokens_ == 0
                       ? "; shorten the prompt"
                       : absl::StrCat("; beside this document a prompt may have ", room,
                                      " tokens: shorten it, or make several documents of the text"),
                   ", or take a model with a longer context"));
}

absl::StatusOr<GenerateResult> Decoder::Generate(const std::vector<TokenId>& prompt,
                                                 const GenerateOptions& options) {
  ASSIGN_OR_RETURN(Generation generation, Generation::Begin(*this, prompt, options));
  while (!generation.done()) RETURN_IF_ERROR(generation.Step());
  return generation.TakeResult();
}

Statistics Decoder::statistics() const {
  Statistics statistics = sequence_->statistics();
  statistics.target_error = target_error_;
  statistics.promised_error = promised_error_;
  statistics.promised_on = promised_on_;
  return statistics;
}

}  // namespace carrel::decoder
