/* Parts of the stand-in that its own files share. */
#ifndef STANDIN_CUDA_PARTS_H
#define STANDIN_CUDA_PARTS_H

#include <pthread.h>
#include <stdatomic.h>

#include "driver.h"

/* One lock for all state, and one condition for all changes: a stand-in need not be fast. */
extern pthread_mutex_t standin_lock;
extern pthread_cond_t standin_changed;

/* What tests read, and can set back to zero. */
#define COUNTERS(X) \
    X(allocations) X(used_nbytes) X(copies) X(copied_nbytes) X(events_made) X(streams_made) \
    X(callbacks) X(ipc_handles) X(ipc_opened) X(refused_without_context) X(retained) X(unsupported)

/* What tests set, by call or as `STANDIN_CUDA_<NAME>` in the environment.

   total_nbytes      memory of the device, fixed by the first allocation
   delay_us          time that each copy takes
   hold_copies       1: copies wait until this is 0 again
   fail_allocation   n: the n-th allocation from now on finds no memory; -1: all of them
   silent_event      n: the n-th event recorded from now on never fires; -1: all of them
   no_context_in     number of a thread where no context can be set; -1: all but the first
   refuse_ipc        1: no handles of memory are given out; 2: none are opened
   lenient           1: calls with a stream or an event that was made need no current context
   lost              error code of all calls from now on; queued copies are not done */
#define SETTINGS(X) \
    X(total_nbytes) X(delay_us) X(hold_copies) X(fail_allocation) X(silent_event) \
    X(no_context_in) X(refuse_ipc) X(lenient) X(lost)

#define AS_NAME(name) name,
enum { COUNTERS(AS_NAME) SETTINGS(AS_NAME) n_values };

extern atomic_llong standin_values[n_values];

static inline long long value_of(int which) { return standin_values[which]; }
static inline void count(int which, long long n) { standin_values[which] += n; }

/* Whether a fault that strikes the n-th time strikes now. */
int standin_strikes(int which);

/* Makes a function begin with instructions that save registers. UCX hooks into functions that free
   memory: it moves up to 12 of their first bytes elsewhere, and can move no others. */
#define HOOKABLE __asm__ volatile("" : : : "rbx", "r12", "r13", "r14", "r15")

/* The error that a call meets before it does anything: of all calls, or with a current context. */
CUresult standin_refusal(int needs_context);
#define ENTER(needs_context) \
    HOOKABLE; \
    do { \
        CUresult refusal_ = standin_refusal(needs_context); \
        if (refusal_) return refusal_; \
    } while (0)

/* The documentation lists the error of a missing context for all calls on streams and events. Some
   drivers look at the handle instead. */
#define ENTER_WITH(handle) \
    ENTER(!value_of(lenient) || (uintptr_t)(handle) <= (uintptr_t)CU_STREAM_PER_THREAD)

/* The only context. */
CUcontext standin_primary(void);

/* A piece of memory that the driver knows. */
typedef struct Allocation {
    char *seen;     /* its address for programs; the host cannot touch that of a device's memory */
    char *readable; /* where the bytes can be read and written */
    size_t nbytes;
    enum { DEVICE, HOST, REGISTERED, OPENED } kind;
    unsigned long long id;
    long long origin[4]; /* of another process's: its number, the descriptor, the place, the id */
    int n_opened;
    struct Allocation *next;
} Allocation;

/* Find the allocation that an address is in, and copy its description; 0 if there is none. */
int standin_find(uintptr_t address, Allocation *found);
/* Remove an allocation by its first address and return it; 0 if there is none of this kind. */
Allocation *standin_remove(uintptr_t address, int kind);
/* Add an allocation; it gets a number. Holding the lock. */
void standin_add(Allocation *allocation);
/* The descriptor by which other processes open this one's device memory, and where it begins. */
void standin_arena(int *fd, char **readable);
/* The first allocation, by address. Holding the lock. */
Allocation *standin_first(void);
/* Where a copy reads or writes; 0 if that is on the device, and not inside one allocation. */
void *standin_span(uintptr_t address, size_t nbytes);

/* A piece of work of a stream. */
typedef struct Work {
    enum { COPY, FILL, MARK, CALL, WAIT } kind;
    void *to;
    const void *from;
    size_t nbytes;
    int value;
    CUevent event;
    CUstreamCallback callback;
    CUhostFn function;
    void *argument;
    CUstream after; /* with `number`: a place in a stream that must be reached first */
    unsigned long number;
    struct Work *next;
} Work;

/* Append a piece of work to a stream, behind all that it must wait for. */
CUresult standin_put(CUstream stream, Work work);
/* The same, holding the lock; tells the place that the work has in its stream. */
CUresult standin_put_locked(CUstream *stream, Work work, unsigned long *number);
/* Whether a stream has reached a place. Holding the lock. */
int standin_reached(CUstream stream, unsigned long number);
/* An event's work was done. */
void standin_mark(CUevent event, CUstream stream, unsigned long number);
/* Wait until everything that was put into any stream is done. */
void standin_wait_for_all(void);

#endif
