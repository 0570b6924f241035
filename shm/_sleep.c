/* How a doorbell's owner falls asleep and wakes: look at the ends, spin where that pays, declare the sleep, poll.
 *
 * Why no wake-up is lost is said in _doorbell.c, which has the other half.
 */
#include "_doorbell.h"

#include <errno.h>
#include <poll.h>
#include <time.h>

enum {
    WATCHED_ON_STACK = 32,
    SHORT_SLEEP = 8,   /* times the allowed spin */
    VAIN_SPINS = 64,   /* so many in a row without success, and it is given up ... */
    SPIN_PAUSE = 4096, /* ... for so many arms */
};

/* 1 if an end has something to do, 0 if not, -1 with an exception; adds to *progress. */
static int end_ready(PyObject *end, uint64_t *progress) {
    if (PyObject_TypeCheck(end, consumer_type)) {
        *progress += consumer_progress((RingConsumer *)end);
        return consumer_ready((RingConsumer *)end);
    }
    if (PyObject_TypeCheck(end, producer_type)) {
        *progress += producer_progress((RingProducer *)end);
        return producer_ready((RingProducer *)end);
    }
    PyErr_SetString(PyExc_TypeError, "a doorbell for rings watches the ends of rings");
    return -1;
}

static int any_ready(PyObject *ends, uint64_t *progress) {
    Py_ssize_t count = PySequence_Size(ends);
    if (count < 0)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *end = PySequence_GetItem(ends, i);
        if (end == NULL)
            return -1;
        int ready = end_ready(end, progress);
        Py_DECREF(end);
        if (ready != 0)
            return ready;
    }
    return 0;
}

static struct timespec now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time;
}

static uint64_t nanoseconds_since(struct timespec start) {
    struct timespec end = now();
    return (uint64_t)((int64_t)(end.tv_sec - start.tv_sec) * 1000000000 + (end.tv_nsec - start.tv_nsec));
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int look(PyObject *consumers, PyObject *producers, uint64_t *progress) {
    int ready = any_ready(consumers, progress);
    return ready != 0 ? ready : any_ready(producers, progress);
}

/* Look at the ends for a moment before falling asleep: still awake, so whoever comes need not ring. Never yields. */
static int spin(Bell *bell, PyObject *consumers, PyObject *producers) {
    struct timespec start = now();
    uint64_t unused = 0;
    do {
        int ready = look(consumers, producers, &unused);
        if (ready != 0) {
            bell->spins += ready > 0;
            bell->vain_spins = 0;
            return ready;
        }
        relax();
    } while (nanoseconds_since(start) < bell->spin_ns);
    if (++bell->vain_spins == VAIN_SPINS) { /* as on a shared core, where spinning keeps the neighbour from running */
        bell->vain_spins = 0;
        bell->spin_pause = SPIN_PAUSE;
    }
    return 0;
}

/* Spin as long as it would have paid lately: short sleeps let it grow, longer ones shrink it to nothing, so that a
 * process that waits for a step's milliseconds, or is idle, does not spin at all. A sleep counts as short up to several
 * times the allowed spin: most of it is falling asleep and waking up, here and in the neighbour that answers. */
static void adapt_spin(Bell *bell, uint64_t slept_ns) {
    if (slept_ns <= SHORT_SLEEP * bell->spin_max_ns)
        bell->spin_ns = bell->spin_ns == 0 ? bell->spin_max_ns / 4 : bell->spin_ns * 2;
    else
        bell->spin_ns = bell->spin_ns < bell->spin_max_ns / 4 ? 0 : bell->spin_ns / 2;
    if (bell->spin_ns > bell->spin_max_ns)
        bell->spin_ns = bell->spin_max_ns;
}

static void declare_asleep(Bell *bell) {
    STORE(WORD32(bell->page, BELL_ASLEEP), 1);
    FULL_FENCE(); /* pairs with the one in bell_notify, _doorbell.c */
}

/* Between the last ring and this sleep nothing was taken, and no producer got space: the ring was for nothing. */
static void count_wake(Bell *bell, uint64_t progress) {
    bell->spurious_wakes += bell->woken && progress == bell->progress;
    bell->progress = progress;
    bell->woken = false;
}

/* For observers: plain stores to a line that only the owner writes. */
static void publish_counters(Bell *bell) {
    STORE(WORD64(bell->page, BELL_ARMS), bell->arms);
    STORE(WORD64(bell->page, BELL_REFUSED_ARMS), bell->refused_arms);
    STORE(WORD64(bell->page, BELL_WAITS), bell->waits);
    STORE(WORD64(bell->page, BELL_WAKES), bell->wakes);
    STORE(WORD64(bell->page, BELL_SPURIOUS_WAKES), bell->spurious_wakes);
    STORE(WORD64(bell->page, BELL_SPINS), bell->spins);
}

PyObject *bell_arm(Bell *bell, PyObject *args) {
    PyObject *consumers, *producers;
    if (!PyArg_ParseTuple(args, "OO", &consumers, &producers) || bell_check(bell) < 0)
        return NULL;
    bell->arms++;
    uint64_t progress = 0, unused = 0;
    int ready = 0;
    if (bell->spin_pause > 0)
        bell->spin_pause--;
    else if (bell->spin_ns > 0)
        ready = spin(bell, consumers, producers);
    if (ready == 0) /* still awake: for what is there already nobody need ring */
        ready = look(consumers, producers, &unused);
    if (ready == 0) {
        declare_asleep(bell);
        if ((ready = look(consumers, producers, &progress)) != 0)
            STORE(WORD32(bell->page, BELL_ASLEEP), 0);
    }
    if (ready != 0)
        bell->refused_arms++;
    else
        count_wake(bell, progress);
    publish_counters(bell);
    if (ready < 0)
        return NULL;
    return PyBool_FromLong(ready == 0);
}

PyObject *bell_disarm(Bell *bell, PyObject *Py_UNUSED(ignored)) {
    if (bell_check(bell) < 0)
        return NULL;
    STORE(WORD32(bell->page, BELL_ASLEEP), 0);
    Py_RETURN_NONE;
}

PyObject *bell_set_spin(Bell *bell, PyObject *arg) {
    unsigned long long nanoseconds = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred() || bell_check(bell) < 0)
        return NULL;
    bell->spin_max_ns = nanoseconds;
    bell->spin_ns = 0;
    Py_RETURN_NONE;
}

