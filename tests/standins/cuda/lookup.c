/* Functions by name, and functions that UCX links to and the stand-in does not have. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "parts.h"

#define MISSING(name) \
    CUresult name(void); \
    API CUresult name(void) { \
        HOOKABLE; \
        count(unsupported, 1); \
        return CUDA_ERROR_NOT_SUPPORTED; \
    }

MISSING(cuMemAddressFree)
MISSING(cuMemAddressReserve)
MISSING(cuMemAllocManaged)
MISSING(cuMemCreate)
MISSING(cuMemExportToShareableHandle)
MISSING(cuMemGetAllocationGranularity)
MISSING(cuMemGetAllocationPropertiesFromHandle)
MISSING(cuMemImportFromShareableHandle)
MISSING(cuMemMap)
MISSING(cuMemPoolDestroy)
MISSING(cuMemPoolExportPointer)
MISSING(cuMemPoolExportToShareableHandle)
MISSING(cuMemPoolImportFromShareableHandle)
MISSING(cuMemPoolImportPointer)
MISSING(cuMemPoolSetAccess)
MISSING(cuMemRangeGetAttribute)
MISSING(cuMemRelease)
MISSING(cuMemRetainAllocationHandle)
MISSING(cuMemSetAccess)
MISSING(cuMemUnmap)

enum { FOUND = 0, NOT_FOUND = 1 };

/* A program asks for the first version of a function and gets its newest. */
API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                 int *outcome) {
    (void)version, (void)flags;
    Dl_info here;
    char newest[128];
    snprintf(newest, sizeof newest, "%s_v2", name);
    dladdr((void *)cuInit, &here);
    void *library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(library, newest);
    if (!*function) *function = dlsym(library, name);
    dlclose(library);
    if (outcome) *outcome = *function ? FOUND : NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
