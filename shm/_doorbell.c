/* The doorbell: a shared word "asleep" and an eventfd, one for each receiving process.
 *
 * No wake-up is lost: the sender stores its data, fences, reads `asleep`; the sleeper stores `asleep`, fences, reads
 * the data's words. With full fences on both sides "the sleeper missed the data" and "the sender saw it awake"
 * exclude each other. The eventfd is sticky, so being rung between arm() and poll() is enough. With several senders
 * the argument holds for each pair; the exchange leaves one of them to write.
 *
 * Here: mapping the page, ringing, what a process tells the others. Its owner's sleep is in _sleep.c.
 */
#include "_doorbell.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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
    FULL_FENCE(); /* pairs with the one in declare_asleep, _sleep.c */
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

bool bell_read_event(Bell *bell) {
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
    bell_read_event(bell);
    Py_RETURN_NONE;
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
