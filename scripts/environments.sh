# shellcheck shell=bash
# Sourced by the scripts beside it. Makes the environments they need out of Python 3.11 and pip; each function is
# quick when its environment is there already.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TOOLS="$ROOT/.venv-tools"

# The interpreter that everything is built on; uv must not download another one.
find_python() {
    local candidate
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    echo "error: found no Python 3.11 on PATH, which is what the pins are tested with; install it and run this again" >&2
    return 2
}

# uv does not read pip's settings: pass on where packages are and which certificates to trust.
hand_pip_settings_to_uv() {
    eval "$("$1" "$ROOT/scripts/pip_settings.py")"
}

# uv and tox, in an environment of their own, first on PATH.
use_tools() {
    local python wanted="$ROOT/scripts/requirements-tools.txt"
    python="$(find_python)" || return
    hand_pip_settings_to_uv "$python"
    if ! cmp -s "$wanted" "$TOOLS/installed.txt"; then
        echo "environment .venv-tools: uv and tox"
        # Without pip of its own: a Debian python3 has no ensurepip.
        "$python" -m venv --clear --without-pip "$TOOLS" || return
        "$python" -m pip --python "$TOOLS/bin/python" install --quiet --require-hashes --requirement "$wanted" || return
        cp "$wanted" "$TOOLS/installed.txt" || return
    fi
    # A run starts some fifteen Python processes; without bytecode each of them compiles all of its imports anew.
    unset PYTHONDONTWRITEBYTECODE
    export UV_PYTHON="${UV_PYTHON:-$python}" UV_PYTHON_DOWNLOADS=never
    # An active environment of the caller's is not the one meant here, and uv would warn about it each time.
    unset VIRTUAL_ENV PYTHONPATH
    export PATH="$TOOLS/bin:$PATH"
}

# Every package that uv installs from here on has the version and a file that uv.lock names. The lock file stays as it is:
# `uv sync` would write the address of this machine's package index into it.
use_pins() {
    local pins
    pins="$("$TOOLS/bin/python" "$ROOT/scripts/pins.py")" || return
    UV_CONSTRAINT="$TOOLS/pins.txt"
    printf '%s\n' "$pins" >"$UV_CONSTRAINT"
    # What the packages themselves are built with.
    UV_BUILD_CONSTRAINT="$ROOT/scripts/requirements-build.txt"
    export UV_CONSTRAINT UV_BUILD_CONSTRAINT
}

# An environment with some of the packages in it, as they are in the source tree. Leaves alone what a developer has added.
install_packages() {
    local environment="$ROOT/$1" python="$ROOT/$1/bin/python" package
    shift
    use_pins || return
    [ -x "$python" ] || uv venv --quiet "$environment" || return
    (cd "$ROOT" && uv pip install --quiet --python "$python" "${@/#/--editable=packages/}")
}

# The five packages, to train with, and what reads every format of prompt files.
sync_trainer() {
    echo "environment .venv: the five packages, Megatron-core and Ray"
    install_packages .venv slime-core "slime-convert[gguf]" "slime-rollout[parquet,datasets]" slime-megatron slime-launch
}

# The engine's own interpreter, as in real deployments: SGLang's needs do not touch the trainer's.
sync_engine() {
    echo "environment .venv-engine: SGLang"
    install_packages .venv-engine slime-core "slime-rollout[sglang]"
}

# Imports what a run imports, once for an installation: its byte-code and the caches of both halves are there then, not
# made while the first run waits for them. That it fails says nothing yet; the run will.
warm_up() {
    local stamp="$ROOT/.venv-engine/warm"
    [ "$stamp" -nt "$ROOT/uv.lock" ] && [ "$stamp" -nt "$ROOT/.venv/pyvenv.cfg" ] && return
    echo "byte-code of both environments, once"
    "$ROOT/.venv/bin/python" "$ROOT/scripts/warm_up.py" "$ROOT/.venv-engine/bin/python" && touch "$stamp"
    return 0
}

# The same for NVIDIA GPUs: SGLang with all that its wheel asks for, CUDA and its own torch; --no-config leaves our CPU
# list of its needs out.
sync_cuda_engine() {
    echo "environment .venv-engine: SGLang for CUDA"
    [ -x "$ROOT/.venv-engine/bin/python" ] || uv venv --quiet --no-project "$ROOT/.venv-engine" || return
    (cd "$ROOT" && env --unset=UV_CONSTRAINT uv pip install --quiet --no-config --no-sources \
        --python .venv-engine/bin/python \
        --editable packages/slime-core --editable packages/slime-rollout "sglang==$(pinned sglang)")
}

# What a cluster that runs jobs needs of Ray besides: its dashboard and that one's servers. After sync_trainer.
sync_ray_jobs() {
    echo "environment .venv: what Ray's jobs need"
    (cd "$ROOT" && uv pip install --quiet --python .venv/bin/python "ray[default]==$(pinned ray)")
}

# Transformer Engine for the trainer, in the range that Megatron-core 0.16.1 names. Its part for torch is compiled here.
sync_transformer_engine() {
    echo "environment .venv: Transformer Engine, compiled for this torch"
    (cd "$ROOT" && uv pip install --quiet --python .venv/bin/python setuptools wheel ninja pybind11 &&
        uv pip install --quiet --python .venv/bin/python --no-build-isolation "transformer-engine[core_cu13,pytorch]>=2.9,<2.12")
}

# The version of a package that uv.lock names.
pinned() {
    sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$TOOLS/pins.txt"
}

# An environment with what a requirements file beside this one says: `docs` and `mutants` have theirs.
sync_requirements() {
    local environment="$ROOT/.venv-$1" wanted="$ROOT/scripts/requirements-$1.txt"
    cmp -s "$wanted" "$environment/installed.txt" && return
    echo "environment .venv-$1: $2"
    use_pins || return
    uv venv --quiet --clear "$environment" || return
    uv pip install --quiet --python "$environment/bin/python" --requirement "$wanted" || return
    cp "$wanted" "$environment/installed.txt"
}
