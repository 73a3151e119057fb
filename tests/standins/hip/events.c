/* Events: each is done once the work that was queued when it was last recorded is done. */
#include "standin.h"

#define DISABLE_TIMING 2u

typedef struct event {
    uint64_t n_recorded, n_done;
    struct timespec at; /* when it was last done */
    unsigned flags;
    int device, n_users; /* the program, and queued work */
} *hipEvent_t;

struct mark { struct event *event; uint64_t number; int never_fires; };

static void release(struct event *e) {
    if (!--e->n_users) free(e);
}

hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags) {
    NEED_DEVICE;
    struct event *e = calloc(1, sizeof *e);
    e->flags = flags;
    e->device = current_device();
    e->n_users = 1;
    *event = e;
    return hipSuccess;
}
hipError_t hipEventCreate(hipEvent_t *event) { return hipEventCreateWithFlags(event, 0); }

hipError_t hipEventDestroy(hipEvent_t event) {
    begin();
    release(event);
    end();
    return hipSuccess;
}

static void fire(void *argument) {
    struct mark *mark = argument;
    struct event *e = mark->event;
    struct timespec began = {0};
    begin();
    while (mark->never_fires && !is_free_of_faults() && !is_lost()) wait_held(&began);
    clock_gettime(CLOCK_MONOTONIC, &e->at);
    if (e->n_done < mark->number) e->n_done = mark->number;
    release(e);
    tell();
    end();
    free(mark);
}

static void hold_back(void *argument) {
    struct mark *mark = argument;
    begin();
    while (mark->event->n_done < mark->number && !is_lost()) wait_for_change();
    release(mark->event);
    end();
    free(mark);
}

static hipError_t queued(hipStream_t stream, work_function run, hipEvent_t event,
                         struct mark *mark) {
    hipError_t error = put(stream, run, mark);
    if (error) {
        begin();
        release(event);
        end();
        free(mark);
    }
    return noted(error);
}

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
    NEED_DEVICE;
    struct mark *mark = malloc(sizeof *mark);
    int device = -1;
    begin();
    hipError_t error = stream_device(stream, &device);
    if (!error && device != event->device) error = hipErrorInvalidHandle;
    if (!error) {
        event->n_users++;
        *mark = (struct mark){event, ++event->n_recorded, event_never_fires()};
    }
    end();
    if (error) { free(mark); return noted(error); }
    return queued(stream, fire, event, mark);
}

hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
    (void)flags;
    NEED_DEVICE;
    struct mark *mark = malloc(sizeof *mark);
    begin();
    event->n_users++;
    *mark = (struct mark){event, event->n_recorded, 0};
    end();
    return queued(stream, hold_back, event, mark);
}

/* A thread may ask for events of any device. */
hipError_t hipEventQuery(hipEvent_t event) {
    begin();
    hipError_t error = is_lost() ? hipErrorLaunchFailure
                       : event->n_done < event->n_recorded ? hipErrorNotReady : hipSuccess;
    end();
    return noted(error);
}

hipError_t hipEventSynchronize(hipEvent_t event) {
    begin();
    uint64_t number = event->n_recorded;
    while (event->n_done < number && !is_lost()) wait_for_change();
    hipError_t error = is_lost() ? hipErrorLaunchFailure : hipSuccess;
    end();
    return noted(error);
}

hipError_t hipEventElapsedTime(float *ms, hipEvent_t first, hipEvent_t second) {
    hipError_t error = hipSuccess;
    begin();
    int have_times = !((first->flags | second->flags) & DISABLE_TIMING);
    if (!have_times || !first->n_recorded || !second->n_recorded)
        error = hipErrorInvalidHandle;
    else if (first->n_done < first->n_recorded || second->n_done < second->n_recorded)
        error = hipErrorNotReady;
    else
        *ms = (second->at.tv_sec - first->at.tv_sec) * 1e3f
              + (second->at.tv_nsec - first->at.tv_nsec) / 1e6f;
    end();
    return noted(error);
}
