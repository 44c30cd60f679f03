#include "serving/decoder_runner.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "common/thrown.h"
#include "decoder/generation.h"
#include "library/document_text.h"
#include "library/machine_rates.h"
#include "library/open_decoder.h"
#include "library/sources.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::serving {
namespace {

// What was counted of rows so far, over all layers.
decoder::LayerStatistics RowsOf(const library::OpenDecoder& open) {
  decoder::LayerStatistics sum;
  for (const decoder::LayerStatistics& layer : open.decoder().statistics().layers) {
    sum.tokens += layer.tokens;
    sum.rows_attended += layer.rows_attended;
    sum.whole_tokens += layer.whole_tokens;
    sum.whole_rows += layer.whole_rows;
  }
  return sum;
}

decoder::LayerStatistics Since(const decoder::LayerStatistics& before,
                               decoder::LayerStatistics after) {
  after.tokens -= before.tokens;
  after.rows_attended -= before.rows_attended;
  after.whole_tokens -= before.whole_tokens;
  after.whole_rows -= before.whole_rows;
  return after;
}

// In the middle of a step, which is others', too: what it throws is its own end.
bool Wanted(const AnswerJob& job) {
  const auto wanted =
      CatchThrown("an answer", [&]() -> absl::StatusOr<bool> { return job.wanted(); });
  return wanted.value_or(false);
}

// An answer on its way; stays where it is, for its callbacks.
struct Answer {
  Answer(const AnswerJob& given, absl::Time begun, const std::atomic<bool>& stop,
         const model::Tokenizer* tokenizer)
      : job(given), start(begun), stopping(stop), stream(tokenizer) {}

  absl::Status Push(TokenId id) {
    tokens.push_back(id);
    if (tokens.size() == 1) first = SteadyNow();
    ASSIGN_OR_RETURN(const std::string piece, stream.Push(id));
    return Show(piece);
  }

  absl::Status Show(const std::string& piece) {
    if (!stopping && job.on_text(piece)) return absl::OkStatus();
    ended = true;
    return absl::CancelledError("the answer was ended");
  }

  const AnswerJob& job;
  const absl::Time start;
  const std::atomic<bool>& stopping;
  model::StreamDecoder stream;
  std::optional<decoder::Generation> generation;
  std::vector<TokenId> tokens;
  decoder::LayerStatistics before;
  absl::Time first = absl::InfiniteFuture();
  bool ended = false;  // by who listens: what there is, is the answer
};

class DecoderSlot final : public Slot {
 public:
  explicit DecoderSlot(std::unique_ptr<library::OpenDecoder> open) : open_(std::move(open)) {}

  absl::Span<const TokenId> sequence_tokens() const override {
    return open_->decoder().sequence().tokens();
  }
  int64_t given_up() const override { return open_->decoder().sequence().given_up(); }
  decoder::SavedSequence SaveSequence() const override {
    return open_->decoder().sequence().Save();
  }
  absl::Status RestoreSequence(decoder::SavedSequence sequence) override {
    return open_->decoder().sequence().Restore(std::move(sequence));
  }
  bool has_document() const override { return has_document_; }
  absl::Status ReadDocument() override {
    RETURN_IF_ERROR(open_->Document().status());
    has_document_ = true;
    return absl::OkStatus();
  }

  absl::Status Begin(const AnswerJob& job, bool resume, absl::Time begun,
                     const std::atomic<bool>& stopping) override {
    answer_.emplace(job, begun, stopping, open_->checkpoint().tokenizer.get());
    Answer& answer = *answer_;
    decoder::GenerateOptions options;
    options.max_tokens = job.max_tokens;
    options.give_up = job.give_up;
    options.history = job.history;
    options.sampling = job.sampling;
    options.trace = job.with_sources();
    options.resume = resume;
    options.wanted = [&answer] { return !answer.stopping && Wanted(answer.job); };
    options.on_token = [&answer](TokenId id) { return answer.Push(id); };
    answer.before = RowsOf(*open_);
    ASSIGN_OR_RETURN(decoder::Generation generation,
                     decoder::Generation::Begin(open_->decoder(), job.prompt, std::move(options)));
    answer.generation.emplace(std::move(generation));
    return absl::OkStatus();
  }

  Schedule::Progress progress() const override {
    return {answer_->generation->next_tokens(), answer_->generation->reading_prompt()};
  }
  bool done() const override { return answer_->generation->done(); }

  absl::StatusOr<AnswerJob::Done> End(const absl::Status& status, bool cut) override {
    const absl::Cleanup over = [this] { answer_.reset(); };
    answer_->ended |= cut;
    return ResultOf(*answer_, status);
  }

