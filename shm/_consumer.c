/* The consumer's end of a ring: take frames out, checking each before it is believed.
 *
 * The producer's process may be broken or hostile: positions and headers are read once into locals, checked, and only
 * the checked copies are used, so nothing outside the mapping is ever read.
 */
#include "_ring.h"

#include <string.h>

struct RingConsumer {
    PyObject_HEAD
    Segment segment;
    uint64_t head;      /* the next frame */
    uint64_t published; /* the head that the producer may see */
    uint64_t tail;      /* the producer's position as last read */
    PyObject *assembly; /* bytes: a fragmented message on its way, or NULL */
    uint64_t assembled, assembly_size;
    uint64_t messages, bytes, rings;
    uint64_t high_water; /* most bytes ever found waiting */
    unsigned long peer_pid; /* of a producer that died, or 0 */
    const char *corrupt;    /* what was wrong, or NULL; the channel is lost */
    uint16_t sequence;
    bool ended; /* the end, good or bad, was reported */
};

typedef struct {
    uint32_t length;
    uint8_t kind, flags;
    uint16_t sequence;
} Frame;

static int load_tail(RingConsumer *c) {
    uint64_t tail = LOAD_ACQUIRE(WORD64(c->segment.base, RING_TAIL)); /* pairs with the release in publish: what
                                                                         lies before it is complete */
    if (tail - c->head > c->segment.capacity || tail % 8 != 0 || tail - c->head < c->tail - c->head) {
        c->corrupt = "the producer's position is impossible";
        return -1;
    }
    c->tail = tail;
    if (tail - c->head > c->high_water)
        c->high_water = tail - c->head;
    return 0;
}

static void publish_head(RingConsumer *c) {
    if (c->published == c->head)
        return;
    char *base = c->segment.base;
    STORE(WORD64(base, RING_CONS_MESSAGES), c->messages);
    STORE(WORD64(base, RING_CONS_BYTES), c->bytes);
    STORE(WORD64(base, RING_CONS_HIGH_WATER), c->high_water);
    STORE_RELEASE(WORD64(base, RING_HEAD), c->head);
    c->published = c->head;
    FULL_FENCE(); /* pairs with the one in make_room */
    _Atomic uint32_t *want_space = WORD32(base, RING_WANT_SPACE);
    if (LOAD(want_space) == 0)
        return;
    uint64_t free_space = c->segment.capacity - (c->tail - c->head);
    if (free_space >= c->segment.capacity / 4 && EXCHANGE(want_space, 0) != 0 && bell_notify(c->segment.peer))
        STORE(WORD64(base, RING_CONS_RINGS), ++c->rings);
}

/* The frame at head, if it is one that may come here and lies before the tail. */
static int read_header(RingConsumer *c, Frame *frame) {
    const char *at = c->segment.data + (c->head & c->segment.mask);
    uint64_t raw = LOAD((const _Atomic uint64_t *)(const void *)at); /* one read: checked and used is the same */
    uint8_t bytes[FRAME_HEADER];
    memcpy(bytes, &raw, sizeof bytes);
    memcpy(&frame->length, bytes, 4);
    frame->kind = bytes[4];
    frame->flags = bytes[5];
    memcpy(&frame->sequence, bytes + 6, 2);
    uint64_t size = (FRAME_HEADER + (uint64_t)frame->length + 7) & ~UINT64_C(7);
    bool inside = frame->kind == FRAME_MIDDLE || frame->kind == FRAME_LAST;
    if (size > c->segment.max_frame)
        c->corrupt = "a frame is longer than a frame may be";
    else if (size > c->tail - c->head)
        c->corrupt = "a frame runs over the producer's position";
    else if (frame->sequence != c->sequence)
        c->corrupt = "a frame has the wrong sequence number";
    else if (frame->kind > FRAME_LAST || frame->flags != 0)
        c->corrupt = "a frame is of an unknown kind";
    else if (inside != (c->assembly != NULL))
        c->corrupt = inside ? "a fragment without a beginning" : "a fragmented message was not finished";
    else
        return 0;
    return -1;
}

