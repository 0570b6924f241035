/* The doorbell: a shared word "asleep" and an eventfd, one for each receiving process.
 *
 * No wake-up is lost: the sender stores its data, fences, reads `asleep`; the sleeper stores `asleep`, fences, reads
 * the data's words. With full fences on both sides "the sleeper missed the data" and "the sender saw it awake"
 * exclude each other. The eventfd is sticky, so being rung between arm() and poll() is enough. With several senders
 * the argument holds for each pair; the exchange leaves one of them to write.
 */
#include "_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    WATCHED_ON_STACK = 32,
    SHORT_SLEEP = 8,   /* times the allowed spin */
    VAIN_SPINS = 64,   /* so many in a row without success, and it is given up ... */
    SPIN_PAUSE = 4096, /* ... for so many arms */
};

static int bell_check(const Bell *bell) {
    if (bell->page == NULL) {
        PyErr_SetString(errors.channel_closed, "the doorbell is closed");
        return -1;
    }
    if (bell->generation != fork_generation()) {
        PyErr_SetString(errors.forked_use, "the doorbell was attached by another process");
        return -1;
    }
    return 0;
}

static void write_event(Bell *bell) {
    const uint64_t one = 1;
    ssize_t written;
    do
        written = write(bell->event_fd, &one, sizeof one);
    while (written < 0 && errno == EINTR); /* EAGAIN: it is rung 2^64 - 2 times over, and readable */
    bell->rings++;
}

int bell_notify(Bell *bell) {
    if (bell->page == NULL)
        return 0;
    FULL_FENCE(); /* pairs with the one in bell_arm */
    _Atomic uint32_t *asleep = WORD32(bell->page, BELL_ASLEEP);
    if (LOAD(asleep) == 0 || EXCHANGE(asleep, 0) == 0)
        return 0;
    write_event(bell);
    return 1;
}

void bell_release(Bell *bell) {
    if (bell->page != NULL) {
        munmap(bell->page, HEADER_SIZE);
        close(bell->event_fd);
    }
    bell->page = NULL;
    bell->event_fd = -1;
}

