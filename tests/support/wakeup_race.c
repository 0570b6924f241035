/* Two threads that meet and then race: one publishes while the other falls asleep, with the code of the extension.
 *
 * Test only. The extension's sources are compiled into this file, so that what races is the very publish(), arm and
 * make_room() of the product, without Python between the instructions that matter. Each round begins at a barrier, and a
 * random wait of up to a microsecond on each side moves the two sequences over each other. When both are through, the
 * outcome is known without any waiting: a sleeper that was allowed to sleep must have been rung, or it would sleep on.
 * Built with -DRINGSERVE_WITHOUT_FENCES the same rounds lose wake-ups within the first few thousand.
 */
#include "_ring.c"

#include "_consumer.c"
#include "_doorbell.c"
#include "_producer.c"
#include "_sleep.c"

#include <sched.h>
#include <stdlib.h>

typedef struct {
    Bell *sleeper;
    RingProducer *producer;
    RingConsumer *consumer;
    uint64_t rounds, seed;
    int cpus[2];
    _Alignas(128) _Atomic uint64_t arrived[2 * 16]; /* each side's word on a line pair of its own */
    _Alignas(128) uint64_t slept, refused, lost, mended; /* written by the sleeping side */
    bool slept_now;                                      /* between two barriers: did it go to sleep? */
    int failed;                                          /* errno of pinning */
} Race;

