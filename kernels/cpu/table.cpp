// Every kernel of the CPU device, by kernels.inc.
#include "device.h"

namespace ty {
#define TY_KERNEL_ENTRY(name) extern const cpu::Kernel name;
#include "kernels.inc"
#undef TY_KERNEL_ENTRY
} // namespace ty

#define TY_KERNEL_ENTRY(name) &ty::name,
const ty::cpu::Kernel *const ty_cpu_kernels[] = {
#include "kernels.inc"
};
const uint32_t ty_cpu_kernel_count = sizeof ty_cpu_kernels / sizeof ty_cpu_kernels[0];
