// Bench-only rival: an int8 x int8 -> int32 -> bf16 GEMM assembled from NVIDIA's CUTLASS 3 collectives (sm_90a), with the
// per-token and per-channel scales applied in the epilogue. What `skuda bench --cutlass` compares with, and nothing else.
//
//   D[m,n] = bf16( (sa[m] * sw[n]) * float(sum_k A[m,k] * W[n,k]) ),   A [M,K] and W [N,K] row-major, D [M,N] row-major
//
// One shared object holds one configuration, chosen by macros (see build.sh):
//   RIVAL_M, RIVAL_N, RIVAL_K   tile          RIVAL_CM, RIVAL_CN   cluster
//   RIVAL_KERNEL  0 plain warp-specialized (one tile a block), 1 pingpong, 2 cooperative, 3 cooperative with the stream-K
//                 scheduler, whose workspace the library clears in every run
//   RIVAL_SWAP    1 computes D^T = W A^T, so that few tokens fill the instruction's narrow side
#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

#ifndef RIVAL_CM
#define RIVAL_CM 1
#endif
#ifndef RIVAL_CN
#define RIVAL_CN 1
#endif
#ifndef RIVAL_KERNEL
#define RIVAL_KERNEL 1
#endif
#ifndef RIVAL_SWAP
#define RIVAL_SWAP 0
#endif
#ifndef RIVAL_NAME
#define RIVAL_NAME "unnamed"
#endif

namespace {

using cute::Int;
using Tile = cute::Shape<Int<RIVAL_M>, Int<RIVAL_N>, Int<RIVAL_K>>;
using Cluster = cute::Shape<Int<RIVAL_CM>, Int<RIVAL_CN>, Int<1>>;

#if RIVAL_KERNEL == 0
using MainSchedule = cutlass::gemm::KernelTmaWarpSpecialized;
using StoreSchedule = cutlass::epilogue::TmaWarpSpecialized;
#elif RIVAL_KERNEL == 1
using MainSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using StoreSchedule = cutlass::epilogue::TmaWarpSpecialized;
#else
using MainSchedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using StoreSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
#endif

#if RIVAL_KERNEL == 3
using Scheduler = cutlass::gemm::StreamKScheduler;
#elif RIVAL_KERNEL == 0
using Scheduler = void;
#else
using Scheduler = cutlass::gemm::PersistentScheduler;
#endif

// Swapped, the product is D^T: its rows are the channels and D is column-major.
#if RIVAL_SWAP
using StoreLayout = cutlass::layout::ColumnMajor;
#else
using StoreLayout = cutlass::layout::RowMajor;
#endif

namespace fusion = cutlass::epilogue::fusion;
constexpr auto nearest = cutlass::FloatRoundStyle::round_to_nearest;

// The rounding order of the golden model: RN_bf16( RN_f32( RN_f32(sa * sw) * RN_f32(acc) ) ).
using AlongRows = fusion::Sm90ColBroadcast<0, Tile, float, float, cute::Stride<cute::_1, cute::_0, cute::_0>>;
using AlongColumns = fusion::Sm90RowBroadcast<0, Tile, float, float, cute::Stride<cute::_0, cute::_1, cute::_0>>;
using Scale = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, float, float, nearest>, AlongRows, AlongColumns>;
using Dequantize =
    fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, cutlass::bfloat16_t, float, nearest>, Scale, fusion::Sm90AccFetch>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    int32_t, float, void, StoreLayout, 8, cutlass::bfloat16_t, StoreLayout, 8, StoreSchedule, Dequantize>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, cutlass::layout::RowMajor, 16, int8_t,
    cutlass::layout::ColumnMajor, 16, int32_t, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    MainSchedule>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue, Scheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

struct Choice {
  int swizzle = 1;  // tiles of a raster band
  int raster = 0;   // 0 the library's rule, 1 along M, 2 along N (of the computed product)
  int split = 0;    // stream-K objects: 0 the library's rule, 1 stream-K, 2 data-parallel, s > 2: split-K by s - 1
};
Choice choice;

// Read once per process, outside any capture: the caller warms up before capturing.
cutlass::KernelHardwareInfo const& hardware() {
  static cutlass::KernelHardwareInfo const info = [] {
    cutlass::KernelHardwareInfo h;
    cudaGetDevice(&h.device_id);
    cudaDeviceGetAttribute(&h.sm_count, cudaDevAttrMultiProcessorCount, h.device_id);
    auto const* entry = reinterpret_cast<void const*>(cutlass::device_kernel<Kernel>);
    cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {RIVAL_CM, RIVAL_CN, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(RIVAL_CM, RIVAL_CN, 1);
    config.blockDim = dim3(Kernel::MaxThreadsPerBlock, 1, 1);
    config.dynamicSmemBytes = Kernel::SharedStorageSize;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int active = 0;
    if (cudaOccupancyMaxActiveClusters(&active, entry, &config) == cudaSuccess) h.max_active_clusters = active;
    cudaGetLastError();
    return h;
  }();
  return info;
}

typename Gemm::Arguments pack(void const* a, void const* w, float const* sa, float const* sw, void* d, int m, int n, int k) {
  auto const* left = static_cast<int8_t const*>(RIVAL_SWAP ? w : a);
  auto const* right = static_cast<int8_t const*>(RIVAL_SWAP ? a : w);
  int const rows = RIVAL_SWAP ? n : m;
  int const columns = RIVAL_SWAP ? m : n;
  auto const d_stride = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, cute::make_shape(rows, columns, 1));
  typename Gemm::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  args.problem_shape = {rows, columns, k, 1};
  args.mainloop.ptr_A = left;
  args.mainloop.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, cute::make_shape(rows, k, 1));
  args.mainloop.ptr_B = right;
  args.mainloop.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, cute::make_shape(columns, k, 1));
  args.epilogue.thread = {
      {{RIVAL_SWAP ? sw : sa, 0.0f, {}}, {RIVAL_SWAP ? sa : sw, 0.0f, {}}, {}},  // scale = along rows * along columns
      {},                                                                        // the accumulator
      {}};
  args.epilogue.ptr_C = nullptr;
  args.epilogue.dC = {};
  args.epilogue.ptr_D = static_cast<cutlass::bfloat16_t*>(d);
  args.epilogue.dD = d_stride;
  args.hw_info = hardware();