static int bell_init(Bell *bell, PyObject *args, PyObject *kwargs) {
    int page_fd, event_fd;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Bell takes no keyword arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "ii", &page_fd, &event_fd))
        return -1;
    if (bell->page != NULL) {
        PyErr_SetString(errors.attach_error, "this doorbell object is attached already");
        return -1;
    }
    struct stat status;
    if (fstat(page_fd, &status) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    int seals = fcntl(page_fd, F_GET_SEALS);
    if (status.st_size != HEADER_SIZE || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        PyErr_SetString(errors.attach_error, "not a sealed doorbell page");
        return -1;
    }
    char *page = mmap(NULL, HEADER_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, page_fd, 0);
    if (page == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    if (LOAD(WORD64(page, BELL_MAGIC)) != BELL_MAGIC_VALUE ||
        LOAD(WORD32(page, BELL_LAYOUT_VERSION)) != LAYOUT_VERSION) {
        munmap(page, HEADER_SIZE);
        PyErr_SetString(errors.attach_error, "not a doorbell page of this layout version");
        return -1;
    }
    int own = fcntl(event_fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) {
        munmap(page, HEADER_SIZE);
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    bell->page = page;
    bell->event_fd = own;
    bell->generation = fork_generation();
    return 0;
}

static void bell_dealloc(Bell *bell) {
    bell_release(bell);
    PyTypeObject *type = Py_TYPE((PyObject *)bell);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(bell);
    Py_DECREF(type);
}

static PyObject *bell_close(Bell *bell, PyObject *Py_UNUSED(ignored)) {
    if (bell->waiting > 0) {
        PyErr_SetString(errors.shm_error, "a thread is waiting on the doorbell");
        return NULL;
    }
    bell_release(bell);
    Py_RETURN_NONE;
}

static PyObject *bell_is_open(Bell *bell, PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(bell->page != NULL && bell->generation == fork_generation());
}

static PyObject *bell_claim(Bell *bell, PyObject *arg) {
    unsigned long pid = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred() || bell_check(bell) < 0)
        return NULL;
    uint32_t nobody = 0;
    if (!atomic_compare_exchange_strong(WORD32(bell->page, BELL_PID), &nobody, (uint32_t)pid)) {
        PyErr_Format(errors.attach_error, "the doorbell belongs to process %u", (unsigned)nobody);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *bell_fileno(Bell *bell, PyObject *Py_UNUSED(ignored)) {
    return bell_check(bell) < 0 ? NULL : PyLong_FromLong(bell->event_fd);
}

static PyObject *bell_ring(Bell *bell, PyObject *Py_UNUSED(ignored)) {
    if (bell_check(bell) < 0)
        return NULL;
    STORE(WORD32(bell->page, BELL_ASLEEP), 0);
    write_event(bell);
    Py_RETURN_NONE;
}

static bool read_event(Bell *bell) {
    uint64_t count;
    ssize_t got;
    do
        got = read(bell->event_fd, &count, sizeof count);
    while (got < 0 && errno == EINTR);
    if (got == (ssize_t)sizeof count) {
        bell->wakes++;
        bell->woken = true;
    }
    return got == (ssize_t)sizeof count;
}

static PyObject *bell_clear(Bell *bell, PyObject *Py_UNUSED(ignored)) {
    if (bell_check(bell) < 0)
        return NULL;
    read_event(bell);
    Py_RETURN_NONE;
}

static PyObject *bell_disarm(Bell *bell, PyObject *Py_UNUSED(ignored)) {
    if (bell_check(bell) < 0)
        return NULL;
    STORE(WORD32(bell->page, BELL_ASLEEP), 0);
    Py_RETURN_NONE;
}

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
    FULL_FENCE(); /* pairs with the one in bell_notify */
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

static PyObject *bell_arm(Bell *bell, PyObject *args) {
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

static PyObject *bell_set_spin(Bell *bell, PyObject *arg) {
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

static PyObject *bell_wait(Bell *bell, PyObject *args) {
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
        read_event(bell);
    result = readable_ones(fds + 1, watched);
done:
    if (fds != on_stack)
        PyMem_Free(fds);
    return result;
}

static PyObject *bell_beat(Bell *bell, PyObject *arg) {
    unsigned long long now_ns = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred() || bell_check(bell) < 0)
        return NULL;
    STORE(WORD64(bell->page, BELL_HEARTBEAT_NS), now_ns);
    Py_RETURN_NONE;
}

static PyObject *bell_set_phase(Bell *bell, PyObject *arg) {
    unsigned long phase = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred() || bell_check(bell) < 0)
        return NULL;
    STORE_RELEASE(WORD32(bell->page, BELL_PHASE), (uint32_t)phase);
    Py_RETURN_NONE;
}

static PyObject *bell_page_words(Bell *bell, PyObject *Py_UNUSED(ignored)) {
    if (bell_check(bell) < 0)
        return NULL;
    return Py_BuildValue("(IIKI)", (unsigned)LOAD(WORD32(bell->page, BELL_PID)),
                         (unsigned)LOAD_ACQUIRE(WORD32(bell->page, BELL_PHASE)),
                         (unsigned long long)LOAD(WORD64(bell->page, BELL_HEARTBEAT_NS)),
                         (unsigned)LOAD(WORD32(bell->page, BELL_ASLEEP)));
}

static PyObject *bell_counters(Bell *bell, PyObject *Py_UNUSED(ignored)) {
    return Py_BuildValue("(KKKKKKK)", (unsigned long long)bell->arms, (unsigned long long)bell->refused_arms,
                         (unsigned long long)bell->waits, (unsigned long long)bell->wakes,
                         (unsigned long long)bell->rings, (unsigned long long)bell->spurious_wakes,
                         (unsigned long long)bell->spins);
}

static PyMethodDef bell_methods[] = {
    {"claim", (PyCFunction)bell_claim, METH_O, "Write the owner's pid into the page, once."},
    {"fileno", (PyCFunction)bell_fileno, METH_NOARGS, "The eventfd."},
    {"ring", (PyCFunction)bell_ring, METH_NOARGS, "Write the eventfd, asleep or not."},
    {"clear", (PyCFunction)bell_clear, METH_NOARGS, "Read the eventfd."},
    {"arm", (PyCFunction)bell_arm, METH_VARARGS, "arm(consumers, producers): True if it is safe to block."},
    {"set_spin", (PyCFunction)bell_set_spin, METH_O, "Nanoseconds that arm() may look around before it sleeps."},
    {"disarm", (PyCFunction)bell_disarm, METH_NOARGS, "Not asleep any more."},
    {"wait", (PyCFunction)bell_wait, METH_VARARGS, "wait(timeout, watch): block; the readable ones of watch."},
    {"beat", (PyCFunction)bell_beat, METH_O, "Store the heartbeat."},
    {"set_phase", (PyCFunction)bell_set_phase, METH_O, "Store the phase."},
    {"words", (PyCFunction)bell_page_words, METH_NOARGS, "(pid, phase, heartbeat_ns, asleep)"},
    {"counters", (PyCFunction)bell_counters, METH_NOARGS, "(arms, refused_arms, waits, wakes, rings, spurious_wakes, spins) of this object"},
    {"is_open", (PyCFunction)bell_is_open, METH_NOARGS, "Neither closed nor inherited by fork."},
    {"close", (PyCFunction)bell_close, METH_NOARGS, "Unmap, close the eventfd."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot bell_slots[] = {
    {Py_tp_init, bell_init},
    {Py_tp_dealloc, bell_dealloc},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_methods, bell_methods},
    {0, NULL},
};

PyType_Spec bell_spec = {
    .name = "ringserve.shm._ring.Bell", .basicsize = sizeof(Bell), .flags = Py_TPFLAGS_DEFAULT, .slots = bell_slots};
