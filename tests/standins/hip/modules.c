/* Modules are shared objects of this processor, made by compiler.c; kernels are their functions. */
#include "standin.h"
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <unistd.h>

/* What a kernel's own `pack_NAME` returns: a copy of the arguments, and how to call it. */
struct packed { void (*body)(void *), (*destroy)(void *); };
typedef struct packed *(*packer)(void **arguments);

static size_t image_nbytes(const void *image) {
    const Elf64_Ehdr *head = image;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_machine == EM_AMDGPU) return 0;
    return head->e_shoff + (size_t)head->e_shentsize * head->e_shnum; /* the table at its end */
}

hipError_t hipModuleLoadData(void **module, const void *image) {
    NEED_DEVICE;
    size_t nbytes = image_nbytes(image);
    if (!nbytes) return noted(hipErrorNoBinaryForGpu);
    char path[] = "/tmp/standin-hip-XXXXXX"; /* a name of its own: the loader knows files by name */
    int file = mkstemp(path);
    int is_written = write(file, image, nbytes) == (ssize_t)nbytes;
    *module = is_written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!*module) fprintf(stderr, "stand-in for HIP: %s\n", is_written ? dlerror() : path);
    close(file);
    unlink(path);
    return noted(*module ? hipSuccess : hipErrorInvalidImage);
}

/* Never unloaded: queued kernels may run its code. */
hipError_t hipModuleUnload(void *module) { (void)module; return hipSuccess; }

hipError_t hipModuleGetFunction(void **function, void *module, const char *name) {
    char symbol[1024];
    snprintf(symbol, sizeof symbol, "pack_%s", name);
    *function = dlsym(module, symbol);
    return noted(*function ? hipSuccess : hipErrorNotFound);
}

hipError_t hipFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    *value = attribute == 0 ? 1024 : 0; /* the most threads of a block */
    return hipSuccess;
}

struct launch { struct packed *packed; struct dim3 grid, block; size_t shared_nbytes; };

static void run_launch(void *argument) {
    struct launch *launch = argument;
    open_device_memory();
    struct packed *packed = launch->packed;
    run_grid(packed->body, packed, launch->grid, launch->block, launch->shared_nbytes);
    close_device_memory();
    packed->destroy(packed);
    free(launch);
}

hipError_t hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned shared_nbytes,
                                 hipStream_t stream, void **arguments, void **extra) {
    NEED_DEVICE;
    if (extra || !arguments) return noted(hipErrorNotSupported);
    unsigned long n_threads = (unsigned long)bx * by * bz;
    if (!n_threads || n_threads > 1024 || !gx || !gy || !gz || shared_nbytes > 64 << 10)
        return noted(hipErrorInvalidValue);
    count(LAUNCHES);
    struct launch *launch = malloc(sizeof *launch);
    struct packed *packed = ((packer)function)(arguments);
    *launch = (struct launch){packed, {gx, gy, gz}, {bx, by, bz}, shared_nbytes};
    hipError_t error = put(stream, run_launch, launch);
    if (error) {
        packed->destroy(packed);
        free(launch);
    }
    return noted(error);
}

/* Kernels that were compiled into a library are machine code of a real GPU. */
hipError_t hipLaunchKernel(void) { return noted(hipErrorNoBinaryForGpu); }
