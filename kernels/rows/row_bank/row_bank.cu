// A block per KV head looks its rows up together, then walks once over the slots from the least
// recently used on: what this use did not find moves up, and the first of it makes room. Both
// orders come from prefix sums, so nothing depends on which thread is faster.
#include <vector>

#include "kernels/gather_pinned-inl.cuh"
#include "kernels/rows/row_bank/row_bank_cuda.h"
#include "kernels/select-inl.cuh"
#include "kernels/together-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kIdItems = 4;    // ids of a lane at a time
constexpr int kSlotItems = 8;  // slots of a lane at a time
constexpr int kMissItems = 2;  // rows to be given a slot, of a thread at a time

struct Args {
  RowBankParams p;
  int32_t* order;
  int32_t* held;
  uint32_t* ahead;
  int32_t* entries;
  void* map;
  int places;           // of a head's table
  int32_t* miss_count;  // [kv_heads]
  int32_t* misses;      // [kv_heads, count]: indices into ids
  int32_t* victims;     // [kv_heads, count]: slots that they get
};

// A page table of one KV head. What it says of a row is to be checked against the slot. Load begins
// a look-up, so that several are under way at once; Find and Insert end it.
class VectorMap {
 public:
  using Loaded = int;
  __device__ VectorMap(const Args& a, int head)
      : slot_of_(static_cast<int32_t*>(a.map) + head * a.p.shape.rows) {}
  __device__ void Prepare(const int32_t*, int, int) {}
  __device__ Loaded Load(int row) const { return slot_of_[row]; }
  __device__ int Find(int, Loaded loaded) const { return loaded; }
  __device__ void Insert(int row, int slot, Loaded) { slot_of_[row] = slot; }
  __device__ void Finish() {}

 private:
  int32_t* slot_of_;
};

// Buckets of four places, one sector each; a row lies in its bucket or in those after it, before
// the first free place. Places are never given back one by one: a row that left keeps its place
// until the table is made anew, and takes it again if it returns.
class HashMap {
 public:
  struct Loaded {
    int4 low, high;  // (row, slot) of two places each
  };

  __device__ HashMap(const Args& a, int head)
      : table_(static_cast<int2*>(a.map) + static_cast<int64_t>(head) * a.places),
        places_(a.places),
        entries_(a.entries + head) {}

  // All threads. Makes the table anew unless `count` more rows leave half of it free.
  __device__ void Prepare(const int32_t* held, int slots, int count) {
    __shared__ int taken;
    taken_ = &taken;
    if (threadIdx.x == 0) taken = *entries_;
    __syncthreads();
    const bool full = taken + count > places_ / 2;
    __syncthreads();
    if (!full) return;
    for (int i = threadIdx.x; i < places_ / 2; i += kThreads) {
      reinterpret_cast<int4*>(table_)[i] = {-1, -1, -1, -1};
    }
    if (threadIdx.x == 0) taken = 0;
    __syncthreads();
    for (int s = threadIdx.x; s < slots; s += kThreads) {
      const int row = held[s];
      if (row >= 0) Insert(row, s, Load(row));
    }
    __syncthreads();
  }

  __device__ Loaded Load(int row) const { return LoadAt(Bucket(row)); }

  __device__ int Find(int row, Loaded at) const {
    for (int bucket = Bucket(row);;) {
      if (at.low.x == row) return at.low.y;
      if (at.low.z == row) return at.low.w;
      if (at.high.x == row) return at.high.y;
      if (at.high.z == row) return at.high.w;
      if (at.high.z < 0) return -1;  // places are taken in order
      bucket = Next(bucket);
      at = LoadAt(bucket);
    }
  }

  __device__ void Insert(int row, int slot, Loaded at) {
    for (int bucket = Bucket(row);;) {
      const int seen[4] = {at.low.x, at.low.z, at.high.x, at.high.z};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (seen[e] >= 0 && seen[e] != row) continue;
        int2* place = table_ + bucket + e;
        const int before = seen[e] == row ? row : atomicCAS(&place->x, -1, row);
        if (before >= 0 && before != row) continue;
        if (before < 0) atomicAdd(taken_, 1);
        place->y = slot;
        return;
      }
      bucket = Next(bucket);
      at = LoadAt(bucket);
    }
  }

  __device__ void Finish() {
    if (threadIdx.x == 0) *entries_ = *taken_;
  }

 private:
  // Buckets are named by their first place.
  __device__ int Bucket(int row) const {
    const uint32_t mixed = static_cast<uint32_t>(row) * 2654435769u;
    return static_cast<int>((mixed ^ mixed >> 15) & static_cast<uint32_t>(places_ - 4));
  }
  __device__ int Next(int bucket) const { return (bucket + 4) & (places_ - 1); }
  __device__ Loaded LoadAt(int bucket) const {
    const auto* places = reinterpret_cast<const int4*>(table_ + bucket);
    return {places[0], places[1]};
  }

  int2* table_;
  const int places_;
  int32_t* entries_;
  int* taken_ = nullptr;
};

