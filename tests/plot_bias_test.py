"""The bias figure: which numbers it draws, from a string and from a checkpoint, and what it refuses."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from configs import smoke
from configs.schema import Config
from posenc.alibi import slopes
from scripts import plot_bias
from spec import SpecError
from training import cli, provenance
from training.checkpoints import Checkpoints

BIASES = [name for name, scheme in posenc.SCHEMES.items() if issubclass(scheme, posenc.Bias)]


@pytest.fixture
def panels(monkeypatch):
  """What the figures of a test were drawn from."""
  seen, plot = [], plot_bias.plot

  def spy(path, panels, train_len):
    seen.append((train_len, dict(panels)))
    plot(path, panels, train_len)

  monkeypatch.setattr(plot_bias, 'plot', spy)
  return seen


def test_distance_runs_from_the_last_query_backwards(tmp_path, panels, capsys):
  """ALiBi is its slopes times the distance; each scheme asked for has its panel."""
  out = tmp_path / 'new' / 'bias.png'
  asked = [f'--scheme={text}' for text in ('alibi', 'sandwich(d=16)')]
  plot_bias.main([*asked, f'--out={out}', '--train_len=8', '--heads=3', '--length=12'])
  ((train_len, drawn),) = panels
  assert train_len == 8 and list(drawn) == ['alibi', 'sandwich(d=16)']
  np.testing.assert_allclose(drawn['alibi'], -slopes(3)[:, None] * np.arange(12), rtol=1e-6)
  assert (drawn['sandwich(d=16)'][:, 0] == 0).all() and (drawn['sandwich(d=16)'][:, 1:] < 0).all()
  assert out.read_bytes().startswith(b'\x89PNG') and capsys.readouterr().out == f'{out}\n'


@pytest.mark.parametrize('name', BIASES)
def test_every_bias_can_be_drawn(name):
  """At four times the training length; what it draws is what attention adds, for the last query."""
  ((title, got),) = plot_bias.untrained([name], 32, 8, 2, 0)
  scheme = posenc.build(name, heads=2, head_dim=32, d_model=64, train_len=8, rngs=nnx.Rngs(0))
  at_T = jnp.arange(32.0)
  want, _ = scheme.score(jnp.zeros((1, 2, 32, 32)), None, None, at_T, at_T, (), (), ())
  assert title == name and got.shape == (2, 32)
  np.testing.assert_allclose(got[:, ::-1], want[0, :, -1], atol=1e-5)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run of four layers, fire and kerple_log in turn, saved before its first step."""
  workdir = tmp_path_factory.mktemp('run')
  recipe = smoke.get_config(('fire', 'kerple_log'))
  recipe.model.layers = 4
  config = Config.from_dict(recipe.to_dict())
  data = config.load_data()
  provenance.claim(workdir, config, data)
  params = nnx.to_pure_dict(nnx.state(config.build_model(data.tokenizer.vocab_size)))
  checkpoints = Checkpoints(workdir, keep=1)
  checkpoints.save(5, {'params': params})
  checkpoints.close()
  return workdir, config, params


def test_a_run_is_drawn_from_its_checkpoint(workdir, tmp_path, panels):
  """FIRE has a panel for each of its layers, 0 and 2, with that layer's numbers; KERPLE one for all."""
  folder, config, params = workdir
  plot_bias.main([f'--workdir={folder}', f'--out={tmp_path / "bias.png"}', '--length=48'])
  ((train_len, drawn),) = panels
  assert train_len == 32
  assert list(drawn) == ['fire, layer 0, step 5', 'fire, layer 2, step 5', 'kerple_log, step 5']
  fire, kerple = (config.build_scheme(text) for text in config.posenc)
  for repeat, got in enumerate(list(drawn.values())[:2]):
    nnx.update(fire, jax.tree.map(lambda leaf, i=repeat: leaf[i], params['schemes'][0]))
    np.testing.assert_allclose(got, plot_bias.bias(fire, 48), rtol=1e-6)
  assert abs(drawn['fire, layer 0, step 5'] - drawn['fire, layer 2, step 5']).max() > 0.1
  nnx.update(kerple, params['schemes'][1])
  np.testing.assert_allclose(drawn['kerple_log, step 5'], plot_bias.bias(kerple, 48), rtol=1e-6)


def refused(*arguments):
  with pytest.raises(SpecError) as caught:
    plot_bias.main(list(arguments))
  assert '\n' not in str(caught.value)
  return str(caught.value)


def test_a_run_has_its_own_shapes(workdir, tmp_path):
  message = refused(f'--workdir={workdir[0]}', f'--out={tmp_path / "bias.png"}', '--heads=3')
  assert message.startswith('heads = 3: the run in') and message.endswith('has 2')


@pytest.mark.parametrize(('arguments', 'words'), [
  (['--scheme=rope'], f"scheme = 'rope': adds no bias; allowed: {', '.join(BIASES)}"),
  (['--scheme=alibi', '--scheme=cope'], "scheme = 'cope': adds no bias"),
  (['--scheme=aliby'], "did you mean 'alibi'"),
  (['--scheme=alibi', '--length=1'], 'length = 1: a whole number of at least 2'),
  (['--scheme=alibi', '--heads=0'], 'heads = 0: a whole number of at least 1'),
])  # fmt: skip
def test_a_mistake_is_one_line(tmp_path, arguments, words):
  assert words in refused(*arguments, f'--out={tmp_path / "bias.png"}') and not any(tmp_path.iterdir())


def test_a_run_without_a_bias_is_one_line(tmp_path, capsys, monkeypatch):
  config = Config.from_dict(smoke.get_config().to_dict())
  provenance.claim(tmp_path, config, config.load_data())
  monkeypatch.setattr(sys, 'argv', ['plot_bias', f'--workdir={tmp_path}', f'--out={tmp_path / "bias.png"}'])
  with pytest.raises(SystemExit) as caught:
    cli.guard(plot_bias.main)
  out, err = capsys.readouterr()
  assert (caught.value.code, out) == (2, '') and err.startswith('error: ') and err.count('\n') == 1
  assert "posenc = ('rope',): adds no bias; allowed: alibi" in err
