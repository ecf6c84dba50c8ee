"""Locks between processes. It needs no other package: weights are fetched before anything else works."""

from __future__ import annotations

import errno
import sys
from typing import IO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file against other processes until it is closed. False if another one has locked it."""
    try:
        if sys.platform == "win32":
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True
