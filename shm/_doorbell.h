/* What the doorbell's two files share: _doorbell.c, the bell itself, and _sleep.c, its owner's sleep. */
#ifndef RINGSERVE_SHM_DOORBELL_H
#define RINGSERVE_SHM_DOORBELL_H

#include "_ring.h"

/* 0, or -1 with an exception: closed here, or inherited by fork. */
static inline int bell_check(const Bell *bell) {
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

/* Empty the eventfd, which counts as a wake-up if it was rung. Whether it was. */
bool bell_read_event(Bell *bell);

/* Methods of Bell. */
PyObject *bell_arm(Bell *bell, PyObject *args);
PyObject *bell_disarm(Bell *bell, PyObject *ignored);
PyObject *bell_set_spin(Bell *bell, PyObject *nanoseconds);
PyObject *bell_wait(Bell *bell, PyObject *args);

#endif
