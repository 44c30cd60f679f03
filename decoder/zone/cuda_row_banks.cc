#include "decoder/zone/cuda_row_banks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/client/row_stream.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/method_type.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
namespace {

constexpr int64_t kUnitRows = 4096;    // of a thread's unit of work
constexpr int64_t kSampleRows = 2048;  // that choose a head's top exponents

}  // namespace

int64_t CudaZoneRows::DeviceBytes(const OpenedContext& context, bool on_device) {
  const AttentionShape& shape = context.shape;
  if (on_device) return CudaWindow::Bytes(shape, context.zone.rows());
  return int64_t{shape.layers} * shape.kv_heads * int64_t{sizeof(kernels::PackedHead)};
}

absl::StatusOr<CudaZoneRows> CudaZoneRows::Create(const OpenedContext& context,
                                                  std::vector<bool> packed) {
  const AttentionShape& shape = context.shape;
  const RowRange zone = context.zone;
  CudaZoneRows out;
  out.shape_ = shape;
  out.zone_ = zone;
  if (packed.empty()) {
    ASSIGN_OR_RETURN(out.on_device_, CudaWindow::Create(shape, zone.rows()));
    RETURN_IF_ERROR(out.ReadFromStore(context));
    return out;
  }
  out.packed_ = std::move(packed);
  out.layer_elements_ = int64_t{shape.kv_heads} * zone.rows() * shape.head_dim;
  out.heads_.resize(static_cast<size_t>(shape.layers * shape.kv_heads));
  out.adding_ = std::make_unique<kernels::ExceptionPieces>();
  int64_t bytes = 0;
  for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
    out.at_.push_back(bytes);
    bytes += shape.kv_heads * zone.rows() * out.row_bytes(layer);
  }
  ASSIGN_OR_RETURN(out.bytes_, cuda::PinnedBuffer<uint8_t>::Create(bytes));
  if (context.rows != nullptr) {
    out.CopyFrom(*context.rows, context.pool);
  } else {
    RETURN_IF_ERROR(out.ReadFromStore(context));
  }
  ASSIGN_OR_RETURN(out.device_heads_, ToDevice(out.heads_));
  const std::vector<kernels::RowPiece>& exceptions = out.adding_->all();
  ASSIGN_OR_RETURN(out.exceptions_, cuda::PinnedBuffer<kernels::RowPiece>::Create(
                                        static_cast<int64_t>(exceptions.size())));
  std::copy(exceptions.begin(), exceptions.end(), out.exceptions_.data());
  out.adding_.reset();
  return out;
}

kernels::KvView CudaZoneRows::kv(Layer layer) const {
  if (packed_.empty()) return on_device_.kv(layer);
  CARREL_CHECK(!is_packed(layer));
  const auto* const k = reinterpret_cast<const kernels::Bf16*>(
      bytes_.data() + at_[static_cast<size_t>(layer.value())]);
  return {k, k + layer_elements_, zone_.rows()};
}

kernels::PackedRows CudaZoneRows::packed(Layer layer) const {
  CARREL_CHECK(is_packed(layer));
  return {bytes_.data() + at_[static_cast<size_t>(layer.value())],
          device_heads_.data() + HeadIndex(layer, KvHead(0)), exceptions_.data(), zone_.rows()};
}

int64_t CudaZoneRows::row_bytes(Layer layer) const {
  return is_packed(layer) ? kernels::PackedRowBytes(shape_.head_dim)
                          : int64_t{shape_.head_dim} * 2 * 2;
}

void CudaZoneRows::UnpackKeys(Layer layer, ThreadPool* pool, uint16_t* keys) const {
  const kernels::PackedRows from = packed(layer);
  const int64_t units = (zone_.rows() + kUnitRows - 1) / kUnitRows;
  pool->ParallelFor(shape_.kv_heads * units, [&](int64_t i) {
    const KvHead head(static_cast<int32_t>(i / units));
    const int64_t first = i % units * kUnitRows, rows = std::min(kUnitRows, zone_.rows() - first);
    const int64_t at = head.value() * zone_.rows() + first;
    kernels::UnpackRows(heads_[HeadIndex(layer, head)], false, from.rows + at * row_bytes(layer),
                        from.exceptions, rows, shape_.head_dim, keys + at * shape_.head_dim);
  });
}

