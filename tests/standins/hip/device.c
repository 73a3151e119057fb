/* Devices, their properties, errors, and the device of each thread.

   In strict mode, a thread has no device until it has chosen one by `hipSetDevice`: code that
   counts on device 0 fails there, as it would go wrong on the second device of a machine. */
#include "standin.h"
#include <stdio.h>

static __thread hipError_t last_error;
static __thread int device_of_thread, has_chosen;

long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

static int n_devices(void) {
    /* An empty variable counts as one that is not set. */
    const char *names[] = {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"};
    for (int i = 0; i < 3; i++) {
        const char *visible = getenv(names[i]);
        if (visible && *visible == '-') return 0;
    }
    int n = setting("STANDIN_HIP_DEVICES", 2);
    return n < MOST_DEVICES ? n : MOST_DEVICES;
}

hipError_t noted(hipError_t error) {
    if (error && error != hipErrorNotReady) last_error = error;
    return error;
}

int current_device(void) { return device_of_thread; }

hipError_t usable(void) {
    if (!n_devices()) return hipErrorNoDevice;
    if (!has_chosen && setting("STANDIN_HIP_STRICT", 0)) return hipErrorInvalidContext;
    begin();
    int lost = is_lost();
    end();
    return lost ? hipErrorLaunchFailure : hipSuccess;
}

hipError_t hipInit(unsigned flags) {
    (void)flags;
    return noted(n_devices() ? hipSuccess : hipErrorNoDevice);
}

hipError_t hipGetDeviceCount(int *n) {
    *n = n_devices();
    return noted(*n ? hipSuccess : hipErrorNoDevice);
}

hipError_t hipGetDevice(int *device) { *device = device_of_thread; return hipSuccess; }

hipError_t hipSetDevice(int device) {
    if (device < 0 || device >= n_devices()) return noted(hipErrorInvalidDevice);
    device_of_thread = device;
    has_chosen = 1;
    return hipSuccess;
}

hipError_t hipDriverGetVersion(int *version) { *version = 70051831; return hipSuccess; }
hipError_t hipRuntimeGetVersion(int *version) { *version = 70051831; return hipSuccess; }
hipError_t hipGetLastError(void) {
    hipError_t error = last_error;
    last_error = hipSuccess;
    return error;
}
hipError_t hipPeekAtLastError(void) { return last_error; }

static const struct { hipError_t error; const char *name, *text; } errors[] = {
    {hipSuccess, "hipSuccess", "no error"},
    {hipErrorInvalidValue, "hipErrorInvalidValue", "invalid argument"},
    {hipErrorOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
    {hipErrorInvalidMemcpyDirection, "hipErrorInvalidMemcpyDirection", "invalid copy direction"},
    {hipErrorNoDevice, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {hipErrorInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
    {hipErrorInvalidImage, "hipErrorInvalidImage", "device kernel image is invalid"},
    {hipErrorInvalidContext, "hipErrorInvalidContext", "the thread has chosen no device"},
    {hipErrorNoBinaryForGpu, "hipErrorNoBinaryForGpu", "no kernel image for this device"},
    {hipErrorInvalidHandle, "hipErrorInvalidHandle", "invalid resource handle"},
    {hipErrorNotFound, "hipErrorNotFound", "named symbol not found"},
    {hipErrorNotReady, "hipErrorNotReady", "device not ready"},
    {hipErrorLaunchFailure, "hipErrorLaunchFailure", "unspecified launch failure"},
    {hipErrorNotSupported, "hipErrorNotSupported", "operation not supported by the stand-in"},
};

const char *hipGetErrorName(hipError_t error) {
    for (size_t n = 0; n < sizeof errors / sizeof *errors; n++)
        if (errors[n].error == error) return errors[n].name;
    return "hipErrorUnknown";
}

const char *hipGetErrorString(hipError_t error) {
    for (size_t n = 0; n < sizeof errors / sizeof *errors; n++)
        if (errors[n].error == error) return errors[n].text;
    return "unknown error";
}

/* The documented head of `hipDeviceProp_tR0600`. */
struct properties {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t total_nbytes, shared_nbytes_per_block;
    int registers_per_block, warp_size;
    size_t pitch;
    int threads_per_block, block_sizes[3], grid_sizes[3], clock_khz;
    size_t constant_nbytes;
    int major, minor;
    size_t texture[2];
    int overlaps, n_processors;
};

enum { PROPERTIES_NBYTES = 1472, WARP_SIZE = 64, MOST_THREADS = 1024, SHARED_NBYTES = 64 << 10 };

hipError_t hipGetDevicePropertiesR0600(void *properties, int device) {
    if (device < 0 || device >= n_devices()) return noted(hipErrorInvalidDevice);
    struct properties found = {
        .name = "Stand-in for an AMD GPU", .total_nbytes = setting("STANDIN_HIP_MEMORY", 1L << 30),
        .shared_nbytes_per_block = SHARED_NBYTES, .registers_per_block = 65536,
        .warp_size = WARP_SIZE, .threads_per_block = MOST_THREADS,
        .block_sizes = {1024, 1024, 1024}, .grid_sizes = {2147483647, 65536, 65536},
        .clock_khz = 1000000, .constant_nbytes = 65536, .major = 9, .minor = 0, .overlaps = 1,
        .n_processors = 2,
    };
    memset(properties, 0, PROPERTIES_NBYTES);
    memcpy(properties, &found, sizeof found);
    return hipSuccess;
}

/* CuPy asks for the two numbers of the architecture, and for support of features. */
hipError_t hipDeviceGetAttribute(int *value, int attribute, int device) {
    if (device < 0 || device >= n_devices()) return noted(hipErrorInvalidDevice);
    enum { MAJOR = 23, MINOR = 61 };
    *value = attribute == MAJOR ? 9 : attribute == MINOR ? 0 : 1;
    return hipSuccess;
}

hipError_t hipDeviceGetPCIBusId(char *text, int nbytes, int device) {
    snprintf(text, nbytes, "0000:%02x:00.0", device + 1);
    return hipSuccess;
}

hipError_t hipDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return hipSuccess;
}
