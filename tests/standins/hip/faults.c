/* Injected faults, and counts of calls, for tests: the only functions that are not HIP's. */
#include "standin.h"
#include <stdio.h>

static int n_until_allocation_fails, n_until_event_sticks, are_copies_held, is_device_lost;
static int is_clear = 1;
static long counts[N_COUNTERS];

static int is_the_one(int *n_left) { return *n_left && !--*n_left; }

int allocation_fails(void) { return is_the_one(&n_until_allocation_fails); }
int event_never_fires(void) { return is_the_one(&n_until_event_sticks); }
int copies_are_held(void) { return are_copies_held; }
int is_lost(void) { return is_device_lost; }
int is_free_of_faults(void) { return is_clear; }
/* Ends the process after half a minute: a test that waits for what it holds back has to fail. */
void wait_held(struct timespec *began) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    if (!began->tv_sec) *began = until;
    if (until.tv_sec - began->tv_sec >= 30) {
        fprintf(stderr, "stand-in for HIP: a fault held work back for half a minute\n");
        abort();
    }
    until.tv_sec += 1;
    pthread_cond_timedwait(&changed, &lock, &until);
}

void count(enum counter what) { __atomic_fetch_add(&counts[what], 1, __ATOMIC_RELAXED); }

static void set(int *what, int value) {
    begin();
    *what = value;
    is_clear = 0;
    tell();
    end();
}

/* The n-th allocation of device memory from now on fails. */
void standin_fail_allocation(int n) { set(&n_until_allocation_fails, n); }
/* The n-th event that is recorded from now on is never done, nor is work behind it. */
void standin_stick_event(int n) { set(&n_until_event_sticks, n); }
/* No copy ends from now on. */
void standin_hold_copies(void) { set(&are_copies_held, 1); }
/* All work fails from now on. */
void standin_lose_device(void) { set(&is_device_lost, 1); }

/* Ends all faults: what was held back goes on. */
void standin_clear_faults(void) {
    begin();
    n_until_allocation_fails = n_until_event_sticks = are_copies_held = is_device_lost = 0;
    is_clear = 1;
    tell();
    end();
}

long standin_count(enum counter what) { return __atomic_load_n(&counts[what], __ATOMIC_RELAXED); }
