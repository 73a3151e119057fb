/* The seams between the parts of the stand-in for AMD's HIP runtime.

   One lock protects all state, and one condition is signalled at each change of it: a stand-in has
   few threads, and simple rules matter more than speed. */
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int hipError_t;

enum {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorInvalidMemcpyDirection = 21,
    hipErrorNoDevice = 100,
    hipErrorInvalidDevice = 101,
    hipErrorInvalidImage = 200,
    hipErrorInvalidContext = 201,
    hipErrorNoBinaryForGpu = 209,
    hipErrorInvalidHandle = 400,
    hipErrorNotFound = 500,
    hipErrorNotReady = 600,
    hipErrorLaunchFailure = 719,
    hipErrorNotSupported = 801,
};

#define MOST_DEVICES 8

/* Global state: its lock, and the condition of all waits. */
extern pthread_mutex_t lock;
extern pthread_cond_t changed;

static inline void begin(void) { pthread_mutex_lock(&lock); }
static inline void end(void) { pthread_mutex_unlock(&lock); }
static inline void wait_for_change(void) { pthread_cond_wait(&changed, &lock); }
static inline void tell(void) { pthread_cond_broadcast(&changed); }

/* device.c: devices, and what each call checks first. */
hipError_t noted(hipError_t error); /* remembers an error for hipGetLastError */
hipError_t usable(void);            /* why a call cannot use the current device, or hipSuccess */
int current_device(void);
long setting(const char *name, long otherwise);
#define NEED_DEVICE do { hipError_t why_ = usable(); if (why_) return noted(why_); } while (0)

/* faults.c: all but `count` are called with the lock held. */
enum counter { ALLOCATIONS, TO_DEVICE, TO_HOST, ON_DEVICE, DEFAULT_COPIES, LAUNCHES, DEVICE_SYNCS,
               DEFAULT_SYNCS, N_COUNTERS };
void count(enum counter what);
int allocation_fails(void);
int event_never_fires(void);
int copies_are_held(void);
int is_lost(void);
int is_free_of_faults(void);
void wait_held(struct timespec *began); /* zero at first; waits for a change */

/* memory.c */
enum kind { PAGEABLE, PINNED, DEVICE };
struct found { enum kind kind; int device; char *real; size_t left_nbytes; };
struct found look_up(const void *pointer); /* takes the lock */
void open_device_memory(void);             /* lets kernels use the addresses that programs see */
void close_device_memory(void);

/* streams.c: a stream is a thread with a queue. */
typedef struct stream *hipStream_t;
typedef void (*work_function)(void *argument);
/* Queues work; `run` frees its argument. On an error, the caller keeps the argument. */
hipError_t put(hipStream_t stream, work_function run, void *argument);
hipError_t drain(hipStream_t stream);
hipError_t drain_device(void);
int is_default(hipStream_t stream);
hipError_t stream_device(hipStream_t stream, int *device); /* with the lock held */

/* blocks.c: runs the blocks of a kernel. */
struct dim3 { unsigned x, y, z; };
void run_grid(void (*body)(void *), void *argument, struct dim3 grid, struct dim3 block,
              size_t shared_nbytes);
void free_fibers(void); /* of this thread */
