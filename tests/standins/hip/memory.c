/* Device and pinned memory, as memory of the host.

   Device memory is mapped twice. Copies use the one mapping. The other, at the address that
   programs see, can be used only while a kernel runs. Host code that takes it for the host's
   crashes. */
#include "standin.h"
#include <sys/mman.h>
#include <unistd.h>

#define GRANULE 4096

struct allocation {
    char *seen, *real;
    size_t nbytes;
    enum kind kind;
    int device;
    struct allocation *next;
};

static struct allocation *allocations;
static size_t used_nbytes[MOST_DEVICES];
static int n_open;

static size_t total_nbytes(void) { return (size_t)setting("STANDIN_HIP_MEMORY", 1L << 30); }

/* A test may lower the limit below what is in use. */
static size_t free_on(int device) {
    size_t total = total_nbytes(), used = used_nbytes[device];
    return used < total ? total - used : 0;
}

struct found look_up(const void *pointer) {
    struct found found = {PAGEABLE, -2, (char *)pointer, SIZE_MAX};
    const char *at = pointer;
    begin();
    for (struct allocation *a = allocations; a; a = a->next)
        if (at >= a->seen && at < a->seen + a->nbytes) {
            size_t offset = at - a->seen;
            found = (struct found){a->kind, a->device, a->real + offset, a->nbytes - offset};
            break;
        }
    end();
    return found;
}

static void protect_all(int protection) {
    for (struct allocation *a = allocations; a; a = a->next)
        if (a->kind == DEVICE) mprotect(a->seen, a->nbytes, protection);
}

void open_device_memory(void) {
    begin();
    if (!n_open++) protect_all(PROT_READ | PROT_WRITE);
    end();
}

void close_device_memory(void) {
    begin();
    if (!--n_open) protect_all(PROT_NONE);
    end();
}

static int map_twice(struct allocation *a) {
    int file = memfd_create("device memory", MFD_CLOEXEC);
    if (file < 0) return 0;
    if (ftruncate(file, a->nbytes)) { close(file); return 0; }
    int seen = n_open ? PROT_READ | PROT_WRITE : PROT_NONE;
    a->real = mmap(0, a->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    a->seen = mmap(0, a->nbytes, seen, MAP_SHARED, file, 0);
    close(file);
    return a->real != MAP_FAILED && a->seen != MAP_FAILED;
}

hipError_t hipMalloc(void **pointer, size_t nbytes) {
    NEED_DEVICE;
    if (!nbytes) { *pointer = 0; return hipSuccess; }
    if (nbytes > SIZE_MAX - GRANULE) return noted(hipErrorOutOfMemory);
    nbytes = (nbytes + GRANULE - 1) & ~(size_t)(GRANULE - 1);
    int device = current_device();
    count(ALLOCATIONS);
    struct allocation *a = calloc(1, sizeof *a);
    *a = (struct allocation){.nbytes = nbytes, .kind = DEVICE, .device = device};
    begin();
    if (allocation_fails() || nbytes > free_on(device) || !map_twice(a)) {
        end();
        free(a);
        return noted(hipErrorOutOfMemory);
    }
    used_nbytes[device] += nbytes;
    a->next = allocations;
    allocations = a;
    end();
    memset(a->real, 0xA5, nbytes); /* nobody may count on zeros */
    *pointer = a->seen;
    return hipSuccess;
}

hipError_t hipHostMalloc(void **pointer, size_t nbytes, unsigned flags) {
    (void)flags;
    NEED_DEVICE;
    struct allocation *a = calloc(1, sizeof *a);
    if (posix_memalign((void **)&a->real, GRANULE, nbytes)) {
        free(a);
        return noted(hipErrorOutOfMemory);
    }
    *a = (struct allocation){a->real, a->real, nbytes, PINNED, current_device(), 0};
    begin();
    a->next = allocations;
    allocations = a;
    end();
    *pointer = a->real;
    return hipSuccess;
}

/* Unlinks what begins at this address; NULL if nothing of this kind does. With the lock held. */
static struct allocation *removed(void *pointer, enum kind kind) {
    for (struct allocation **link = &allocations; *link; link = &(*link)->next)
        if ((*link)->seen == pointer && (*link)->kind == kind) {
            struct allocation *a = *link;
            *link = a->next;
            if (kind == DEVICE) used_nbytes[a->device] -= a->nbytes;
            return a;
        }
    return NULL;
}

/* Waits for the device, as HIP's does: queued work may use the memory. */
static hipError_t freed(void *pointer, enum kind kind) {
    if (!pointer) return hipSuccess;
    drain_device();
    begin();
    struct allocation *a = removed(pointer, kind);
    end();
    if (!a) return noted(hipErrorInvalidValue);
    if (kind == DEVICE) {
        munmap(a->real, a->nbytes);
        munmap(a->seen, a->nbytes);
    } else {
        free(a->real);
    }
    free(a);
    return hipSuccess;
}

hipError_t hipFree(void *pointer) { NEED_DEVICE; return freed(pointer, DEVICE); }
hipError_t hipHostFree(void *pointer) { return freed(pointer, PINNED); }

hipError_t hipMemGetInfo(size_t *free_nbytes, size_t *total) {
    NEED_DEVICE;
    begin();
    *total = total_nbytes();
    *free_nbytes = free_on(current_device());
    end();
    return hipSuccess;
}

struct attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    int is_managed;
    unsigned flags;
};

hipError_t hipPointerGetAttributes(struct attributes *attributes, const void *pointer) {
    NEED_DEVICE;
    static const int type[] = {[PAGEABLE] = 0, [PINNED] = 1, [DEVICE] = 2};
    if (!pointer) return noted(hipErrorInvalidValue);
    struct found found = look_up(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = type[found.kind];
    attributes->device = found.device;
    if (found.kind != PAGEABLE) attributes->device_pointer = (void *)pointer;
    if (found.kind == PINNED) attributes->host_pointer = (void *)pointer;
    return hipSuccess;
}
