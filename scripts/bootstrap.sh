#!/usr/bin/env bash
# Builds the virtual environment: finds a Python >= 3.12 and installs the pinned packages.
set -euo pipefail
venv=$1
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
# Else pip takes what an earlier build has left in this folder (miles.egg-info) for installed.
export PYTHONSAFEPATH=1

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

has_pip() { "$venv/bin/python" -c 'import pip' 2>/dev/null; }

has_uv() { command -v uv >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
        candidate=$(command -v "$candidate" 2>/dev/null) || continue
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    if has_uv; then
        # Not --system: that would leave out the versions that uv itself has installed.
        UV_PYTHON_DOWNLOADS=never uv python find --no-project '>=3.12' 2>/dev/null || true
    fi
}

if ! { [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python"; }; then
    python=$(find_python)
    if [ -z "$python" ]; then
        echo "Miles needs Python 3.12 or newer, and found none on PATH, in pyenv or in uv." >&2
        echo "Install one (apt install python3.12 python3.12-venv, pyenv install 3.12, or" >&2
        echo "uv python install 3.12) and run make again." >&2
        exit 1
    fi
    echo "Creating $venv with $python ($("$python" --version 2>&1))"
    rm -rf "$venv"
    # Debian's python3 has the module but not what it needs to install pip: it fails half-way.
    "$python" -m venv "$venv" >/dev/null 2>&1 || {
        rm -rf "$venv"
        has_uv || {
            echo "$python cannot make virtual environments: install python3-venv, or uv." >&2
            exit 1
        }
        uv venv --seed --python "$python" "$venv"
    }
fi

# An environment made by uv has no pip.
if ! has_pip; then
    "$venv/bin/python" -m ensurepip >/dev/null 2>&1 || {
        has_uv || {
            echo "$venv has no pip and cannot get it: remove $venv and run make again." >&2
            exit 1
        }
        uv pip install --python "$venv/bin/python" pip
    }
fi

echo "Installing packages (torch alone is several GB; a few minutes)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt torch transformers
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable '.[dev]'
