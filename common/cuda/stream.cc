#include "common/cuda/stream.h"

#include "common/cuda/status.h"
#include "common/status.h"

namespace carrel::cuda {

absl::StatusOr<Stream> Stream::Create(Priority priority) {
  cudaStream_t stream = nullptr;
  int least = 0, greatest = 0;  // numerically the greatest is the smaller one
  RETURN_IF_CUDA_ERROR(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  RETURN_IF_CUDA_ERROR(cudaStreamCreateWithPriority(
      &stream, cudaStreamNonBlocking, priority == Priority::kHigh ? greatest : least));
  return Stream(stream);
}

// Errors of destruction are those of earlier work, which its own synchronisation reports.
Stream::~Stream() {
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
}

absl::Status Stream::Synchronize() const {
  return CudaStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

absl::Status Stream::WaitFor(const Event& event) const {
  return CudaStatus(cudaStreamWaitEvent(stream_, event.get(), 0), "cudaStreamWaitEvent");
}

absl::StatusOr<Event> Event::Create(Timing timing, Wait wait) {
  cudaEvent_t event = nullptr;
  const unsigned flags =
      (timing == Timing::kOn ? unsigned{cudaEventDefault} : unsigned{cudaEventDisableTiming}) |
      (wait == Wait::kAsleep ? unsigned{cudaEventBlockingSync} : 0u);
  RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, flags));
  return Event(event);
}

Event::~Event() {
  if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
}

absl::Status Event::Record(const Stream& stream) const {
  return CudaStatus(cudaEventRecord(event_, stream.get()), "cudaEventRecord");
}

absl::Status Event::Synchronize() const {
  return CudaStatus(cudaEventSynchronize(event_), "cudaEventSynchronize");
}

absl::StatusOr<bool> Event::Done() const {
  const cudaError_t error = cudaEventQuery(event_);
  if (error == cudaErrorNotReady) return false;
  RETURN_IF_ERROR(CudaStatus(error, "cudaEventQuery"));
  return true;
}

absl::StatusOr<EventTimer> EventTimer::Create() {
  ASSIGN_OR_RETURN(Event start, Event::Create(Event::Timing::kOn));
  ASSIGN_OR_RETURN(Event stop, Event::Create(Event::Timing::kOn));
  return EventTimer(std::move(start), std::move(stop));
}

absl::StatusOr<float> EventTimer::ElapsedUs() const {
  RETURN_IF_ERROR(stop_.Synchronize());
  float ms = 0;
  RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&ms, start_.get(), stop_.get()));
  return ms * 1000.0f;
}

}  // namespace carrel::cuda
