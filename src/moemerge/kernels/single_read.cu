// Σ_t H_t (V x_t) x_tᵀ for up to 64 experts, with the features read once.
//
// The sum, 64 × d float32, fits into the registers of no single block, so that RANKS of them (a
// cluster) share each tile of tokens: a block has SLICE of the columns. It keeps them in shared
// memory from the first product to the second; in between the ranks add up their parts of the
// logits, through each other's shared memory. Three warpgroups go their own ways:
//
//   weigh     Z = V Xᵀ      this rank's part, sent to the ranks that weigh its tokens
//             U = H Z       of OWN tokens of the tile before, sent to every rank in two bf16 terms
//   multiply  sum += Uᵀ X   two of them, half of the columns each; then the next features are loaded
//
// What is received announces itself: a barrier counts its bytes. That a slot is free needs no
// signal. A rank sends its part of tile t only after its own features of tile t have come; so its
// multipliers were through with tile t − SLOTS, hence had all of its U, from ranks that had all of
// its Z.
//
// single_read.py defines RANKS, TILE, EXPERTS, SLICE, SLOTS, STRETCH, SHARED, WEIGHTS (one of the
// below) and HAS_BIAS (whether Σ_t u_t is wanted).

typedef unsigned int u32;
typedef unsigned long long u64;

enum Weights { SOFTMAX, RANK_ONE, DIAGONAL, IDENTITY };
constexpr Weights weights = WEIGHTS;

constexpr int OWN = TILE / RANKS;
constexpr int HALF = SLICE / 2;
constexpr int STEPS = HALF / 16;  // a product of the tensor cores sums 16 columns, or tokens
constexpr int ATOM = 64;          // columns in 128 swizzled bytes
constexpr int GROUP = 128;        // threads of a warpgroup
constexpr int STAGGER = 8;        // different first stretches

static_assert(TILE == 32 && RANKS == 4 && EXPERTS == 64 && SLICE == 512,
              "the shapes of tensor cores' operands and who holds what of them are written out");

constexpr u32 X_ATOM = TILE * 128;
constexpr u32 X_BYTES = X_ATOM * (SLICE / ATOM);
constexpr u32 V_ATOM = EXPERTS * 128;
constexpr u32 V_BYTES = V_ATOM * (HALF / ATOM);  // the other half is in the weighers' registers
constexpr u32 U_TERM = TILE * EXPERTS * 2;
constexpr u32 U_BYTES = 2 * U_TERM;
constexpr u32 Z_RANK = OWN * EXPERTS * 4;
constexpr u32 Z_BYTES = RANKS * Z_RANK;

constexpr u32 X = 0;
constexpr u32 V = X + SLOTS * X_BYTES;
constexpr u32 U = V + V_BYTES;
constexpr u32 Z = U + SLOTS * U_BYTES;
constexpr u32 X_FULL = Z + SLOTS * Z_BYTES;
constexpr u32 U_FULL = X_FULL + 8 * SLOTS;
constexpr u32 Z_FULL = U_FULL + 8 * SLOTS;
constexpr u32 ALIGNMENT = 1024;  // of what is swizzled
static_assert(Z_FULL + 8 * SLOTS + ALIGNMENT <= SHARED, "SHARED is too small");

struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ u32 slot_of(int tile) { return tile % SLOTS; }

// --- barriers ------------------------------------------------------------------------------------

__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Until what the barrier counts of this tile is there; a slot's barrier serves every SLOTS-th tile.
#define WAIT(SCOPE)                                                                      \
  u32 done = 0;                                                                          \
  while (!done)                                                                          \
  asm volatile("{\n.reg .pred p;\n"                                                      \
               "mbarrier.try_wait.parity.acquire." SCOPE ".shared::cta.b64 p, [%1], %2;\n" \
               "selp.u32 %0, 1, 0, p;\n}"                                                \
               : "=r"(done)                                                              \
               : "r"(barrier), "r"(tile / SLOTS & 1)                                     \
               : "memory")

