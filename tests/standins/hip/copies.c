/* Copies and fills.

   A copy from pageable memory takes the bytes at once, and one to pageable memory is done on
   return. All others return before they are done. */
#include "standin.h"
#include <unistd.h>

enum direction { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT };

struct copy { char *to; const char *from; char *staging; size_t nbytes; };

static void run_copy(void *argument) {
    struct copy *copy = argument;
    long delay_us = setting("STANDIN_HIP_COPY_US", 0);
    if (delay_us) usleep(delay_us);
    struct timespec began = {0};
    begin();
    while (copies_are_held() && !is_lost()) wait_held(&began);
    int lost = is_lost();
    end();
    if (!lost) memmove(copy->to, copy->from, copy->nbytes);
    free(copy->staging);
    free(copy);
}

static int fits(enum direction kind, struct found to, struct found from) {
    int into_device = to.kind == DEVICE, out_of_device = from.kind == DEVICE;
    switch (kind) {
    case HOST_TO_HOST: return !into_device && !out_of_device;
    case HOST_TO_DEVICE: return into_device && !out_of_device;
    case DEVICE_TO_HOST: return !into_device && out_of_device;
    case DEVICE_TO_DEVICE: return into_device && out_of_device;
    default: return 1;
    }
}

static void count_copy(struct found to, struct found from, hipStream_t stream) {
    if (is_default(stream)) count(DEFAULT_COPIES);
    if (to.kind == DEVICE) count(from.kind == DEVICE ? ON_DEVICE : TO_DEVICE);
    else if (from.kind == DEVICE) count(TO_HOST);
}

static hipError_t copied(void *target, const void *source, size_t nbytes, enum direction kind,
                         hipStream_t stream, int must_be_done) {
    NEED_DEVICE;
    if (!nbytes) return hipSuccess;
    struct found to = look_up(target), from = look_up(source);
    if (!fits(kind, to, from)) return noted(hipErrorInvalidMemcpyDirection);
    if (nbytes > to.left_nbytes || nbytes > from.left_nbytes) return noted(hipErrorInvalidValue);
    count_copy(to, from, stream);
    struct copy *copy = malloc(sizeof *copy);
    *copy = (struct copy){to.real, from.real, NULL, nbytes};
    if (from.kind == PAGEABLE) {
        copy->from = copy->staging = malloc(nbytes);
        memcpy(copy->staging, source, nbytes);
    }
    hipError_t error = put(stream, run_copy, copy);
    if (error) {
        free(copy->staging);
        free(copy);
    } else if (must_be_done || to.kind == PAGEABLE) {
        error = drain(stream);
    }
    return noted(error);
}

hipError_t hipMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, hipStream_t stream) {
    return copied(to, from, nbytes, kind, stream, 0);
}

hipError_t hipMemcpy(void *to, const void *from, size_t nbytes, int kind) {
    return copied(to, from, nbytes, kind, NULL, kind != DEVICE_TO_DEVICE);
}

struct fill { char *to; int value; size_t nbytes; };

static void run_fill(void *argument) {
    struct fill *fill = argument;
    memset(fill->to, fill->value, fill->nbytes);
    free(fill);
}

hipError_t hipMemsetAsync(void *target, int value, size_t nbytes, hipStream_t stream) {
    NEED_DEVICE;
    struct found to = look_up(target);
    if (to.kind == PAGEABLE || nbytes > to.left_nbytes) return noted(hipErrorInvalidValue);
    struct fill *fill = malloc(sizeof *fill);
    *fill = (struct fill){to.real, value, nbytes};
    hipError_t error = put(stream, run_fill, fill);
    if (error) free(fill);
    return noted(error);
}
hipError_t hipMemset(void *to, int value, size_t nbytes) {
    return hipMemsetAsync(to, value, nbytes, NULL);
}
