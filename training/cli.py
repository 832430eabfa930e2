"""How the programs start, and how they end when the user's input is at fault: one line on stderr, exit code 2."""

import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from spec import SpecError
from training import hosts
from training.devices import start_jax
from training.hosts import Stopped

# ml_collections raises AttributeError for a misspelt key and TypeError for a wrong type, absl its own for the rest.
PARSING = flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, SyntaxError, ImportError

DISK = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS


def read_config(options: Sequence[str]) -> Any:
  """The recipe that `options` name and change, --config=FILE --config.field=value ..., as the programs read them."""
  table, argv = flags.FlagValues(), sys.argv
  config_flags.DEFINE_config_file('config', None, 'The recipe.', lock_config=True, flag_values=table)
  sys.argv = ['train.py', *options]  # config_flags looks for its overrides there
  try:
    table(sys.argv)
    return table.config
  except PARSING as error:
    raise SpecError(_one_line(error)) from None
  finally:
    sys.argv = argv


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
    if 'config' in flags.FLAGS and flags.FLAGS.config is not None:
      flags.FLAGS.config.to_dict()  # config_flags keeps the error of a file that it cannot load until it is used
  except PARSING as error:
    fail(_one_line(error))
  if len(rest) > 1:
    fail(f'{rest[1]!r}: stray argument; options are written --name=value')
  return rest


def _one_line(error: BaseException) -> str:
  text = str(error)
  if isinstance(error, AttributeError) and error.args and isinstance(error.args[0], KeyError):
    text = f'config: {error.args[0].args[0]}'  # a misspelt key: config_flags wraps the error that has the suggestion
  elif isinstance(error, KeyError) and error.args:
    sentence = str(error.args[0])  # str(error) would quote it and escape its line breaks
    text = f'config: {sentence}' if ' ' in sentence else f'KeyError: {text}'
  elif 'Traceback' in text or 'earlier failure to load' in text:
    text = text.strip().splitlines()[-1]  # config_flags wraps what loading a config file raised; the end says what
  return ' '.join(text.split()) or type(error).__name__


def fail(message: str, code: int = 2) -> NoReturn:
  print(f'error: {message}', file=sys.stderr, flush=True)
  hosts.leave(code)


def guard(main: Callable[[], int | None]) -> None:
  """Calls `main` and exits with its return value, or with one line where the user's input or disk is at fault."""
  try:
    code = main()
  except SpecError as error:
    fail(_one_line(error))
  except Stopped as error:
    fail(_one_line(error), 1)
  except KeyboardInterrupt:
    fail('interrupted', 130)
  except Exception as error:
    # A path that cannot be read or written is the user's business, and so is a disk that is full, of which Python names
    # no file when it writes; anything else without a file name is ours: traceback.
    if isinstance(error, OSError) and (error.filename is not None or error.errno in DISK):
      fail(f'{error.filename or "a file that was being written"}: {error.strerror}')
    why = hosts.lost(error)
    if why is not None:
      fail(f'a process of this run is gone ({why}); start all of them again to resume', 1)
    if jax.distributed.is_initialized():
      traceback.print_exc()
      hosts.leave(1)
    raise
  else:
    sys.exit(code or 0)


def run(main: Callable[[], int | None]) -> None:
  """`guard` for a program with absl flags."""
  logging.set_verbosity(logging.WARNING)  # orbax tells of every save in thirty lines
  try:
    start_jax()  # before the flags: a config builds its schemes to check them
  except SpecError as error:
    fail(_one_line(error))
  app.run(lambda _: guard(main), flags_parser=_parse)
