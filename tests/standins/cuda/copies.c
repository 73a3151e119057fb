/* Copies and fills, in streams. Addresses of the host and of the device need no telling apart. */
#include "parts.h"

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    ENTER_WITH(stream);
    if (!nbytes) return CUDA_SUCCESS;
    void *target = standin_span(to, nbytes);
    const void *source = standin_span(from, nbytes);
    if (!target || !source) return CUDA_ERROR_INVALID_VALUE;
    count(copies, 1);
    count(copied_nbytes, (long long)nbytes);
    Work work = {.kind = COPY, .to = target, .from = source, .nbytes = nbytes};
    return standin_put(stream, work);
}

static CUresult copy_now(CUdeviceptr to, CUdeviceptr from, size_t nbytes) {
    CUresult status = copy(to, from, nbytes, 0);
    return status ? status : cuStreamSynchronize(0);
}

#define ADDRESS(pointer) ((CUdeviceptr)(pointer))

API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    return copy(to, from, n, stream);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream stream) {
    return copy(to, ADDRESS(from), n, stream);
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream stream) {
    return copy(ADDRESS(to), from, n, stream);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    return copy(to, from, n, stream);
}

API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy_now(to, from, n); }

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) {
    return copy_now(to, ADDRESS(from), n);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n) {
    return copy_now(ADDRESS(to), from, n);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) {
    return copy_now(to, from, n);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {
    ENTER_WITH(stream);
    void *target = standin_span(to, n);
    if (!target) return CUDA_ERROR_INVALID_VALUE;
    return standin_put(stream, (Work){.kind = FILL, .to = target, .value = value, .nbytes = n});
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t n) {
    return cuMemsetD8Async(to, value, n, 0);
}
