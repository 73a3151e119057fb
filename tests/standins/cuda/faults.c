/* Counters, settings and faults that tests read and set. */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "parts.h"

#define AS_TEXT(name) #name,
static const char *const names[] = {COUNTERS(AS_TEXT) SETTINGS(AS_TEXT)};

pthread_mutex_t standin_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t standin_changed = PTHREAD_COND_INITIALIZER;
atomic_llong standin_values[n_values] = {[total_nbytes] = 1LL << 30};

static int number_of(const char *name) {
    for (int n = 0; n < n_values; n++) if (!strcmp(names[n], name)) return n;
    return -1;
}

API long long standin_get(const char *name) {
    int which = number_of(name);
    return which < 0 ? -1 : value_of(which);
}

API int standin_set(const char *name, long long value) {
    int which = number_of(name);
    if (which < 0) return -1;
    pthread_mutex_lock(&standin_lock);
    standin_values[which] = value;
    pthread_cond_broadcast(&standin_changed);
    pthread_mutex_unlock(&standin_lock);
    return 0;
}

API int standin_thread(void) { return (int)syscall(SYS_gettid); }

int standin_strikes(int which) {
    long long left = value_of(which);
    if (left < 0) return 1;
    while (left > 0 && !atomic_compare_exchange_weak(&standin_values[which], &left, left - 1));
    return left == 1;
}

__attribute__((constructor)) static void read_environment(void) {
    for (int n = total_nbytes; n < n_values; n++) {
        char name[64];
        int length = snprintf(name, sizeof name, "STANDIN_CUDA_%s", names[n]);
        for (int k = 0; k < length; k++) name[k] = (char)toupper(name[k]);
        const char *text = getenv(name);
        if (text) standin_values[n] = strtoll(text, 0, 0);
    }
}

/* Names of errors, as far as the stand-in returns them. */
static const struct { CUresult code; const char *name; } errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
};

API CUresult cuGetErrorName(CUresult code, const char **name) {
    for (size_t n = 0; n < sizeof errors / sizeof *errors; n++)
        if (errors[n].code == code) return *name = errors[n].name, CUDA_SUCCESS;
    *name = 0;
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult code, const char **text) {
    return cuGetErrorName(code, text);
}