__device__ __forceinline__ void wait(u32 barrier, int tile) { WAIT("cta"); }
__device__ __forceinline__ void wait_for_peers(u32 barrier, int tile) { WAIT("cluster"); }

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// --- memory --------------------------------------------------------------------------------------

__device__ __forceinline__ u32 at_rank(u32 address, u32 rank) {
  u32 out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}

__device__ __forceinline__ void send(u32 to, u32 a, u32 b, u32 c, u32 d, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, int token, int atom,
                                          u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(0), "r"(token), "r"(atom),
      "r"(barrier)
      : "memory");
}

__device__ __forceinline__ float4 load_once(const float* from) {
  float4 out;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w)
               : "l"(from));
  return out;
}

__device__ __forceinline__ float load_shared(u32 from) {
  float out;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(out) : "r"(from) : "memory");
  return out;
}

__device__ __forceinline__ void store_shared(u32 to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Where 16 bytes of a row lie, as tensor cores and the loads of features swizzle them.
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// --- tensor cores --------------------------------------------------------------------------------

constexpr u64 SWIZZLE_128 = 1ull << 62;
constexpr u64 EIGHT_ROWS = u64(8 * 128 >> 4) << 32;

// An operand in rows of 128 bytes along the index that is summed.
__device__ __forceinline__ u64 by_rows(u32 address) {
  return SWIZZLE_128 | EIGHT_ROWS | (1ull << 16) | ((address & 0x3FFFF) >> 4);
}

// An operand in rows of 128 bytes across it; the next 64 columns lie an atom further.
__device__ __forceinline__ u64 by_columns(u32 address) {
  return SWIZZLE_128 | EIGHT_ROWS | (u64(X_ATOM >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The compiler must not touch the sums before this point.
template <int N>
__device__ __forceinline__ void wait_products(float (&sums)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F64(d, i) F16(d, i), F16(d, i + 16), F16(d, i + 32), F16(d, i + 48)

// z (64 experts × 32 tokens) = V (64 × 16 columns) Xᵀ, or += it
__device__ __forceinline__ void multiply_logits(float (&z)[16], u64 v, u64 x, u32 add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, 0, 0;\n}"
      : F16(z, 0)
      : "l"(v), "l"(x), "r"(add));
}

// The same with V's rows from registers.
__device__ __forceinline__ void multiply_logits(float (&z)[16], const u32 (&v)[4], u64 x, u32 add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : F16(z, 0)
      : "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "l"(x), "r"(add));
}

// sum (64 experts × 256 columns) += Uᵀ (64 × 16 tokens, from registers) X
__device__ __forceinline__ void multiply_outer(float (&sum)[128], const u32 (&u)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : F64(sum, 0), F64(sum, 64)
      : "r"(u[0]), "r"(u[1]), "r"(u[2]), "r"(u[3]), "l"(x));
}

// Of a matrix that tensor cores hold (64 experts × columns or tokens): a thread's first row, which
// it shares with three others, and its first pair of columns. It has the row eight further, too,
// and every fourth pair.
__device__ __forceinline__ int row_of(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
__device__ __forceinline__ int column_of(int thread) { return thread % 4 * 2; }

// --- weighing ------------------------------------------------------------------------------------

// Four of a token's experts. For SOFTMAX rank_one is the diagonal and left empty: to copy what is
// still being loaded would be to wait for it.
struct Four {
  float4 diagonal, rank_one;
};

__device__ __forceinline__ Four load_weights(const float* diagonal, const float* rank_one,
                                             int token, int tokens, int expert, int experts) {
  Four out = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
  if (token >= tokens || expert >= experts) return out;
  size_t at = size_t(token) * experts + expert;
  out.diagonal = weights == IDENTITY ? make_float4(1, 1, 1, 1) : load_once(diagonal + at);
  if (weights == RANK_ONE) out.rank_one = load_once(rank_one + at);
  return out;
}

// u = H z; each of 16 neighbours has four of the token's experts.
__device__ __forceinline__ void apply_weights(const Four& h, const float (&z)[4], float (&u)[4]) {
  const float d[4] = {h.diagonal.x, h.diagonal.y, h.diagonal.z, h.diagonal.w};
  const float4& q = weights == SOFTMAX ? h.diagonal : h.rank_one;
  const float a[4] = {q.x, q.y, q.z, q.w};
  float mean = a[0] * z[0] + a[1] * z[1] + a[2] * z[2] + a[3] * z[3];
#pragma unroll
  for (int lane = 1; lane < 16; lane *= 2) mean += __shfl_xor_sync(0xFFFFFFFF, mean, lane);
#pragma unroll
  for (int e = 0; e < 4; e++) u[e] = d[e] * z[e] - a[e] * mean;
}

__device__ __forceinline__ u32 packed(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// u in two bf16 terms. Of two neighbours, who have eight experts together, one gets all their first
// terms, and one all their second ones: 16 bytes.
__device__ __forceinline__ uint4 split(const float (&u)[4], bool second) {
  u32 high[2], low[2], got[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    high[k] = packed(u[2 * k], u[2 * k + 1]);
    low[k] = packed(u[2 * k] - __uint_as_float(high[k] << 16),
                    u[2 * k + 1] - __uint_as_float(high[k] & 0xFFFF0000));
    got[k] = __shfl_xor_sync(0xFFFFFFFF, second ? high[k] : low[k], 1);
  }
  return second ? make_uint4(got[0], got[1], low[0], low[1])
                : make_uint4(high[0], high[1], got[0], got[1]);
}

// Half of V as tensor cores take it from registers.
__device__ __forceinline__ void load_v(const u32* v, int width, int column, int thread,
                                       u32 (&out)[STEPS][4]) {
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int row = row_of(thread) + (j & 1) * 8;
      int at = column + k * 16 + (j >> 1) * 8 + column_of(thread);
      out[k][j] = at < width ? v[(size_t(row) * width + at) / 2] : 0;
    }
}

__device__ void weigh(u32 shared, const u32* v, const float* bias, const float* diagonal,
                      const float* rank_one, double* sums, int first, int tiles, int tokens,
                      int width, int experts, u32 rank) {
  int thread = threadIdx.x % GROUP;
  u32 held[STEPS][4];
  load_v(v, width, rank * SLICE, thread, held);
  u32 peer[RANKS];
#pragma unroll
  for (u32 r = 0; r < RANKS; r++) peer[r] = at_rank(shared, r);

  // A part of Z goes as tensor cores hold it, 16 bytes of a thread to a rank; of four rows that are
  // then read together each lies in banks of its own.
  u32 z_to = Z + rank * Z_RANK + (thread ^ (thread / 32 + (thread / 4 & 4))) * 16;
  int own = thread / 16, expert = thread % 16 * 4;
  int warp = expert / 16, upper = expert / 8 & 1, row = expert % 8;
  u32 z_from = shared + Z + (own & 1) * 4 + upper * 8;
  u32 spread = warp + (row & 4);
  u32 u_to = U + (thread & 1) * U_TERM + swizzled(rank * OWN + own, expert / 8);

  float b[4];
#pragma unroll
  for (int e = 0; e < 4; e++) b[e] = bias[expert + e];
  double total[4] = {0, 0, 0, 0};
  int token = first * TILE + rank * OWN + own;
  Four ahead = load_weights(diagonal, rank_one, token, tokens, expert, experts);

#pragma unroll 1
  for (int i = 0; i <= tiles; i++) {
    // Two sums, so that no product waits for the one before it. After the last tile they are of
    // whatever lies there, and nobody is sent them.
    float z[16], rest[16];
    u32 x = shared + X + slot_of(i) * X_BYTES;
    if (i < tiles) wait(shared + X_FULL + 8 * slot_of(i), i);
    begin_products();
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      u32 at = k / 4 * X_ATOM + k % 4 * 32;
      multiply_logits(z, held[k], by_rows(x + at), k > 0);
      multiply_logits(rest, by_rows(shared + V + k / 4 * V_ATOM + k % 4 * 32),
                      by_rows(x + HALF / ATOM * X_ATOM + at), k > 0);
    }
    end_products();

    if (i > 0) {
      int tile = i - 1;
      Four h = ahead;
      token += TILE;
      if (i < tiles) ahead = load_weights(diagonal, rank_one, token, tokens, expert, experts);
      u32 full = shared + Z_FULL + 8 * slot_of(tile);
      wait_for_peers(full, tile);
      if (thread == 0) expect(full, Z_BYTES);
      float whole[4], u[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        u32 place = (warp * 32 + (row + e) * 4 + own / 2) ^ spread;
        whole[e] = b[e];
#pragma unroll
        for (int r = 0; r < RANKS; r++)
          whole[e] += load_shared(z_from + slot_of(tile) * Z_BYTES + r * Z_RANK + place * 16);
      }
      apply_weights(h, whole, u);
      uint4 terms = split(u, thread & 1);
#pragma unroll
      for (u32 r = 0; r < RANKS; r++)
        send(peer[r] + u_to + slot_of(tile) * U_BYTES, terms.x, terms.y, terms.z, terms.w,
             peer[r] + U_FULL + 8 * slot_of(tile));
      if (HAS_BIAS) {
#pragma unroll
        for (int e = 0; e < 4; e++) total[e] += u[e];
      }
    }

    wait_products(z);
    wait_products(rest);
#pragma unroll
    for (int j = 0; j < 16; j++) z[j] += rest[j];
    if (i < tiles) {
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        send(peer[r] + z_to + slot_of(i) * Z_BYTES, __float_as_uint(z[4 * r]),
             __float_as_uint(z[4 * r + 1]), __float_as_uint(z[4 * r + 2]),
             __float_as_uint(z[4 * r + 3]), peer[r] + Z_FULL + 8 * slot_of(i));
    }
  }
  if (HAS_BIAS) {
    double* out = sums + (size_t(blockIdx.x) * OWN + own) * EXPERTS + expert;
#pragma unroll
    for (int e = 0; e < 4; e++) out[e] = total[e];
  }
}

// --- multiplying ---------------------------------------------------------------------------------

__device__ __forceinline__ void load_half(u32 shared, const TensorMap* map, int first, int i,
                                          u32 rank, int half) {
  u32 full = shared + X_FULL + 8 * slot_of(i);
  expect(full, X_BYTES / 2);
  load_tile(shared + X + slot_of(i) * X_BYTES + half * (X_BYTES / 2), map, (first + i) * TILE,
            (2 * rank + half) * (HALF / ATOM), full);
}

// 16 tokens of Uᵀ as tensor cores take it from registers.
__device__ __forceinline__ void load_u(u32 term, int step, int thread, u32 (&u)[4]) {
  int lane = thread % 32;
  u32 row = step * 16 + (lane >> 4) * 8 + (lane & 7);
  u32 from = term + swizzled(row, thread / 32 * 2 + (lane >> 3 & 1));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3])
               : "r"(from)
               : "memory");
}