__device__ __forceinline__ int Count(const Args& a, int head) {
  return a.p.row_count == nullptr ? static_cast<int>(a.p.count) : a.p.row_count[head];
}

// How many of the block's flags were set before this one: of earlier warps, of this warp's earlier
// items, of earlier lanes. A warp's flags are in the order of items, then of lanes. total: of all.
template <int kItems>
__device__ void Ranks(const bool (&flag)[kItems], unsigned* warp_total, unsigned (&rank)[kItems],
                      unsigned& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned own = 0;
#pragma unroll
  for (int e = 0; e < kItems; ++e) {
    const unsigned ballot = __ballot_sync(~0u, flag[e]);
    rank[e] = own + __popc(ballot & ((1u << lane) - 1));
    own += __popc(ballot);
  }
  if (lane == 0) warp_total[warp] = own;
  __syncthreads();
  const unsigned before = SumBeforeWarp(warp_total);
  total = __reduce_add_sync(~0u, warp_total[lane]);
#pragma unroll
  for (int e = 0; e < kItems; ++e) rank[e] += before;
}
static_assert(kWarps == 32);

// Grid: (kv_heads, 1, sequences).
template <class Map>
__global__ void __launch_bounds__(kThreads, 1)
    LookUpKernel(const __grid_constant__ Together<Args> all) {
  const Args& a = all.own();
  extern __shared__ uint32_t used[];  // a bit per slot
  __shared__ unsigned warp_total[2][kWarps];
  __shared__ unsigned foreseen;
  AllowNextLaunch();
  const int head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slots = static_cast<int>(a.p.shape.slots);
  const int words = (slots + 31) / 32;
  for (int w = threadIdx.x; w < words; w += kThreads) used[w] = 0;
  if (threadIdx.x == 0) foreseen = 0;
  WaitForEarlierLaunch();
  const int count = Count(a, head);

  int32_t* order = a.order + static_cast<int64_t>(head) * slots;
  int32_t* held = a.held + static_cast<int64_t>(head) * slots;
  uint32_t* ahead = a.ahead + static_cast<int64_t>(head) * words;
  const int32_t* ids = a.p.ids + head * a.p.ids_stride;
  int32_t* out = a.p.slots + head * a.p.count;
  int32_t* misses = a.misses + head * a.p.count;
  int32_t* victims = a.victims + head * a.p.count;
  // What the walk over the slots reads first comes from memory meanwhile.
  int slot[kSlotItems];
  const auto load_slots = [&](int base) {
#pragma unroll
    for (int e = 0; e < kSlotItems; ++e) {
      const int at = base + warp * 32 * kSlotItems + e * 32 + lane;
      slot[e] = at < slots ? order[at] : -1;
    }
  };
  load_slots(0);
  Map map(a, head);
  map.Prepare(held, slots, count);
  __syncthreads();

  int parity = 0;  // a warp may write its next total while another still sums the last ones
  unsigned missing = 0;
  for (int base = 0; base < count; base += kThreads * kIdItems, parity ^= 1) {
    const int first = base + warp * 32 * kIdItems + lane;
    int row[kIdItems], at[kIdItems];
    typename Map::Loaded loaded[kIdItems];
    bool miss[kIdItems];
#pragma unroll
    for (int e = 0; e < kIdItems; ++e) row[e] = first + 32 * e < count ? ids[first + 32 * e] : -1;
#pragma unroll
    for (int e = 0; e < kIdItems; ++e) loaded[e] = map.Load(max(row[e], 0));
#pragma unroll
    for (int e = 0; e < kIdItems; ++e) at[e] = row[e] < 0 ? -1 : map.Find(row[e], loaded[e]);
#pragma unroll
    for (int e = 0; e < kIdItems; ++e) {
      if (at[e] >= 0 && held[at[e]] != row[e]) at[e] = -1;
      miss[e] = row[e] >= 0 && at[e] < 0;
    }
#pragma unroll
    for (int e = 0; e < kIdItems; ++e) {
      if (at[e] < 0) continue;
      atomicOr(&used[at[e] / 32], 1u << at[e] % 32);
      out[first + 32 * e] = at[e];
      if (a.p.purpose == RowBankPurpose::kNowAfterAhead && (ahead[at[e] / 32] >> at[e] % 32 & 1)) {
        atomicAdd(&foreseen, 1u);
      }
    }
    unsigned rank[kIdItems], total = 0;
    Ranks(miss, warp_total[parity], rank, total);
#pragma unroll
    for (int e = 0; e < kIdItems; ++e) {
      if (miss[e]) misses[missing + rank[e]] = first + 32 * e;
    }
    missing += total;
  }
  __syncthreads();

  unsigned walked = 0;  // slots that this use did not find, so far
  for (int base = 0; base < slots; base += kThreads * kSlotItems, parity ^= 1) {
    bool unused[kSlotItems];
#pragma unroll
    for (int e = 0; e < kSlotItems; ++e) {
      unused[e] = slot[e] >= 0 && !(used[slot[e] / 32] >> slot[e] % 32 & 1);
    }
    unsigned rank[kSlotItems], total = 0;
    Ranks(unused, warp_total[parity], rank, total);  // and all have read what is overwritten now
#pragma unroll
    for (int e = 0; e < kSlotItems; ++e) {
      if (!unused[e]) continue;
      const unsigned at = walked + rank[e];
      (at < missing ? victims[at] : order[at - missing]) = slot[e];
    }
    walked += total;
    // Nothing beyond this step has been overwritten.
    if (base + kThreads * kSlotItems < slots) load_slots(base + kThreads * kSlotItems);
  }
  __syncthreads();
  for (unsigned base = threadIdx.x; base < missing; base += kThreads * kMissItems) {
    int index[kMissItems], row[kMissItems], to[kMissItems];
    typename Map::Loaded loaded[kMissItems];
#pragma unroll
    for (int e = 0; e < kMissItems; ++e) {
      const unsigned j = min(base + e * kThreads, missing - 1);
      index[e] = misses[j];
      to[e] = victims[j];
    }
#pragma unroll
    for (int e = 0; e < kMissItems; ++e) row[e] = ids[index[e]];
#pragma unroll
    for (int e = 0; e < kMissItems; ++e) loaded[e] = map.Load(row[e]);
#pragma unroll
    for (int e = 0; e < kMissItems; ++e) {
      if (base + e * kThreads >= missing) break;
      out[index[e]] = to[e];
      held[to[e]] = row[e];
      map.Insert(row[e], to[e], loaded[e]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    order[slots - count + i] = out[i];
    if (a.p.purpose == RowBankPurpose::kAhead) atomicOr(&used[out[i] / 32], 1u << out[i] % 32);
  }
  if (a.p.purpose == RowBankPurpose::kAhead) {
    __syncthreads();
    for (int w = threadIdx.x; w < words; w += kThreads) ahead[w] = used[w];
  }
  map.Finish();
  if (threadIdx.x != 0) return;
  a.miss_count[head] = static_cast<int32_t>(missing);
  if (a.p.counters == nullptr) return;
  const auto add = [](uint64_t& counter, unsigned value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&counter), value);
  };
  const unsigned named = static_cast<unsigned>(count);
  if (a.p.purpose == RowBankPurpose::kAhead) {
    add(a.p.counters->ahead, named);
    add(a.p.counters->ahead_hits, named - missing);
    return;
  }
  add(a.p.counters->wanted, named);
  add(a.p.counters->hits, named - missing);
  if (a.p.purpose != RowBankPurpose::kNowAfterAhead) return;
  add(a.p.counters->expected, named);
  add(a.p.counters->foreseen, foreseen);
}

