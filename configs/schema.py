"""What a config may say. A recipe is a `ConfigDict`; `Config.from_dict` turns it into frozen dataclasses, once.

Each part is declared beside the code that reads it, with its defaults and its checks. Every error is one line that
names the field, the value and what is allowed, and comes before anything is compiled.
"""

import ast
import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from flax import nnx

import posenc
from data import Data, DataConfig, load_data
from evaluation.plan import EvalConfig
from evaluation.surface import SurfaceConfig
from models.lm import LM, ModelConfig, check_pattern
from posenc import PositionScheme, Rule, interchange
from spec import SpecError, one_of
from training.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """How often a run speaks and saves, in steps. `validate_multiples` are lengths in units of `train_len`."""

  every: int = 20
  validate_every: int = 200
  validate_multiples: tuple[float, ...] = (1.0,)
  validation_windows: int = 32
  checkpoint_every: int = 500
  keep: int = 3

  def __post_init__(self):
    for field in ('every', 'validate_every', 'validation_windows', 'checkpoint_every', 'keep'):
      if getattr(self, field) < 1:
        raise ValueError(f'{field} = {getattr(self, field)}: a whole number of at least 1 is allowed')
    if not all(0 < m < math.inf for m in self.validate_multiples):
      raise ValueError(f'validate_multiples = {self.validate_multiples}: finite numbers above 0 are allowed')


