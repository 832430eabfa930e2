"""One writer a folder: the file `.lock` in it, locked for as long as the process lives, with its pid and host inside.

The lock is the kernel's, not the file's: one whose process was killed, or whose host went down, is free again. POSIX
record locks, because NFS has had them for longest, and because a process does not refuse itself.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
import time

from spec import SpecError

NAME = '.lock'
_held: dict[pathlib.Path, int] = {}  # closing any descriptor of the file would give the lock away


def take(directory: pathlib.Path, what: str = 'run') -> None:
  """Until this process ends. SpecError with the pid and the host of whoever has it."""
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / NAME
  if path in _held:
    return
  file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
  for attempt in range(10):  # `holder` has it for the moment in which it asks
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      break
    except OSError as error:
      if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        print(f'note: {path}: this file system has no locks; nothing keeps a second {what} out of this folder')
        break
      if error.errno not in (errno.EACCES, errno.EAGAIN):
        raise OSError(error.errno, error.strerror, str(path)) from None
      if attempt == 9:
        who = _name(file)
        os.close(file)
        raise SpecError(
          f'{directory}: in use by another {what} ({who}); stop that one, or use another folder'
        ) from None
      time.sleep(0.05)
  _held[path] = file
  os.ftruncate(file, 0)
  os.pwrite(file, f'pid {os.getpid()} on {socket.gethostname()}\n'.encode(), 0)


def holder(directory: pathlib.Path) -> str | None:
  """'pid 1234 on host' of another process that has it; None where nobody has."""
  path = directory / NAME
  if path in _held:
    return None
  with contextlib.suppress(FileNotFoundError):
    file = os.open(path, os.O_RDONLY)
    try:
      fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
      return _name(file) if error.errno in (errno.EACCES, errno.EAGAIN) else None
    finally:
      os.close(file)
  return None


def _name(file: int) -> str:
  return os.pread(file, 200, 0).decode(errors='replace').strip() or 'its pid is not told yet'
