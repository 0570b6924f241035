"""Can rings be used here? The only module that looks for the C extension."""

from __future__ import annotations

import importlib
import mmap
from types import ModuleType
from typing import Literal

from ringserve.shm.bell_page import PAGE_SIZE
from ringserve.shm.errors import TransportUnavailable
from ringserve.shm.socket_bell import SocketBell

Transport = Literal["auto", "ring", "socket"]


def _extension() -> ModuleType | None:
    try:
        return importlib.import_module("ringserve.shm._ring")
    except ImportError:  # not built, or built for another machine
        return None


def extension_available() -> bool:
    """Was the C extension built, and can it be loaded?"""
    return _extension() is not None


def ring_unavailable_reason() -> str | None:
    """Why the ring transport cannot be used; None if it can. For one line in a log."""
    if not extension_available():
        return "the C extension ringserve.shm._ring cannot be loaded (was there a C compiler at installation?)"
    if mmap.PAGESIZE > PAGE_SIZE:
        return f"memory pages of {mmap.PAGESIZE} bytes cannot be mapped at the ring's offset of {PAGE_SIZE}"
    return None


def choose_transport(wanted: Transport) -> Literal["ring", "socket"]:
    """The transport for ``wanted``; ``auto`` is rings where they can be used."""
    if wanted == "socket":
        return "socket"
    reason = ring_unavailable_reason()
    if reason is None:
        return "ring"
    if wanted == "ring":
        raise TransportUnavailable(f"rings cannot be used: {reason}; use transport 'socket'")
    return "socket"


def bell_type(transport: Literal["ring", "socket"]) -> type[SocketBell]:
    """The doorbell for channels of this transport. For rings: the extension's ``Bell``, of the same interface."""
    if transport == "socket":
        return SocketBell
    bell: type[SocketBell] = importlib.import_module("ringserve.shm._ring").Bell
    return bell