void CudaZoneRows::Take(Layer layer, KvHead head, int64_t first, int64_t rows, const void* k,
                        const void* v) {
  const int64_t at = head.value() * zone_.rows() + first;
  uint8_t* const to = bytes_.data() + at_[static_cast<size_t>(layer.value())];
  if (is_packed(layer)) {
    kernels::PackRows(heads_[HeadIndex(layer, head)], k, v, rows, shape_.head_dim,
                      to + at * row_bytes(layer), adding_.get());
    return;
  }
  const int64_t half_row = row_bytes(layer) / 2;
  std::memcpy(to + at * half_row, k, static_cast<size_t>(rows * half_row));
  std::memcpy(to + layer_elements_ * 2 + at * half_row, v, static_cast<size_t>(rows * half_row));
}

void CudaZoneRows::ChooseTops(Layer layer, KvHead head, int64_t rows, const void* k,
                              const void* v) {
  kernels::PackedHead& tops = heads_[HeadIndex(layer, head)];
  kernels::ChooseTopExponents(k, rows, shape_.head_dim, tops.top_exponent[0]);
  kernels::ChooseTopExponents(v, rows, shape_.head_dim, tops.top_exponent[1]);
}

absl::Status CudaZoneRows::ReadFromStore(const OpenedContext& context) {
  constexpr int64_t kPartRows = 512;
  return ReadContextRows(
      context.client, shape_, [&](Layer) { return absl::MakeConstSpan(&zone_, 1); },
      context.max_fetch_rows,
      [&](const ContextRows& block) {
        const int64_t first = block.first - zone_.begin, bytes = int64_t{shape_.head_dim} * 2;
        if (packed_.empty()) {
          return on_device_.CopyRows(block.layer, block.head, first, block.rows, block.k, block.v);
        }
        // A head's first rows speak for all: what they do not foresee becomes an exception.
        if (first == 0 && is_packed(block.layer)) {
          ChooseTops(block.layer, block.head, std::min(block.rows, kSampleRows), block.k, block.v);
        }
        context.pool->ParallelFor((block.rows + kPartRows - 1) / kPartRows, [&](int64_t i) {
          const int64_t begin = i * kPartRows, rows = std::min(kPartRows, block.rows - begin);
          Take(block.layer, block.head, first + begin, rows,
               static_cast<const char*>(block.k) + begin * bytes,
               static_cast<const char*>(block.v) + begin * bytes);
        });
        return absl::OkStatus();
      });
}

void CudaZoneRows::CopyFrom(const HostRows& source, ThreadPool* pool) {
  const auto row_elements = static_cast<size_t>(shape_.head_dim);
  pool->ParallelFor(shape_.layers * shape_.kv_heads, [&](int64_t i) {
    const Layer layer(static_cast<int32_t>(i / shape_.kv_heads));
    const KvHead head(static_cast<int32_t>(i % shape_.kv_heads));
    if (!is_packed(layer)) return;
    const HeadView& from = source.At(layer, head);
    const int64_t sample = std::min(kSampleRows, zone_.rows());
    std::vector<uint16_t> k(static_cast<size_t>(sample) * row_elements), v(k.size());
    for (int64_t s = 0; s < sample; ++s) {
      const Position row = zone_.begin + s * zone_.rows() / sample;
      std::memcpy(k.data() + s * shape_.head_dim, from.Key(row), row_elements * 2);
      std::memcpy(v.data() + s * shape_.head_dim, from.Value(row), row_elements * 2);
    }
    ChooseTops(layer, head, sample, k.data(), v.data());
  });
  const int64_t units = (zone_.rows() + kUnitRows - 1) / kUnitRows;
  pool->ParallelFor(shape_.layers * shape_.kv_heads * units, [&](int64_t i) {
    const Layer layer(static_cast<int32_t>(i / units / shape_.kv_heads));
    const KvHead head(static_cast<int32_t>(i / units % shape_.kv_heads));
    const HeadView& from = source.At(layer, head);
    const Position begin = zone_.begin + i % units * kUnitRows;
    const Position end = std::min(zone_.end, begin + kUnitRows);
    for (Position row = begin; row < end;) {
      const int64_t count = from.Contiguous(row, end);
      Take(layer, head, row - zone_.begin, count, from.Key(row), from.Value(row));
      row += count;
    }
  });
}

CudaRowBanks::CudaRowBanks(const HostZoneOptions& options, const AttentionShape& shape,
                           BankPlan plan)
    : map_(options.bank.map),
      heads_(shape),
      plan_(std::move(plan)),
      banks_(static_cast<size_t>(shape.layers)) {
  for (size_t l = 0; l < banks_.size(); ++l) {
    packed_.push_back(plan_.chooses(l) && !plan_.holds_all(l) &&
                      !MethodOf(options.selector).reads_keys(options.selector));
    if (packed_[l] && !plan_.has_bank(l))
      most_gathered_ = std::max(most_gathered_, plan_.attended[l]);
  }
}