// To memory, or added to what is there: no other thread writes to the same place.
__device__ __forceinline__ void put(float* to, float a, float b, bool add) {
  if (add)
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b)
                 : "memory");
  else
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
}

__device__ void multiply(u32 shared, const TensorMap* map, float* partial, int first, int tiles,
                         int width, u32 rank) {
  int half = threadIdx.x / GROUP, thread = threadIdx.x % GROUP;
  int column = rank * SLICE + half * HALF;
  float* to = partial + size_t(row_of(thread)) * width + column + column_of(thread);
  if (thread == 0)
    for (int i = 0; i < min(SLOTS, tiles); i++) load_half(shared, map, first, i, rank, half);
  float sum[128];
  // Tensor cores cut off the bits that a sum has no room for: after a stretch of tiles it goes to
  // memory. First stretches differ, so that not all warpgroups of the device do so at once.
  int stagger = (2 * (blockIdx.x / RANKS) + half) % STAGGER + 1;
  int end = min(STRETCH * stagger / STAGGER, tiles);
#pragma unroll 1
  for (int begin = 0; begin < tiles; begin = end, end = min(begin + STRETCH, tiles)) {
#pragma unroll
    for (int j = 0; j < 128; j++) sum[j] = 0;
#pragma unroll 1
    for (int i = begin; i < end; i++) {
      u32 x = shared + X + slot_of(i) * X_BYTES + half * (X_BYTES / 2);
      u32 full = shared + U_FULL + 8 * slot_of(i);
      wait(shared + X_FULL + 8 * slot_of(i), i);
      wait_for_peers(full, i);
      if (threadIdx.x == 0) expect(full, U_BYTES);
      u32 u[4][4];
#pragma unroll
      for (int k = 0; k < 4; k++)
        load_u(shared + U + slot_of(i) * U_BYTES + k % 2 * U_TERM, k / 2, thread, u[k]);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_outer(sum, u[k], by_columns(x + k / 2 * 16 * 128));
      end_products();
      wait_products(sum);
      // This warp has done with the features; all of its warpgroup have once they meet here.
      if (half)
        asm volatile("bar.sync 2, 128;" ::: "memory");
      else
        asm volatile("bar.sync 1, 128;" ::: "memory");
      if (thread == 0 && i + SLOTS < tiles) load_half(shared, map, first, i + SLOTS, rank, half);
    }
#pragma unroll
    for (int j = 0; j < 128; j += 4) {
      if (column + j * 2 >= width) break;
      put(to + j * 2, sum[j], sum[j + 1], begin > 0);
      put(to + size_t(8) * width + j * 2, sum[j + 2], sum[j + 3], begin > 0);
    }
  }
}

