/* The device, and contexts: each thread has a stack of them, and the uppermost one is current. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "parts.h"

enum { MOST_CONTEXTS = 64 };

struct CUctx_st { int unused; };
static struct CUctx_st primary;
static __thread CUcontext stack[MOST_CONTEXTS];
static __thread int depth;
/* Whether the lowest one was set, and not pushed. */
static __thread int is_set;
static int is_initialized;

CUcontext standin_primary(void) { return &primary; }

/* Whether the fault of a missing context is on for this thread; it can still push one. */
static int is_without(void) {
    long long which = value_of(no_context_in);
    int thread = which ? standin_thread() : 0;
    return which && (which == thread || (which < 0 && thread != getpid()));
}

static CUcontext current(void) {
    if (!depth || (depth == 1 && is_set && is_without())) return 0;
    return stack[depth - 1];
}

CUresult standin_refusal(int needs_context) {
    if (value_of(lost)) return (CUresult)value_of(lost);
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (!needs_context || current()) return CUDA_SUCCESS;
    count(refused_without_context, 1);
    return CUDA_ERROR_INVALID_CONTEXT;
}

/* A forked child cannot use its parent's device. */
static void forget_in_child(void) { is_initialized = 0; }

API CUresult cuInit(unsigned flags) {
    static int is_watched;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (visible && (!*visible || *visible == '-')) return CUDA_ERROR_NO_DEVICE;
    if (value_of(lost)) return (CUresult)value_of(lost);
    pthread_mutex_lock(&standin_lock);
    if (!is_watched) pthread_atfork(0, 0, forget_in_child);
    is_watched = is_initialized = 1;
    pthread_mutex_unlock(&standin_lock);
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }

API CUresult cuDeviceGetCount(int *n) { ENTER(0); *n = 1; return CUDA_SUCCESS; }

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(0);
    if (ordinal) return CUDA_ERROR_INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "Stand-in in host memory");
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    *nbytes = (size_t)value_of(total_nbytes);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    memset(uuid, 0x42, sizeof *uuid);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, (size_t)length, "0000:07:00.0");
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 3; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = 7; break;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
    default: *value = 0; /* the device cannot do it */
    }
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    count(retained, 1);
    *context = &primary;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    if (!value_of(retained)) return CUDA_ERROR_INVALID_CONTEXT;
    count(retained, -1);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *is_active = value_of(retained) > 0;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(0);
    *context = current();
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(0);
    if (!depth) depth = is_set = 1;
    stack[depth - 1] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(0);
    if (!context || depth == MOST_CONTEXTS) return CUDA_ERROR_INVALID_VALUE;
    if (!depth) is_set = 0;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER(0);
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device) { ENTER(1); *device = 0; return CUDA_SUCCESS; }

API CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
    ENTER(0);
    if (!context && !current()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *id = 1;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(1);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void) { ENTER(1); standin_wait_for_all(); return CUDA_SUCCESS; }
