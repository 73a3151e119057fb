/* Shows a file /dev/kfd, AMD's driver, to the program that it is preloaded into. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

struct stat;
typedef int (*stat_function)(const char *, struct stat *);

#define SHOWN(name)                                                                  \
    int name(const char *path, struct stat *out) {                                   \
        stat_function real = (stat_function)dlsym(RTLD_NEXT, #name);                  \
        return real(path && !strcmp(path, "/dev/kfd") ? "/dev/null" : path, out);     \
    }
SHOWN(stat)
SHOWN(stat64)
