/* What the driver tells of an address, and handles of memory for other processes. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "parts.h"

static CUresult attribute(void *value, int which, const Allocation *one) {
    int is_device = one && (one->kind == DEVICE || one->kind == OPENED);
    CUdeviceptr seen = one ? (CUdeviceptr)one->seen : 0;
    switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = one ? standin_primary() : 0; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = is_device ? CU_MEMORYTYPE_DEVICE : one ? CU_MEMORYTYPE_HOST : 0;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = seen; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(CUdeviceptr *)value = is_device ? 0 : seen; break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)value = 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)value = one ? one->id : 0;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)value = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = one ? 0 : -2; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)value = is_device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = seen; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = one ? one->nbytes : 0; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)value = one != 0; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)value = 0; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)value = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void *value, int which, CUdeviceptr pointer) {
    ENTER(0);
    Allocation one;
    if (!standin_find(pointer, &one)) return CUDA_ERROR_INVALID_VALUE;
    return attribute(value, which, &one);
}

/* Unlike a single question, this is also answered for memory that the driver does not know. */
API CUresult cuPointerGetAttributes(unsigned n, int *which, void **values, CUdeviceptr pointer) {
    ENTER(0);
    Allocation one;
    int is_known = standin_find(pointer, &one);
    for (unsigned k = 0; k < n; k++) attribute(values[k], which[k], is_known ? &one : 0);
    return CUDA_SUCCESS;
}

API CUresult cuPointerSetAttribute(const void *value, int which, CUdeviceptr pointer) {
    ENTER(0);
    (void)value;
    Allocation one;
    /* Only this attribute can be set; copies here are as synchronous as it asks for. */
    if (which != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
    return standin_find(pointer, &one) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* A handle: process, descriptor, place in the file and number of the allocation, and its bytes. */
typedef struct { long long origin[4]; size_t nbytes; } Handle;

API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    ENTER(1);
    Allocation one;
    int fd;
    char *readable;
    if (value_of(refuse_ipc) == 1) return CUDA_ERROR_NOT_SUPPORTED;
    if (!standin_find(pointer, &one) || one.kind != DEVICE) return CUDA_ERROR_INVALID_VALUE;
    standin_arena(&fd, &readable);
    Handle mine = {{getpid(), fd, one.readable - readable, (long long)one.id}, one.nbytes};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &mine, sizeof mine);
    count(ipc_handles, 1);
    return CUDA_SUCCESS;
}

static Allocation *map(const Handle *theirs) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", theirs->origin[0], theirs->origin[1]);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return 0;
    Allocation *one = calloc(1, sizeof *one);
    off_t start = (off_t)theirs->origin[2];
    one->readable = mmap(0, theirs->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, start);
    one->seen = mmap(0, theirs->nbytes, PROT_NONE, MAP_SHARED, fd, start);
    close(fd);
    if (one->readable == MAP_FAILED || one->seen == MAP_FAILED) return free(one), NULL;
    one->nbytes = theirs->nbytes;
    one->kind = OPENED;
    memcpy(one->origin, theirs->origin, sizeof one->origin);
    return one;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    ENTER(1);
    (void)flags; /* peers' memory is reachable without more ado */
    Handle theirs;
    memcpy(&theirs, &handle, sizeof theirs);
    if (value_of(refuse_ipc) == 2) return CUDA_ERROR_MAP_FAILED;
    /* CUDA, too, opens no handle in the process that made it. */
    if (theirs.origin[0] == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&standin_lock);
    Allocation *one = standin_first();
    while (one && (one->kind != OPENED || memcmp(one->origin, theirs.origin, sizeof one->origin)))
        one = one->next;
    if (!one && (one = map(&theirs))) standin_add(one);
    if (one) one->n_opened++;
    pthread_mutex_unlock(&standin_lock);
    if (!one) return CUDA_ERROR_MAP_FAILED;
    count(ipc_opened, 1);
    *pointer = (CUdeviceptr)one->seen;
    return CUDA_SUCCESS;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    ENTER(1);
    standin_wait_for_all();
    pthread_mutex_lock(&standin_lock);
    Allocation *one = standin_first();
    while (one && !(one->kind == OPENED && (CUdeviceptr)one->seen == pointer)) one = one->next;
    int n_left = one ? --one->n_opened : 0;
    pthread_mutex_unlock(&standin_lock);
    if (!one) return CUDA_ERROR_INVALID_VALUE;
    if (n_left) return CUDA_SUCCESS;
    standin_remove(pointer, OPENED);
    munmap(one->readable, one->nbytes);
    munmap(one->seen, one->nbytes);
    free(one);
    return CUDA_SUCCESS;
}
