/* What the doorbell's two files share: _doorbell.c, the bell itself, and _sleep.c, its owner's sleep. */
#ifndef RINGSERVE_SHM_DOORBELL_H
#define RINGSERVE_SHM_DOORBELL_H

#include "_ring.h"

/* 0, or -1 with an exception: closed here, or inherited by fork. */
int bell_check(const Bell *bell);
/* Empty the eventfd, which counts as a wake-up if it was rung. Whether it was. */
bool bell_read_event(Bell *bell);

/* Methods of Bell. */
PyObject *bell_arm(Bell *bell, PyObject *args);
PyObject *bell_disarm(Bell *bell, PyObject *ignored);
PyObject *bell_set_spin(Bell *bell, PyObject *nanoseconds);
PyObject *bell_wait(Bell *bell, PyObject *args);

#endif