/* ppoll that goes on after signals whose Python handlers do not raise. -1 with an exception. */
static int poll_until(Bell *bell, struct pollfd *fds, nfds_t count, double timeout) {
    struct timespec start = now();
    for (;;) {
        struct timespec left = {0, 0};
        if (timeout >= 0) {
            struct timespec current = now();
            double remaining = timeout - (double)(current.tv_sec - start.tv_sec) -
                               (double)(current.tv_nsec - start.tv_nsec) * 1e-9;
            if (remaining > 0) {
                left.tv_sec = (time_t)remaining;
                left.tv_nsec = (long)((remaining - (double)left.tv_sec) * 1e9);
            }
        }
        int result, error;
        bell->waiting++;
        Py_BEGIN_ALLOW_THREADS
        result = ppoll(fds, count, timeout >= 0 ? &left : NULL, NULL);
        error = errno;
        Py_END_ALLOW_THREADS
        bell->waiting--;
        if (result >= 0)
            return result;
        if (error != EINTR) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
        if (PyErr_CheckSignals() < 0)
            return -1;
    }
}

static PyObject *readable_ones(const struct pollfd *fds, Py_ssize_t count) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        if (fds[i].revents == 0)
            continue;
        if (fds[i].revents & POLLNVAL) {
            errno = EBADF;
            PyErr_SetFromErrno(PyExc_OSError);
            Py_CLEAR(list);
            break;
        }
        PyObject *number = PyLong_FromLong(fds[i].fd);
        if (number == NULL || PyList_Append(list, number) < 0)
            Py_CLEAR(list);
        Py_XDECREF(number);
    }
    if (list == NULL)
        return NULL;
    PyObject *tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    return tuple;
}

PyObject *bell_wait(Bell *bell, PyObject *args) {
    PyObject *timeout_object, *watch;
    if (!PyArg_ParseTuple(args, "OO", &timeout_object, &watch) || bell_check(bell) < 0)
        return NULL;
    double timeout = -1;
    if (timeout_object != Py_None) {
        timeout = PyFloat_AsDouble(timeout_object);
        if (PyErr_Occurred())
            return NULL;
        /* Bounded so that it fits a time_t; a NaN or negative one means "do not wait". */
        timeout = timeout > 0 ? (timeout < 1e9 ? timeout : 1e9) : 0;
    }
    Py_ssize_t watched = PySequence_Size(watch);
    if (watched < 0)
        return NULL;
    struct pollfd on_stack[WATCHED_ON_STACK + 1], *fds = on_stack;
    if (watched > WATCHED_ON_STACK && (fds = PyMem_Malloc((size_t)(watched + 1) * sizeof *fds)) == NULL)
        return PyErr_NoMemory();
    PyObject *result = NULL;
    fds[0] = (struct pollfd){.fd = bell->event_fd, .events = POLLIN};
    for (Py_ssize_t i = 0; i < watched; i++) {
        PyObject *item = PySequence_GetItem(watch, i);
        int fd = item == NULL ? -1 : (int)PyLong_AsLong(item);
        Py_XDECREF(item);
        if (PyErr_Occurred())
            goto done;
        if (fd < 0) { /* poll would ignore it in silence */
            PyErr_SetString(PyExc_ValueError, "a watched file descriptor is negative");
            goto done;
        }
        fds[i + 1] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    bell->waits++;
    struct timespec start = bell->spin_max_ns == 0 ? (struct timespec){0, 0} : now();
    int ready = poll_until(bell, fds, (nfds_t)(watched + 1), timeout);
    /* Awake, whatever woke us: spares the next sender a write. */
    STORE(WORD32(bell->page, BELL_ASLEEP), 0);
    if (bell->spin_max_ns != 0)
        adapt_spin(bell, nanoseconds_since(start));
    if (ready < 0)
        goto done;
    if (fds[0].revents != 0)
        bell_read_event(bell);
    result = readable_ones(fds + 1, watched);
done:
    if (fds != on_stack)
        PyMem_Free(fds);
    return result;
}
