/* Runs the threads of a kernel's blocks, one block after the other.

   Each thread runs on a fiber, a stack of its own. One that ends without waiting leaves its fiber
   to the next one. One that waits for others gives up the processor, and another fiber goes on. */
#include "standin.h"
#include <setjmp.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

enum { STACK_NBYTES = 128 << 10, MOST_THREADS = 1024, WARP_SIZE = 64 };
enum { N_WARPS = MOST_THREADS / WARP_SIZE };

/* The place of the running thread, read by kernels. */
__thread struct { struct dim3 thread, block, block_size, grid_size; char *shared; } standin_place;

struct barrier { unsigned n_live, n_arrived, n_passed; };

struct fiber {
    ucontext_t begin; /* where it begins; from then on it goes on by a jump, which costs less */
    jmp_buf go_on;
    int has_begun;
    char *stack;
    unsigned thread;         /* its number in the block */
    struct barrier *waiting; /* NULL if it can run */
    unsigned passed;         /* of the barrier, when it began to wait */
    int is_idle;
};

static __thread struct {
    struct fiber *fibers[MOST_THREADS], *running;
    unsigned n_fibers, n_threads, n_begun, n_ended, last; /* last: whose place is set */
    jmp_buf scheduler;
    struct barrier block, warps[N_WARPS];
    uint64_t exchanged[MOST_THREADS];
    void (*body)(void *);
    void *argument;
} run;

static void open_barrier(struct barrier *b) {
    b->n_arrived = 0;
    b->n_passed++;
}

static void check(struct barrier *b) {
    if (b->n_arrived && b->n_arrived == b->n_live) open_barrier(b);
}

static void leave(struct barrier *b) {
    b->n_live--;
    check(b);
}

static void set_place(unsigned number) {
    struct dim3 size = standin_place.block_size;
    run.last = number;
    unsigned row = number / size.x;
    standin_place.thread = (struct dim3){number % size.x, row % size.y, row / size.y};
}

static void give_up(struct fiber *me) {
    if (!_setjmp(me->go_on)) _longjmp(run.scheduler, 1);
}

static void work(void) {
    struct fiber *me = run.running;
    struct dim3 *place = &standin_place.thread, size = {0};
    for (;;) {
        size = standin_place.block_size;
        while (run.n_begun < run.n_threads) {
            me->thread = run.n_begun++;
            /* Most threads follow the one before: this is faster than to divide. */
            if (me->thread && run.last == me->thread - 1 && place->x + 1 < size.x) place->x++;
            else set_place(me->thread);
            run.last = me->thread;
            run.body(run.argument);
            run.n_ended++;
            leave(&run.block);
            leave(&run.warps[me->thread / WARP_SIZE]);
        }
        me->is_idle = 1;
        give_up(me);
    }
}

static void wait_at(struct barrier *b) {
    struct fiber *me = run.running;
    me->passed = b->n_passed;
    b->n_arrived++;
    check(b);
    if (b->n_passed != me->passed) return;
    me->waiting = b;
    give_up(me);
    me->waiting = NULL;
    set_place(me->thread);
}

void standin_wait_for_block(void) { wait_at(&run.block); }
void standin_wait_for_warp(void) { wait_at(&run.warps[run.running->thread / WARP_SIZE]); }

/* Gives a value to the others of the warp, and returns that of the lane `from`. */
uint64_t standin_exchange(uint64_t value, unsigned from) {
    unsigned mine = run.running->thread, first = mine / WARP_SIZE * WARP_SIZE;
    run.exchanged[mine] = value;
    standin_wait_for_warp();
    uint64_t theirs = run.exchanged[first + from < run.n_threads ? first + from : mine];
    standin_wait_for_warp();
    return theirs;
}

unsigned standin_lane(void) { return run.running->thread % WARP_SIZE; }

static struct fiber *new_fiber(void) {
    struct fiber *f = calloc(1, sizeof *f);
    f->stack = mmap(0, STACK_NBYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    getcontext(&f->begin);
    f->begin.uc_stack.ss_sp = f->stack;
    f->begin.uc_stack.ss_size = STACK_NBYTES;
    makecontext(&f->begin, work, 0);
    run.fibers[run.n_fibers++] = f;
    return f;
}

static int can_run(struct fiber *f) {
    if (f->is_idle) return run.n_begun < run.n_threads;
    return !f->waiting || f->waiting->n_passed != f->passed;
}

static void resume(struct fiber *f) {
    f->is_idle = 0;
    run.running = f;
    if (_setjmp(run.scheduler)) return;
    if (f->has_begun) _longjmp(f->go_on, 1);
    f->has_begun = 1;
    setcontext(&f->begin);
}

/* Lets the waiting lanes of each warp go on without the others, which took another branch. */
static int open_warps(void) {
    int has_opened = 0;
    for (unsigned n = 0; n < N_WARPS; n++)
        if (run.warps[n].n_arrived) {
            open_barrier(&run.warps[n]);
            has_opened = 1;
        }
    return has_opened;
}

static void run_block(void) {
    run.n_begun = run.n_ended = 0;
    run.block = (struct barrier){run.n_threads, 0, 0};
    for (unsigned n = 0; n * WARP_SIZE < run.n_threads; n++) {
        unsigned left = run.n_threads - n * WARP_SIZE;
        run.warps[n] = (struct barrier){left < WARP_SIZE ? left : WARP_SIZE, 0, 0};
    }
    while (run.n_ended < run.n_threads) {
        int has_moved = 0;
        for (unsigned n = 0; n < run.n_fibers && run.n_ended < run.n_threads; n++)
            if (can_run(run.fibers[n])) {
                resume(run.fibers[n]);
                has_moved = 1;
            }
        if (run.n_begun < run.n_threads) {
            resume(new_fiber());
        } else if (!has_moved && !open_warps()) {
            fprintf(stderr, "stand-in for HIP: all threads of a block wait for each other\n");
            abort();
        }
    }
}

void run_grid(void (*body)(void *), void *argument, struct dim3 grid, struct dim3 block,
              size_t shared_nbytes) {
    run.body = body;
    run.argument = argument;
    run.n_threads = block.x * block.y * block.z;
    standin_place.block_size = block;
    standin_place.grid_size = grid;
    standin_place.shared = aligned_alloc(64, (shared_nbytes + 64) & ~(size_t)63);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                standin_place.block = (struct dim3){x, y, z};
                run_block();
            }
    free(standin_place.shared);
}

void free_fibers(void) {
    while (run.n_fibers) {
        struct fiber *f = run.fibers[--run.n_fibers];
        munmap(f->stack, STACK_NBYTES);
        free(f);
    }
}
