#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "common/thrown.h"
#include "decoder/generation.h"
#include "library/document_text.h"
#include "library/machine_rates.h"
#include "library/open_decoder.h"
#include "library/sources.h"
#include "model/tokenizer/tokenizer.h"
#include "serving/runner.h"
#include "serving/stop_filter.h"

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
      CatchThrown("an answer", [&]() -> absl::StatusOr<bool> { return job.is_wanted(); });
  return wanted.value_or(false);
}

// An answer on its way; stays where it is, for its callbacks.
struct Answer {
  Answer(const AnswerJob& given, absl::Time begun, const std::atomic<bool>& stop,
         const model::Tokenizer* tokenizer)
      : job(given), start(begun), stopping(stop), filter(given.stop) {
    if (tokenizer != nullptr) stream.emplace(tokenizer);
  }

  absl::Status Push(TokenId id) {
    first = std::min(first, SteadyNow());
    std::string piece = absl::StrCat(id, " ");
    if (stream.has_value()) {
      ASSIGN_OR_RETURN(piece, stream->Push(id));
    }
    if (Show(filter.Push(piece)) && !filter.stopped()) return absl::OkStatus();
    ended = true;
    return absl::CancelledError("the answer was ended");
  }

  // False: no more of it is wanted.
  bool Show(const std::string& piece) {
    if (left) return false;
    text += piece;
    left = job.on_text != nullptr && !job.on_text(piece);
    return !left;
  }

  // What was held back, if nobody ended the answer before.
  absl::Status ShowRest() {
    if (!ended && stream.has_value()) {
      ASSIGN_OR_RETURN(const std::string rest, stream->Finish());
      Show(filter.Push(rest));
    }
    Show(filter.Finish());
    return absl::OkStatus();
  }

  const AnswerJob& job;
  const absl::Time start;
  const std::atomic<bool>& stopping;
  std::optional<model::StreamDecoder> stream;  // none: the model has no tokenizer
  StopFilter filter;
  std::optional<decoder::Generation> generation;
  std::string text;
  decoder::LayerStatistics before;
  absl::Time first = absl::InfiniteFuture();
  bool left = false;   // by who listened
  bool ended = false;  // before the model ended it: what there is, is the answer
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
  OpenedContext opened() const override {
    const decoder::Decoder& decoder = open_->decoder();
    return {decoder.content_id(), decoder.context_tokens(), open_->method(), decoder.plan(),
            open_->derived()};
  }
  decoder::Statistics statistics() const override { return open_->decoder().statistics(); }
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
    options.keep_logits = job.keep_logits;
    options.ignore_eos = job.ignore_eos;
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

  absl::StatusOr<AnswerJob::Done> End(const absl::Status& status) override {
    const absl::Cleanup over = [this] { answer_.reset(); };
    return ResultOf(*answer_, status);
  }

  decoder::Generation* generation() override { return &*answer_->generation; }

 private:
  absl::StatusOr<AnswerJob::Done> ResultOf(Answer& answer, const absl::Status& given) {
    if (!answer.generation.has_value()) return given;
    RETURN_IF_ERROR(open_->Confirm(answer.ended ? absl::OkStatus() : given));
    const decoder::Decoder& decoder = open_->decoder();
    AnswerJob::Done done;
    done.result = answer.generation->TakeResult();
    done.resumed_tokens = decoder.resumed_tokens();
    done.context_tokens = decoder.context_tokens() - answer.job.give_up;
    if (decoder.plan().has_value()) done.plan = decoder::WayName(decoder.plan()->taken().way);
    done.rows_read = RowsPerToken(Since(answer.before, RowsOf(*open_))) /
                     open_->checkpoint().config.shape.kv_heads;
    const absl::Time first = std::min(answer.first, SteadyNow());
    done.prompt_seconds = absl::ToDoubleSeconds(first - answer.start);
    done.generate_seconds = absl::ToDoubleSeconds(SteadyNow() - first);
    if (answer.job.with_sources() && answer.job.is_wanted()) {
      const absl::Time start = SteadyNow();
      ASSIGN_OR_RETURN(done.sources, SourcesOf(done.result.ids, answer.job.sources));
      done.sources_seconds = absl::ToDoubleSeconds(SteadyNow() - start);
    }
    RETURN_IF_ERROR(answer.ShowRest());
    if (answer.filter.stopped()) done.result.stop = decoder::StopReason::kEos;
    done.at_max_tokens = !answer.ended && done.result.stop != decoder::StopReason::kEos;
    done.left = answer.left;
    done.text = std::move(answer.text);
    return done;
  }

  absl::StatusOr<std::vector<AnswerSource>> SourcesOf(absl::Span<const TokenId> answer,
                                                      int64_t most) {
    ASSIGN_OR_RETURN(const std::vector<library::Source> sources, open_->Sources(answer, most));
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
  DecoderRunner(library::DecoderSpec decoders, std::shared_ptr<library::LoadedModel> model,
                std::shared_ptr<library::StoreAccess> store)
      : decoders_(std::move(decoders)), model_(std::move(model)), store_(std::move(store)) {}

  // Rates that are measured beside steps would be those of a machine that is busy.
  void Prepare() override {
    if (!decoders_.planned || store_ == nullptr) return;
    library::MachineRates(decoders_.device.device, model_->checkpoint().config.shape,
                          model_->pool())
        .status()
        .IgnoreError();  // opening says so
  }

  absl::StatusOr<std::unique_ptr<Slot>> Open(const std::string& context,
                                             const std::string& content_id) override {
    library::DecoderSpec spec = decoders_;
    spec.context = context;
    spec.planned = decoders_.planned && !context.empty();
    spec.config.content_id = content_id;
    ASSIGN_OR_RETURN(std::unique_ptr<library::OpenDecoder> open,
                     library::OpenDecoder::Create(std::move(spec), model_, store_));
    return std::make_unique<DecoderSlot>(std::move(open));
  }

  // On a GPU all share one device.
  bool steps_beside() const override { return decoders_.device.device == model::Device::kCpu; }

  std::vector<absl::Status> Step(absl::Span<Slot* const> slots) override {
    std::vector<decoder::Generation*> generations;
    for (Slot* const slot : slots) generations.push_back(slot->generation());
    return decoder::Generation::Step(generations);
  }

 private:
  const library::DecoderSpec decoders_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
};

}  // namespace

std::unique_ptr<Runner> MakeDecoderRunner(library::DecoderSpec decoders,
                                          std::shared_ptr<library::LoadedModel> model,
                                          std::shared_ptr<library::StoreAccess> store) {
  return std::make_unique<DecoderRunner>(std::move(decoders), std::move(model), std::move(store));
}

}  // namespace carrel::serving
