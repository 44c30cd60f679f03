#include <cstring>
#include <numeric>

#include "common/cuda/buffer.h"
#include "common/cuda/graph.h"
#include "common/cuda/pinned_ring.h"
#include "common/cuda/status.h"
#include "common/cuda/stream.h"
#include "common/status.h"
#include "common/test_util.h"

namespace carrel::cuda {
namespace {

absl::Status Copy(void* to, const void* from, int64_t bytes, const Stream& stream) {
  return CudaStatus(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream.get()),
      "cudaMemcpyAsync");
}

TEST(CudaStatusTest, Errors_BecomeCodes_AndNameTheCall) {
  CARREL_EXPECT_OK(CudaStatus(cudaSuccess, "cudaMalloc"));
  EXPECT_THAT(CudaStatus(cudaErrorMemoryAllocation, "cudaMalloc"),
              StatusIs(absl::StatusCode::kResourceExhausted, "cudaMalloc: cudaErrorMemory"));
  EXPECT_THAT(CudaStatus(cudaErrorNoDevice, "cudaSetDevice"),
              StatusIs(absl::StatusCode::kUnavailable, "cudaErrorNoDevice"));
  EXPECT_THAT(CudaStatus(cudaErrorInvalidValue, "x"),
              StatusIs(absl::StatusCode::kInternal, "cudaErrorInvalidValue"));
}

TEST(BufferTest, ThereAndBack_SameBytes) {
  auto stream = Stream::Create();
  CARREL_ASSERT_OK(stream);
  constexpr int64_t kCount = 12345;
  auto in = PinnedBuffer<int32_t>::Create(kCount), out = PinnedBuffer<int32_t>::Create(kCount);
  auto device = DeviceBuffer<int32_t>::Create(kCount);
  CARREL_ASSERT_OK(in);
  CARREL_ASSERT_OK(out);
  CARREL_ASSERT_OK(device);
  std::iota(in->data(), in->data() + kCount, -77);
  std::memset(out->data(), 0xff, static_cast<size_t>(out->bytes()));
  CARREL_ASSERT_OK(Copy(device->data(), in->data(), in->bytes(), *stream));
  CARREL_ASSERT_OK(Copy(out->data(), device->data(), out->bytes(), *stream));
  CARREL_ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(0, std::memcmp(in->data(), out->data(), static_cast<size_t>(in->bytes())));
}

TEST(BufferTest, MovedFrom_IsEmpty) {
  auto made = DeviceBuffer<float>::Create(10);
  CARREL_ASSERT_OK(made);
  DeviceBuffer<float> a = *std::move(made), b;
  float* data = a.data();
  b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(b.size(), 10);
  EXPECT_EQ(a.data(), nullptr);
  EXPECT_EQ(a.size(), 0);
}

TEST(BufferTest, NoneTooManyOrNegative_IsEmptyOrRefused) {
  auto none = DeviceBuffer<float>::Create(0);
  CARREL_ASSERT_OK(none);
  EXPECT_EQ(none->data(), nullptr);
  EXPECT_THAT(DeviceBuffer<float>::Create(int64_t{1} << 50),
              StatusIs(absl::StatusCode::kResourceExhausted, "bytes wanted"));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_THAT(DeviceBuffer<float>::Create(-1), StatusIs(absl::StatusCode::kInvalidArgument, "-1"));
  EXPECT_THAT(PinnedBuffer<double>::Create(int64_t{1} << 61),
              StatusIs(absl::StatusCode::kInvalidArgument, "elements of 8 bytes"));
}

TEST(EventTest, WorkOfAnotherStream_IsWaitedFor_AndTimed) {
  auto first = Stream::Create(), second = Stream::Create();
  auto event = Event::Create();
  auto timer = EventTimer::Create();
  CARREL_ASSERT_OK(first);
  CARREL_ASSERT_OK(second);
  CARREL_ASSERT_OK(event);
  CARREL_ASSERT_OK(timer);
  constexpr int64_t kBytes = int64_t{256} << 20;
  auto device = DeviceBuffer<uint8_t>::Create(kBytes);
  auto out = PinnedBuffer<uint8_t>::Create(4096);
  CARREL_ASSERT_OK(device);
  CARREL_ASSERT_OK(out);
  CARREL_ASSERT_OK(timer->Start(*first));
  for (int value = 0; value < 20; ++value) {
    ASSERT_EQ(cudaSuccess, cudaMemsetAsync(device->data(), value, kBytes, first->get()));
  }
  CARREL_ASSERT_OK(timer->Stop(*first));
  CARREL_ASSERT_OK(event->Record(*first));
  CARREL_ASSERT_OK(second->WaitFor(*event));
  CARREL_ASSERT_OK(Copy(out->data(), device->data() + kBytes - 4096, 4096, *second));
  CARREL_ASSERT_OK(second->Synchronize());
  for (int i = 0; i < 4096; ++i) ASSERT_EQ(out->data()[i], 19);
  const absl::StatusOr<bool> done = event->Done();
  CARREL_ASSERT_OK(done);
  EXPECT_TRUE(*done);
  const absl::StatusOr<float> us = timer->ElapsedUs();
  CARREL_ASSERT_OK(us);
  EXPECT_GT(*us, 0.0f);
}

TEST(PinnedRingTest, ManyMoreCopiesThanSlots_EachArrivesWhole) {
  constexpr int64_t kSlots = 3, kCopies = 40, kWords = 100'003;
  auto stream = Stream::Create();
  auto ring = PinnedRing::Create(kSlots, kWords * 4);
  auto device = DeviceBuffer<int32_t>::Create(kCopies * kWords);
  CARREL_ASSERT_OK(stream);
  CARREL_ASSERT_OK(ring);
  CARREL_ASSERT_OK(device);
  for (int32_t i = 0; i < kCopies; ++i) {
    auto slot = ring->Acquire();
    CARREL_ASSERT_OK(slot);
    ASSERT_EQ(slot->size(), kWords * 4);
    std::fill_n(reinterpret_cast<int32_t*>(slot->data()), kWords, i);
    CARREL_ASSERT_OK(Copy(device->data() + i * kWords, slot->data(), kWords * 4, *stream));
    CARREL_ASSERT_OK(ring->Release(*stream));
  }
  std::vector<int32_t> out(kCopies * kWords, -1);
  CARREL_ASSERT_OK(Copy(out.data(), device->data(), device->bytes(), *stream));
  CARREL_ASSERT_OK(stream->Synchronize());
  for (int64_t i = 0; i < kCopies * kWords; ++i) ASSERT_EQ(out[i], i / kWords);
}

TEST(PinnedRingTest, OutOfTurn_IsRefused) {
  auto stream = Stream::Create();
  auto ring = PinnedRing::Create(2, 16);
  CARREL_ASSERT_OK(stream);
  CARREL_ASSERT_OK(ring);
  EXPECT_THAT(ring->Release(*stream), StatusIs(absl::StatusCode::kFailedPrecondition, "before"));
  CARREL_ASSERT_OK(ring->Acquire());
  EXPECT_THAT(ring->Acquire(), StatusIs(absl::StatusCode::kFailedPrecondition, "again"));
  EXPECT_THAT(PinnedRing::Create(0, 16), StatusIs(absl::StatusCode::kInvalidArgument, "0 slots"));
}

TEST(GraphTest, Launches_RepeatWhatWasCaptured_WithWhatMemoryHoldsThen) {
  auto stream = Stream::Create();
  auto host = PinnedBuffer<int32_t>::Create(1), back = PinnedBuffer<int32_t>::Create(1);
  auto device = DeviceBuffer<int32_t>::Create(1);
  CARREL_ASSERT_OK(stream);
  CARREL_ASSERT_OK(host);
  CARREL_ASSERT_OK(back);
  CARREL_ASSERT_OK(device);
  *back->data() = -1;
  const auto graph = Graph::Capture(*stream, [&]() -> absl::Status {
    RETURN_IF_ERROR(Copy(device->data(), host->data(), 4, *stream));
    return Copy(back->data(), device->data(), 4, *stream);
  });
  CARREL_ASSERT_OK(graph);
  CARREL_ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(*back->data(), -1) << "capturing ran the work";
  for (int32_t value : {5, 6}) {
    *host->data() = value;
    CARREL_ASSERT_OK(graph->Launch(*stream));
    CARREL_ASSERT_OK(stream->Synchronize());
    EXPECT_EQ(*back->data(), value);
  }
}

TEST(GraphTest, FailedCapture_GivesItsStatus_AndTheStreamGoesOn) {
  auto stream = Stream::Create();
  CARREL_ASSERT_OK(stream);
  EXPECT_THAT(Graph::Capture(*stream, [] { return absl::NotFoundError("nothing"); }),
              StatusIs(absl::StatusCode::kNotFound, "nothing"));
  CARREL_EXPECT_OK(stream->Synchronize());
}

}  // namespace
}  // namespace carrel::cuda