std::vector<int64_t> CudaRowBanks::budgets_ahead() const {
  std::vector<int64_t> budgets = plan_.ahead;
  std::replace(budgets.begin(), budgets.end(), int64_t{0}, kAllRows);
  return budgets;
}

void CudaRowBanks::Lay(cuda::DeviceArena& arena) {
  const int64_t chosen = plan_.most_chosen(), ahead = plan_.most_ahead();
  const auto workspace = [&](int64_t most) {
    return arena.Take<uint8_t>(
        most == 0 ? 0
                  : static_cast<int64_t>(kernels::RowBankWorkspaceBytes(heads_.kv_heads, most)));
  };
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
    const kernels::RowBankShape shape = BankOf(layer);
    const bool has_state = plan_.has_bank(Index(layer));
    banks_[Index(layer)] = {
        arena.Take<uint16_t>(kernels::RowBankRowBytes(shape) / 2),
        arena.Take<uint8_t>(has_state ? kernels::RowBankLayout(shape).bytes : 0)};
  }
  gathered_ = arena.Take<uint16_t>(2 * elements(most_gathered_));
  now_.slots = arena.Take<int32_t>(heads_.kv_heads * chosen);
  ahead_.slots = arena.Take<int32_t>(heads_.kv_heads * ahead);
  now_.workspace = workspace(chosen);
  ahead_.workspace = workspace(ahead);
  counters_ = arena.Take<kernels::RowBankCounters>(heads_.layers);
}

absl::Status CudaRowBanks::Fill(const CudaZoneRows& rows, const CudaRowSelector* selector,
                                const cuda::Stream& stream) {
  rows_ = &rows;
  ASSIGN_OR_RETURN(host_counters_,
                   cuda::PinnedBuffer<kernels::RowBankCounters>::Create(heads_.layers));
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
    const size_t l = Index(layer);
    // Blocks and chunks may round a budget.
    if (plan_.has_bank(l) && selector->selection(layer).rows > plan_.attended[l]) {
      return absl::InvalidArgumentError(
          absl::StrCat("bank: layer ", layer.value(), " attends to up to ",
                       selector->selection(layer).rows, " rows for a budget of ", plan_.attended[l],
                       ": give a top_k that blocks and chunks divide"));
    }
    if (!plan_.holds_all(l)) continue;
    const int64_t bytes = heads_.kv_heads * plan_.rows * rows.row_bytes(layer);  // K, then V
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(Held(layer).k, rows.kv(layer).k,
                                         static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                                         stream.get()));
  }
  RETURN_IF_ERROR(Reset(stream));
  if (!fetches_ahead()) return absl::OkStatus();
  const std::vector<int64_t> ahead = budgets_ahead();
  ASSIGN_OR_RETURN(ahead_selector_, selector->Another(&ahead));
  CARREL_CHECK(ahead_selector_ != nullptr);  // ValidateDeviceConfig
  ASSIGN_OR_RETURN(ahead_stream_, cuda::Stream::Create());
  for (int32_t layer = 0; layer < heads_.layers; ++layer) {
    for (std::vector<cuda::Event>* events : {&query_ready_, &rows_ready_}) {
      ASSIGN_OR_RETURN(cuda::Event event, cuda::Event::Create());
      events->push_back(std::move(event));
    }
  }
  return absl::OkStatus();
}

absl::Status CudaRowBanks::Reset(const cuda::Stream& stream) {
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
    if (!plan_.has_bank(Index(layer))) continue;
    RETURN_IF_CUDA_ERROR(
        kernels::RowBankReset(BankOf(layer), banks_[Index(layer)].state, stream.get()));
  }
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(counters_, 0, static_cast<size_t>(host_counters_.bytes()), stream.get()));
  RETURN_IF_ERROR(CopyCounters(stream));
  return stream.Synchronize();
}

absl::Status CudaRowBanks::CopyCounters(const cuda::Stream& stream) const {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_counters_.data(), counters_,
                                       static_cast<size_t>(host_counters_.bytes()),
                                       cudaMemcpyDeviceToHost, stream.get()));
  return absl::OkStatus();
}

