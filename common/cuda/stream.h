// What:      a stream, an event and an event timer that are owned.
// Ownership: move-only; destroyed with the object, on the device that was current when made.
// Threads:   one thread at a time.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/cuda/runtime.h"

namespace carrel::cuda {

class Event;

class Stream {
 public:
  enum class Priority : uint8_t { kUsual = 0, kHigh = 1 };
  // Does not wait for the default stream, nor does that wait for it. kHigh: its work is the next to
  // get room on the chip, before that of other streams.
  static absl::StatusOr<Stream> Create(Priority priority = Priority::kUsual);
  Stream() = default;
  ~Stream();
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }

  cudaStream_t get() const { return stream_; }
  absl::Status Synchronize() const;
  // What is enqueued from now on waits for the event.
  absl::Status WaitFor(const Event& event) const;

 private:
  explicit Stream(cudaStream_t stream) : stream_(stream) {}
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  enum class Timing : bool { kOff = false, kOn = true };
  enum class Wait : bool { kBusy = false, kAsleep = true };
  // Without timing, recording and waiting are cheaper. Asleep, Synchronize leaves its core to
  // others, and takes some 20 us longer to notice.
  static absl::StatusOr<Event> Create(Timing timing = Timing::kOff, Wait wait = Wait::kBusy);
  Event() = default;
  ~Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }

  cudaEvent_t get() const { return event_; }
  absl::Status Record(const Stream& stream) const;
  absl::Status Synchronize() const;
  // Whether all that was recorded has happened.
  absl::StatusOr<bool> Done() const;

 private:
  explicit Event(cudaEvent_t event) : event_(event) {}
  cudaEvent_t event_ = nullptr;
};

// The time that a stream's work takes between Start and Stop.
class EventTimer {
 public:
  static absl::StatusOr<EventTimer> Create();

  absl::Status Start(const Stream& stream) const { return start_.Record(stream); }
  absl::Status Stop(const Stream& stream) const { return stop_.Record(stream); }
  // Waits for Stop.
  absl::StatusOr<float> ElapsedUs() const;

 private:
  EventTimer(Event start, Event stop) : start_(std::move(start)), stop_(std::move(stop)) {}
  Event start_, stop_;
};

}  // namespace carrel::cuda
