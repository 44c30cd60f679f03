#include "decoder/runner/cpu_sequence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/dtype.h"
#include "common/status.h"
#include "decoder/client/row_stream.h"
#include "decoder/zone/make_zone.h"

namespace carrel::decoder {

CpuSequence::CpuSequence(const model::ModelConfig& model, const OpenedContext& context,
                         std::shared_ptr<Runner> runner)
    : Sequence(context.tokens),
      runner_(std::move(runner)),
      context_(context),
      windows_(model.Windows()),
      drift_(
          shape_,
          repositioned() ? std::vector<float>() : model::RopeInvFreq(model.rope, shape_.head_dim),
          context.drift) {}

absl::StatusOr<std::unique_ptr<CpuSequence>> CpuSequence::Open(const model::ModelConfig& model,
                                                               const OpenedContext& context,
                                                               std::shared_ptr<Runner> runner) {
  std::unique_ptr<CpuSequence> sequence(new CpuSequence(model, context, std::move(runner)));
  if (sequence->repositioned()) {
    if (model.sliding.window > 0) {
      return absl::UnimplementedError(
          "rope=infinitehip: not run for models with sliding windows: their layers turn keys by "
          "themselves");
    }
    ASSIGN_OR_RETURN(auto positions,
                     RepositionedAttention::Create(context, model, sequence->window_));
    ASSIGN_OR_RETURN(sequence->zone_, MakeHostZone(std::get<HostZoneOptions>(context.config.zone),
                                                   context, std::move(positions)));
  } else {
    ASSIGN_OR_RETURN(sequence->zone_, MakeZone(context));
    RETURN_IF_ERROR(Annotate(sequence->LoadContextRows(), "reading sink and local rows"));
  }
  sequence->Start(0);
  return sequence;
}

absl::Status CpuSequence::LoadContextRows() {
  const RowRange ranges[] = {{0, context_.zone.begin}, {context_.zone.end, context_.tokens}};
  RowRange newest;  // of a layer with a window: what its first new token may see
  const auto ranges_of = [&](Layer layer) -> absl::Span<const RowRange> {
    const int64_t window = WindowOf(layer);
    if (window == 0) return ranges;
    newest = {std::max<Position>(0, context_.tokens - (window - 1) - kMostGivenUp),
              context_.tokens};
    return {&newest, 1};
  };
  return ReadContextRows(
      context_.client, shape_, ranges_of, context_.max_fetch_rows, [&](const ContextRows& block) {
        window_.AddContextRows(block.layer, block.head, block.k, block.v, block.rows);
        return absl::OkStatus();
      });
}

void CpuSequence::Begin(const Slice& slice) {
  if (trace_ != nullptr) trace_->BeginBlock(slice.wants_next);
  zone_->set_reading_prompt(slice.of_prompt);
}

bool CpuSequence::predicts(Layer layer) const {
  return context_.config.prefetch != Prefetch::kOff && layer.value() < shape_.layers &&
         WindowOf(layer) == 0;
}

absl::Status CpuSequence::Predict(Layer layer, int64_t n, float* predicted_q) {
  drift_.Correct(layer, n, end(), predicted_q);
  return zone_->Prefetch(layer, predicted_q, n);
}

void CpuSequence::Attended(const model::AttentionInput& input, const float* attended) {
  drift_.Learn(input.layer, input.n, input.first_position, input.q);
  if (observer()) observer()(input, attended);
}

void CpuSequence::Start(int64_t give_up) {
  drift_.StartSequence();
  zone_->Cancel();
  window_.Truncate();
  window_.set_given_up(give_up);
  const std::string key = zone_->batch_key();
  batch_key_ = key.empty() ? key : absl::StrCat(key, " without ", give_up);
}

bool CpuSequence::Keep(int64_t tokens) {
  if (repositioned()) return false;
  drift_.StartSequence();
  zone_->Cancel();
  window_.Truncate(tokens);
  return true;
}

std::vector<float> CpuSequence::CopyRows(int64_t tokens) const {
  return repositioned() ? std::vector<float>() : window_.Copy(tokens);
}

bool CpuSequence::RestoreRows(const std::vector<float>& rows, int64_t tokens) {
  return !repositioned() && window_.Restore(rows, tokens);
}

absl::Status CpuSequence::set_trace(QueryTrace* trace) {
  if (repositioned()) return Sequence::set_trace(trace);
  trace_ = trace;
  return absl::OkStatus();
}

void CpuSequence::AttendedHere(const QueryTrace& trace, Layer layer,
                               std::vector<AttendedRow>& rows) const {
  if (WindowOf(layer) > 0) return;  // such a layer looks at the newest rows alone
  const int64_t local = std::max<int64_t>(0, context_.tokens - context_.zone.end - given_up());
  const int64_t d = shape_.head_dim;
  std::vector<float> keys(static_cast<size_t>(local * d));
  for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next()) {
    WidenToFloat(DType::kBf16, window_.context_k(layer, head) + context_.zone.begin * d, local * d,
                 keys.data());
    decoder::AttendedHere(trace, layer, head, shape_, context_.zone.end, local, keys.data(), rows);
  }
}

Statistics CpuSequence::statistics() const {
  Statistics statistics;
  statistics.layers = zone_->statistics();
  if (context_.client != nullptr && !repositioned()) {
    statistics.bytes_sent = context_.client->bytes_sent();
    statistics.bytes_received = context_.client->bytes_received();
  }
  statistics.window_bytes = window_.bytes();
  return statistics;
}

}  // namespace carrel::decoder