__global__ void ResetKernel(int32_t* order, int64_t slots, int64_t all_slots) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < all_slots) order[i] = static_cast<int32_t>(i % slots);
}

bool Served(const RowBankShape& s) {
  return s.kv_heads >= 1 && s.kv_heads <= 65535 && s.slots >= 1 && s.slots <= kMaxBankSlots &&
         s.rows >= 1 && s.rows <= INT32_MAX && (s.head_dim == 64 || s.head_dim == 128);
}

size_t CountersBytes(int64_t kv_heads) {
  return (static_cast<size_t>(kv_heads) * sizeof(int32_t) + 255) / 256 * 256;
}

bool Served(const RowBankParams& p) {
  return Served(p.shape) && p.count >= 0 && p.count <= p.shape.slots && p.ids_stride >= p.count &&
         p.state != nullptr && (p.count == 0 || p.workspace != nullptr);
}

GatherShape GatherShapeOf(const RowBankParams& p) {
  return {p.shape.kv_heads, p.shape.head_dim, p.packed.rows != nullptr};
}

bool Alike(const RowBankParams& a, const RowBankParams& b) {
  return GatherShapeOf(a) == GatherShapeOf(b) && a.shape.map == b.shape.map &&
         a.purpose == b.purpose;
}

Args ArgsOf(const RowBankParams& p) {
  const RowBankLayout layout(p.shape);
  auto* bytes = static_cast<uint8_t*>(p.state);
  Args a;
  a.p = p;
  a.order = reinterpret_cast<int32_t*>(bytes + layout.order);
  a.held = reinterpret_cast<int32_t*>(bytes + layout.held);
  a.ahead = reinterpret_cast<uint32_t*>(bytes + layout.ahead);
  a.entries = reinterpret_cast<int32_t*>(bytes + layout.entries);
  a.map = bytes + layout.map;
  a.places = static_cast<int>(RowBankPlaces(p.shape.slots));
  a.miss_count = static_cast<int32_t*>(p.workspace);
  a.misses = reinterpret_cast<int32_t*>(static_cast<uint8_t*>(p.workspace) +
                                        CountersBytes(p.shape.kv_heads));
  a.victims = a.misses + p.shape.kv_heads * p.count;
  return a;
}

