/* Events: places in streams, with the time at which they were reached. */
#define _GNU_SOURCE
#include <limits.h>
#include <stdlib.h>
#include <time.h>

#include "parts.h"

/* A place that no stream reaches. */
#define NEVER ULONG_MAX

struct CUevent_st {
    CUstream stream; /* 0: not recorded yet, which counts as done */
    unsigned long number;
    int is_timed;
    struct timespec at;
};

void standin_mark(CUevent event, CUstream stream, unsigned long number) {
    /* It may have been recorded again since, or must not fire. */
    if (event->stream == stream && event->number == number)
        clock_gettime(CLOCK_MONOTONIC, &event->at);
}

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER(1);
    *event = calloc(1, sizeof **event);
    (*event)->is_timed = !(flags & CU_EVENT_DISABLE_TIMING);
    count(events_made, 1);
    return CUDA_SUCCESS;
}

/* It is not freed: work in a stream may still refer to it. */
API CUresult cuEventDestroy_v2(CUevent event) {
    ENTER_WITH(event);
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER_WITH(stream);
    unsigned long number;
    int never = standin_strikes(silent_event);
    pthread_mutex_lock(&standin_lock);
    CUresult status =
        standin_put_locked(&stream, (Work){.kind = MARK, .event = event}, &number);
    if (!status) {
        event->stream = stream;
        event->number = never ? NEVER : number;
    }
    pthread_mutex_unlock(&standin_lock);
    return status;
}

static int is_done(CUevent event) { return standin_reached(event->stream, event->number); }

static CUresult look_at(CUevent event, int must_wait) {
    pthread_mutex_lock(&standin_lock);
    while (must_wait && !is_done(event) && !value_of(lost))
        pthread_cond_wait(&standin_changed, &standin_lock);
    int done = is_done(event);
    pthread_mutex_unlock(&standin_lock);
    if (value_of(lost)) return (CUresult)value_of(lost);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuEventQuery(CUevent event) { ENTER_WITH(event); return look_at(event, 0); }

API CUresult cuEventSynchronize(CUevent event) { ENTER_WITH(event); return look_at(event, 1); }

API CUresult cuEventElapsedTime(float *ms, CUevent first, CUevent second) {
    ENTER_WITH(first);
    if (!first->is_timed || !second->is_timed || !first->stream || !second->stream)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult status = look_at(first, 0);
    if (!status) status = look_at(second, 0);
    if (status) return status;
    *ms = (float)((double)(second->at.tv_sec - first->at.tv_sec) * 1e3
                  + (double)(second->at.tv_nsec - first->at.tv_nsec) / 1e6);
    return CUDA_SUCCESS;
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER_WITH(stream);
    (void)flags;
    unsigned long number;
    pthread_mutex_lock(&standin_lock);
    Work wait = {.kind = WAIT, .after = event->stream, .number = event->number};
    CUresult status = standin_put_locked(&stream, wait, &number);
    pthread_mutex_unlock(&standin_lock);
    return status;
}
