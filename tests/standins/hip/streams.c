/* Streams: each is a thread that runs its queued work in order.

   The default stream of a device and its blocking streams take turns: work of the one waits for
   work of the other that was queued before. Non-blocking streams wait for neither. */
#include "standin.h"

#define NON_BLOCKING 1u

struct work {
    work_function run;
    void *argument;
    uint64_t number; /* grows with each piece of work of any stream */
    struct work *next;
};

struct stream {
    struct work *first, *last; /* the first one may be running */
    uint64_t n_queued, n_done;
    int device, priority, is_default, is_destroyed;
    unsigned flags;
    struct stream *next;
};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static struct stream *streams;
static struct stream *defaults[MOST_DEVICES];
static uint64_t n_works;

static int must_wait(struct stream *s, uint64_t number) {
    if (s->flags & NON_BLOCKING) return 0;
    for (struct stream *other = streams; other; other = other->next) {
        int take_turns = other->device == s->device && other->is_default != s->is_default
                         && !(other->flags & NON_BLOCKING);
        if (take_turns && other->first && other->first->number < number) return 1;
    }
    return 0;
}

static void unlink_stream(struct stream *s) {
    for (struct stream **link = &streams; *link; link = &(*link)->next)
        if (*link == s) { *link = s->next; return; }
}

static void *serve(void *argument) {
    struct stream *s = argument;
    begin();
    for (;;) {
        while (!s->first && !s->is_destroyed) wait_for_change();
        struct work *work = s->first;
        if (!work) break;
        while (!is_lost() && must_wait(s, work->number)) wait_for_change();
        end();
        work->run(work->argument);
        begin();
        s->first = work->next;
        s->n_done++;
        free(work);
        tell();
    }
    unlink_stream(s);
    end();
    free(s);
    free_fibers();
    return NULL;
}

static struct stream *opened(int device, unsigned flags, int priority, int default_) {
    struct stream *s = calloc(1, sizeof *s);
    s->device = device;
    s->flags = flags;
    s->priority = priority;
    s->is_default = default_;
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, s)) { free(s); return NULL; }
    pthread_detach(thread);
    s->next = streams;
    streams = s;
    return s;
}

int is_default(hipStream_t handle) { return (uintptr_t)handle <= 1; }

/* The stream of a handle; NULL if it was destroyed. With the lock held. */
static struct stream *stream_of(hipStream_t handle) {
    int device = current_device();
    if (is_default(handle)) {
        if (!defaults[device]) defaults[device] = opened(device, 0, 0, 1);
        return defaults[device];
    }
    for (struct stream *s = streams; s; s = s->next)
        if (s == handle && !s->is_destroyed) return s;
    return NULL;
}

hipError_t stream_device(hipStream_t handle, int *device) {
    struct stream *s = stream_of(handle);
    if (s) *device = s->device;
    return s ? hipSuccess : hipErrorInvalidHandle;
}

hipError_t put(hipStream_t handle, work_function run, void *argument) {
    struct work *work = malloc(sizeof *work);
    begin();
    struct stream *s = stream_of(handle);
    if (!s || is_lost()) {
        end();
        free(work);
        return s ? hipErrorLaunchFailure : hipErrorInvalidHandle;
    }
    *work = (struct work){run, argument, ++n_works, NULL};
    if (s->first) s->last->next = work; else s->first = work;
    s->last = work;
    s->n_queued++;
    tell();
    end();
    return hipSuccess;
}

static hipError_t wait_until_done(struct stream *s) {
    uint64_t n = s->n_queued;
    while (s->n_done < n && !is_lost()) wait_for_change();
    return is_lost() ? hipErrorLaunchFailure : hipSuccess;
}

static void nothing(void *argument) { (void)argument; }

hipError_t drain(hipStream_t handle) {
    /* Work on the default stream is what waits for the blocking streams. */
    if (is_default(handle)) put(handle, nothing, NULL);
    begin();
    struct stream *s = stream_of(handle);
    hipError_t error = s ? wait_until_done(s) : hipErrorInvalidHandle;
    end();
    return error;
}

hipError_t drain_device(void) {
    begin();
    int device = current_device();
    int is_busy = 1;
    while (is_busy && !is_lost()) {
        is_busy = 0;
        for (struct stream *s = streams; s; s = s->next)
            is_busy |= s->device == device && s->first != NULL;
        if (is_busy) wait_for_change();
    }
    hipError_t error = is_lost() ? hipErrorLaunchFailure : hipSuccess;
    end();
    return error;
}

hipError_t hipStreamCreateWithPriority(hipStream_t *stream, unsigned flags, int priority) {
    NEED_DEVICE;
    begin();
    /* HIP has three priorities, and takes the nearest one. */
    *stream = opened(current_device(), flags, priority < 0 ? -1 : priority > 0, 0);
    end();
    return noted(*stream ? hipSuccess : hipErrorOutOfMemory);
}
hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags) {
    return hipStreamCreateWithPriority(stream, flags, 0);
}
hipError_t hipStreamCreate(hipStream_t *stream) {
    return hipStreamCreateWithPriority(stream, 0, 0);
}

hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 1;
    *greatest = -1;
    return hipSuccess;
}

/* Queued work is still done; the thread then frees the stream. */
hipError_t hipStreamDestroy(hipStream_t handle) {
    begin();
    struct stream *s = is_default(handle) ? NULL : stream_of(handle);
    if (s) s->is_destroyed = 1;
    tell();
    end();
    return noted(s ? hipSuccess : hipErrorInvalidHandle);
}

hipError_t hipStreamSynchronize(hipStream_t stream) {
    NEED_DEVICE;
    if (is_default(stream)) count(DEFAULT_SYNCS);
    return noted(drain(stream));
}

hipError_t hipDeviceSynchronize(void) {
    NEED_DEVICE;
    count(DEVICE_SYNCS);
    return noted(drain_device());
}

hipError_t hipStreamQuery(hipStream_t handle) {
    NEED_DEVICE;
    begin();
    struct stream *s = stream_of(handle);
    hipError_t error = !s ? hipErrorInvalidHandle : s->first ? hipErrorNotReady : hipSuccess;
    end();
    return noted(error);
}

hipError_t hipStreamGetFlags(hipStream_t handle, unsigned *flags) {
    begin();
    struct stream *s = stream_of(handle);
    if (s) *flags = s->flags;
    end();
    return noted(s ? hipSuccess : hipErrorInvalidHandle);
}

hipError_t hipStreamGetPriority(hipStream_t handle, int *priority) {
    begin();
    struct stream *s = stream_of(handle);
    if (s) *priority = s->priority;
    end();
    return noted(s ? hipSuccess : hipErrorInvalidHandle);
}

hipError_t hipStreamIsCapturing(hipStream_t stream, int *status) {
    (void)stream;
    *status = 0; /* graphs are not supported */
    return hipSuccess;
}

struct host_call { void (*function)(void *); void *data; };

static void call(void *argument) {
    struct host_call host_call = *(struct host_call *)argument;
    free(argument);
    host_call.function(host_call.data);
}

hipError_t hipLaunchHostFunc(hipStream_t stream, void (*function)(void *), void *data) {
    NEED_DEVICE;
    struct host_call *made = malloc(sizeof *made);
    *made = (struct host_call){function, data};
    hipError_t error = put(stream, call, made);
    if (error) free(made);
    return noted(error);
}
