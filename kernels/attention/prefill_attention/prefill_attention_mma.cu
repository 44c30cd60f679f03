// The portable variant: mma.sync.m16n8k16 with cp.async, for every GPU from Ampere on and every
// head_dim that is a multiple of 16. Keys may be cut into parts, a block each, which a second kernel joins.
#include "kernels/attention/prefill_attention/prefill_attention_variants.cuh"
#include "kernels/flash_tile-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kQueries = 64;  // per block: 16 for each of four warps
constexpr int kKeys = kFlashKeys;
constexpr int kThreads = 128;

template <int D>
constexpr int kTileElements = kKeys* kFlashRow<D>;

// Q, then two stages of K and V.
template <int D>
constexpr int kSharedBytes = (kQueries * kFlashRow<D> + 4 * kTileElements<D>)*2;

// 16 bytes, or zeros where `valid` is false.
__device__ __forceinline__ void CopyAsync16(void* to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(to)), "l"(from),
               "r"(bytes));
}
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

// Rows [begin, begin + 64) of a matrix whose rows lie `stride` elements apart; zeros from `end` on.
template <int D>
__device__ __forceinline__ void LoadTile(__nv_bfloat16* tile, const __nv_bfloat16* rows,
                                         int64_t stride, int64_t begin, int64_t end) {
  constexpr int kPieces = D / 8;
  for (int i = threadIdx.x; i < 64 * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool valid = begin + row < end;
    const int64_t from = valid ? begin + row : 0;
    CopyAsync16(tile + row * kFlashRow<D> + piece * 8, rows + from * stride + piece * 8, valid);
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads)
    MmaKernel(PrefillAttentionCudaParams p, int64_t part_keys) {
  constexpr int kRow = kFlashRow<D>;
  extern __shared__ __align__(16) unsigned char shared[];
  __nv_bfloat16* const q_tile = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* const k_tiles = q_tile + kQueries * kRow;
  __nv_bfloat16* const v_tiles = k_tiles + 2 * kTileElements<D>;

  const int q_head = blockIdx.x;
  const int64_t first_query = int64_t{gridDim.y - 1 - blockIdx.y} * kQueries;  // longest first
  const int64_t kv_base = q_head / (p.q_heads / p.kv_heads) * p.kv.row_stride * D;
  const auto* const q = reinterpret_cast<const __nv_bfloat16*>(p.q) + q_head * D;
  const auto* const k = reinterpret_cast<const __nv_bfloat16*>(p.kv.k) + kv_base;
  const auto* const v = reinterpret_cast<const __nv_bfloat16*>(p.kv.v) + kv_base;
  const int64_t q_stride = int64_t{p.q_heads} * D;

  const int64_t end_query = p.first_position + min(first_query + kQueries, p.n);
  // A part may lie past what these queries see: its result is the empty set.
  const int64_t begin = int64_t{blockIdx.z} * part_keys;
  const int64_t keys = max(begin, min(min(p.rows, end_query), begin + part_keys));
  const int steps = static_cast<int>((keys - begin + kKeys - 1) / kKeys);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // This thread's two rows of the tile, and how many keys each of them sees.
  const int row = warp * 16 + lane / 4;
  int64_t sees[2];
  for (int r = 0; r < 2; ++r) sees[r] = min(keys, p.first_position + first_query + row + 8 * r + 1);
  const int64_t warp_sees_all = min(keys, p.first_position + first_query + warp * 16 + 1);

  FlashTile<D> tile;
  const float scale = p.scale * FlashTile<D>::kLog2E;

  LoadTile<D>(q_tile, q, q_stride, first_query, p.n);
  if (steps > 0) {
    LoadTile<D>(k_tiles, k, D, begin, keys);
    LoadTile<D>(v_tiles, v, D, begin, keys);
  }
  CommitCopies();

  for (int step = 0; step < steps; ++step) {
    const int stage = step % 2;
    if (step + 1 < steps) {
      const int64_t next = begin + int64_t{step + 1} * kKeys;
      LoadTile<D>(k_tiles + (1 - stage) * kTileElements<D>, k, D, next, keys);
      LoadTile<D>(v_tiles + (1 - stage) * kTileElements<D>, v, D, next, keys);
    }
    CommitCopies();
    WaitCopies<1>();
    __syncthreads();
    const __nv_bfloat16* const k_tile = k_tiles + stage * kTileElements<D>;
    const __nv_bfloat16* const v_tile = v_tiles + stage * kTileElements<D>;

    const int64_t key = begin + int64_t{step} * kKeys;
    tile.Step(q_tile + warp * 16 * kRow, k_tile, v_tile, key, sees, key + kKeys > warp_sees_all,
              scale);
    __syncthreads();  // the next step loads over this stage
  }

  tile.Finish();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t query = first_query + row + 8 * r;
    if (query >= p.n) continue;
    const int64_t place = int64_t{blockIdx.z} * p.n * p.q_heads + query * p.q_heads + q_head;
    tile.Store(r, place * D, p.out, p.out_exact);
    if (p.lse != nullptr && lane % 4 == 0) p.lse[place] = tile.Lse(r);
  }
}