#if RIVAL_KERNEL != 0
  using Options = decltype(args.scheduler);
  args.scheduler.max_swizzle_size = choice.swizzle;
  using Raster = decltype(args.scheduler.raster_order);
  args.scheduler.raster_order = choice.raster == 1 ? Raster::AlongM : choice.raster == 2 ? Raster::AlongN : Raster::Heuristic;
#if RIVAL_KERNEL == 3
  using Mode = decltype(args.scheduler.decomposition_mode);
  args.scheduler.decomposition_mode = choice.split == 0   ? Mode::Heuristic
                                      : choice.split == 1 ? Mode::StreamK
                                      : choice.split == 2 ? Mode::DataParallel
                                                          : Mode::SplitK;
  if (choice.split > 2) args.scheduler.splits = choice.split - 1;
#endif
#endif
  return args;
}

bool refused(int m, int n, int k) { return m <= 0 || n <= 0 || k <= 0 || k % 16 != 0 || n % 8 != 0; }

}  // namespace

#define RIVAL_EXPORT extern "C" __attribute__((visibility("default")))

RIVAL_EXPORT char const* name() { return RIVAL_NAME; }

// Scheduler options of later calls; any thread's calls see them.
RIVAL_EXPORT void tune(int swizzle, int raster, int split) { choice = {swizzle < 1 ? 1 : swizzle, raster, split}; }

RIVAL_EXPORT void facts(int* sm_count, int* active_clusters, int* stages, int* shared_bytes) {
  *sm_count = hardware().sm_count;
  *active_clusters = hardware().max_active_clusters;
  *stages = Mainloop::DispatchPolicy::Stages;
  *shared_bytes = Kernel::SharedStorageSize;
}

RIVAL_EXPORT std::size_t workspace(int m, int n, int k) {
  if (refused(m, n, k)) return 0;
  return Gemm::get_workspace_size(pack(nullptr, nullptr, nullptr, nullptr, nullptr, m, n, k));
}

// 0, or: 1 shape not taken, 2 a pointer is not 16-byte aligned, 3 the library says no, 4 workspace too small,
// 100 + the library's status where the launch failed. Nothing is allocated and nothing waits.
RIVAL_EXPORT int run(void const* a, void const* w, float const* sa, float const* sw, void* d, int m, int n, int k, void* space,
                     std::size_t space_bytes, void* stream) {
  if (refused(m, n, k)) return 1;
  auto const bits = reinterpret_cast<std::uintptr_t>(a) | reinterpret_cast<std::uintptr_t>(w) | reinterpret_cast<std::uintptr_t>(d);
  if (bits % 16 != 0) return 2;
  auto const args = pack(a, w, sa, sw, d, m, n, k);
  if (Gemm::can_implement(args) != cutlass::Status::kSuccess) return 3;
  if (Gemm::get_workspace_size(args) > space_bytes) return 4;
  Gemm gemm;
  auto status = gemm.initialize(args, space, static_cast<cudaStream_t>(stream));
  if (status == cutlass::Status::kSuccess) status = gemm.run(static_cast<cudaStream_t>(stream));
  return status == cutlass::Status::kSuccess ? 0 : 100 + static_cast<int>(status);
}
