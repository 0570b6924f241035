/* Module _ring: rings and doorbells in shared memory (design: docs/ipc.md in the repository, layout: _layout.h). */
#include "_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct errors errors;
PyTypeObject *bell_type, *producer_type, *consumer_type;

/* ---- fork: counted in the child, so that a check is one comparison and no system call ---- */

static unsigned generation;

static void after_fork_in_child(void) { generation++; }

unsigned fork_generation(void) { return generation; }

/* ---- segments ---- */

static PyObject *attach_error(PyObject *name, const char *what) {
    PyErr_Format(errors.attach_error, "channel %S: %s", name, what);
    return NULL;
}

/* Map header and data, and the data once more behind them. */
static char *map_twice(int fd, uint64_t capacity) {
    size_t once = HEADER_SIZE + (size_t)capacity;
    char *base = mmap(NULL, once + (size_t)capacity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    if (mmap(base, once, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0) == MAP_FAILED ||
        mmap(base + once, (size_t)capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd,
             HEADER_SIZE) == MAP_FAILED) {
        int saved = errno;
        munmap(base, once + (size_t)capacity);
        errno = saved;
        return NULL;
    }
    return base;
}

static bool valid_sizes(uint64_t capacity, uint32_t max_frame) {
    return capacity >= MIN_CAPACITY && capacity <= MAX_CAPACITY && (capacity & (capacity - 1)) == 0 &&
           max_frame > 2 * FRAME_HEADER && max_frame <= MAX_FRAME && max_frame <= capacity / 8 && max_frame % 8 == 0;
}

int segment_attach(Segment *segment, PyObject *args, unsigned state_word) {
    PyObject *name, *peer;
    int fd;
    unsigned long long capacity, session_id;
    unsigned int max_frame, ring_id;
    if (!PyArg_ParseTuple(args, "UiO!KIIK", &name, &fd, bell_type, &peer, &capacity, &max_frame, &ring_id, &session_id))
        return -1;
    if (segment->base != NULL) {
        attach_error(name, "this object is attached already");
        return -1;
    }
    struct stat status;
    if (fstat(fd, &status) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    int seals = fcntl(fd, F_GET_SEALS);
    if (!valid_sizes(capacity, max_frame) || status.st_size != (off_t)(HEADER_SIZE + capacity)) {
        attach_error(name, "the segment does not have the agreed capacity");
        return -1;
    }
    /* Unsealed, the other side could shrink the file under us: SIGBUS. */
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
        attach_error(name, "the segment is not sealed against a change of its size");
        return -1;
    }
    char *base = map_twice(fd, capacity);
    if (base == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    const char *problem = NULL;
    uint32_t expected = END_NEW;
    if (LOAD(WORD64(base, RING_MAGIC)) != RING_MAGIC_VALUE)
        problem = "not a ring (wrong magic number)";
    else if (LOAD(WORD32(base, RING_LAYOUT_VERSION)) != LAYOUT_VERSION)
        problem = "the ring has another layout version";
    else if (LOAD(WORD32(base, RING_DATA_OFFSET)) != HEADER_SIZE || LOAD(WORD64(base, RING_CAPACITY)) != capacity ||
             LOAD(WORD32(base, RING_MAX_FRAME)) != max_frame)
        problem = "the ring does not have the agreed capacity";
    else if (LOAD(WORD32(base, RING_ID)) != ring_id || LOAD(WORD64(base, RING_SESSION_ID)) != session_id)
        problem = "the ring is another channel's, or an older session's";
    else if (!atomic_compare_exchange_strong(WORD32(base, state_word), &expected, (uint32_t)END_ATTACHED))
        problem = "this end was attached before (a ring serves one producer and one consumer, once)";
    if (problem != NULL) {
        munmap(base, HEADER_SIZE + 2 * (size_t)capacity);
        attach_error(name, problem);
        return -1;
    }
    segment->base = base;
    segment->data = base + HEADER_SIZE;
    segment->capacity = capacity;
    segment->mask = capacity - 1;
    segment->max_frame = max_frame;
    segment->generation = fork_generation();
    Py_INCREF(name);
    segment->name = name;
    Py_INCREF(peer);
    segment->peer = (Bell *)peer;
    return 0;
}

void segment_release(Segment *segment) {
    if (segment->base != NULL)
        munmap(segment->base, HEADER_SIZE + 2 * (size_t)segment->capacity);
    segment->base = segment->data = NULL;
    if (segment->peer != NULL) {
        bell_release(segment->peer);
        Py_CLEAR(segment->peer);
    }
}

int segment_check(const Segment *segment) {
    if (segment->base == NULL) {
        PyErr_SetString(errors.channel_closed, "this end of the channel is closed");
        return -1;
    }
    if (segment->generation != fork_generation()) {
        PyErr_Format(errors.forked_use, "channel %S was attached by another process", segment->name);
        return -1;
    }
    return 0;
}

static PyObject *format_ring(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd;
    unsigned long long capacity, session_id;
    unsigned int max_frame, ring_id;
    if (!PyArg_ParseTuple(args, "iKIIK", &fd, &capacity, &max_frame, &ring_id, &session_id))
        return NULL;
    if (!valid_sizes(capacity, max_frame)) {
        PyErr_SetString(PyExc_ValueError, "capacity must be a power of two from 64 KiB to 1 GiB");
        return NULL;
    }
    char *base = mmap(NULL, HEADER_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    STORE(WORD32(base, RING_LAYOUT_VERSION), LAYOUT_VERSION);
    STORE(WORD32(base, RING_DATA_OFFSET), HEADER_SIZE);
    STORE(WORD64(base, RING_CAPACITY), capacity);
    STORE(WORD32(base, RING_MAX_FRAME), max_frame);
    STORE(WORD32(base, RING_ID), ring_id);
    STORE(WORD64(base, RING_SESSION_ID), session_id);
    STORE_RELEASE(WORD64(base, RING_MAGIC), RING_MAGIC_VALUE);
    munmap(base, HEADER_SIZE);
    Py_RETURN_NONE;
}

/* ---- module ---- */

struct field {
    const char *name;
    unsigned offset, bytes;
    const char *writer;
};
#define AS_ROW(name, offset, bytes, writer) {#name, offset, bytes, writer},
static const struct field fields[] = {RING_FIELDS(AS_ROW) BELL_FIELDS(AS_ROW)};
#undef AS_ROW

static PyObject *layout_table(void) {
    PyObject *table = PyDict_New();
    for (size_t i = 0; table != NULL && i < sizeof fields / sizeof fields[0]; i++) {
        PyObject *row = Py_BuildValue("(IIs)", fields[i].offset, fields[i].bytes, fields[i].writer);
        if (row == NULL || PyDict_SetItemString(table, fields[i].name, row) < 0)
            Py_CLEAR(table);
        Py_XDECREF(row);
    }
    return table;
}

static int load_errors(void) {
    const struct {
        const char *name;
        PyObject **where;
    } wanted[] = {
        {"ShmError", &errors.shm_error},         {"MessageTooLarge", &errors.message_too_large},
        {"ChannelClosed", &errors.channel_closed}, {"PeerDied", &errors.peer_died},
        {"CorruptFrame", &errors.corrupt_frame}, {"AttachError", &errors.attach_error},
        {"ForkedUse", &errors.forked_use},
    };
    PyObject *module = PyImport_ImportModule("ringserve.shm.errors");
    if (module == NULL)
        return -1;
    int result = 0;
    for (size_t i = 0; result == 0 && i < sizeof wanted / sizeof wanted[0]; i++)
        if ((*wanted[i].where = PyObject_GetAttrString(module, wanted[i].name)) == NULL)
            result = -1;
    Py_DECREF(module);
    return result;
}

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type) {
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type == NULL ? -1 : PyModule_AddType(module, *type);
}

static PyMethodDef functions[] = {
    {"format_ring", format_ring, METH_VARARGS, "Write a ring's header: fd, capacity, max_frame, ring_id, session_id."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_ring", .m_doc = "Rings and doorbells in shared memory.", .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__ring(void) {
    if (load_errors() < 0)
        return NULL;
    if (pthread_atfork(NULL, NULL, after_fork_in_child) != 0) {
        PyErr_SetString(PyExc_ImportError, "pthread_atfork failed");
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *table = layout_table();
    if (table == NULL || PyModule_AddObjectRef(module, "LAYOUT", table) < 0 ||
        PyModule_AddIntConstant(module, "LAYOUT_VERSION", LAYOUT_VERSION) < 0 ||
        add_type(module, &bell_spec, &bell_type) < 0 || add_type(module, &producer_spec, &producer_type) < 0 ||
        add_type(module, &consumer_spec, &consumer_type) < 0)
        Py_CLEAR(module);
    Py_XDECREF(table);
    return module;
}