// A block per token and head, a thread per element. In order of parts.
template <int D>
__global__ void JoinPartsKernel(PrefillAttentionCudaParams p, const float* part_out,
                                const float* part_lse, int parts) {
  const int64_t heads = p.n * p.q_heads, h = blockIdx.x, i = h * D + threadIdx.x;
  float top = -INFINITY;
  for (int part = 0; part < parts; ++part) top = fmaxf(top, part_lse[part * heads + h]);
  float sum = 0, out = 0;
  for (int part = 0; part < parts && top != -INFINITY; ++part) {
    const float weight = expf(part_lse[part * heads + h] - top);
    sum += weight;
    out += weight * part_out[part * heads * D + i];
  }
  out = sum > 0 ? out / sum : 0.0f;
  if (p.out != nullptr) p.out[i] = __bfloat16_as_ushort(__float2bfloat16(out));
  if (p.out_exact != nullptr) p.out_exact[i] = out;
  if (p.lse != nullptr && threadIdx.x == 0) p.lse[h] = sum > 0 ? top + logf(sum) : -INFINITY;
}

template <int D>
cudaError_t Launch(const PrefillAttentionCudaParams& params, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      MmaKernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<D>);
  if (error != cudaSuccess) return error;
  dim3 grid(static_cast<unsigned>(params.q_heads),
            static_cast<unsigned>((params.n + kQueries - 1) / kQueries));
  const int64_t parts =
      params.room == nullptr ? 1 : PrefillAttentionParts(params.n, params.rows, params.q_heads);
  if (parts == 1) {
    MmaKernel<D><<<grid, kThreads, kSharedBytes<D>, stream>>>(params, params.rows);
    return cudaGetLastError();
  }
  const int64_t part_keys = (params.rows + parts * kKeys - 1) / (parts * kKeys) * kKeys;
  grid.z = static_cast<unsigned>(parts);
  const int64_t heads = params.n * params.q_heads;
  PrefillAttentionCudaParams part = params;
  part.out = nullptr;
  part.out_exact = params.room;
  part.lse = params.room + parts * heads * D;
  MmaKernel<D><<<grid, kThreads, kSharedBytes<D>, stream>>>(part, part_keys);
  JoinPartsKernel<D><<<static_cast<unsigned>(heads), D, 0, stream>>>(params, params.room, part.lse,
                                                                     static_cast<int>(parts));
  return cudaGetLastError();
}

}  // namespace

cudaError_t PrefillAttentionMma(const PrefillAttentionCudaParams& params, cudaStream_t stream) {
  switch (params.head_dim) {
    case 16:
      return Launch<16>(params, stream);
    case 32:
      return Launch<32>(params, stream);
    case 64:
      return Launch<64>(params, stream);
    case 96:
      return Launch<96>(params, stream);
    case 128:
      return Launch<128>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace carrel::kernels