/* Take a fragment's payload; 1 if the message is complete (in c->assembly), 0 if not, -1: corrupt or exception. */
static int take_fragment(RingConsumer *c, const Frame *frame, const char *payload) {
    uint64_t length = frame->length;
    if (frame->kind == FRAME_FIRST) {
        uint64_t total;
        if (length < sizeof total) {
            c->corrupt = "a first fragment is too short";
            return -1;
        }
        memcpy(&total, payload, sizeof total);
        payload += sizeof total;
        length -= sizeof total;
        if (total > MAX_MESSAGE || total <= length) {
            c->corrupt = "a fragmented message has an impossible length";
            return -1;
        }
        c->assembly = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
        if (c->assembly == NULL)
            return -1;
        c->assembled = 0;
        c->assembly_size = total;
    }
    uint64_t left = c->assembly_size - c->assembled;
    if (frame->kind == FRAME_LAST ? length != left : length >= left) {
        c->corrupt = "a fragmented message has another length than announced";
        return -1;
    }
    memcpy(PyBytes_AsString(c->assembly) + c->assembled, payload, length);
    c->assembled += length;
    return frame->kind == FRAME_LAST;
}

/* Take the frame at head: 0, or -1 (corrupt, or an exception: out of memory). A complete message goes to the list. */
static int take_frame(RingConsumer *c, PyObject *list) {
    Frame frame;
    if (read_header(c, &frame) < 0)
        return -1;
    const char *payload = c->segment.data + (c->head & c->segment.mask) + FRAME_HEADER;
    PyObject *message = NULL;
    if (frame.kind == FRAME_WHOLE) {
        message = PyBytes_FromStringAndSize(payload, (Py_ssize_t)frame.length);
        if (message == NULL)
            return -1;
    } else {
        int complete = take_fragment(c, &frame, payload);
        if (complete < 0)
            return -1;
        if (complete) {
            message = c->assembly;
            c->assembly = NULL;
        }
    }
    c->head += (FRAME_HEADER + (uint64_t)frame.length + 7) & ~UINT64_C(7);
    c->sequence++;
    if (message != NULL) {
        c->messages++;
        c->bytes += (uint64_t)PyBytes_Size(message);
        int failed = PyList_Append(list, message);
        Py_DECREF(message);
        return failed;
    }
    return 0;
}

static bool producer_closed(const RingConsumer *c) {
    return LOAD_ACQUIRE(WORD32(c->segment.base, RING_PROD_STATE)) == END_CLOSED;
}

static PyObject *raise_corrupt(RingConsumer *c) {
    c->ended = true;
    PyErr_Format(errors.corrupt_frame, "channel %S: %s", c->segment.name, c->corrupt);
    return NULL;
}

/* Nothing was there: is that for good? Returns the (empty) list, or NULL with an exception. */
static PyObject *nothing(RingConsumer *c, PyObject *list, bool closed) {
    if (c->corrupt == NULL && !closed && c->peer_pid == 0)
        return list;
    Py_DECREF(list);
    if (c->corrupt == NULL && closed && c->assembly != NULL)
        c->corrupt = "the producer closed in the middle of a message";
    if (c->corrupt != NULL)
        return raise_corrupt(c);
    c->ended = true;
    if (closed) {
        PyErr_Format(errors.channel_closed, "channel %S: the producer closed", c->segment.name);
        return NULL;
    }
    PyObject *error = PyObject_CallFunction(errors.peer_died, "Ok", c->segment.name, c->peer_pid);
    if (error != NULL) {
        PyErr_SetObject(errors.peer_died, error);
        Py_DECREF(error);
    }
    return NULL;
}