// --- the kernel ----------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(RANKS, 1, 1) __launch_bounds__(3 * GROUP, 1)
    single_read(const __grid_constant__ TensorMap map, const u32* v, const float* bias,
                const float* diagonal, const float* rank_one, float* partial, double* sums,
                int tokens, int width, int experts, int tiles_of_cluster) {
  extern __shared__ char memory[];
  u32 shared = (u32(__cvta_generic_to_shared(memory)) + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
  u32 rank = blockIdx.x % RANKS, cluster = blockIdx.x / RANKS;
  int first = cluster * tiles_of_cluster;
  int tiles = min(tiles_of_cluster, (tokens + TILE - 1) / TILE - first);

  for (int i = threadIdx.x; i < EXPERTS * HALF / 8; i += blockDim.x) {
    int chunk = i % 8, row = i / 8 % EXPERTS, atom = i / (8 * EXPERTS);
    int column = rank * SLICE + HALF + atom * ATOM + chunk * 8;
    uint4 part = make_uint4(0, 0, 0, 0);
    if (column < width)
      part = reinterpret_cast<const uint4*>(v)[(size_t(row) * width + column) / 8];
    store_shared(shared + V + atom * V_ATOM + swizzled(row, chunk), part);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // tensor cores read V
  if (threadIdx.x == 0) {
    for (int s = 0; s < SLOTS; s++) {
      init(shared + X_FULL + 8 * s, 2);
      init(shared + Z_FULL + 8 * s, 1);
      init(shared + U_FULL + 8 * s, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int s = 0; s < SLOTS; s++) {
      expect(shared + Z_FULL + 8 * s, Z_BYTES);
      expect(shared + U_FULL + 8 * s, U_BYTES);
    }
  }
  __syncthreads();
  cluster_barrier();

  // 65536 registers of three warpgroups: the sums take more of them than the weighing.
  if (threadIdx.x < 2 * GROUP) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
    multiply(shared, &map, partial + size_t(cluster) * EXPERTS * width, first, tiles, width, rank);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 152;");
    weigh(shared, v, bias, diagonal, rank_one, sums, first, tiles, tokens, width, experts, rank);
  }
  // No rank leaves while another may still send to it.
  __syncthreads();
  cluster_barrier();
}
