/* Memory of the device and page-locked memory of the host.

   The device's memory is one file in memory, mapped twice. Where programs see it nobody may touch
   it, so host code that takes it for the host's crashes. Copies and kernels use the other one. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "parts.h"

/* A multiple of what CUDA promises (256), and what the other processes can map (a page). */
enum { ALIGNMENT = 4096 };

/* Sorted by address. */
static Allocation *all;
static unsigned long long n_ids;

/* Device memory: the descriptor of its file, and both mappings. */
static int arena_fd = -1;
static char *arena_seen, *arena_readable;
static size_t arena_nbytes;

static int is_device(const Allocation *one) { return one->kind == DEVICE || one->kind == OPENED; }

static Allocation *holding(uintptr_t address) {
    Allocation *one = all;
    while (one && (address < (uintptr_t)one->seen || address >= (uintptr_t)one->seen + one->nbytes))
        one = one->next;
    return one;
}

int standin_find(uintptr_t address, Allocation *found) {
    pthread_mutex_lock(&standin_lock);
    Allocation *one = holding(address);
    if (one) *found = *one;
    pthread_mutex_unlock(&standin_lock);
    return one != 0;
}

void standin_add(Allocation *allocation) {
    Allocation **place = &all;
    while (*place && (*place)->seen < allocation->seen) place = &(*place)->next;
    allocation->next = *place;
    allocation->id = ++n_ids;
    *place = allocation;
}

Allocation *standin_remove(uintptr_t address, int kind) {
    pthread_mutex_lock(&standin_lock);
    Allocation **place = &all, *found = 0;
    while (*place && (uintptr_t)(*place)->seen != address) place = &(*place)->next;
    if (*place && (int)(*place)->kind == kind) {
        found = *place;
        *place = found->next;
        /* The system gets the pages back before another allocation can have them. */
        if (kind == DEVICE)
            fallocate(arena_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                      found->readable - arena_readable, (off_t)found->nbytes);
    }
    pthread_mutex_unlock(&standin_lock);
    return found;
}

Allocation *standin_first(void) { return all; }

void standin_arena(int *fd, char **readable) { *fd = arena_fd; *readable = arena_readable; }

/* Whether an address is one that programs see as the device's, allocated or not. */
static int is_in_arena(uintptr_t address) {
    return arena_seen && address >= (uintptr_t)arena_seen
        && address - (uintptr_t)arena_seen < arena_nbytes;
}

void *standin_span(uintptr_t address, size_t nbytes) {
    Allocation one;
    if (!standin_find(address, &one)) return is_in_arena(address) ? 0 : (void *)address;
    size_t start = address - (uintptr_t)one.seen;
    if (is_device(&one) && nbytes > one.nbytes - start) return 0;
    return one.readable + start;
}

API void *standin_readable(CUdeviceptr pointer) { return standin_span(pointer, 0); }

static int open_arena(void) {
    size_t nbytes = ((size_t)value_of(total_nbytes) + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    int fd = memfd_create("standin-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)nbytes)) return -1;
    arena_readable = mmap(0, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    arena_seen = mmap(0, nbytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (arena_readable == MAP_FAILED || arena_seen == MAP_FAILED) return -1;
    arena_nbytes = nbytes;
    arena_fd = fd;
    return 0;
}

/* The first gap that is large enough, or 0. Holding the lock. */
static char *gap(size_t nbytes) {
    char *start = arena_seen;
    for (Allocation *one = all; one; one = one->next) {
        if (one->kind != DEVICE) continue;
        if ((size_t)(one->seen - start) >= nbytes) return start;
        start = one->seen + one->nbytes;
    }
    return (size_t)(arena_seen + arena_nbytes - start) >= nbytes ? start : 0;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t nbytes) {
    ENTER(1);
    if (!pointer || !nbytes) return CUDA_ERROR_INVALID_VALUE;
    if (standin_strikes(fail_allocation)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (nbytes > (size_t)value_of(total_nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    nbytes = (nbytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    Allocation *one = calloc(1, sizeof *one);
    pthread_mutex_lock(&standin_lock);
    int is_open = arena_fd >= 0 || !open_arena();
    one->seen = is_open ? gap(nbytes) : 0;
    if (one->seen) {
        one->readable = arena_readable + (one->seen - arena_seen);
        one->nbytes = nbytes;
        one->kind = DEVICE;
        standin_add(one);
    }
    pthread_mutex_unlock(&standin_lock);
    if (!one->seen) return free(one), CUDA_ERROR_OUT_OF_MEMORY;
    memset(one->readable, 0xA5, nbytes); /* like memory that another program has left */
    count(allocations, 1);
    count(used_nbytes, (long long)nbytes);
    *pointer = (CUdeviceptr)one->seen;
    return CUDA_SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTER(1);
    if (!pointer) return CUDA_SUCCESS;
    standin_wait_for_all(); /* as CUDA does */
    Allocation *one = standin_remove(pointer, DEVICE);
    if (!one) return CUDA_ERROR_INVALID_VALUE;
    count(used_nbytes, -(long long)one->nbytes);
    free(one);
    return CUDA_SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t *n_free, size_t *n_total) {
    ENTER(1);
    *n_total = (size_t)value_of(total_nbytes);
    *n_free = *n_total - (size_t)value_of(used_nbytes);
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr pointer) {
    ENTER(0);
    Allocation one;
    if (!standin_find(pointer, &one) || !is_device(&one)) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = (CUdeviceptr)one.seen;
    if (nbytes) *nbytes = one.nbytes;
    return CUDA_SUCCESS;
}

static void add_host(void *pointer, size_t nbytes, int kind) {
    Allocation *one = calloc(1, sizeof *one);
    one->seen = one->readable = pointer;
    one->nbytes = nbytes;
    one->kind = kind;
    pthread_mutex_lock(&standin_lock);
    standin_add(one);
    pthread_mutex_unlock(&standin_lock);
}

API CUresult cuMemHostAlloc(void **pointer, size_t nbytes, unsigned flags) {
    ENTER(1);
    (void)flags; /* portable, mapped, write-combined: all the same here */
    if (!nbytes) return CUDA_ERROR_INVALID_VALUE;
    if (posix_memalign(pointer, ALIGNMENT, nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    add_host(*pointer, nbytes, HOST);
    return CUDA_SUCCESS;
}

API CUresult cuMemFreeHost(void *pointer) {
    ENTER(1);
    standin_wait_for_all();
    Allocation *one = standin_remove((uintptr_t)pointer, HOST);
    if (!one) return CUDA_ERROR_INVALID_VALUE;
    free(one->readable);
    free(one);
    return CUDA_SUCCESS;
}

API CUresult cuMemHostRegister_v2(void *pointer, size_t nbytes, unsigned flags) {
    ENTER(1);
    (void)flags;
    Allocation one;
    if (!pointer || !nbytes) return CUDA_ERROR_INVALID_VALUE;
    if (standin_find((uintptr_t)pointer, &one)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    add_host(pointer, nbytes, REGISTERED);
    return CUDA_SUCCESS;
}

API CUresult cuMemHostUnregister(void *pointer) {
    ENTER(1);
    Allocation *one = standin_remove((uintptr_t)pointer, REGISTERED);
    if (!one) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    free(one);
    return CUDA_SUCCESS;
}
