/* NVIDIA's management library without a driver: UCX links to it, and goes on when it says so. */
#define API __attribute__((visibility("default")))

enum { NVML_ERROR_UNINITIALIZED = 1, NVML_ERROR_DRIVER_NOT_LOADED = 9 };

API int nvmlInit_v2(void) { return NVML_ERROR_DRIVER_NOT_LOADED; }
API int nvmlInitWithFlags(unsigned flags) { (void)flags; return NVML_ERROR_DRIVER_NOT_LOADED; }
API const char *nvmlErrorString(int code) { (void)code; return "the driver is not loaded"; }

#define MISSING(name) API int name(void) { return NVML_ERROR_UNINITIALIZED; }

MISSING(nvmlShutdown)
MISSING(nvmlDeviceGetCount_v2)
MISSING(nvmlDeviceGetFieldValues)
MISSING(nvmlDeviceGetHandleByIndex_v2)
MISSING(nvmlDeviceGetNvLinkRemotePciInfo_v2)
MISSING(nvmlDeviceGetPciInfo_v3)