@dataclasses.dataclass(frozen=True)
class Config:
  """One run: what is trained on what, for how long, and how it is evaluated afterwards.

  posenc: a scheme, or a tuple of schemes that repeats over the layers. positions: where tokens stand in training, a
  rule of posenc/sampling.py. methods: what a sweep evaluates by default. train_len: tokens in a training window, the
  length 1x that all others are multiples of, L of every method.

  init_from: folder of a run whose parameters this one begins with; '' draws them. Everything but how positions are
  encoded is then as it is there, train_len included. method: the scaling method in force in training; what a sweep
  calls 'none' is this one. tune_len: tokens in a training window where that is not train_len, 0: it is.

  max_multiple: the longest length a sweep of this run may ask for, in units of train_len; it fixes which documents are
  held out and which tokens are scored. batch: windows per micro-batch. mesh: devices (data, fsdp, context); the first
  two share the batch, fsdp the parameters and optimizer state too, context every sequence; data 0 is as many as there
  are, or as divide the batch. It changes no result but by rounding, and a run may go on on another. memory_gb: what a
  program may take, GiB of each GPU or TPU, or of the machine for CPUs; 0: what is free. Other memory is no other run.
  """

  posenc: tuple[str, ...] = ('rope',)
  positions: str = 'sequential'
  # One of each kind: all of METHODS would take three times as long, and some need numbers that only a search gives.
  methods: tuple[str, ...] = (
    'none',
    'pi',
    'ntk',
    'yarn',
    'yarn(factor=8)',
    'llama31',
    'logn',
    'sliding_window',
    'rerope',
  )
  init_from: str = ''
  method: str = 'none'
  train_len: int = 512
  tune_len: int = 0
  max_multiple: int = 32
  steps: int = 10_000
  batch: int = 32
  seed: int = 0
  mesh: tuple[int, int, int] = (0, 1, 1)
  memory_gb: float = 0.0
  data: DataConfig = DataConfig()
  model: ModelConfig = ModelConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  eval: EvalConfig = EvalConfig()
  surface: SurfaceConfig = SurfaceConfig()
  log: LogConfig = LogConfig()

  def __post_init__(self):
    # No step at all: another run's parameters under this one's positions, to be swept as they are.
    for field, least in (
      ('train_len', 1),
      ('tune_len', 0),
      ('max_multiple', 1),
      ('steps', not self.init_from),
      ('batch', 1),
    ):
      if getattr(self, field) < least:
        raise ValueError(f'{field} = {getattr(self, field)}: a whole number of at least {int(least)} is allowed')
    if self.train_len * self.max_multiple > 2**24:
      raise ValueError(
        f'max_multiple = {self.max_multiple}: at most {2**24} tokens are allowed, not {self.train_len} times as many: '
        'beyond, float32 skips positions'
      )
    if self.tune_len > 2**24:
      raise ValueError(
        f'tune_len = {self.tune_len}: at most {2**24} tokens are allowed: beyond, float32 skips positions'
      )
    if not 0 <= self.seed < 2**32:
      raise ValueError(f'seed = {self.seed}: a whole number from 0 to 2**32 - 1 is allowed')
    if len(self.mesh) != 3 or min(self.mesh[1:]) < 1 or self.mesh[0] < 0:
      raise ValueError(
        f'mesh = {self.mesh}: three whole numbers (data, fsdp, context) of at least 1 are allowed, data also 0'
      )
    if not 0 <= self.memory_gb < math.inf:
      raise ValueError(f'memory_gb = {self.memory_gb}: a finite number of at least 0 is allowed')
    data, fsdp, context = self.mesh
    if self.batch % (max(data, 1) * fsdp):
      raise ValueError(f'mesh = {self.mesh}: a data x fsdp that divides batch = {self.batch} is allowed')
    if self.window % context:
      field = 'tune_len' if self.tune_len else 'train_len'
      raise ValueError(f'mesh = {self.mesh}: a context that divides {field} = {self.window} is allowed')
    if not self.posenc:
      raise ValueError('posenc = (): at least one scheme is allowed')
    if not self.methods or len(set(self.methods)) != len(self.methods):
      raise ValueError(f'methods = {self.methods}: at least one method, each once, is allowed')
    with _naming('methods'):
      for method in self.methods:
        posenc.check_method(method)
    with _naming('posenc'):
      slots = [self.build_scheme(text) for text in self.posenc]
    check_pattern(self.model, slots)
    with _naming('method'):
      object.__setattr__(
        self, 'method', interchange.ours(self.method, self.train_len, [s.base for s in slots if s.rot])
      )
      try:
        posenc.positions(self.method, slots, self.train_len, self.window)
      except posenc.Unsupported as reason:
        raise SpecError(str(reason)) from None
    with _naming('positions'):
      rule = self.build_rule(slots)
    for method in self.methods:
      # Unsupported is no error: the sweep records it as the outcome of the method's points.
      with _naming('methods'), contextlib.suppress(posenc.Unsupported):
        posenc.positions(method, slots, self.train_len, self.train_len, rule=rule)
    # Under our own names from here on: the same method, said in two ways, is one curve.
    object.__setattr__(self, 'methods', tuple(dict.fromkeys(interchange.ours(method) for method in self.methods)))
    targets = self.eval.targets(self.train_len)
    scored = {'eval.multiples': self.eval.multiples}
    if self.surface.checkpoints:
      scored['surface.multiples'] = self.surface.multiples
    fields = {**scored, 'log.validate_multiples': self.log.validate_multiples}
    for field, multiple in ((field, multiple) for field, multiples in fields.items() for multiple in multiples):
      if abs(multiple * self.train_len - self.tokens(multiple)) > 1e-6:  # 1.1 x 100 is 110.00000000000001
        raise ValueError(f'{field}: {multiple} x train_len = {self.train_len}: a whole number of tokens is allowed')
      if multiple > self.max_multiple:
        raise ValueError(f'{field}: {multiple}: at most max_multiple = {self.max_multiple} is allowed')
      if self.tokens(multiple) % context:
        raise ValueError(
          f'mesh = {self.mesh}: a context that divides the {self.tokens(multiple)} tokens of {field}: {multiple} '
          'is allowed'
        )
    for field, multiple in ((field, multiple) for field, multiples in scored.items() for multiple in multiples):
      if multiple * self.train_len <= targets:
        raise ValueError(
          f'{field}: {multiple} x train_len = {multiple * self.train_len:g} tokens: more than the {targets} '
          'targets that every window scores is allowed'
        )

  @property
  def window(self) -> int:
    """Tokens in a training window."""
    return self.tune_len or self.train_len

  def tokens(self, multiple: float) -> int:
    """A length given in units of `train_len`, in tokens."""
    return round(multiple * self.train_len)

  def build_scheme(self, text: str) -> PositionScheme:
    """The scheme with this run's shapes, for its checks and its numbers: its parameters are shapes, however large."""
    build = functools.partial(
      posenc.build,
      text,
      heads=self.model.heads,
      head_dim=self.model.width,
      d_model=self.model.d_model,
      train_len=self.train_len,
    )
    return nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))

  def build_rule(self, slots: Sequence[PositionScheme]) -> Rule:
    """Where tokens stand in training, for `slots` as `build_scheme` makes them."""
    return posenc.build_rule(
      self.positions,
      slots,
      train_len=self.window,
      layers=self.model.layers,
      method=self.method,
      base_len=self.train_len,
    )

  def load_data(self) -> Data:
    """The corpus, split so that every test document serves the longest length a sweep of this run may ask for."""
    shortest = self.eval.min_test_tokens(self.train_len, self.max_multiple)
    data = load_data(self.data, train_len=self.train_len, min_test_tokens=shortest, spans=self.eval.spans)
    for multiple in self.eval.multiples:
      if self.tokens(multiple) % data.stride:
        raise SpecError(
          f'config.eval.multiples: {multiple} x train_len = {self.tokens(multiple)} tokens: '
          f'a multiple of {data.stride}, the stride of corpus {data.name!r}, is allowed'
        )
    ids = data.tokenizer.ids(bos=self.data.bos != 'none')
    if 0 < self.model.vocab < ids:
      raise SpecError(
        f'config.model.vocab = {self.model.vocab}: at least the {ids} ids of the tokenizer, or 0, is allowed'
      )
    return data

  def build_model(self, vocab_size: int) -> LM:
    """vocab_size: ids of the tokenizer."""
    rows = self.model.vocab or vocab_size
    return LM(self.model, self.posenc, vocab_size=rows, train_len=self.train_len, rngs=nnx.Rngs(self.seed))

  def to_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> 'Config':
    return _convert(cls, values, 'config')


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
  """Errors in a scheme or method string say which field of the config holds it."""
  try:
    yield
  except SpecError as error:
    raise SpecError(f'{field}: {error}') from None