  decoder::Generation* generation() override { return &*answer_->generation; }

 private:
  absl::StatusOr<AnswerJob::Done> ResultOf(Answer& answer, const absl::Status& given) {
    if (!answer.generation.has_value()) return given;
    RETURN_IF_ERROR(open_->Confirm(answer.ended ? absl::OkStatus() : given));
    const decoder::Decoder& decoder = open_->decoder();
    AnswerJob::Done done;
    done.tokens = static_cast<int64_t>(answer.tokens.size());
    done.resumed_tokens = decoder.resumed_tokens();
    done.context_tokens = decoder.context_tokens() - answer.job.give_up;
    if (decoder.plan().has_value()) done.plan = decoder::WayName(decoder.plan()->taken().way);
    done.rows_read = RowsPerToken(Since(answer.before, RowsOf(*open_))) /
                     open_->checkpoint().config.shape.kv_heads;
    const absl::Time first = std::min(answer.first, SteadyNow());
    done.prompt_seconds = absl::ToDoubleSeconds(first - answer.start);
    done.generate_seconds = absl::ToDoubleSeconds(SteadyNow() - first);
    if (answer.job.with_sources() && answer.job.wanted()) {
      ASSIGN_OR_RETURN(done.sources, SourcesOf(answer));
    }
    if (!answer.ended) {
      ASSIGN_OR_RETURN(const std::string rest, answer.stream.Finish());
      answer.Show(rest).IgnoreError();
      done.at_max_tokens = answer.generation->TakeResult().stop != decoder::StopReason::kEos;
    }
    return done;
  }

  absl::StatusOr<std::vector<AnswerSource>> SourcesOf(const Answer& answer) {
    ASSIGN_OR_RETURN(const std::vector<library::Source> sources,
                     open_->Sources(answer.tokens, answer.job.sources));
    ASSIGN_OR_RETURN(const library::DocumentText* const document, open_->Document());
    std::vector<AnswerSource> with_texts;
    for (const library::Source& source : sources) {
      with_texts.push_back({.first_token = source.tokens.begin,
                            .end_token = source.tokens.end,
                            .begin = source.begin,
                            .end = source.end,
                            .share = source.share,
                            .text = document->TextOf(source.tokens)});
    }
    return with_texts;
  }

  const std::unique_ptr<library::OpenDecoder> open_;
  std::optional<Answer> answer_;
  bool has_document_ = false;
};

class DecoderRunner final : public Runner {
 public:
  DecoderRunner(RunnerConfig config, std::shared_ptr<library::LoadedModel> model,
                std::shared_ptr<library::StoreAccess> store)
      : config_(std::move(config)), model_(std::move(model)), store_(std::move(store)) {}

  // Rates that are measured beside steps would be those of a machine that is busy.
  void Prepare() override {
    if (!config_.planned || store_ == nullptr) return;
    library::MachineRates(config_.device.device, model_->checkpoint().config.shape, model_->pool())
        .status()
        .IgnoreError();  // opening says so
  }

  absl::StatusOr<std::unique_ptr<Slot>> Open(const std::string& context,
                                             const std::string& content_id) override {
    library::DecoderSpec spec = {.context = context,
                                 .folder = config_.folder,
                                 .derived_weights = config_.derived_weights,
                                 .config = config_.retrieval,
                                 .device = config_.device,
                                 .planned = config_.planned && !context.empty(),
                                 .way = config_.way,
                                 .turn_head = config_.turn_head};
    spec.config.content_id = content_id;
    ASSIGN_OR_RETURN(std::unique_ptr<library::OpenDecoder> open,
                     library::OpenDecoder::Create(std::move(spec), model_, store_));
    return std::make_unique<DecoderSlot>(std::move(open));
  }

  // On a GPU all share one device.
  bool steps_beside() const override { return config_.device.device == model::Device::kCpu; }

  std::vector<absl::Status> Step(absl::Span<Slot* const> slots) override {
    std::vector<decoder::Generation*> generations;
    for (Slot* const slot : slots) generations.push_back(slot->generation());
    return decoder::Generation::Step(generations);
  }

 private:
  const RunnerConfig config_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
};

}  // namespace

std::unique_ptr<Runner> MakeDecoderRunner(const RunnerConfig& config,
                                          std::shared_ptr<library::LoadedModel> model,
                                          std::shared_ptr<library::StoreAccess> store) {
  return std::make_unique<DecoderRunner>(config, std::move(model), std::move(store));
}

}  // namespace carrel::serving