static PyObject *consumer_drain(RingConsumer *c, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"max_messages", "max_bytes", NULL};
    Py_ssize_t max_messages = 64, max_bytes = 65536;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|nn", names, &max_messages, &max_bytes) ||
        segment_check(&c->segment) < 0)
        return NULL;
    if (c->corrupt != NULL)
        return raise_corrupt(c);
    PyObject *list = PyList_New(0);
    if (list == NULL)
        return NULL;
    uint64_t begin = c->head;
    bool closed = false;
    while (PyList_Size(list) < max_messages && c->head - begin < (uint64_t)max_bytes) {
        if (c->tail == c->head) {
            closed = producer_closed(c); /* before the tail: a closed producer's tail is final */
            if (load_tail(c) < 0 || c->tail == c->head)
                break;
        }
        if (take_frame(c, list) < 0)
            break;
        if (c->head - c->published >= c->segment.capacity / 8)
            publish_head(c);
    }
    publish_head(c);
    if (PyErr_Occurred()) {
        Py_DECREF(list);
        return NULL;
    }
    /* What came before the end or the fault is delivered first; the next drain raises. */
    if (c->head != begin && (c->corrupt == NULL || PyList_Size(list) > 0))
        return list;
    return nothing(c, list, closed);
}

bool consumer_ready(RingConsumer *c) {
    if (c->segment.base == NULL || c->ended)
        return false;
    return c->corrupt != NULL || c->peer_pid != 0 || c->tail != c->head ||
           LOAD_ACQUIRE(WORD64(c->segment.base, RING_TAIL)) != c->head || producer_closed(c);
}

uint64_t consumer_progress(const RingConsumer *c) { return c->head; }

static PyObject *consumer_mark_peer_dead(RingConsumer *c, PyObject *arg) {
    unsigned long pid = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred() || segment_check(&c->segment) < 0)
        return NULL;
    c->peer_pid = pid;
    Py_RETURN_NONE;
}

static PyObject *consumer_close(RingConsumer *c, PyObject *Py_UNUSED(ignored)) {
    if (c->segment.base != NULL && c->segment.generation == fork_generation()) {
        char *base = c->segment.base;
        STORE_RELEASE(WORD32(base, RING_CONS_STATE), (uint32_t)END_CLOSED);
        FULL_FENCE(); /* pairs with the one in make_room: a producer that waits for space learns of it */
        if (EXCHANGE(WORD32(base, RING_WANT_SPACE), 0) != 0)
            bell_notify(c->segment.peer);
    }
    segment_release(&c->segment);
    Py_CLEAR(c->assembly);
    Py_RETURN_NONE;
}

static int consumer_init(RingConsumer *c, PyObject *args, PyObject *kwargs) {
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "RingConsumer takes no keyword arguments");
        return -1;
    }
    return segment_attach(&c->segment, args, RING_CONS_STATE);
}

static void consumer_dealloc(RingConsumer *c) {
    segment_release(&c->segment);
    Py_CLEAR(c->segment.name);
    Py_CLEAR(c->assembly);
    PyTypeObject *type = Py_TYPE((PyObject *)c);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(c);
    Py_DECREF(type);
}

static PyObject *consumer_counters(RingConsumer *c, PyObject *Py_UNUSED(ignored)) {
    uint64_t tail = c->segment.base == NULL ? c->head : LOAD(WORD64(c->segment.base, RING_TAIL));
    return Py_BuildValue("(KKKKK)", (unsigned long long)c->messages, (unsigned long long)c->bytes,
                         (unsigned long long)c->rings, (unsigned long long)(tail - c->head),
                         (unsigned long long)c->high_water);
}

static PyMethodDef consumer_methods[] = {
    {"drain", (PyCFunction)(void (*)(void))consumer_drain, METH_VARARGS | METH_KEYWORDS,
     "drain(max_messages=64, max_bytes=65536): the complete messages that are there."},
    {"mark_peer_dead", (PyCFunction)consumer_mark_peer_dead, METH_O, "The producer's process (pid) is gone."},
    {"counters", (PyCFunction)consumer_counters, METH_NOARGS, "(messages, bytes, doorbell_writes, used, high_water)"},
    {"close", (PyCFunction)consumer_close, METH_NOARGS, "Tell the producer that nobody reads, unmap."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot consumer_slots[] = {
    {Py_tp_init, consumer_init},    {Py_tp_dealloc, consumer_dealloc},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_methods, consumer_methods},
    {0, NULL},
};

PyType_Spec consumer_spec = {.name = "ringserve.shm._ring.RingConsumer",
                             .basicsize = sizeof(RingConsumer),
                             .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                             .slots = consumer_slots};