def default() -> ml_collections.ConfigDict:
  """A `ConfigDict` with every field at its default, for a recipe to change.

  Not type-safe itself: `posenc` is a string or a tuple of strings, and `Config.from_dict` checks every type anyway.
  """
  values: dict[str, Any] = dataclasses.asdict(Config())
  values['posenc'] = values['posenc'][0]  # so that the command line can say --config.posenc=alibi
  return ml_collections.ConfigDict(values, type_safe=False)


def _convert(cls: type, values: Mapping[str, Any], where: str) -> Any:
  fields = {field.name: field for field in dataclasses.fields(cls)}
  kwargs = {}
  for key, value in values.items():
    if key not in fields:
      raise SpecError(one_of(f'{where}: field', key, fields))
    default = fields[key].default
    kwargs[key] = _field(f'{where}.{key}', value, default)
  try:
    return cls(**kwargs)
  except ValueError as error:
    message = str(error)
    raise SpecError(message if message.startswith('config.') else f'{where}.{message}') from None


def _field(name: str, value: Any, default: Any) -> Any:
  """`value` as the type of `default`; ints widen to floats, nothing else is converted."""
  if dataclasses.is_dataclass(default) and not isinstance(default, type):
    if not isinstance(value, Mapping):
      raise SpecError(f'{name} = {value!r}: a group of fields is allowed')
    return _convert(type(default), value, name)
  if isinstance(default, tuple):
    if isinstance(value, str):
      value = _strings(name, value)
    if not isinstance(value, (tuple, list)):
      value = (value,)
    return tuple(_field(name, item, default[0] if default else '') for item in value)  # empty: of strings
  if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**32:
    # The length of nothing, as a float perhaps another number; and of the largest Python would not give the digits.
    shown = value if abs(value) < 2**64 else f'{"-" * (value < 0)}2**{value.bit_length() - 1} or more'
    raise SpecError(f'{name} = {shown}: a whole number below 2**32 is allowed, larger ones as 1e12')
  if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if isinstance(default, bool) != isinstance(value, bool) or not isinstance(value, type(default)):
    raise SpecError(f'{name} = {value!r}: a value of type {type(default).__name__} is allowed')
  return value


def _strings(name: str, value: str) -> tuple[str, ...]:
  """'rope' is one string; "('rope', 'nope')", as the command line hands it over, is two."""
  if not value.startswith(('(', '[')):
    return (value,)
  with contextlib.suppress(ValueError, SyntaxError):
    parsed = ast.literal_eval(value)
    if isinstance(parsed, (tuple, list)):
      return tuple(parsed)
    if isinstance(parsed, str):  # "('rope')": parentheses alone make no tuple
      return (parsed,)
  raise SpecError(f"{name} = {value!r}: a string, or a tuple of strings such as ('rope', 'nope'), is allowed")