static uint64_t next_random(uint64_t *state) { /* xorshift64 */
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Both sides have got here. Spins; yields only when the other side does not seem to run. */
static void meet(Race *race, int side, uint64_t *count) {
    atomic_store_explicit(&race->arrived[side * 16], ++*count, memory_order_release);
    for (unsigned turns = 0; atomic_load_explicit(&race->arrived[(1 - side) * 16], memory_order_acquire) < *count;) {
        relax();
        if (++turns % 4096 == 0)
            sched_yield();
    }
}

static void dawdle(uint64_t *random) {
    uint64_t turns = next_random(random) % 4 ? next_random(random) % 64 : next_random(random) % 1024;
    for (uint64_t i = 0; i < turns; i++)
        __asm__ volatile("" ::: "memory");
}

static int pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

/* After both are through: a sleeper that nobody rang sleeps on though there is something for it. */
static void judge(Race *race, bool slept, bool something) {
    bool rung = bell_read_event(race->sleeper);
    race->slept += slept;
    race->refused += !slept;
    race->lost += slept && something && !rung;
    race->mended += !slept && rung;
    STORE(WORD32(race->sleeper->page, BELL_ASLEEP), 0);
}

/* ---- the sleep handshake: publish() against arm ---- */

static void *publish_side(void *argument) {
    Race *race = argument;
    uint64_t random = race->seed * 2 + 1, count = 0;
    if ((race->failed = pin(race->cpus[0])) != 0)
        return NULL;
    for (uint64_t round = 0; round < race->rounds; round++) {
        meet(race, 0, &count);
        dawdle(&random);
        write_frame(race->producer, FRAME_WHOLE, (const char *)&round, sizeof round, NULL);
        publish(race->producer);
        meet(race, 0, &count);
        meet(race, 0, &count); /* the other side has taken the frame */
        load_head(race->producer);
    }
    return NULL;
}

static bool take(RingConsumer *c, int frames) {
    Frame frame;
    if (load_tail(c) < 0)
        return false;
    for (int i = 0; i < frames; i++) {
        if (read_header(c, &frame) < 0)
            return false;
        c->head += (FRAME_HEADER + (uint64_t)frame.length + 7) & ~UINT64_C(7);
        c->sequence++;
    }
    publish_head(c);
    return true;
}

static void *arm_side(void *argument) {
    Race *race = argument;
    uint64_t random = race->seed * 2 + 3, count = 0;
    if ((race->failed = pin(race->cpus[1])) != 0)
        return NULL;
    for (uint64_t round = 0; round < race->rounds; round++) {
        meet(race, 1, &count);
        dawdle(&random);
        declare_asleep(race->sleeper);
        bool slept = !consumer_ready(race->consumer);
        if (!slept)
            STORE(WORD32(race->sleeper->page, BELL_ASLEEP), 0);
        meet(race, 1, &count);
        judge(race, slept, true);
        if (!take(race->consumer, 1))
            race->failed = EPROTO;
        meet(race, 1, &count);
    }
    return NULL;
}

/* ---- the space handshake: make_room() and arm of a producer against publish_head() ---- */

static void *fill_side(void *argument) {
    static const char payload[MAX_FRAME];
    Race *race = argument;
    RingProducer *p = race->producer;
    uint64_t random = race->seed * 2 + 5, count = 0, need = p->segment.max_frame;
    if ((race->failed = pin(race->cpus[0])) != 0)
        return NULL;
    for (uint64_t round = 0; round < race->rounds; round++) {
        load_head(p);
        while (fits(p, need))
            write_frame(p, FRAME_WHOLE, payload, (uint32_t)(need - FRAME_HEADER), NULL);
        publish(p);
        meet(race, 0, &count);
        dawdle(&random);
        bool slept = false;
        if (make_room(p, need) == 0) {
            declare_asleep(race->sleeper);
            slept = !producer_ready(p);
            if (!slept)
                STORE(WORD32(race->sleeper->page, BELL_ASLEEP), 0);
        }
        meet(race, 0, &count);
        judge(race, slept, true);
        STORE(WORD32(p->segment.base, RING_WANT_SPACE), 0);
        p->waiting = false;
        meet(race, 0, &count);
    }
    return NULL;
}

static void *drain_side(void *argument) {
    Race *race = argument;
    uint64_t random = race->seed * 2 + 7, count = 0;
    if ((race->failed = pin(race->cpus[1])) != 0)
        return NULL;
    for (uint64_t round = 0; round < race->rounds; round++) {
        meet(race, 1, &count);
        dawdle(&random);
        if (!take(race->consumer, 2)) /* as many as make the quarter that is worth a ring */
            race->failed = EPROTO;
        meet(race, 1, &count);
        meet(race, 1, &count);
    }
    return NULL;
}

static PyObject *race(PyObject *args, void *(*first)(void *), void *(*second)(void *)) {
    PyObject *sleeper, *producer, *consumer;
    unsigned long long rounds, seed;
    int cpu0, cpu1;
    if (!PyArg_ParseTuple(args, "O!O!O!KKii", bell_type, &sleeper, producer_type, &producer, consumer_type, &consumer,
                          &rounds, &seed, &cpu0, &cpu1))
        return NULL;
    Race *state = aligned_alloc(128, (sizeof *state + 127) & ~(size_t)127);
    if (state == NULL)
        return PyErr_NoMemory();
    memset(state, 0, sizeof *state);
    state->sleeper = (Bell *)sleeper;
    state->producer = (RingProducer *)producer;
    state->consumer = (RingConsumer *)consumer;
    state->rounds = rounds;
    state->seed = seed;
    state->cpus[0] = cpu0;
    state->cpus[1] = cpu1;
    pthread_t threads[2];
    int error = pthread_create(&threads[0], NULL, first, state);
    if (error == 0 && (error = pthread_create(&threads[1], NULL, second, state)) != 0)
        abort(); /* the first one waits for it */
    if (error == 0) {
        Py_BEGIN_ALLOW_THREADS
        pthread_join(threads[0], NULL);
        pthread_join(threads[1], NULL);
        Py_END_ALLOW_THREADS
        error = state->failed;
    }
    PyObject *result = NULL;
    if (error != 0) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    } else {
        result = Py_BuildValue("{s:K,s:K,s:K,s:K}", "slept", state->slept, "refused", state->refused, "lost",
                               state->lost, "rung_awake", state->mended);
    }
    free(state);
    return result;
}

static PyObject *race_sleep(PyObject *Py_UNUSED(module), PyObject *args) { return race(args, publish_side, arm_side); }

static PyObject *race_space(PyObject *Py_UNUSED(module), PyObject *args) { return race(args, fill_side, drain_side); }

static PyMethodDef races[] = {
    {"race_sleep", race_sleep, METH_VARARGS, "race_sleep(bell, producer, consumer, rounds, seed, cpu, cpu) -> dict"},
    {"race_space", race_space, METH_VARARGS, "race_space(bell, producer, consumer, rounds, seed, cpu, cpu) -> dict"},
    {NULL, NULL, 0, NULL},
};

PyMODINIT_FUNC PyInit__wakeup_race(void) {
    PyObject *module = PyInit__ring();
    if (module != NULL && PyModule_AddFunctions(module, races) < 0)
        Py_CLEAR(module);
    return module;
}
