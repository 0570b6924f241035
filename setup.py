"""The ring's C extension; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "ringserve.shm._ring",
            ["shm/_ring.c", "shm/_doorbell.c", "shm/_sleep.c", "shm/_producer.c", "shm/_consumer.c"],
            depends=["shm/_ring.h", "shm/_doorbell.h", "shm/_layout.h"],
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden"],
            py_limited_api=True,
            optional=True,  # without a compiler the same API runs over a socket pair
        )
    ]
)