kernels::KvRows CudaRowBanks::Held(Layer layer) const {
  kernels::Bf16* const k = banks_[Index(layer)].rows;
  return {k, k + kernels::RowBankRowBytes(BankOf(layer)) / 4, plan_.slots[Index(layer)]};
}

kernels::RowBankShape CudaRowBanks::BankOf(Layer layer) const {
  auto bank = kernels::OfHeads<kernels::RowBankShape>(heads_);
  bank.slots = plan_.slots[Index(layer)];
  bank.rows = plan_.rows;
  bank.map = map_;
  return bank;
}

kernels::RowBankParams CudaRowBanks::UseOf(Layer layer, const CudaSelection& selection,
                                           kernels::RowBankPurpose purpose) const {
  const Use& of = purpose == kernels::RowBankPurpose::kAhead ? ahead_ : now_;
  kernels::RowBankParams use;
  use.shape = BankOf(layer);
  if (rows_->is_packed(layer)) {
    use.packed = rows_->packed(layer);
  } else {
    use.kv = rows_->kv(layer);
  }
  use.bank = Held(layer);
  use.state = banks_[Index(layer)].state;
  use.ids = selection.ids;
  use.ids_stride = selection.stride;
  use.count = selection.rows;
  use.row_count = selection.row_count;
  use.slots = of.slots;
  use.purpose = purpose;
  use.counters = counters_ + layer.value();
  use.workspace = of.workspace;
  return use;
}

absl::Status CudaRowBanks::Predict(Layer layer, const CudaQueries& queries,
                                   const cuda::Stream& stream) const {
  const size_t l = Index(layer);
  RETURN_IF_ERROR(query_ready_[l].Record(stream));
  RETURN_IF_ERROR(ahead_stream_.WaitFor(query_ready_[l]));
  CudaZoneWork work;
  ahead_selector_->Add({layer, queries.rounded}, work.choices);
  work.banks.push_back(
      UseOf(layer, ahead_selector_->selection(layer), kernels::RowBankPurpose::kAhead));
  RETURN_IF_ERROR(work.Launch(ahead_stream_));
  return rows_ready_[l].Record(ahead_stream_);
}

CudaPlaces CudaRowBanks::Bring(Layer layer, const CudaSelection& selection, bool fetched,
                               CudaZoneWork& work) const {
  const size_t l = Index(layer);
  if (fetched) work.fetched.push_back(&rows_ready_[l]);
  if (plan_.has_bank(l)) {
    work.banks.push_back(
        UseOf(layer, selection,
              fetched ? kernels::RowBankPurpose::kNowAfterAhead : kernels::RowBankPurpose::kNow));
    return {.kv = AllRows(layer), .places = now_.slots, .stride = selection.rows};
  }
  if (!rows_->is_packed(layer)) return {AllRows(layer)};
  // Methods that read no keys choose as many rows in every head.
  CARREL_CHECK(selection.row_count == nullptr && selection.rows <= most_gathered_);
  auto& gather =
      work.gathers.emplace_back(kernels::OfHeads<kernels::GatherPackedRowsParams>(heads_));
  gather.packed = rows_->packed(layer);
  gather.ids = selection.ids;
  gather.ids_stride = selection.stride;
  gather.count = selection.rows;
  gather.to = {gathered_, gathered_ + elements(selection.rows), selection.rows};
  return {.kv = gather.to, .gathered = true};
}

void CudaRowBanks::Count(std::vector<LayerStatistics>& layers) const {
  for (size_t l = 0; l < layers.size(); ++l) {
    const kernels::RowBankCounters& counted = host_counters_.data()[l];
    LayerStatistics& layer = layers[l];
    BankStatistics& bank = layer.bank;
    bank.slots = plan_.slots[l];
    bank.wanted = static_cast<int64_t>(counted.wanted);
    bank.hits = static_cast<int64_t>(counted.hits);
    bank.ahead = static_cast<int64_t>(counted.ahead);
    bank.ahead_hits = static_cast<int64_t>(counted.ahead_hits);
    bank.expected = static_cast<int64_t>(counted.expected);
    bank.foreseen = static_cast<int64_t>(counted.foreseen);
    int64_t crossed = bank.wanted - bank.hits + bank.ahead - bank.ahead_hits;
    if (plan_.slots[l] == 0) crossed = layer.rows_attended;
    layer.bytes_read += crossed * rows_->row_bytes(Layer(static_cast<int32_t>(l)));
    layer.prefetched += bank.expected / std::max<int64_t>(1, heads_.kv_heads * plan_.attended[l]);
  }
}

}  // namespace carrel::decoder