GatherArgs MissesOf(const Args& a) {
  GatherArgs gather = {};
  gather.from = a.p.kv;
  gather.packed = a.p.packed;
  gather.ids = a.p.ids;
  gather.ids_stride = a.p.ids_stride;
  gather.picked = a.misses;
  gather.picked_count = a.miss_count;
  gather.count = static_cast<int>(a.p.count);
  gather.to = a.p.slots;
  gather.to_rows = a.p.bank;
  return gather;
}

// Of banks that are alike.
cudaError_t LaunchLookUp(std::span<const RowBankParams> some, cudaStream_t stream) {
  const RowBankParams& p = some[0];
  const auto look_up =
      p.shape.map == RowMap::kVector ? LookUpKernel<VectorMap> : LookUpKernel<HashMap>;
  int64_t shared = 0;
  for (const RowBankParams& each : some) {
    shared = std::max(shared, (each.shape.slots + 31) / 32 * 4);
  }
  if (shared > 40 << 10) RETURN_IF_FAILED(AllowShared(look_up, shared));
  return Launch({.grid = GridOf(p.shape.kv_heads, 1, static_cast<int64_t>(some.size())),
                 .threads = kThreads,
                 .shared_bytes = shared,
                 // After kAhead it waits for another stream as well.
                 .early = p.purpose == RowBankPurpose::kNow},
                stream, look_up, TogetherOf(some, ArgsOf));
}

cudaError_t UseAlike(std::span<const RowBankParams> some, cudaStream_t stream) {
  RETURN_IF_FAILED(LaunchLookUp(some, stream));
  return LaunchGather(
      some, [](const RowBankParams& p) { return MissesOf(ArgsOf(p)); }, GatherShapeOf(some[0]),
      stream);
}

}  // namespace

size_t RowBankWorkspaceBytes(int64_t kv_heads, int64_t count) {
  return CountersBytes(kv_heads) + static_cast<size_t>(2 * kv_heads * count) * sizeof(int32_t);
}

cudaError_t RowBankReset(const RowBankShape& shape, void* state, cudaStream_t stream) {
  if (!Served(shape) || state == nullptr) return cudaErrorInvalidValue;
  const RowBankLayout layout(shape);
  auto* bytes = static_cast<uint8_t*>(state);
  const auto fill = [&](int64_t begin, int64_t end, int value) {
    return cudaMemsetAsync(bytes + begin, value, static_cast<size_t>(end - begin), stream);
  };
  RETURN_IF_FAILED(fill(layout.held, layout.ahead, 255));
  RETURN_IF_FAILED(fill(layout.ahead, layout.map, 0));
  RETURN_IF_FAILED(fill(layout.map, layout.bytes, 255));
  const int64_t all = shape.kv_heads * shape.slots;
  ResetKernel<<<static_cast<unsigned>((all + 255) / 256), 256, 0, stream>>>(
      reinterpret_cast<int32_t*>(bytes + layout.order), shape.slots, all);
  return cudaGetLastError();
}

cudaError_t UseRowBanks(std::span<const RowBankParams> all, cudaStream_t stream) {
  std::vector<RowBankParams> used;
  for (const RowBankParams& p : all) {
    if (!Served(p)) return cudaErrorInvalidValue;
    if (p.count > 0) used.push_back(p);
  }
  return ForStretches(std::span<const RowBankParams>(used), Alike,
                      [&](std::span<const RowBankParams> some) { return UseAlike(some, stream); });
}

}  // namespace carrel::kernels
