/* Streams: each is a thread that does its work in order.

   The legacy default stream waits for all streams but non-blocking ones, and these wait for it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "parts.h"

struct CUstream_st {
    Work *first, *last;
    unsigned long n_put, n_done;
    int is_blocking, is_closing, priority;
    CUstream next;
};

/* Streams of programs; one that was destroyed is not in the list, and is never freed. */
static CUstream streams;
static CUstream legacy;
static __thread CUstream of_thread;

int standin_reached(CUstream stream, unsigned long number) {
    return !stream || stream->n_done >= number;
}

static void hold(void) {
    pthread_mutex_lock(&standin_lock);
    while (value_of(hold_copies)) pthread_cond_wait(&standin_changed, &standin_lock);
    pthread_mutex_unlock(&standin_lock);
}

static void do_work(CUstream stream, const Work *work) {
    CUresult status = (CUresult)value_of(lost);
    switch (work->kind) {
    case COPY:
    case FILL:
        hold();
        if (value_of(delay_us)) usleep((useconds_t)value_of(delay_us));
        if (value_of(lost)) break;
        if (work->kind == FILL) memset(work->to, work->value, work->nbytes);
        else memmove(work->to, work->from, work->nbytes);
        break;
    case CALL:
        count(callbacks, 1);
        if (work->callback) work->callback(stream, status, work->argument);
        else work->function(work->argument);
        break;
    case MARK:
    case WAIT: break;
    }
}

static void *serve(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&standin_lock);
    while (stream->first || !stream->is_closing) {
        Work *work = stream->first;
        if (!work || (work->kind == WAIT && !standin_reached(work->after, work->number))) {
            pthread_cond_wait(&standin_changed, &standin_lock);
            continue;
        }
        pthread_mutex_unlock(&standin_lock);
        do_work(stream, work);
        pthread_mutex_lock(&standin_lock);
        if (work->kind == MARK) standin_mark(work->event, stream, stream->n_done + 1);
        stream->first = work->next;
        if (!stream->first) stream->last = 0;
        stream->n_done++;
        free(work);
        pthread_cond_broadcast(&standin_changed);
    }
    pthread_mutex_unlock(&standin_lock);
    return 0;
}

/* Holding the lock. */
static CUstream begin(int is_blocking, int priority) {
    pthread_t thread;
    CUstream stream = calloc(1, sizeof *stream);
    stream->is_blocking = is_blocking;
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    pthread_create(&thread, 0, serve, stream);
    pthread_detach(thread);
    stream->next = streams;
    return streams = stream;
}

/* The stream of a handle; 0 if there is none. Holding the lock. */
static CUstream stream_of(CUstream handle) {
    if (!handle || handle == CU_STREAM_LEGACY) return legacy ? legacy : (legacy = begin(1, 0));
    if (handle == CU_STREAM_PER_THREAD) return of_thread ? of_thread : (of_thread = begin(1, 0));
    CUstream stream = streams;
    while (stream && stream != handle) stream = stream->next;
    return stream;
}

static void append(CUstream stream, Work work) {
    Work *copy = malloc(sizeof *copy);
    *copy = work;
    copy->next = 0;
    if (stream->last) stream->last->next = copy;
    else stream->first = copy;
    stream->last = copy;
    stream->n_put++;
}

/* Make a stream wait for all that another one has got so far. */
static void follow(CUstream stream, CUstream other) {
    if (other && other != stream && !standin_reached(other, other->n_put))
        append(stream, (Work){.kind = WAIT, .after = other, .number = other->n_put});
}

CUresult standin_put_locked(CUstream *handle, Work work, unsigned long *number) {
    CUstream stream = stream_of(*handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream == legacy) {
        for (CUstream one = streams; one; one = one->next)
            if (one->is_blocking) follow(stream, one);
    } else if (stream->is_blocking) {
        follow(stream, legacy);
    }
    append(stream, work);
    *handle = stream;
    *number = stream->n_put;
    pthread_cond_broadcast(&standin_changed);
    return CUDA_SUCCESS;
}

CUresult standin_put(CUstream stream, Work work) {
    unsigned long number;
    pthread_mutex_lock(&standin_lock);
    CUresult status = standin_put_locked(&stream, work, &number);
    pthread_mutex_unlock(&standin_lock);
    return status;
}

/* Whether all is done that streams got: one, the legacy one with all it waits for, or (0) all. */
static int is_idle(CUstream which) {
    for (CUstream one = streams; one; one = one->next) {
        int counts = !which || one == which || (which == legacy && one->is_blocking);
        if (counts && !standin_reached(one, one->n_put)) return 0;
    }
    return 1;
}

void standin_wait_for_all(void) {
    pthread_mutex_lock(&standin_lock);
    while (!is_idle(0)) pthread_cond_wait(&standin_changed, &standin_lock);
    pthread_mutex_unlock(&standin_lock);
}

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    ENTER(1);
    if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    count(streams_made, 1);
    pthread_mutex_lock(&standin_lock);
    *stream = begin(flags != CU_STREAM_NON_BLOCKING, priority);
    pthread_mutex_unlock(&standin_lock);
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

/* The work that it has is still done. */
API CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER_WITH(stream);
    pthread_mutex_lock(&standin_lock);
    CUstream *place = &streams;
    while (*place && *place != stream) place = &(*place)->next;
    int is_known = *place && stream != legacy;
    if (is_known) {
        *place = stream->next;
        stream->is_closing = 1;
        pthread_cond_broadcast(&standin_changed);
    }
    pthread_mutex_unlock(&standin_lock);
    return is_known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult look_at(CUstream handle, int must_wait) {
    pthread_mutex_lock(&standin_lock);
    CUstream stream = stream_of(handle);
    while (stream && must_wait && !is_idle(stream))
        pthread_cond_wait(&standin_changed, &standin_lock);
    int is_done = stream && is_idle(stream);
    pthread_mutex_unlock(&standin_lock);
    if (value_of(lost)) return (CUresult)value_of(lost);
    return !stream ? CUDA_ERROR_INVALID_HANDLE : is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuStreamSynchronize(CUstream stream) { ENTER_WITH(stream); return look_at(stream, 1); }

API CUresult cuStreamQuery(CUstream stream) { ENTER_WITH(stream); return look_at(stream, 0); }

static CUresult described(CUstream handle, unsigned *flags, int *priority) {
    pthread_mutex_lock(&standin_lock);
    CUstream stream = stream_of(handle);
    if (stream && flags) *flags = stream->is_blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
    if (stream && priority) *priority = stream->priority;
    pthread_mutex_unlock(&standin_lock);
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuStreamGetFlags(CUstream stream, unsigned *flags) {
    ENTER_WITH(stream);
    return described(stream, flags, 0);
}

API CUresult cuStreamGetPriority(CUstream stream, int *priority) {
    ENTER_WITH(stream);
    return described(stream, 0, priority);
}

API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    ENTER_WITH(stream);
    *context = standin_primary();
    return described(stream, 0, 0);
}

API CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback call, void *argument,
                                 unsigned flags) {
    ENTER_WITH(stream);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    return standin_put(stream, (Work){.kind = CALL, .callback = call, .argument = argument});
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    ENTER_WITH(stream);
    return standin_put(stream, (Work){.kind = CALL, .function = function, .argument = argument});
}
